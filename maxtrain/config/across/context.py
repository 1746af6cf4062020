"""Rows that are split over devices: what their length, the heads and the kernel must be, and what
can't be split with them."""

import dataclasses
from collections.abc import Iterator

from maxtrain.config.across.rows import row_lengths
from maxtrain.config.kernels import AUTO, candidates
from maxtrain.config.schema import RunConfig
from maxtrain.config.words import multiples, rule_of


def context_problems(config: RunConfig) -> Iterator[str]:
    """Yield the settings that do not go with mesh.context; a mesh axis without a known size has no
    problems.
    """
    context = config.mesh.context
    is_open = config.mesh.preset == "long_context"
    if config.model.attention == "ring" and context == 1 and not is_open:
        yield (
            "model.attention=ring is for rows that are split over devices, and mesh.context is 1. "
            "Set model.attention=xla, or mesh.context=2 or more."
        )
    if context <= 1:
        return
    yield from _length_problems(config)
    if config.model.attention == AUTO:
        yield from _problems_of_all(config)
    else:
        yield from _exchange_problems(config)


def _exchange_problems(config: RunConfig) -> Iterator[str]:
    """Yield the settings with which a kernel cannot let tokens on different devices see each
    other.
    """
    if config.model.attention == "ring":
        yield from _ring_problems(config)
    elif config.model.attention != "eager":
        yield from _head_problems(config)


def _problems_of_all(config: RunConfig) -> Iterator[str]:
    """Yield a problem if no kernel that auto may choose supports the split rows. Kernels of one
    platform split rows as xla does.
    """
    drops_weights = config.regularization.attention_dropout > 0
    rules: list[str] = []
    for kernel in candidates(None, True, drops_weights):
        model = dataclasses.replace(config.model, attention=kernel)
        problems = list(_exchange_problems(dataclasses.replace(config, model=model)))
        if not problems:
            return
        rules += [rule_of(problem) for problem in problems]
    yield (
        f"model.attention=auto finds no kernel for rows that mesh.context={config.mesh.context} "
        f"splits: {'; '.join(rules)}. Set mesh.context=1, or change the settings that one of "
        "them excludes."
    )


def _length_problems(config: RunConfig) -> Iterator[str]:
    """Each part has two pieces, of the beginning and of the end of a row."""
    unit = 2 * config.mesh.context
    for key, length in row_lengths(config).items():
        if length % unit:
            yield (
                f"{key}={length} must be divisible by 2 times mesh.context="
                f"{config.mesh.context}. Set {key} to {multiples(length, unit)}."
            )


def _ring_problems(config: RunConfig) -> Iterator[str]:
    """Yield the settings that draw or count by a token's place in the row, which ring attention
    cannot do.
    """
    model = config.model
    regularization = config.regularization
    excluded: dict[str, tuple[object, str]] = {}
    for key, rate in (
        ("regularization.attention_dropout", regularization.attention_dropout),
        ("regularization.residual_dropout", regularization.residual_dropout),
        ("model.lora.dropout", model.lora.dropout),
    ):
        if rate:
            excluded[key] = (rate, "0")
    if regularization.router_noise != "none":
        excluded["regularization.router_noise"] = (regularization.router_noise, "none")
    if model.routing.capacity_factor is not None:
        excluded["model.routing.capacity_factor"] = (model.routing.capacity_factor, "null")
    for key, (value, nothing) in excluded.items():
        yield (
            f"{key}={value} goes by a token's place in the row, and model.attention=ring puts "
            f"tokens in another order. Set {key}={nothing}, or model.attention=xla."
        )


def _head_problems(config: RunConfig) -> Iterator[str]:
    """Heads that can't be dealt out, and weights that are dropped by their head."""
    model = config.model
    tensor = max(config.mesh.tensor, 1)
    context = config.mesh.context
    kernel = f"model.attention={model.attention}"
    fix = "Set mesh.context to one of its divisors, or model.attention=ring."
    if model.num_heads % (tensor * context):
        yield (
            f"model.num_heads={model.num_heads} must be divisible by mesh.tensor={tensor} times "
            f"mesh.context={context}, over which {kernel} deals heads out. {fix}"
        )
    kv_heads = (model.num_kv_heads or model.num_heads) // tensor
    if kv_heads and kv_heads % context and context % kv_heads:
        yield (
            f"mesh.context={context} must be a multiple or a divisor of the {kv_heads} key heads "
            f"that a device of mesh.tensor has, since {kernel} deals heads out. {fix}"
        )
