"""The section `distill`, and what must hold inside it."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from data_pipeline.config_key import UsedBy, key

_DISTILL = UsedBy(
    {"objective": ("distill",)},
    "{key}={value} is not used with {cause}. Set objective=distill, or leave it out.",
)
_JSD = UsedBy({"distill.kind": ("jsd",)})


@dataclasses.dataclass(frozen=True)
class DistillConfig:
    """A frozen teacher, and how the model that is trained learns from its distributions."""

    teacher: str | None = key(
        None,
        "the teacher: a run of maxtrain, its RUN/checkpoints/STEP, or a Hugging Face directory",
        path="local",
        used_by=_DISTILL,
    )
    temperature: float = key(
        1.0,
        "divides the logits of teacher and student in the divergence",
        above=0,
        high=1000,
        used_by=_DISTILL,
    )
    weight: float = key(
        0.5,
        "weight of the divergence in the loss; 1 - weight is that of the cross-entropy",
        low=0,
        high=1,
        used_by=_DISTILL,
    )
    kind: Literal["forward", "reverse", "jsd"] = key(
        "forward",
        "forward: KL(teacher || student); reverse: KL(student || teacher); jsd: that of Jensen and "
        "Shannon, between both",
        used_by=_DISTILL,
    )
    beta: float = key(
        0.5,
        "share of the teacher in the mixture that both are compared with, between 0 and 1",
        above=0,
        high=1,
        used_by=(_DISTILL, _JSD),
    )


def teacher_problems(objective: str, distill: DistillConfig) -> Iterator[str]:
    """Distillation without a teacher, and a mixture that is the teacher."""
    if objective == "distill" and distill.kind == "jsd" and distill.beta == 1:
        yield (
            f"distill.beta={distill.beta} leaves nothing of the student in the mixture, and the "
            "divergence without a gradient. Set distill.beta=0.5, or distill.kind=reverse."
        )
    if objective == "distill" and distill.teacher is None:
        yield (
            "objective=distill needs a teacher, but distill.teacher=null. "
            "Set distill.teacher to a run of maxtrain or a Hugging Face directory, "
            "or objective=next_token."
        )
