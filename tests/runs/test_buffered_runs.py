"""Runs of a model with buffers: resumed bit for bit, replayed, and used without changing them."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from flax import nnx

from maxtrain.checkpoint.integrity import read_commit
from maxtrain.checkpoint.listing import saved_digests
from maxtrain.commands import generate, replay
from maxtrain.commands.evaluate import command as evaluate
from maxtrain.config import load_config
from maxtrain.models.buffer import Buffer
from maxtrain.observe.launches import read_launches
from maxtrain.observe.metrics import read_metrics
from maxtrain.trainer.loop import main
from maxtrain.trainer.saved_run import load_run
from tests.support.centred import centred

__all__ = ["centred"]
pytestmark = [pytest.mark.long, pytest.mark.usefixtures("this_process", "centred")]


def train(config: Path, run_name: str, *overrides: str) -> int:
    """Exit code of a run in this process."""
    return main(load_config([f"config={config}", f"run_name={run_name}", *overrides]))


def buffers(folder: Path) -> dict[str, np.ndarray]:
    """Return the buffers of the model that a run is used with."""
    model, _ = load_run(folder)
    named = {}
    for path, variable in nnx.to_flat_state(nnx.state(model, Buffer)):
        named[".".join(map(str, path))] = np.asarray(variable.get_value())
    return named


@pytest.fixture(scope="module")
def config(tmp_path_factory, tiny_run, centred) -> Path:
    """A config file beside its data, and a finished run."""
    folder = tmp_path_factory.mktemp("buffers")
    path = tiny_run(
        folder,
        *("--holdout", "0.2"),
        steps=8,
        checkpoint_interval=4,
        model={"num_layers": 3},
        # So that two meshes can be compared.
        precision={"compute": "float32"},
        optimizer={"learning_rate": 1e-2},
        schedule={"warmup_steps": 2},
        eval={"sets": {"heldout": {"path": str(folder / "data" / "eval")}}},
    )
    assert train(path, "whole") == 0
    return path


def test_buffers_are_in_every_checkpoint_and_what_layers_say_is_recorded(config):
    run = config.parent / "runs" / "whole"
    names = set(read_commit(run / "checkpoints" / "00000004")["arrays"])
    assert {f"buffers.layers.{place}.mlp.shift" for place in ("prefix_0", "0", "rest_0")} <= names
    first = saved_digests(run / "checkpoints")[4]
    last = saved_digests(run / "checkpoints")[8]
    assert all(first[name] != last[name] for name in names if name.startswith("buffers."))
    for record in read_metrics(run):
        if record["kind"] == "train":
            assert record["size"] > 0 and record["positive"] > 0
            assert record["objective"] == pytest.approx(record["loss"] + 3 * record["size"], 1e-3)


def test_a_resumed_run_is_as_never_stopped(config):
    runs = config.parent / "runs"
    shutil.copytree(runs / "whole", runs / "kept")
    expected = saved_digests(runs / "whole" / "checkpoints")[8]
    shutil.rmtree(runs / "whole" / "checkpoints" / "00000008")
    assert train(config, "whole") == 0
    assert saved_digests(runs / "whole" / "checkpoints")[8] == expected
    assert replay.main([str(runs / "whole"), "--steps", "4:8"]) == 0


@pytest.mark.slow
def test_a_run_goes_on_to_the_same_numbers_on_another_mesh(config):
    """Saved by the shards of one mesh, a buffer is what the shards of the other go on from."""
    runs = config.parent / "runs"
    shutil.copytree(runs / "whole", runs / "moved")
    shutil.rmtree(runs / "moved" / "checkpoints" / "00000008")
    assert train(config, "moved", "mesh.data=4", "mesh.fsdp=2") == 0
    meshes = [launch["mesh"]["fsdp"] for launch in read_launches(runs / "moved")]
    # The run that it was copied from may have been resumed by another test before.
    assert (meshes[0], meshes[-2], meshes[-1]) == (4, 4, 2)
    expected = buffers(runs / "whole")
    for name, value in buffers(runs / "moved").items():
        np.testing.assert_allclose(value, expected[name], atol=1e-7)
        assert np.abs(value).max() > 0
    losses = []
    for run in ("whole", "moved"):
        records = read_metrics(runs / run)
        losses.append([record["loss"] for record in records if record["kind"] == "train"])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


def test_evaluation_and_generation_leave_them(config, capfd):
    run = config.parent / "runs" / "whole"
    before = buffers(run)
    assert len(before) == 3 and all(np.abs(x).max() > 0 for x in before.values())
    assert evaluate.main([str(run), "--json"]) == 0
    assert generate.main([str(run), "--prompt", "the", "--max-tokens", "4"]) == 0
    after = buffers(run)
    for name, value in before.items():
        assert after[name].tobytes() == value.tobytes()


@pytest.mark.slow
def test_another_run_begins_with_them(config):
    runs = config.parent / "runs"
    begins = f"checkpoint.init_from={runs / 'whole'}"
    options = ["train.only=[norm]", "optimizer.ema_decay=0.9", "steps=2"]
    assert train(config, "next", begins, *options) == 0
    theirs = buffers(runs / "whole")
    for name, value in buffers(runs / "next").items():
        moved = np.abs(value - theirs[name])
        assert 0 < moved.max() < 0.021, "two updates from where the other run ended"
