"""Health of a run's steps: anomalies, suspicious batches, skipped steps, and why a run ends early.

The device detects anomalies before the update (train_step/anomaly_state.py). This module warns the
user, and decides whether the run ends or rolls back. It writes no records and communicates with no
other process: all processes see the same metrics and reach the same decision.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from data_pipeline.base.errors import DivergedError
from data_pipeline.loader.batch_checks import CHECK_DATA, BatchGuard
from data_pipeline.loader.loader import HostBatch, TrainingData
from maxtrain.checkpoint.rollback import Rollback, left_out
from maxtrain.checkpoint.run_state import HealthState
from maxtrain.config import RunConfig
from maxtrain.config.rollouts import rollout_settings
from maxtrain.observe.anomaly import Anomalies, Finding
from maxtrain.observe.progress import Progress


class Health:
    """Record of how well the steps of a run went, and the decisions that follow from it.

    Args:
        config: of the run, with the policies for suspicious batches and for anomalies.
        data: the training data of the run.
        leaves: names of the parameters, and after them of the arrays of the optimizer's state.
        progress: receives the warnings.

    Attributes:
        guard: checks batches by their targets.
        left_out: steps that rollbacks turned into no-ops, counted from 0 as batches are.
        skipped_in_row: consecutive non-finite steps up to the last step that was checked.
        skipped: steps of the whole run that changed nothing, up to the last step that was checked.
        ending: why the run ends before its plan does; empty if it does not.
    """

    guard: BatchGuard
    left_out: frozenset[int]
    skipped_in_row: int
    skipped: int
    ending: str

    def __init__(
        self,
        config: RunConfig,
        data: TrainingData,
        leaves: Sequence[str],
        progress: Progress,
    ):
        self._section = config.data
        self._anomaly = config.anomaly
        self._advice = advice_on_targets(config)
        self._data = data
        self._leaves = leaves
        self._progress = progress
        self.restore(HealthState(), [], has_other_data=False)

    def restore(
        self, saved: HealthState, rollbacks: Sequence[Rollback], has_other_data: bool
    ) -> None:
        """Restore the state that a checkpoint remembers.

        Args:
            saved: from the checkpoint; empty for a new run.
            rollbacks: all rollbacks of the run.
            has_other_data: whether the run resumes with other data (data.accept_changes), so that
                earlier batches must not end it.
        """
        section = self._section
        self.guard = BatchGuard(
            section.zero_weight,
            section.min_fill,
            section.max_empty_rows,
            section.fill_patience,
            section.repeated,
            self._advice,
        )
        if saved.guard is not None:
            self.guard.restore(saved.guard)
        self._anomalies = Anomalies(self._anomaly, self._leaves, self._data.describe_rows)
        self.left_out = left_out(rollbacks)
        self.skipped_in_row = 0
        self.skipped = saved.skipped
        self.ending = ""
        if not has_other_data and self._still_ends(saved.ending):
            self.ending = saved.ending

    def _still_ends(self, ending: str) -> bool:
        """Return whether the reason that ended the run still holds with this config.

        The reason names its config key. For evaluations, the caller of `go_on_unless` decides.
        """
        if "(data.repeated)" in ending:
            return self._section.repeated == "stop"
        return "(eval.stop_patience" in ending or self._section.zero_weight == "stop"

    def go_on_unless(self, still: str, cause: str) -> None:
        """Forget that this cause ended the run, unless it would end the run again.

        `still` is the reason why the cause still holds; empty: it does not.
        """
        if f"({cause}" in self.ending and not still:
            self.ending = ""

    def state(self) -> HealthState:
        """Return what a checkpoint has to remember."""
        return HealthState(self.skipped, self.guard.state(), self.ending)

    def repeats(self, origins: Sequence[HostBatch], contents: Sequence[int]) -> list[bool]:
        """Return for each batch whether its tokens were read before from another place.

        `contents` are checksums of the tokens of each batch.
        """
        found = []
        for origin, content in zip(origins, contents, strict=True):
            found.append(self.guard.repeats(content, origin.place, origin.step))
        return found

    def check_step(
        self, origin: HostBatch, value: Mapping[str, Any], repeats: bool
    ) -> Finding | None:
        """Check one step, and show its warnings.

        Args:
            origin: the host batch of the step.
            value: the metrics of the step, on the host.
            repeats: whether the batch's tokens were read before from another place.

        Returns:
            The anomaly that invalidates this step and those after it; None: the step counts.

        Raises:
            DivergedError: too many non-finite steps in a row.
            DataError: a batch that the config does not allow.
        """
        step = origin.step + 1
        self.skipped_in_row = int(value["skipped_in_row"])
        self.skipped = int(value["skipped"])
        findings = self._anomalies.observe(step, value)
        if value["halted"]:
            return next(found for found in findings if found.policy in ("rollback", "stop"))
        for found in findings:
            self._progress.message(f"{found.message} {found.fix}.", style="yellow")
        if origin.step in self.left_out:
            return None
        found = self._check_batch(origin, value, repeats)
        if found is not None:
            return found
        limit = self._anomaly.max_skipped
        if value["skipped_in_row"] > limit:
            found = self._anomalies.describe(step, "non_finite", value)
            raise DivergedError(
                f"{found.message}\n  {value['skipped_in_row']} steps in a row were not finite and "
                f"changed nothing; anomaly.max_skipped={limit} allows no more. {found.fix}."
            )
        return None

    def _check_batch(
        self, origin: HostBatch, value: Mapping[str, Any], repeats: bool
    ) -> Finding | None:
        """Check a batch by its targets. A finding means that the run must roll back to before the
        batch."""
        step = origin.step + 1
        targets = float(value["targets"])
        # A non-finite count means a damaged batch, whose step was skipped.
        if not math.isfinite(targets):
            return None
        # Balanced packing pads batches with unused rows, which are not suspicious.
        if origin.made is None:
            shape = self._data.shape_at(origin.step)
            unused_rows = self._data.num_unused_rows(origin.step)
        else:
            shape = origin.made.shape
            unused_rows = origin.made.unused_rows
        empty_rows = float(value["empty_rows"]) - unused_rows
        response = self.guard.observe(step, targets, empty_rows, shape, repeats)
        if response is None:
            return None
        if response.back:
            message = f"{response.message} {self._data.describe_rows(step - 1)}"
            fix = (
                "Look for the same text in several sources (prepare --dedupe), or set "
                "data.repeated=warn"
            )
            return Finding(step, "repeated", response.back, message, fix)
        if response.message:
            self._progress.message(response.message, style="yellow")
            if response.stop:
                self.ending = response.message
        return None


def advice_on_targets(config: RunConfig) -> str:
    """Explain why batches may have few or no targets, and how to get more; without a final full
    stop.

    Advantages that are all zero are no cause: their tokens are targets nevertheless.
    """
    settings = rollout_settings(config)
    if settings is None:
        return CHECK_DATA
    section = "grpo"
    if config.objective == "distill":
        section = "distill"
    longest = f"{section}.max_completion_length"
    masks = f"{section}.mask_truncated_completions"
    causes = ["Only tokens of completions are targets"]
    fixes = []
    if settings.mask_truncated_completions:
        causes.append(
            f"completions that were cut at {longest}={settings.max_completion_length} are none, "
            f"because of {masks}=true"
        )
        fixes += [f"set {longest} higher, so that completions come to an end", f"set {masks}=false"]
    if config.objective == "ppo":
        causes.append("completions to which no reward applies are none")
        fixes.append("let a reward apply to more completions")
    if not fixes:
        fixes.append(f"set {longest} higher")
    fix = ", or ".join(fixes)
    return f"{'; '.join(causes)}. {fix[0].upper()}{fix[1:]}"
