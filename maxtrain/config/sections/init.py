"""The section `init`, and what must hold inside it."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from data_pipeline.base.config_key import AnyValueExcept, UsedBy, key
from data_pipeline.config import MAX_SEED

# Distributions whose deviation is a key of its own.
WITH_STD = ("truncated_normal", "normal")
# Parameters of a model that starts from saved weights are drawn only where init_partial names some.
_DRAWN = UsedBy(
    {"checkpoint.init_from": (None,), "checkpoint.init_partial": AnyValueExcept(())},
    "{key}={value} is not used with {cause}. Set checkpoint.init_from=null, or leave it out.",
    cause="checkpoint.init_from={config.checkpoint.init_from}",
)
_MUP = UsedBy(
    {"init.mup_base_width": AnyValueExcept(None)},
    "{key}={value} needs init.mup_base_width. "
    "Set init.mup_base_width={config.model.embed_dim}, or {key}=null.",
)


@dataclasses.dataclass(frozen=True)
class InitConfig:
    """Initial weights, and with muP how they and learning rates depend on width and depth; see
    models/init.py."""

    name: Literal[
        "lecun_normal",
        "xavier_normal",
        "xavier_uniform",
        "kaiming_normal",
        "kaiming_uniform",
        "truncated_normal",
        "normal",
    ] = key(
        "lecun_normal",
        "distribution of initial matrices; all but the uniform ones and `normal` are "
        "truncated at 2 deviations",
        used_by=_DRAWN,
    )
    std: float | None = key(
        None,
        "standard deviation of truncated_normal and normal; null for all others",
        above=0,
        high=1000,
        used_by=(
            UsedBy(
                {"init.name": WITH_STD},
                "{key}={value} is not used by {cause}, which computes its own. "
                "Set init.name=truncated_normal or normal, or init.std=null.",
            ),
            _DRAWN,
        ),
    )
    residual: Literal["none", "depth"] = key(
        "depth",
        "initial scale of matrices that write to the residual stream: none: like the rest; "
        "depth: 1 / sqrt(2 L) of it",
        used_by=_DRAWN,
    )
    embedding_std: float | None = key(
        None,
        "standard deviation of the embedding table; null: 1 / sqrt(D)",
        above=0,
        high=1000,
        used_by=_DRAWN,
    )
    scale: float = key(
        1.0,
        "factor of the standard deviation of every initial matrix",
        above=0,
        high=1000,
        used_by=_DRAWN,
    )
    seed: int | None = key(
        None,
        "seed of the initial weights; null: the root's seed",
        low=0,
        high=MAX_SEED,
        used_by=_DRAWN,
    )
    mup_base_width: int | None = key(
        None, "muP: embed_dim for which the learning rate was chosen; null: no muP", low=1
    )
    mup_base_head_dim: int | None = key(
        None,
        "muP: scale attention scores by 1 / head_dim, as usual at this head_dim; null: by 1 /"
        " sqrt(head_dim)",
        low=2,
        used_by=_MUP,
    )
    mup_base_depth: int | None = key(
        None,
        "muP: num_layers for which the learning rate was chosen; null: no scaling with depth",
        low=1,
        used_by=_MUP,
    )


def std_problems(init: InitConfig) -> Iterator[str]:
    """A distribution without the deviation that it needs."""
    if init.name in WITH_STD and init.std is None:
        yield (
            f"init.name={init.name} needs init.std, which is null. Set init.std=0.02, for example."
        )
