"""What a person is told about anomalies: the step, its numbers, the parameter, the data rows, and
what was done.

Nothing is decided here: the device has done so before the update (training/watch.py), and says so
in the step's metrics.
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
    mend: str


class Anomalies:
    """Turns metrics into findings.

    Args:
        config: what is done about which anomaly.
        leaves: names of the parameters, and after them of the arrays of the optimizer's state.
        rows: says what data a step (from 0) reads.
    """

    def __init__(self, config: AnomalyConfig, leaves: Sequence[str], rows: Callable[[int], str]):
        self.config, self._leaves, self._rows = config, leaves, rows
        self._before: set[str] = set()

    def observe(self, step: int, value: Mapping[str, Any]) -> list[Finding]:
        """What is to be said about step number `step` (from 1): nothing about a kind that the step
        before it showed as well."""
        found = {kind for kind, there in zip(ANOMALIES, value["found"], strict=True) if there}
        new, self._before = found - self._before, found
        return [
            self.describe(step, kind, value)
            for kind in ANOMALIES
            if kind in (found if value["halted"] else new)
        ]

    def describe(self, step: int, kind: str, value: Mapping[str, Any]) -> Finding:
        """A finding of this kind, put into words."""
        policy = getattr(self.config, kind)
        done = {"warn": "; the run goes on", "skip": "; the step changed nothing"}.get(policy, "")
        rows = (
            f"\n  {self._rows(step - 1)}"
            if kind in ("non_finite", "loss_spike", "grad_spike")
            else ""
        )
        message = f"step {step:,}: {kind}: {self._words(kind, value)}{done} (anomaly.{kind}={policy}).{rows}"
        return Finding(step, kind, policy, message, _MEND[kind])

    def _words(self, kind: str, value: Mapping[str, Any]) -> str:
        config, median, deviation = self.config, value["median"], value["deviation"]
        numbers = f"loss {value['loss']:.4g}, gradient norm {value['grad_norm']:.4g}"
        if kind == "non_finite":
            if value["bad_leaf"] >= 0:
                return f"{numbers}, first in {self._leaves[value['bad_leaf']]}"
            if value["bad_update"] >= 0:
                return (
                    f"{numbers}, but the update would make {self._leaves[value['bad_update']]} so"
                )
            return numbers
        if kind in ("loss_spike", "grad_spike"):
            key, i = ("loss", 0) if kind == "loss_spike" else ("grad", 1)
            limit = getattr(config, f"{key}_limit")
            highest = f"{median[i]:.4g} + {limit:g} x {deviation[i]:.3g} (median, deviations: anomaly.{key}_limit)"
            return f"{numbers}: more than {median[i] + limit * deviation[i]:.4g} = {highest}"
        if kind == "weight_drift":
            away = f"more than anomaly.drift_limit={config.drift_limit:g} of it away from its median, {median[2]:.6g}"
            return f"norm of all weights {value['weight_norm']:.6g}, {away}"
        if kind == "dead":
            return f"{numbers}: for anomaly.dead_steps={config.dead_steps} steps no gradient, or the very same loss"
        limit = f"more than anomaly.diverging_limit={config.diverging_limit:g} times the lowest there was"
        return f"the median of the loss is {median[0]:.4g}, {limit}"


def counted(record: Mapping[str, Any], rollbacks: Sequence[Mapping[str, Any]]) -> str:
    """One line about a run, from a record of metrics and what `checkpoint/rollback.py` remembers;
    empty if all was well."""
    counts = [
        f"{count} x {kind}" for kind in ANOMALIES if (count := record.get(f"anomalies/{kind}"))
    ]
    parts = [", ".join(counts)] if counts else []
    parts += [
        f"back from step {r['step']:,} ({r['kind']}), left out {r['left_out'][0]:,} to {r['left_out'][1]:,}"
        for r in rollbacks
    ]
    return f"anomalies: {'; '.join(parts)}" if parts else ""
