"""Runs that were begun when defaults were others go on to the same bits, and say what they keep."""

import json
import shutil
import sys
import tarfile
from pathlib import Path

import jax
import pytest

from maxtrain import failpoints
from maxtrain.trainer import job
from maxtrain.checkpoint.listing import latest_state, saved_digests
from maxtrain.checkpoint.manager import Checkpoints
from maxtrain.config import load_config
from maxtrain.config.older import kept_settings
from maxtrain.trainer.job import open_job
from maxtrain.observe.launches import launch_differences, read_launches
from maxtrain.observe.metrics import read_metrics
from maxtrain.ops.digest import digests, hash_text, tree_digests
from maxtrain.commands.replay import main as replay
from maxtrain.trainer.loop import main
from maxtrain.train_step.state import changing_part, policy_variables, saved_part

pytestmark = pytest.mark.usefixtures("this_process")
# What a version wrote down whose defaults these were.
THEN = ("schedule.min_learning_rate=3e-5", "loss_scale.initial=4294967296", "loss_scale.window=5")
COMMAND = ("optimizer.learning_rate=1e-2", "precision.compute=float16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_run) -> Path:
    folder = tmp_path_factory.mktemp("older")
    tiny_run(
        folder,
        steps=24,
        checkpoint_interval=8,
        schedule={"warmup_steps": 5},
        mesh={"data": 1, "fsdp": 8},
    )
    return folder


def train(folder, run_name, *overrides):
    return main(
        load_config(
            [f"config={folder / 'tiny.yaml'}", f"run_name={run_name}", *COMMAND, *overrides]
        )
    )


def numbers(folder, run_name):
    keys = ("step", "loss", "learning_rate", "params_hash", "loss_scale")
    return [[record[key] for key in keys] for record in read_metrics(folder / "runs" / run_name)]


@pytest.fixture(scope="module")
def whole(folder) -> Path:
    """A run that was never stopped, in a folder with others."""
    assert train(folder, "whole", *THEN) == 0
    return folder


@pytest.mark.long
def test_the_same_command_goes_on_with_the_defaults_of_then(whole, monkeypatch, capsys):
    folder = whole
    with monkeypatch.context() as patch:
        patch.setenv(failpoints.VARIABLE, "after_step:nan:10")
        assert train(folder, "half", *THEN) == 75
    capsys.readouterr()
    with monkeypatch.context() as patch:  # the record of an older version has no such field
        patch.setattr(
            job,
            "kept_settings",
            lambda kept, config: kept_settings(None, config),
        )
        patch.setenv(failpoints.VARIABLE, "after_step:nan:20")
        assert train(folder, "half") == 75
    told = "goes on with what it was begun with, where defaults are others now: schedule.min_learning_rate=3e-05, loss_scale."
    assert told in " ".join(capsys.readouterr().out.split())
    assert train(folder, "half") == 0, "what is kept is handed on"
    assert numbers(folder, "half") == numbers(folder, "whole")
    assert (
        saved_digests(folder / "runs" / "half" / "checkpoints")[24]
        == saved_digests(folder / "runs/whole/checkpoints")[24]
    )
    assert replay([str(folder / "runs" / "half"), "--steps", "4:24"]) == 0, (
        "all launches had the same settings"
    )


@pytest.mark.long
def test_a_new_run_has_the_defaults_of_now(folder, capsys):
    assert train(folder, "new", "steps=2", "schedule.warmup_steps=1") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "begun with" not in said
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
def test_a_key_that_a_version_did_not_have_is_no_difference(whole):
    (launch, *_) = read_launches(whole / "runs" / "whole")
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
        train(folder, "untracked", "steps=2", "schedule.warmup_steps=1", "observe.tensorboard=true")
        == 0
    )
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "pip install tensorboardX, or set observe.tensorboard=false. The run goes on without it."
        in said
    )
    assert (
        "tensorboard --logdir" not in said and len(read_metrics(folder / "runs" / "untracked")) == 2
    )


FORMAT_3 = Path(__file__).parents[1] / "data" / "formats" / "run-of-format-3.tar.gz"
OPTIONS = {
    "adamw": [],
    "muon": [
        "optimizer.name=muon",
        "optimizer.ema_decay=0.9",
        "optimizer.groups.slow.pattern=mlp",
        "optimizer.groups.slow.lr_factor=0.5",
    ],
    "adafactor": [
        "optimizer.name=adafactor",
        "model.tie_embeddings=true",
        "model.family=qwen3",
        "precision.compute=float16",
        "optimizer.no_decay=['norm']",
    ],
}


@pytest.fixture
def format_3(tmp_path, monkeypatch) -> Path:
    """Three runs of three steps, beside their data, and the numbers of all six steps as the version
    that began them made them, on another machine."""
    with tarfile.open(FORMAT_3) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def words_of(name):
    return ["config=tiny.yaml", f"run_name={name}", *OPTIONS[name]]


def go_on(name, *overrides):
    return main(load_config([*words_of(name), *overrides]))


def restored_arrays(name):
    """Digests of the state of step 3 as it is restored, by the names of now; and the one of all
    parameters."""
    folder = Path("runs", name, "checkpoints")
    opened = open_job(load_config(words_of(name)), latest_state(folder))
    checkpoints = Checkpoints(folder, opened.config.checkpoint)
    with jax.set_mesh(opened.mesh):
        state, _ = checkpoints.restore(saved_part(opened.abstract), 3)
        checkpoints.close()
        return tree_digests(changing_part(state)), hash_text(digests(policy_variables(state)))


@pytest.mark.long
@pytest.mark.parametrize("name", list(OPTIONS))
def test_a_run_of_format_3_is_restored_bit_for_bit_and_goes_on(format_3, name, monkeypatch):
    """Bits of later steps are those of this machine: a run that is stopped once more makes them,
    too. What the other machine computed is near."""
    then = json.loads((format_3 / "numbers.json").read_text())[name]
    runs = format_3 / "runs"
    saved = saved_digests(runs / name / "checkpoints")[3]
    restored, of_params = restored_arrays(name)
    assert restored.items() <= saved.items() and "params.layers.0.attention.q.kernel" in restored
    assert any(array.startswith("opt_state.") for array in restored)
    _, _, _, params_hash = then[2]
    assert of_params == params_hash

    shutil.copytree(runs / name, format_3 / "begun")
    assert go_on(name) == 0
    made = []
    for record in read_metrics(runs / name):
        if record["kind"] == "train":
            made.append([record["step"], record["loss"], record["grad_norm"]])
    for (step, loss, norm), (then_step, then_loss, then_norm, _) in zip(made, then, strict=True):
        assert step == then_step
        assert loss == pytest.approx(float.fromhex(then_loss), rel=1e-3)
        assert norm == pytest.approx(float.fromhex(then_norm), rel=1e-2)
    whole = saved_digests(runs / name / "checkpoints")
    assert whole[3].keys() == whole[6].keys()

    shutil.move(runs / name, format_3 / "whole")
    shutil.move(format_3 / "begun", runs / name)
    with monkeypatch.context() as patch:
        patch.setenv(failpoints.VARIABLE, "after_step:nan:6")
        assert go_on(name, "checkpoint_interval=1") == 75
    assert go_on(name) == 0
    assert saved_digests(runs / name / "checkpoints")[6] == whole[6]


@pytest.mark.long
def test_weights_of_a_run_of_format_3_begin_another(format_3, capsys):
    begun = ("run_name=next", "checkpoint.init_from=runs/adamw", "steps=1")
    assert main(load_config(["config=tiny.yaml", *begun, "schedule.warmup_steps=0"])) == 0
    assert "12 of 12 parameters loaded" in capsys.readouterr().out


def test_a_pattern_of_old_names_is_refused_with_those_of_now(format_3, capsys):
    assert go_on("adamw", "optimizer.no_decay=['layers.mlp.up']") == 78
    said = " ".join(capsys.readouterr().err.split())
    assert "optimizer.no_decay=layers.mlp.up matches no parameter." in said
    assert "layers.0.mlp.up.kernel" in said
