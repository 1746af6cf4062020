"""Exports: the bytes that transformers writes, read back as the run's, whole or not there at all."""

import fcntl
import json
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tokenizers
from flax import nnx
from safetensors.numpy import load_file

from data_pipeline.base import interrupts
from data_pipeline.base.errors import DataError, StorageError, UsageError
from data_pipeline.prepare.command import main as prepare
from data_pipeline.tokenizer import (
    BESIDE,
    ByteTokenizer,
    carry_data,
    carry_imported,
    load_tokenizer,
    train_bpe,
)
from maxtrain.checkpoint.manager import Checkpoints
from maxtrain.commands import generate
from maxtrain.commands.export import command as job
from maxtrain.commands.export.command import export
from maxtrain.config.load import load_config, to_yaml
from maxtrain.config.schema import ModelConfig, PrecisionConfig, RunConfig
from maxtrain.models.families.directory import read_config
from maxtrain.models.registry import build_model
from maxtrain.trainer.saved_run import load_run
from maxtrain.weights.hf import load_pretrained
from maxtrain.weights.hf_export import divide, write_config, write_tokenizer
from tests.support import pretrained
from tests.support.shared import MORE_PARITY_CASES, in_time

PARITY = Path(__file__).parents[2] / "data" / "parity"
MORE = ("llama_tied_mha", *MORE_PARITY_CASES)
CASES = (
    "llama3",
    pytest.param("qwen3", marks=pytest.mark.long),
    *(pytest.param(case, marks=pytest.mark.long) for case in MORE),
)
WITH_ROPE = [case for case in ("llama3", "qwen3", *MORE) if case != "gpt2"]
SIZES = {
    "num_layers": 2,
    "embed_dim": 32,
    "mlp_dim": 48,
    "num_heads": 4,
    "num_kv_heads": 2,
    "max_length": 200,
}


@pytest.fixture
def place(tmp_path):
    """Prepared data, as far as exports look at it: its tokenizer."""
    folder = tmp_path / "prepared"
    folder.mkdir()
    ByteTokenizer().save(folder)
    return folder


def write(model, place, out, **options):
    return export(model, load_tokenizer(place), str(place), out, **options)


def leaves(model):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model))]


def hidden(folder):
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_the_files_are_those_that_transformers_writes(case, tmp_path, place):
    model, config = load_pretrained(PARITY / case)
    exported = write(model, place, tmp_path / "out")
    assert set(exported.files) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    assert exported.verified.difference == 0
    assert [note.endswith("`maxtrain generate --hf DIR` does.") for note in exported.notes] == [
        True
    ]
    last = job._describe(tmp_path / "out", exported, "float32", RunConfig())[-1]
    assert last.startswith("load its weights: AutoModelForCausalLM")
    theirs = (PARITY / case / "model.safetensors").read_bytes()
    assert (tmp_path / "out/model.safetensors").read_bytes() == theirs
    assert hidden(tmp_path) == []
    ours = json.loads((tmp_path / "out/config.json").read_text())
    values = json.loads((PARITY / case / "config.json").read_text())
    of_the_program = {"transformers_version"}
    if case == "gpt2":
        # Of a model that gives one label to a text.
        of_the_program |= {key for key in values if key.startswith("summary_")}
    of_the_tokenizer = {"bos_token_id", "eos_token_id", "pad_token_id"}
    assert values.keys() - ours.keys() == of_the_program
    more = {"rope_theta", "rope_scaling", "torch_dtype"}
    if case == "gpt2":
        more = {"torch_dtype"}
    if case == "gemma3":
        more |= {"rope_local_base_freq", "sliding_window_pattern"}
    if case.startswith("qwen3_moe"):
        # What versions before 5 read.
        more |= {"num_experts", "max_window_layers", "layer_types"}
    # What DeepSeek's own code reads.
    if case == "deepseek_v2":
        more |= {"scoring_func"}
    if case == "deepseek_v3":
        more |= {"scoring_func", "topk_method"}
    assert ours.keys() - values.keys() == more
    # What a program gives back beside logits, and layers that are not here.
    unlike = {"output_router_logits", "num_nextn_predict_layers"}
    for key in values.keys() - of_the_program - of_the_tokenizer - unlike:
        assert ours[key] == values[key], key
    assert [ours[key] for key in sorted(of_the_tokenizer)] == [256, 256, None]
    generation = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert generation["eos_token_id"] == generation["bos_token_id"] == 256
    assert read_config(tmp_path / "out") == config == read_config(PARITY / case)


@pytest.mark.parametrize("case", in_time(WITH_ROPE))
@pytest.mark.parametrize("left", [("rope_parameters",), ("rope_scaling", "rope_theta")])
def test_either_spelling_of_rope_says_everything(case, left, tmp_path, place):
    model, config = load_pretrained(PARITY / case)
    write(model, place, tmp_path / "out")
    values = json.loads((tmp_path / "out/config.json").read_text())
    kept = {key: value for key, value in values.items() if key not in left}
    (tmp_path / "out/config.json").write_text(json.dumps(kept))
    assert read_config(tmp_path / "out") == config
    assert values["rope_theta"] == config.rope_theta
    if config.rope_scaling == "none":
        assert values["rope_scaling"] is None
    else:
        assert values["rope_scaling"]["rope_type"] == config.rope_scaling


@pytest.mark.long
def test_several_shards_and_their_index(tmp_path, place):
    model, _ = load_pretrained(PARITY / "llama3")
    before = leaves(model)
    told = []
    most = 100_000
    exported = write(model, place, tmp_path / "out", max_shard_bytes=most, tell=told.append)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    count = len(files)
    assert count > 2
    names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    assert [path.name for path in files] == names and len(told) == count
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    total = 0
    for path in files:
        tensors = load_file(path)
        size = sum(tensor.nbytes for tensor in tensors.values())
        assert size <= most and exported.files[path.name] < most + 10_000
        assert {name for name, file in index["weight_map"].items() if file == path.name} == set(
            tensors
        )
        total += size
    whole = load_file(PARITY / "llama3/model.safetensors")
    assert index["weight_map"].keys() == whole.keys()
    assert index["metadata"] == {"total_parameters": total // 4, "total_size": total}
    assert index["weight_map"]["model.embed_tokens.weight"] == names[0]
    assert index["weight_map"]["lm_head.weight"] == names[-1]
    for leaf, other in zip(leaves(load_pretrained(tmp_path / "out")[0]), before, strict=True):
        np.testing.assert_array_equal(leaf, other)


def test_shards_are_filled_in_order_and_a_large_tensor_has_its_own():
    assert divide({"a": 4, "b": 4, "c": 4, "d": 1}, 8) == [["a", "b"], ["c", "d"]]
    assert divide({"a": 4, "b": 20, "c": 4}, 8) == [["b"], ["a", "c"]]
    assert divide({"a": 4}, 8) == [["a"]]


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_is_told_and_is_all_that_differs(dtype, tmp_path, place):
    model, _ = load_pretrained(PARITY / "qwen3")
    # Too small for a float16 that is normalised.
    model.embedding[...] = model.embedding[...].at[0, 0].set(3e-7)
    before = leaves(model)
    exported = write(model, place, tmp_path / "out", dtype=dtype)
    assert 0 < exported.verified.difference < 0.1 * exported.verified.largest
    values = json.loads((tmp_path / "out/config.json").read_text())
    assert values["dtype"] == values["torch_dtype"] == dtype
    for leaf, other in zip(leaves(load_pretrained(tmp_path / "out")[0]), before, strict=True):
        rounded = other.astype(np.dtype(getattr(ml_dtypes, dtype, np.float16))).astype(np.float32)
        np.testing.assert_array_equal(leaf, rounded)


def test_a_number_that_is_too_large_names_its_tensor(tmp_path, place):
    model, _ = load_pretrained(PARITY / "qwen3")
    model.embedding[...] = model.embedding[...].at[3, 1].set(7e4)
    with pytest.raises(DataError, match=r"embed_tokens\.weight holds NaN or infinity in float16"):
        write(model, place, tmp_path / "out", dtype="float16")
    assert hidden(tmp_path) == []


@pytest.mark.long
def test_what_only_float32_holds_stays_float32(tmp_path, place):
    """The correction of experts, which a model in bfloat16 has in float32."""
    model, _ = load_pretrained(PARITY / "deepseek_v3")
    before = np.asarray(model.layers.__getattribute__("0").mlp.correction[...])
    write(model, place, tmp_path / "out", dtype="bfloat16")
    found = load_file(tmp_path / "out/model.safetensors")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert found[name].dtype == np.float32
    np.testing.assert_array_equal(found[name], before[0])
    assert found["lm_head.weight"].dtype == ml_dtypes.bfloat16


@pytest.mark.long
def test_parameters_in_bfloat16_are_written_as_they_are_or_wider(tmp_path, place):
    before = leaves(load_pretrained(PARITY / "llama3", dtype="bfloat16")[0])
    for dtype in (None, "float32"):
        model, _ = load_pretrained(PARITY / "llama3", dtype="bfloat16")
        out = tmp_path / str(dtype)
        assert write(model, place, out, dtype=dtype).verified.difference == 0
        stored = load_file(out / "model.safetensors")["lm_head.weight"].dtype
        assert stored == (dtype or "bfloat16")
        again = leaves(load_pretrained(out, dtype="bfloat16")[0])
        assert all(a.tobytes() == b.tobytes() for a, b in zip(again, before, strict=True))


@pytest.mark.long
@pytest.mark.parametrize("place_of_bit", [-1, -10_000, -100_000])
def test_a_file_that_reads_back_otherwise_is_no_export(place_of_bit, tmp_path, place, monkeypatch):
    write_weights = job.write_weights

    def damaging(directory, *arguments):
        write_weights(directory, *arguments)
        content = bytearray((directory / "model.safetensors").read_bytes())
        content[place_of_bit - place_of_bit % 4] ^= 1
        (directory / "model.safetensors").write_bytes(content)

    monkeypatch.setattr(job, "write_weights", damaging)
    model, _ = load_pretrained(PARITY / "llama3")
    with pytest.raises(StorageError, match=r"1 parameters \(.*\) differ.*run the same command"):
        write(model, place, tmp_path / "out")
    assert not (tmp_path / "out").exists() and hidden(tmp_path) == []


@pytest.mark.every_dose
@pytest.mark.long
def test_logits_that_differ_are_no_export(tmp_path, place, monkeypatch):
    calls = []

    def other(graphdef, params, tokens):
        calls.append(tokens)
        return jnp.full((2, 3), len(calls) // 3, jnp.float32)

    monkeypatch.setattr(job, "logits", other)
    model, _ = load_pretrained(PARITY / "llama3")
    with pytest.raises(StorageError, match="logits differ by up to 1"):
        write(model, place, tmp_path / "out")
    assert len(calls) == 3 and not (tmp_path / "out").exists()


@pytest.mark.long
def test_nothing_looks_finished_before_it_is(tmp_path, place, monkeypatch):
    load_weights = job.load_weights
    seen = []

    def looking(params, directory, config):
        seen.append(((tmp_path / "out").exists(), directory.name.startswith(".out.export-")))
        return load_weights(params, directory, config)

    monkeypatch.setattr(job, "load_weights", looking)
    write(load_pretrained(PARITY / "llama3")[0], place, tmp_path / "out")
    assert seen == [(False, True)] and (tmp_path / "out/config.json").exists()


@pytest.mark.every_dose
@pytest.mark.long
def test_weights_that_are_not_finite_are_refused(tmp_path, place):
    model, _ = load_pretrained(PARITY / "llama3")
    table = np.asarray(model.embedding[...]).copy()
    table[3, 2] = 3.4e38
    model.embedding[...] = jnp.asarray(table)
    with pytest.raises(DataError, match=r"embed_tokens\.weight holds NaN or infinity in bfloat16"):
        write(model, place, tmp_path / "out", dtype="bfloat16")
    table[3, 2] = np.nan
    model.embedding[...] = jnp.asarray(table)
    with pytest.raises(DataError, match="Take another checkpoint with --step"):
        write(model, place, tmp_path / "out")
    assert hidden(tmp_path) == [] and not (tmp_path / "out").exists()


@pytest.mark.long
def test_what_is_there_is_not_overwritten_and_leftovers_go(tmp_path, place):
    out = tmp_path / "out"

    def refused(message):
        with pytest.raises(UsageError, match=message):
            write(load_pretrained(PARITY / "llama3")[0], place, out)

    out.write_text("mine")
    refused("is not a directory. Name another one")
    out.unlink()
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    refused("is not empty. Name a directory that is not there yet")
    assert (out / "mine.txt").read_text() == "mine"
    (out / "mine.txt").unlink()
    left, busy, other = (tmp_path / name for name in (".out.export-1", ".out.export-2", ".outer"))
    for folder in (left, busy, other):
        folder.mkdir()
        (folder / "model.safetensors").write_text("half")
    lock = os.open(busy, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    write(load_pretrained(PARITY / "llama3")[0], place, out)
    os.close(lock)
    assert (out / "config.json").exists() and not left.exists()
    assert busy.exists() and other.exists(), "of another export that goes on, or somebody else's"


@pytest.mark.long
def test_what_lies_beside_the_tokenizer_goes_along(tmp_path, place):
    (place / "chat_template.jinja").write_text("{{ messages }}")
    (place / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    exported = write(load_pretrained(PARITY / "llama3")[0], place, tmp_path / "out")
    for name in ("tokenizer.json", "chat_template.jinja", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (place / name).read_bytes()
        assert name in exported.files


@pytest.mark.long
def test_a_chat_template_is_carried_along_or_missed(tmp_path):
    inner = tokenizers.Tokenizer.from_str(train_bpe(["the cat sat"] * 9, 280).content.decode())
    inner.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    inner.save(str(tmp_path / "tokenizer.json"))
    said = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": said}) + "\n")
    options = ["--tokenizer", str(tmp_path / "tokenizer.json"), "--chat-template", "chatml"]
    chat = ["--chat", str(tmp_path / "a.jsonl"), "--workers", "1"]
    assert prepare([str(tmp_path / "data"), *chat, *options]) == 0
    place = tmp_path / "data"
    model, _ = load_pretrained(PARITY / "llama3")
    params = nnx.state(model)
    copy = jax.tree.map(jnp.copy, params)
    carried = jax.tree.map(jnp.copy, params)
    exported = write(model, place, tmp_path / "carried")
    assert exported.notes == [] and "chat_template.jinja" in exported.files
    assert "<|im_start|>" in (tmp_path / "carried/chat_template.jinja").read_text()
    nnx.update(model, carried)
    # Data of an older version has none beside its tokenizer.
    (place / "chat_template.jinja").unlink()
    exported = write(model, place, tmp_path / "out")
    assert [
        note.endswith("--chat-template FILE to carry it along.") for note in exported.notes
    ] == [True]
    assert "chat_template.jinja" not in exported.files
    nnx.update(model, copy)
    exported = write(model, place, tmp_path / "again", template=b"{{ messages }}")
    assert exported.notes == []
    assert (tmp_path / "again/chat_template.jinja").read_text() == "{{ messages }}"


@pytest.mark.long
def test_tokens_that_end_an_answer_are_those_of_generation_and_of_the_template(
    pretrained_directory, tmp_path
):
    source = shutil.copytree(pretrained_directory, tmp_path / "source")
    special = load_tokenizer(source).special
    of_document = special["<|end|>"]
    model, _ = load_pretrained(source)
    state = nnx.state(model)
    copies = [jax.tree.map(jnp.copy, state) for _ in range(2)]

    def written(name):
        write(model, source, tmp_path / name)
        config = json.loads((tmp_path / name / "config.json").read_text())
        return config, json.loads((tmp_path / name / "generation_config.json").read_text())

    config, generation = written("plain")
    assert config["eos_token_id"] == of_document
    # Its bos_token is null.
    assert config["bos_token_id"] is None and "bos_token_id" not in generation
    assert generation["eos_token_id"] == of_document
    assert generation["_from_model_config"] is True
    # 900 is none of the model's.
    settings = {"eos_token_id": [of_document, 7, 900], "temperature": 0.6}
    (source / "generation_config.json").write_text(json.dumps(settings))
    nnx.update(model, copies[0])
    _, generation = written("generation")
    assert generation["eos_token_id"] == [of_document, 7]
    assert generation["temperature"] == 0.6
    assert "_from_model_config" not in generation
    chatml = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    (source / "chat_template.jinja").write_text(chatml)
    names = {"eos_token": "<|end|>", "bos_token": "<|im_start|>"}
    (source / "tokenizer_config.json").write_text(json.dumps(names))
    nnx.update(model, copies[1])
    config, generation = written("chat")
    assert generation["eos_token_id"] == [of_document, 7, special["<|im_end|>"]]
    begin = special["<|im_start|>"]
    assert config["bos_token_id"] == generation["bos_token_id"] == begin
    assert config["eos_token_id"] == of_document


@pytest.mark.parametrize(
    ("named", "vocab_size", "of_config", "of_generation"),
    [
        (None, 160, None, "absent"),
        ("<|im_start|>", 160, "<|im_start|>", "<|im_start|>"),
        # A row of the embedding that is declared as padding would not be trained any further.
        ("<|end|>", 160, None, "<|end|>"),
        # A token that the embedding has no row for.
        ("<|im_start|>", 90, None, "absent"),
        ("none of the tokenizer's", 160, None, "absent"),
    ],
)
def test_the_token_for_padding_is_that_of_the_source(
    named, vocab_size, of_config, of_generation, tmp_path
):
    pretrained.write(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    settings = {"eos_token": "<|end|>", "pad_token": named}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    config = ModelConfig(vocab_size=vocab_size)
    write_config(tmp_path, config, "float32", tokenizer)
    values = json.loads((tmp_path / "config.json").read_text())
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert values["pad_token_id"] == tokenizer.special.get(of_config)
    expected = tokenizer.special.get(of_generation, "absent")
    assert generation.get("pad_token_id", "absent") == expected
    # Where the two differ, transformers must not make the second of the first.
    is_alike = generation.get("pad_token_id") == values["pad_token_id"]
    assert ("_from_model_config" in generation) == is_alike
    # What the source says of generation stays.
    (tmp_path / "generation_config.json").write_text('{"pad_token_id": 3}')
    write_config(tmp_path, config, "float32", tokenizer)
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation["pad_token_id"] == 3


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The directory of a run with a tokenizer of its own and checkpoints at steps 1 and 2."""
    root = tmp_path_factory.mktemp("runs")
    (root / "a.txt").write_text("some text of a few words, again and again\n" * 50)
    options = ["--text", str(root / "a.txt"), "--workers", "1", "--tokenizer", "bpe:300"]
    assert prepare([str(root / "data"), *options]) == 0
    vocab = load_tokenizer(root / "data").vocab_size
    config = load_config(
        [
            "config=quickstart",
            f"data.sources.stdlib.path={root / 'data'}",
            "eval.sets={}",
            "eval_interval=0",
            "data.seq_length=64",
            f"model.vocab_size={vocab}",
            *(f"model.{name}={value}" for name, value in SIZES.items()),
        ]
    )
    folder = root / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(config))
    carry_data(folder / "tokenizer", {"stdlib": str(root / "data")}, BESIDE)
    save(folder, config, [1, 2])
    return folder


def save(folder, config, steps):
    checkpoints = Checkpoints(folder / "checkpoints", config.checkpoint)
    for step in steps:
        params = nnx.state(build_model(config.model, config.precision, step))
        average = nnx.state(build_model(config.model, PrecisionConfig(), step + 10))
        state = {"params": params, "opt_state": {"average": average}}
        checkpoints.save(step, state, {})
    checkpoints.close()


@pytest.fixture
def command(monkeypatch, capsys):
    """Calls main in this process, which stays as it is: (exit code, stdout, stderr)."""
    monkeypatch.setattr(job, "start", lambda mesh, cache: None)
    monkeypatch.setattr(generate, "start", lambda mesh, cache: None)

    def call(*argv, program=job):
        code = program.main([str(argument) for argument in argv])
        return code, *capsys.readouterr()

    return call


@pytest.mark.every_dose
@pytest.mark.long
def test_the_command_exports_a_run(run, tmp_path, command):
    out = tmp_path / "deep/out"
    code, said, err = command(run, out, "--format", "hf")
    assert code == 0, err
    assert f"{run}, step 2: " in said and "parameters, written in float32" in said
    assert "its parameters and logits are the run's, bit for bit." in said
    assert said.splitlines()[-1] == f'load it: AutoModelForCausalLM.from_pretrained("{out}")'
    for leaf, other in zip(leaves(load_pretrained(out)[0]), leaves(load_run(run)[0]), strict=True):
        np.testing.assert_array_equal(leaf, other)
    tokenizer = load_tokenizer(out)
    assert tokenizer.sha256 == load_tokenizer(run.parent / "data").sha256
    settings = json.loads((out / "tokenizer_config.json").read_text())
    assert settings["eos_token"] == settings["bos_token"] == "<|endoftext|>"
    assert settings["model_max_length"] == 200
    assert "chat_template" not in settings and not (out / "chat_template.jinja").exists()
    values = json.loads((out / "config.json").read_text())
    assert values["eos_token_id"] == tokenizer.eod_id == values["bos_token_id"]
    card = (out / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "A language model of the family llama with " in card
    code, text, _ = command("--hf", out, "--prompt", "some", "--max-tokens", 4, program=generate)
    assert code == 0 and text.startswith("some")
    code, _, err = command(run, out)
    assert code == 64 and "is not empty" in err


@pytest.mark.long
def test_the_command_takes_a_step_a_type_and_sizes(run, tmp_path, command):
    argv = ["--step", "1", "--dtype", "bfloat16", "--max-shard-size", "20KB"]
    code, said, err = command(run, tmp_path / "out", *argv)
    assert code == 0 and "step 1: " in said and "written in bfloat16" in said
    assert "rounded to bfloat16; its logits differ from the run's by up to " in said
    assert "model-00001-of-0000" in err and "MB" in err
    before = leaves(load_run(run, 1)[0])
    for leaf, other in zip(leaves(load_pretrained(tmp_path / "out")[0]), before, strict=True):
        np.testing.assert_array_equal(leaf, other.astype(ml_dtypes.bfloat16).astype(np.float32))


@pytest.mark.long
def test_averaged_weights_are_what_is_exported_if_there_are_such(run, tmp_path, command):
    config = load_config([f"config={run / 'config.yaml'}", "optimizer.ema_decay=0.9"])
    folder = tmp_path / "averaged"
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(config))
    shutil.copytree(run / "tokenizer", folder / "tokenizer")
    save(folder, config, [3])
    code, said, _ = command(folder, tmp_path / "out")
    assert code == 0 and "step 3, averaged weights (optimizer.ema_decay): " in said
    expected = nnx.state(build_model(config.model, PrecisionConfig(), 13))
    for leaf, other in zip(
        leaves(load_pretrained(tmp_path / "out")[0]), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_array_equal(leaf, other)


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        ([], 64, "required: RUN, OUT"),
        (["nowhere", "OUT"], 64, "RUN=nowhere: is not there. Name the directory of a run"),
        (["RUN", "OUT", "--format", "onnx"], 64, "invalid choice: 'onnx'"),
        (["RUN", "OUT", "--step", "-1"], 64, "--step -1: must be at least 0"),
        (["RUN", "OUT", "--step", "9"], 74, "Complete steps: 1, 2. Ask for one of these"),
        (["RUN", "OUT", "--max-shard-size", "many"], 64, "Write for example 5GB or 500MB"),
        (["RUN", "OUT", "--max-shard-size", "0"], 64, "'0' is not a number of bytes"),
        (["RUN", "OUT", "--chat-template", "nowhere.jinja"], 64, "Name a file of text"),
        (["RUN", "RUN"], 64, "is not empty. Name a directory that is not there yet"),
    ],
)
def test_what_the_command_refuses(run, tmp_path, command, argv, code, message):
    places = {"RUN": run, "OUT": tmp_path / "out"}
    found, out, err = command(*[places.get(argument, argument) for argument in argv])
    assert found == code and message in err and "Traceback" not in err
    assert list(tmp_path.iterdir()) == [] and "load it" not in out


@pytest.mark.every_dose
@pytest.mark.long
def test_an_export_that_is_interrupted_leaves_nothing(run, tmp_path, command, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "load_weights", interrupt)
    code, _, err = command(run, tmp_path / "out")
    assert code == 130 and "Run the same command again." in err
    # At the end of the process; until then a file keeps threads from making the directory again.
    interrupts._remove_places()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_a_model_config_is_written_and_read_as_itself(tmp_path, place):
    config = ModelConfig(vocab_size=160, head_dim=16, tie_embeddings=True, **SIZES)
    for family in ("llama", "qwen3"):
        changed = ModelConfig(**{**vars(config), "family": family})
        model = build_model(changed, PrecisionConfig(), 1)
        write(model, place, tmp_path / family)
        assert read_config(tmp_path / family) == changed


FILES = {
    # Without a bos_token, and not in the form of transformers.
    "tokenizer_config.json": b'{"eos_token":\n"<|end|>", "chat_template": [{"name": "default",\n'
    b'"template": "a"}, {"name": "tool_use", "template": "b"}]}',
    "special_tokens_map.json": b'{ "eos_token": "<|end|>" }\n',
    "added_tokens.json": b'{"<|end|>": 96}',
    "generation_config.json": b'{"top_k": 3,\n"eos_token_id": 96, "transformers_version": "5"}',
    "additional_chat_templates/rag.jinja": b"{{ messages }}",
    "chat_template.jinja": b"{{ messages }} \n",
}


@pytest.mark.parametrize("through", ["directory", "run"])
def test_files_of_a_tokenizer_are_carried_as_they_are(through, tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    out.mkdir()
    pretrained.write(source)
    for name, content in FILES.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_bytes(content)
    place = source
    if through == "run":
        place = tmp_path / "run" / "tokenizer"
        carry_imported(place, load_tokenizer(source))
    tokenizer = load_tokenizer(place)
    config = ModelConfig(vocab_size=160)
    write_tokenizer(out, str(place), tokenizer, config)
    write_config(out, config, "float32", tokenizer)
    for name in ("tokenizer.json", *FILES):
        assert (out / name).read_bytes() == (source / name).read_bytes(), name
    values = json.loads((out / "config.json").read_text())
    assert values["bos_token_id"] is None and values["eos_token_id"] == 96


def test_a_tokenizer_without_settings_gets_a_beginning_only_if_it_is_ours(tmp_path):
    pretrained.write(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    carry_imported(tmp_path / "run", load_tokenizer(tmp_path))
    for place, has_beginning in ((tmp_path, True), (tmp_path / "run", False)):
        out = tmp_path / f"out-{has_beginning}"
        out.mkdir()
        tokenizer = load_tokenizer(place)
        tokenizer.eod_id = 96
        write_tokenizer(out, str(place), tokenizer, ModelConfig(vocab_size=160))
        settings = json.loads((out / "tokenizer_config.json").read_text())
        assert settings["eos_token"] == "<|end|>"
        assert ("bos_token" in settings) == has_beginning


def test_chatml_is_a_template_by_its_name():
    template = job._read_template(Path("chatml"))
    assert template is not None and b"<|im_start|>" in template
