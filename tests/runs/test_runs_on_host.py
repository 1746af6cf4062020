"""Whole runs whose moments, and weights, lie in the memory of hosts."""

import numpy as np
import pytest

from data_pipeline.base.errors import ConfigError
from maxtrain.checkpoint.listing import saved_digests, saved_steps
from maxtrain.commands import checkpoint, replay
from maxtrain.config import load_config
from maxtrain.observe.launches import read_launches
from maxtrain.observe.metrics import read_metrics
from maxtrain.trainer.loop import main

pytestmark = [pytest.mark.usefixtures("this_process"), pytest.mark.long]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_run):
    """A config beside its data, and a run of 6 steps that nobody disturbed."""
    folder = tmp_path_factory.mktemp("on-host")
    sets = {"heldout": {"path": str(folder / "data" / "eval")}}
    tiny_run(
        folder,
        "--holdout",
        "0.2",
        steps=6,
        checkpoint_interval=3,
        eval_interval=3,
        determinism="full",
        eval={"sets": sets},
        schedule={"name": "constant", "warmup_steps": 1},
        optimizer={"on_host": True, "ema_decay": 0.9},
        integrity={"replicas_interval": 1, "repeat_interval": 2},
    )
    assert train(folder, "whole") == 0
    return folder


def train(folder, run_name, *overrides):
    return main(load_config([f"config={folder / 'tiny.yaml'}", f"run_name={run_name}", *overrides]))


def digests(folder, run_name, step=6):
    return saved_digests(folder / "runs" / run_name / "checkpoints")[step]


def losses(folder, run_name):
    """Return the losses of steps and of evaluations."""
    records = read_metrics(folder / "runs" / run_name)
    return {(r["kind"], r["step"]): r.get("loss", r.get("nll")) for r in records}


def assert_same_losses(folder, run_name, other="whole"):
    ours = losses(folder, run_name)
    theirs = losses(folder, other)
    assert ours.keys() == theirs.keys()
    for key, loss in ours.items():
        if loss is not None:
            np.testing.assert_allclose(loss, theirs[key], rtol=1e-5, err_msg=str(key))


def test_a_launch_says_what_lies_where(folder):
    (launch,) = read_launches(folder / "runs" / "whole")
    held = launch["device_bytes"]
    everywhere = held["optimizer_state"] + held["optimizer_state_on_its_host"]
    # Two moments and the average, and counters.
    assert 0 <= everywhere - 3 * held["parameters"] < 100
    assert held["optimizer_state"] < 0.05 * everywhere


def test_a_run_that_stops_goes_on_bit_for_bit(folder):
    assert train(folder, "stopped", "steps=3") == 0
    assert list(saved_steps(folder / "runs" / "stopped" / "checkpoints")) == [3]
    assert train(folder, "stopped") == 0
    assert digests(folder, "stopped") == digests(folder, "whole")
    assert checkpoint.main(["verify", str(folder / "runs" / "stopped")]) == 0


@pytest.mark.parametrize("first", ["true", "false"])
def test_a_checkpoint_goes_on_with_either_setting(folder, first):
    then = {"true": "false", "false": "true"}[first]
    run = f"first-{first}"
    assert train(folder, run, "steps=3", f"optimizer.on_host={first}") == 0
    assert train(folder, run, f"optimizer.on_host={then}") == 0
    assert_same_losses(folder, run)


def test_steps_are_replayed_bit_for_bit(folder):
    run = str(folder / "runs" / "whole")
    assert replay.main([run, "--steps", "3:6"], "maxtrain replay") == 0


WEIGHTS = ("train.on_host=all", "model.remat=full")


def test_weights_on_hosts_have_the_losses_of_weights_on_devices(folder):
    assert train(folder, "weights", *WEIGHTS) == 0
    assert_same_losses(folder, "weights")
    (launch,) = read_launches(folder / "runs" / "weights")
    (other,) = read_launches(folder / "runs" / "whole")
    held = launch["device_bytes"]
    on_host = held["parameters_on_its_host"]
    assert on_host > 0
    assert held["parameters"] + on_host == other["device_bytes"]["parameters"]
    assert replay.main([str(folder / "runs" / "weights"), "--steps", "3:6"], "maxtrain replay") == 0


def test_weights_on_hosts_go_on_bit_for_bit_and_on_devices(folder):
    assert train(folder, "weights-1", "steps=3", *WEIGHTS) == 0
    assert train(folder, "weights-1", *WEIGHTS) == 0
    assert train(folder, "weights-2", *WEIGHTS) == 0
    assert digests(folder, "weights-1") == digests(folder, "weights-2")
    assert train(folder, "moved", "steps=3", *WEIGHTS) == 0
    assert train(folder, "moved", "train.on_host=none") == 0
    assert_same_losses(folder, "moved")


@pytest.mark.parametrize(
    "settings",
    [
        ("model.lora.rank=2", "checkpoint.init_from=RUN"),
        (
            "model.lora.rank=2",
            "model.lora.base=int8",
            "model.lora.base_block=16",
            "checkpoint.init_from=RUN",
        ),
        ("objective=distill", "distill.teacher=RUN"),
    ],
    ids=["adapters", "adapters-int8", "teacher"],
)
def test_frozen_weights_on_hosts_change_no_loss(folder, settings):
    settings = [setting.replace("RUN", str(folder / "runs" / "whole")) for setting in settings]
    settings = [
        *settings,
        "optimizer.on_host=false",
        "optimizer.ema_decay=null",
        "model.remat=full",
    ]
    runs = []
    for place in ("none", "frozen"):
        run = f"{settings[0].split('=')[1]}-{len(settings)}-{place}"
        assert train(folder, run, *settings, f"train.on_host={place}") == 0
        runs.append(run)
    assert_same_losses(folder, runs[1], runs[0])
    (launch,) = read_launches(folder / "runs" / runs[1])
    names = [name for name in launch["device_bytes"] if name.endswith("on_its_host")]
    assert sum(launch["device_bytes"][name] for name in names) > 0


def test_weights_on_hosts_begin_with_those_of_another_run(folder):
    start = f"checkpoint.init_from={folder / 'runs' / 'whole'}"
    assert train(folder, "again", start, "model.remat=full") == 0
    assert train(folder, "again-on-hosts", start, *WEIGHTS) == 0
    assert_same_losses(folder, "again-on-hosts", "again")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["train.on_host=frozen", "model.remat=full"], "none of these are frozen"),
        (["train.on_host=all"], "model.remat=none would keep those of all layers"),
        ([*WEIGHTS, "optimizer.on_host=false"], "Set optimizer.on_host=true"),
        ([*WEIGHTS, "model.scan_layers=false"], "Set model.scan_layers=true"),
    ],
)
def test_what_weights_on_hosts_need_is_said(folder, capfd, settings, said):
    try:
        code = train(folder, "refused", *settings)
    except ConfigError as error:
        assert said in str(error)
    else:
        assert code == 78
        assert said in capfd.readouterr().err
