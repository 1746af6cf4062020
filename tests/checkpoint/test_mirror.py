"""Steps in a second directory: whole or not at all, never in the way of training, and found
again."""

import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import jax.numpy as jnp
import pytest

from data_pipeline.base.errors import DamagedError, StorageError
from maxtrain.checkpoint import copying, mirror
from maxtrain.checkpoint.copying import copy_step
from maxtrain.checkpoint.integrity import defect, find_damage, read_commit, survey
from maxtrain.checkpoint.listing import latest_record, second_of
from maxtrain.checkpoint.manager import Checkpoints
from maxtrain.checkpoint.mirror import SecondDirectory
from maxtrain.config.schema import CheckpointConfig

REPOSITORY = Path(__file__).parents[2]


def state(value):
    return {"w": jnp.full((64, 32), value, jnp.float32), "step": jnp.int32(value)}


def open_both(tmp_path, **settings):
    config = CheckpointConfig(asynchronous=False, copy_to=str(tmp_path / "far"), **settings)
    (tmp_path / "far").mkdir(exist_ok=True)
    local = tmp_path / "near" / "run" / "checkpoints"
    return Checkpoints(local, config, second_of(local, config))


def whole(directory):
    """The complete steps, every byte of which is as it was saved."""
    steps = [step for step, why in survey(directory).items() if not why]
    for step in steps:
        path = directory / f"{step:08d}"
        assert not find_damage(path, read_commit(path)["files"])
    return steps


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def largest(step):
    return max(
        (file for file in step.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size
    )


@pytest.fixture
def told(monkeypatch):
    """The warnings about the second directory."""
    lines = []
    monkeypatch.setattr(mirror, "_print", lines.append)
    return lines


def test_good_steps_are_copied_and_the_oldest_removed(tmp_path, told):
    checkpoints = open_both(tmp_path, keep=1, copy_keep=2)
    far = tmp_path / "far" / "run" / "checkpoints"
    for step in (1, 2, 3):
        checkpoints.save(step, state(step), {"step": step})
        assert not checkpoints.settle(30)
    assert whole(far) == [2, 3] and checkpoints.steps() == [3]
    assert not list(far.glob(".*")) and not told
    checkpoints.discard_after(2)
    assert checkpoints.settle(30) == "" and whole(far) == [2]
    checkpoints.save(3, state(30), {"step": 3})
    assert checkpoints.settle(30) == "" and checkpoints.restore(state(0), 3)[0]["step"] == 30
    shutil.rmtree(checkpoints.directory)
    assert checkpoints.restore(state(0), 3)[0]["step"] == 30, "the second one alone"
    checkpoints.close()


def test_another_step_of_the_same_number_is_replaced(tmp_path):
    checkpoints = open_both(tmp_path)
    checkpoints.save(1, state(1), {})
    checkpoints.settle(30)
    shutil.rmtree(checkpoints.directory)
    checkpoints.save(1, state(2), {})
    assert checkpoints.settle(30) == ""
    shutil.rmtree(checkpoints.directory)
    assert checkpoints.restore(state(0))[0]["step"] == 2
    checkpoints.close()


def test_a_place_that_fails_is_told_of_with_growing_gaps_and_stops_nothing(
    tmp_path, told, monkeypatch
):
    checkpoints = open_both(tmp_path, keep=2)
    works = mirror.copy_step

    def fails(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(mirror, "copy_step", fails)
    for step in range(1, 10):
        checkpoints.save(step, state(step), {})
        warning = checkpoints.settle(30)
    assert "`maxtrain checkpoint copy " in warning and checkpoints.steps() == [8, 9]
    assert (
        len(told) == 4
        and "so far 8 copies failed, 0 did not" in told[-1]
        and "No space left" in told[0]
    )
    assert "Training goes on. Check " in told[0]
    monkeypatch.setattr(mirror, "copy_step", works)
    checkpoints.copy_newest()
    assert checkpoints.settle(30) == "" and whole(checkpoints.second) == [9]
    checkpoints.close()


def test_a_slow_place_gets_the_newest_and_what_it_copies_stays(tmp_path, monkeypatch):
    checkpoints = open_both(tmp_path, keep=1)
    begun, go_on, copied = threading.Event(), threading.Event(), []

    def slow(source, *args, **kwargs):
        begun.set()
        assert go_on.wait(30)
        copied.append(source.name)
        return copy_step(source, *args, **kwargs)

    monkeypatch.setattr(mirror, "copy_step", slow)
    checkpoints.save(1, state(1), {})
    assert begun.wait(30)
    for step in (2, 3, 4):
        checkpoints.save(step, state(step), {})  # returns, although nothing is copied
    assert checkpoints.steps() == [1, 4], "what is being copied is not removed"
    assert checkpoints.settle(0.01)
    go_on.set()
    assert checkpoints.settle(30) == "" and copied == ["00000001", "00000004"]
    checkpoints.save(5, state(5), {})
    assert checkpoints.steps() == [5]
    checkpoints.close()


def test_a_damaged_step_is_not_copied(tmp_path, told):
    checkpoints = open_both(tmp_path)
    checkpoints.save(1, state(1), {})
    checkpoints.settle(30)
    checkpoints._second.close()
    checkpoints.save(2, state(2), {})
    flip(largest(checkpoints.directory / "00000002"))
    again = SecondDirectory(checkpoints.directory, checkpoints.second, 3)
    again.offer()
    assert not again.settle(30) and whole(checkpoints.second) == [1]
    assert "00000002 is damaged" in told[0] and not list(checkpoints.second.glob(".*"))
    again.close()
    checkpoints.close()


def test_a_place_that_is_not_there_is_an_error_only_where_it_may_hide_checkpoints(tmp_path, capsys):
    config = CheckpointConfig(copy_to=str(tmp_path / "unmounted"))
    local = tmp_path / "run" / "checkpoints"
    with pytest.raises(StorageError, match="Mount or make it, or set another one") as caught:
        second_of(local, config)
    assert caught.value.exit_code == 74
    checkpoints = Checkpoints(local, CheckpointConfig(asynchronous=False))
    checkpoints.save(1, state(1), {})
    checkpoints.close()
    assert second_of(local, config) == tmp_path / "unmounted" / "run" / "checkpoints"
    assert "Mount or make it" in capsys.readouterr().err


def test_the_newest_record_of_both_is_found(tmp_path):
    checkpoints = open_both(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, state(step), {"step": step})
        checkpoints.settle(30)
    far = checkpoints.second
    shutil.rmtree(checkpoints.directory / "00000002")
    assert latest_record(checkpoints.directory, second=far) == {"step": 2}
    assert latest_record(checkpoints.directory, lambda record: record["step"] < 2, far) == {
        "step": 1
    }
    assert latest_record(tmp_path / "empty", second=far) == {"step": 2}
    flip(largest(far / "00000002"))
    with pytest.raises(DamagedError, match=f"{far}/00000002 is damaged"):
        checkpoints.restore(state(0), 2)
    checkpoints.close()


def test_a_copy_is_read_again_if_asked(tmp_path, monkeypatch):
    checkpoints = open_both(tmp_path)
    checkpoints.save(1, state(1), {})
    checkpoints.close()
    source = checkpoints.directory / "00000001"
    monkeypatch.setattr(copying, "sync", lambda *paths: flip(largest(paths[-1])))
    with pytest.raises(StorageError, match=r"is not like .*Check that disk, then copy again"):
        copy_step(source, tmp_path / "other", read_back=True)
    assert not list((tmp_path / "other").iterdir())
    largest(source).write_bytes(b"short")
    with pytest.raises(DamagedError, match="has 5 bytes instead of"):
        copy_step(source, tmp_path / "other")


VICTIM = """
    import sys
    from pathlib import Path
    import jax
    jax.config.update("jax_platforms", "cpu")
    import jax.numpy as jnp
    from maxtrain import failpoints
    from maxtrain.checkpoint.listing import second_of
    from maxtrain.checkpoint.manager import Checkpoints
    from maxtrain.config.schema import CheckpointConfig

    failpoints.arm()
    near, far = Path(sys.argv[1], "run", "checkpoints"), Path(sys.argv[2])
    config = CheckpointConfig(copy_to=str(far), copy_keep=2)
    checkpoints = Checkpoints(near, config, second_of(near, config))
    for step in range(1, 6):
        checkpoints.save(step, {"w": jnp.full((64, 32), step, jnp.float32), "step": jnp.int32(step)}, {"step": step})
        checkpoints.wait()
        checkpoints.settle(60)
    checkpoints.close()
"""


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize(
    ("place", "far"),
    [
        ("during_copy", [2, 3]),
        ("after_copy", [2, 3, 4]),
        ("before_commit", [2, 3]),
        ("after_commit", [2, 3]),
    ],
)
def test_killed_while_copying(tmp_path, place, far, monkeypatch):
    """The existing copy is complete, the next launch continues the copy, and nothing is left of the
    previous one."""
    (tmp_path / "far").mkdir()
    command = [
        sys.executable,
        "-c",
        textwrap.dedent(VICTIM),
        str(tmp_path / "near"),
        str(tmp_path / "far"),
    ]
    monkeypatch.setenv("MAXTRAIN_FAILPOINT", f"{place}:kill:4")
    victim = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert victim.returncode == -signal.SIGKILL, victim.stderr
    copies = tmp_path / "far" / "run" / "checkpoints"
    assert whole(copies) == far and all(not defect(path) for path in copies.glob("0*"))
    checkpoints = open_both(tmp_path, copy_keep=2)
    newest = checkpoints.latest()
    checkpoints.copy_newest()
    assert checkpoints.settle(30) == "" and whole(copies)[-1] == newest
    checkpoints.save(9, state(9), {})
    assert checkpoints.settle(30) == "" and whole(copies) == [newest, 9]
    assert not list(copies.glob(".*"))
    checkpoints.close()


def test_a_folder_that_is_gone_is_told_of_and_not_made(tmp_path, told):
    checkpoints, far = open_both(tmp_path), tmp_path / "far"
    far.rmdir()
    checkpoints.save(1, state(1), {"step": 1})
    assert "lacks the newest checkpoint" in checkpoints.settle(30) and not far.exists()
    assert f"{far} is no directory" in told[0] and "Training goes on. Check" in told[0]
    far.mkdir()
    checkpoints.copy_newest()
    assert checkpoints.settle(30) == "" and whole(far / "run" / "checkpoints") == [1]
    checkpoints.close()
