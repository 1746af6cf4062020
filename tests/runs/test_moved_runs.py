"""One run that six meshes of eight devices train in turn, each from the checkpoint of the one
before: its losses are those of one device, and each part is replayed bit for bit."""

import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from maxtrain import failpoints
from maxtrain.commands import replay
from maxtrain.config import load_config
from maxtrain.observe.launches import read_launches
from maxtrain.observe.metrics import read_metrics
from maxtrain.trainer.loop import main

REPOSITORY = Path(__file__).parents[2]
# Two steps each. What is not named is 1.
MESHES = (
    {"data": 8},
    {"fsdp": 8},
    {"fsdp": 2, "tensor": 4},
    {"fsdp": 4, "context": 2},
    {"fsdp": 4, "stage": 2},
    {"fsdp": 2, "expert": 4},
)
STEPS = 2 * len(MESHES)
AXES = ("data", "stage", "fsdp", "context", "expert", "tensor")

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("this_process")]


@pytest.fixture(scope="module")
def config(tmp_path_factory, tiny_run) -> Path:
    """Experts, and heads and layers that all of these meshes divide."""
    return tiny_run(
        tmp_path_factory.mktemp("moved"),
        steps=STEPS,
        checkpoint_interval=2,
        checkpoint={"keep": 99},
        # Roundings to bfloat16 would hide what is compared.
        precision={"compute": "float32"},
        determinism="full",
        optimizer={"learning_rate": 1e-3},
        schedule={"warmup_steps": 3},
        model={
            "family": "mixtral",
            "attention": "xla",
            "vocab_size": 264,
            "num_layers": 2,
            "num_heads": 8,
            "num_kv_heads": 8,
            "moe": {"num_experts": 8, "experts_per_token": 2},
        },
    )


def overrides(mesh) -> list[str]:
    return [f"mesh.{axis}={mesh.get(axis, 1)}" for axis in AXES]


def records_of(config, run_name) -> list[dict]:
    records = read_metrics(config.parent / "runs" / run_name)
    return [record for record in records if record["kind"] == "train"]


@pytest.fixture(scope="module")
def moved(config) -> Path:
    """The folder of the run; while it waits for the batch after its part, each is asked to
    stop."""
    for number, mesh in enumerate(MESHES, 1):
        with pytest.MonkeyPatch.context() as patch:
            is_last = number == len(MESHES)
            if not is_last:
                patch.setenv(failpoints.VARIABLE, f"data:term:{2 * number + 1}")
            code = main(load_config([f"config={config}", "run_name=moved", *overrides(mesh)]))
            failpoints._armed.clear()
        assert code == (0 if is_last else 75), mesh
        assert records_of(config, "moved")[-1]["step"] == 2 * number
    return config.parent / "runs" / "moved"


def test_losses_are_those_of_one_device(config, moved):
    alone = [f"config={config}", "run_name=alone", "mesh.simulated_devices=1", *overrides({})]
    command = [sys.executable, "-m", "maxtrain.train", *alone]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    found = records_of(config, "moved")
    expected = records_of(config, "alone")
    assert [record["step"] for record in found] == list(range(1, STEPS + 1))
    assert [record["batch"] for record in found] == [record["batch"] for record in expected]
    for name in ("loss", "grad_norm"):
        ours = [record[name] for record in found]
        theirs = [record[name] for record in expected]
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, err_msg=name)
    configs = {launch["config"] for launch in read_launches(moved)}
    assert len(configs) == len(MESHES) and len(jax.devices()) == 8


@pytest.mark.parametrize("number", range(len(MESHES)), ids=["-".join(mesh) for mesh in MESHES])
def test_each_part_is_the_same_again_on_the_mesh_that_made_it(moved, number, capsys):
    first = 2 * number
    assert replay.main([str(moved), "--steps", f"{first}:{first + 2}"]) == 0
    said = capsys.readouterr().out
    assert f"steps {first + 1} to {first + 2} again" in said
    assert "all the same bit for bit" in said and "although" not in said
    assert re.search(r" and \d+ arrays compared", said), "those of the next checkpoint"


def test_steps_of_two_meshes_are_not_replayed_on_one(moved, capsys):
    assert replay.main([str(moved), "--steps", "1:4"]) == 64
    said = capsys.readouterr().err
    assert "from step 3 on the run had another mesh.data, mesh.fsdp" in said
    assert "Replay up to step 2, and then from a checkpoint on" in said
