"""The section `anomaly`, and what must hold inside it."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from data_pipeline.base.config_key import AnyValueExcept, UsedBy, key

# As train_step/anomaly_state.py orders them.
ANOMALIES = ("non_finite", "loss_spike", "grad_spike", "weight_drift", "dead", "diverging")
SpikePolicy = Literal["off", "warn", "skip", "rollback", "stop"]
# Without skip: skipping one step would not undo what earlier updates did.
RunPolicy = Literal["off", "warn", "rollback", "stop"]

_LOOKED_AT = "{key}={value} is not used by {cause}. Set {reader}=warn, or leave it out."
_NO_ROLLBACK = (
    "{key}={value} is for the policy rollback, which no anomaly has. "
    "Set anomaly.loss_spike=rollback, for example, or leave it out."
)
_ROLLBACKS = {f"anomaly.{kind}": ("rollback",) for kind in ANOMALIES}


@dataclasses.dataclass(frozen=True)
class AnomalyConfig:
    """Policy for each kind of anomaly, then limits. See train_step/anomaly_state.py.

    off: not checked. warn: print a message. skip: the step changes nothing. rollback: go back to an
    earlier checkpoint, and leave these steps out. stop: save the state before the step, exit 70.
    """

    non_finite: Literal["skip", "rollback", "stop"] = key(
        "skip", "loss or gradient is not finite; such an update is never applied"
    )
    loss_spike: SpikePolicy = key(
        "warn", "loss is above the median of the window by more than loss_limit deviations"
    )
    grad_spike: SpikePolicy = key(
        "warn", "gradient norm is above the median of the window by more than grad_limit deviations"
    )
    weight_drift: RunPolicy = key(
        "off",
        "norm of all weights differs from its median by more than drift_limit; reads all weights",
    )
    dead: RunPolicy = key("warn", "no gradient, or exactly the same loss, for dead_steps steps")
    diverging: RunPolicy = key(
        "warn", "median of the loss is above its lowest value so far times diverging_limit"
    )
    window: int = key(
        128, "accepted steps from which medians and deviations are computed", low=4, high=256
    )
    min_steps: int = key(32, "accepted steps before checks begin", low=4, high=256)
    loss_limit: float = key(
        10.0,
        "largest distance of a loss above the median, in deviations (1.4826 x median absolute"
        " deviation)",
        above=0,
        used_by=UsedBy({"anomaly.loss_spike": AnyValueExcept("off")}, _LOOKED_AT),
    )
    grad_limit: float = key(
        20.0,
        "largest distance of a gradient norm above the median, in deviations",
        above=0,
        used_by=UsedBy({"anomaly.grad_spike": AnyValueExcept("off")}, _LOOKED_AT),
    )
    drift_limit: float = key(
        0.1,
        "largest change of the norm of all weights, as a share of its median",
        above=0,
        used_by=UsedBy({"anomaly.weight_drift": AnyValueExcept("off")}, _LOOKED_AT),
    )
    diverging_limit: float = key(
        1.5,
        "largest median of the loss, as a multiple of its lowest value so far",
        above=1,
        used_by=UsedBy({"anomaly.diverging": AnyValueExcept("off")}, _LOOKED_AT),
    )
    dead_steps: int = key(
        16,
        "steps in a row without a gradient, or with the same loss, that count as an anomaly",
        low=1,
        used_by=UsedBy({"anomaly.dead": AnyValueExcept("off")}, _LOOKED_AT),
    )
    patience: int = key(
        8,
        "spikes in a row after which their level counts as normal, and the window starts again",
        low=1,
        used_by=UsedBy(
            {
                "anomaly.loss_spike": AnyValueExcept("off"),
                "anomaly.grad_spike": AnyValueExcept("off"),
            },
            _LOOKED_AT,
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
        "steps that a rollback leaves out, up to and with the step of the anomaly",
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
        "most rollbacks of a run; the next anomaly stops it",
        low=0,
        used_by=UsedBy(
            _ROLLBACKS | {"data.repeated": ("rollback", "skip")},
            _NO_ROLLBACK,
            cause="no policy rollback",
            help="the policy rollback of an anomaly or of data.repeated, or data.repeated=skip",
        ),
    )


def window_problems(anomaly: AnomalyConfig) -> Iterator[str]:
    """A window that is too short for min_steps."""
    least = anomaly.min_steps
    window = anomaly.window
    if least > window:
        yield (
            f"anomaly.min_steps={least} must be at most anomaly.window={window}, the window's "
            f"length. Set anomaly.min_steps to at most {window}, or anomaly.window to at least "
            f"{least}."
        )
