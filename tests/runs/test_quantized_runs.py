"""Runs that train adapters on a quantised base: begun, resumed, replayed, exported, and what they refuse."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxtrain.checkpoint import frozen_params
from maxtrain.checkpoint.listing import saved_digests
from maxtrain.commands import generate, replay, score
from maxtrain.commands.evaluate import command as evaluate
from maxtrain.commands.export import command as export
from maxtrain.commands.merge import command as merge
from maxtrain.config import load_config
from maxtrain.models.adapt import split_adapters
from maxtrain.models.merged import merged
from maxtrain.models.quantized import kernel_of, stored
from maxtrain.observe.metrics import read_metrics
from maxtrain.trainer.loop import main
from maxtrain.trainer.saved_run import load_run
from maxtrain.weights.hf import load_pretrained

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("this_process")]
LORA = ["model.lora.rank=2", "model.lora.base=nf4", "model.lora.base_block=4"]
RATE = "optimizer.learning_rate=0.03"


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
    """A config file beside its data, a run, its export, and a run of adapters on the export in nf4."""
    folder = tmp_path_factory.mktemp("quantized")
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
    assert train(path, "nf4", begins, *LORA, RATE) == 0
    return path


def test_the_base_is_what_was_read_quantised_and_keeps_its_bits(config):
    runs = config.parent / "runs"
    whole, _ = load_pretrained(config.parent / "hf")
    given = dict(nnx.to_flat_state(nnx.state(whole)))
    for step in (4, 12):
        base, _ = split_adapters(variables(runs / "nf4", step))
        flat = dict(nnx.to_flat_state(base))
        seen = 0
        for path, variable in flat.items():
            if path[-1] == "scales":
                continue
            if path[-1] != "codes":
                assert np.array_equal(variable[...], given[path][...])
                continue
            seen += 1
            shape = variable.get_metadata("stands_for")
            codes, scales = jax.jit(stored, static_argnums=1)(given[path[:-1]][...], shape)
            assert np.array_equal(variable[...], codes)
            assert np.array_equal(flat[*path[:-1], "scales"][...], scales)
        assert seen == 7
    records = [r for r in read_metrics(runs / "nf4") if r["kind"] == "train"]
    assert records[-1]["loss"] < records[0]["loss"]


def test_codes_and_scales_are_saved_once(config):
    folder = config.parent / "runs" / "nf4" / "checkpoints"
    own = json.loads((folder / "00000012" / "commit.json").read_text())["arrays"]
    assert all(".adapter." in name for name in own if name.startswith("params."))
    once = json.loads((frozen_params.stores(folder)[0] / "commit.json").read_text())["arrays"]
    assert once["params.layers.0.mlp.up.kernel.codes"]["dtype"] == "uint8"
    assert once["params.layers.0.mlp.up.kernel.scales"]["dtype"] == "bfloat16"
    assert "params.layers.0.mlp.up.kernel" not in once


@pytest.mark.slow
def test_it_goes_on_replays_and_begins_with_a_run_to_the_same_bits(config):
    runs = config.parent / "runs"
    expected = saved_digests(runs / "nf4" / "checkpoints")[12]
    begins = f"checkpoint.init_from={config.parent / 'hf'}"
    assert train(config, "stopped", begins, *LORA, RATE) == 0
    for step in ("00000008", "00000012"):
        shutil.rmtree(runs / "stopped" / "checkpoints" / step)
    assert train(config, "stopped", begins, *LORA, RATE) == 0
    assert saved_digests(runs / "stopped" / "checkpoints")[12] == expected
    assert replay.main([str(runs / "stopped"), "--steps", "4:12"]) == 0
    # The weights of the run that was exported are those of the export.
    begins = f"checkpoint.init_from={runs / 'base'}"
    assert train(config, "from_run", begins, *LORA, RATE) == 0
    assert saved_digests(runs / "from_run" / "checkpoints")[12] == expected


@pytest.mark.slow
def test_all_commands_see_the_adapted_model(config, capfd):
    run = str(config.parent / "runs" / "nf4")
    assert evaluate.main([run, "--json"]) == 0
    found = json.loads(capfd.readouterr().out)["sets"]["heldout"]["nll"]
    told = [r["nll"] for r in read_metrics(Path(run)) if r["kind"] == "eval"]
    assert found == pytest.approx(told[-1], rel=1e-6)
    assert generate.main([run, "--prompt", "the", "--max-tokens", "4"]) == 0
    assert score.main([run, "--text", "the of and to in"]) == 0


@pytest.mark.slow
def test_export_takes_adapters_into_the_weights_that_were_multiplied_with(config, capfd):
    run = config.parent / "runs" / "nf4"
    out = config.parent / "merged"
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
    up = getattr(model.layers, "0").mlp.up
    expected = np.asarray(kernel_of(up.kernel), np.float64)
    scale = up.adapter.scale
    expected += scale * (
        np.asarray(up.adapter.a[...], np.float64) @ np.asarray(up.adapter.b[...], np.float64)
    )
    np.testing.assert_allclose(ours["layers.0.mlp.up.kernel"], expected, atol=1e-6)
    tokens = jnp.asarray(tokenizer.encode("the of and to in")[None])
    np.testing.assert_allclose(model(tokens), whole(tokens), atol=0.05)
    peft = config.parent / "peft"
    card = (out / "README.md").read_text()
    assert "| weights below adapters | quantised, nf4 in blocks of 4" in card
    capfd.readouterr()
    assert export.main([str(run), str(peft), "--format", "peft"]) == 0
    told = capfd.readouterr().out
    assert f"on the weights of {config.parent / 'hf'} in nf4 (model.lora.base)" in told
    begins = [f"checkpoint.init_from={config.parent / 'hf'}", f"checkpoint.init_adapters={peft}"]
    assert train(config, "back", *begins, *LORA, "steps=4", "optimizer.learning_rate=1e-9") == 0
    _, back = split_adapters(variables(config.parent / "runs" / "back"))
    _, before = split_adapters(variables(run))
    for name, array in arrays(back).items():
        np.testing.assert_allclose(array, arrays(before)[name], atol=1e-5)


def test_a_merge_takes_the_run_with_its_adapters(config, tmp_path):
    run = config.parent / "runs" / "nf4"
    recipe = tmp_path / "recipe.yaml"
    models = [{"model": str(run), "parameters": {"weight": 1.0}}]
    recipe.write_text(json.dumps({"merge_method": "linear", "models": models}))
    assert merge.main([str(recipe), str(tmp_path / "out")]) == 0
    found, _ = load_pretrained(tmp_path / "out")
    expected = arrays(nnx.state(merged(load_run(run)[0])))
    for name, array in arrays(nnx.state(found)).items():
        np.testing.assert_allclose(array, expected[name], atol=1e-6)


@pytest.mark.slow
def test_with_magnitudes_it_begins_as_without(config):
    runs = config.parent / "runs"
    begins = f"checkpoint.init_from={config.parent / 'hf'}"
    assert train(config, "dora", begins, *LORA, "model.lora.magnitudes=true", RATE) == 0
    losses = {}
    for name in ("dora", "nf4"):
        records = [r for r in read_metrics(runs / name) if r["kind"] == "train"]
        losses[name] = [r["loss"] for r in records]
    assert losses["dora"][0] == pytest.approx(losses["nf4"][0], rel=2e-3)
    assert losses["dora"][-1] < losses["dora"][0]


def test_a_run_begins_with_the_adapters_and_the_base_of_another(config, capfd):
    runs = config.parent / "runs"
    begins = f"checkpoint.init_from={runs / 'nf4'}"
    assert train(config, "more", begins, *LORA, "steps=4", "optimizer.learning_rate=1e-9") == 0
    ours = arrays(split_adapters(variables(runs / "more"))[0])
    theirs = arrays(split_adapters(variables(runs / "nf4"))[0])
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        assert array.tobytes() == theirs[name].tobytes(), name
    capfd.readouterr()
    assert train(config, "refused", begins, "model.lora.rank=2") == 78
    assert "model.lora.base=full must be nf4, as of the adapters in" in capfd.readouterr().err


def test_weights_that_are_not_finite_are_named_as_they_are_there(config, capfd, tmp_path):
    directory = tmp_path / "hf"
    shutil.copytree(config.parent / "hf", directory)
    from_file = directory / "model.safetensors"
    content = bytearray(from_file.read_bytes())
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    place = 8 + length + header["model.layers.0.mlp.up_proj.weight"]["data_offsets"][0]
    content[place : place + 4] = np.float32(np.nan).tobytes()
    from_file.write_bytes(content)
    begins = f"checkpoint.init_from={directory}"
    assert train(config, "refused", begins, *LORA) == 65
    assert "up_proj.weight holds NaN or infinity" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.lora.base=nf4"], "model.lora.base=nf4 is not used with model.lora.rank=null"),
        (
            ["model.lora.rank=2", "model.lora.base_block=8"],
            "model.lora.base_block=8 is for int8 or nf4, not for model.lora.base=full",
        ),
        (
            [*LORA[:2], "model.lora.base_block=5"],
            "base_block=5 must be even with model.lora.base=nf4",
        ),
        ([*LORA[:2], "model.lora.base_block=0"], "model.lora.base_block=0 must be"),
        ([*LORA[:2]], "base_block=64 must divide the 16 inputs of layers.0.attention.k"),
        ([*LORA, "train.only=[mlp]"], "kept as nf4 do not train. Name other parameters"),
        (["model.lora.rank=2", "model.lora.base=int4"], "model.lora.base=int4"),
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
