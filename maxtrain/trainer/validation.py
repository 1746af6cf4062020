"""Evaluation sets within a run: schedule, evaluation, and best step of each."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
from flax import nnx

from data_pipeline.loader.loader import carry_errors
from maxtrain import failpoints
from maxtrain.checkpoint.run_state import BestEvaluation, ValidationState
from maxtrain.config.rollouts import require_settings
from maxtrain.objectives.objective import POLICY, Batch
from maxtrain.observe.metrics import Stopwatch
from maxtrain.observe.progress import Progress
from maxtrain.observe.samples import CompletionSample
from maxtrain.parallel.agreement import gather, raise_together
from maxtrain.parallel.batches import BatchLayout
from maxtrain.rl.evaluation import REWARD, RewardedPromptEvaluator
from maxtrain.rl.prompts import num_prompts
from maxtrain.rl.unrewarded_evaluation import Completions, PromptEvaluator
from maxtrain.train_step.evaluate import evaluate, make_eval_step
from maxtrain.trainer.job import Job
from maxtrain.trainer.signals import StopRequest, StopRequested

# Most bytes of the JSON with the numbers of an evaluation of prompts.
_MOST_NUMBERS = 1 << 16
STOP_PATIENCE = "eval.stop_patience"  # marks the cause in the ending of a run


class EvaluationResult(NamedTuple):
    """The record of an evaluation, and for a set of prompts the first completions."""

    record: dict[str, Any]
    samples: list[CompletionSample]


class Validation:
    """The evaluation sets of a run. `best` has each set's best evaluation, and is saved with the
    run.

    `evaluator`: completes the prompts of prompt sets, and may reward the completions; None: the run
    trains on data, and all sets are evaluated as text.
    """

    def __init__(
        self,
        job: Job,
        clock: Stopwatch,
        progress: Progress,
        stop: StopRequest,
        evaluator: RewardedPromptEvaluator | PromptEvaluator | None = None,
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
        self._evaluator = evaluator
        self._policy = job.policy_graphdef
        self._step = make_eval_step(job.graphdefs, job.objective)
        self._loss = job.objective.loss.name
        self._counted = job.objective.counted
        self._summed = [q.name for q in job.objective.evaluated if q.reduction == "sum"]
        self.best: dict[str, BestEvaluation] = {}
        self.stale: dict[str, int] = {}  # evaluations of each set since its best
        self.read = {
            name: self._describe(name) for name in job.sets
        }  # the identity of each set's text

    def restore(self, saved: ValidationState, has_other_data: bool) -> None:
        """Restore the state of a checkpoint.

        Args:
            saved: from the checkpoint; empty for a new run.
            has_other_data: whether the run resumes with other data (data.accept_changes).
        """
        self.best = dict(saved.best)
        self.stale = {}
        if not has_other_data:
            self.stale = dict(saved.stale)
        for name, before in saved.read.items():
            now = self.read.get(name, before)
            if now != before:
                rule = f"eval.sets.{name} was {before}, and is {now}"
                effect = "its losses begin another series, and its best so far is forgotten"
                self._progress.message(
                    f"{rule}: they can't be compared, so {effect}.", style="yellow"
                )
                self.best.pop(name, None)
                self.stale.pop(name, None)

    def state(self) -> ValidationState:
        """Return what a checkpoint has to remember."""
        return ValidationState(dict(self.best), dict(self.stale), dict(self.read))

    def _describe(self, name: str) -> str:
        """Return an identity of a set's text and settings. Losses are comparable only if it is the
        same."""
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
        """Return why the run ends here, if the set of eval.stop_patience has not improved for that
        many evaluations; else empty."""
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
        fix = "Set eval.stop_patience higher, or to null, to go on"
        return f"{since} {than} ({STOP_PATIENCE}={patience}). {fix}."

    def due(self, step: int, last: bool) -> list[str]:
        """Return the names of the sets to read after this step: all of them after the last step."""
        return [
            name
            for name in self._sets
            if self._steps(name) and (last or self._falls_on(name, step))
        ]

    def _falls_on(self, name: str, step: int) -> bool:
        """Return whether a set's interval falls on this step."""
        interval = self._config.eval.sets[name].interval
        interval = self._config.eval_interval if interval is None else interval
        return self._plan.falls_on(interval, step)

    def _steps(self, name: str) -> int:
        """Return how many batches of a set are read; negative: all."""
        steps = self._config.eval.sets[name].steps
        return self._config.eval_steps if steps is None else steps

    def _asks(self, name: str) -> bool:
        """Return whether a set holds prompts that are completed."""
        return self._evaluator is not None and self._sets[name].shards.has_columns

    def _rewards(self, name: str) -> bool:
        """Return whether a set holds prompts whose completions are rewarded."""
        return self._asks(name) and isinstance(self._evaluator, RewardedPromptEvaluator)

    def evaluate(
        self, name: str, step: int, params: Mapping[str, nnx.State]
    ) -> EvaluationResult | None:
        """Evaluate one set after this step, whole unless its `steps` say otherwise; `params` has
        the variables of each model by its name.

        Returns None, in all processes, if a stop was requested and the evaluation was abandoned.

        Raises:
            DataError: the data is not what the set's manifest says.
            UserError: a process could not read its part.
        """
        self._progress.phase(f"evaluating {name}")
        samples: list[CompletionSample] = []
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
        return EvaluationResult(record, samples)

    def _read(self, name: str, params: Mapping[str, nnx.State]) -> dict[str, Any]:
        """Evaluate a set of text. Raise a KeyboardInterrupt if a stop is requested."""
        eval_set, layout, count = self._sets[name], self._layouts[name], self._steps(name)
        num_batches, num_tokens = (None, eval_set.num_tokens) if count < 0 else (count, None)
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
    ) -> tuple[dict[str, Any], list[CompletionSample]]:
        """Evaluate a set of prompts, and return its numbers and first completions. Raise a
        KeyboardInterrupt if a stop is requested."""
        assert self._evaluator is not None
        model = nnx.merge(self._policy, params[POLICY])

        def look_up() -> None:
            if self._stop.agreed("eval")[0]:
                raise StopRequested
            # A heartbeat for the watchdog.
            with self._clock.during("eval"):
                pass

        eval_set = self._sets[name]
        count = num_prompts(eval_set, self._steps(name))
        answers = self._evaluator(model, eval_set.shards, count, look_up)
        if isinstance(answers, Completions):
            record = answers.record() | self._divergence(name, answers, params)
            return record, answers.samples(name, self._config.observe.num_samples)
        # A reward may time out on one host alone, so the numbers of process 0 count everywhere.
        record = gather({"record": answers.record()}, _MOST_NUMBERS)[0]["record"]
        return record, answers.samples(name, self._config.observe.num_samples)

    def _divergence(
        self, name: str, completions: Completions, params: Mapping[str, nnx.State]
    ) -> dict[str, Any]:
        """Return the objective's metrics of completions. The loss is NaN if a completion failed,
        since the weights cannot be used then."""
        layout = self._layouts[name]
        batches = completions.batches(layout)
        found = evaluate(self._step, params, batches, None, 0, self._summed, self._counted)
        if completions.failed:
            found[self._loss] = math.nan
        return found

    def _judged(self, name: str, step: int, result: Mapping[str, Any]) -> BestEvaluation | None:
        """Update and return the best evaluation of a set."""
        of = self._loss
        if self._rewards(name):
            of = REWARD
        value = result.get(of, math.nan)
        best = self.best.get(name)
        is_better = math.isfinite(value)
        # Losses of another objective cannot be compared.
        if is_better and best is not None and best.name == of:
            is_better = value < best.loss
            if of == REWARD:
                is_better = value > best.loss
        if is_better:
            best = BestEvaluation(step, value, of)
            self.best[name] = best
            self.stale[name] = 0
        else:
            self.stale[name] = self.stale.get(name, 0) + 1
        return best
