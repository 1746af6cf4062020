"""Trackers never reach the loop: not one that raises, nor one that hangs; and all of them get every
record."""

import json
import threading
import time

import numpy as np
import pytest

from data_pipeline.base.errors import DivergedError, TryAgainError, UsageError
from maxtrain.config.schema import ObserveConfig
from maxtrain.config.sections.observe import tracker_problems
from maxtrain.observe import tracking
from maxtrain.observe.samples import CompletionSample
from maxtrain.observe.tracker import RunInfo, Tracker, by_name, numbers
from maxtrain.observe.tracking import FILE_NAME, Trackers, TrackerThread

GENEROUS = 60.0
BOTH = ObserveConfig(trackers=("tensorboard", "wandb"))


class Notes(Tracker):
    """A tracker that keeps its calls."""

    def __init__(self, id=""):
        self.id = id
        self.told = []

    def start(self, run):
        self.run = run
        return self.id

    def log(self, step, values, kind):
        self.told.append((step, dict(values), kind))

    def show_samples(self, step, samples):
        self.told.append((step, samples))

    def rewind(self, step):
        self.told.append(("rewind", step))

    def finish(self, status):
        self.told.append(status)


class BrokenNotes(Notes):
    """Raises at every record but the third, and at nothing else."""

    def log(self, step, values, kind):
        if step != 3:
            raise ConnectionError(f"no route at {step}")
        super().log(step, values, kind)


class NeverStarts(Notes):
    def start(self, run):
        raise SystemExit("no key")


class HangingNotes(Notes):
    """Hangs until the test is over."""

    def __init__(self, over):
        super().__init__()
        self.over = over
        self.is_abandoned = False

    def log(self, step, values, kind):
        self.over.wait()

    def abandon(self):
        self.is_abandoned = True


@pytest.fixture
def over():
    event = threading.Event()
    yield event
    event.set()


def info(folder, **values):
    return RunInfo(folder=folder, name="name", id="0123", **values)


def run(folder, first, second, steps=4, error=None):
    """Log some steps to two trackers, and end with or without an error. Returns the messages."""
    said = []
    kinds = {"tensorboard": lambda config: first, "wandb": lambda config: second}
    with Trackers() as trackers:
        trackers.begin(BOTH, info(folder), said.append, kinds)
        for step in range(1, steps + 1):
            trackers.log(step, {"loss": 1.0 / step}, "train")
        if error:
            raise error
    return said


def test_each_gets_every_record_in_order(tmp_path):
    first = Notes()
    second = Notes()
    assert run(tmp_path, first, second) == []
    steps = [(step, {"loss": 1.0 / step}, "train") for step in (1, 2, 3, 4)]
    assert first.told == second.told == [*steps, "finished"]


def test_values_are_plain_before_they_wait(tmp_path):
    notes = Notes()
    values = {"a": np.float32(0.5), "b": np.int64(3), "none": None, "text": "x", "c": True}
    with Trackers() as trackers:
        config = ObserveConfig(trackers=("tensorboard",))
        trackers.begin(config, info(tmp_path), print, {"tensorboard": lambda config: notes})
        trackers.log(1, values, "train")
    ((_, plain, _), _) = notes.told
    assert plain == {"a": 0.5, "b": 3, "text": "x", "c": True}
    assert [type(value) for value in plain.values()] == [float, int, str, bool]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (TryAgainError("SIGTERM"), "stopped"),
        (KeyboardInterrupt(), "stopped"),
        (DivergedError("nan"), "failed"),
    ],
)
def test_the_status_says_how_the_launch_ended(tmp_path, error, status):
    notes = Notes()
    with pytest.raises(type(error)):
        run(tmp_path, notes, Notes(), error=error)
    assert notes.told[-1] == status


def test_one_that_raises_is_told_once_and_tried_again(tmp_path):
    broken = BrokenNotes()
    notes = Notes()
    said = run(tmp_path, broken, notes)
    assert said == [
        "observe.trackers: tensorboard failed (ConnectionError: no route at 1). The run goes on; "
        "metrics.jsonl has every record.",
        "observe.trackers: tensorboard did not take 3 of 4 records; metrics.jsonl has them.",
    ]
    assert [step for step, *_ in broken.told[:-1]] == [3] and broken.told[-1] == "finished"
    assert len(notes.told) == 5


def test_one_that_does_not_start_is_told_once(tmp_path):
    said = run(tmp_path, NeverStarts(), Notes())
    assert len(said) == 2 and "failed (SystemExit: no key)" in said[0]
    assert "did not take 4 of 4 records" in said[1]


def test_one_that_hangs_delays_the_end_by_a_bounded_time(tmp_path, over, monkeypatch):
    monkeypatch.setitem(tracking.PATIENCE, "finished", 0.5)
    hanging = HangingNotes(over)
    notes = Notes()
    began = time.monotonic()
    said = run(tmp_path, hanging, notes, steps=1000)
    assert time.monotonic() - began < GENEROUS
    assert said == [
        "observe.trackers: tensorboard did not finish in time and is left alone.",
        "observe.trackers: tensorboard did not take 1,000 of 1,000 records; metrics.jsonl has them.",
    ]
    assert hanging.is_abandoned and len(notes.told) == 1001


def test_one_that_hangs_is_told_once_while_the_run_goes_on(tmp_path, over):
    thread = TrackerThread(
        "x", HangingNotes(over), info(tmp_path), print, most_waiting=10, longest_call=0.2
    )
    complaints = []
    for step in range(100):
        thread.log(step, {"loss": 1.0}, "train")
    began = time.monotonic()
    while not any(complaints) and time.monotonic() - began < GENEROUS:
        time.sleep(0.05)
        complaints.append(thread.complaint())
    assert complaints[-1] == (
        "observe.trackers: x has not answered for 0 s. The run goes on; "
        "metrics.jsonl has every record."
    )
    assert thread.complaint() == "", "once is enough"
    # One is in the tracker's hands, or taken up soon; the others waited, or were dropped.
    over.set()
    thread.finish("finished")
    (told,) = thread.end(time.monotonic() + GENEROUS)
    assert "did not take 89 of 100 records" in told or "did not take 90 of 100 records" in told


def test_a_missing_package_is_told_and_ends_nothing(tmp_path):
    said = []

    def missing(config):
        raise UsageError("needs x. Install it: pip install 'maxtrain[x]'.")

    notes = Notes()
    kinds = {"tensorboard": missing, "wandb": lambda config: notes}
    with Trackers() as trackers:
        trackers.begin(BOTH, info(tmp_path), said.append, kinds)
        trackers.log(1, {"loss": 1.0}, "train")
    assert said == ["needs x. Install it: pip install 'maxtrain[x]'. The run goes on without it."]
    assert len(notes.told) == 2


def test_a_later_launch_goes_on_with_the_same_id(tmp_path):
    run(tmp_path, Notes(), Notes("abc"))
    assert json.loads((tmp_path / FILE_NAME).read_text()) == {"run": "0123", "wandb": "abc"}
    first = Notes()
    second = Notes("abc")
    assert run(tmp_path, first, second) == []
    assert (first.run.known_as, second.run.known_as) == ("", "abc")


@pytest.mark.parametrize(
    ("content", "words"),
    [('{"run": "9999", "wandb": "abc"}', "another run, 9999"), ("{", "can't be used")],
)
def test_ids_of_another_run_are_put_aside(tmp_path, content, words):
    (tmp_path / FILE_NAME).write_text(content)
    notes = Notes("new")
    (said,) = run(tmp_path, Notes(), notes)
    assert words in said and "the trackers begin new runs" in said
    assert notes.run.known_as == ""
    assert json.loads((tmp_path / FILE_NAME).read_text())["wandb"] == "new"
    assert [path.read_text() for path in tmp_path.glob("*.damaged-*")] == [content]


def test_going_back_comes_between_the_records(tmp_path):
    notes = Notes()
    with Trackers() as trackers:
        config = ObserveConfig(trackers=("tensorboard",))
        trackers.begin(config, info(tmp_path), print, {"tensorboard": lambda config: notes})
        trackers.log(5, {"loss": 2.0}, "train")
        trackers.rewind(4)
        trackers.log(5, {"loss": 1.0}, "train")
    assert notes.told == [
        (5, {"loss": 2.0}, "train"),
        ("rewind", 4),
        (5, {"loss": 1.0}, "train"),
        "finished",
    ]


def test_samples_come_between_the_records(tmp_path):
    notes = Notes()
    sample = CompletionSample("held", 0, "1+3=", "<4>", 1.5, {}, 4, False)
    with Trackers() as trackers:
        config = ObserveConfig(trackers=("tensorboard",))
        trackers.begin(config, info(tmp_path), print, {"tensorboard": lambda config: notes})
        trackers.log(1, {"loss": 1.0}, "train")
        trackers.show_samples(1, [sample])
        trackers.log(2, {"loss": 0.5}, "train")
    assert notes.told[1] == (1, (sample,))
    assert len(notes.told) == 4


def test_names_that_trackers_show():
    values = {"set": "val", "nll": 2.0, "data": "hash"}
    assert by_name(values, "eval") == {"eval/val/nll": 2.0, "eval/val/data": "hash"}
    assert by_name({"loss": 1}, "train") == {"train/loss": 1}
    assert numbers({"a": 1, "b": "x"}) == {"a": 1.0}


def test_a_tracker_that_is_named_twice_is_refused():
    (problem,) = tracker_problems(ObserveConfig(trackers=("wandb", "wandb")))
    assert "wandb 2 times" in problem and "Name it once" in problem
