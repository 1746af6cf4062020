"""Hooks after a step: their order, and the steps at which each is due."""

from unittest.mock import Mock

import pytest

from maxtrain.trainer.hooks import AfterStep, after_each_step
from maxtrain.trainer.run import Run
from maxtrain.trainer.signals import StopRequested

ORDER = [
    "CheckSteps",
    "CheckCopies",
    "Evaluate",
    "WriteEnding",
    "SampleObservePrompts",
    "SampleRolloutPrompts",
    "Save",
    "Profile",
    "Stop",
]
SETS = ["held"]
# From rewards of its own completions.
LEARNS = {"rollouts": "some", "prompts": []}


def run_with(**changes):
    """A run of which nothing is due by itself."""
    run = Mock(spec=Run)
    run.validation = Mock()
    run.validation.due.return_value = changes.get("sets", [])
    run.health = Mock(ending=changes.get("ending", ""))
    run.data = Mock()
    run.data.plan.falls_on.return_value = changes.get("falls_on", False)
    run.config = Mock(checkpoint_interval=10)
    run.config.observe.prompts = changes.get("prompts", ["once"])
    run.rollouts = changes.get("rollouts")
    run.trace = Mock()
    run.trace.due.return_value = changes.get("traced", False)
    run.sample_interval = changes.get("sample_interval", 0)
    run.save_is_postponed = changes.get("postponed", False)
    run.checkpoints = Mock()
    return run


def after(step=4, **changes):
    moment = dict.fromkeys(("is_last", "is_logged", "save_by_clock", "stop"), False)
    return AfterStep(step=step, **(moment | changes))


def hooks_of(run):
    return {type(hook).__name__: hook for hook in after_each_step(run)}


def test_steps_are_checked_before_anything_is_kept_of_them_and_a_stop_comes_last():
    assert list(hooks_of(run_with())) == ORDER


@pytest.mark.parametrize(
    ("state", "moment", "expected"),
    [
        ({}, {}, []),
        ({}, {"is_logged": True}, ["CheckSteps"]),
        ({}, {"stop": True}, ["CheckSteps", "Stop"]),
        ({}, {"save_by_clock": True}, ["CheckSteps", "Save"]),
        ({}, {"is_last": True}, ["CheckSteps", "Save"]),
        ({"falls_on": True}, {}, ["CheckSteps", "Save"]),
        ({"postponed": True}, {}, ["CheckSteps", "Save"]),
        ({"sets": SETS}, {}, ["CheckSteps", "Evaluate"]),
        ({"sample_interval": 2}, {}, ["CheckSteps", "SampleObservePrompts"]),
        ({"sample_interval": 3}, {}, []),
        ({"sample_interval": 2}, {"is_last": True}, ["CheckSteps", "Save"]),
        ({"sample_interval": 2, "prompts": []}, {}, []),
        (LEARNS | {"sample_interval": 2}, {}, ["CheckSteps", "SampleRolloutPrompts"]),
        (
            LEARNS | {"sample_interval": 3},
            {"is_last": True},
            ["CheckSteps", "SampleRolloutPrompts", "Save"],
        ),
        ({"ending": "no better"}, {}, ["CheckSteps", "WriteEnding", "Save"]),
        ({"traced": True}, {}, ["Profile"]),
    ],
)
def test_each_is_due_when_its_own_reason_says_so(state, moment, expected):
    """CheckCopies is called after every step; it decides itself when to act."""
    due = [name for name, hook in hooks_of(run_with(**state)).items() if hook.due(after(**moment))]
    assert [name for name in due if name != "CheckCopies"] == expected
    assert "CheckCopies" in due


@pytest.mark.parametrize("is_logged", [True, False])
def test_a_record_is_written_only_where_one_is_due(is_logged):
    run = run_with()
    hooks_of(run)["CheckSteps"](after(is_logged=is_logged))
    run.check_steps.assert_called_once_with(write=is_logged)


def test_a_run_that_is_to_stop_leaves_its_evaluation_to_the_next_launch():
    run = run_with(sets=SETS)
    evaluate = hooks_of(run)["Evaluate"]
    with pytest.raises(StopRequested):
        evaluate(after(stop=True))
    assert run.unevaluated == SETS
    run.evaluate.assert_not_called()
    evaluate(after())
    run.evaluate.assert_called_once_with()


@pytest.mark.parametrize("sets", [SETS, []])
def test_an_evaluated_step_is_confirmed_when_it_is_saved(sets):
    run = run_with(sets=sets)
    hooks_of(run)["Save"](after())
    run.save.assert_called_once_with(uploaded=False)
    assert run.checkpoints.confirm.called == bool(sets)


def test_a_stop_leaves_the_loop():
    with pytest.raises(StopRequested):
        hooks_of(run_with())["Stop"](after(stop=True))
