"""A run that goes on with other settings says which, and what each does; what can't change is
refused by the key."""

import shutil
from pathlib import Path

import pytest

from maxtrain.checkpoint.listing import saved_steps
from maxtrain.config import load_config
from maxtrain.trainer.loop import main

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("this_process")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_run) -> Path:
    """`first`, a run of two steps with AdamW that clips and decays."""
    folder = tmp_path_factory.mktemp("resumed")
    tiny_run(
        folder,
        steps=2,
        checkpoint_interval=2,
        schedule={"name": "constant", "warmup_steps": 1},
        mesh={"data": 1, "fsdp": 8},
        optimizer={"weight_decay": 0.1, "clip_norm": 1.0},
        data={"stages": [{"until": 0.5, "unit": "fraction"}, {"batch_size": 16}]},
    )
    assert train(folder, "first") == 0
    return folder


def train(folder, name, *more):
    return main(load_config([f"config={folder}/tiny.yaml", f"run_name={name}", *more]))


def go_on(folder, capfd, *more):
    """The exit code of going on with a copy of the run, and what was printed."""
    shutil.copytree(folder / "runs" / "first", folder / "runs" / "copy")
    capfd.readouterr()
    try:
        code = train(folder, "copy", *more)
        steps = list(saved_steps(folder / "runs" / "copy" / "checkpoints"))
    finally:
        shutil.rmtree(folder / "runs" / "copy")
    printed = capfd.readouterr()
    return code, " ".join((printed.out + printed.err).split()), steps


@pytest.mark.parametrize(
    "override",
    [
        "optimizer.weight_decay=0",
        "optimizer.clip_norm=null",
        "optimizer.clip_value=0.5",
        "optimizer.clip_adaptive=0.1",
        "optimizer.learning_rate=0.01",
        "optimizer.beta2=0.9",
        "optimizer.groups={norms: {pattern: norm, weight_decay: 0.2, lr_factor: 0.5}}",
        "optimizer.no_decay=[embedding]",
        "schedule.name=linear",
    ],
)
def test_settings_that_may_change(folder, capfd, override):
    more = ["data.stages=[]", "data.accept_changes=true", "steps=4"]
    code, said, steps = go_on(folder, capfd, override, *more)
    key = override.partition("=")[0]
    assert code == 0, said
    assert steps[-1] == 4
    assert f"changed since the last launch: {key}" in said
    assert "changed since the last launch: steps: 2 -> 4" in said


@pytest.mark.parametrize(
    "override",
    [
        "optimizer.ema_decay=0.9",
        "optimizer.name=lion",
        "optimizer.name=adafactor",
        "optimizer.name=muon",
        "optimizer.name=sgd",
        "loss_scale.mode=dynamic",
        "train.only=[mlp]",
        "precision.params=bfloat16",
        "model.mlp_dim=48",
    ],
)
def test_settings_of_the_state_are_refused_by_their_key(folder, capfd, override):
    more = ["data.stages=[]", "data.accept_changes=true", "steps=4"]
    if override == "precision.params=bfloat16":
        more.append("optimizer.beta2=0.9")
    code, said, _ = go_on(folder, capfd, override, *more)
    key = override.partition("=")[0]
    assert code == 78, said
    assert key in said and ("run_name" in said or "checkpoint.init_from" in said)
    assert "missing" not in said or f"{key}=" in said


def test_other_steps_with_a_stage_that_ends_at_a_fraction(folder, capfd):
    code, said, _ = go_on(folder, capfd, "steps=8")
    assert code == 78
    assert "steps was 2 and is 8" in said and "fraction" in said


@pytest.mark.every_dose
def test_a_finished_run_names_the_settings_that_change_nothing(folder, capfd):
    code, said, steps = go_on(folder, capfd, "optimizer.learning_rate=0.02", "log_interval=7")
    assert code == 0 and steps[-1] == 2
    assert "Nothing to do" in said and "optimizer.learning_rate" in said and "0.02" in said
    assert "log_interval: " not in said and "steps" in said and "run_name" in said


def test_the_same_command_names_nothing(folder, capfd):
    code, said, _ = go_on(folder, capfd)
    assert code == 0 and "changed since" not in said and "Nothing to do" in said
