"""The section `distill`, and what must hold inside it."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from data_pipeline.base.config_key import AnyValueExcept, UsedBy, key
from data_pipeline.config import DataConfig
from maxtrain.config.sections import sampling

_DISTILL = UsedBy(
    {"objective": ("distill",)},
    "{key}={value} is not used with {cause}. Set objective=distill, or leave it out.",
)
_JSD = UsedBy({"distill.kind": ("jsd",)})
_STORED = UsedBy(
    {"distill.stored": AnyValueExcept(None)},
    "{key}={value} is of a stored teacher, and not used with {cause}. Set distill.stored=NAME, or "
    "leave it out.",
)
_ON_POLICY = UsedBy(
    {"distill.on_policy": (True,)},
    "{key}={value} is of completions that the student samples, and not used with {cause}. "
    "Set distill.on_policy=true, or leave it out.",
)


@dataclasses.dataclass(frozen=True)
class DistillConfig:
    """A frozen teacher, and how the model that is trained learns from its distributions."""

    teacher: str | None = key(
        None,
        "teacher model: a run of maxtrain, its RUN/checkpoints/STEP, or a Hugging Face "
        "directory; also a URL",
        path="any",
        used_by=_DISTILL,
    )
    stored: str | None = key(
        None,
        "name under which `maxtrain teach` has stored a teacher's top tokens beside all data",
        used_by=_DISTILL,
    )
    top: int = key(
        64,
        "number of the teacher's stored top tokens that are compared one by one; all others "
        "count as one",
        low=1,
        high=1 << 16,
        used_by=(_DISTILL, _STORED),
    )
    temperature: float = key(
        1.0,
        "temperature that divides the logits of teacher and student in the divergence",
        above=0,
        high=1000,
        used_by=_DISTILL,
    )
    weight: float = key(
        0.5,
        "weight of the divergence in the loss; the cross-entropy has weight 1 - this",
        low=0,
        high=1,
        used_by=_DISTILL,
    )
    kind: Literal["forward", "reverse", "jsd"] = key(
        "forward",
        "divergence: forward: KL(teacher || student); reverse: KL(student || teacher); jsd: "
        "generalized Jensen-Shannon divergence",
        used_by=_DISTILL,
    )
    beta: float = key(
        0.5,
        "jsd: share of the teacher in the mixture that both are compared with, between 0 and 1",
        above=0,
        high=1,
        used_by=(_DISTILL, _JSD),
    )
    on_policy: bool = key(
        False,
        "on-policy distillation: the data are prompts, and the student learns on its own "
        "completions",
        used_by=_DISTILL,
    )
    num_generations: int = sampling.num_generations(
        1, "completions sampled for each prompt", _DISTILL, _ON_POLICY
    )
    max_completion_length: int = sampling.max_completion_length(_DISTILL, _ON_POLICY)
    slots: int = sampling.slots(_DISTILL, _ON_POLICY)
    sampling_temperature: float = sampling.temperature(
        "temperature of the sampler", _DISTILL, _ON_POLICY
    )
    num_iterations: int = sampling.num_iterations(_DISTILL, _ON_POLICY)
    keep_rollouts: bool = sampling.keep_rollouts(_DISTILL, _ON_POLICY)
    mask_truncated_completions: bool = sampling.mask_truncated_completions(_DISTILL, _ON_POLICY)


def teacher_problems(objective: str, distill: DistillConfig) -> Iterator[str]:
    """Distillation without a teacher, a mixture that is the teacher, and a student that is to learn
    its own tokens."""
    if objective == "distill" and distill.on_policy and distill.weight != 1:
        yield (
            f"distill.weight={distill.weight} leaves a weight for the cross-entropy, and with "
            "distill.on_policy=True that is of tokens that the student has sampled itself. Set "
            "distill.weight=1."
        )
    if objective == "distill" and distill.kind == "jsd" and distill.beta == 1:
        yield (
            f"distill.beta={distill.beta} leaves nothing of the student in the mixture, and the "
            "divergence without a gradient. Set distill.beta=0.5, or distill.kind=reverse."
        )
    if objective == "distill" and distill.stored is not None and distill.on_policy:
        yield (
            f"distill.stored={distill.stored} is of the data's tokens, and with "
            "distill.on_policy=True the student makes others. Set distill.teacher in its place."
        )
    if objective == "distill" and distill.stored is not None and distill.teacher is not None:
        yield (
            f"distill.stored={distill.stored} and distill.teacher={distill.teacher} are two "
            "teachers. Keep one of them."
        )
    if objective == "distill" and distill.teacher is None and distill.stored is None:
        yield (
            "objective=distill needs a teacher, but distill.teacher=null. "
            "Set distill.teacher to a run of maxtrain or a Hugging Face directory, "
            "or objective=next_token."
        )


def stored_problems(distill: DistillConfig, data: DataConfig) -> Iterator[str]:
    """Batches in which a token does not see what the teacher saw before it."""
    if distill.stored is None:
        return
    rule = "and a stored teacher has read each document alone, as it is"
    if data.packing == "stream":
        yield (
            f"data.packing={data.packing} cuts documents, {rule}. Set data.packing=bins, pad or "
            "balanced."
        )
    if data.corruption.rate:
        yield f"data.corruption.rate={data.corruption.rate} replaces tokens, {rule}. Leave it out."
    if data.attend_across_documents:
        yield f"data.attend_across_documents=True joins documents, {rule}. Leave it out."
    if not data.restart_positions:
        yield (
            f"data.restart_positions=False moves documents, {rule}. Set "
            "data.restart_positions=true."
        )
