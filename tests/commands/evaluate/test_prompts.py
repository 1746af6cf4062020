"""Runs that learn from rewards: sets of prompts are evaluated by completions, the same prompts are
sampled over time, and `maxtrain evaluate` gives what the run has on record."""

import json
import shutil
from pathlib import Path

import pytest

from benchmarks.additions import task
from data_pipeline.prepare import command as prepare
from maxtrain.commands.evaluate import command as evaluate
from maxtrain.config import load_config
from maxtrain.observe.metrics import read_metrics
from maxtrain.observe.samples import read_samples
from maxtrain.trainer.loop import main

pytestmark = pytest.mark.usefixtures("this_process")
STEPS = 3


@pytest.fixture(scope="module")
def config(tmp_path_factory, tiny_run) -> Path:
    """A config beside prompts, of which some are held out."""
    folder = tmp_path_factory.mktemp("answered")
    task.write_prompts(folder / "prompts.jsonl")
    prompts = ["--prompts", str(folder / "prompts.jsonl"), "--workers", "1", "--holdout", "0.3"]
    assert prepare.main([str(folder / "prompts"), *prompts]) == 0
    return tiny_run(
        folder,
        "--holdout",
        "0.2",
        texts=10,
        steps=STEPS,
        checkpoint_interval=1,
        checkpoint={"keep": STEPS},
        objective="grpo",
        precision={"compute": "float32"},
        optimizer={"learning_rate": 1e-2},
        schedule={"warmup_steps": 0},
        data={
            "sources": {"text": {"path": str(folder / "prompts/train"), "epochs": None}},
            "seq_length": 16,
            "on_long": "truncate",
            "batch_size": 8,
            "packing": "pad",
        },
        eval={
            "sets": {
                "text": {"path": str(folder / "data/eval")},
                "held": {"path": str(folder / "prompts/eval")},
            }
        },
        eval_at_start=True,
        observe={"sample_interval": 2, "num_samples": 2, "plot": True},
        grpo={
            "rewards": ["exact", "length(max_tokens=6)"],
            "num_generations": 4,
            "max_completion_length": 6,
        },
    )


def train(config: Path, run_name: str, *overrides: str) -> int:
    """Exit code of a run in this process; it has rewards that need no other process."""
    return main(load_config([f"config={config}", f"run_name={run_name}", *overrides]))


@pytest.fixture(scope="module")
def straight(config) -> Path:
    """A run that nobody stopped."""
    assert train(config, "straight") == 0
    return config.parent / "runs" / "straight"


def evaluations(run: Path) -> list[dict]:
    return [record for record in read_metrics(run) if record["kind"] == "eval"]


@pytest.mark.long
def test_completions_are_evaluated_and_kept_over_time(straight):
    found = evaluations(straight)
    order = [(record["step"], record["set"]) for record in found]
    assert order == [(0, "held"), (0, "text"), (STEPS, "held"), (STEPS, "text")]
    held = [record for record in found if record["set"] == "held"]
    text = [record for record in found if record["set"] == "text"]
    assert all("nll" in record and "reward" not in record for record in text)
    for record in held:
        assert "nll" not in record
        assert record["accuracy"] == record["reward/exact"]
        assert record["reward/length"] == pytest.approx(-record["completion_length"] / 6)
        assert record["reward"] == pytest.approx(record["reward/exact"] + record["reward/length"])
        assert record["reward_outcomes/exact/ok"] == record["prompts"] > 2
    # A higher reward is better.
    best = max(held, key=lambda record: record["reward"])
    assert held[-1]["best_step"] == best["step"]
    samples = read_samples(straight)
    places = [(taken.step, taken.sample.set, taken.sample.number) for taken in samples]
    # At the first and the last step they are those of the evaluation.
    assert places == [(step, "held", number) for step in (0, 2, STEPS) for number in (0, 1)]
    assert samples[0].sample.prompt == samples[2].sample.prompt
    assert (straight / "curves.png").stat().st_size > 1000


@pytest.mark.long
def test_a_run_that_was_stopped_has_the_same_on_record(config, straight, capfd):
    """It was killed after the checkpoint of a step that is sampled, before it was sampled."""
    run = config.parent / "runs" / "stopped"
    shutil.copytree(straight, run)
    shutil.rmtree(run / "checkpoints" / f"{STEPS:08d}")
    lines = (run / "samples.jsonl").read_text().splitlines(keepends=True)
    (run / "samples.jsonl").write_text("".join(lines[:3]) + lines[3][:20])
    capfd.readouterr()
    assert train(config, "stopped") == 0
    assert read_samples(run) == read_samples(straight)
    assert evaluations(run) == evaluations(straight)
    told = capfd.readouterr().out
    (row,) = [line for line in told.splitlines() if f"held, step {STEPS}" in line]
    assert "%" in row


@pytest.mark.long
def test_the_command_gives_what_the_run_has_on_record(straight, monkeypatch, capsys):
    monkeypatch.setattr(evaluate, "start", lambda mesh, cache: None)
    capsys.readouterr()
    assert evaluate.main([str(straight), "--show", "1", "--json"]) == 0
    sets = json.loads(capsys.readouterr().out)["sets"]
    before = {record["set"]: record for record in evaluations(straight)[-2:]}
    held = sets["held"]
    (sample,) = held.pop("samples")
    assert sample["texts"]["completion"] == read_samples(straight)[-2].sample.completion
    assert held.pop("seconds") > 0
    assert held == {name: before["held"][name] for name in held}
    assert sets["text"]["nll"] == pytest.approx(before["text"]["nll"], rel=1e-6)
    # Other rewards, and no run that has some.
    assert evaluate.main([str(straight), "--reward", "length(max_tokens=3)", "--step", "1"]) == 0
    told = capsys.readouterr().out
    assert "reward_outcomes/length/ok" in told and "exact" not in told


@pytest.mark.long
def test_what_can_not_work_is_refused(config, straight, monkeypatch, capsys):
    code = train(config, "refused", "eval.seq_length=8", "grpo.max_completion_length=6")
    assert code == 78
    assert "Set eval.seq_length to at least 11" in capsys.readouterr().err
    monkeypatch.setattr(evaluate, "start", lambda mesh, cache: None)
    text = f"text={config.parent / 'data/eval'}"
    assert evaluate.main([str(straight), "--set", text, "--reward", "exact"]) == 64
    assert "Make one with `prepare --prompts`" in capsys.readouterr().err
    assert evaluate.main([str(straight), "--text", "x", "--reward", "exact"]) == 64
    assert "--reward: is of evaluation sets" in capsys.readouterr().err
