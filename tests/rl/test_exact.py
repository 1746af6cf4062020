"""With determinism=full, the sampler's log-probabilities are those of training bit for bit, and its
tokens those that training draws."""

from pathlib import Path

import pytest

from data_pipeline import prepare
from maxtrain.config import load_config
from maxtrain.observe.metrics import read_metrics
from maxtrain.train import main
from tests.rl import additions

STEPS = 4


@pytest.fixture(scope="module")
def config(tmp_path_factory, tiny_run) -> Path:
    """A config file of runs whose sampler is exact."""
    folder = tmp_path_factory.mktemp("exact")
    additions.write_prompts(folder / "prompts.jsonl")
    prompts = ["--prompts", str(folder / "prompts.jsonl"), "--workers", "1"]
    assert prepare.main([str(folder / "prompts"), *prompts]) == 0
    return tiny_run(
        folder,
        texts=1,
        steps=STEPS,
        determinism="full",
        objective="grpo",
        precision={"compute": "float32"},
        optimizer={"learning_rate": 1e-2, "accumulation": 2},
        schedule={"warmup_steps": 0},
        data={
            "sources": {"text": {"path": str(folder / "prompts"), "epochs": None}},
            "seq_length": 32,
            "batch_size": 16,
            "packing": "pad",
        },
        grpo={
            "rewards": ["length(max_tokens=6)"],
            "num_generations": 2,
            "max_completion_length": 6,
            "num_iterations": 2,
        },
    )


@pytest.mark.usefixtures("this_process")
def test_there_is_no_gap_between_sampler_and_training(config):
    assert main(load_config([f"config={config}", "run_name=exact"])) == 0
    lines = [
        record
        for record in read_metrics(config.parent / "runs" / "exact")
        if record["kind"] == "train"
    ]
    assert [line["sampler_gap"] for line in lines] == [0.0] * STEPS
    assert [line["ratio"] == 1.0 for line in lines] == [True, False] * (STEPS // 2)
    for line in lines[::2]:
        assert line["clipped_low"] == line["clipped_high"] == 0.0
