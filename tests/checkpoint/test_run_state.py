"""A run's state goes into a checkpoint's record and is restored unchanged."""

import json
import math

import pytest

from data_pipeline.base import strict_json
from data_pipeline.loader.batch_checks import GuardState
from data_pipeline.plan.plan import DataRead
from maxtrain.checkpoint.run_state import (
    BestEvaluation,
    HealthState,
    LogMark,
    RecorderState,
    RunState,
    ValidationState,
    best_steps,
    config_of,
    imported_record,
    run_of,
    wrong_type,
)

# The stored format: other keys are another format.
KEYS = {
    *("run", "step", "num_steps", "seed", "kept", "config"),
    *("metrics", "tokens_seen", "since_record", "by_source"),
    *("skipped", "guard", "ending"),
    *("data", "cursor", "start"),
    *("best", "stale", "read", "unevaluated"),
    "rollbacks",
}
CURSOR = {"step": 7, "sources": {"a1": [0, 3]}}
STATE = RunState(
    run="a1b2",
    step=7,
    num_steps=20,
    recorder=RecorderState(
        LogMark(3, "00ab12cd"), 700, (12.5, 100.0), [[math.inf, 2.0], [3.0, 4.0]]
    ),
    health=HealthState(2, GuardState(1, [0.5], [["ff", "place", 6]]), "step 7: nothing to learn"),
    data=DataRead(7, "fingerprint", CURSOR, {"step": 2}),
    validation=ValidationState(
        {"held": BestEvaluation(5, 2.5, "nll")}, {"held": 1}, {"held": "text, whole"}
    ),
    unevaluated=["held"],
    rollbacks=[{"step": 3, "kind": "loss_spike", "left_out": [2, 3]}],
    seed=1,
    kept={"schedule.warmup_steps": 4},
    config="seed: 1\n",
    frozen_models={"teacher": "digest"},
    tokenizer="ab12",
)


def stored(state):
    """The record as it is on the disk."""
    return strict_json.loads(json.dumps(state.to_record(), allow_nan=False))


@pytest.mark.parametrize("state", [STATE, RunState(run="a", kept={})], ids=["full", "new"])
def test_all_that_is_remembered_comes_back(state):
    record = stored(state)
    again = RunState.from_record(record)
    assert stored(again) == record
    assert wrong_type(record) == ""


def test_every_field_comes_back_typed():
    again = RunState.from_record(stored(STATE))
    assert again.recorder.log == STATE.recorder.log
    assert again.recorder.by_source == [[math.inf, 2.0], [3.0, 4.0]]
    assert again.recorder.since_record == (12.5, 100.0)
    assert again.health == STATE.health and again.data == STATE.data
    assert again.validation == STATE.validation
    for name in ("run", "step", "num_steps", "unevaluated", "seed", "kept", "config"):
        assert getattr(again, name) == getattr(STATE, name)
    assert again.rollbacks == STATE.rollbacks


def test_the_keys_are_those_of_the_stored_format():
    assert set(stored(STATE)) == {*KEYS, "teacher", "tokenizer"}
    # A run that never had a teacher does not say so.
    assert set(stored(RunState())) == KEYS


def test_what_needs_no_run_can_be_asked_of_any_record():
    record = stored(STATE)
    assert (run_of(record), config_of(record)) == ("a1b2", "seed: 1\n")
    assert best_steps(record) == {"held": 5}
    assert (run_of({}), config_of({}), best_steps({})) == ("", "", {})


def test_a_run_of_imported_weights_says_where_they_are_of():
    state = RunState.from_record(imported_record("a", "models/one", "seed: 1\n", "ab12"))
    assert state.tokenizer == "ab12"
    assert (state.run, state.imported, state.config) == ("a", "models/one", "seed: 1\n")
    assert RunState.from_record(stored(STATE)).imported is None


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"since_record": [1.0]}, "since_record must be two numbers"),
        ({"by_source": [3]}, "by_source must be rows"),
        ({"stale": {"held": "1"}}, "stale must be counts"),
        ({"step": True}, "step is bool, not int"),
        ({"metrics": 3}, "metrics is int, not dict or NoneType"),
        ({"guard": {"found": 1}}, "missing 2 required positional arguments"),
    ],
)
def test_a_value_of_another_type_is_named(change, problem):
    assert problem in wrong_type(stored(STATE) | change)
