"""A run that learns sums of small numbers from rewards, in a process of its own with one device:
`python -m tests.rl.additions_run FOLDER STEPS [shuffled|ppo]` prints what it has learnt as JSON.

A model is taught the form of answers first, with random numbers in them.
"""

import json
import sys
from pathlib import Path

import numpy as np
import yaml

from data_pipeline import prepare
from maxtrain.config import load_config
from maxtrain.model_source import load_run
from maxtrain.observe.metrics import read_metrics
from maxtrain.rl import maker
from maxtrain.serve.engine import Engine
from maxtrain.serve.sampling import Sampling
from maxtrain.train import main
from tests.rl import additions

COMMON = {
    "model": {
        "num_layers": 2,
        "embed_dim": 64,
        "mlp_dim": 128,
        "num_heads": 4,
        "num_kv_heads": 4,
        "max_length": 18,
    },
    "data": {"seq_length": 16, "packing": "pad"},
    "precision": {"compute": "float32"},
    "schedule": {"name": "constant", "warmup_steps": 0},
    "mesh": {"simulated_devices": 1},
    "log_interval": 1,
    "eval_interval": 0,
    "checkpoint_interval": 0,
    "observe": {
        "progress": "off",
        "tensorboard": False,
        "plot": False,
        "prompts": [],
        "compilation_cache": None,
        "peak_tflops": 1.0,
    },
}


def prepared(folder: Path, name: str, option: str) -> str:
    path = folder / f"{name}.jsonl"
    assert prepare.main([str(folder / name), option, str(path), "--workers", "1"]) == 0
    return str(folder / name)


def train(folder: Path, run_name: str, *overrides: str) -> list[dict]:
    """The records of a run."""
    config = folder / "common.yaml"
    config.write_text(yaml.safe_dump(COMMON | {"output_dir": str(folder / "runs")}))
    assert main(load_config([f"config={config}", f"run_name={run_name}", *overrides])) == 0
    return [r for r in read_metrics(folder / "runs" / run_name) if r["kind"] == "train"]


def teach_form(folder: Path) -> None:
    additions.write_texts(folder / "texts.jsonl", 4000)
    train(
        folder,
        "form",
        f"data.sources.text.path={prepared(folder, 'texts', '--jsonl')}",
        *("data.sources.text.epochs=null", "data.batch_size=64", "steps=60"),
        "optimizer.learning_rate=3e-3",
    )


GRPO = ["objective=grpo", "grpo.num_generations=16", "grpo.beta=0.02", "grpo.epsilon_high=0.28"]
# As many completions in a step, none of which is compared with others of its prompt.
PPO = ["objective=ppo", "model.value=true", "grpo.num_generations=16", "ppo.kl_coef=0.02"]
PPO += ["ppo.vf_coef=0.5", "ppo.cliprange_value=0.5"]


def learn(folder: Path, steps: int, objective: list[str]) -> list[dict]:
    """The records of a run that learns from rewards."""
    additions.write_prompts(folder / "prompts.jsonl")
    return train(
        folder,
        "sums",
        f"data.sources.text.path={prepared(folder, 'prompts', '--prompts')}",
        *("data.sources.text.epochs=null", "data.batch_size=8", f"steps={steps}"),
        *(f"checkpoint.init_from={folder / 'runs' / 'form'}", "optimizer.learning_rate=1e-3"),
        *("grpo.rewards=['tests.rl.additions:score(by=\"group\")']", "grpo.num_iterations=2"),
        *("grpo.max_completion_length=8", "grpo.slots=256", "data.seq_length=18"),
        *objective,
    )


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


def shuffle_advantages() -> None:
    """Completions have the advantages of others."""
    rng = np.random.default_rng(0)
    own = maker.advantages

    def shuffled(*args, **options):
        found = own(*args, **options)
        return found._replace(values=rng.permutation(found.values))

    maker.advantages = shuffled


def mean(records: list[dict]) -> float:
    return float(np.mean([record["reward"] for record in records]))


def learnt(folder: Path, steps: int, objective: list[str]) -> dict:
    """How much reward was gained, the largest gap of a sampler, and of greedy answers the shares
    that are right, and that have the form."""
    teach_form(folder)
    records = learn(folder, steps, objective)
    answers = greedy(folder / "runs" / "sums")
    forms = [bool(additions.FORM.fullmatch(made)) for _, made in answers]
    found = {
        "gain": mean(records[-10:]) - mean(records[:2]),
        "sampler_gap": max(record["sampler_gap"] for record in records),
        "right": float(np.mean([right == made for right, made in answers])),
        "form": float(np.mean(forms)),
    }
    if objective is PPO:
        explained = [record.get("explained_variance", 0.0) for record in records[-10:]]
        found["explained_variance"] = float(np.mean(explained))
    return found


if __name__ == "__main__":
    target, number, *options = sys.argv[1:]
    if "shuffled" in options:
        shuffle_advantages()
    chosen = GRPO
    if "ppo" in options:
        chosen = PPO
    print(json.dumps(learnt(Path(target), int(number), chosen)))
