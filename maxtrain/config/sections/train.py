"""The section `train`: which parameters train."""

import dataclasses

from data_pipeline.config_key import key


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
