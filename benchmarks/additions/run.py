"""A run that learns sums of small numbers from rewards, in a process of its own:
`python -m benchmarks.additions.run FOLDER STEPS SEED VARIANT` prints what it has learnt as JSON.

A model is taught the form of answers first, with random numbers in them.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.additions import task
from data_pipeline.prepare import command as prepare
from maxtrain.config import load_config
from maxtrain.inference.engine import Engine
from maxtrain.inference.sampling import Sampling
from maxtrain.observe.metrics import read_metrics
from maxtrain.rl import maker
from maxtrain.trainer.loop import main
from maxtrain.trainer.saved_run import load_run

COMMON: dict[str, Any] = {
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
    "log_interval": 1,
    "eval_interval": 0,
    "checkpoint_interval": 0,
    "observe": {
        "progress": "off",
        "trackers": [],
        "plot": False,
        "prompts": [],
        "compilation_cache": None,
        "peak_tflops": 1.0,
    },
}
SHUFFLED = "advantages shuffled"
FOUR_DEVICES = "4 devices"
TWO_PROCESSES = "2 processes"
# What each variant sets beside what all have.
VARIANTS: dict[str, list[str]] = {
    "plain": [],
    "LoRA": ["model.lora.rank=16", "optimizer.learning_rate=3e-3"],
    "one rollout ahead": ["grpo.staleness=1", "grpo.importance_sampling_cap=2.0"],
    FOUR_DEVICES: ["mesh.simulated_devices=4", "mesh.data=2", "mesh.fsdp=2"],
    TWO_PROCESSES: ["mesh.data=2", "mesh.fsdp=1"],
    # As many completions in a step, none of which is compared with others of its prompt.
    "PPO": [
        "objective=ppo",
        "model.value=true",
        "grpo.beta=0",
        "grpo.epsilon_high=null",
        "ppo.kl_coef=0.02",
        "ppo.vf_coef=0.5",
        "ppo.cliprange_value=0.5",
    ],
    SHUFFLED: [],
}
# Number of steps at the beginning and at the end whose rewards are compared.
FIRST = 2
LAST = 10


def prepared(folder: Path, name: str, option: str) -> str:
    """The data of a file of lines."""
    path = folder / f"{name}.jsonl"
    assert prepare.main([str(folder / name), option, str(path), "--workers", "1"]) == 0
    return str(folder / name)


def train(folder: Path, run_name: str, overrides: Sequence[str], processes: int = 0) -> None:
    """Train a run in `processes` processes; 0: in this one."""
    config = folder / "common.yaml"
    config.write_text(yaml.safe_dump(COMMON | {"output_dir": str(folder / "runs")}))
    words = [f"config={config}", f"run_name={run_name}", *overrides]
    if processes == 0:
        assert main(load_config(words)) == 0
        return
    if processes == 1:
        subprocess.run([sys.executable, "-m", "maxtrain.train", *words], check=True)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for number in range(processes):
        own = [
            f"mesh.coordinator=127.0.0.1:{port}",
            f"mesh.num_processes={processes}",
            f"mesh.process_id={number}",
        ]
        command = [sys.executable, "-m", "maxtrain.train", *words, *own]
        started.append(subprocess.Popen(command, env=os.environ | {"JAX_NUM_CPU_DEVICES": "1"}))
    assert [process.wait() for process in started] == [0] * processes


def teach_form(folder: Path, seed: int) -> None:
    """The run that others begin with."""
    task.write_texts(folder / "texts.jsonl", 4000)
    words = [
        f"data.sources.text.path={prepared(folder, 'texts', '--jsonl')}",
        "data.sources.text.epochs=null",
        "data.batch_size=64",
        "steps=60",
        f"seed={seed}",
        "optimizer.learning_rate=3e-3",
        "mesh.simulated_devices=1",
    ]
    train(folder, "form", words)


def learn(folder: Path, steps: int, seed: int, variant: str) -> list[dict[str, Any]]:
    """The records of a run that learns from rewards."""
    task.write_prompts(folder / "prompts.jsonl")
    words = [
        f"data.sources.text.path={prepared(folder, 'prompts', '--prompts')}",
        "data.sources.text.epochs=null",
        "data.batch_size=8",
        "data.seq_length=18",
        f"steps={steps}",
        f"seed={seed}",
        f"checkpoint.init_from={folder / 'runs' / 'form'}",
        "optimizer.learning_rate=1e-3",
        "objective=grpo",
        "grpo.rewards=['benchmarks.additions.task:score(by=\"group\")']",
        "grpo.num_generations=16",
        "grpo.max_completion_length=8",
        "grpo.slots=256",
        "grpo.num_iterations=2",
        "grpo.beta=0.02",
        "grpo.epsilon_high=0.28",
    ]
    # No key may be given twice.
    own = {word.partition("=")[0] for word in VARIANTS[variant]}
    words = [word for word in words if word.partition("=")[0] not in own]
    processes = 0
    if variant == TWO_PROCESSES:
        processes = 2
    elif variant == FOUR_DEVICES:
        # This process has begun with one device.
        processes = 1
    else:
        words.append("mesh.simulated_devices=1")
    train(folder, "sums", [*words, *VARIANTS[variant]], processes)
    return [r for r in read_metrics(folder / "runs" / "sums") if r["kind"] == "train"]


def greedy(run: Path) -> list[tuple[str, str]]:
    """The right answers to all prompts, and those of the model, without their end marks."""
    model, tokenizer = load_run(run)[:2]
    end = tokenizer.eod_id
    assert end is not None
    engine = Engine(model, slots=25, eager=True)
    requests = []
    for a in range(task.MOST):
        for b in range(task.MOST):
            ids = [end, *tokenizer.encode(f"{a}+{b}=").tolist()]
            sampling = Sampling(temperature=0.0)
            requests.append((a + b, engine.submit(ids, 8, sampling, stop_ids=[end])))
    engine.run()
    return [(f"<{right}>$", tokenizer.decode(made.ids)) for right, made in requests]


def shuffle_advantages() -> None:
    """Completions have the advantages of others."""
    rng = np.random.default_rng(0)
    own = maker.advantages

    def shuffled(*args: Any, **options: Any) -> Any:
        found = own(*args, **options)
        return found._replace(values=rng.permutation(found.values))

    maker.advantages = shuffled


def mean(records: Sequence[dict[str, Any]]) -> float:
    return float(np.mean([record["reward"] for record in records]))


def learnt(folder: Path, steps: int, seed: int, variant: str) -> dict[str, float]:
    """The reward before and after, the largest gap of the sampler, the shares of greedy answers
    that are right and that have the form, and the seconds of learning from rewards."""
    teach_form(folder, seed)
    began = time.perf_counter()
    records = learn(folder, steps, seed, variant)
    seconds = time.perf_counter() - began
    answers = greedy(folder / "runs" / "sums")
    forms = [bool(task.FORM.fullmatch(made)) for _, made in answers]
    return {
        "before": mean(records[:FIRST]),
        "after": mean(records[-LAST:]),
        "sampler_gap": max(record["sampler_gap"] for record in records),
        "right": float(np.mean([right == made for right, made in answers])),
        "form": float(np.mean(forms)),
        "seconds": seconds,
    }


if __name__ == "__main__":
    target, number, start, name = sys.argv[1:]
    if name == SHUFFLED:
        shuffle_advantages()
    print(json.dumps(learnt(Path(target), int(number), int(start), name)))
