"""Prompts of a run: read in the plan's order with their columns, and each followed by a completion
that ends where the data says."""

import itertools
import json

import numpy as np
import pytest

from data_pipeline.base.errors import ConfigError
from data_pipeline.config import DataConfig, SourceConfig
from data_pipeline.loader.loader import open_training
from data_pipeline.prepare import command as prepare
from data_pipeline.shards import TokenShards
from data_pipeline.tokenizer import load_tokenizer, train_bpe
from maxtrain.rl.prompts import later_prompts, prompts_of, read_prompt, require_prompts
from maxtrain.rl.reward_calls import parse_reward
from maxtrain.rl.sampler import stop_ids

RECORDS = [{"prompt": "abc"[: number % 3 + 1], "answer": number} for number in range(7)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prompts")
    lines = [json.dumps(record) + "\n" for record in RECORDS]
    (folder / "prompts.jsonl").write_text("".join(lines))
    arguments = [str(folder / "out"), "--prompts", str(folder / "prompts.jsonl")]
    assert prepare.main([*arguments, "--workers", "1"]) == 0
    return folder


@pytest.fixture(scope="module")
def data(folder):
    sources = {"a": SourceConfig(str(folder / "out"), 1.0, None)}
    config = DataConfig(sources=sources, seq_length=12, batch_size=2, packing="pad")
    return open_training(config, 0, 14)


def test_every_prompt_is_read_once_an_epoch_with_its_columns(data):
    found = prompts_of(data, range(7))
    assert sorted(prompt.columns["answer"] for prompt in found) == sorted([*range(7)] * 2)
    tokenizer = load_tokenizer(data.shards[0].path)
    for prompt in found:
        assert prompt.original == RECORDS[prompt.columns["answer"]]["prompt"]
        first, *others = prompt.ids
        assert first == tokenizer.eod_id
        assert tokenizer.decode(others) == prompt.original


def test_steps_that_read_together_read_what_they_would_read_alone(data):
    apart = [prompt for step in range(4) for prompt in prompts_of(data, [step])]
    assert prompts_of(data, range(4)) == apart


def test_later_prompts_are_those_of_the_steps_behind_and_after_the_last_those_of_the_first(data):
    last = data.plan.num_steps - 1
    later = itertools.islice(later_prompts(data, range(last - 2, last)), 5)
    expected = [prompt for step in (last, 0, 1) for prompt in prompts_of(data, [step])]
    assert list(later) == expected[:5]


def test_a_prompt_without_room_is_named(data):
    require_prompts(data, "grpo", 8)
    with pytest.raises(ConfigError, match=r"prompt 2 has 4 tokens.*room for 3.*at least 13"):
        require_prompts(data, "grpo", 9)


def test_what_ends_a_completion(folder):
    """The end mark; with a chat template also what it writes behind an answer."""
    shards = TokenShards.open(folder / "out")
    tokenizer = load_tokenizer(folder / "out")
    assert stop_ids(tokenizer, shards) == (tokenizer.eod_id,)
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    chat = folder / "chat"
    chat.mkdir()
    trained = train_bpe(["abc user assistant"] * 9, 300)
    trained.save(chat)
    content = json.loads((chat / "tokenizer.json").read_text())
    for number, token in enumerate(tokens[1:]):
        entry = {"id": 290 + number, "content": token, "special": True}
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        content["added_tokens"].append(entry | flags)
    (chat / "tokenizer.json").write_text(json.dumps(content))
    arguments = [str(folder / "of_chat"), "--prompts", str(folder / "prompts.jsonl")]
    arguments += ["--tokenizer", str(chat), "--chat-template", "chatml", "--workers", "1"]
    assert prepare.main(arguments) == 0
    tokenizer = load_tokenizer(folder / "of_chat")
    shards = TokenShards.open(folder / "of_chat")
    ends = {tokenizer.eod_id, tokenizer.special["<|im_end|>"]}
    assert set(stop_ids(tokenizer, shards)) == ends
    ids = shards.read(*shards.document(0))
    assert ids[0] == tokenizer.special["<|im_start|>"]
    # The prompt of a template has nothing behind it, and is read as it is.
    header = tokenizer.locate("<|im_start|>assistant\n")[0]
    np.testing.assert_array_equal(ids[-len(header) :], header)
    assert read_prompt(shards, 0).ids == tuple(ids.tolist())


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("gsm8k", "gsm8k", {}),
        (" my.module:f ", "my.module:f", {}),
        (
            "overlong(max_tokens=8, cache_tokens=4)",
            "overlong",
            {"max_tokens": 8, "cache_tokens": 4},
        ),
        (
            "pattern(regex='(a)=[(]', where=\"any\")",
            "pattern",
            {"regex": "(a)=[(]", "where": "any"},
        ),
    ],
)
def test_a_reward_has_its_options_in_brackets(text, name, options):
    assert parse_reward(text) == (name, options)


@pytest.mark.parametrize("text", ["length(6)", "length(max_tokens=", "length(n=f())", "a(**{})"])
def test_options_that_are_none_are_refused(text):
    with pytest.raises(ConfigError, match="can't be read"):
        parse_reward(text)
