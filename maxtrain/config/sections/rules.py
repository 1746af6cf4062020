"""The section `mesh.rules`, and what must hold inside it."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from data_pipeline.base.config_key import key

Axis = Literal["data", "stage", "fsdp", "context", "expert", "tensor"]


@dataclasses.dataclass(frozen=True)
class RulesConfig:
    """Sharding rules: the mesh axes that split each dim of parameters and of their optimizer state
    in storage; the first axis is the outermost. Axes of size 1 split nothing.
    """

    embed: tuple[Axis, ...] = key(
        ("fsdp", "expert"), "model width, in all matrices except those of experts"
    )
    expert_embed: tuple[Axis, ...] = key(("fsdp",), "model width, in matrices of experts")
    # Stages have parts of what is before and behind the layers.
    vocab: tuple[Axis, ...] = key(("stage", "tensor"), "vocabulary entries")
    positions: tuple[Axis, ...] = key((), "learned position embeddings")
    mlp: tuple[Axis, ...] = key(("tensor",), "hidden units of feed-forward blocks")
    heads: tuple[Axis, ...] = key(("tensor",), "query heads")
    kv_heads: tuple[Axis, ...] = key(("tensor",), "key/value heads")
    head_dim: tuple[Axis, ...] = key((), "dims of a head")
    latent: tuple[Axis, ...] = key(("fsdp", "expert"), "compressed queries, keys and values")
    rank: tuple[Axis, ...] = key((), "rank of adapters, and outputs of compressing matrices")
    norm: tuple[Axis, ...] = key((), "scales of norms, and biases of the model's width")
    # Over `expert`, experts are split by their number, and other weights as over `fsdp`.
    exp: tuple[Axis, ...] = key(("expert",), "experts")
    router: tuple[Axis, ...] = key((), "outputs of routers")


def rule_problems(rules: RulesConfig) -> Iterator[str]:
    """Axes that a rule names twice."""
    for name, axes in dataclasses.asdict(rules).items():
        for axis in dict.fromkeys(axes):
            if axes.count(axis) == 1:
                continue
            without = ", ".join(dict.fromkeys(axes))
            yield (
                f"mesh.rules.{name} names {axis} more than once, and a dim is split over an axis "
                f"once. Set mesh.rules.{name}=[{without}]."
            )


def changed_rules(rules: RulesConfig) -> dict[str, tuple[Axis, ...]]:
    """The rules that are not the usual ones, by name."""
    usual = dataclasses.asdict(RulesConfig())
    return {name: axes for name, axes in dataclasses.asdict(rules).items() if axes != usual[name]}


def rule_words(rules: RulesConfig) -> str:
    """The rules that are not the usual ones, as they are set; empty: all are usual."""
    words = [f"{name}=[{', '.join(axes)}]" for name, axes in changed_rules(rules).items()]
    return " ".join(words)
