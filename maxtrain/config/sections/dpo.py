"""The section `dpo`, and what must hold inside it."""

import dataclasses
from collections.abc import Iterator
from typing import Literal, get_args

from data_pipeline.base.config_key import UsedBy, key
from data_pipeline.config import DataConfig

_DPO = UsedBy(
    {"objective": ("dpo",)},
    "{key}={value} is not used with {cause}. Set objective=dpo, or leave it out.",
)
# Losses in which the reference occurs.
_Comparing = Literal[
    "sigmoid",
    "sigmoid_norm",
    "robust",
    "hinge",
    "ipo",
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
]
# Losses of single answers with a label.
_Unpaired = Literal["kto", "apo_zero_unpaired"]
UNPAIRED: frozenset[str] = frozenset(get_args(_Unpaired))
# Losses that compare with a reference.
COMPARED: frozenset[str] = frozenset(get_args(_Comparing)) | UNPAIRED
_SMOOTHED = UsedBy({"dpo.loss_type": ("sigmoid", "sigmoid_norm", "robust", "exo_pair", "simpo")})
_WITH_MARGIN = UsedBy({"dpo.loss_type": ("simpo",)})
_WITH_REFERENCE = UsedBy(
    {"dpo.loss_type": tuple(sorted(COMPARED))},
    "{key}={value} is not used with {cause}, which is free of a reference. Leave it out.",
)
_WITH_LABELS = UsedBy({"dpo.loss_type": get_args(_Unpaired)})
_OF_PAIRS = UsedBy(
    {"dpo.loss_type": (*get_args(_Comparing), "simpo", "orpo")},
    "{key}={value} is not used with {cause}, whose answers are no pairs. Leave it out.",
)


@dataclasses.dataclass(frozen=True)
class DpoConfig:
    """Preference optimization: training on pairs of answers, of which one was preferred, or on
    labelled answers.
    """

    loss_type: Literal[_Comparing, "simpo", "orpo", _Unpaired] = key(
        "sigmoid",
        "preference loss; sigmoid: DPO, or cDPO with label_smoothing; simpo, orpo: without a "
        "reference; kto, apo_zero_unpaired: for labelled answers",
        used_by=_DPO,
    )
    beta: float = key(
        0.1,
        "strength of the pull to the reference model: larger keeps the policy closer; simpo: "
        "usual 2; orpo: weight of the odds ratio",
        above=0,
        high=1000,
        used_by=_DPO,
    )
    label_smoothing: float = key(
        0.0,
        "share of pairs whose labels are assumed to be wrong",
        low=0,
        high=0.49,
        used_by=(_DPO, _SMOOTHED),
    )
    margin: float = key(
        0.0,
        "margin by which the chosen answer must win",
        low=0,
        high=1000,
        used_by=(_DPO, _WITH_MARGIN),
    )
    sft_weight: float | None = key(
        None,
        "weight of the cross-entropy of chosen answers; null: 1 for orpo, else 0",
        low=0,
        high=1000,
        used_by=(_DPO, _OF_PAIRS),
    )
    desirable_weight: float = key(
        1.0,
        "weight of answers that are labelled good",
        low=0,
        high=1000,
        used_by=(_DPO, _WITH_LABELS),
    )
    undesirable_weight: float = key(
        1.0,
        "weight of answers that are labelled bad",
        low=0,
        high=1000,
        used_by=(_DPO, _WITH_LABELS),
    )
    reference: str | None = key(
        None,
        "reference model: a run or a Hugging Face directory, also a URL; null: the model "
        "without its adapters, or else its weights at the start",
        path="any",
        used_by=(_DPO, _WITH_REFERENCE),
    )
    reference_logprobs: Literal["computed", "stored"] = key(
        "computed",
        "when the reference log-probabilities are computed: computed: in each step; stored: "
        "once, and kept beside the data",
        used_by=(_DPO, _WITH_REFERENCE),
    )


def stored_reference_problems(objective: str, dpo: DpoConfig, data: DataConfig) -> Iterator[str]:
    """Losses that ask the reference about more than the data, and data that is another each
    time."""
    if objective != "dpo" or dpo.reference_logprobs != "stored":
        return
    if dpo.loss_type == "kto":
        yield (
            "dpo.reference_logprobs=stored has those of answers behind their own prompts, and "
            "dpo.loss_type=kto needs them behind other prompts of each batch, too. Set "
            "dpo.reference_logprobs=computed, or dpo.loss_type=apo_zero_unpaired."
        )
    if data.corruption.rate:
        yield (
            f"dpo.reference_logprobs=stored, but data.corruption.rate={data.corruption.rate} "
            "replaces other tokens in each epoch. Set dpo.reference_logprobs=computed, or leave "
            "data.corruption out."
        )


def smoothing_problems(objective: str, dpo: DpoConfig) -> Iterator[str]:
    """A loss that takes the logarithm of the share of wrong labels."""
    if objective == "dpo" and dpo.loss_type == "exo_pair" and dpo.label_smoothing == 0:
        yield (
            "dpo.label_smoothing=0.0 must be above 0 with dpo.loss_type=exo_pair, which takes its "
            "logarithm. Set dpo.label_smoothing=0.001."
        )


def packing_problems(objective: str, data: DataConfig) -> Iterator[str]:
    """Batches whose rows do not hold whole answers, each apart from the others."""
    if objective not in ("dpo", "reward"):
        return
    if data.packing == "stream":
        yield (
            f"data.packing=stream cuts documents, and objective={objective} needs whole answers. "
            "Set data.packing=bins, balanced or pad."
        )
    if data.attend_across_documents:
        yield (
            "data.attend_across_documents=True lets an answer see another one, and "
            f"objective={objective} compares them. Leave it out."
        )
    if not data.restart_positions:
        yield (
            "data.restart_positions=False begins an answer where the one before it ends, and "
            f"objective={objective} compares them. Leave it out."
        )
