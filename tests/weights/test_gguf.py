"""GGUF: what llama.cpp computes from our files is what we compute; what it would not is refused.

llama.cpp itself checks it (the package xllamacpp); the two controls show that it would notice.
"""

import dataclasses
import functools
import json
import random
import shutil
import unicodedata
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from data_pipeline.base.errors import DataError, StorageError, UsageError
from data_pipeline.chat.chat import CHATML
from data_pipeline.tokenizer import ByteTokenizer, JsonTokenizer, load_tokenizer, train_bpe
from maxtrain.commands.export import gguf as job
from maxtrain.commands.export.gguf import export_gguf
from maxtrain.commands.verify import logits
from maxtrain.config.schema import ModelConfig, PrecisionConfig, RopeConfig
from maxtrain.config.sections.moe import MoeConfig
from maxtrain.models import mlp
from maxtrain.models.families import FAMILIES
from maxtrain.models.hf_mapping import in_memory, tensors_in_order
from maxtrain.models.registry import build_model
from maxtrain.ops.digest import leaf_names
from maxtrain.weights.gguf import tensors as gguf_tensors
from maxtrain.weights.gguf.architecture import ARCHITECTURES, describe
from maxtrain.weights.gguf.file import QUANTS, plan_tensors, read_gguf, round_trip, write_gguf
from maxtrain.weights.gguf.tensors import gguf_table
from maxtrain.weights.gguf.tokenizer import UnsupportedTokenizerError, describe_tokenizer
from maxtrain.weights.hf_export import lazy_parameters
from tests.support.llama_cpp import LlamaCpp

PLAIN = ModelConfig(
    family="llama",
    vocab_size=320,
    num_layers=2,
    embed_dim=64,
    mlp_dim=96,
    num_heads=4,
    num_kv_heads=2,
    max_length=256,
    norm_eps=1e-5,
    attention="eager",
)
CASES = {
    "llama3": {"rope_scaling": "llama3", "rope_factor": 8.0, "rope_original_length": 32},
    "llama": {"head_dim": 32, "tie_embeddings": True},
    "linear": {"rope_scaling": "linear", "rope_factor": 2.0},
    "yarn": {"rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_length": 64},
    "mistral": {"family": "mistral", "window": 30},
    "mixtral": {"family": "mixtral", "moe": MoeConfig(4, 2)},
    "qwen2": {"family": "qwen2"},
    "qwen3": {"family": "qwen3", "head_dim": 32},
    "qwen3_yarn": {
        "family": "qwen3",
        "rope_scaling": "yarn",
        "rope_factor": 4.0,
        "rope_original_length": 64,
        "rope": RopeConfig(attention_factor=1.3),
    },
    "qwen3_moe": {"family": "qwen3_moe", "moe": MoeConfig(4, 2, expert_dim=32)},
    "gemma3": {
        "family": "gemma3",
        "num_layers": 7,
        "window": 8,
        "tie_embeddings": True,
        "logit_softcap": 5.0,
        "rope_theta": 1e6,
    },
}
QUICK = ("llama3",)
FEW = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.long, id=name) for name in CASES
]
TEXTS = [Path(job.__file__).read_text()]


def config_of(case):
    return dataclasses.replace(PLAIN, **CASES[case])


def build(config, params="float32"):
    """A model with no number that is 0 or 1."""
    model = build_model(config, PrecisionConfig(params=params, compute=params))
    graphdef, state = nnx.split(model)
    rng = np.random.default_rng(0)

    def moved(leaf):
        return leaf + jnp.asarray(rng.normal(0, 0.1, leaf.shape), leaf.dtype)

    return nnx.merge(graphdef, jax.tree.map(moved, state))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe(TEXTS, 300).save(folder)
    return folder


def write(model, place, out, quant="f32", **options):
    return export_gguf(model, load_tokenizer(place), str(place), out, quant, "small", **options)


def expected_of(model, ids):
    graphdef, state = nnx.split(model)
    found = logits(graphdef, state, np.array([ids], np.int32))
    return np.asarray(jax.nn.log_softmax(found))[0]


def largest_difference(path, expected, ids):
    """Return the largest difference between log-probabilities of llama.cpp and ours, after a few
    beginnings of a text."""
    theirs = LlamaCpp(path)
    found = []
    for length in (1, 5, 13, len(ids)):
        there = theirs.log_probabilities(ids[:length], PLAIN.vocab_size)
        found.append(np.abs(there - expected[length - 1]).max())
    return max(found)


def some_ids(count=24):
    return np.random.default_rng(1).integers(0, 300, count).tolist()


@pytest.fixture
def gelu_of_llama_cpp(monkeypatch):
    """llama.cpp looks GELU up in a table of float16, from float16."""

    def looked_up(numbers):
        exact = jax.nn.gelu(numbers.astype(jnp.float16).astype(jnp.float32), approximate=True)
        return exact.astype(jnp.float16).astype(numbers.dtype)

    monkeypatch.setitem(mlp._ACTIVATIONS, "gelu_tanh", looked_up)


@pytest.mark.long
@pytest.mark.parametrize("case", FEW)
@pytest.mark.usefixtures("gelu_of_llama_cpp")
def test_llama_cpp_computes_the_same(case, place, tmp_path):
    config = config_of(case)
    ids = some_ids()
    expected = expected_of(build(config), ids)
    written = write(build(config), place, tmp_path / "a.gguf")
    assert written.difference <= 1e-5 and written.size > 300_000
    difference = largest_difference(tmp_path / "a.gguf", expected, ids)
    if case == "gemma3":
        # A last bit more or less decides between neighbours in the table. In float16: see below.
        assert difference < 1e-3
        return
    assert difference < 1e-4
    write(build(config), place, tmp_path / "half.gguf", "f16")
    assert largest_difference(tmp_path / "half.gguf", expected, ids) < 2e-2


@pytest.mark.long
def test_the_comparison_would_notice_heads_in_another_order(place, tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_tensors, "TURNS_NEIGHBOURS", "none")
    ids = some_ids()
    expected = expected_of(build(PLAIN), ids)
    write(build(PLAIN), place, tmp_path / "a.gguf")
    assert largest_difference(tmp_path / "a.gguf", expected, ids) > 1e-2


@pytest.mark.long
def test_the_comparison_would_notice_frequencies_that_are_not_scaled(place, tmp_path, monkeypatch):
    config = config_of("llama3")
    ids = some_ids()
    expected = expected_of(build(config), ids)
    monkeypatch.setattr(job, "frequency_factors", lambda config: None)
    write(build(config), place, tmp_path / "a.gguf")
    assert largest_difference(tmp_path / "a.gguf", expected, ids) > 1e-2


@pytest.mark.long
@pytest.mark.every_dose
@pytest.mark.parametrize("case", FEW)
def test_parameters_come_back(case):
    """This covers families without a llama.cpp to check them."""
    config = config_of(case)
    _, state = nnx.split(build(config))
    ours = lazy_parameters(state)
    table = gguf_table(config)
    theirs = {
        name: in_memory(np.ascontiguousarray(tensor.whole()))
        for name, tensor in tensors_in_order(table, ours).items()
    }
    seen = set()
    for entry in table:
        shapes = [ours[name].shape for name in entry.params]
        for name, found in entry.inverse(theirs, shapes).items():
            np.testing.assert_allclose(found.whole(), ours[name].whole(), rtol=0, atol=1e-6)
            seen.add(name)
    assert seen == ours.keys()


# How far a number may be from what is stored for it: parts of the largest of those that share a
# scale with it, which is a float16 itself.
ERRORS = {
    "f32": 0,
    "f16": 2**-11,
    "bf16": 2**-8,
    "q8_0": 1 / 254,
    "q5_1": 2 / 62,
    "q5_0": 1 / 16,
    "q4_1": 2 / 30,
    "q4_0": 1 / 8,
}
BITS = {
    "f32": 32,
    "f16": 16,
    "bf16": 16,
    "q8_0": 8.5,
    "q5_1": 6,
    "q5_0": 5.5,
    "q4_1": 5,
    "q4_0": 4.5,
}


@pytest.mark.long
@pytest.mark.parametrize(
    "quant",
    [
        pytest.param(quant, marks=() if quant in ("f32", "q8_0") else pytest.mark.long)
        for quant in QUANTS
    ],
)
def test_each_way_to_store_numbers(quant, place, tmp_path, monkeypatch):
    stored = {}
    read_gguf = job.read_gguf
    monkeypatch.setattr(job, "read_gguf", lambda *a: stored.update(read_gguf(*a)) or stored)
    _, state = nnx.split(build(PLAIN))
    tensors = tensors_in_order(gguf_table(PLAIN), lazy_parameters(state))
    written = write(build(PLAIN), place, tmp_path / "a.gguf", quant)
    assert (written.difference == 0) == (quant == "f32")
    assert stored.keys() == tensors.keys()
    for name, tensor in tensors.items():
        exact = tensor.whole()
        found = stored[name].whole()
        if exact.ndim == 1:
            np.testing.assert_array_equal(found, exact)
            continue
        blocks = exact.reshape(-1, 32)
        errors = np.abs(found.reshape(-1, 32) - blocks)
        allowed = ERRORS[quant]
        if quant.startswith("q"):
            allowed += 2**-10
        allowed *= np.abs(blocks).max(axis=1, keepdims=True)
        assert (errors <= allowed).all(), name
        assert (errors > 0).any() == (quant != "f32")
    count = sum(leaf.size for leaf in jax.tree.leaves(state))
    assert written.size == pytest.approx(count * BITS[quant] / 8, abs=20_000)


@pytest.mark.parametrize("quant", ["f32", "f16", "bf16", "q8_0", "q4_1"])
def test_a_file_is_read_again_by_the_tensor(quant, tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    arrays = {
        "vector": rng.standard_normal(96).astype(np.float32),
        "matrix": rng.standard_normal((6, 64)).astype(np.float32),
        "experts": rng.standard_normal((3, 4, 32)).astype(np.float32),
    }
    tensors = {name: in_memory(array) for name, array in arrays.items()}
    sums = write_gguf(tmp_path / "a.gguf", "llama", [], plan_tensors(tensors, set(), quant))
    library = pytest.importorskip("gguf")
    made = []
    real = library.quants.dequantize

    def dequantize(data, kind):
        made.append(real(data, kind))
        return made[-1]

    monkeypatch.setattr(library.quants, "dequantize", dequantize)
    stored = read_gguf(tmp_path / "a.gguf", sums, [])
    assert made == []
    for name, array in arrays.items():
        whole = stored[name].whole()
        assert stored[name].shape == whole.shape == array.shape
        assert whole.dtype == np.float32
        np.testing.assert_allclose(whole, array, atol=0.5 if quant == "q4_1" else 0.05)
    made.clear()
    part = (range(1, 3), range(2, 4), range(5, 9))
    found = stored["experts"].read(part)
    np.testing.assert_array_equal(found, stored["experts"].whole()[1:3, 2:4, 5:9])
    assert made[0].shape == (2, 4, 32)
    vector = stored["vector"].read((range(3, 7),))
    np.testing.assert_array_equal(vector, stored["vector"].whole()[3:7])


# Rounding sends tokens to other experts here, which changes logits a lot in a file that is right.
@pytest.mark.long
@pytest.mark.parametrize("quant", ["bf16", "q8_0", "q4_0"])
def test_experts_that_are_rounded_are_written(quant, place, tmp_path):
    written = write(build(config_of("qwen3_moe")), place, tmp_path / "a.gguf", quant)
    assert 0 < written.error < job._MOST_ERROR[quant]
    assert any("experts" in note for note in written.notes)


@pytest.mark.long
@pytest.mark.every_dose
@pytest.mark.parametrize(
    ("case", "quant", "name"),
    [
        ("qwen3_moe", "q8_0", "blk.1.ffn_gate_inp.weight"),
        ("qwen3_moe", "bf16", "blk.0.ffn_up_exps.weight"),
        ("llama3", "f32", "token_embd.weight"),
    ],
)
def test_one_other_number_in_the_file_is_no_export(case, quant, name, place, tmp_path, monkeypatch):
    """It is noticed even if the checksums of the bytes are unchanged."""
    read_gguf = job.read_gguf

    def damaged(*arguments):
        stored = dict(read_gguf(*arguments))
        numbers = stored[name].whole().copy()
        numbers.flat[7] += 2**-6
        return stored | {name: in_memory(numbers)}

    monkeypatch.setattr(job, "read_gguf", damaged)
    with pytest.raises(StorageError, match="1 parameters"):
        write(build(config_of(case)), place, tmp_path / "a.gguf", quant)
    assert not (tmp_path / "a.gguf").exists()


@pytest.mark.long
@pytest.mark.parametrize("quant", ["f32", "q8_0"])
def test_a_file_with_a_flipped_bit_is_no_export(quant, place, tmp_path, monkeypatch):
    read_gguf = job.read_gguf

    def damage(path, sums, fields):
        content = bytearray(path.read_bytes())
        content[-1000] ^= 64
        path.write_bytes(content)
        return read_gguf(path, sums, fields)

    monkeypatch.setattr(job, "read_gguf", damage)
    with pytest.raises(StorageError):
        write(build(config_of("qwen3_moe")), place, tmp_path / "a.gguf", quant)
    assert not (tmp_path / "a.gguf").exists()


def test_numbers_that_rounding_destroys_are_no_export(tmp_path):
    compared = job._GgufRoundTrip([], True, {"a": 0.5}, 1.0, 2.0)
    with pytest.raises(StorageError):
        job._require_same(tmp_path / "a.gguf", compared, "q8_0")
    job._require_same(tmp_path / "a.gguf", compared._replace(errors={"a": 0.01}), "q8_0")
    with pytest.raises(StorageError):
        job._require_same(tmp_path / "a.gguf", compared._replace(has_same_logits=False), "q8_0")


@pytest.mark.parametrize("quant", QUANTS)
def test_numbers_of_any_form_are_within_the_error_that_is_allowed(quant):
    rng = np.random.default_rng(0)
    outlier = np.full((4, 64), 1.0, np.float32)
    outlier[:, ::32] = -16
    outlier[:, 5] = 15.9
    forms = [rng.normal(size=(8, 64)), rng.standard_cauchy((8, 64)), outlier, np.ones((2, 32))]
    for numbers in forms:
        numbers = numbers.astype(np.float32).clip(-6e4, 6e4)
        error = job._relative_error(round_trip("a", numbers, quant), numbers)
        assert error <= job._MOST_ERROR.get(quant, 0.0)


def test_chatml_and_named_templates_are_in_the_file(place, tmp_path):
    folder = shutil.copytree(place, tmp_path / "tokenizer")
    settings = {
        "eos_token": "<|endoftext|>",
        "chat_template": [
            {"name": "default", "template": "first"},
            {"name": "tool_use", "template": "with tools"},
        ],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(folder)
    for template, expected in (("chatml", CHATML), ("", "first")):
        fields, _ = job._tokenizer_fields(tokenizer, str(folder), template, PLAIN.vocab_size, None)
        said = {field.key: field.value for field in fields}
        assert said["tokenizer.chat_template"] == expected
        # Those by names belong to the tokenizer's own.
        of_names = ["tool_use"] if template == "" else None
        assert said.get("tokenizer.chat_templates") == of_names
        if of_names:
            assert said["tokenizer.chat_template.tool_use"] == "with tools"


@pytest.mark.long
def test_parameters_in_bfloat16_are_written_as_they_are(place, tmp_path):
    assert write(build(PLAIN, "bfloat16"), place, tmp_path / "a.gguf", "bf16").difference == 0


@pytest.mark.long
@pytest.mark.usefixtures("gelu_of_llama_cpp")
def test_llama_cpp_reads_numbers_of_gemma_3_as_we_do(place, tmp_path, monkeypatch):
    """It rounds activations too in products with rounded weights, so that it is near to what these
    weights give here, not equal. The weights as they were are much further away."""
    stored = {}

    def keep(model, table, plans, tensors):
        stored.update(tensors)
        return job._GgufRoundTrip([], True, {}, 0.0, 1.0)

    # In the place of the comparison, which takes the arrays of the model away.
    monkeypatch.setattr(job, "_compare", keep)
    config = config_of("gemma3")
    table = gguf_table(config)
    model = build(config)
    graphdef, state = nnx.split(model)
    leaves, structure = jax.tree.flatten(state)
    shapes = {name: leaf.shape for name, leaf in zip(leaf_names(state), leaves, strict=True)}
    ids = some_ids()
    exact = expected_of(model, ids)
    near = {"f16": 2e-2, "bf16": 0.1}
    for quant in QUANTS.keys() - {"f32"}:
        path = tmp_path / f"{quant}.gguf"
        write(model, place, path, quant)
        arrays = {}
        for entry in table:
            found = entry.inverse(stored, [shapes[name] for name in entry.params])
            arrays |= {name: jnp.asarray(tensor.whole()) for name, tensor in found.items()}
        rounded = jax.tree.unflatten(structure, [arrays[name] for name in shapes])
        expected = expected_of(nnx.merge(graphdef, rounded), ids)
        assert largest_difference(path, expected, ids) < near.get(quant, 0.3), quant
        if quant == "f16":
            assert largest_difference(path, exact, ids) < 2e-2
        if quant.startswith(("q4", "q5")):
            assert np.abs(expected - exact).max() > 1.0, quant


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": "gpt2", "num_kv_heads": 4}, "family gpt2 can't be written as GGUF here"),
        ({"rope_scaling": "dynamic"}, "has no model.rope_scaling=dynamic"),
        ({"family": "qwen3", "rope_scaling": "llama3"}, "qwen3 has no model.rope_scaling=llama3"),
        (
            {"rope_scaling": "yarn", "rope": RopeConfig(truncate=False)},
            "rounds the bounds of YaRN",
        ),
        (
            {"family": "qwen3_moe", "moe": MoeConfig(4, 2, normalize=False)},
            "add up to 1, this model does not",
        ),
        (CASES["gemma3"] | {"query_pre_attn_scalar": 9.0}, "multiplies scores by 0.25"),
        (CASES["gemma3"] | {"attention_softcap": 9.0}, "does not bound scores"),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(changes, message):
    config = dataclasses.replace(PLAIN, **changes)
    with pytest.raises(UsageError, match=message):
        describe(config)


def test_every_family_is_written_or_refused():
    for family in FAMILIES:
        known = family in ARCHITECTURES
        config = dataclasses.replace(PLAIN, family=family, num_kv_heads=4, moe=MoeConfig(4, 2))
        if known:
            assert describe(config).architecture == ARCHITECTURES[family]
        else:
            with pytest.raises(UsageError, match="Export with --format hf"):
                describe(config)


@pytest.mark.long
def test_the_context_ends_where_a_window_would_begin(place, tmp_path):
    written = write(build(config_of("mistral")), place, tmp_path / "a.gguf")
    assert "its context is 30 tokens" in written.notes[0]


@pytest.mark.long
@pytest.mark.every_dose
def test_a_number_that_is_too_large_names_its_tensor(place, tmp_path):
    for quant in ("f16", "q4_0"):
        model = build(PLAIN)
        model.embedding[...] = model.embedding[...].at[3, 1].set(7e4)
        with pytest.raises(
            DataError, match=rf"token_embd\.weight holds NaN or infinity as {quant}"
        ):
            write(model, place, tmp_path / "a.gguf", quant)
    model = build(PLAIN)
    model.embedding[...] = model.embedding[...].at[3, 1].set(np.nan)
    with pytest.raises(DataError, match="Take another checkpoint with --step"):
        write(model, place, tmp_path / "a.gguf")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
@pytest.mark.every_dose
def test_rows_must_have_whole_blocks(place, tmp_path):
    model = build(dataclasses.replace(PLAIN, mlp_dim=80))
    with pytest.raises(UsageError, match=r"rows of blk\.0\.ffn_down\.weight have 80"):
        write(model, place, tmp_path / "a.gguf", "q8_0")


@pytest.mark.every_dose
@pytest.mark.long
@pytest.mark.parametrize("where", [40, -100, -100_000])
def test_a_file_that_reads_back_otherwise_is_no_export(where, place, tmp_path, monkeypatch):
    write_gguf = job.write_gguf

    def damaging(path, *arguments):
        sums = write_gguf(path, *arguments)
        content = bytearray(path.read_bytes())
        content[where] ^= 4
        path.write_bytes(content)
        return sums

    monkeypatch.setattr(job, "write_gguf", damaging)
    with pytest.raises(StorageError, match=r"not what was written.*run the same command again"):
        write(build(PLAIN), place, tmp_path / "a.gguf")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_there_stays(place, tmp_path):
    (tmp_path / "a.gguf").write_text("mine")
    with pytest.raises(UsageError, match=r"exists\. Name a file that is not there yet"):
        write(build(PLAIN), place, tmp_path / "a.gguf")
    assert (tmp_path / "a.gguf").read_text() == "mine"


# Tokenizers.

AWKWARD = [
    "Hello world",
    "  two  spaces   and\ttabs\t\tand \n\n newlines\r\n\r\nand more \n ",
    "I've you're WE'LL don't 'S 'd it'S",
    "1 22 333 4444 55555 3.14159 1,000,000 ١٢٣ ½",
    "naïve café Straße İstanbul ÆØÅ",
    "我想在apple工作1314151天～ 日本語 한국어",
    "🚀 (normal) 😶‍🌫️ (several) ✅ 🦙🦙",
    "<|endoftext|> is only text, and so is </s>",
    "```def f(x):\n    return x ** 2  # !?...''\"\"```",
    "\u00a0\u200b\u2028no\u3000break\ufeff",
    "a" * 40 + " " * 17 + "!" * 9,
    "นี่คือภาษาไทย हिन्दी العربية",
    "",
    " ",
]


def byte_level(steps, ignore_merges=False):
    """A tokenizer with the merges of another, that finds words by `steps`."""
    # Letters that ASCII_CAPITALS keep apart are merged, so that it shows who keeps them apart.
    record = json.loads(train_bpe([*TEXTS, *AWKWARD * 3, " aØ" * 50], 700).content)
    record["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    record["model"]["ignore_merges"] = ignore_merges
    return record


LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
OTHERS = r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CLASSES = f"{UPPER}*{LOWER}+|{UPPER}+{LOWER}*|{OTHERS}"
SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = f"{UPPER}*{LOWER}+{SHORT}|{UPPER}+{LOWER}*{SHORT}|{OTHERS.replace('N}', 'N}{1,3}', 1)}"
DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def split(*patterns):
    step = {"type": "Split", "behavior": "Isolated", "invert": False}
    steps = [step | {"pattern": {"Regex": pattern}} for pattern in patterns]
    return [*steps, BYTES | {"use_regex": False}]


def sentencepiece(prefix=True):
    """Return a tokenizer in the form in which transformers writes Llama 2's: all pairs of each
    piece, in the order of the pieces."""
    record = json.loads(train_bpe(["".join(TEXTS).replace(" ", "\u2581")], 600).content)
    alphabet = dict(zip(pre_tokenizers.ByteLevel.alphabet(), range(256), strict=False))
    words = []
    for merge in record["model"]["merges"]:
        text = "".join(merge)
        if all(len(c.encode()) == 1 for c in text) and alphabet.keys() >= set(text):
            words.append(text.replace("_", "\u2581"))
    letters = sorted(set("".join(TEXTS).replace(" ", "\u2581") + "éü我"))
    words = [word for word in dict.fromkeys(words) if set(word) <= set(letters) and len(word) > 1]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *words, *letters]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    merges = []
    for word in words:
        for cut in range(1, len(word)):
            if word[:cut] in vocabulary and word[cut:] in vocabulary:
                merges.append((word[:cut], word[cut:]))
    made = {"".join(merge) for merge in merges}
    vocabulary = {
        piece: i for i, piece in enumerate(p for p in vocabulary if p in made or p not in words)
    }
    merges = [pair for pair in merges if vocabulary.keys() >= set(pair)]
    inner = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    steps = [normalizers.Replace(" ", "\u2581")]
    if prefix:
        steps.insert(0, normalizers.Prepend("\u2581"))
    inner.normalizer = normalizers.Sequence(steps)
    inner.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return json.loads(inner.to_str())


TOKENIZERS = {
    "gpt-2": functools.partial(byte_level, [BYTES]),
    "smollm": functools.partial(byte_level, [{"type": "Digits", "individual_digits": True}, BYTES]),
    "llama-bpe": functools.partial(byte_level, split(LLAMA3), ignore_merges=True),
    "dbrx": functools.partial(byte_level, split(LLAMA3)),
    "qwen2": functools.partial(byte_level, split(LLAMA3.replace("{1,3}", ""))),
    "tekken": functools.partial(byte_level, split(CLASSES), ignore_merges=True),
    "gpt-4o": functools.partial(byte_level, split(O200K)),
    "deepseek-v3": functools.partial(byte_level, split(*DEEPSEEK)),
    "default": sentencepiece,
    "no prefix": functools.partial(sentencepiece, prefix=False),
}


# These know capital letters of ASCII alone there, and no marks.
ASCII_CAPITALS = ("gpt-4o", "tekken")


def without_other_capitals(text):
    """A text without what these rules take otherwise."""
    kept = []
    for letter in text:
        kind = unicodedata.category(letter)
        if letter.isascii() or (kind not in ("Lu", "Lt") and not kind.startswith("M")):
            kept.append(letter)
    return "".join(kept)


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "default" else pytest.mark.long)
        for name in TOKENIZERS
    ],
)
def test_llama_cpp_finds_the_same_ids(name, tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZERS[name]()))
    tokenizer = load_tokenizer(tmp_path)
    config = dataclasses.replace(PLAIN, num_layers=1, vocab_size=tokenizer.vocab_size + 3)
    written = write(build(config), tmp_path, tmp_path / "a.gguf")
    fields, _ = describe_tokenizer(tokenizer, {}, config.vocab_size)
    said = {field.key: field.value for field in fields}
    assert said["tokenizer.ggml.pre"] == name.replace("no prefix", "default")
    theirs = LlamaCpp(tmp_path / "a.gguf")
    rng = random.Random(0)
    drawn = ["".join(rng.choices("".join(AWKWARD), k=30)) for _ in range(40)]
    texts = [*AWKWARD, *drawn]
    if name in ASCII_CAPITALS:
        assert theirs.tokenize(" aØ") != tokenizer.encode(" aØ").tolist(), "the note is too much"
        assert "capital letters of ASCII alone" in written.notes[0]
        texts = [without_other_capitals(text) for text in texts]
    for text in texts:
        assert theirs.tokenize(text) == tokenizer.encode(text).tolist(), repr(text)
    begin = said["tokenizer.ggml.bos_token_id"]
    assert theirs.tokenize("a b", begin=True) == [begin, *tokenizer.encode("a b").tolist()]


def described(record, **options):
    tokenizer = JsonTokenizer(json.dumps(record).encode(), "small")
    fields, notes = describe_tokenizer(tokenizer, {}, tokenizer.vocab_size, **options)
    return {field.key: field.value for field in fields}, notes


def test_a_rule_that_is_not_known_is_asked_for():
    record = byte_level(split(r"\p{L}+|\p{N}"))
    with pytest.raises(UnsupportedTokenizerError, match="--pre-tokenizer NAME"):
        described(record)
    said, _ = described(record, rule="gpt-4o")
    assert said["tokenizer.ggml.pre"] == "gpt-4o"


def test_whether_words_stay_whole_counts_only_if_it_shows():
    """A token that no merge makes is found by one of the two alone."""
    record = byte_level(split(LLAMA3.replace("{1,3}", "")), ignore_merges=True)
    assert described(record)[0]["tokenizer.ggml.pre"] == "qwen2"
    record["model"]["vocab"]["qqqq"] = len(record["model"]["vocab"])
    with pytest.raises(UnsupportedTokenizerError, match="rules that have no known name"):
        described(record)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"normalizer": {"type": "Lowercase"}}, "changes texts by Lowercase"),
        (
            {"pre_tokenizer": BYTES | {"add_prefix_space": True}},
            "rules that have no known name",
        ),
    ],
)
def test_tokenizers_that_llama_cpp_has_no_code_for(change, message):
    with pytest.raises(UnsupportedTokenizerError, match=message):
        described(byte_level([BYTES]) | change)


def test_pieces_that_are_not_merged_everywhere_are_refused():
    record = sentencepiece()
    del record["model"]["merges"][-1]
    with pytest.raises(UnsupportedTokenizerError, match=r"does not merge|llama\.cpp would"):
        described(record)


def test_other_kinds_of_tokenizers_are_refused():
    with pytest.raises(UnsupportedTokenizerError, match=r"is no tokenizer\.json"):
        describe_tokenizer(ByteTokenizer(), {}, 300)
    tokenizer = train_bpe(TEXTS, 300)
    with pytest.raises(UnsupportedTokenizerError, match="has 300 tokens, and the model 299"):
        describe_tokenizer(tokenizer, {}, 299)


def test_special_tokens_beyond_the_model_are_left_out():
    """An example is the image token of Gemma 3 of 1 billion parameters, which does not process
    images."""
    tokenizer = train_bpe(TEXTS, 300)
    record = json.loads(tokenizer.content)
    beyond = {**record["added_tokens"][0], "id": 300, "content": "<picture>"}
    record["added_tokens"].append(beyond)
    larger = JsonTokenizer(json.dumps(record).encode(), "small")
    assert larger.vocab_size == 301
    expected, _ = describe_tokenizer(tokenizer, {}, 300)
    found, _ = describe_tokenizer(larger, {}, 300)
    assert found == expected
    beyond["special"] = False
    larger = JsonTokenizer(json.dumps(record).encode(), "small")
    with pytest.raises(UnsupportedTokenizerError, match="has 301 tokens, and the model 300"):
        describe_tokenizer(larger, {}, 300)


def test_letters_with_separate_accents_are_told_of():
    _, notes = described(byte_level([BYTES]) | {"normalizer": {"type": "NFC"}})
    assert "composes characters (NFC)" in notes[0]


@pytest.mark.long
def test_a_chat_has_one_beginning(tmp_path):
    """The template writes the token that also comes before every text."""
    record = sentencepiece()
    (tmp_path / "tokenizer.json").write_text(json.dumps(record))
    settings = {"bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}"
        "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer = load_tokenizer(tmp_path)
    config = dataclasses.replace(PLAIN, num_layers=1, vocab_size=tokenizer.vocab_size)
    write(build(config), tmp_path, tmp_path / "a.gguf")
    theirs = LlamaCpp(tmp_path / "a.gguf")
    prompt = theirs.prompt_of([{"role": "user", "content": "the cat"}])
    ids = theirs.tokenize_prompt(prompt)
    assert ids.count(tokenizer.special["<s>"]) == 1 and ids[0] == tokenizer.special["<s>"]
