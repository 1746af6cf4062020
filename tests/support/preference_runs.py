"""Tiny runs that learn from preferences, in this process: their data, their config, what is
recorded."""

import json
import random
from pathlib import Path

import pytest
import yaml

from data_pipeline.prepare import command as prepare
from maxtrain import cli
from maxtrain.config import load_config
from maxtrain.observe.metrics import read_metrics
from maxtrain.trainer.loop import main
from tests.support.shared import TINY_MODEL, WORDS

STEPS = 12


def prepared_pairs(folder: Path) -> Path:
    """A config file beside pairs with margins, of which the chosen answers are alike, and beside
    held-out ones."""
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
        "eval_at_start": True,
        "optimizer": {"learning_rate": 3e-3},
        "schedule": {"warmup_steps": 2},
        "precision": {"compute": "float32"},
        "observe": {
            "progress": "plain",
            "trackers": [],
            "plot": False,
            "peak_tflops": 1.0,
            "compilation_cache": None,
        },
    }
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def prepared_labels(folder: Path) -> list[str]:
    """Overrides of a run that reads single answers, half of them good, in place of the pairs."""
    rng = random.Random(1)
    lines = []
    for number in range(160):
        prompt = " ".join(rng.choices(WORDS, k=3)) + "?"
        is_good = number % 2 == 0
        completion = " yes" if is_good else f" no {rng.choice(WORDS)}"
        lines.append(json.dumps({"prompt": prompt, "completion": completion, "label": is_good}))
    (folder / "labelled.jsonl").write_text("\n".join(lines))
    options = ["--preferences", f"{folder}/labelled.jsonl", "--tokenizer", "bytes"]
    options += ["--holdout", "0.2", "--workers", "1"]
    assert prepare.main([str(folder / "labelled"), *options]) == 0
    return [
        f"data.sources.pairs.path={folder / 'labelled' / 'train'}",
        f"eval.sets.heldout.path={folder / 'labelled' / 'eval'}",
    ]


def train(config: Path, run_name: str, *overrides: str) -> int:
    """Exit code of a run in this process."""
    return main(load_config([f"config={config}", f"run_name={run_name}", *overrides]))


def evaluations(folder: Path) -> list[dict]:
    """The records of evaluations of a run."""
    return [record for record in read_metrics(folder) if record["kind"] == "eval"]


def planned(folder: Path, step: int, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the output of `plan` for a step of a run."""
    capsys.readouterr()
    assert cli.main(["plan", str(folder), "--step", str(step)]) == 0
    return capsys.readouterr().out


def assert_planned_batches(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fail if `plan` shows another batch than the run has on record of a step."""
    recorded = [record for record in read_metrics(folder) if record["kind"] == "train"]
    assert recorded
    for record in (recorded[0], recorded[-1]):
        shown = planned(folder, record["step"], capsys)
        assert f"  batch {record['batch']}\n" in shown
        assert shown.endswith("its record of this step names the same batch.\n")
