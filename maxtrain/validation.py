"""Evaluation sets within a run: when each is due, and its best step."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from flax import nnx

from data_pipeline.loader import carry_errors
from maxtrain import failpoints
from maxtrain.job import Job
from maxtrain.objectives.objective import Batch
from maxtrain.observe.metrics import Stopwatch
from maxtrain.observe.progress import Progress
from maxtrain.parallel.agreement import raise_together
from maxtrain.parallel.batches import BatchLayout
from maxtrain.run_state import Best, ValidationState
from maxtrain.signals import StopRequest, StopRequested
from maxtrain.training.evaluate import evaluate, make_eval_step

STOP_PATIENCE = "eval.stop_patience"  # in the ending of a run, says what ended it


class Validation:
    """The evaluation sets of a run. `best` has each set's best evaluation, and is saved with
    the run."""

    def __init__(self, job: Job, clock: Stopwatch, progress: Progress, stop: StopRequest):
        self._config, self._sets, self._clock, self._progress, self._stop = (
            job.config,
            job.sets,
            clock,
            progress,
            stop,
        )
        self._plan = job.data.plan
        self._layouts = {
            n: BatchLayout(job.mesh, s.batch_size, s.config.seq_length) for n, s in job.sets.items()
        }
        self._step = make_eval_step(job.graphdefs, job.objective)
        self._loss = job.objective.loss.name
        self._counted = job.objective.counted
        self._summed = [q.name for q in job.objective.evaluated if q.reduction == "sum"]
        self.best: dict[str, Best] = {}
        self.stale: dict[str, int] = {}  # evaluations of each set since its best
        self.read = {
            name: self._describe(name) for name in job.sets
        }  # what losses of each set are losses of

    def restore(self, saved: ValidationState, has_other_data: bool) -> None:
        """As it was at a checkpoint.

        Args:
            saved: what the checkpoint has; that of a new run has nothing.
            has_other_data: the run goes on from there with other data (data.accept_changes).
        """
        self.best = dict(saved.best)
        self.stale = {}
        if not has_other_data:
            self.stale = dict(saved.stale)
        for name, before in saved.read.items():
            now = self.read.get(name, before)
            if now != before:
                rule = f"eval.sets.{name} was {before}, and is {now}"
                mend = "its losses begin another series, and its best so far is forgotten"
                self._progress.message(
                    f"{rule}: they can't be compared, so {mend}.", style="yellow"
                )
                self.best.pop(name, None)
                self.stale.pop(name, None)

    def state(self) -> ValidationState:
        """What a checkpoint has to remember of it."""
        return ValidationState(dict(self.best), dict(self.stale), dict(self.read))

    def _describe(self, name: str) -> str:
        """Losses of a set can be compared where this is the same."""
        held_out, layout, steps = self._sets[name], self._layouts[name], self._steps(name)
        part = "whole" if steps < 0 else f"{steps} batches of {layout.shape[0]} rows"
        return f"{held_out.manifest.uid}, {part}, in rows of {held_out.config.seq_length}"

    def why_stop(self) -> str:
        """Why the run ends here, if the set that eval.stop_patience looks at has got no better for
        so long; else nothing."""
        patience = self._config.eval.stop_patience
        if patience is None:
            return ""
        name = self._config.eval.stop_set or next(iter(self._sets))
        if self.stale.get(name, 0) < patience or name not in self.best:
            return ""
        best = self.best[name]
        count = f"{self.stale[name]:,} evaluations" if self.stale[name] > 1 else "evaluation"
        since = f"the last {count} of eval.sets.{name} brought no lower loss"
        mend = "Set eval.stop_patience higher, or to null, to go on"
        return f"{since} than {best.loss:.4f} after step {best.step:,} ({STOP_PATIENCE}={patience}). {mend}."

    def due(self, step: int, last: bool) -> list[str]:
        """Names of the sets that are to be read after this step: all after the last one."""
        return [
            name
            for name in self._sets
            if self._steps(name) and (last or self._falls_on(name, step))
        ]

    def _falls_on(self, name: str, step: int) -> bool:
        interval = self._config.eval.sets[name].interval
        interval = self._config.eval_interval if interval is None else interval
        return self._plan.falls_on(interval, step)

    def _steps(self, name: str) -> int:
        """How many batches of a set are read; all of them if it is negative."""
        steps = self._config.eval.sets[name].steps
        return self._config.eval_steps if steps is None else steps

    def evaluate(
        self, name: str, step: int, params: Mapping[str, nnx.State]
    ) -> dict[str, Any] | None:
        """The record of one evaluation set after this step: read whole, unless its steps say
        otherwise; `params` are those of each model by its name.

        None, in all processes: somebody asks to stop, and it was abandoned.

        Raises:
            DataError: what was read is not what the set's manifest says.
            UserError: a process could not read its part.
        """
        eval_set, layout, asked = self._sets[name], self._layouts[name], self._steps(name)
        self._progress.phase(f"evaluating {name}")
        num_batches, num_tokens = (None, eval_set.num_tokens) if asked < 0 else (asked, None)
        host = eval_set.iterate(layout.part, num_batches)
        if jax.process_count() > 1:
            count = min(num_batches or eval_set.num_batches, eval_set.num_batches)
            host = carry_errors(host, range(count), lambda _: layout.part, eval_set.valued)
        errors: list[Exception] = []

        def placed() -> Iterator[Batch]:
            for batch in host:
                if self._stop.agreed("eval")[0]:
                    raise StopRequested
                errors.extend([batch.error] if batch.error else [])
                yield layout.to_global(batch.arrays)
            raise_together(errors[0] if errors else None)

        try:
            with self._clock.during("eval"), self._stop.interrupting():
                failpoints.hit("eval", step)
                result = evaluate(
                    self._step,
                    params,
                    placed(),
                    num_tokens,
                    eval_set.text_bytes,
                    self._summed,
                    self._counted,
                )
        except KeyboardInterrupt:
            return None
        loss = result[self._loss]
        best = self.best.get(name)
        # A run that has had another objective has losses that can't be compared.
        lowest = math.inf
        if best is not None and best.name == self._loss:
            lowest = best.loss
        if math.isfinite(loss) and loss < lowest:
            best = Best(step, loss, self._loss)
            self.best[name] = best
            self.stale[name] = 0
        else:
            self.stale[name] = self.stale.get(name, 0) + 1
        self._progress.evaluated(step, name, result)
        self._progress.phase("")
        return {
            "set": name,
            **result,
            "best_step": best.step if best else None,
            "data": self.read[name],
        }
