"""Steps on the disks of hosts: which are whole, what becomes of them, and what goes on from
them."""

from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.faulty_s3 import flipped
from data_pipeline.base.errors import DamagedError, StorageError
from data_pipeline.base.remote import RemotePath
from maxtrain.checkpoint import quarantine
from maxtrain.checkpoint.listing import latest_state
from maxtrain.checkpoint.local import LocalSteps
from maxtrain.checkpoint.manager import Checkpoints
from maxtrain.checkpoint.orbax_files import copies_are_complete
from maxtrain.checkpoint.quorum import CompleteStep, LocalStep, what_is_missing, whole_steps
from maxtrain.checkpoint.run_state import RecorderState, RunState
from maxtrain.config.schema import CheckpointConfig
from maxtrain.observe.metrics import MetricsLog
from maxtrain.storage.local import open_local, why_not

HOSTS = ["ann", "bob", "cat"]


def test_a_step_is_whole_if_the_processes_that_are_here_have_all_of_its_files():
    held = [
        {5: LocalStep("a", 3, 0b011), 6: LocalStep("b", 3, 0b001)},
        {5: LocalStep("a", 3, 0b100), 6: LocalStep("b", 3, 0b010)},
    ]
    assert whole_steps(held) == {5: CompleteStep("a", [0, 1])}
    assert what_is_missing(held, HOSTS) == {6: "1 of its 3 files are on no disk"}
    # The disk of the second is lost.
    assert whole_steps([held[0], {}]) == {}
    assert what_is_missing([held[0], {}], HOSTS) == {
        5: "1 of its 3 files are on no disk; none of it is with process 1 on bob",
        6: "2 of its 3 files are on no disk; none of it is with process 1 on bob",
    }
    # Another process had all that the new one has lost, and numbers are other ones.
    held = [{}, {5: LocalStep("a", 2, 0b10)}, {5: LocalStep("a", 2, 0b11)}]
    assert (
        whole_steps(held) == {5: CompleteStep("a", [1, 2])} and what_is_missing(held, HOSTS) == {}
    )


def test_parts_of_two_saves_of_a_step_are_not_put_together():
    held = [{5: LocalStep("old", 2, 0b01)}, {5: LocalStep("new", 2, 0b10)}]
    assert whole_steps(held) == {}
    assert "process 1 on bob" in what_is_missing(held, HOSTS)[5]
    whole = [*held, {5: LocalStep("new", 2, 0b01)}]
    assert whole_steps(whole) == {5: CompleteStep("new", [1, 2])}


@given(st.lists(st.integers(0, 15), min_size=1, max_size=4), st.integers(0, 3))
def test_a_step_is_whole_just_if_nothing_of_it_is_missing(files, lost):
    held = [{7: LocalStep("a", 4, theirs)} for theirs in files]
    union = 0
    for theirs in files:
        union |= theirs
    assert (7 in whole_steps(held)) == (union == 15) != (7 in what_is_missing(held, HOSTS * 2))
    # Where one had nothing that others have not, it may be away.
    if lost < len(held):
        rest = [*held[:lost], {}, *held[lost + 1 :]]
        assert (7 in whole_steps(rest)) <= (7 in whole_steps(held))


class Layout:
    """The layout of an array on devices: the process of each device, and its part of the array."""

    def __init__(self, *devices):
        self._parts = {Mock(process_index=process): (part,) for process, part in devices}

    def devices_indices_map(self, shape):
        return self._parts


@pytest.mark.parametrize(
    ("devices", "complete"),
    [
        ([(0, "a"), (1, "b")], True),
        ([(0, "a"), (0, "b"), (1, "a"), (1, "b")], True),
        ([(0, "a"), (0, "a"), (1, "a"), (1, "a")], True),
        # The second of process 0 is a second copy where its first is none, and so with process 1.
        ([(0, "a"), (1, "b"), (1, "a"), (0, "b")], True),
        ([(0, "a"), (2, "b"), (1, "a"), (1, "b"), (0, "b"), (2, "a")], True),
        ([(2, "b"), (0, "a"), (1, "a"), (1, "c"), (0, "b"), (2, "c")], False),
    ],
)
def test_where_copies_would_leave_a_part_out_none_are_written(devices, complete):
    assert copies_are_complete([(Layout(*devices), (4,))]) == complete


def state(value):
    return {"w": jnp.full((64,), value, jnp.float32), "step": jnp.int32(value)}


def record(step, run="r"):
    return RunState(run=run, step=step).to_record()


class Saves:
    """Checkpoints behind a URL, and steps between uploads, as a launch has them."""

    def __init__(self, folder, **settings):
        self.folder = folder
        self.config = CheckpointConfig(asynchronous=False, local="x", **settings)
        self.begin()

    def begin(self, why_not=lambda record: ""):
        """Start a launch and return the state that it finds."""
        (self.folder / "fast").mkdir(exist_ok=True)
        self.local = LocalSteps(self.folder / "fast", self.config.local_keep)
        self.local.look(why_not)
        self.local.agree("x")
        home = RemotePath(f"file://{self.folder}/bucket")
        here = self.folder / "here"
        self.checkpoints = Checkpoints(here, self.config, home=home, local=self.local)

    def save(self, *steps):
        for step in steps:
            uploaded = self.checkpoints.uploads(step, record(step))
            self.checkpoints.save(step, state(step), record(step), uploaded=uploaded)

    def here(self):
        return [
            int(path.name) for path in sorted(self.local.directory.iterdir()) if path.name.isdigit()
        ]

    def newest(self):
        also = self.checkpoints.on_hosts()
        found = latest_state(self.checkpoints.directory, also=also)
        assert found is not None
        arrays, _ = self.checkpoints.restore(state(0), found.step)
        assert int(arrays["step"]) == found.step
        np.testing.assert_array_equal(arrays["w"], state(found.step)["w"])
        return found.step


@pytest.fixture
def saves(tmp_path):
    return Saves(tmp_path, upload_every=3, keep=2)


def test_each_third_save_is_uploaded_and_the_newest_others_are_kept(saves):
    saves.save(1, 2, 3, 4, 5, 6, 7, 8)
    assert saves.checkpoints.steps() == [3, 6]
    # The one before the newest two goes when the next is about to be written.
    assert saves.here() == [5, 7, 8]
    assert saves.newest() == 8
    assert not list((saves.folder / "bucket").glob("0000000[578]"))
    # Another launch goes on counting.
    saves.begin()
    assert saves.newest() == 8
    saves.save(9, 10)
    assert saves.checkpoints.steps() == [6, 9] and saves.newest() == 10


def test_best_and_kept_steps_are_uploaded(tmp_path):
    saves = Saves(tmp_path, upload_every=9, keep=1, keep_every=4, keep_best=True)
    assert [step for step in range(1, 9) if saves.checkpoints.uploads(step, record(step))] == [4, 8]
    best = {"best": {"x": {"step": 5, "nll": 1.0}}}
    assert saves.checkpoints.uploads(5, best) and not saves.checkpoints.uploads(6, best)


def test_what_is_damaged_is_noticed_and_passed_over(saves, capsys):
    saves.save(1, 2, 3, 4, 5)
    (file, *_) = saves.local.directory.glob("00000005/arrays/w/0")
    file.write_bytes(flipped(file.read_bytes()))
    saves.begin()
    with pytest.raises(DamagedError) as raised:
        saves.newest()
    quarantine.put_aside(raised.value)
    assert "the run goes on without it" in capsys.readouterr().err
    saves.begin()
    assert saves.newest() == 4
    # What is gone, or cut short, is known without reading it.
    (file, *_) = saves.local.directory.glob("00000004/arrays/w/0")
    file.unlink()
    saves.begin()
    assert saves.newest() == 3
    (line,) = saves.local.told(3)
    assert line.startswith("Step 4 in checkpoint.local is passed over: 1 of its ")
    file.write_bytes(b"")
    (saves.local.directory / "00000002" / "commit.json").write_text("{}")
    saves.begin()
    assert saves.newest() == 3
    told = saves.local.told(3)
    assert "00000002 is passed over: commit.json" in told[0] and "has 0 bytes" in told[1]
    # With the next save but one all of that is removed.
    saves.save(4, 5)
    assert saves.here() == [4, 5] and not list(saves.local.directory.glob("*.damaged-*"))


def test_going_back_removes_what_is_later(saves):
    saves.save(1, 2, 3, 4, 5)
    saves.checkpoints.discard_after(4)
    assert saves.here() == [2, 4] and saves.newest() == 4
    saves.checkpoints.discard_after(1)
    assert saves.here() == [] and saves.checkpoints.steps() == []
    saves.save(2)
    assert saves.newest() == 2
    # What is not uploaded stays.
    saves.checkpoints.drop_local()
    assert saves.here() == [2]
    saves.checkpoints.save(3, state(3), record(3))
    saves.checkpoints.drop_local()
    assert saves.here() == [] and saves.newest() == 3


def test_a_launch_goes_on_from_no_step_that_its_run_has_left(tmp_path):
    log = MetricsLog(tmp_path, run="r")
    log.append(1, {"loss": 1.0})
    mark = log.mark()
    log.append(2, {"loss": 2.0})
    log.close()
    saved = RunState(run="r", step=1, recorder=RecorderState(log=mark)).to_record()
    assert why_not(saved, tmp_path, "r", None) == ""
    assert "it is of another run, r" in why_not(saved, tmp_path, "s", None)
    assert "it is of another run, r" in why_not(saved, tmp_path, "", None)
    back = [{"step": 1, "kind": "spike", "left_out": [1, 1]}]
    assert why_not(saved, tmp_path, "r", back) == "the run has gone back behind it"
    again = MetricsLog(tmp_path, 0, run="r")
    again.append(1, {"loss": 3.0})
    again.close()
    assert "the run has gone on without it" in why_not(saved, tmp_path, "r", None)


def test_each_process_of_a_host_has_a_folder_of_its_own(tmp_path, monkeypatch):
    place = tmp_path / "s3" / "x"
    with open_local(place, 2, lambda: None) as steps:
        assert steps is not None and steps.directory == place / "0"
    with open_local(None, 2, lambda: None) as steps:
        assert steps is None
    place = tmp_path / "file"
    place.write_text("")
    with (
        pytest.raises(
            StorageError, match=r"can't be written .*Set checkpoint.local to a directory"
        ),
        open_local(place / "x", 2, lambda: None),
    ):
        pass


def test_a_disk_that_is_too_small_is_told_of(saves, monkeypatch):
    abstract = {"w": jax.ShapeDtypeStruct((10**15,), jnp.float32)}
    monkeypatch.setattr(
        "maxtrain.checkpoint.manager.require_space",
        lambda directory, needed: f"{directory.name} {needed.each} {needed.key} {needed.more}",
    )
    assert saves.checkpoints.require_space(abstract).startswith("here")
    saves.local.keep = 4
    told = saves.checkpoints._require_local_space(saves.local, abstract)
    assert told == "fast 4000000000000000 checkpoint.local 5"
