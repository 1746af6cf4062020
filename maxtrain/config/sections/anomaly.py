"""The section `anomaly`, and what must hold inside it."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from data_pipeline.config_key import AllBut, UsedBy, key

# As training/watch.py orders them.
ANOMALIES = ("non_finite", "loss_spike", "grad_spike", "weight_drift", "dead", "diverging")
SpikePolicy = Literal["off", "warn", "skip", "rollback", "stop"]
# What earlier updates did is not undone by skipping one.
RunPolicy = Literal["off", "warn", "rollback", "stop"]

_LOOKED_AT = "{key}={value} is not used by {cause}. Set {reader}=warn, or leave it out."
_NO_ROLLBACK = (
    "{key}={value} is for the policy rollback, which no anomaly has. "
    "Set anomaly.loss_spike=rollback, for example, or leave it out."
)
_ROLLBACKS = {f"anomaly.{kind}": ("rollback",) for kind in ANOMALIES}


@dataclasses.dataclass(frozen=True)
class AnomalyConfig:
    """What to do about a step or a run that is not well: a key for each kind, then limits. Judged
    by training/watch.py.

    off: not looked at. warn: told. skip: the step changes nothing. rollback: from an earlier
    checkpoint on, without the data there. stop: saved as before that step, exit 70.
    """

    non_finite: Literal["skip", "rollback", "stop"] = key(
        "skip", "loss or gradient is not finite; no such update is ever made"
    )
    loss_spike: SpikePolicy = key(
        "warn", "loss above the median of the window by loss_limit deviations"
    )
    grad_spike: SpikePolicy = key(
        "warn", "gradient norm above the median of the window by grad_limit deviations"
    )
    weight_drift: RunPolicy = key(
        "off",
        "norm of all weights away from its median by a share of drift_limit; reads all weights",
    )
    dead: RunPolicy = key("warn", "for dead_steps no gradient, or always the very same loss")
    diverging: RunPolicy = key(
        "warn", "median of the loss above the lowest one there was, times diverging_limit"
    )
    window: int = key(128, "accepted steps that medians and deviations are of", low=4, high=256)
    min_steps: int = key(
        32, "accepted steps before anything is compared with them", low=4, high=256
    )
    loss_limit: float = key(
        10.0,
        "deviations, of 1.4826 times the median absolute one, that a loss may be above",
        above=0,
        used_by=UsedBy({"anomaly.loss_spike": AllBut("off")}, _LOOKED_AT),
    )
    grad_limit: float = key(
        20.0,
        "deviations that a gradient norm may be above",
        above=0,
        used_by=UsedBy({"anomaly.grad_spike": AllBut("off")}, _LOOKED_AT),
    )
    drift_limit: float = key(
        0.1,
        "share of their median by which the norm of all weights may change",
        above=0,
        used_by=UsedBy({"anomaly.weight_drift": AllBut("off")}, _LOOKED_AT),
    )
    diverging_limit: float = key(
        1.5,
        "what the median of the loss may be, as a multiple of the lowest one",
        above=1,
        used_by=UsedBy({"anomaly.diverging": AllBut("off")}, _LOOKED_AT),
    )
    dead_steps: int = key(
        16,
        "steps in a row that are as dead before that is one",
        low=1,
        used_by=UsedBy({"anomaly.dead": AllBut("off")}, _LOOKED_AT),
    )
    patience: int = key(
        8,
        "spikes in a row before their level is taken for the new one, and the window begins afresh",
        low=1,
        used_by=UsedBy(
            {"anomaly.loss_spike": AllBut("off"), "anomaly.grad_spike": AllBut("off")}, _LOOKED_AT
        ),
    )
    max_skipped: int = key(
        8,
        "non-finite steps in a row that are skipped before the run stops with exit 70",
        low=0,
        used_by=UsedBy(
            {"anomaly.non_finite": ("skip",)},
            "{key}={value} is not used by {cause}. Set anomaly.non_finite=skip, or leave it out.",
        ),
    )
    leave_out: int = key(
        8,
        "steps that are left out, up to and with the one that was found",
        low=1,
        used_by=UsedBy(
            _ROLLBACKS | {"data.repeated": ("rollback",)},
            _NO_ROLLBACK,
            cause="no policy rollback",
            help="the policy rollback of an anomaly or of data.repeated",
        ),
    )
    max_rollbacks: int = key(
        4,
        "rollbacks of a run before the next anomaly stops it",
        low=0,
        used_by=UsedBy(
            _ROLLBACKS | {"data.repeated": ("rollback", "skip")},
            _NO_ROLLBACK,
            cause="no policy rollback",
            help="the policy rollback of an anomaly or of data.repeated, or data.repeated=skip",
        ),
    )


def window_problems(anomaly: AnomalyConfig) -> Iterator[str]:
    """A window that never has as many steps as anything is compared with."""
    least = anomaly.min_steps
    window = anomaly.window
    if least > window:
        yield (
            f"anomaly.min_steps={least} must be at most anomaly.window={window}, which it fills. "
            f"Set anomaly.min_steps to at most {window}, or anomaly.window to at least {least}."
        )
