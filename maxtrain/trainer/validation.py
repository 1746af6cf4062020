"""Evaluation sets within a run: when each is due, and its best step."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
from flax import nnx

from data_pipeline.loader.loader import carry_errors
from maxtrain import failpoints
from maxtrain.checkpoint.run_state import Best, ValidationState
from maxtrain.config.rollouts import require_settings
from maxtrain.objectives.objective import POLICY, Batch
from maxtrain.observe.metrics import Stopwatch
from maxtrain.observe.progress import Progress
from maxtrain.observe.samples import Sample
from maxtrain.parallel.agreement import gather, raise_together
from maxtrain.parallel.batches import BatchLayout
from maxtrain.rl.evaluation import REWARD, Asking
from maxtrain.rl.prompts import num_prompts
from maxtrain.rl.unrewarded_evaluation import Completing, Completions
from maxtrain.train_step.evaluate import evaluate, make_eval_step
from maxtrain.trainer.job import Job
from maxtrain.trainer.signals import StopRequest, StopRequested

# Bytes of the numbers of an evaluation of prompts, as JSON.
_MOST_NUMBERS = 1 << 16
STOP_PATIENCE = "eval.stop_patience"  # in the ending of a run, says what ended it


class Evaluated(NamedTuple):
    """The record of an evaluation, and of a set of prompts the first completions."""

    record: dict[str, Any]
    samples: list[Sample]


class Validation:
    """The evaluation sets of a run. `best` has each set's best evaluation, and is saved with
    the run.

    `asking`: completes the prompts of sets that hold some, and may reward them; None: the run
    learns from data, and all sets are evaluated as text.
    """

    def __init__(
        self,
        job: Job,
        clock: Stopwatch,
        progress: Progress,
        stop: StopRequest,
        asking: Asking | Completing | None = None,
    ):
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
        self._asking = asking
        self._policy = job.policy_graphdef
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
        if self._asks(name):
            count = num_prompts(held_out, steps)
            longest = require_settings(self._config).max_completion_length
            if not self._rewards(name):
                return f"{held_out.manifest.uid}, {count} prompts, the likeliest {longest} tokens"
            grpo = self._config.grpo
            rewards = [list(grpo.rewards), list(grpo.reward_weights)]
            return (
                f"{held_out.manifest.uid}, {count} prompts, the likeliest {longest} tokens, "
                f"rewards {rewards}"
            )
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
        judged = "lower loss"
        if self._rewards(name):
            judged = "higher reward"
        since = f"the last {count} of eval.sets.{name} brought no {judged}"
        than = f"than {best.loss:.4f} after step {best.step:,}"
        mend = "Set eval.stop_patience higher, or to null, to go on"
        return f"{since} {than} ({STOP_PATIENCE}={patience}). {mend}."

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

    def _asks(self, name: str) -> bool:
        """Whether a set holds prompts that are completed."""
        return self._asking is not None and self._sets[name].shards.has_columns

    def _rewards(self, name: str) -> bool:
        """Whether a set holds prompts whose completions are rewarded."""
        return self._asks(name) and isinstance(self._asking, Asking)

    def evaluate(self, name: str, step: int, params: Mapping[str, nnx.State]) -> Evaluated | None:
        """The record of one evaluation set after this step: read whole, unless its steps say
        otherwise; `params` are those of each model by its name.

        None, in all processes: somebody asks to stop, and it was abandoned.

        Raises:
            DataError: what was read is not what the set's manifest says.
            UserError: a process could not read its part.
        """
        self._progress.phase(f"evaluating {name}")
        samples: list[Sample] = []
        try:
            with self._clock.during("eval"), self._stop.interrupting():
                failpoints.hit("eval", step)
                if self._asks(name):
                    result, samples = self._answered(name, params)
                else:
                    result = self._read(name, params)
        except KeyboardInterrupt:
            return None
        best = self._judged(name, step, result)
        self._progress.evaluated(step, name, result)
        self._progress.phase("")
        record = {
            "set": name,
            **result,
            "best_step": best.step if best else None,
            "data": self.read[name],
        }
        return Evaluated(record, samples)

    def _read(self, name: str, params: Mapping[str, nnx.State]) -> dict[str, Any]:
        """The numbers of a set of text. KeyboardInterrupt: somebody asks to stop."""
        eval_set, layout, asked = self._sets[name], self._layouts[name], self._steps(name)
        num_batches, num_tokens = (None, eval_set.num_tokens) if asked < 0 else (asked, None)
        host = eval_set.iterate(layout.part, num_batches)
        if jax.process_count() > 1:
            count = min(num_batches or eval_set.num_batches, eval_set.num_batches)
            host = carry_errors(
                host, range(count), lambda _: layout.part, eval_set.numbers, eval_set.teacher
            )
        errors: list[Exception] = []

        def placed() -> Iterator[Batch]:
            for batch in host:
                if self._stop.agreed("eval")[0]:
                    raise StopRequested
                errors.extend([batch.error] if batch.error else [])
                yield layout.to_global(batch.arrays)
            raise_together(errors[0] if errors else None)

        return evaluate(
            self._step,
            params,
            placed(),
            num_tokens,
            eval_set.text_bytes,
            self._summed,
            self._counted,
        )

    def _answered(
        self, name: str, params: Mapping[str, nnx.State]
    ) -> tuple[dict[str, Any], list[Sample]]:
        """The numbers of a set of prompts, and its first completions. KeyboardInterrupt: somebody
        asks to stop."""
        assert self._asking is not None
        model = nnx.merge(self._policy, params[POLICY])

        def look_up() -> None:
            if self._stop.agreed("eval")[0]:
                raise StopRequested
            # A sign of life for the watchdog.
            with self._clock.during("eval"):
                pass

        eval_set = self._sets[name]
        count = num_prompts(eval_set, self._steps(name))
        answers = self._asking(model, eval_set.shards, count, look_up)
        if isinstance(answers, Completions):
            record = answers.record() | self._divergence(name, answers, params)
            return record, answers.samples(name, self._config.observe.num_samples)
        # A reward that takes too long may do so on one host alone: what the first one found counts.
        record = gather({"record": answers.record()}, _MOST_NUMBERS)[0]["record"]
        return record, answers.samples(name, self._config.observe.num_samples)

    def _divergence(
        self, name: str, completions: Completions, params: Mapping[str, nnx.State]
    ) -> dict[str, Any]:
        """What the objective says of completions; the loss is NaN if one has failed, since the
        weights can't be used then."""
        layout = self._layouts[name]
        batches = completions.batches(layout)
        found = evaluate(self._step, params, batches, None, 0, self._summed, self._counted)
        if completions.failed:
            found[self._loss] = math.nan
        return found

    def _judged(self, name: str, step: int, result: Mapping[str, Any]) -> Best | None:
        """The best evaluation of a set, with this one."""
        of = self._loss
        if self._rewards(name):
            of = REWARD
        value = result.get(of, math.nan)
        best = self.best.get(name)
        is_better = math.isfinite(value)
        # A run that has had another objective has losses that can't be compared.
        if is_better and best is not None and best.name == of:
            is_better = value < best.loss
            if of == REWARD:
                is_better = value > best.loss
        if is_better:
            best = Best(step, value, of)
            self.best[name] = best
            self.stale[name] = 0
        else:
            self.stale[name] = self.stale.get(name, 0) + 1
        return best
