"""The section `train`: which parameters train, and where they wait."""

import dataclasses
from typing import Literal

from data_pipeline.base.config_key import key


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Selection of the parameters that train. The others are frozen: no gradient, no moments, saved
    once per run.
    """

    only: tuple[str, ...] = key(
        (),
        "regular expressions: train only parameters whose path contains a match; empty: all",
    )
    freeze: tuple[str, ...] = key(
        (), "regular expressions: freeze parameters whose path contains a match"
    )
    on_host: Literal["none", "frozen", "all"] = key(
        "none",
        "layer weights that are kept in host memory; devices fetch them layer by layer",
    )
