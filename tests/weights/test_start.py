"""Weights of another run to start from: bit for bit, whole or in named parts, and reported."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from data_pipeline.base.errors import ConfigError, DataError, StorageError
from maxtrain.checkpoint.manager import Checkpoints
from maxtrain.checkpoint.run_state import RunState
from maxtrain.config.load import to_yaml
from maxtrain.config.schema import (
    CheckpointConfig,
    LoraConfig,
    MeshConfig,
    ModelConfig,
    PrecisionConfig,
    RoutingConfig,
    RunConfig,
)
from maxtrain.models.adapt import split_adapters
from maxtrain.models.families.directory import read_config
from maxtrain.models.merged import merged
from maxtrain.models.registry import build_model
from maxtrain.parallel.mesh import make_mesh
from maxtrain.train_step.state import abstract_model
from maxtrain.weights.start import (
    changed_meaning,
    require_same_meaning,
    require_weights,
    starting_variables,
)

MODEL = ModelConfig(
    num_layers=2,
    embed_dim=16,
    mlp_dim=32,
    num_heads=2,
    num_kv_heads=2,
    vocab_size=40,
    max_length=32,
)
PARITY = Path(__file__).parents[1] / "data" / "parity"
YAML = "model: {num_layers: 2, embed_dim: 16, mlp_dim: 32, num_heads: 2, num_kv_heads: 2, vocab_size: 40, rope_theta: 500000.0}"


def params_of(model, seed):
    return nnx.state(build_model(model, PrecisionConfig(), jax.random.key(seed)))


def bits(tree):
    return {
        jax.tree_util.keystr(path): np.asarray(x).tobytes()
        for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with checkpoints at steps 1 and 2."""
    folder = tmp_path_factory.mktemp("runs") / "other"
    checkpoints = Checkpoints(folder / "checkpoints", CheckpointConfig(asynchronous=False))
    for step in (1, 2):
        params = params_of(MODEL, step)
        checkpoints.save(
            step,
            {"params": params, "opt_state": jax.tree.map(lambda x: x * 2, params)},
            {"config": YAML},
        )
    checkpoints.close()
    return folder


ADAPTED = dataclasses.replace(MODEL, lora=LoraConfig(rank=2, targets=("mlp",)))


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A run with adapters, and its model."""
    folder = tmp_path_factory.mktemp("runs") / "adapted"
    model = build_model(ADAPTED, PrecisionConfig(), jax.random.key(3))
    _, adapters = split_adapters(nnx.state(model))
    nnx.update(model, jax.tree.map(lambda array: array + 0.1, adapters))
    checkpoints = Checkpoints(folder / "checkpoints", CheckpointConfig(asynchronous=False))
    record = {"config": to_yaml(RunConfig(model=ADAPTED))}
    checkpoints.save(1, {"params": nnx.state(model)}, record)
    checkpoints.close()
    return folder, model


def start(source, model=MODEL, partial=(), fsdp=1, init_adapters=None):
    """Return the parameters, and the report."""
    told, mesh = [], make_mesh(MeshConfig(data=1, fsdp=fsdp), jax.devices()[:fsdp])
    with jax.set_mesh(mesh):
        abstract = abstract_model(model, PrecisionConfig(), mesh)[1]

        def fresh() -> Any:
            return jax.tree.map(
                lambda x, like: jax.device_put(x, like.sharding), params_of(model, 99), abstract
            )

        config = CheckpointConfig(
            init_from=str(source), init_adapters=init_adapters, init_partial=tuple(partial)
        )

        def fresh_adapters() -> Any:
            return split_adapters(fresh())[1]

        adapters = fresh_adapters if model.lora.rank is not None else None
        params = starting_variables(abstract, config, model, fresh, told.append, adapters)
        return params, "\n".join(told)


@pytest.mark.long
@pytest.mark.parametrize("fsdp", [1, 4])
def test_the_weights_of_a_run_its_folder_or_a_step_on_any_mesh(run, fsdp):
    checkpoints = run / "checkpoints"
    named = {run: 2, checkpoints: 2, checkpoints / "00000001": 1, checkpoints / "1": 1}
    for source, step in named.items():
        params, told = start(source, fsdp=fsdp)
        assert bits(params) == bits(params_of(MODEL, step))
        assert (
            f"0000000{step}: {len(bits(params))} of {len(bits(params))} parameters loaded" in told
            and "missing" not in told
        )


@pytest.mark.long
@pytest.mark.every_dose
@pytest.mark.parametrize("fsdp", [1, 4])
def test_a_model_without_adapters_begins_with_weights_that_have_taken_them_in(adapted, fsdp):
    folder, model = adapted
    params, told = start(folder, fsdp=fsdp)
    expected = nnx.state(merged(model))
    plain = nnx.state(model)["layers"]["0"]["mlp"]["up"]["kernel"][...]
    assert not np.array_equal(params["layers"]["0"]["mlp"]["up"]["kernel"][...], plain)
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    kernel = params["layers"]["0"]["mlp"]["up"]["kernel"][...]
    assert len(kernel.sharding.device_set) == fsdp
    assert "(model.lora.rank=2) are taken into the weights" in told


def test_settings_of_other_adapters_are_refused_before_weights_are_read(tmp_path):
    with pytest.raises(
        DataError, match=r"has no adapter_config\.json\. Name a directory that PEFT"
    ):
        start(tmp_path / "not there either", ADAPTED, init_adapters=str(tmp_path))
    there = {"peft_type": "LORA", "r": 16, "lora_alpha": 16.0}
    (tmp_path / "adapter_config.json").write_text(json.dumps(there))
    with pytest.raises(ConfigError, match=r"which has r=16\. Set model\.lora\.rank=16\."):
        start(tmp_path / "not there either", ADAPTED, init_adapters=str(tmp_path))


@pytest.mark.long
@pytest.mark.every_dose
@pytest.mark.parametrize(
    ("lora", "options", "message"),
    [
        ({"rank": 4}, {}, r"Set model\.lora\.rank=2 to go on with them\. For new adapters, set"),
        ({"alpha": 8.0}, {}, r"model\.lora\.alpha=8\.0 must be 16\.0, as of the adapters in"),
        ({}, {"init_adapters": "peft"}, r"init_adapters=peft would replace the adapters of"),
        ({"rank": None}, {"partial": ["head"]}, r"Set model\.lora\.rank=2, or begin with a run"),
    ],
)
def test_adapters_that_do_not_fit_those_of_the_run_are_refused(adapted, lora, options, message):
    model = dataclasses.replace(ADAPTED, lora=dataclasses.replace(ADAPTED.lora, **lora))
    with pytest.raises(ConfigError, match=message):
        start(adapted[0], model, **options)


@pytest.mark.long
def test_a_base_that_is_quantised_is_told_as_what_it_will_be(run):
    lora = LoraConfig(rank=2, targets=("mlp.up",), base="nf4", base_block=4)
    _, told = start(run, dataclasses.replace(MODEL, lora=lora))
    lines = [" ".join(line.split()) for line in told.splitlines()]
    assert "layers.0.mlp.up.kernel float32[2, 16, 32] nf4[2, 16, 32] loaded" in lines
    assert "layers.0.mlp.gate.kernel float32[2, 16, 32] float32[2, 16, 32] loaded" in lines
    model = dataclasses.replace(read_config(PARITY / "llama3"), lora=lora)
    _, told = start(PARITY / "llama3", model)
    (line,) = [line for line in told.splitlines() if "layers.0.mlp.up.kernel" in line]
    assert re.search(r"up_proj\.weight F32\[.* nf4\[\d+, \d+, \d+\] +loaded", line)


def test_what_differs_is_refused_with_a_table(run):
    other = dataclasses.replace(MODEL, vocab_size=48)
    with pytest.raises(ConfigError, match=r"Set model\.vocab_size=40\."):
        start(run, other)
    with pytest.raises(
        ConfigError, match=r"name what may differ in checkpoint\.init_partial"
    ) as caught:
        start(run, other, ["head"])
    lines = [" ".join(line.split()) for line in str(caught.value).splitlines()]
    assert (
        "embedding float32[40, 16] float32[48, 16] DIFFERS" in lines
        and "head.kernel float32[16, 40] float32[16, 48] new" in lines
    )
    with pytest.raises(ConfigError, match=r"model\.rope_theta=10000\.0 must be 500000\.0"):
        start(run, dataclasses.replace(MODEL, rope_theta=1e4), ["."])


@pytest.mark.long
def test_named_parts_may_differ_and_are_new(run):
    other = dataclasses.replace(MODEL, vocab_size=48)
    params, told = start(run, other, ["^embed", "head"])
    found, ours, new = bits(params), bits(params_of(MODEL, 2)), bits(params_of(other, 99))
    differ = {name for name in found if found[name] != ours[name]}
    assert (
        differ == {name for name in found if "embed" in name or "head" in name} and len(differ) == 2
    )
    assert all(found[name] == new[name] for name in differ)
    assert told.count(" new") == 2 and f"{len(found) - 2} of {len(found)} parameters loaded" in told
    tied = dataclasses.replace(MODEL, tie_embeddings=True)
    with pytest.raises(ConfigError, match=r"head\.kernel +float32\[16, 40\] +missing +DIFFERS"):
        start(run, tied, ["nothing"])
    params, told = start(run, tied, ["head"])
    assert "not used" in told and "embed" in " ".join(bits(params)) and " new" not in told


def test_a_damaged_or_empty_source_is_an_error_and_is_left_as_it_is(run, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(StorageError, match="Wait for its first checkpoint, or name another run"):
        start(tmp_path)
    file = next((run / "checkpoints" / "00000001" / "arrays" / "params.embedding").glob("0*"))
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(StorageError, match=r"checkpoint\.init_from=.*is damaged") as caught:
        start(run / "checkpoints" / "00000001")
    assert type(caught.value) is StorageError and file.exists()
    with pytest.raises(ConfigError, match=r"Set checkpoint\.init_partial=\[\]"):
        start(tmp_path / "hf", partial=["x"])


def test_a_step_that_is_not_there_is_named_with_those_that_are(run, tmp_path):
    for step in ("00000007", "7", "00000000"):
        place = run / "checkpoints" / step
        for check in (start, lambda place: require_weights(CheckpointConfig(init_from=str(place)))):
            with pytest.raises(ConfigError) as caught:
                check(place)
            said = str(caught.value)
            assert f"checkpoint.init_from={place}" in said
            assert all(str(run / "checkpoints" / f"0000000{step}") in said for step in (1, 2))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere", "is not there"),
        ("run@2", r"run/checkpoints/00000002\."),
        ("empty", "has neither checkpoints nor config.json"),
        ("nowhere/checkpoints/00000002", "is not there"),
    ],
)
def test_a_name_that_is_no_model_is_an_error_before_anything_is_read(tmp_path, name, said):
    (tmp_path / "empty").mkdir()
    config = CheckpointConfig(init_from=str(tmp_path / name))
    with pytest.raises(ConfigError, match=said):
        require_weights(config)


def test_a_run_may_have_a_number_as_its_name(run, tmp_path):
    place = tmp_path / "2024"
    shutil.copytree(run / "checkpoints", place / "checkpoints")
    require_weights(CheckpointConfig(init_from=str(place)))
    require_weights(CheckpointConfig(init_from=str(place / "checkpoints" / "2")))
    with pytest.raises(ConfigError, match="Complete steps"):
        require_weights(CheckpointConfig(init_from=str(place / "checkpoints" / "7")))
    for name in ("2025", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(YAML)
        with pytest.raises(StorageError, match="without a complete checkpoint"):
            require_weights(CheckpointConfig(init_from=str(tmp_path / name)))


@pytest.mark.parametrize("name", ["model", "2024"])
@pytest.mark.parametrize("beside", ["config.yaml", "checkpoints"])
def test_a_hugging_face_directory_may_have_files_that_runs_have(tmp_path, name, beside):
    place = tmp_path / name
    place.mkdir()
    (place / "config.json").write_text("{}")
    if beside == "checkpoints":
        (place / beside).mkdir()
    else:
        (place / beside).write_text("optimizer: adamw")
    config = CheckpointConfig(init_from=str(place))
    require_weights(config)
    (place / "config.json").unlink()
    with pytest.raises(StorageError, match="without a complete checkpoint"):
        require_weights(config)


def test_all_processes_start_from_the_same_step(run, monkeypatch):
    monkeypatch.setattr("maxtrain.weights.start.gather", lambda mine: [mine, {"step": "00000001"}])
    with pytest.raises(
        ConfigError,
        match=r"processes of this job find 00000001, 00000002 there\. Name one step of it",
    ):
        start(run)


def saved_with(model):
    return RunState(step=4, config=to_yaml(RunConfig(model=model)))


EXPERTS = dataclasses.replace(MODEL, family="mixtral", lora=LoraConfig(rank=2))


@pytest.mark.parametrize(
    "changes",
    [
        {"attention": "eager"},
        {"remat": "full"},
        {"scan_layers": False},
        {"loss_chunk": 0},
        {"max_length": 64},
        {"head_dim": 8},
        {"vocab_size": None},
        {"routing": RoutingConfig(kernel="ragged", balance=0.5)},
        # Shapes of arrays determine these.
        {"mlp_dim": 48},
        {"num_layers": 3},
    ],
)
def test_what_a_run_may_choose_is_no_other_meaning(changes):
    other = dataclasses.replace(EXPERTS, **changes)
    assert changed_meaning(other, saved_with(EXPERTS).config) == {}
    assert changed_meaning(EXPERTS, saved_with(other).config) == {}
    require_same_meaning(other, saved_with(EXPERTS))


def test_a_run_that_would_mean_something_else_by_its_weights_is_refused():
    lora = LoraConfig(rank=2, alpha=64.0, scaling="root")
    moe = dataclasses.replace(EXPERTS.moe, experts_per_token=1)
    other = dataclasses.replace(EXPERTS, norm_eps=1e-6, lora=lora, moe=moe)
    with pytest.raises(ConfigError) as error:
        require_same_meaning(other, saved_with(EXPERTS))
    told = str(error.value)
    assert "model.norm_eps=1e-06 must be 1e-05, as until step 4 of this run" in told
    for advice in ("norm_eps=1e-05", "lora.alpha=16.0", "lora.scaling=rank"):
        assert f"Set model.{advice}, or set run_name to a new name to start afresh." in told
    assert "Set model.moe.experts_per_token=2" in told


@pytest.mark.parametrize("saved", ["", "[1", "model: 3", YAML])
def test_what_an_older_config_does_not_say_is_no_difference(saved):
    assert changed_meaning(MODEL, saved) == {}
    require_same_meaning(MODEL, RunState(step=4, config=saved))
    require_same_meaning(MODEL, None)


def test_a_name_of_the_hub_gets_the_command_that_downloads_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"hf download Nobody/No-Model --local-dir"):
        start("Nobody/No-Model")
