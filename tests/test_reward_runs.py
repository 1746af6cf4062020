"""Runs that learn to score answers: what they learn, from weights of models of text, gone on with bit
for bit, with adapters, exported, and refused where they have no place."""

import json
import random
import re
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from data_pipeline import prepare
from maxtrain import evaluate, export, generate
from maxtrain.config import load_config
from maxtrain.model_source import load_run
from maxtrain.observe.metrics import read_metrics
from maxtrain.train import main
from maxtrain.weights.hf import load_pretrained
from tests.shared import TINY_MODEL, WORDS
from tests.test_distilled_runs import final_state

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("this_process")]
STEPS = 12


def train(config: Path, run_name: str, *overrides: str) -> int:
    """Exit code of a run in this process."""
    return main(load_config([f"config={config}", f"run_name={run_name}", *overrides]))


def rewards(config: Path, *overrides: str) -> list[str]:
    """Overrides of a run that begins with a model of text."""
    base = config.parent / "runs" / "base"
    start = [f"checkpoint.init_from={base}"]
    return ["objective=reward", "model.score=true", *start, *overrides]


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    """A config file beside pairs with margins, a run of text, and one that has learnt to score."""
    folder = tmp_path_factory.mktemp("rewards")
    rng = random.Random(0)
    lines = []
    for _ in range(120):
        prompt = " ".join(rng.choices(WORDS, k=3)) + "?"
        pair = {"prompt": prompt, "chosen": " yes", "rejected": f" no {rng.choice(WORDS)}"}
        lines.append(json.dumps(pair | {"margin": 0.5}))
    (folder / "pairs.jsonl").write_text("\n".join(lines))
    options = ["--preferences", f"{folder}/pairs.jsonl", "--tokenizer", "bytes", "--margin"]
    options += ["--holdout", "0.2", "--workers", "1"]
    assert prepare.main([str(folder / "data"), *options]) == 0
    values = {
        "output_dir": str(folder / "runs"),
        "log_interval": 1,
        "steps": STEPS,
        "checkpoint_interval": 4,
        "model": TINY_MODEL | {"max_length": 96},
        "data": {
            "sources": {"pairs": {"path": str(folder / "data" / "train"), "epochs": None}},
            "seq_length": 96,
            "batch_size": 8,
            "packing": "bins",
        },
        "eval": {"sets": {"heldout": {"path": str(folder / "data" / "eval")}}},
        "optimizer": {"learning_rate": 3e-3},
        "schedule": {"warmup_steps": 2},
        "precision": {"compute": "float32"},
        "observe": {
            "progress": "plain",
            "tensorboard": False,
            "plot": False,
            "peak_tflops": 1.0,
            "compilation_cache": None,
        },
    }
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(values))
    assert train(path, "base", "steps=2") == 0
    assert train(path, "scores", *rewards(path, "reward.margin=true", "eval_at_start=true")) == 0
    return path


def evaluations(folder: Path) -> list[dict]:
    return [record for record in read_metrics(folder) if record["kind"] == "eval"]


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
    more = ["reward.centre_weight=0.01", "steps=2", "eval_at_start=true"]
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
