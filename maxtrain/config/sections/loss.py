"""The sections `loss` and `regularization`, and what must hold inside them."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from data_pipeline.base.config_key import AnyValueExcept, UsedBy, key
from maxtrain.config.limits import as_float32
from maxtrain.config.sections.moe import EXPERTS

_ADVERSARIAL = UsedBy(
    {"loss.adversarial": AnyValueExcept(0.0)},
    "{key}={value} is not used with {cause}. Set loss.adversarial=1, or leave it out.",
)


# Of losses of the next token.
OF_NEXT_TOKEN = UsedBy(
    {"objective": ("next_token", "distill")},
    "{key}={value} is not used with {cause}. Leave it out.",
)

_ROUTER_NOISE = UsedBy(
    {"regularization.router_noise": AnyValueExcept("none")},
    "{key}={value} is not used with {cause}. Set regularization.router_noise=gaussian, or leave it "
    "out.",
)


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """Terms and changes of the loss, which by default is the cross-entropy of the next token."""

    label_smoothing: float = key(
        0.0,
        "label smoothing: share of a target's probability that is spread over the whole vocabulary",
        low=0,
        high=1,
        used_by=OF_NEXT_TOKEN,
    )
    z_loss: float = key(
        0.0,
        "weight of the z-loss, the mean of logsumexp(logits)^2, which keeps logits from "
        "drifting; usual: 1e-4",
        low=0,
        high=1000,
        used_by=OF_NEXT_TOKEN,
    )
    adversarial: float = key(
        0.0,
        "weight of the adversarial loss, computed at the worst embeddings nearby; see "
        "objectives/adversarial.py",
        low=0,
        high=1000,
    )
    adversarial_radius: float = key(
        1.0,
        "largest Euclidean distance by which the embeddings of a row are moved",
        above=0,
        high=1e6,
        used_by=_ADVERSARIAL,
    )
    adversarial_steps: int = key(
        1,
        "1: one step along the gradient (FGM); more: projected steps (PGD)",
        low=1,
        high=1000,
        used_by=_ADVERSARIAL,
    )
    by_source: bool = key(
        False, "also record the loss of each training source", used_by=OF_NEXT_TOKEN
    )


@dataclasses.dataclass(frozen=True)
class RegularizationConfig:
    """Dropout and noise in a training step, drawn from a key for each row; off in evaluation and
    generation."""

    attention_dropout: float = key(
        0.0,
        "probability of dropping each attention weight; needs model.attention=eager or auto",
        low=0,
    )
    residual_dropout: float = key(
        0.0, "dropout of the output of each block before it is added to the residual stream", low=0
    )
    embedding_dropout: float = key(0.0, "dropout of the token embeddings", low=0)
    stochastic_depth: float = key(
        0.0,
        "probability of skipping the blocks of the last layer for a row; lower in earlier layers",
        low=0,
    )
    embedding_noise: float = key(
        0.0,
        "NEFTune's alpha: uniform noise of alpha / sqrt(T D) on token embeddings; 0: none",
        low=0,
        high=1e6,
    )
    router_noise: Literal["none", "jitter", "gaussian", "gumbel"] = key(
        "none",
        "noise of expert routers: a random factor of their inputs, or noise added to their logits",
        used_by=EXPERTS,
    )
    router_noise_scale: float = key(
        0.01,
        "scale of the router noise: the largest change of a factor, or the deviation of added"
        " noise",
        above=0,
        high=1000,
        used_by=_ROUTER_NOISE,
    )
    router_noise_steps: int | None = key(
        None,
        "steps over which the router noise falls linearly to 0; null: it stays",
        low=1,
        used_by=_ROUTER_NOISE,
    )


_PROBABILITIES = ("attention_dropout", "residual_dropout", "embedding_dropout", "stochastic_depth")


def probability_problems(regularization: RegularizationConfig) -> Iterator[str]:
    """Probabilities that round to 1 in float32: everything would be dropped."""
    for name in _PROBABILITIES:
        rate = getattr(regularization, name)
        if as_float32(rate) >= 1:
            yield (
                f"regularization.{name}={rate} must be less than 1. "
                f"Set regularization.{name}=0.1, for example."
            )
