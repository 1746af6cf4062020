"""Scores of tokens against a slow oracle: a full forward pass for each token, of its own window."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from data_pipeline.base.errors import DataError, UsageError
from data_pipeline.tokenizer import ByteTokenizer, CharTokenizer
from maxtrain import cli
from maxtrain.commands.score import ScoreRow, encode_pair, encode_text, score, score_long, windows
from maxtrain.config.schema import ModelConfig, PrecisionConfig
from maxtrain.inference.complete import generate
from maxtrain.models.registry import build_model

CONFIG = ModelConfig(
    vocab_size=257,
    num_layers=2,
    embed_dim=32,
    mlp_dim=48,
    num_heads=4,
    num_kv_heads=2,
    max_length=40,
)
RNG = np.random.default_rng(0)
TEXT = RNG.integers(0, 257, 150).tolist()


@functools.cache
def tiny(**changes):
    config = dataclasses.replace(CONFIG, **changes)
    return jax.jit(lambda: build_model(config, PrecisionConfig(compute="float32"), 3))()


def forward(model, tokens):
    graphdef, params = nnx.split(model)
    return _forward(graphdef, params, jnp.asarray(tokens))


@functools.partial(jax.jit, static_argnums=0)
def _forward(graphdef, params, tokens):
    return nnx.merge(graphdef, params)(tokens)


def oracle(model, context, target):
    """The log-probability of a token after others, in float64, and whether it is the likeliest."""
    # One shape: what is right of a token can't matter.
    tokens = np.zeros((1, CONFIG.max_length), np.int32)
    tokens[0, : len(context)] = context
    logits = np.asarray(forward(model, tokens), np.float64)[0, len(context) - 1]
    highest = logits.max()
    logprob = logits[target] - highest - np.log(np.exp(logits - highest).sum())
    return logprob, bool(logits.argmax() == target)


@pytest.mark.every_dose
@pytest.mark.long
def test_each_token_is_that_of_a_pass_of_its_own():
    model = tiny()
    rows = [
        ScoreRow(TEXT[:20]),
        ScoreRow(TEXT[20:61], 3),
        ScoreRow(TEXT[:2]),
        ScoreRow(TEXT[5:30], 24),
    ]
    for row, scored in zip(rows, score(model, rows), strict=True):
        assert scored.logprobs.dtype == np.float32 and scored.is_greedy.dtype == bool
        assert len(scored.logprobs) == len(row.ids) - row.first
        for at in range(row.first, len(row.ids)):
            expected, greedy = oracle(model, row.ids[:at], row.ids[at])
            assert abs(scored.logprobs[at - row.first] - expected) < 2e-5
            assert scored.is_greedy[at - row.first] == greedy
        assert abs(scored.total() - scored.logprobs.astype(np.float64).sum()) < 1e-9


@pytest.mark.parametrize("experts", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_row_does_not_depend_on_its_neighbours(experts):
    model = tiny()
    if experts:
        moe = dataclasses.replace(CONFIG.moe, num_experts=4, experts_per_token=2)
        model = tiny(family="mixtral", moe=moe)
    rows = [
        ScoreRow(TEXT[at : at + length]) for at, length in enumerate((20, 33, 2, 9, 40, 41, 7) * 2)
    ]
    together = score(model, rows)
    for row, scored in zip(rows, together, strict=True):
        (alone,) = score(model, [row])
        np.testing.assert_allclose(alone.logprobs, scored.logprobs, rtol=0, atol=1e-6)
        np.testing.assert_array_equal(alone.is_greedy, scored.is_greedy)
    for row, scored in zip(reversed(rows), score(model, rows[::-1]), strict=True):
        np.testing.assert_allclose(
            scored.logprobs, together[rows.index(row)].logprobs, rtol=0, atol=1e-6
        )


@pytest.mark.every_dose
@pytest.mark.long
def test_what_is_generated_greedily_is_greedy():
    model = tiny()
    (made,) = generate(model, [TEXT[:5]], max_tokens=20, temperature=0.0)
    (scored,) = score(model, [ScoreRow([*TEXT[:5], *made], 5)])
    assert scored.is_greedy.all() and len(scored.is_greedy) == 20
    other = [*made[:-1], (made[-1] + 1) % 257]
    (scored,) = score(model, [ScoreRow([*TEXT[:5], *other], 5)])
    assert scored.is_greedy.tolist() == [True] * 19 + [False]


@pytest.mark.parametrize("count", [2, 5, 10, 11, 12, 30, 101])
@pytest.mark.parametrize("stride", [1, 3, 5, 10])
@pytest.mark.parametrize("first", [1, 4])
def test_windows_count_every_token_once(count, stride, first):
    if first >= count:
        return
    counted = []
    for number, (begin, row) in enumerate(windows(count, 10, stride, first)):
        assert len(row.ids) <= 11 and row.ids[0] == begin and row.first >= 1
        new = list(row.ids[row.first :])
        if number:
            assert len(new) <= stride and begin == max(0, new[-1] - 10)
        counted += new
    assert counted == list(range(first, count))


@pytest.mark.parametrize("stride", [None, 7, 40])
def test_a_long_text_is_read_in_windows(stride):
    model = tiny()
    (scored,) = score_long(model, [ScoreRow(TEXT)], stride=stride)
    assert len(scored.logprobs) == len(TEXT) - 1
    place = 0
    for begin, row in windows(len(TEXT), 40, stride or 20):
        for at in row.ids[row.first :]:
            if at % 7 == 0:
                expected, _ = oracle(model, TEXT[begin:at], TEXT[at])
                assert abs(scored.logprobs[place] - expected) < 2e-5
            place += 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (ScoreRow([1]), "has none to score from number 1 on.*Give more text"),
        (ScoreRow([1, 2], 2), "has none to score from number 2 on"),
        (ScoreRow([1, 2], 0), "has none to score from number 0 on"),
        (ScoreRow(list(range(42))), r"42 tokens, and the model reads at most 40 .*into windows"),
        (ScoreRow([1, 257]), r"id 257 at token 1, which must be in \[0, 257\)"),
        (ScoreRow([-1, 2]), r"id -1 at token 0"),
    ],
)
def test_rows_that_cannot_be_scored_are_refused(row, message):
    with pytest.raises(UsageError, match=message):
        score(tiny(), [row])


def test_a_completion_is_cut_from_its_prompt_before_the_space():
    tokenizer = ByteTokenizer()
    row = encode_pair(tokenizer, [256], "the cat ", "sat")
    assert bytes(row.ids[row.first :]) == b" sat" and row.ids[0] == 256
    same = encode_pair(tokenizer, [256], "the cat", " sat")
    assert (row.ids, row.first) == (same.ids, same.first)
    empty = encode_pair(tokenizer, [256], "", "sat")
    assert (empty.first, empty.ids[1:]) == (1, list(b"sat"))
    with pytest.raises(DataError, match="Give a prompt"):
        encode_pair(CharTokenizer("abc"), [], "", "a")
    with pytest.raises(DataError, match="has no token of its own"):
        encode_pair(tokenizer, [256], "a", "")
    with pytest.raises(DataError, match="has no token to score"):
        encode_text(tokenizer, [256], "")


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    """A small Hugging Face directory with a tokenizer."""
    source = Path(__file__).parents[1] / "data" / "parity" / "qwen3"
    folder = tmp_path_factory.mktemp("hf")
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((source / name).read_bytes())
    CharTokenizer("abcdefgh \n", eod=True).save(folder)
    return folder


@pytest.mark.every_dose
@pytest.mark.long
def test_the_command_prints_tokens_logprobs_and_sums(hf, tmp_path, capsys):
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(
        '{"prompt": "abc", "completion": " de"}\n\n{"prompt": "", "completion": "a"}\n'
    )
    (tmp_path / "text").write_text("face\n")
    command = ["score", "--hf", str(hf), "--text", "abba", "--file", str(tmp_path / "text")]
    assert cli.main([*command, "--pairs", str(pairs), "--json"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    names = [record["name"] for record in records]
    assert names == ["text 1", str(tmp_path / "text"), f"{pairs}:1", f"{pairs}:3"]
    assert records[0]["tokens"] == list("abba") and records[2]["tokens"] == list(" de")
    for record in records:
        assert abs(sum(record["logprobs"]) - record["sum"]) < 1e-9
        assert len(record["is_greedy"]) == len(record["ids"]) == len(record["logprobs"])
        assert max(record["logprobs"]) < 0
    assert cli.main(["score", "--hf", str(hf), "--text", "abba"]) == 0
    shown = capsys.readouterr().out
    assert f"text 1: {records[0]['sum']:.4f} nats, 4 tokens" in shown and "'b'" in shown


REFUSED = [
    ([], 64, "name what is scored"),
    (["--text", ""], 65, "has no token to score"),
    (["--text", "xyz"], 65, "not in the tokenizer's vocabulary"),
    (["--file", "nowhere"], 64, "--file nowhere: can't be read (No such file"),
    (["--pairs", "{"], 65, "is not JSON"),
    (["--pairs", "[1]"], 65, "must be an object with prompt and completion"),
    (["--pairs", '{"prompt": 1, "completion": "a"}'], 65, "must be text"),
    (["--pairs", '{"prompt": "a", "completion": ""}'], 65, ":1: the completion '' has no token"),
]


@pytest.mark.every_dose
@pytest.mark.long
@pytest.mark.parametrize(("argv", "code", "message"), REFUSED)
def test_mistakes_are_named(argv, code, message, hf, tmp_path, capsys):
    if argv and argv[0] == "--pairs":
        (tmp_path / "pairs").write_text(argv[1])
        argv = ["--pairs", str(tmp_path / "pairs")]
    assert cli.main(["score", "--hf", str(hf), *argv]) == code
    assert message in capsys.readouterr().err
