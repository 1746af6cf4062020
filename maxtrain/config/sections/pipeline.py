"""The section `model.pipeline`."""

import dataclasses
from typing import Literal

from data_pipeline.base.config_key import AllBut, UsedBy, key

_STAGED = UsedBy(
    {"mesh.stage": AllBut(1), "mesh.dcn_stage": AllBut(1)},
    "{key}={value} is not used with {cause}. Set mesh.stage=2, for example, or leave it out.",
)


@dataclasses.dataclass(frozen=True)
class PipelineConfig:
    """How rows go through the stages of the mesh."""

    micro_batches: int | None = key(
        None,
        "parts of a micro-batch that follow each other through stages; null: a row of each device",
        low=1,
        high=1 << 20,
        used_by=_STAGED,
    )
    rounds: int = key(
        1,
        "how often a row goes around: stages have so many blocks of layers each",
        low=1,
        high=1 << 10,
        used_by=_STAGED,
    )
    schedule: Literal["gpipe", "1f1b"] = key(
        "gpipe",
        "gpipe: all micro-batches forward, then all backward; 1f1b: each backward as soon as it "
        "can be, so that stages keep few",
        used_by=_STAGED,
    )
