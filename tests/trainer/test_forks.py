"""Runs that continue from a checkpoint of another run: copied by `maxtrain checkpoint copy`, or
forked by checkpoint.fork_from. With the same config both are the run that was never interrupted,
bit for bit."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from data_pipeline.base.errors import ConfigError, StorageError
from maxtrain import failpoints
from maxtrain.checkpoint.listing import complete, read_record, saved_digests
from maxtrain.checkpoint.rollback import read_rollbacks
from maxtrain.commands import checkpoint, replay, status
from maxtrain.config import load_config, to_yaml
from maxtrain.config.sections.checkpoint import fork_source
from maxtrain.observe.launches import read_launches, write_launches
from maxtrain.observe.metrics import OF_THE_MACHINE, metrics_owner, read_metrics
from maxtrain.rl.rollout import Rollout
from maxtrain.trainer import forks
from maxtrain.trainer.forks import origins_of, starting_weights
from maxtrain.trainer.loop import main
from maxtrain.trainer.run_dir import run_id
from tests.support.url_runs import on_two_hosts

ROOT = Path(__file__).parents[2]
STEPS = 8
EMPTY = Rollout(
    prompts=np.zeros(0, np.int32),
    prompt_lengths=np.zeros(0, np.int32),
    tokens=np.zeros(0, np.int32),
    lengths=np.zeros(0, np.int32),
    sampled=np.zeros(0, np.float32),
    old=np.zeros(0, np.float32),
    reference=np.zeros(0, np.float32),
    truncated=np.zeros(0, bool),
    rewards=np.zeros((0, 0), np.float32),
    advantages=np.zeros(0, np.float32),
    about={},
)
pytestmark = pytest.mark.usefixtures("this_process")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_run) -> Path:
    """A config beside its data, and the run `whole` with checkpoints at 2, 4, 6 and 8."""
    folder = tmp_path_factory.mktemp("forks")
    tiny_run(
        folder,
        "--holdout",
        "0.2",
        steps=STEPS,
        checkpoint_interval=2,
        eval_interval=3,
        eval={"sets": {"held": {"path": str(folder / "data" / "eval")}}},
        schedule={"name": "constant", "warmup_steps": 1},
        mesh={"data": 1, "fsdp": 8},
        checkpoint={"keep": 9},
    )
    assert train(folder, "whole") == 0
    return folder


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    """Long paths in messages are not wrapped."""
    monkeypatch.setenv("COLUMNS", "500")


def train(folder, name, *more):
    return main(load_config([f"config={folder}/tiny.yaml", f"run_name={name}", *more]))


def fork(folder, name, *more, source="whole", step="@4"):
    return train(folder, name, f"checkpoint.fork_from={folder}/runs/{source}{step}", *more)


def copy(folder, name, *more, source="whole", code=0):
    words = ["copy", str(folder / "runs" / source), str(folder / "runs" / name), *more]
    assert checkpoint.main(words) == code


def numbers(run, last=STEPS):
    """The records of a run without what depends on the machine."""
    kept = []
    for record in read_metrics(run):
        if record["step"] <= last:
            values = {name: record[name] for name in record if name not in OF_THE_MACHINE}
            kept.append(json.dumps(values, sort_keys=True))
    return kept


def assert_like(folder, name, other="whole", since=4, runs="runs"):
    """Two runs have the same records, and the same arrays at the checkpoints after a step."""
    ours = folder / runs / name
    theirs = folder / runs / other
    assert numbers(ours) == numbers(theirs)
    ours = saved_digests(ours / "checkpoints")
    theirs = saved_digests(theirs / "checkpoints")
    assert max(ours) == max(theirs) == STEPS
    for step in ours:
        assert step < since or ours[step] == theirs[step]


def flip(step):
    """Change one bit of the largest file of a step."""
    files = [file for file in step.glob("arrays/**/*") if file.is_file()]
    file = max(files, key=lambda file: file.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


@pytest.mark.long
@pytest.mark.every_dose
def test_a_fork_and_a_copy_are_the_uninterrupted_run_bit_for_bit(folder, capfd):
    assert fork(folder, "forked") == 0
    said = capfd.readouterr().out
    assert "changed since" not in said and "are lost" not in said, said
    assert_like(folder, "forked")
    run = folder / "runs" / "forked"
    assert sorted(complete(run / "checkpoints")) == [4, 6, 8]
    identity = run_id(run)
    assert identity != run_id(folder / "runs" / "whole") and metrics_owner(run) == identity
    (origin,) = origins_of(run)
    assert origin.run == run_id(folder / "runs" / "whole") and origin.step == 4
    launches = read_launches(run)
    assert [launch["step"] for launch in launches] == [0, 4]
    assert launches[1]["forked_from"] == origin._asdict() and "forked_from" not in launches[0]
    assert {launch["run"] for launch in launches} == {identity}
    # The same command again has nothing to do.
    assert fork(folder, "forked") == 0
    assert "Nothing to do" in capfd.readouterr().out
    assert replay.main([str(run), "--steps", "4:8"]) == 0
    assert status.main([str(run)], "status") == 0
    assert f"forked from {folder}/runs/whole at step 4" in capfd.readouterr().out

    copy(folder, "copied", "--step", "4")
    run = folder / "runs" / "copied"
    assert sorted(complete(run / "checkpoints")) == [4]
    assert run_id(run) not in ("", identity, origin.run)
    assert origins_of(run) == [origin]
    capfd.readouterr()
    assert status.main([str(run)], "status") == 0
    assert "step 4 saved" in capfd.readouterr().out
    assert main(load_config([f"config={run}/config.yaml"])) == 0
    said = capfd.readouterr().out
    assert "Goes on from step 4" in said and "are lost" not in said and "damaged" not in said
    assert_like(folder, "copied")
    assert checkpoint.main(["verify", str(run)]) == 0


@pytest.mark.long
def test_a_copy_continues_by_its_name_and_descends_from_a_fork(folder):
    assert fork(folder, "first", "steps=6", step="@2") == 0
    copy(folder, "second", source="first")
    # The command of the first run, with the other name.
    assert fork(folder, "second", step="@2") == 0
    assert_like(folder, "second")
    assert [origin.step for origin in origins_of(folder / "runs" / "second")] == [2, 6]


@pytest.mark.long
def test_branches_have_the_same_losses_until_their_schedules_differ(folder, capfd):
    schedule = ["schedule.name=wsd", "schedule.warmup_steps=1"]
    for name, steps in (("short", 8), ("long", 10)):
        decay = f"schedule.decay_fraction={4 / steps}"
        assert fork(folder, name, f"steps={steps}", *schedule, decay) == 0
        said = capfd.readouterr().out
        assert f"changed since {folder}/runs/whole: schedule.name: constant -> wsd" in said
        assert "run_name" not in said.partition("step 5/")[0]
    whole, short, long = (
        {
            record["step"]: record
            for record in read_metrics(folder / "runs" / name)
            if record["kind"] == "train"
        }
        for name in ("whole", "short", "long")
    )
    for step in range(1, STEPS + 1):
        assert short[step]["batch"] == whole[step]["batch"] == long[step]["batch"]
    # The long branch decays from step 7 on, the short one from step 5 on. The first update of a
    # decay is at the peak, but for rounding, and shows in the loss of the next step.
    for branch, last in ((short, 5), (long, 7)):
        for step in range(1, last + 1):
            assert branch[step]["loss"] == whole[step]["loss"]
    assert short[8]["learning_rate"] < whole[8]["learning_rate"] == long[6]["learning_rate"]
    assert short[8]["loss"] != whole[8]["loss"]


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("fault", ["restore:kill:4", "during_save:kill:4", "before_step:kill:6"])
def test_a_fork_that_is_killed_goes_on_bit_for_bit(folder, fault, capfd):
    name = fault.replace(":", "-")
    words = [f"config={folder}/tiny.yaml", f"run_name={name}", "checkpoint.asynchronous=false"]
    source = f"checkpoint.fork_from={folder}/runs/whole@4"
    done = subprocess.run(
        [sys.executable, "-m", "maxtrain.train", *words, source],
        cwd=ROOT,
        env=os.environ | {failpoints.VARIABLE: fault},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    if fault.startswith("during_save"):
        # Without the key it would begin at random, with the records of the other run.
        assert main(load_config(words)) == 78
    capfd.readouterr()
    assert main(load_config([*words, source])) == 0
    has_saved = fault.startswith("before_step")
    expected = "Goes on from step 4" if has_saved else "continues from its step 4"
    assert expected in capfd.readouterr().out
    assert_like(folder, name)


@pytest.mark.long
def test_a_fork_does_not_need_the_other_run_again(folder, capfd):
    shutil.copytree(folder / "runs" / "whole", folder / "runs" / "gone")
    assert fork(folder, "orphan", "steps=6", source="gone") == 0
    shutil.rmtree(folder / "runs" / "gone")
    assert fork(folder, "orphan", source="gone") == 0
    assert "Goes on from step 6" in capfd.readouterr().out
    assert_like(folder, "orphan")


@pytest.mark.long
def test_the_newest_checkpoint_is_the_default_and_stays_the_same(folder, capfd, monkeypatch):
    """A launch that ends before its first own checkpoint decides about the step."""
    shutil.copytree(folder / "runs" / "whole", folder / "runs" / "growing")
    source = folder / "runs" / "growing" / "checkpoints"
    shutil.move(source / "00000008", folder / "later")
    shutil.move(source / "00000006", folder / "late")
    monkeypatch.setenv(failpoints.VARIABLE, "data:term:6")
    assert fork(folder, "grown", "checkpoint.minutes=null", source="growing", step="") == 75
    failpoints._armed.clear()
    monkeypatch.delenv(failpoints.VARIABLE)
    shutil.rmtree(folder / "runs" / "grown" / "checkpoints")
    identity = json.loads((folder / "runs" / "grown" / "run.json").read_text())
    (folder / "runs" / "grown" / "run.json").write_text(json.dumps(identity | {"saved": 0}))
    shutil.move(folder / "later", source / "00000008")
    shutil.move(folder / "late", source / "00000006")
    capfd.readouterr()
    assert fork(folder, "grown", source="growing", step="") == 0
    assert "continues from its step 4" in capfd.readouterr().out
    assert_like(folder, "grown")


@pytest.mark.long
def test_a_fork_on_another_mesh_has_the_same_batches(folder):
    assert fork(folder, "moved", "mesh.data=2", "mesh.fsdp=4", "precision.compute=bfloat16") == 0
    ours = [json.loads(line) for line in numbers(folder / "runs" / "moved")]
    theirs = [json.loads(line) for line in numbers(folder / "runs" / "whole")]
    assert [record.get("batch") for record in ours] == [record.get("batch") for record in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        if mine["kind"] == "train":
            assert mine["loss"] == pytest.approx(other["loss"], rel=2e-3)


@pytest.mark.long
@pytest.mark.processes
def test_a_fork_on_two_processes_has_the_same_batches(folder):
    source = f"checkpoint.fork_from={folder}/runs/whole@4"
    codes, said = on_two_hosts(folder, "two-processes", (), overrides=[source])
    assert codes == [0, 0], said
    run = folder / "runs" / "two-processes"
    ours = [json.loads(line) for line in numbers(run)]
    theirs = [json.loads(line) for line in numbers(folder / "runs" / "whole")]
    assert [record.get("batch") for record in ours] == [record.get("batch") for record in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        if mine["kind"] == "train":
            assert mine["loss"] == pytest.approx(other["loss"], rel=2e-3)
    assert [origin.step for origin in origins_of(run)] == [4]


@pytest.mark.long
def test_forks_to_a_url_and_from_there(folder, capfd):
    bucket = f"file://{folder}/bucket"
    at_url = [f"output_dir={bucket}", f"local_dir={folder}/work"]
    assert fork(folder, "up", *at_url, "steps=6") == 0
    shutil.rmtree(folder / "work")
    # The same command goes on from an empty disk, and not from the other run.
    assert fork(folder, "up", *at_url) == 0
    assert "Goes on from step 6" in capfd.readouterr().out
    assert_like(folder.parent, f"{folder.name}/bucket/up", f"{folder.name}/runs/whole", runs="")
    assert train(folder, "down", f"checkpoint.fork_from={bucket}/up@6") == 0
    assert_like(folder, "down")
    words = ["copy", f"{bucket}/up", str(folder / "runs" / "landed"), "--step", "6"]
    assert checkpoint.main(words) == 0
    landed = folder / "runs" / "landed"
    assert main(load_config([f"config={landed}/config.yaml"])) == 0
    assert_like(folder, "landed")
    assert [origin.step for origin in origins_of(landed)] == [4, 6]
    assert train(folder, "x", f"checkpoint.fork_from={bucket}/nobody") == 78
    assert "nothing is there" in capfd.readouterr().err


@pytest.mark.long
def test_steps_that_are_removed_or_unreadable_do_not_block_others(folder, monkeypatch):
    """The other run is training: it removes steps 3 and 9 while a fork looks for one."""
    run = folder / "runs" / "busy"
    shutil.copytree(folder / "runs" / "whole", run)
    survey = forks.survey
    read_state = forks._read_state
    unreadable = {"00000004"}

    def read(path):
        if path.name in unreadable:
            raise StorageError("not readable")
        return read_state(path)

    monkeypatch.setattr(forks, "survey", lambda path: survey(path) | {3: "", 9: ""})
    monkeypatch.setattr(forks, "_read_state", read)
    assert forks.find_fork(f"{run}@6", []).state.step == 6
    found = forks.find_fork(str(run), [])
    assert found.state.step == 8 and list(found.other_steps) == [2, 6]
    with pytest.raises(StorageError, match="not readable"):
        forks.find_fork(f"{run}@4", [])
    with pytest.raises(ConfigError, match="no checkpoint of step 9"):
        forks.find_fork(f"{run}@9", [])
    # The newest one is not passed over without a word.
    unreadable.add("00000008")
    with pytest.raises(StorageError, match="not readable"):
        forks.find_fork(str(run), [])

    launch = {"forked_from": {"run": run_id(run), "place": str(run), "step": 2}}
    assert forks.find_fork(str(run), [launch]).state.step == 2
    shutil.rmtree(run / "checkpoints" / "00000002")
    with pytest.raises(ConfigError, match="forked at step 2"):
        forks.find_fork(str(run), [launch])
    assert forks.find_fork(f"{run}@6", [launch]).state.step == 6


@pytest.mark.long
def test_a_step_that_is_removed_after_it_was_copied(folder, monkeypatch):
    shutil.copytree(folder / "runs" / "whole", folder / "runs" / "pruned")
    copy_run = checkpoint.copy_run

    def copy_and_prune(key, place, path, target):
        notes = copy_run(key, place, path, target)
        shutil.rmtree(path)
        return notes

    monkeypatch.setattr(checkpoint, "copy_run", copy_and_prune)
    copy(folder, "in-time", source="pruned")
    assert sorted(complete(folder / "runs" / "in-time" / "checkpoints")) == [8]


@pytest.mark.long
def test_frozen_parameters_go_with_forks_and_copies(folder):
    options = ["train.freeze=[mlp]", "optimizer.ema_decay=0.9"]
    assert train(folder, "frozen", *options) == 0
    assert fork(folder, "frozen-fork", *options, source="frozen", step="@6") == 0
    copy(folder, "frozen-copy", "--step", "6", source="frozen")
    assert train(folder, "frozen-copy", *options) == 0
    for name in ("frozen-fork", "frozen-copy"):
        assert_like(folder, name, "frozen")
        assert checkpoint.main(["verify", str(folder / "runs" / name)]) == 0


@pytest.mark.long
def test_rollbacks_of_the_other_run_hold_in_its_forks(folder):
    run = folder / "runs" / "rolled"
    shutil.copytree(folder / "runs" / "whole", run)
    entry = {"step": 6, "kind": "loss", "left_out": [6, 6]}
    (run / "rollbacks.json").write_text(json.dumps({"run": run_id(run), "rollbacks": [entry]}))
    for name, code in (("at-four", 0), ("at-six", 78)):
        assert fork(folder, name, source="rolled", step="@4" if code == 0 else "@6") == code
    assert read_rollbacks(folder / "runs" / "at-four") == [entry]
    copy(folder, "at-six-too", "--step", "6", source="rolled", code=64)
    assert not (folder / "runs" / "at-six-too").exists()
    # The newest checkpoint that was not taken back.
    copy(folder, "at-four-too", source="rolled")
    assert sorted(complete(folder / "runs" / "at-four-too" / "checkpoints")) == [4]
    assert train(folder, "at-four-too") == 0
    assert_like(folder, "at-four-too", "at-four")


@pytest.mark.long
@pytest.mark.parametrize(
    ("override", "code", "words"),
    [
        ("model.mlp_dim=48", 78, ["model.mlp_dim=48", "Set model.mlp_dim=32"]),
        ("optimizer.name=lion", 78, ["optimizer.name", "checkpoint.init_from"]),
        (
            "data.batch_size=16",
            78,
            ["data.batch_size was 8 and is 16", "leave checkpoint.fork_from"],
        ),
        ("data.seed=3", 78, ["data.seed was 0 and is 3"]),
        ("steps=4", 78, ["steps=4 must be at least 5", "Set steps=5"]),
        ("train.freeze=[mlp]", 78, ["train.freeze"]),
    ],
)
def test_what_must_be_equal_is_refused_as_at_a_resume(folder, capfd, override, code, words):
    assert fork(folder, "refused", override) == code
    said = " ".join(capfd.readouterr().err.split())
    for word in words:
        assert word in said, said
    assert not list((folder / "runs" / "refused").glob("*")), "a refused launch leaves no run"


@pytest.mark.long
def test_a_checkpoint_that_is_missing_or_damaged_is_named_with_the_others(folder, capfd):
    run = folder / "runs" / "spoilt"
    shutil.copytree(folder / "runs" / "whole", run)
    shutil.rmtree(run / "checkpoints" / "00000002")
    flip(run / "checkpoints" / "00000004")
    (run / "checkpoints" / "00000006" / "commit.json").unlink()
    for step, code, words in (
        ("@2", 78, "has no checkpoint of step 2"),
        ("@4", 74, "00000004 is damaged"),
        ("@6", 74, "00000006 is damaged: commit.json is missing"),
        ("@x", 78, "A step is a whole number, and 'x' is none"),
    ):
        assert fork(folder, "none", source="spoilt", step=step) == code
        said = " ".join(capfd.readouterr().err.split())
        assert words in said, said
        assert (code == 78 and step == "@x") or "Set checkpoint.fork_from=" in said
        assert not (folder / "runs" / "none" / "checkpoints").exists()
    # The checkpoint of the other run is left as it is.
    assert (run / "checkpoints" / "00000004").is_dir()
    assert fork(folder, "none", source="nowhere", step="") == 78
    assert "is not a directory" in capfd.readouterr().err


@pytest.mark.long
def test_a_run_that_began_otherwise_does_not_ignore_the_key(folder, capfd):
    assert train(folder, "own", "steps=2") == 0
    assert fork(folder, "own", step="@4") == 78
    assert "has begun already, and not as a fork" in capfd.readouterr().err
    assert fork(folder, "two", "steps=5", step="@4") == 0
    assert fork(folder, "two", step="@2") == 78
    assert "as a fork of" in capfd.readouterr().err
    assert train(folder, "two") == 0


@pytest.mark.long
def test_checkpoints_outside_their_folder_are_refused_at_a_launch(folder, capfd):
    step = folder / "runs" / "whole" / "checkpoints" / "00000004"
    shutil.copytree(step, folder / "runs" / "stray" / "00000004")
    assert train(folder, "stray") == 78
    said = capfd.readouterr().err
    assert f"maxtrain checkpoint copy {folder}/runs/stray NEW" in said
    copy(folder, "found", source="stray")
    assert "has no config.yaml" in capfd.readouterr().out
    assert train(folder, "found") == 0
    digests = saved_digests(folder / "runs" / "found" / "checkpoints")
    assert digests[8] == saved_digests(folder / "runs" / "whole" / "checkpoints")[8]


@pytest.mark.long
def test_what_a_copy_refuses_leaves_nothing(folder, capfd):
    runs = folder / "runs"
    before = sorted(path.name for path in runs.iterdir())
    copy(folder, "whole", code=64)
    copy(folder, "new", "--step", "5", code=64)
    copy(folder, "new\x07", code=64)
    assert checkpoint.main(["copy", str(runs / "whole"), "s3://bucket/runs/new"]) == 64
    assert "checkpoint.fork_from=RUN@STEP" in capfd.readouterr().err
    spoilt = folder / "copies" / "spoilt"
    shutil.copytree(runs / "whole", spoilt)
    flip(spoilt / "checkpoints" / "00000008")
    assert checkpoint.main(["copy", str(spoilt), str(runs / "new")]) == 74
    other = spoilt / "checkpoints"
    record = read_record(other / "00000006")
    assert record["run"] == run_id(spoilt)
    (spoilt / "run.json").write_text(json.dumps({"run": "0" * 16, "saved": 8}))
    assert checkpoint.main(["copy", str(spoilt), str(runs / "new"), "--step", "6"]) == 74
    assert checkpoint.main(["copy", str(runs / "whole"), str(other), "--step", "8"]) == 64
    assert sorted(path.name for path in runs.iterdir()) == before


@pytest.mark.long
def test_a_step_alone_is_copied_into_a_folder_of_checkpoints(folder):
    target = folder / "backup" / "whole" / "checkpoints"
    words = ["copy", str(folder / "runs" / "whole"), str(target), "--step", "6"]
    assert checkpoint.main(words) == 0
    assert checkpoint.main(words) == 64
    ours = (target / "00000006" / "record.json").read_bytes()
    theirs = folder / "runs" / "whole" / "checkpoints" / "00000006" / "record.json"
    assert ours == theirs.read_bytes()
    assert sorted(path.name for path in target.parent.iterdir()) == ["checkpoints"]


def test_a_fork_began_with_the_weights_of_the_first_run(tmp_path):
    config = load_config(["config=quickstart", "checkpoint.fork_from=runs/a@4"])
    assert starting_weights(tmp_path, config).init_from is None
    lines = []
    for key in ("checkpoint.init_from=base", "checkpoint.fork_from=runs/a@4"):
        launch = {"time": "t", "step": 0, "versions": {"jax": "1"}, "processes": 1}
        launch |= {"devices": {"kind": "cpu", "count": 1}, "determinism": "off"}
        lines.append(launch | {"config": to_yaml(load_config(["config=quickstart", key]))})
    write_launches(tmp_path, lines)
    assert starting_weights(tmp_path, config).init_from == "base"
    own = load_config(["config=quickstart", "checkpoint.init_from=other"])
    assert starting_weights(tmp_path, own).init_from == "other"


def test_stored_rollouts_that_later_steps_need_are_copied(tmp_path):
    """After 4 steps these are one rollout that steps 4 and 5 read, and completions sampled before
    step 4."""

    def store(name, sampled_after):
        about = {"sampled_after": sampled_after, "numbers": {}}
        rollout = EMPTY._replace(about=about)
        rollout.save(tmp_path / "a" / "rollouts" / name)

    (tmp_path / "a" / "rollouts").mkdir(parents=True)
    store("00000004.npz", 2)
    store("00000006.npz", 3)
    store("00000006.sampled.npz", 3)
    store("00000008.sampled.npz", 5)
    store("00000010.sampled.npz", "3")
    (tmp_path / "a" / "rollouts" / "00000002.npz").write_text("damaged")
    forks._copy_rollouts(tmp_path / "a" / "rollouts", tmp_path / "b" / "rollouts", 4)
    copied = sorted(path.name for path in (tmp_path / "b" / "rollouts").iterdir())
    assert copied == ["00000004.npz", "00000006.sampled.npz"]


def test_the_run_and_the_step_of_a_fork():
    assert fork_source("runs/a@20") == ("runs/a", 20)
    assert fork_source("runs/a") == ("runs/a", None)
    assert fork_source("s3://bucket/runs/a@0020") == ("s3://bucket/runs/a", 20)
    assert fork_source("abfs://box@host/runs/a") == ("abfs://box@host/runs/a", None)
    assert fork_source("runs/a@b") == ("runs/a@b", None)
    assert fork_source("runs/a@²") == ("runs/a@²", None)
    assert fork_source("runs/a@" + "9" * 40) == ("runs/a@" + "9" * 40, None)


def test_a_fork_of_what_is_no_run_names_the_right_key(tmp_path, capfd, tiny_run):
    tiny_run(tmp_path, steps=2, mesh={"data": 1, "fsdp": 8})
    assert train(tmp_path, "x", f"checkpoint.fork_from={tmp_path}/data") == 78
    assert "has no complete checkpoint" in capfd.readouterr().err
    hub = tmp_path / "hub"
    hub.mkdir()
    (hub / "config.json").write_text("{}")
    assert train(tmp_path, "x", f"checkpoint.fork_from={hub}") == 78
    assert f"Set checkpoint.init_from={hub}" in capfd.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_fork_without_a_checkpoint_does_not_begin_at_random(tmp_path, capfd, tiny_run):
    """It was killed before its first save, and is launched without the key."""
    tiny_run(tmp_path, steps=2, mesh={"data": 1, "fsdp": 8})
    run = tmp_path / "runs" / "x"
    run.mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({"run": "0" * 16, "saved": 0}))
    launch = {"time": "t", "step": 0, "versions": {"jax": "1"}, "processes": 1, "run": "0" * 16}
    launch |= {"devices": {"kind": "cpu", "count": 1}, "determinism": "off", "config": ""}
    origin = {"run": "1" * 16, "place": "runs/other", "step": 4}
    write_launches(run, [launch, launch | {"step": 4, "forked_from": origin}])
    assert train(tmp_path, "x") == 78
    said = capfd.readouterr().err
    assert "checkpoint.fork_from=runs/other@4" in said and "run_name" in said
    assert len(read_launches(run)) == 2 and not (run / "checkpoints").exists()


def test_keys_that_a_fork_replaces(tmp_path):
    (tmp_path / "data").mkdir()
    values = {
        "data": {"sources": {"text": {"path": "data"}}},
        "checkpoint": {"init_from": "runs/base", "init_partial": ["mlp"]},
    }
    file = tmp_path / "some.yaml"
    file.write_text(yaml.safe_dump(values))
    config = load_config([f"config={file}", "checkpoint.fork_from=runs/a@4"])
    assert config.checkpoint.init_from is None and config.checkpoint.init_partial == ()
    for words in (
        ["checkpoint.fork_from=runs/a", "checkpoint.init_from=runs/b"],
        ["checkpoint.fork_from=@4"],
        ["checkpoint.fork_from=runs/a@0"],
        ["checkpoint.fork_from="],
    ):
        with pytest.raises(ValueError, match=r"checkpoint\.fork_from"):
            load_config([f"config={file}", *words])
