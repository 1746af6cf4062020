"""The sections `watchdog` and `integrity`: runs that hang, devices that compute wrongly."""

import dataclasses

from data_pipeline.base.config_key import key


@dataclasses.dataclass(frozen=True)
class WatchdogConfig:
    """Watchdog limits: how long a run may make no progress before it reports where it hangs and
    ends with exit 75; see observe/watchdog.py.
    """

    factor: float = key(
        10.0,
        "limit of a step, as a multiple of the usual time between two records; 0: no limit",
        low=0,
        high=1e6,
    )
    step_seconds: float = key(300.0, "smallest limit of a step, in seconds", low=0, high=1e8)
    compile_seconds: float = key(
        3600.0,
        "limit of compilation, and of steps before the third record, in seconds; 0: no limit",
        low=0,
        high=1e8,
    )
    eval_seconds: float = key(
        3600.0, "limit of one evaluation set, in seconds; 0: no limit", low=0, high=1e8
    )
    rollout_seconds: float = key(
        3600.0,
        "limit of rollout work without progress, such as its rewards, in seconds; 0: no limit",
        low=0,
        high=1e8,
    )
    save_seconds: float = key(
        1800.0,
        "limit of waiting for a save, and of a restore, in seconds; 0: no limit",
        low=0,
        high=1e8,
    )


@dataclasses.dataclass(frozen=True)
class IntegrityConfig:
    """Checks for errors of arithmetic and memory that no device reports. A run that finds one ends
    with exit 75, without saving."""

    replicas_interval: int = key(
        0,
        "steps between comparisons of array replicas on different devices, also done before "
        "each save; 0: never",
        low=0,
    )
    repeat_interval: int = key(
        0,
        "steps between repeated steps: a step is computed twice, from two copies of the "
        "state, and compared; 0: never",
        low=0,
    )
