"""Runs that learn from a teacher on their own completions: closer to it, stopped anywhere they go
on bit for bit, replayed, evaluated, and refused where that can't work."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from benchmarks.additions import task
from data_pipeline.base.errors import ConfigError
from data_pipeline.prepare import command as prepare
from maxtrain import cli
from maxtrain.checkpoint.listing import saved_digests
from maxtrain.commands import replay
from maxtrain.commands.evaluate import command as evaluate
from maxtrain.config import load_config
from maxtrain.observe.metrics import read_metrics
from maxtrain.observe.samples import read_samples
from maxtrain.rl.rollout import load
from maxtrain.trainer.loop import main

pytestmark = pytest.mark.usefixtures("this_process")
STEPS = 6
# Of times, and what follows from them.
NOT_REPEATED = ("seconds", "per_second", "bytes", "mfu")


@pytest.fixture(scope="module")
def config(tmp_path_factory, tiny_run) -> Path:
    """A config file of students beside prompts and a teacher, which has learnt from a text."""
    folder = tmp_path_factory.mktemp("on-policy")
    task.write_prompts(folder / "prompts.jsonl")
    prompts = ["--prompts", str(folder / "prompts.jsonl"), "--workers", "1", "--holdout", "0.2"]
    assert prepare.main([str(folder / "prompts"), *prompts]) == 0
    path = tiny_run(
        folder,
        texts=10,
        steps=STEPS,
        checkpoint_interval=1,
        checkpoint={"keep": STEPS},
        precision={"compute": "float32"},
        optimizer={"learning_rate": 1e-2},
        schedule={"warmup_steps": 0},
    )
    assert main(load_config([f"config={path}", "run_name=teacher", "seed=7"])) == 0
    return path


def on_policy(config: Path, *overrides: str) -> list[str]:
    """Overrides of a run that learns from the teacher on its own completions."""
    folder = config.parent
    words = [
        "objective=distill",
        f"distill.teacher={folder / 'runs' / 'teacher' / 'checkpoints' / f'{STEPS:08d}'}",
        "distill.on_policy=true",
        "distill.weight=1",
        "distill.kind=reverse",
        "distill.max_completion_length=6",
        "distill.num_generations=2",
        "distill.num_iterations=2",
        f"data.sources.text.path={folder / 'prompts' / 'train'}",
        "data.sources.text.epochs=null",
        "data.packing=pad",
        "data.seq_length=16",
        "data.batch_size=8",
        f"eval.sets.held_out.path={folder / 'prompts' / 'eval'}",
        "eval_at_start=true",
    ]
    keys = {word.partition("=")[0] for word in overrides}
    return [word for word in words if word.partition("=")[0] not in keys] + list(overrides)


def train(config: Path, run_name: str, *overrides: str) -> int:
    """Exit code of a run in this process."""
    words = on_policy(config, *overrides)
    return main(load_config([f"config={config}", f"run_name={run_name}", *words]))


def final(config: Path, run_name: str) -> dict:
    return saved_digests(config.parent / "runs" / run_name / "checkpoints")[STEPS]


def records(config: Path, run_name: str, kind: str = "train") -> list[dict]:
    """Return the records without the values that depend on the machine."""
    found = []
    for record in read_metrics(config.parent / "runs" / run_name):
        if record["kind"] == kind:
            kept = {k: v for k, v in record.items() if not any(x in k for x in NOT_REPEATED)}
            found.append(kept)
    return found


def rollouts(config: Path, run_name: str) -> dict[str, str]:
    folder = config.parent / "runs" / run_name / "rollouts"
    return {path.name: load(path).content() for path in sorted(folder.glob("*.npz"))}


@pytest.fixture(scope="module")
def straight(config) -> dict:
    """The last state of a run that nobody stopped."""
    assert train(config, "straight") == 0
    return final(config, "straight")


@pytest.mark.long
def test_what_is_recorded_and_that_a_student_comes_closer(config, straight):
    assert straight
    run = config.parent / "runs" / "straight"
    first = records(config, "straight")[0]
    assert first["loss"] == first["distill"] > 0
    assert 0 <= first["agreement"] <= 1
    assert 0 < first["entropy"] < np.log(300)
    assert 1 <= first["completion_length"] <= first["longest_completion"] <= 6
    assert 0 < first["truncated"] <= 1
    assert not any(name.startswith(("reward", "ratio", "sampler_gap")) for name in first)
    assert first["tokens_seen"] == load(run / "rollouts" / "00000001.npz").lengths.sum()
    before, *_, after = records(config, "straight", "eval")
    assert after["distill"] < 0.8 * before["distill"]
    assert before["prompts"] == 9
    assert before["tokens"] == round(9 * before["completion_length"])
    assert after["best_step"] == STEPS
    names = {each.sample.reward for each in read_samples(run)}
    assert names == {None}
    arrays = json.loads((run / "checkpoints" / f"{STEPS:08d}" / "commit.json").read_text())
    assert not any("teacher" in name for name in arrays["arrays"])


@pytest.mark.long
def test_the_command_gives_what_the_run_has_on_record(config, straight, monkeypatch, capsys):
    assert straight
    run = str(config.parent / "runs" / "straight")
    monkeypatch.setattr(evaluate, "start", lambda mesh, cache: None)
    capsys.readouterr()
    assert evaluate.main([run, "--show", "1", "--json"]) == 0
    held = json.loads(capsys.readouterr().out)["sets"]["held_out"]
    (sample,) = held.pop("samples")
    first = [taken.sample for taken in read_samples(Path(run)) if taken.sample.number == 0]
    assert sample["texts"]["completion"] == first[-1].completion
    assert held.pop("seconds") > 0
    assert {"distill", "agreement", "completion_length", "prompts"} <= held.keys()
    last = records(config, "straight", "eval")[-1]
    assert held == pytest.approx({name: last[name] for name in held}, rel=1e-5)
    # Rewards in the place of the teacher, for completions as long as those of the run.
    assert evaluate.main([run, "--reward", "exact", "--json"]) == 0
    held = json.loads(capsys.readouterr().out)["sets"]["held_out"]
    assert "distill" not in held and held["reward"] == held["reward/exact"]
    assert held["longest_completion"] <= 6


@pytest.mark.long
@pytest.mark.parametrize("stopped_at", [4, pytest.param(5, marks=pytest.mark.slow)])
def test_a_run_that_was_stopped_goes_on_bit_for_bit(config, straight, stopped_at):
    """It is stopped between two rollouts, and within one, where the stored one is read."""
    name = f"stopped{stopped_at}"
    run = config.parent / "runs" / name
    shutil.copytree(config.parent / "runs" / "straight", run)
    for step in range(stopped_at + 1, STEPS + 1):
        shutil.rmtree(run / "checkpoints" / f"{step:08d}")
    made = rollouts(config, "straight")
    assert list(made) == ["00000001.npz", "00000003.npz", "00000005.npz"]
    if stopped_at == 4:
        (run / "rollouts" / "00000005.npz").unlink()
    assert train(config, name) == 0
    assert final(config, name) == straight
    assert records(config, name) == records(config, "straight")
    assert rollouts(config, name) == made


@pytest.mark.slow
def test_a_replay_makes_the_same_rollouts_and_steps_again(config, straight, capsys):
    assert straight
    run = str(config.parent / "runs" / "straight")
    assert replay.main([run, "--steps", "2:6", "--rollouts", "again"]) == 0
    out = capsys.readouterr().out
    assert "bit for bit" in out and "arrays" in out


@pytest.mark.parametrize(
    ("overrides", "rule", "advice"),
    [
        (["distill.weight=0.5"], "sampled itself", "Set distill.weight=1"),
        (["data.packing=stream"], "reads prompts one by one", "Set data.packing=pad"),
        (
            ["distill.max_completion_length=16"],
            "distill.max_completion_length=16 leaves no room",
            "Set distill.max_completion_length=8",
        ),
        (
            ["distill.on_policy=false"],
            "is of completions that the student samples",
            "Set distill.on_policy=true",
        ),
    ],
)
def test_what_can_not_work_is_refused(tmp_path, tiny_run, overrides, rule, advice):
    path = tiny_run(tmp_path, texts=2)
    with pytest.raises(ConfigError, match=advice) as error:
        load_config([f"config={path}", *on_policy(path, *overrides)])
    assert rule in str(error.value)


@pytest.mark.long
def test_what_a_step_read_can_be_shown(config, straight, capsys):
    run = str(config.parent / "runs" / "straight")
    assert cli.main(["plan", run, "--step", "1"]) == 0
    assert "Prompts of the step" in capsys.readouterr().out
