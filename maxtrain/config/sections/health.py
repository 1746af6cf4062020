"""The sections `watchdog` and `integrity`: runs that hang, devices that compute wrongly."""

import dataclasses

from data_pipeline.base.config_key import key


@dataclasses.dataclass(frozen=True)
class WatchdogConfig:
    """How long a run may make no progress before it reports where it hangs and ends with exit 75;
    see observe/watchdog.py."""

    factor: float = key(
        10.0,
        "limit of a step, as a multiple of the usual time between two records; 0: none",
        low=0,
        high=1e6,
    )
    step_seconds: float = key(300.0, "smallest limit of a step", low=0, high=1e8)
    compile_seconds: float = key(
        3600.0,
        "limit of compiling, and of a step before the third record; 0: none",
        low=0,
        high=1e8,
    )
    eval_seconds: float = key(3600.0, "limit of one evaluation set; 0: none", low=0, high=1e8)
    rollout_seconds: float = key(
        3600.0,
        "limit of what a rollout does without a sign of life, such as its rewards; 0: none",
        low=0,
        high=1e8,
    )
    save_seconds: float = key(
        1800.0, "limit of waiting for a save, and of a restore; 0: none", low=0, high=1e8
    )


@dataclasses.dataclass(frozen=True)
class IntegrityConfig:
    """Checks for errors of arithmetic and memory that no device reports. A run that finds one ends
    with exit 75, without saving."""

    replicas_interval: int = key(
        0,
        "steps between comparisons of the copies of arrays on different devices; "
        "also before each save; 0: never",
        low=0,
    )
    repeat_interval: int = key(
        0,
        "every so many steps, one is made twice, from two copies of the state, and compared; "
        "0: never",
        low=0,
    )
