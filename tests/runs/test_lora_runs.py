"""Runs that train adapters: from a directory of Hugging Face or a run, stopped, exported."""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxtrain.checkpoint import frozen_params
from maxtrain.checkpoint.listing import saved_digests
from maxtrain.commands import generate, replay
from maxtrain.commands.evaluate import command as evaluate
from maxtrain.commands.export import command as export
from maxtrain.config import load_config
from maxtrain.models.adapt import split_adapters
from maxtrain.models.merged import merged
from maxtrain.observe.metrics import read_metrics
from maxtrain.trainer.loop import main
from maxtrain.trainer.saved_run import load_run
from maxtrain.weights.hf import load_pretrained

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("this_process")]
LORA = "model.lora.rank=2"
DROPOUT = "model.lora.dropout=0.1"


def train(config: Path, run_name: str, *overrides: str) -> int:
    """Exit code of a run in this process."""
    return main(load_config([f"config={config}", f"run_name={run_name}", *overrides]))


def arrays(variables) -> dict[str, np.ndarray]:
    flat = nnx.to_flat_state(variables)
    return {".".join(map(str, path)): np.asarray(leaf.get_value()) for path, leaf in flat}


def variables(folder: Path, step: int | None = None) -> nnx.State:
    return nnx.state(load_run(folder, step)[0])


@pytest.fixture(scope="module")
def config(tmp_path_factory, tiny_run) -> Path:
    """A config file beside its data, a run, its export, and a run of adapters that began with it."""
    folder = tmp_path_factory.mktemp("lora")
    path = tiny_run(
        folder,
        *("--holdout", "0.2"),
        steps=12,
        checkpoint_interval=4,
        optimizer={"learning_rate": 1e-2},
        schedule={"warmup_steps": 2},
        eval={"sets": {"heldout": {"path": str(folder / "data" / "eval")}}},
    )
    runs = folder / "runs"
    assert train(path, "base", "steps=4") == 0
    assert export.main([str(runs / "base"), str(folder / "hf")]) == 0
    begins = f"checkpoint.init_from={folder / 'hf'}"
    assert train(path, "lora", begins, LORA, DROPOUT, "optimizer.learning_rate=0.03") == 0
    return path


def test_adapters_alone_train_and_the_base_keeps_its_bits(config):
    runs = config.parent / "runs"
    base, adapters = split_adapters(variables(runs / "lora"))
    first_base, first = split_adapters(variables(runs / "lora", 4))
    theirs = arrays(variables(runs / "base"))
    ours = arrays(base)
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        assert array.tobytes() == theirs[name].tobytes(), name
    before = arrays(first)
    for name, array in arrays(adapters).items():
        assert array.tobytes() != before[name].tobytes(), name
    assert arrays(first_base).keys() == ours.keys()
    records = [r for r in read_metrics(runs / "lora") if r["kind"] == "train"]
    of_base = [r for r in read_metrics(runs / "base") if r["kind"] == "train"]
    # New adapters change nothing: the first loss is about that of the base, and then it falls.
    assert abs(records[0]["loss"] - of_base[-1]["loss"]) < 0.3
    assert records[-1]["loss"] < records[0]["loss"]


def test_checkpoints_hold_adapters_and_the_base_is_saved_once(config):
    folder = config.parent / "runs" / "lora" / "checkpoints"
    own = json.loads((folder / "00000012" / "commit.json").read_text())["arrays"]
    params = [name for name in own if name.startswith("params.")]
    assert params
    assert all(".adapter." in name for name in params)
    moments = [name for name in own if name.startswith("opt_state.") and "layers" in name]
    assert moments
    assert all(".adapter." in name for name in moments)
    once = json.loads((frozen_params.stores(folder)[0] / "commit.json").read_text())["arrays"]
    assert "params.embedding" in once
    assert not any(".adapter." in name for name in once)


def test_a_run_that_was_stopped_goes_on_to_the_same_bits(config):
    runs = config.parent / "runs"
    expected = saved_digests(runs / "lora" / "checkpoints")[12]
    begins = f"checkpoint.init_from={config.parent / 'hf'}"
    options = [begins, LORA, DROPOUT, "optimizer.learning_rate=0.03"]
    assert train(config, "stopped", *options) == 0
    for step in ("00000008", "00000012"):
        shutil.rmtree(runs / "stopped" / "checkpoints" / step)
    assert train(config, "stopped", *options) == 0
    assert saved_digests(runs / "stopped" / "checkpoints")[12] == expected
    assert replay.main([str(runs / "stopped"), "--steps", "4:12"]) == 0


def test_a_run_does_not_go_on_with_adapters_of_another_scale(config, capfd):
    run = config.parent / "runs" / "lora"
    before = (run / "config.yaml").read_bytes()
    capfd.readouterr()
    begins = f"checkpoint.init_from={config.parent / 'hf'}"
    assert train(config, "lora", begins, LORA, "model.lora.alpha=64") == 78
    told = capfd.readouterr().err
    assert "model.lora.alpha=64.0 must be 16.0, as until step 12 of this run" in told
    assert "Set model.lora.alpha=16.0, or set run_name to a new name" in told
    assert (run / "config.yaml").read_bytes() == before


def test_all_commands_see_the_adapted_model_and_export_takes_the_adapters_in(config, capfd):
    run = config.parent / "runs" / "lora"
    out = config.parent / "merged"
    assert evaluate.main([str(run), "--json"]) == 0
    found = json.loads(capfd.readouterr().out)["sets"]["heldout"]["nll"]
    told = [r["nll"] for r in read_metrics(run) if r["kind"] == "eval"]
    assert found == pytest.approx(told[-1], rel=1e-6)
    assert generate.main([str(run), "--prompt", "the", "--max-tokens", "4"]) == 0
    capfd.readouterr()
    assert export.main([str(run), str(out), "--format", "hf"]) == 0
    told = capfd.readouterr().out
    assert "its adapters are taken into the weights" in told
    assert "bit for bit" in told
    model, tokenizer = load_run(run)
    whole, _ = load_pretrained(out)
    ours = arrays(nnx.state(merged(model)))
    theirs = arrays(nnx.state(whole))
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        assert array.tobytes() == theirs[name].tobytes(), name
    tokens = jnp.asarray(tokenizer.encode("the of and to in")[None])
    np.testing.assert_allclose(model(tokens), whole(tokens), atol=0.05)


def test_a_run_begins_with_the_adapters_of_another(config, capfd):
    runs = config.parent / "runs"
    begins = f"checkpoint.init_from={runs / 'lora'}"
    assert train(config, "more", begins, LORA, "steps=4", "optimizer.learning_rate=1e-9") == 0
    _, ours = split_adapters(variables(runs / "more"))
    _, theirs = split_adapters(variables(runs / "lora"))
    for name, array in arrays(ours).items():
        np.testing.assert_allclose(array, arrays(theirs)[name], atol=1e-5)
    capfd.readouterr()
    other = "model.lora.alpha=32"
    assert train(config, "refused", begins, LORA, other) == 78
    assert "model.lora.alpha=32.0 must be 16.0, as of the adapters in" in capfd.readouterr().err


def test_a_run_without_adapters_begins_with_weights_that_have_taken_them_in(config, capfd):
    runs = config.parent / "runs"
    capfd.readouterr()
    lot = ["steps=4", "optimizer.learning_rate=1e-9", "eval_at_start=true"]
    assert train(config, "whole", f"checkpoint.init_from={runs / 'lora'}", *lot) == 0
    assert "are taken into the weights" in capfd.readouterr().out
    ours = arrays(variables(runs / "whole"))
    theirs = arrays(nnx.state(merged(load_run(runs / "lora")[0])))
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        np.testing.assert_allclose(array, theirs[name], atol=1e-5)
    first = next(r for r in read_metrics(runs / "whole") if r["kind"] == "eval")
    last = [r for r in read_metrics(runs / "lora") if r["kind"] == "eval"][-1]
    assert first["nll"] == pytest.approx(last["nll"], rel=1e-2)


def test_adapters_go_to_peft_and_come_back(config, capfd):
    runs = config.parent / "runs"
    out = config.parent / "peft"
    assert export.main([str(runs / "lora"), str(out), "--format", "peft"]) == 0
    told = capfd.readouterr().out
    assert "bit for bit" in told
    settings = json.loads((out / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(config.parent / "hf")
    assert settings["lora_dropout"] == 0.1
    begins = [f"checkpoint.init_from={config.parent / 'hf'}", f"checkpoint.init_adapters={out}"]
    assert train(config, "back", *begins, LORA, "steps=4", "optimizer.learning_rate=1e-9") == 0
    told = capfd.readouterr().out
    assert "has lora_dropout=0.1, and this run has model.lora.dropout=0.0" in told
    base, ours = split_adapters(variables(runs / "back"))
    their_base, theirs = split_adapters(variables(runs / "lora"))
    for name, array in arrays(ours).items():
        np.testing.assert_allclose(array, arrays(theirs)[name], atol=1e-5)
    for name, array in arrays(base).items():
        assert array.tobytes() == arrays(their_base)[name].tobytes()
    capfd.readouterr()
    assert export.main([str(runs / "base"), str(out) + "2", "--format", "peft"]) == 64
    assert "has no adapters" in capfd.readouterr().err


def test_what_trains_beside_adapters_is_not_left_out_in_silence(config, capfd):
    runs = config.parent / "runs"
    out = config.parent / "partly"
    begins = f"checkpoint.init_from={config.parent / 'hf'}"
    assert train(config, "partly", begins, LORA, "train.only=[embedding]", "steps=4") == 0
    capfd.readouterr()
    assert export.main([str(runs / "partly"), str(out), "--format", "peft"]) == 64
    assert "the run has trained embedding" in capfd.readouterr().err
    assert not out.exists()
    assert export.main([str(runs / "partly"), str(out)]) == 0


@pytest.mark.slow
def test_magnitudes_begin_as_lengths_of_the_weights_that_were_read(config):
    """The loss of the first step is that without them."""
    runs = config.parent / "runs"
    begins = f"checkpoint.init_from={config.parent / 'hf'}"
    options = [begins, LORA, "model.lora.magnitudes=true", "optimizer.learning_rate=0.03"]
    assert train(config, "dora", *options) == 0
    losses = {}
    for name in ("dora", "lora"):
        records = [r for r in read_metrics(runs / name) if r["kind"] == "train"]
        losses[name] = [r["loss"] for r in records]
    assert losses["dora"][0] == pytest.approx(losses["lora"][0], rel=2e-3)
    assert losses["dora"][-1] < losses["dora"][0]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.lora.rank=0"], "model.lora.rank=0 must be"),
        ([LORA, "model.lora.targets=[q_proj]"], "q_proj is found in the path of no product"),
        ([LORA, "model.lora.targets=[]"], "names no product"),
        ([LORA, "model.lora.targets=['(']"], "is no regular expression"),
        ([LORA, "model.lora.dropout=1"], "dropout=1.0 must be less than 1. Set model.lora.dropout"),
        (["model.lora.alpha=8"], "is not used with model.lora.rank=null"),
        (["checkpoint.init_adapters=x"], "needs adapters, but model.lora.rank=null"),
        ([LORA, "checkpoint.init_adapters=x"], "Set checkpoint.init_from to them"),
    ],
)
def test_what_can_not_be_is_refused(config, capfd, overrides, message):
    try:
        code = train(config, "refused", *overrides)
        told = capfd.readouterr().err
    except ValueError as error:
        code = 78
        told = str(error)
    assert code == 78
    assert message in told
