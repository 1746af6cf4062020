"""What a launch puts on record beside its config: the kernel of attention, a warmup that was made
to fit, and which of these the next launch keeps."""

import sys
from pathlib import Path

import pytest

from maxtrain import failpoints
from maxtrain.checkpoint.listing import latest_state
from maxtrain.commands.replay import main as replay
from maxtrain.config import load_config
from maxtrain.observe.launches import launch_differences, read_launches
from maxtrain.observe.metrics import read_metrics
from maxtrain.trainer.loop import main

pytestmark = pytest.mark.usefixtures("this_process")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_run) -> Path:
    folder = tmp_path_factory.mktemp("launched")
    tiny_run(
        folder,
        steps=24,
        checkpoint_interval=8,
        schedule={"warmup_steps": 5},
        mesh={"data": 1, "fsdp": 8},
        optimizer={"learning_rate": 1e-2},
    )
    return folder


def train(folder, run_name, *overrides):
    return main(load_config([f"config={folder / 'tiny.yaml'}", f"run_name={run_name}", *overrides]))


@pytest.mark.long
def test_a_new_run_records_its_kernels_and_why(folder, capsys):
    assert train(folder, "new", "steps=2", "schedule.warmup_steps=1") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "attention: xla, since devices are CPUs" in said
    (launch,) = read_launches(folder / "runs" / "new")
    assert launch["kernels"] == {"attention": "xla"}
    assert launch["reasons"] == {"attention": "since devices are CPUs"}
    assert "  attention: auto\n" in launch["config"]
    assert "min_learning_rate: null" in launch["config"] and "window: 1000" in launch["config"]


@pytest.mark.long
def test_a_run_goes_on_with_the_kernel_of_attention_that_it_had(folder, monkeypatch, capsys):
    """Whichever auto would choose for a new one; and replay knows what each launch had."""
    short = ("steps=12", "checkpoint_interval=4")
    with monkeypatch.context() as patch:
        patch.setenv(failpoints.VARIABLE, "after_step:nan:6")
        assert train(folder, "kernel", *short, "model.attention=eager") == 75
    capsys.readouterr()
    assert train(folder, "kernel", *short) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "attention: eager, with which the run was trained until now" in said
    run = folder / "runs" / "kernel"
    named, kept = read_launches(run)
    assert named["kernels"] == kept["kernels"] == {"attention": "eager"}
    assert "  attention: eager\n" in named["config"] and "  attention: auto\n" in kept["config"]
    assert launch_differences(named, kept) == {}
    assert latest_state(run / "checkpoints").attention() == "eager"
    assert replay([str(run), "--steps", "2:12"]) == 0
    assert "all the same bit for bit" in capsys.readouterr().out


@pytest.mark.long
def test_a_key_that_a_version_did_not_have_is_no_difference(folder):
    assert train(folder, "whole", "steps=2", "schedule.warmup_steps=1") == 0
    (launch,) = read_launches(folder / "runs" / "whole")
    older = launch | {"config": launch["config"].replace("  min_lr_ratio: 0.1\n", "")}
    assert older != launch and launch_differences(older, launch) == {}


@pytest.mark.long
def test_a_warmup_longer_than_the_plan_is_shortened_and_recorded(folder, capsys):
    auto = (
        "steps=auto",
        "data.sources.text.epochs=1",
        "schedule.warmup_steps=100",
        "checkpoint_interval=0",
    )
    assert train(folder, "auto", *auto) == 0
    said = " ".join(capsys.readouterr().out.split())
    (launch,) = read_launches(folder / "runs" / "auto")
    steps = len(read_metrics(folder / "runs" / "auto"))
    assert (
        f"schedule.warmup_steps=100 does not fit into the plan of {steps} steps and is {steps // 10}."
        in said
    )
    assert f"warmup_steps: {steps // 10}\n" in launch["config"]
    rates = [record["learning_rate"] for record in read_metrics(folder / "runs" / "auto")]
    assert rates[-1] < rates[steps // 10] and max(rates) == pytest.approx(1e-2)


@pytest.mark.long
def test_a_run_goes_on_without_a_tracker_whose_package_is_missing(folder, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    assert (
        train(
            folder,
            "untracked",
            "steps=2",
            "schedule.warmup_steps=1",
            "observe.trackers=tensorboard",
        )
        == 0
    )
    said = " ".join(capsys.readouterr().out.split())
    assert "pip install tensorboardX" in said and "The run goes on without it." in said
    assert (
        "tensorboard --logdir" not in said and len(read_metrics(folder / "runs" / "untracked")) == 2
    )
