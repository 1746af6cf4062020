"""Rows that are split over devices: what their length, the heads and the kernel must be, and what
can't be split with them."""

from collections.abc import Iterator

from maxtrain.config.across.rows import row_lengths
from maxtrain.config.schema import RunConfig
from maxtrain.config.words import multiples

# Kernels whose scores a ring can put together.
_IN_A_RING = ("xla", "eager")


def context_problems(config: RunConfig) -> Iterator[str]:
    """What does not go with mesh.context; an axis of a size that is not known yet has none."""
    if config.mesh.context <= 1:
        return
    yield from _length_problems(config)
    if config.model.context_attention == "ring":
        yield from _ring_problems(config)
    else:
        yield from _head_problems(config)


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
    """Kernels that are no ring, and what is drawn or counted by a token's place in the row."""
    model = config.model
    if model.attention not in _IN_A_RING:
        yield (
            f"model.attention={model.attention} reads whole rows, and with "
            f"model.context_attention=ring a device has mesh.context={config.mesh.context} parts "
            "of them one after the other. "
            "Set model.attention=xla, or model.context_attention=all_to_all."
        )
    regularization = config.regularization
    by_place = {
        "regularization.attention_dropout": regularization.attention_dropout,
        "regularization.residual_dropout": regularization.residual_dropout,
    }
    if model.lora.rank is not None:
        by_place["model.lora.dropout"] = model.lora.dropout
    for key, rate in by_place.items():
        if rate:
            yield (
                f"{key}={rate} draws by a token's place in the row, and "
                "model.context_attention=ring puts tokens in another order. "
                f"Set {key}=0, or model.context_attention=all_to_all."
            )
    if regularization.router_noise != "none":
        yield (
            f"regularization.router_noise={regularization.router_noise} draws by a token's place "
            "in the row, and model.context_attention=ring puts tokens in another order. "
            "Set regularization.router_noise=none, or model.context_attention=all_to_all."
        )
    factor = model.routing.capacity_factor
    if factor is not None:
        yield (
            f"model.routing.capacity_factor={factor} drops choices by a token's place in the row, "
            "and model.context_attention=ring puts tokens in another order. "
            "Set model.routing.capacity_factor=null, or model.context_attention=all_to_all."
        )


def _head_problems(config: RunConfig) -> Iterator[str]:
    """Heads that can't be dealt out, and weights that are dropped by their head."""
    model = config.model
    tensor = max(config.mesh.tensor, 1)
    context = config.mesh.context
    mend = "Set mesh.context to a divisor of it, or model.context_attention=ring."
    if model.num_heads % (tensor * context):
        yield (
            f"model.num_heads={model.num_heads} must be divisible by mesh.tensor={tensor} times "
            f"mesh.context={context}, as model.context_attention=all_to_all deals heads out. "
            f"{mend}"
        )
    kv_heads = (model.num_kv_heads or model.num_heads) // tensor
    if kv_heads and kv_heads % context and context % kv_heads:
        yield (
            f"mesh.context={context} must divide, or be divided by, the {kv_heads} key heads "
            "that a device of mesh.tensor has, as model.context_attention=all_to_all deals heads "
            f"out. {mend}"
        )
    rate = config.regularization.attention_dropout
    if rate:
        yield (
            f"regularization.attention_dropout={rate} draws for all heads of a row together, and "
            "model.context_attention=all_to_all gives a device some of them. "
            "Set regularization.attention_dropout=0."
        )
