"""The section `train`: which parameters train, and where they wait."""

import dataclasses
from typing import Literal

from data_pipeline.base.config_key import key


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Which parameters train. The others are frozen: no gradient, no moments, saved once per
    run."""

    only: tuple[str, ...] = key(
        (),
        "regular expressions: train the parameters in whose path one is found; empty: all",
    )
    freeze: tuple[str, ...] = key(
        (), "regular expressions: do not train the parameters in whose path one is found"
    )
    on_host: Literal["none", "frozen", "all"] = key(
        "none",
        "which weights of layers lie in the memory of hosts; devices fetch them layer by layer",
    )
