"""A run folder has one writer; a killed one leaves it free."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from data_pipeline.base.errors import LockedError, StorageError
from maxtrain.observe import lock
from maxtrain.observe.lock import RunLock, holder

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys, time
from pathlib import Path
from maxtrain.observe.lock import RunLock
with RunLock(Path(sys.argv[1])):
    print("has it", flush=True)
    time.sleep(600)
"""


@pytest.mark.processes
def test_a_second_writer_is_told_who_has_it_until_that_is_killed(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout and process.stdout.readline() == b"has it\n"
            with (
                pytest.raises(StorageError, match="set run_name to another name") as caught,
                RunLock(tmp_path),
            ):
                pass
            assert f"{tmp_path} is being written by process {process.pid} on " in str(caught.value)
            with pytest.raises(LockedError), RunLock(tmp_path, needed=False):
                pass
        finally:
            process.kill()
    assert holder(tmp_path), "it could not tidy up"
    with RunLock(tmp_path):
        assert str(process.pid) not in holder(tmp_path)
    assert holder(tmp_path) == ""


def test_a_run_that_ended_leaves_its_folder_free(tmp_path):
    for _ in range(2):
        with RunLock(tmp_path / "new"):
            assert holder(tmp_path / "new").startswith("process ")
    assert holder(tmp_path) == ""


def test_a_folder_that_was_made_for_the_lock_alone_goes_with_it(tmp_path):
    with RunLock(tmp_path / "new"):
        pass
    assert list(tmp_path.iterdir()) == []
    with RunLock(tmp_path / "new"):
        (tmp_path / "new" / "file").touch()
    assert (tmp_path / "new" / "file").exists()
    (tmp_path / "empty").mkdir()
    with RunLock(tmp_path / "empty"):
        pass
    assert (tmp_path / "empty").is_dir()


def test_a_lock_that_was_removed_while_it_was_taken_is_taken_again(tmp_path, monkeypatch):
    real = RunLock._lock
    calls = []

    def late(self):
        real(self)
        calls.append(self)
        if len(calls) == 1:
            (tmp_path / "lock").unlink()

    monkeypatch.setattr(RunLock, "_lock", late)
    with RunLock(tmp_path):
        assert len(calls) == 2
        assert holder(tmp_path).startswith("process ")


def test_a_lock_that_is_not_needed_is_not_waited_for_at_the_end(tmp_path, monkeypatch):
    """The process ends even while the file system of the lock hangs."""
    back, freed, free = threading.Event(), threading.Event(), RunLock._free
    monkeypatch.setattr(lock, "_PATIENCE", 0.01)
    monkeypatch.setattr(RunLock, "_free", lambda self: (back.wait(60), free(self), freed.set()))
    with RunLock(tmp_path, needed=False):
        pass
    assert holder(tmp_path), "it is not freed yet"
    back.set()
    assert freed.wait(60) and holder(tmp_path) == ""


def test_a_damaged_lock_file_is_no_obstacle(tmp_path):
    (tmp_path / "lock").write_bytes(b"process \xff")
    assert holder(tmp_path) == "process \ufffd"
    with RunLock(tmp_path):
        assert holder(tmp_path).startswith(f"process {os.getpid()} on ")


def test_a_place_that_can_not_have_a_lock_is_taken_without_unless_it_is_needed(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(StorageError, match="Set output_dir to a folder"),
        RunLock(tmp_path / "file" / "run"),
    ):
        pass
    with RunLock(tmp_path / "file" / "run", needed=False):
        assert (tmp_path / "file").read_bytes() == b""
