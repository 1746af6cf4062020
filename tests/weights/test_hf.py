"""Weights of Hugging Face directories against what transformers computes with them, and what is
refused."""

import contextlib
import dataclasses
import json
import math
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from benchmarks.families import passed, reference_batch
from data_pipeline.base.errors import ConfigError, DataError, UsageError
from maxtrain.config.schema import MeshConfig, PrecisionConfig, RopeConfig
from maxtrain.inference.complete import generate
from maxtrain.models.families import FAMILIES, llama
from maxtrain.models.families.directory import read_config
from maxtrain.models.specs import RopeSpec
from maxtrain.parallel.mesh import make_mesh
from maxtrain.train_step.state import abstract_model
from maxtrain.weights.hf import differing_keys, load_pretrained, load_weights, tensor_files
from maxtrain.weights.tensor_file import open_tensors
from tests.support.shared import PARITY_CASES, in_time

PARITY = Path(__file__).parents[1] / "data" / "parity"
FORMS = [(True, "xla"), (False, "xla"), (True, "eager"), (False, "eager")]
# One dense, one with windows.
QUICK = ("llama3", "gemma3")


def cases_and_forms():
    """Every case in two forms; where time is short, those of QUICK in one of them."""
    for case in PARITY_CASES:
        for form in FORMS[1:3]:
            marks = ()
            if form != FORMS[1] or case not in QUICK:
                marks = (pytest.mark.long,)
            yield pytest.param(case, *form, marks=marks)


def leaves_by_name(params):
    flat, _ = jax.tree_util.tree_flatten_with_path(params)
    return {
        jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value"): leaf
        for path, leaf in flat
    }


@pytest.mark.long
@pytest.mark.every_dose
@pytest.mark.parametrize(("case", "scan", "kernel"), list(cases_and_forms()))
def test_logits_loss_and_gradients_are_those_of_transformers(case, scan, kernel):
    model, _ = load_pretrained(PARITY / case, scan_layers=scan, attention=kernel)
    reference = np.load(PARITY / case / "reference.npz")
    found = passed(model, reference_batch(reference["tokens"]))
    assert found.logits.dtype == np.float32
    np.testing.assert_allclose(found.logits, reference["logits"], rtol=0, atol=2e-5)
    np.testing.assert_allclose(found.loss, reference["loss"], rtol=1e-5)
    np.testing.assert_allclose(found.norm(), reference["grad_norm"], rtol=1e-5)
    theirs = {
        name.removeprefix("grad/"): reference[name]
        for name in reference.files
        if name.startswith("grad/")
    }
    assert len(theirs) == 2
    for name, grad in theirs.items():
        atol = 1e-5 * np.abs(grad).max()
        np.testing.assert_allclose(found.gradients[name], grad, rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize("case", in_time(PARITY_CASES))
@pytest.mark.parametrize(("scan", "kernel"), FORMS[:1] + FORMS[3:])
def test_greedy_text_with_the_cache_is_that_of_transformers(case, scan, kernel):
    model, _ = load_pretrained(PARITY / case, scan_layers=scan, attention=kernel)
    reference = np.load(PARITY / case / "reference.npz")
    prompts, expected = (
        reference["tokens"].tolist(),
        reference["greedy"][:, reference["tokens"].shape[1] :],
    )
    np.testing.assert_array_equal(
        generate(model, prompts, max_tokens=expected.shape[1], temperature=0.0), expected
    )


@pytest.mark.long
@pytest.mark.parametrize(
    "axes", [{"fsdp": 4, "tensor": 2}, {"data": 4, "fsdp": 1, "tensor": 2}, {"fsdp": 8}]
)
def test_weights_split_over_a_mesh_are_the_same_bits(axes):
    mesh = make_mesh(MeshConfig(**axes))
    for case in ("llama3", "qwen2", "gemma3"):
        sharded, _ = load_pretrained(PARITY / case, mesh=mesh)
        whole, _ = load_pretrained(PARITY / case)
        expected = leaves_by_name(nnx.state(whole))
        for name, leaf in leaves_by_name(nnx.state(sharded)).items():
            assert leaf.sharding.mesh == mesh
            np.testing.assert_array_equal(
                np.asarray(leaf), np.asarray(expected[name]), err_msg=name
            )
        assert any(
            not leaf.sharding.is_fully_replicated
            for leaf in leaves_by_name(nnx.state(sharded)).values()
        )


def test_only_the_part_that_a_device_holds_is_read(monkeypatch):
    biggest = 0

    def counting(shape, sharding, callback):
        def read(index):
            nonlocal biggest
            part = callback(index)
            biggest = max(biggest, part.nbytes)
            return part

        return make(shape, sharding, read)

    make = jax.make_array_from_callback
    monkeypatch.setattr(jax, "make_array_from_callback", counting)
    model, _ = load_pretrained(PARITY / "llama3", mesh=make_mesh(MeshConfig(fsdp=4, tensor=2)))
    assert biggest == max(leaf.nbytes // 8 for leaf in jax.tree.leaves(nnx.state(model)))


@pytest.fixture
def copy(tmp_path):
    """A copy of llama3 that a test may break: (directory, config, tensors, save)."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(PARITY / "llama3" / name, tmp_path / name)
    return tmp_path


def change_config(directory, **changes):
    path = directory / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in values.items() if v != "absent"}))


def change_tensors(directory, **changes):
    tensors = load_file(directory / "model.safetensors") | changes
    save_file({k: v for k, v in tensors.items() if v is not None}, directory / "model.safetensors")


@pytest.mark.every_dose
@pytest.mark.long
def test_shards_with_an_index_are_read_as_one(copy):
    tensors = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    parts = {"a.safetensors": sorted(tensors)[::2], "b.safetensors": sorted(tensors)[1::2]}
    for file, names in parts.items():
        save_file({name: tensors[name] for name in names}, copy / file)
    index = {"weight_map": {name: file for file, names in parts.items() for name in names}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    expected = jax.tree.leaves(nnx.state(load_pretrained(PARITY / "llama3")[0]))
    for leaf, other in zip(
        jax.tree.leaves(nnx.state(load_pretrained(copy)[0])), expected, strict=True
    ):
        np.testing.assert_array_equal(leaf, other)
    (copy / "b.safetensors").unlink()
    with pytest.raises(DataError, match=r"b\.safetensors: is missing. Get the file again"):
        load_pretrained(copy)


def write_shards(folder, shards, weight_map):
    """Turns model.safetensors into shards with an index."""
    (folder / "model.safetensors").unlink()
    for name, tensors in shards.items():
        save_file(tensors, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("stale", ["a.safetensors", "b.safetensors"])
def test_each_tensor_is_read_from_the_shard_that_the_index_names(stale, copy):
    tensors = load_file(copy / "model.safetensors")
    one = "model.layers.1.mlp.down_proj.weight"
    shards = {"a.safetensors": dict(tensors), "b.safetensors": dict(tensors)}
    (named,) = shards.keys() - {stale}
    shards[stale][one] = tensors[one] + 1
    shards[stale]["left_over"] = tensors[one]
    weight_map = dict.fromkeys(tensors, "a.safetensors") | {one: named}
    weight_map["model.norm.weight"] = "b.safetensors"
    write_shards(copy, shards, weight_map)
    notes = []
    found, _ = load_pretrained(copy, note=notes.append)
    expected, _ = load_pretrained(PARITY / "llama3")
    for ours, theirs in zip(
        jax.tree.leaves(nnx.state(found)), jax.tree.leaves(nnx.state(expected)), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
    assert len(notes) == 1 and "left_over" in notes[0]


@pytest.mark.parametrize(
    ("kept", "named"),
    [
        # In the index, and in no shard.
        ("left out", True),
        # In a shard, and not in the index.
        ("there", False),
        # In another shard than the index says.
        ("elsewhere", True),
    ],
)
def test_an_index_that_does_not_fit_its_shards_is_refused(kept, named, copy):
    tensors = load_file(copy / "model.safetensors")
    one = "model.layers.2.input_layernorm.weight"
    first = {name: tensor for name, tensor in tensors.items() if name != one}
    second = {"model.norm.weight": first.pop("model.norm.weight")}
    if kept == "there":
        first[one] = tensors[one]
    elif kept == "elsewhere":
        second[one] = tensors[one]
    weight_map = dict.fromkeys(tensors, "a.safetensors")
    weight_map["model.norm.weight"] = "b.safetensors"
    if not named:
        del weight_map[one]
    write_shards(copy, {"a.safetensors": first, "b.safetensors": second}, weight_map)
    with pytest.raises(DataError, match=one):
        load_pretrained(copy)


# The name of the embedding, and of the head.
HEADS = {
    "gpt2": ("transformer.wte.weight", "lm_head.weight"),
    "gemma2": ("model.embed_tokens.weight", "lm_head.weight"),
    "gemma3": ("model.embed_tokens.weight", "lm_head.weight"),
    "llama_tied_mha": ("model.embed_tokens.weight", "lm_head.weight"),
}


def with_head(case, folder, head):
    """A copy of a model whose head is its embedding, with a head that is made from that."""
    shutil.copy(PARITY / case / "config.json", folder)
    tensors = load_file(PARITY / case / "model.safetensors")
    embedding, name = HEADS[case]
    tensors[name] = head(tensors[embedding])
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("case", HEADS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_head_that_is_not_the_embedding_that_it_is_tied_to_is_refused(case, dtype, tmp_path):
    def other(embedding):
        head = embedding.astype(dtype).copy()
        # One number in the last row.
        head[-1, -1] += 1
        return head

    with pytest.raises(DataError, match=r'Set "tie_word_embeddings": false in config.json'):
        load_pretrained(with_head(case, tmp_path, other))


def test_a_head_of_another_shape_than_the_embedding_is_refused(tmp_path):
    with pytest.raises(DataError, match="tie_word_embeddings"):
        load_pretrained(with_head("gemma2", tmp_path, lambda embedding: embedding[:-1].copy()))


def test_a_head_that_is_a_copy_of_the_embedding_is_no_other_model(tmp_path):
    found, config = load_pretrained(with_head("llama_tied_mha", tmp_path, np.copy))
    assert config.tie_embeddings
    assert "head" not in nnx.state(found)


def test_an_untied_model_without_a_head_is_refused(copy):
    tensors = load_file(copy / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(DataError, match=r"lm_head\.weight  missing"):
        load_pretrained(copy)


def test_a_whole_file_counts_and_not_an_index_beside_it(copy):
    """This is the rule of transformers: the index may be left from deleted shards, or have other
    weights."""
    for tensors in ({"old": "a.safetensors"}, {}, None):
        (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": tensors}))
        assert tensor_files(copy) == [copy / "model.safetensors"]


@pytest.mark.parametrize(
    "named",
    [
        None,
        [],
        "a.safetensors",
        {"x": 3},
        {"x": None},
        {"x": ["a.safetensors"]},
        {"x": "a.bin"},
        {"x": "../a.safetensors"},
        {"x": "../../etc/passwd"},
        {"x": "/etc/a.safetensors"},
        {"x": "a\\b.safetensors"},
        {"x": "a\0.safetensors"},
        {"x": "C:a.safetensors"},
        {"x": "a" * 250 + ".safetensors"},
        {"x": ""},
    ],
)
def test_a_damaged_index_is_refused(named, tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": named}))
    with pytest.raises(DataError, match=r"index.json: weight_map must give .* Get the file again"):
        tensor_files(tmp_path)
    index.write_text("{}")
    with pytest.raises(DataError, match="weight_map must give each tensor"):
        tensor_files(tmp_path)


def test_a_snapshot_of_links_as_in_the_cache_of_hugging_face_is_read(tmp_path):
    snapshot = tmp_path / "snapshots" / "1"
    for folder in (snapshot, tmp_path / "blobs"):
        folder.mkdir(parents=True)
    name = "model-00001-of-00001.safetensors"
    save_file({"x": np.ones(2, np.float32)}, tmp_path / "blobs" / "a")
    (tmp_path / "blobs" / "b").write_text(json.dumps({"weight_map": {"x": name}}))
    (snapshot / name).symlink_to("../../blobs/a")
    (snapshot / "model.safetensors.index.json").symlink_to("../../blobs/b")
    (path,) = tensor_files(snapshot)
    with contextlib.ExitStack() as held:
        assert list(open_tensors(path, held)) == ["x"]


@pytest.mark.every_dose
@pytest.mark.long
@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16])
def test_values_are_rounded_to_the_dtype_asked_for(copy, stored):
    tensors = {
        name: value.astype(stored) for name, value in load_file(copy / "model.safetensors").items()
    }
    save_file(tensors, copy / "model.safetensors")
    model, _ = load_pretrained(copy)
    np.testing.assert_array_equal(
        model.embedding[...], tensors["model.embed_tokens.weight"].astype(np.float32)
    )
    model, _ = load_pretrained(copy, dtype="bfloat16")
    assert model.embedding[...].dtype == jnp.bfloat16 and model.precision.compute == "bfloat16"
    np.testing.assert_array_equal(
        model.embedding[...], tensors["model.embed_tokens.weight"].astype(ml_dtypes.bfloat16)
    )


def test_configurations_of_transformers_4_read_the_same(copy):
    expected = read_config(copy)
    rope = json.loads((copy / "config.json").read_text())["rope_parameters"]
    theta = rope.pop("rope_theta")
    change_config(copy, rope_parameters="absent", rope_scaling=rope, rope_theta=theta)
    assert (
        read_config(copy) == expected
        and expected.rope_scaling == "llama3"
        and expected.rope_original_length == 32
    )
    change_config(
        copy,
        rope_scaling=None,
        head_dim="absent",
        num_key_value_heads="absent",
        tie_word_embeddings="absent",
    )
    older = read_config(copy)
    assert (older.rope_scaling, older.rope_theta) == ("none", theta)
    assert (older.head_dim, older.num_kv_heads, older.tie_embeddings) == (8, 6, False)


@pytest.mark.every_dose
@pytest.mark.long
def test_frequencies_and_the_copy_of_a_tied_head_are_passed_over(tmp_path):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(PARITY / "llama_tied_mha" / name, tmp_path / name)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32),
        "lm_head.weight": embedding,
    }
    change_tensors(tmp_path, **extra)
    _, config = load_pretrained(tmp_path)
    assert config.tie_embeddings
    told = []
    _, params = abstract_model(config, PrecisionConfig(), make_mesh(MeshConfig(fsdp=8)))
    load_weights(params, tmp_path, config, told.append)
    lines = [" ".join(line.split()) for line in told[0].splitlines()]
    assert lines[0].endswith(": 11 of 11 parameters loaded, from 29 tensors")
    assert "embedding model.embed_tokens.weight F32[160, 48] float32[160, 48] loaded" in lines
    assert (
        "layers.0.attention.q.kernel 3 x model.layers.N.self_attn.q_proj.weight F32[48, 48] float32[3, 48, 6, 8] loaded"
        in lines
    )
    assert "lm_head.weight [160, 48] - not used" in lines


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1, 1, 1.5, 2],
    "long_factor": [1, 2, 4, 8],
}
REFUSED_CONFIGS = [
    ({"architectures": ["MambaForCausalLM"]}, "one of: LlamaForCausalLM, MistralForCausalLM, "),
    ({"architectures": "absent"}, "architectures=null is not known here"),
    (
        {"rope_parameters": {"rope_type": "proportional", "factor": 4.0}},
        "'proportional'.*only one set for all layers, of type 'default', 'linear', 'dynamic', "
        "'llama3', 'yarn' or 'longrope'",
    ),
    (
        {"rope_parameters": "absent", "rope_scaling": {"type": "su", "factor": 2.0}},
        "'su'.*Choose a model",
    ),
    (
        {"rope_parameters": "absent", "rope_scaling": {"type": "linear"}},
        "factor=null must be a number above 0",
    ),
    (
        {"rope_parameters": {"rope_type": "dynamic", "factor": 0.5}},
        "factor=0.5 must be a number of at least 1. Get the file again",
    ),
    (
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
        "factor=null must be a number above 0",
    ),
    (
        {"rope_parameters": {**YARN, "beta_fast": 1}},
        "beta_fast=1.0 must be more than beta_slow=1.0. Get the file again",
    ),
    (
        {"rope_parameters": {**YARN, "truncate": None}},
        "truncate=null must be true or false. Get the file again",
    ),
    (
        {"rope_parameters": {**YARN, "attention_factor": "1"}},
        "attention_factor=1 must be a number above 0",
    ),
    (
        {"rope_parameters": {**YARN, "rope_theta": 1}},
        "rope_theta=1.0 must be more than 1 with rope_type 'yarn'",
    ),
    (
        {"rope_parameters": {**LONGROPE, "long_factor": [1, 2, 4]}},
        r"long_factor=\[1, 2, 4\] must be a list of 4 numbers, one for each pair of a head",
    ),
    (
        {"rope_parameters": {**LONGROPE, "short_factor": "absent"}},
        "short_factor=absent must be a list of 4 numbers",
    ),
    (
        {"rope_parameters": {**LONGROPE, "short_factor": [1, 2, 0, 4]}},
        r"short_factor\[2\]=0 must be a number above 0",
    ),
    (
        {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 1}},
        "original_max_position_embeddings=1 must be more than 1 with rope_type 'longrope'",
    ),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "only one set for all layers"),
    (
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}},
        "factor=null must be a number above 0",
    ),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported, only 1.0"),
    ({"sliding_window": 16}, "sliding_window=16 is not supported, only null"),
    (
        {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        "Choose a model with layer_types=",
    ),
    ({"attention_bias": True}, "attention_bias=True is not supported, only False"),
    ({"mlp_bias": True}, "Choose a model with mlp_bias=False"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported, only 'silu'"),
    ({"vocab_size": "absent"}, "vocab_size=null must be an integer above 0. Get the file again"),
    ({"hidden_size": 48.5}, "hidden_size=48.5 must be an integer above 0"),
    ({"num_key_value_heads": 4}, "num_key_value_heads=4 must divide num_attention_heads=6"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED_CONFIGS)
def test_what_the_decoder_cannot_do_is_refused(copy, changes, message):
    change_config(copy, **changes)
    with pytest.raises(DataError, match=message) as caught:
        load_pretrained(copy)
    assert str(copy / "config.json") in str(caught.value)


def test_a_window_that_qwen3_does_not_use_is_no_obstacle(tmp_path):
    shutil.copy(PARITY / "qwen3" / "config.json", tmp_path)
    change_config(tmp_path, sliding_window=4096)
    assert read_config(tmp_path).head_dim == 16
    assert read_config(tmp_path).window is None
    change_config(tmp_path, use_sliding_window=True)
    # All layers are of the kind full_attention.
    assert read_config(tmp_path).window is None


NORM, DOWN = "model.norm.weight", "model.layers.2.mlp.down_proj.weight"
REFUSED_TENSORS = [
    ({NORM: None}, r"model.norm.weight  missing: \[48\] expected"),
    (
        {"model.layers.3.mlp.up_proj.bias": np.ones(3, np.float32)},
        r"layers.3.mlp.up_proj.bias  extra: \[3\]",
    ),
    (
        {DOWN: np.ones((80, 48), np.float32)},
        r"down_proj.weight  wrong shape: \[80, 48\], \[48, 80\] expected",
    ),
    ({NORM: np.ones(48, np.int8)}, r"model.norm.weight  wrong dtype: I8, a float"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED_TENSORS)
def test_other_tensors_than_expected_are_listed(copy, changes, message):
    change_tensors(copy, **changes)
    with pytest.raises(DataError, match=message) as caught:
        load_pretrained(copy)
    assert "Get the file again" in str(caught.value)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (
            "config.json",
            None,
            r"config.json: can't be read \(No such file or directory\). Name a directory with config.json",
        ),
        ("config.json", b"{", "config.json: is not a JSON object .*Get the file again"),
        ("config.json", b"[]", "config.json: is not a JSON object"),
        (
            "model.safetensors",
            None,
            "model.safetensors: is missing. Get the file again .*save_pretrained",
        ),
        ("model.safetensors", b"\x10" * 200, "model.safetensors: can't be read"),
    ],
)
def test_files_that_are_missing_or_broken_are_named(copy, file, content, message):
    (copy / file).unlink()
    if content is not None:
        (copy / file).write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_pretrained(copy)


def test_an_unknown_dtype_is_refused(copy):
    with pytest.raises(UsageError, match="Use 'float32' or 'bfloat16'"):
        load_pretrained(copy, dtype="float16")


@pytest.mark.every_dose
@pytest.mark.long
def test_weights_of_another_model_than_the_run_asks_for_are_refused_key_by_key(copy):
    config = load_pretrained(copy)[1]
    asked = type(config)(
        **{**vars(config), "num_layers": 2, "rope_factor": 4.0, "head_dim": None, "max_length": 9}
    )
    _, params = abstract_model(
        asked, PrecisionConfig(), make_mesh(MeshConfig(fsdp=1), jax.devices()[:1])
    )
    with pytest.raises(ConfigError) as caught:
        load_weights(params, copy, asked)
    keys = [problem.partition(" ")[0] for problem in caught.value.problems]
    assert keys == [
        "model.num_layers=2",
        "model.rope_factor=4.0",
    ] and "Set model.num_layers=3." in str(caught.value)


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_weights_that_are_not_finite_are_refused(tmp_path, value):
    directory = shutil.copytree(PARITY / "llama3", tmp_path / "model")
    tensors = load_file(directory / "model.safetensors")
    tensors["model.embed_tokens.weight"][3, 2] = value  # of a token that need not occur
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        DataError, match=r"model\.embed_tokens\.weight holds NaN or infinity.*or use other weights"
    ):
        load_pretrained(directory)


ROPES = {
    "none": {},
    "linear": {"rope_factor": 4.0},
    "dynamic": {"rope_factor": 2.0, "rope_original_length": 256},
    "llama3": {"rope_factor": 8.0, "rope_original_length": 32},
    "yarn": {
        "rope_factor": 8.0,
        "rope_original_length": 32,
        "rope": RopeConfig(beta_fast=16.0, truncate=False, mscale=1.5, mscale_all_dim=0.5),
    },
    "yarn with a factor": {
        "rope_scaling": "yarn",
        "rope_factor": 3.0,
        "rope_original_length": 32,
        "rope": RopeConfig(attention_factor=1.25),
    },
    "longrope": {
        "rope_factor": 8.0,
        "rope_original_length": 32,
        "rope": RopeConfig(short_factors=(1.0, 1.0, 1.5, 2.0), long_factors=(1.0, 2.0, 4.0, 8.0)),
    },
}


@pytest.fixture
def unscaled(copy):
    """The model of the copy without a rope scaling."""
    theta = read_config(copy).rope_theta
    change_config(copy, rope_parameters={"rope_type": "default", "rope_theta": theta})
    return read_config(copy)


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("left", [(), ("rope_parameters",), ("rope_scaling", "rope_theta")])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_every_rope_scaling_is_read_as_it_is_written(name, left, family, copy, unscaled):
    """It is read from both spellings, and from each alone."""
    values = {"rope_scaling": name, **ROPES[name]}
    config = dataclasses.replace(unscaled, family=family, **values)
    written = FAMILIES[family].write(config)
    for key in left:
        del written[key]
    (copy / "config.json").write_text(json.dumps(written))
    assert read_config(copy) == config


def test_rope_keys_that_transformers_counts_otherwise_are_written_so_that_it_counts_the_same(
    unscaled,
):
    """dynamic grows beyond max_position_embeddings; older versions take the ratio of lengths for
    longrope's factor, unless the factor of attention is there."""
    config = dataclasses.replace(unscaled, rope_scaling="dynamic", rope_original_length=64)
    assert config.max_length == 256
    written = FAMILIES["llama"].write(config)
    assert written["max_position_embeddings"] == 64
    config = dataclasses.replace(unscaled, rope_scaling="longrope", **ROPES["longrope"])
    written = FAMILIES["llama"].write(config)
    assert written["original_max_position_embeddings"] == 32
    assert "attention_factor" not in written["rope_scaling"]
    written = FAMILIES["llama"].write(dataclasses.replace(config, max_length=512))
    expected = math.sqrt(1 + math.log(8) / math.log(32))
    assert written["rope_scaling"]["attention_factor"] == pytest.approx(expected)
    assert written["rope_parameters"]["attention_factor"] == pytest.approx(expected)


def test_longrope_is_read_as_phi_3_has_it(copy):
    """The original length at the top, no factor, and the older name of the type."""
    scaling = {key: LONGROPE[key] for key in ("short_factor", "long_factor")}
    change_config(
        copy,
        rope_parameters="absent",
        rope_scaling={"type": "longrope", **scaling},
        rope_theta=1e4,
        original_max_position_embeddings=64,
    )
    config = read_config(copy)
    assert (config.rope_scaling, config.rope_original_length) == ("longrope", 64)
    # 256 / 64.
    assert config.rope_factor == 4.0 and config.rope.attention_factor is None
    assert config.rope.short_factors == (1.0, 1.0, 1.5, 2.0)
    rope = llama.rope(config)
    assert rope.attention_factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(64)))
    # Another base and no scaling, for layers that have these.
    assert llama.rope(config, theta=100.0, scaling="none") == RopeSpec(8, 100.0)


def test_yarn_is_read_with_what_transformers_passes_over_left_out(copy):
    def read(**changes):
        change_config(copy, rope_parameters={**YARN, **changes})
        return read_config(copy)

    config = read()
    assert (config.rope_factor, config.rope_original_length) == (4.0, 256)
    assert config.rope == RopeConfig()
    assert llama.rope(config).attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    assert read(mscale=2.0).rope == RopeConfig()
    assert read(mscale=2.0, mscale_all_dim=1.0, attention_factor=1.5).rope == RopeConfig(
        attention_factor=1.5
    )
    both = llama.rope(read(mscale=2.0, mscale_all_dim=1.0)).attention_factor
    assert both == pytest.approx((0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1))
    # Without a factor, the ratio of the lengths.
    assert read(factor=None, original_max_position_embeddings=32).rope_factor == 8.0


def test_models_that_differ_in_what_their_rope_scaling_reads_are_told_apart(unscaled):
    asked = dataclasses.replace(unscaled, rope_scaling="longrope", **ROPES["longrope"])
    # As YAML has it.
    there = json.loads(json.dumps(dataclasses.asdict(asked)))
    assert differing_keys(asked, there) == {}
    there["rope"]["long_factors"][1] = 3.0
    # longrope does not read it.
    there["rope"]["beta_fast"] = 3.0
    assert differing_keys(asked, there) == {
        "rope.long_factors": ([1.0, 2.0, 4.0, 8.0], [1.0, 3.0, 4.0, 8.0])
    }
