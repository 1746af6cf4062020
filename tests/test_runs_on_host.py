"""Whole runs whose moments lie in the memory of hosts."""

import numpy as np
import pytest

from maxtrain import checkpoints, replay
from maxtrain.checkpoint.listing import saved_digests, saved_steps
from maxtrain.config import load_config
from maxtrain.observe.launches import read_launches
from maxtrain.observe.metrics import read_metrics
from maxtrain.train import main

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
    """Of steps and of evaluations."""
    records = read_metrics(folder / "runs" / run_name)
    return {(r["kind"], r["step"]): r.get("loss", r.get("nll")) for r in records}


def test_a_launch_says_what_lies_where(folder):
    (launch,) = read_launches(folder / "runs" / "whole")
    held = launch["device_bytes"]
    assert held["optimizer_state_on_its_host"] == 3 * held["parameters"]
    assert held["optimizer_state"] < 100


def test_a_run_that_stops_goes_on_bit_for_bit(folder):
    assert train(folder, "stopped", "steps=3") == 0
    assert list(saved_steps(folder / "runs" / "stopped" / "checkpoints")) == [3]
    assert train(folder, "stopped") == 0
    assert digests(folder, "stopped") == digests(folder, "whole")
    assert checkpoints.main(["verify", str(folder / "runs" / "stopped")]) == 0


@pytest.mark.parametrize("first", ["true", "false"])
def test_a_checkpoint_goes_on_with_either_setting(folder, first):
    then = {"true": "false", "false": "true"}[first]
    run = f"first-{first}"
    assert train(folder, run, "steps=3", f"optimizer.on_host={first}") == 0
    assert train(folder, run, f"optimizer.on_host={then}") == 0
    ours = losses(folder, run)
    theirs = losses(folder, "whole")
    assert ours.keys() == theirs.keys()
    for key, loss in ours.items():
        if loss is not None:
            np.testing.assert_allclose(loss, theirs[key], rtol=1e-5, err_msg=str(key))


def test_steps_are_replayed_bit_for_bit(folder):
    run = str(folder / "runs" / "whole")
    assert replay.main([run, "--steps", "3:6"], "maxtrain replay") == 0
