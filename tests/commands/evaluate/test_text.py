"""Bits per byte of files of text, against a full forward pass for each token."""

import functools
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from data_pipeline.tokenizer import CharTokenizer
from maxtrain import cli
from maxtrain.commands.evaluate.text import LikelihoodSums, evaluate_files, read_files, together
from maxtrain.commands.score import windows
from maxtrain.weights.hf import load_pretrained

PARITY = Path(__file__).parents[2] / "data" / "parity" / "qwen3"
ALPHABET = "abcdefgh é\n"
LONGEST = 24


def make(folder, eod):
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((PARITY / name).read_bytes())
    CharTokenizer(ALPHABET, eod=eod).save(folder)
    return folder


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    return make(tmp_path_factory.mktemp("hf"), True)


@pytest.fixture(scope="module")
def without_eod(tmp_path_factory):
    return make(tmp_path_factory.mktemp("hf"), False)


@functools.cache
def model():
    return load_pretrained(PARITY)[0]


def text_of(length, seed=0):
    rng = np.random.default_rng(seed)
    return "".join(rng.choice(list(ALPHABET), length))


def forward(tokens):
    graphdef, params = nnx.split(model())
    return _forward(graphdef, params, jnp.asarray(tokens))


@functools.partial(jax.jit, static_argnums=0)
def _forward(graphdef, params, tokens):
    return nnx.merge(graphdef, params)(tokens)


def oracle(ids, first, stride):
    """The nats of all tokens that count, one pass for each."""
    total = 0.0
    for begin, row in windows(len(ids), LONGEST, stride, first):
        for at in row.ids[row.first :]:
            # One shape: what is right of a token can't matter.
            tokens = np.zeros((1, LONGEST), np.int32)
            tokens[0, : at - begin] = ids[begin:at]
            logits = np.asarray(forward(tokens), np.float64)[0, at - begin - 1]
            highest = logits.max()
            total -= logits[ids[at]] - highest - np.log(np.exp(logits - highest).sum())
    return total


@pytest.mark.every_dose
@pytest.mark.long
@pytest.mark.parametrize("eod", [True, False])
@pytest.mark.parametrize("stride", [None, 5, 24])
def test_every_token_counts_once(eod, stride, tmp_path):
    tokenizer = CharTokenizer(ALPHABET, eod=eod)
    begin = [tokenizer.eod_id] if eod else []
    path = tmp_path / "text"
    path.write_text("é" + text_of(59), encoding="utf-8")
    files = read_files([str(path)], tokenizer, begin)
    found = evaluate_files(model(), files, longest=LONGEST, stride=stride)[str(path)]
    text = path.read_text(encoding="utf-8")
    ids = [*begin, *tokenizer.encode(text).tolist()]
    assert found.tokens == (60 if eod else 59)
    assert found.num_bytes == len((text if eod else text[1:]).encode())
    assert abs(found.nats - oracle(ids, 1, stride or 12)) < 1e-4
    record = found.record()
    assert record["bits_per_byte"] == found.nats / math.log(2) / found.num_bytes
    assert record["perplexity"] == math.exp(found.nats / found.tokens)


def test_files_are_summed_and_not_averaged():
    parts = [LikelihoodSums(10, 20, 5.0, 1.0), LikelihoodSums(1000, 900, 7.0, 1.0)]
    found = together(parts).record()
    assert found["nll"] == 12 / 1010 and found["bits_per_byte"] == 12 / math.log(2) / 920


@pytest.mark.long
def test_the_command_tells_each_file_and_all(hf, tmp_path, capsys):
    names = []
    for number, length in enumerate((300, 20)):
        path = tmp_path / f"text{number}"
        path.write_text(text_of(length, number), encoding="utf-8")
        names += ["--text", str(path)]
    assert cli.main(["evaluate", "--hf", str(hf), *names, "--json"]) == 0
    said = capsys.readouterr()
    record = json.loads(said.out)
    assert record["model"] == str(hf) and record["first_counts"] is True
    parts = list(record["texts"].values())
    assert [part["tokens"] for part in parts] == [300, 20]
    assert record["all"]["nats"] == pytest.approx(sum(part["nats"] for part in parts), abs=1e-9)
    assert record["all"]["bytes"] == sum(part["bytes"] for part in parts)
    options = ["--seq-length", "24", "--stride", "6", "--batch-size", "3"]
    assert cli.main(["evaluate", "--hf", str(hf), *names, *options]) == 0
    shown = capsys.readouterr().out
    assert "bits/byte" in shown and "all" in shown and "320" in shown


def test_a_tokenizer_without_a_beginning_is_told_of(without_eod, tmp_path, capsys):
    (tmp_path / "text").write_text("abc")
    command = ["evaluate", "--hf", str(without_eod), "--text", str(tmp_path / "text"), "--json"]
    assert cli.main(command) == 0
    said = capsys.readouterr()
    assert "the first token of each file does not count" in said.err
    record = json.loads(said.out)
    assert record["all"]["tokens"] == record["all"]["bytes"] == 2
    assert record["first_counts"] is False


REFUSED = [
    (b"", [], 65, "is empty. Name a file that has text"),
    (b"ab\xff", [], 65, "has the byte 0xFF at 2, which is not UTF-8"),
    (b"xyz", [], 65, "not in the tokenizer's vocabulary"),
    (None, [], 64, "can't be read (No such file or directory)"),
    (b"abc", ["--stride", "0"], 64, "--stride 0: must be at least 1"),
    (b"abc", ["--stride", "999999"], 64, "some would not be read. Leave it out"),
    (b"abc", ["--seq-length", "999999"], 64, "the model reads at most"),
    (b"abc", ["--set", "a=b"], 64, "--set: is of evaluation sets"),
    (b"abc", ["--batches", "2"], 64, "--batches: is of evaluation sets"),
]


@pytest.mark.every_dose
@pytest.mark.long
@pytest.mark.parametrize(("content", "options", "code", "message"), REFUSED)
def test_mistakes_are_named(content, options, code, message, hf, tmp_path, capsys):
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    command = ["evaluate", str(hf), "--text", str(path), *options]
    assert cli.main(command) == code
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_stride_belongs_to_texts(hf, capsys):
    assert cli.main(["evaluate", "--hf", str(hf), "--set", "a=b", "--stride", "3"]) == 64
    assert "--stride 3: is of --text" in capsys.readouterr().err


def test_a_directory_without_sets_is_named(hf, capsys):
    assert cli.main(["evaluate", str(hf)]) == 64
    told = capsys.readouterr().err
    assert f"{hf}: has no evaluation sets of its own. Name one with --set" in told
