"""Runs and their checkpoints, made by the clock, and damaged: going on ends at the same weights,
bit for bit."""

import errno
import itertools
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import jax
import pytest

from maxtrain import failpoints
from maxtrain.checkpoint import manager
from maxtrain.checkpoint.listing import saved_digests, saved_steps
from maxtrain.config import load_config
from maxtrain.parallel import agreement
from maxtrain.trainer import loop as train_module
from maxtrain.trainer.loop import main

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("this_process")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_run) -> Path:
    """Config beside its data, and a run of 12 steps with checkpoints at 4, 8 and 12."""
    folder = tmp_path_factory.mktemp("damage")
    tiny_run(folder, steps=12, log_interval=4, checkpoint_interval=4, schedule={"warmup_steps": 5})
    assert train(folder, "whole") == 0
    return folder


def train(folder, run_name, *overrides):
    return main(load_config([f"config={folder / 'tiny.yaml'}", f"run_name={run_name}", *overrides]))


def copied(trained, run_name):
    """The checkpoints of a copy of the run."""
    shutil.copytree(trained / "runs" / "whole", trained / "runs" / run_name)
    return trained / "runs" / run_name / "checkpoints"


def digests(checkpoints):
    return saved_digests(checkpoints)[12]


def flip(step, pattern="arrays/**/*"):
    """Flip one bit of the largest file of a step."""
    file = max(
        (file for file in step.glob(pattern) if file.is_file()),
        key=lambda file: file.stat().st_size,
    )
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    return file


@pytest.mark.long
def test_damaged_steps_are_put_aside_and_the_run_ends_at_the_same_weights(trained, capfd):
    checkpoints = copied(trained, "flipped")
    names = [flip(checkpoints / step).name for step in ("00000008", "00000012")]
    assert train(trained, "flipped") == 0
    out, err = capfd.readouterr()
    assert all(name in err and "crc32" in err for name in names) and err.count("WARNING: ") == 2
    assert "the run goes on from the checkpoint before it" in err and "Goes on from step 4" in out
    assert digests(checkpoints) == digests(trained / "runs" / "whole" / "checkpoints")
    assert [path.name[:17] for path in sorted(checkpoints.glob("*.damaged-*"))] == [
        "00000008.damaged-",
        "00000012.damaged-",
    ]
    assert train(trained, "flipped") == 0
    out, err = capfd.readouterr()
    assert "Nothing to do" in out and "WARNING" not in err


def empty(step):
    shutil.rmtree(step)
    step.mkdir()


@pytest.mark.long
@pytest.mark.parametrize(
    "spoil",
    [
        empty,
        lambda step: flip(step, "record.json"),
        lambda step: os.truncate(step / "commit.json", 9),
    ],
)
def test_incomplete_steps_are_put_aside_with_a_message(trained, capfd, spoil):
    checkpoints = copied(trained, name := f"incomplete{len(list((trained / 'runs').iterdir()))}")
    spoil(checkpoints / "00000012")
    assert train(trained, name) == 0
    assert (
        "00000012 is no checkpoint: " in (out := capfd.readouterr().out)
        and "Goes on from step 8" in out
    )
    assert digests(checkpoints) == digests(trained / "runs" / "whole" / "checkpoints")
    assert len(list(checkpoints.glob("00000012.damaged-*"))) == 1


@pytest.mark.long
def test_a_run_without_a_good_checkpoint_ends_and_never_starts_over(trained, capfd):
    checkpoints = copied(trained, "lost")
    for step in checkpoints.iterdir():
        flip(step)
    for _ in range(2):
        assert train(trained, "lost") == 74
        err = capfd.readouterr().err
        assert (
            "only damaged ones" in err
            and "Copy a good one there, or start afresh with another run_name" in err
        )
    assert len(list(checkpoints.glob("*.damaged-*"))) == 3 == len(list(checkpoints.iterdir()))


@pytest.mark.long
def test_a_full_disk_ends_the_run_before_its_first_step(trained, capfd, monkeypatch):
    monkeypatch.setattr(
        shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(10**6, 10**6, 5)
    )
    assert train(trained, "full") == 74
    out, err = capfd.readouterr()
    assert "set output_dir to another disk" in err and "step" not in out.partition("devices: ")[2]
    assert train(trained, "whole") == 0, "a finished run needs no space"


@pytest.mark.long
def test_saves_by_the_clock_are_as_good_to_go_on_from(trained, monkeypatch, capsys):
    """The clock is looked at once a step and once a save, and has gone on by 12 s each time."""
    ticks = itertools.count(step=12)
    monkeypatch.setattr(manager, "time", types.SimpleNamespace(monotonic=lambda: next(ticks)))
    monkeypatch.setenv(failpoints.VARIABLE, "after_step:raise:11")
    clock = ["checkpoint_interval=0", "checkpoint.minutes=1", "checkpoint.keep=20"]
    assert (
        train(trained, "clocked", *clock) == 70
        and "raised at after_step" in capsys.readouterr().err
    )
    checkpoints = trained / "runs" / "clocked" / "checkpoints"
    assert list(saved_steps(checkpoints)) == [5, 10]
    monkeypatch.delenv(failpoints.VARIABLE)
    assert (
        train(trained, "clocked", *clock) == 0 and "Goes on from step 10" in capsys.readouterr().out
    )
    assert digests(checkpoints) == digests(trained / "runs" / "whole" / "checkpoints")


@pytest.mark.long
def test_a_new_machine_goes_on_from_the_second_directory(trained, capfd, monkeypatch):
    """Killed in the step after a save; then its own disk is empty, or its newest checkpoint is
    damaged."""
    far, run = trained / "far", trained / "runs" / "moved"
    copies = [f"checkpoint.copy_to={far}", "checkpoint.copy_keep=2"]
    assert train(trained, "moved", *copies) == 74 and "Mount or make it" in capfd.readouterr().err
    far.mkdir()
    monkeypatch.setenv(failpoints.VARIABLE, "after_step:raise:9")
    assert train(trained, "moved", *copies) == 70
    monkeypatch.delenv(failpoints.VARIABLE)
    flip(run / "checkpoints" / "00000008")
    shutil.copytree(
        trained, elsewhere := trained.with_name("elsewhere"), ignore=lambda *a: ["runs"]
    )
    capfd.readouterr()
    assert train(trained, "moved", *copies) == 0
    out, err = capfd.readouterr()
    assert (
        "00000008 is damaged" in err
        and "Goes on from step 8" in out
        and "far/moved/checkpoints" in out
    )
    assert digests(run / "checkpoints") == digests(far / "moved" / "checkpoints")
    assert list(saved_steps(far / "moved" / "checkpoints")) == [8, 12]
    shutil.rmtree(far / "moved" / "checkpoints" / "00000012")
    new = [
        "checkpoint.copy_keep=2",
        f"checkpoint.copy_to={elsewhere / 'far'}",
        f"output_dir={elsewhere / 'runs'}",
    ]
    assert train(trained, "moved", *new) == 0
    assert f"Goes on from step 8 in {elsewhere}" in capfd.readouterr().out
    assert digests(elsewhere / "far" / "moved" / "checkpoints") == digests(
        trained / "runs" / "whole" / "checkpoints"
    )


@pytest.mark.long
@pytest.mark.processes
def test_another_run_of_the_same_name_that_copies_to_the_same_place_is_refused(trained, capsys):
    far = trained / "shared"
    far.mkdir()
    hold = "import sys; from pathlib import Path; from maxtrain.observe.lock import RunLock; lock = RunLock(Path(sys.argv[1]))"
    hold += "; lock.__enter__(); print(); sys.stdin.read()"
    held = [sys.executable, "-c", hold, str(far / "double")]
    with subprocess.Popen(held, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline()
        assert train(trained, "double", f"checkpoint.copy_to={far}") == 74
        said = capsys.readouterr().err
        assert (
            f"{far / 'double'} is being written by process {process.pid} on " in said
            and "set run_name to another" in said
        )
        process.communicate()
    assert train(trained, "double", f"checkpoint.copy_to={far}") == 0
    assert digests(far / "double" / "checkpoints") == digests(
        trained / "runs" / "whole" / "checkpoints"
    )


@pytest.mark.long
def test_a_process_that_is_lost_while_a_damaged_step_is_put_aside_is_no_error_of_this_one(
    trained, monkeypatch, capsys
):
    def lose(damage):
        raise jax.errors.JaxRuntimeError("Gloo all-gather failed: Connection reset by peer")

    checkpoints = copied(trained, "lost-meanwhile")
    flip(checkpoints / "00000012")
    monkeypatch.setattr(train_module, "put_aside", lose)
    monkeypatch.setattr(
        agreement, "is_loss", lambda error: isinstance(error, jax.errors.JaxRuntimeError)
    )
    assert train(trained, "lost-meanwhile") == 75
    assert "can't reach another process of this job" in capsys.readouterr().err


@pytest.mark.long
def test_a_lock_that_can_not_be_written_is_an_error_of_all(trained, monkeypatch, capsys):
    def full(lock):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    told, raise_together = [], agreement.raise_together
    monkeypatch.setattr(train_module.RunLock, "__enter__", full)
    monkeypatch.setattr(
        agreement,
        "raise_together",
        lambda error: told.append(error) or raise_together(error),
    )
    assert train(trained, "unlocked") == 74
    assert [error.errno for error in told if error] == [
        errno.ENOSPC
    ] and "Free space or restore access" in capsys.readouterr().err
