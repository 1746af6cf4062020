"""Runs of models with experts: resumed bit for bit, on any mesh, exported, and fine-tuned
from what was exported."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from flax import nnx

from maxtrain.checkpoint.integrity import read_commit
from maxtrain.checkpoint.listing import saved_digests
from maxtrain.commands import generate, replay
from maxtrain.commands.evaluate import command as evaluate
from maxtrain.commands.export import command as export
from maxtrain.config.load import load_config, load_with_notes
from maxtrain.models.buffer import Buffer
from maxtrain.models.known import MODELS
from maxtrain.observe.launches import read_launches
from maxtrain.observe.metrics import read_metrics
from maxtrain.trainer.loop import main
from maxtrain.trainer.saved_run import load_run

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("this_process")]
FAMILIES = {
    "mixtral": {"moe": {"num_experts": 4}, "window": 20},
    "qwen2_moe": {
        "moe": {"num_experts": 4, "expert_dim": 16, "shared_dim": 16},
        "routing": {"capacity_factor": 1.0, "z_loss": 0.01},
    },
    "qwen3_moe": {"moe": {"num_experts": 4, "expert_dim": 16}, "routing": {"kernel": "ragged"}},
    "deepseek_v2": {
        "moe": {"num_experts": 4, "expert_dim": 16, "shared_dim": 16, "dense_layers": 1},
        "latent": {"kv_rank": 8, "rope_dim": 4, "value_dim": 8},
        "head_dim": 12,
    },
    "deepseek_v3": {
        "moe": {"num_experts": 4, "expert_dim": 16, "num_groups": 2, "dense_layers": 1},
        "latent": {"kv_rank": 8, "query_rank": 16, "rope_dim": 4, "value_dim": 8},
        "head_dim": 12,
    },
    "gpt_oss": {"moe": {"num_experts": 4}, "window": 20},
}


def train(config: Path, run_name: str, *overrides: str) -> int:
    """Exit code of a run in this process."""
    words = [f"config={config}", f"run_name={run_name}", *overrides]
    return main(load_with_notes(words, MODELS).config)


def params() -> list:
    """The families that time is taken for in every run of the tests, and the others."""
    found = []
    for family in FAMILIES:
        marks = ()
        if family in ("qwen2_moe", "qwen3_moe", "deepseek_v2", "gpt_oss"):
            marks = (pytest.mark.slow,)
        found.append(pytest.param(family, marks=marks))
    return found


@pytest.fixture(scope="module", params=params())
def config(request, tmp_path_factory, tiny_run) -> Path:
    """A config file beside its data, and a finished run."""
    folder = tmp_path_factory.mktemp(request.param)
    path = tiny_run(
        folder,
        *("--holdout", "0.2"),
        steps=6,
        checkpoint_interval=3,
        model={"family": request.param, "num_layers": 2, "num_heads": 2, **FAMILIES[request.param]},
        optimizer={"learning_rate": 1e-2},
        schedule={"warmup_steps": 2},
        regularization={"router_noise": "gaussian", "router_noise_scale": 0.1},
        eval={"sets": {"heldout": {"path": str(folder / "data" / "eval")}}},
    )
    assert train(path, "whole") == 0
    return path


def test_what_experts_get_is_recorded(config):
    run = config.parent / "runs" / "whole"
    records = [record for record in read_metrics(run) if record["kind"] == "train"]
    assert records
    for record in records:
        assert 1 <= record["expert_max_load"] <= 4
        assert 0 < record["expert_load_entropy"] <= 1.000001
        assert record["dead_experts"] >= 0
        assert record["expert_balance_loss"] >= 0.0099
        assert ("expert_dropped" in record) == (config.parent.name.startswith("qwen2_moe"))
    kernel = load_config([f"config={config}"]).model.routing.kernel
    assert read_launches(run)[-1]["kernels"]["experts"] == kernel


def test_a_resumed_run_is_as_never_stopped(config, capsys):
    run = config.parent / "runs" / "whole"
    expected = saved_digests(run / "checkpoints")[6]
    shutil.rmtree(run / "checkpoints" / "00000006")
    assert train(config, "whole") == 0
    assert "experts: 4 in a layer, 2 for each token" in capsys.readouterr().out
    assert saved_digests(run / "checkpoints")[6] == expected
    assert replay.main([str(run), "--steps", "3:6"]) == 0


@pytest.mark.slow
def test_any_mesh_gives_the_same_losses(config):
    runs = config.parent / "runs"
    exact = ["precision.compute=float32", "model.vocab_size=264"]
    tensor = ["mesh.data=1", "mesh.fsdp=4", "mesh.tensor=2"]
    assert train(config, "tensor", *tensor, *exact) == 0
    assert train(config, "rows", "mesh.data=1", "mesh.fsdp=8", *exact) == 0
    losses = []
    for name in ("tensor", "rows"):
        records = [record for record in read_metrics(runs / name) if record["kind"] == "train"]
        losses.append([record["loss"] for record in records])
    np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.slow
def test_a_run_goes_on_with_experts_split_or_whole(config):
    """Half of it with experts on four devices, and the rest with all of them gathered."""
    runs = config.parent / "runs"
    exact = ["precision.compute=float32", "mesh.data=1", "mesh.simulated_devices=8"]
    split = ["mesh.fsdp=2", "mesh.expert=4", "model.routing.exchange_factor=0.5"]
    assert train(config, "gathered", "mesh.fsdp=8", *exact) == 0
    assert train(config, "moved", *split, *exact) == 0
    shutil.rmtree(runs / "moved" / "checkpoints" / "00000006")
    assert train(config, "moved", "mesh.fsdp=8", *exact) == 0
    assert [launch["mesh"]["expert"] for launch in read_launches(runs / "moved")] == [4, 1]
    losses = []
    for name in ("gathered", "moved"):
        records = [record for record in read_metrics(runs / name) if record["kind"] == "train"]
        losses.append([record["loss"] for record in records])
    assert len(losses[0]) == 6
    np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.slow
def test_an_export_is_generated_from_and_trained_on(config, capfd):
    run = config.parent / "runs" / "whole"
    out = config.parent / "exported"
    assert evaluate.main([str(run), "--json"]) == 0
    assert export.main([str(run), str(out), "--format", "hf"]) == 0
    assert generate.main(["--hf", str(out), "--prompt", "the", "--max-tokens", "4"]) == 0
    assert train(config, "next", f"model={out}", "steps=2") == 0


def test_a_correction_is_a_buffer_of_the_checkpoint_and_evens_out(config):
    run = config.parent / "runs" / "whole"
    if not config.parent.name.startswith("deepseek_v3"):
        names = set(read_commit(run / "checkpoints" / "00000003")["arrays"])
        assert not [name for name in names if name.startswith("buffers.")]
        return
    names = set(read_commit(run / "checkpoints" / "00000003")["arrays"])
    assert "buffers.layers.0.mlp.correction" in names
    model, _ = load_run(run)
    (correction,) = [np.asarray(x[...]) for _, x in nnx.to_flat_state(nnx.state(model, Buffer))]
    steps = np.round(correction / 0.001, 3)
    assert np.abs(steps).max() <= 6
    np.testing.assert_array_equal(steps, np.round(steps))
    assert np.abs(steps).max() > 0
