"""The section `model.pipeline`."""

import dataclasses
from typing import Literal

from data_pipeline.base.config_key import AnyValueExcept, UsedBy, key

_STAGED = UsedBy(
    {"mesh.stage": AnyValueExcept(1), "mesh.dcn_stage": AnyValueExcept(1)},
    "{key}={value} is not used with {cause}. Set mesh.stage=2, for example, or leave it out.",
)


@dataclasses.dataclass(frozen=True)
class PipelineConfig:
    """Schedule of rows through the pipeline stages of the mesh."""

    micro_batches: int | None = key(
        None,
        "pipeline micro-batches in each micro-batch of accumulation; null: one row of each "
        "device at a time",
        low=1,
        high=1 << 20,
        used_by=_STAGED,
    )
    rounds: int = key(
        1,
        "blocks of layers in each stage, so that a row passes all stages this often "
        "(interleaved schedule)",
        low=1,
        high=1 << 10,
        used_by=_STAGED,
    )
    schedule: Literal["gpipe", "1f1b"] = key(
        "gpipe",
        "gpipe: all micro-batches forward, then all backward; 1f1b: each backward pass as "
        "soon as possible, so that stages hold fewer activations",
        used_by=_STAGED,
    )
