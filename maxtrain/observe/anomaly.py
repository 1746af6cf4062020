"""Messages about anomalies: the step, its numbers, the parameter, the data rows, and the action
taken.

Nothing is decided here: the device has done so before the update (train_step/anomaly_state.py), and
reports it in the step's metrics.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from maxtrain.config.schema import ANOMALIES, AnomalyConfig

_MEND = {
    "non_finite": "Lower optimizer.learning_rate, or look at the data there",
    "loss_spike": "Look at the data there; skip or rollback leave such steps out",
    "grad_spike": "Look at the data there; skip or rollback leave such steps out",
    "weight_drift": "Lower optimizer.learning_rate, or raise optimizer.weight_decay",
    "dead": "Raise optimizer.learning_rate, or look at the initial weights",
    "diverging": "Lower optimizer.learning_rate, or make schedule.warmup_steps more",
}


class Finding(NamedTuple):
    """An anomaly of a step, which is the number of finished steps with this one."""

    step: int
    kind: str
    policy: str
    message: str
    fix: str


class Anomalies:
    """Turns metrics into findings.

    Args:
        config: what is done about which anomaly.
        leaves: names of the parameters, and after them of the arrays of the optimizer's state.
        rows: says what data a step (from 0) reads.
    """

    def __init__(self, config: AnomalyConfig, leaves: Sequence[str], rows: Callable[[int], str]):
        self.config = config
        self._leaves = leaves
        self._rows = rows
        self._before: set[str] = set()

    def observe(self, step: int, value: Mapping[str, Any]) -> list[Finding]:
        """The findings of step number `step` (from 1). A kind that the step before had as well is
        left out, unless the run halts."""
        found = {kind for kind, there in zip(ANOMALIES, value["found"], strict=True) if there}
        reported = found
        if not value["halted"]:
            reported = found - self._before
        self._before = found
        return [self.describe(step, kind, value) for kind in ANOMALIES if kind in reported]

    def describe(self, step: int, kind: str, value: Mapping[str, Any]) -> Finding:
        """A finding of this kind, put into words."""
        policy = getattr(self.config, kind)
        done = {"warn": "; the run goes on", "skip": "; the step changed nothing"}.get(policy, "")
        what = self._words(kind, value)
        message = f"step {step:,}: {kind}: {what}{done} (anomaly.{kind}={policy})."
        if kind in ("non_finite", "loss_spike", "grad_spike"):
            message += f"\n  {self._rows(step - 1)}"
        return Finding(step, kind, policy, message, _MEND[kind])

    def _words(self, kind: str, value: Mapping[str, Any]) -> str:
        """The numbers of an anomaly, and the limit that they exceed."""
        config = self.config
        median = [float(x) for x in value["median"]]
        deviation = [float(x) for x in value["deviation"]]
        numbers = f"loss {value['loss']:.4g}, gradient norm {value['grad_norm']:.4g}"
        if kind == "non_finite":
            if value["bad_leaf"] >= 0:
                return f"{numbers}, first in {self._leaves[value['bad_leaf']]}"
            if value["bad_update"] >= 0:
                leaf = self._leaves[value["bad_update"]]
                return f"{numbers}, but the update would make {leaf} so"
            return numbers
        if kind == "loss_spike":
            return f"{numbers}: {_spike_words('loss', median[0], deviation[0], config.loss_limit)}"
        if kind == "grad_spike":
            return f"{numbers}: {_spike_words('grad', median[1], deviation[1], config.grad_limit)}"
        if kind == "weight_drift":
            limit = f"more than anomaly.drift_limit={config.drift_limit:g} of it away"
            norm = f"norm of all weights {value['weight_norm']:.6g}"
            return f"{norm}, {limit} from its median, {median[2]:.6g}"
        if kind == "dead":
            steps = f"for anomaly.dead_steps={config.dead_steps} steps"
            return f"{numbers}: {steps} no gradient, or the very same loss"
        limit = f"more than anomaly.diverging_limit={config.diverging_limit:g} times the lowest"
        return f"the median of the loss is {median[0]:.4g}, {limit} there was"


def _spike_words(key: str, median: float, deviation: float, limit: float) -> str:
    """The highest value that is no spike, and how it comes about."""
    highest = median + limit * deviation
    sum_of = f"{median:.4g} + {limit:g} x {deviation:.3g}"
    return f"more than {highest:.4g} = {sum_of} (median, deviations: anomaly.{key}_limit)"


def counted(record: Mapping[str, Any], rollbacks: Sequence[Mapping[str, Any]]) -> str:
    """One line about the anomalies of a run, from a record of metrics and what
    `checkpoint/rollback.py` remembers; empty if there were none."""
    counts = []
    for kind in ANOMALIES:
        count = record.get(f"anomalies/{kind}")
        if count:
            counts.append(f"{count} x {kind}")
    parts = []
    if counts:
        parts.append(", ".join(counts))
    for rollback in rollbacks:
        first, last = rollback["left_out"]
        back = f"back from step {rollback['step']:,} ({rollback['kind']})"
        parts.append(f"{back}, left out {first:,} to {last:,}")
    if not parts:
        return ""
    return f"anomalies: {'; '.join(parts)}"
