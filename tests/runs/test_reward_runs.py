"""Runs that learn to score answers: what they learn, from weights of models of text, gone on with bit
for bit, with adapters, exported, and refused where they have no place."""

import json
import re
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from maxtrain.commands import generate
from maxtrain.commands.evaluate import command as evaluate
from maxtrain.commands.export import command as export
from maxtrain.config import load_config
from maxtrain.trainer.saved_run import load_run
from maxtrain.weights.hf import load_pretrained
from tests.runs.test_distilled_runs import final_state
from tests.support.preference_runs import STEPS, evaluations, prepared_pairs, train

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("this_process")]


def rewards(config: Path, *overrides: str) -> list[str]:
    """Overrides of a run that begins with a model of text."""
    base = config.parent / "runs" / "base"
    start = [f"checkpoint.init_from={base}"]
    return ["objective=reward", "model.score=true", *start, *overrides]


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    """A config file beside pairs with margins, a run of text, and one that has learnt to score."""
    path = prepared_pairs(tmp_path_factory.mktemp("rewards"))
    assert train(path, "base", "steps=2", "eval_at_start=false") == 0
    assert train(path, "scores", *rewards(path, "reward.margin=true")) == 0
    return path


def test_chosen_answers_get_the_higher_scores_and_it_is_on_record(config):
    before, after = evaluations(config.parent / "runs" / "scores")
    assert after["preference"] < 0.7 * before["preference"]
    assert after["reward_accuracy"] > 0.9
    assert after["reward_margin"] > before["reward_margin"]
    assert after["tokens"] > 0
    assert "nll" not in after
    assert after["best_step"] == STEPS


def test_a_resumed_run_is_as_never_stopped(config):
    folder = config.parent / "runs" / "scores"
    expected = final_state(folder)
    shutil.rmtree(folder / "checkpoints" / f"{STEPS:08d}")
    assert train(config, "scores", *rewards(config, "reward.margin=true")) == 0
    assert final_state(folder) == expected


def test_what_is_exported_is_read_back_with_its_score_and_goes_on(config, capsys, tmp_path):
    run = config.parent / "runs" / "scores"
    out = tmp_path / "scores"
    assert export.main([str(run), str(out)]) == 0
    assert "AutoModelForSequenceClassification" in capsys.readouterr().out
    there = json.loads((out / "config.json").read_text())
    assert there["architectures"] == ["LlamaForSequenceClassification"]
    assert list(there["id2label"]) == ["0"]
    model, _ = load_pretrained(out)
    ours, _ = load_run(run)
    tokens = jnp.arange(10, dtype=jnp.int32)[None]
    found = model(tokens)
    assert found.shape == (1, 10, 1)
    np.testing.assert_allclose(found, ours(tokens), rtol=1e-5)
    start = ["objective=reward", "model.score=true", f"checkpoint.init_from={out}"]
    more = ["reward.centre_weight=0.01", "steps=2"]
    assert train(config, "more", *start, *more) == 0
    first, _ = evaluations(config.parent / "runs" / "more")
    assert first["reward_accuracy"] > 0.9


@pytest.mark.slow
def test_adapters_train_with_the_score(config):
    overrides = rewards(config, "model.lora.rank=2", "optimizer.learning_rate=0.02")
    assert train(config, "adapters", *overrides) == 0
    assert evaluations(config.parent / "runs" / "adapters")[-1]["reward_accuracy"] > 0.9
    assert export.main([str(config.parent / "runs" / "adapters"), str(config.parent / "out")]) == 0


def test_a_model_without_logits_is_refused_where_these_are_needed(config, capfd, tmp_path):
    run = str(config.parent / "runs" / "scores")
    assert generate.main([run, "--prompt", "a"]) != 0
    assert "is a reward model" in capfd.readouterr().err
    assert evaluate.main([run]) != 0
    assert "is a reward model" in capfd.readouterr().err
    assert export.main([run, str(tmp_path / "x.gguf"), "--format", "gguf"]) != 0
    assert "has no place for the score" in capfd.readouterr().err
    asked = ["objective=dpo", f"checkpoint.init_from={run}"]
    assert train(config, "refused", *asked) == 78
    assert "is a reward model, whose score can't be compared" in capfd.readouterr().err
    assert train(config, "refused", f"checkpoint.init_from={run}") == 78
    assert "model.score=False must be True" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["objective=reward"], "Set model.score=true"),
        (["model.score=true"], "model.score=true is not used with objective=next_token"),
        (["objective=reward", "model.score=true", "loss.adversarial=1"], "loss.adversarial=1.0 is"),
        (["objective=reward", "model.score=true", "observe.prompts=[a]"], "writes no text"),
        (["objective=reward", "model.score=true", "data.packing=stream"], "needs whole answers"),
    ],
)
def test_what_does_not_go_together_is_refused(config, overrides, message):
    with pytest.raises(Exception, match=re.escape(message)):
        load_config([f"config={config}", *overrides])
