"""Runs of which a part trains: saved once, resumed bit for bit, and used like any other run."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from flax import nnx

from maxtrain.checkpoint import frozen_params
from maxtrain.checkpoint.listing import saved_digests
from maxtrain.commands import generate, replay
from maxtrain.commands.checkpoint import main as checkpoint
from maxtrain.commands.compare import main as compare
from maxtrain.commands.evaluate import command as evaluate
from maxtrain.commands.export import command as export
from maxtrain.config import load_config
from maxtrain.observe.metrics import read_metrics
from maxtrain.trainer.loop import main
from maxtrain.trainer.saved_run import load_run

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("this_process")]
ONLY = "train.only=[mlp]"


def train(config: Path, run_name: str, *overrides: str) -> int:
    """Exit code of a run in this process."""
    return main(load_config([f"config={config}", f"run_name={run_name}", *overrides]))


def leaves(folder: Path, step: int | None = None) -> dict[str, np.ndarray]:
    """The parameters that the model of a run is used with."""
    model, _ = load_run(folder, step)
    _, params = nnx.split(model)
    named = {}
    for path, leaf in nnx.to_flat_state(params):
        named[".".join(map(str, path))] = np.asarray(leaf.get_value())
    return named


@pytest.fixture(scope="module")
def config(tmp_path_factory, tiny_run) -> Path:
    """A config file beside its data, a run whose feed-forward trains, and copies of it."""
    folder = tmp_path_factory.mktemp("frozen")
    (folder / "copies").mkdir()
    path = tiny_run(
        folder,
        *("--holdout", "0.2"),
        steps=12,
        checkpoint_interval=4,
        optimizer={"learning_rate": 1e-2},
        schedule={"warmup_steps": 2},
        eval={"sets": {"heldout": {"path": str(folder / "data" / "eval")}}},
        checkpoint={"keep": 3},
    )
    assert train(path, "part", ONLY, f"checkpoint.copy_to={folder / 'copies'}") == 0
    return path


def test_only_what_is_asked_for_trains(config):
    run = config.parent / "runs" / "part"
    first = leaves(run, 4)
    last = leaves(run)
    for name, before in first.items():
        assert (before.tobytes() != last[name].tobytes()) == ("mlp" in name), name
    records = [r for r in read_metrics(run) if r["kind"] == "train"]
    assert records[-1]["loss"] < records[0]["loss"]


def test_frozen_parameters_are_saved_once(config):
    folder = config.parent / "runs" / "part" / "checkpoints"
    own = json.loads((folder / "00000012" / "commit.json").read_text())["arrays"]
    assert "params.layers.0.mlp.up.kernel" in own and "params.embedding" not in own
    assert not any("attention.q" in name for name in own), "nor moments of them"
    once = json.loads((frozen_params.stores(folder)[0] / "commit.json").read_text())["arrays"]
    assert "params.embedding" in once and not any(".mlp." in name for name in once)
    assert set(saved_digests(folder)[12]) == {*own, *once}


def test_all_commands_see_the_whole_model(config, capfd, tmp_path):
    run = str(config.parent / "runs" / "part")
    assert evaluate.main([run, "--json"]) == 0
    found = json.loads(capfd.readouterr().out)["sets"]["heldout"]["nll"]
    told = [r["nll"] for r in read_metrics(Path(run)) if r["kind"] == "eval"]
    assert found == pytest.approx(told[-1], rel=1e-6)
    assert generate.main([run, "--prompt", "the", "--max-tokens", "4"]) == 0
    assert export.main([run, str(tmp_path / "hf"), "--format", "hf"]) == 0
    assert "bit for bit" in capfd.readouterr().out
    assert replay.main([run, "--steps", "4:12"]) == 0
    assert compare([run, run]) == 0
    assert checkpoint(["verify", run]) == 0


def test_a_resumed_run_is_as_never_stopped(config):
    runs = config.parent / "runs"
    expected = saved_digests(runs / "part" / "checkpoints")[12]
    assert train(config, "stopped", ONLY) == 0
    for step in ("00000008", "00000012"):
        shutil.rmtree(runs / "stopped" / "checkpoints" / step)
    assert train(config, "stopped", ONLY) == 0
    assert saved_digests(runs / "stopped" / "checkpoints")[12] == expected
    assert train(config, "stopped", ONLY, "checkpoint.start_over=true") == 0
    assert saved_digests(runs / "stopped" / "checkpoints")[12] == expected


def test_damage_is_noticed_and_mended_from_the_copies(config, capfd):
    runs = config.parent / "runs"
    folder = runs / "part" / "checkpoints"
    file = next((frozen_params.stores(folder)[0] / "arrays/params.embedding").glob("0*"))
    whole = file.read_bytes()
    flipped = bytearray(whole)
    flipped[len(flipped) // 2] ^= 4
    file.write_bytes(flipped)
    assert evaluate.main([str(runs / "part")]) == 74
    assert "params.embedding" in capfd.readouterr().err
    assert checkpoint(["verify", str(runs / "part")]) == 74
    expected = saved_digests(folder)[12]
    shutil.rmtree(folder / "00000012")
    copied = config.parent / "copies" / "part" / "checkpoints"
    shutil.rmtree(copied / "00000012")
    # Without copies there is nothing to go on with.
    assert train(config, "part", ONLY) == 74
    told = capfd.readouterr().err
    assert "is put aside" in told and "needs the frozen parameters" in told
    copies = f"checkpoint.copy_to={config.parent / 'copies'}"
    assert train(config, "part", ONLY, copies) == 0
    assert saved_digests(folder)[12] == expected
    assert checkpoint(["verify", str(runs / "part")]) == 0


def test_a_run_that_goes_on_with_another_choice_is_refused(config, capfd):
    assert train(config, "part", "train.only=[attention]") == 78
    told = capfd.readouterr().err
    assert "they did train params.layers.0.mlp.down.kernel" in told
    assert "Set both back, or begin another run" in told


def test_a_run_begins_with_the_weights_of_one_with_frozen_parameters(config):
    runs = config.parent / "runs"
    begins = f"checkpoint.init_from={runs / 'part'}"
    assert train(config, "after", begins, "train.freeze=[embedding]", "steps=4") == 0
    ours = leaves(runs / "after")
    theirs = leaves(runs / "part")
    assert ours["embedding"].tobytes() == theirs["embedding"].tobytes()
    assert ours["head.kernel"].tobytes() != theirs["head.kernel"].tobytes()


def test_averages_are_of_what_trains(config):
    runs = config.parent / "runs"
    assert train(config, "averaged", ONLY, "optimizer.ema_decay=0.9") == 0
    run = runs / "averaged"
    averaged = leaves(run)
    plain = leaves(runs / "part")
    assert averaged["embedding"].tobytes() == plain["embedding"].tobytes()
    assert averaged["layers.0.mlp.up.kernel"].tobytes() != plain["layers.0.mlp.up.kernel"].tobytes()
    assert evaluate.main([str(run)]) == 0


def test_layers_have_their_norms_and_zero_divides_frozen_parameters_too(config):
    options = [
        "observe.layer_norms_interval=4",
        "optimizer.zero=3",
        "integrity.replicas_interval=4",
    ]
    assert train(config, "divided", ONLY, *options) == 0
    runs = config.parent / "runs"
    ours = leaves(runs / "divided")
    for name, leaf in leaves(runs / "part").items():
        np.testing.assert_allclose(ours[name], leaf, rtol=0, atol=2e-5)
