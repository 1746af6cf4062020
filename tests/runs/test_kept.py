"""Kept checkpoints are valid: weights that are not finite are never saved, and nothing worthless
takes the place of good steps."""

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from maxtrain import failpoints
from maxtrain.checkpoint import copying, manager
from maxtrain.checkpoint.listing import saved_digests, saved_steps
from maxtrain.commands import checkpoint
from maxtrain.config import load_config
from maxtrain.observe.metrics import read_metrics
from maxtrain.trainer import validation
from maxtrain.trainer.loop import main

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("this_process")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_run) -> Path:
    """A config beside its data, and a run of 9 steps that nobody disturbed."""
    folder = tmp_path_factory.mktemp("kept")
    evaluation = {"heldout": {"path": str(folder / "data" / "eval")}}
    tiny_run(
        folder,
        "--holdout",
        "0.2",
        steps=9,
        checkpoint_interval=3,
        eval_interval=3,
        eval={"sets": evaluation},
        schedule={"name": "constant", "warmup_steps": 1},
        mesh={"data": 1, "fsdp": 8},
        checkpoint={"keep": 2},
    )
    assert train(folder, "whole") == 0
    return folder


def train(folder, run_name, *overrides):
    return main(load_config([f"config={folder / 'tiny.yaml'}", f"run_name={run_name}", *overrides]))


def steps(folder, run_name):
    return list(saved_steps(folder / "runs" / run_name / "checkpoints"))


def weights(folder, run_name):
    return saved_digests(folder / "runs" / run_name / "checkpoints")[9]


@pytest.mark.long
@pytest.mark.parametrize(
    "poison",
    [["optimizer.learning_rate=3e38"], ["optimizer.eps=1e-37", "optimizer.clip_norm=3e38"]],
    ids=["learning_rate", "eps"],
)
def test_poisoned_updates_never_take_the_place_of_good_steps(folder, poison, capsys, request):
    run = f"poisoned-{request.node.callspec.id}"
    assert train(folder, run, "steps=6") == 0 and steps(folder, run) == [3, 6]
    good = saved_digests(folder / "runs" / run / "checkpoints")
    code = train(folder, run, "steps=15", "anomaly.max_skipped=3", *poison)
    said = capsys.readouterr().err
    assert code in (0, 70) and ("Lower optimizer.learning_rate" in said) == (code == 70)
    assert checkpoint.main(["verify", str(folder / "runs" / run)]) == 0
    if code == 70:
        kept = saved_digests(folder / "runs" / run / "checkpoints")
        assert kept[6] == good[6] and len(kept) == 2


@pytest.mark.long
def test_weights_that_memory_damaged_are_not_saved_and_the_same_command_goes_on(
    folder, monkeypatch, capsys
):
    """Damaged after the step that is saved: the device has seen nothing yet when the save
    begins."""
    monkeypatch.setenv(failpoints.VARIABLE, "after_step:nan:6")
    assert train(folder, "memory", "eval_interval=0") == 75
    said = capsys.readouterr().err
    assert (
        "step 6 is not saved: params." in said and "not finite, although every update was" in said
    )
    assert "it goes on from the last checkpoint" in said and steps(folder, "memory") == [3]
    monkeypatch.setenv(failpoints.VARIABLE, "before_step:nan:8")
    assert train(folder, "memory", "log_interval=9", "checkpoint_interval=9") == 75
    said = capsys.readouterr().err
    assert "not finite, although every update was" in said and steps(folder, "memory") == [3]
    monkeypatch.delenv(failpoints.VARIABLE)
    assert train(folder, "memory") == 0
    assert weights(folder, "memory") == weights(folder, "whole")


@pytest.mark.long
def test_nothing_is_saved_or_removed_while_steps_are_not_finite(folder, monkeypatch, capsys):
    monkeypatch.setenv(failpoints.VARIABLE, "data:nan:5,data:nan:6")
    assert train(folder, "postponed") == 0
    said = capsys.readouterr().out
    assert (
        "step 6 is not saved, since the last 2 steps were not finite; the next good step is."
        in said
    )
    assert re.findall(r"checkpoint: step (\d+)$", said, re.MULTILINE) == ["3", "7", "9"]


@pytest.mark.long
def test_a_run_that_ends_with_steps_that_were_not_finite_says_so(folder, monkeypatch, capsys):
    monkeypatch.setenv(failpoints.VARIABLE, "data:nan:8,data:nan:9")
    for _ in range(2):
        assert train(folder, "bad-end") == 70
        out, err = capsys.readouterr()
        assert "the last 2 steps were not finite and changed nothing" in err
        assert "The newest checkpoint is that of step 6." in err and "write text" not in out
        assert steps(folder, "bad-end") == [3, 6]


@pytest.mark.long
def test_a_run_that_hardly_trained_does_not_end_with_0(folder, monkeypatch, capsys):
    """All steps but the last were skipped: that one is saved, and the run is no success, however
    often it is started."""
    monkeypatch.setenv(failpoints.VARIABLE, ",".join(f"data:nan:{step}" for step in range(1, 20)))
    options = ["steps=20", "checkpoint_interval=0", "eval_interval=0", "anomaly.max_skipped=30"]
    for _ in range(2):
        assert train(folder, "idle", *options) == 70
        out, err = capsys.readouterr()
        assert (
            "19 of the run's 20 steps changed nothing" in err
            and "lower optimizer.learning_rate" in err
        )
        assert "write text" not in out
    assert steps(folder, "idle") == [20]


@pytest.mark.long
def test_an_evaluation_that_is_not_finite_ends_the_run_and_its_step_is_not_saved(
    folder, monkeypatch, capsys
):
    whole = validation.evaluate
    monkeypatch.setattr(validation, "evaluate", lambda *args: whole(*args) | {"nll": float("nan")})
    assert train(folder, "nan-eval") == 70
    out, err = capsys.readouterr()
    assert "step 3: the loss on eval.sets.heldout is nan, so this step is not saved" in err
    assert (
        "There is no checkpoint." in err
        and "Lower optimizer.learning_rate" in err
        and "write text" not in out
    )
    (record,) = [r for r in read_metrics(folder / "runs" / "nan-eval") if r["kind"] == "eval"]
    assert math.isnan(record["nll"])
    assert steps(folder, "nan-eval") == []


@pytest.mark.long
def test_with_keep_1_the_step_before_is_kept_until_the_newest_is_known_to_be_good(
    folder, monkeypatch
):
    left, confirm = [], manager.Checkpoints.confirm
    monkeypatch.setattr(
        manager.Checkpoints,
        "confirm",
        lambda self, step: left.append(self.steps()) or confirm(self, step),
    )
    assert train(folder, "one", "checkpoint.keep=1", "checkpoint.asynchronous=false") == 0
    assert [3, 6] in left and steps(folder, "one") == [9]


@pytest.mark.long
def test_training_goes_on_when_old_steps_can_not_be_removed(folder, monkeypatch, capfd):
    def refuse(path, before_files):
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(copying, "remove_step", refuse)
        assert train(folder, "unremoved", "checkpoint.keep=1") == 0
    assert "WARNING: removing old checkpoints from" in capfd.readouterr().err
    assert steps(folder, "unremoved") == [3, 6, 9] and weights(folder, "unremoved") == weights(
        folder, "whole"
    )


@pytest.mark.long
@pytest.mark.processes
def test_prune_leaves_a_run_alone_that_is_being_trained(folder, capsys):
    run = folder / "runs" / "whole"
    hold = "import sys; from pathlib import Path; from maxtrain.observe.lock import RunLock; lock = RunLock(Path(sys.argv[1]))"
    hold += "; lock.__enter__(); print(); sys.stdin.read()"
    words = [sys.executable, "-c", hold, str(run)]
    with subprocess.Popen(
        words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout and process.stdout.readline()
        before = steps(folder, "whole")
        assert checkpoint.main(["prune", str(run), "--keep", "1", "--apply"]) == 74
        assert f"{run} is being written by process {process.pid}" in capsys.readouterr().err
        assert checkpoint.main(["prune", str(run / "checkpoints"), "--keep", "1"]) == 0, (
            "looking is free"
        )
        process.communicate()
    assert steps(folder, "whole") == before


@pytest.mark.long
def test_fewer_steps_than_there_are_is_an_end_not_a_wait_for_ever(folder, capsys):
    assert train(folder, "lowered") == 0
    before = read_metrics(folder / "runs" / "lowered")
    assert train(folder, "lowered", "steps=5") == 0
    said = capsys.readouterr().out
    assert "has 9 steps, more than the 5 of the plan. All its steps are kept." in said
    assert read_metrics(folder / "runs" / "lowered") == before and steps(folder, "lowered") == [
        6,
        9,
    ]
