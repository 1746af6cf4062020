"""Prompts are completed by the likeliest tokens, their completions are rewarded, and what is right
is counted."""

import contextlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from data_pipeline.prepare import command as prepare
from data_pipeline.shards import TokenShards
from data_pipeline.tokenizer import load_tokenizer
from maxtrain.config.schema import GrpoConfig, ModelConfig, PrecisionConfig
from maxtrain.models.registry import build_model
from maxtrain.rl.evaluation import RewardedPromptEvaluator, ScoredCompletions
from maxtrain.rl.reward_calls import Rewards
from tests.support.shared import TINY_MODEL

TEXTS = ["ab", "b", "abc", "cab"]
MOST = 6


@pytest.fixture(scope="module")
def model():
    config = ModelConfig(vocab_size=257, **TINY_MODEL)
    return jax.jit(lambda: build_model(config, PrecisionConfig(compute="float32"), 3))()


def asked(folder, model, records, rewards, count=None) -> ScoredCompletions:
    """The answers of the model to the prompts of these records."""
    folder.mkdir()
    (folder / "prompts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    out = folder / "out"
    arguments = [str(out), "--prompts", str(folder / "prompts.jsonl"), "--workers", "1"]
    assert prepare.main(arguments) == 0
    shards = TokenShards.open(out)
    config = GrpoConfig(rewards=rewards, max_completion_length=MOST)
    tokenizer = load_tokenizer(out)
    with contextlib.closing(Rewards(config, tokenizer)) as rewards:
        evaluator = RewardedPromptEvaluator(config, tokenizer, 2, rewards)
        return evaluator(model, shards, count or len(records))


@pytest.fixture(scope="module")
def first(tmp_path_factory, model) -> ScoredCompletions:
    records = [{"prompt": text, "answer": text} for text in TEXTS]
    folder = tmp_path_factory.mktemp("asked") / "first"
    return asked(folder, model, records, ("length(max_tokens=6)",))


def greedy(model, ids, end):
    """The oracle: all of a text is read again for each token."""
    forward = jax.jit(lambda tokens: model(tokens))
    ids = list(ids)
    made = []
    while len(made) < MOST and end not in made:
        padded = np.zeros((1, 16), np.int32)
        padded[0, : len(ids) + len(made)] = ids + made
        logits = forward(jnp.asarray(padded))[0, len(ids) + len(made) - 1]
        made.append(int(logits.argmax()))
    return made


@pytest.mark.long
@pytest.mark.every_dose
def test_completions_are_the_likeliest_tokens(model, first):
    assert [prompt.original for prompt in first.prompts] == TEXTS
    (end,) = {prompt.ids[0] for prompt in first.prompts}
    for number, prompt in enumerate(first.prompts):
        expected = greedy(model, prompt.ids, end)
        assert first.lengths[number] == len(expected)
        assert first.truncated[number] == (end not in expected)
    record = first.record()
    assert record["prompts"] == len(TEXTS)
    assert record["completion_length"] == np.mean(first.lengths)
    assert record["longest_completion"] == max(first.lengths)
    assert record["truncated"] == first.truncated.mean()
    np.testing.assert_allclose(record["reward"], -np.mean(first.lengths) / MOST)
    assert "accuracy" not in record


def test_accuracy_is_the_share_that_is_right(tmp_path, model, first):
    """One of three prompts has the right answer, one a wrong one, and one none at all; the model
    answers each as it does alone."""
    golds = [first.texts[0], first.texts[1] + "x", None]
    records = [{"prompt": text, "answer": gold} for text, gold in zip(TEXTS, golds)]
    rewards = ("exact(reward=2.0)", "length(max_tokens=6)")
    found = asked(tmp_path / "right", model, records, rewards)
    assert found.texts == first.texts[:3]
    record = found.record()
    assert record["accuracy"] == 0.5
    assert record["reward/exact"] == 1.0
    assert record["reward_outcomes/exact/ok"] == 3
    samples = found.samples("held", 2)
    assert [(sample.number, sample.prompt) for sample in samples] == [(0, "ab"), (1, "b")]
    assert [sample.completion for sample in samples] == first.texts[:2]
    assert [sample.rewards["exact"] for sample in samples] == [2.0, 0.0]
    length = -first.lengths[0] / MOST
    np.testing.assert_allclose(samples[0].reward, 2.0 + length)
    one = asked(tmp_path / "one", model, records, rewards, count=1)
    assert one.record()["accuracy"] == 1.0
    nothing = found._replace(failed=1).record()
    assert np.isnan(nothing["reward"])
