"""Hooks that run after each step, one concern each, called in the order of `after_each_step`.

`due(after)` returns whether the hook has work, and changes nothing; calling the hook does the work.
All processes call the hooks in the same order, because some hooks communicate between processes.
Apart from errors, a hook leaves the loop only by `StopRequested` (signals.py) or `RollbackRequest`
(run.py).
"""

import abc
from collections.abc import Sequence
from typing import NamedTuple

from flax import nnx

from maxtrain.train_step.state import eval_params
from maxtrain.trainer.run import Run
from maxtrain.trainer.signals import StopRequested
from maxtrain.trainer.summary import completions


class AfterStep(NamedTuple):
    """The moment after a step was started on the devices, which may still be computing it."""

    step: int  # finished steps, with this one
    is_last: bool  # of the plan
    is_logged: bool  # a training record is due
    save_by_clock: bool  # checkpoint.minutes have passed
    stop: bool  # a stop after this step is requested


class Hook(abc.ABC):
    """One concern of the loop of a run."""

    def __init__(self, run: Run):
        self._run = run

    @abc.abstractmethod
    def due(self, after: AfterStep) -> bool:
        """Return whether there is anything to do after this step."""

    @abc.abstractmethod
    def __call__(self, after: AfterStep) -> None:
        """Do the work that is due."""


def after_each_step(run: Run) -> list[Hook]:
    """Build the hooks of a run, in their order."""
    evaluate = Evaluate(run)
    sample = SampleObservePrompts(run)
    sample_prompts = SampleRolloutPrompts(run)
    save = Save(run)
    looked_at_before = [evaluate, sample, sample_prompts, save]
    return [
        CheckSteps(run, looked_at_before),
        CheckCopies(run),
        evaluate,
        WriteEnding(run),
        sample,
        sample_prompts,
        save,
        Profile(run),
        Stop(run),
    ]


class CheckSteps(Hook):
    """Hook that fetches the metrics of the steps since the last check, checks them, and writes a
    training record.

    Fetching waits for the devices. So this hook is due only when a record is, or before a hook that
    needs checked steps: an evaluation, a completion of the prompts, a save or a stop.
    """

    def __init__(self, run: Run, before: Sequence[Hook]):
        super().__init__(run)
        self._before = before

    def due(self, after: AfterStep) -> bool:
        return after.is_logged or after.stop or any(hook.due(after) for hook in self._before)

    def __call__(self, after: AfterStep) -> None:
        self._run.check_steps(write=after.is_logged)


class CheckCopies(Hook):
    """Hook that compares the replicas of arrays, and a repeated step. train_step/integrity.py
    decides when."""

    def due(self, after: AfterStep) -> bool:
        return True

    def __call__(self, after: AfterStep) -> None:
        self._run.check_integrity()


class Evaluate(Hook):
    """Hook that evaluates the sets that are due. When a stop is requested, it only notes the due
    sets; the next launch evaluates them."""

    def due(self, after: AfterStep) -> bool:
        return bool(self._run.validation.due(after.step, after.is_last))

    def __call__(self, after: AfterStep) -> None:
        self._run.unevaluated = self._run.validation.due(after.step, after.is_last)
        if after.stop:
            raise StopRequested
        self._run.evaluate()


class WriteEnding(Hook):
    """Hook that records why the run ends before its plan does."""

    def due(self, after: AfterStep) -> bool:
        return bool(self._run.health.ending)

    def __call__(self, after: AfterStep) -> None:
        self._run.write_ending()


class SampleObservePrompts(Hook):
    """Hook that shows how the model currently completes observe.prompts."""

    def due(self, after: AfterStep) -> bool:
        run = self._run
        is_wanted = bool(run.config.observe.prompts) and not after.is_last
        return is_wanted and _is_time_for_samples(run, after)

    def __call__(self, after: AfterStep) -> None:
        run = self._run
        if after.stop:
            return
        run.progress.phase("completing the prompts")
        with run.clock.during("eval"):
            model = nnx.merge(run.job.policy_graphdef, eval_params(run.state))
            texts = completions(run.config, run.data.tokenizer, model)
        for prompt, text in zip(run.config.observe.prompts, texts):
            run.progress.sample(after.step, prompt, text)
        run.progress.phase("")


class SampleRolloutPrompts(Hook):
    """Hook that records how a model in on-policy training currently completes a fixed set of
    prompts. When a stop is requested, the next launch does it."""

    def due(self, after: AfterStep) -> bool:
        run = self._run
        return run.rollouts is not None and _is_time_for_samples(run, after)

    def __call__(self, after: AfterStep) -> None:
        if not after.stop:
            self._run.sample_prompts()


def _is_time_for_samples(run: Run, after: AfterStep) -> bool:
    """Return whether observe.sample_interval falls on this step, or the step is the last."""
    interval = run.sample_interval
    return bool(interval) and (after.is_last or after.step % interval == 0)


class Save(Hook):
    """Hook that saves a checkpoint, after every record of this step was written."""

    def due(self, after: AfterStep) -> bool:
        run = self._run
        interval = run.config.checkpoint_interval
        by_step = after.is_last or run.data.plan.falls_on(interval, after.step)
        is_last = bool(run.health.ending)
        return by_step or after.save_by_clock or run.save_is_postponed or is_last

    def __call__(self, after: AfterStep) -> None:
        run = self._run
        run.save(uploaded=after.is_last or after.stop or bool(run.health.ending))
        if run.validation.due(after.step, after.is_last):
            # A finite evaluation confirms this step, as a finite next step would.
            run.checkpoints.confirm(after.step)


class Profile(Hook):
    """Hook that starts and stops the trace of observe.profile at the steps that observe/profile.py
    names. The loop closes a trace that is open when it ends."""

    def due(self, after: AfterStep) -> bool:
        return self._run.trace.due(after.step)

    def __call__(self, after: AfterStep) -> None:
        self._run.trace.turn(after.step, self._run.state)


class Stop(Hook):
    """Hook that leaves the loop when a stop is requested."""

    def due(self, after: AfterStep) -> bool:
        return after.stop

    def __call__(self, after: AfterStep) -> None:
        raise StopRequested
