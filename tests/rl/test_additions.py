"""Sums of small numbers are learnt from rewards alone, after a start that only knows the form; and
not where advantages are those of other completions."""

from pathlib import Path

import numpy as np
import pytest

from data_pipeline import prepare
from maxtrain.config import load_config
from maxtrain.model_source import load_run
from maxtrain.observe.metrics import read_metrics
from maxtrain.rl import rollouts
from maxtrain.serve.engine import Engine
from maxtrain.serve.sampling import Sampling
from maxtrain.train import main
from tests.rl import additions

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("this_process")]
MODEL = {"num_layers": 2, "embed_dim": 64, "mlp_dim": 128, "num_heads": 4, "num_kv_heads": 4}


@pytest.fixture(scope="module")
def config(tmp_path_factory, tiny_run) -> Path:
    """A config beside prompts, and a run that has been taught the form with random answers."""
    folder = tmp_path_factory.mktemp("additions")
    additions.write_prompts(folder / "prompts.jsonl")
    additions.write_texts(folder / "texts.jsonl", 4000)
    inputs = {"prompts": "--prompts", "texts": "--jsonl"}
    for name, option in inputs.items():
        path = str(folder / f"{name}.jsonl")
        assert prepare.main([str(folder / name), option, path, "--workers", "1"]) == 0
    path = tiny_run(
        folder,
        texts=1,
        steps=60,
        model=MODEL | {"max_length": 16},
        precision={"compute": "float32"},
        optimizer={"learning_rate": 3e-3},
        schedule={"name": "constant", "warmup_steps": 0},
        checkpoint_interval=0,
        data={
            "sources": {"text": {"path": str(folder / "texts"), "epochs": None}},
            "seq_length": 16,
            "batch_size": 64,
            "packing": "pad",
        },
    )
    assert main(load_config([f"config={path}", "run_name=form"])) == 0
    return path


def learn(config: Path, run_name: str, steps: int) -> list[dict]:
    """The records of a run that learns from rewards."""
    folder = config.parent
    overrides = [
        *(f"config={config}", f"run_name={run_name}", f"steps={steps}"),
        f"checkpoint.init_from={folder / 'runs' / 'form'}",
        f"data.sources.text.path={folder / 'prompts'}",
        *("data.batch_size=16", "optimizer.learning_rate=1e-3", "objective=grpo"),
        *("grpo.rewards=['tests.rl.additions:score']", "grpo.num_generations=16"),
        *("grpo.max_completion_length=8", "grpo.num_iterations=2", "grpo.slots=512"),
        *("grpo.beta=0.02", "grpo.epsilon_high=0.28"),
    ]
    assert main(load_config(overrides)) == 0
    return [r for r in read_metrics(folder / "runs" / run_name) if r["kind"] == "train"]


def mean(records: list[dict], name: str = "reward") -> float:
    return float(np.mean([record[name] for record in records]))


def greedy(run: Path) -> list[tuple[str, str]]:
    """The right answers to all prompts, and those of the model, without their end marks."""
    model, tokenizer = load_run(run)[:2]
    end = tokenizer.eod_id
    assert end is not None
    engine = Engine(model, slots=25, eager=True)
    asked = []
    for a in range(additions.MOST):
        for b in range(additions.MOST):
            ids = [end, *tokenizer.encode(f"{a}+{b}=").tolist()]
            sampling = Sampling(temperature=0.0)
            asked.append((a + b, engine.submit(ids, 8, sampling, stop_ids=[end])))
    engine.run()
    return [(f"<{right}>$", tokenizer.decode(made.ids)) for right, made in asked]


def test_sums_are_learnt_from_rewards(config):
    records = learn(config, "sums", 150)
    assert mean(records[-10:]) - mean(records[:2]) >= 0.7
    assert max(record["sampler_gap"] for record in records) < 1e-5
    answers = greedy(config.parent / "runs" / "sums")
    assert np.mean([right == made for right, made in answers]) >= 0.6
    assert np.mean([bool(additions.FORM.fullmatch(made)) for _, made in answers]) >= 0.95


def test_advantages_of_other_completions_teach_nothing(config, monkeypatch):
    rng = np.random.default_rng(0)
    own = rollouts.advantages

    def shuffled(*args, **options):
        found = own(*args, **options)
        return found._replace(values=rng.permutation(found.values))

    monkeypatch.setattr(rollouts, "advantages", shuffled)
    records = learn(config, "shuffled", 60)
    assert mean(records[-10:]) - mean(records[:2]) < 0.1
