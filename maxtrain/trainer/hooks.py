"""What happens after a step: hooks with one concern each, called in the order of `after_each_step`.

`due(after)` says whether there is anything to do and changes nothing; calling the hook does it. All
processes ask and call in the same order, because some hooks communicate between processes. Apart
from errors, a hook leaves the loop only by `StopRequested` (signals.py) or `RollBack` (run.py).
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
    save_by_clock: bool  # checkpoint.minutes are over
    stop: bool  # somebody asks to stop after this step


class Hook(abc.ABC):
    """One concern of the loop of a run."""

    def __init__(self, run: Run):
        self._run = run

    @abc.abstractmethod
    def due(self, after: AfterStep) -> bool:
        """Whether there is anything to do after this step."""

    @abc.abstractmethod
    def __call__(self, after: AfterStep) -> None:
        """Does it."""


def after_each_step(run: Run) -> list[Hook]:
    """The hooks of a run, in their order."""
    evaluate = Evaluate(run)
    sample = Sample(run)
    sample_prompts = SamplePrompts(run)
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
    """Fetches the metrics of the steps since the last look, checks them, and writes a training
    record.

    Fetching waits for the devices, so this is due only when a record is, or before a hook that
    needs
    checked steps: an evaluation, a completion of the prompts, a save or a stop.
    """

    def __init__(self, run: Run, before: Sequence[Hook]):
        super().__init__(run)
        self._before = before

    def due(self, after: AfterStep) -> bool:
        return after.is_logged or after.stop or any(hook.due(after) for hook in self._before)

    def __call__(self, after: AfterStep) -> None:
        self._run.check_steps(write=after.is_logged)


class CheckCopies(Hook):
    """Compares the copies of arrays on several devices, and a repeated step; see
    train_step/integrity.py, which knows when."""

    def due(self, after: AfterStep) -> bool:
        return True

    def __call__(self, after: AfterStep) -> None:
        self._run.check_integrity()


class Evaluate(Hook):
    """Evaluates the sets that are due. When somebody has asked to stop, it notes which sets are
    due instead; the next launch evaluates them."""

    def due(self, after: AfterStep) -> bool:
        return bool(self._run.validation.due(after.step, after.is_last))

    def __call__(self, after: AfterStep) -> None:
        self._run.unevaluated = self._run.validation.due(after.step, after.is_last)
        if after.stop:
            raise StopRequested
        self._run.evaluate()


class WriteEnding(Hook):
    """Records why the run ends before its plan does, if it does."""

    def due(self, after: AfterStep) -> bool:
        return bool(self._run.health.ending)

    def __call__(self, after: AfterStep) -> None:
        self._run.write_ending()


class Sample(Hook):
    """Shows how the model completes observe.prompts by now."""

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


class SamplePrompts(Hook):
    """Keeps how a model that learns from rewards completes the same prompts by now. When somebody
    has asked to stop, the next launch does it."""

    def due(self, after: AfterStep) -> bool:
        run = self._run
        return run.rollouts is not None and _is_time_for_samples(run, after)

    def __call__(self, after: AfterStep) -> None:
        if not after.stop:
            self._run.sample_prompts()


def _is_time_for_samples(run: Run, after: AfterStep) -> bool:
    interval = run.sample_interval
    return bool(interval) and (after.is_last or after.step % interval == 0)


class Save(Hook):
    """Saves a checkpoint. Every record of this step has been written by then."""

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
            # An evaluation that came out finite judges this step as the next one would.
            run.checkpoints.confirm(after.step)


class Profile(Hook):
    """Starts and stops the trace of observe.profile at the steps that observe/profile.py names. A
    trace that is open when the loop ends is closed by the loop."""

    def due(self, after: AfterStep) -> bool:
        return self._run.trace.due(after.step)

    def __call__(self, after: AfterStep) -> None:
        self._run.trace.turn(after.step, self._run.state)


class Stop(Hook):
    """Leaves the loop when somebody asks to stop."""

    def due(self, after: AfterStep) -> bool:
        return after.stop

    def __call__(self, after: AfterStep) -> None:
        raise StopRequested
