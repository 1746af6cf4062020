"""Tokens per second of rollouts and of whole steps of GRPO, beside TRL on the same cores.

    python -m benchmarks.rl_speed [--other-python PYTHON] [--write]

Both stacks train a model of the same shape in float32, with random weights, on prompts of the same
number of tokens, with completions of the same length: no token ends one but the end mark, which
random weights seldom choose. A step makes completions, rewards them, and updates all weights with
AdamW; ours also scores completions by the training forward and stores them. The stacks take turns,
a process for each turn, whose first step is left out: it compiles.
"""

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
import yaml

from benchmarks.one_core import processor
from maxtrain.observe.metrics import read_metrics

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "rl_speed.md"
VOCABULARY = 8192
END = "<|endoftext|>"
# In the numbers that end in 1 or 3, which some completions have at their end.
REGEX = "[13]$"
LEARNING_RATE = 1e-5


class BenchmarkSize(NamedTuple):
    """Sizes of a measurement.

    Attributes:
        layers, width, inner, heads, kv_heads: the shape of the model.
        prompt: tokens of a prompt, without the end mark that ours begins with.
        tokens: of a completion.
        prompts, samples: of a step, and completions of each.
        steps: of a turn, of which the first is left out.
    """

    layers: int = 8
    width: int = 512
    inner: int = 1408
    heads: int = 8
    kv_heads: int = 2
    prompt: int = 63
    tokens: int = 128
    prompts: int = 8
    samples: int = 8
    steps: int = 3


class SpeedResult(NamedTuple):
    """Tokens of completions per second, of each step but the first: while they were sampled, and of
    the whole step; and other facts about the turn."""

    sampling: list[float]
    step: list[float]
    about: dict[str, Any]


def write_inputs(folder: Path, size: BenchmarkSize) -> None:
    """A tokenizer of whole words, prompts, and what the other stack has to know."""
    words = {END: 0} | {f"w{number}": number for number in range(1, VOCABULARY)}
    model = tokenizers.models.WordLevel(words, unk_token=END)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([END])
    tokenizer.save(str(folder / "tokenizer.json"))
    rng = random.Random(0)
    lines = []
    for _ in range(16 * size.prompts):
        numbers = [rng.randrange(1, VOCABULARY) for _ in range(size.prompt)]
        lines.append(json.dumps({"prompt": " ".join(f"w{number}" for number in numbers)}) + "\n")
    (folder / "prompts.jsonl").write_text("".join(lines))
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": size.width,
        "intermediate_size": size.inner,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    }
    settings = size._asdict() | {"end": END, "regex": REGEX, "learning_rate": LEARNING_RATE}
    (folder / "rl_speed.json").write_text(json.dumps(settings | {"shape": shape}))
    words = ["--prompts", str(folder / "prompts.jsonl"), "--workers", "1"]
    tokens = ["--tokenizer", str(folder / "tokenizer.json")]
    _run([sys.executable, "-m", "data_pipeline.prepare", str(folder / "data"), *words, *tokens])
    (folder / "ours.yaml").write_text(yaml.safe_dump(our_config(folder, size)))


def our_config(folder: Path, size: BenchmarkSize) -> dict[str, Any]:
    """The config of our run."""
    return {
        "output_dir": str(folder / "runs"),
        "steps": size.steps,
        "log_interval": 1,
        "eval_interval": 0,
        "checkpoint_interval": 0,
        "model": {
            "family": "qwen2",
            "vocab_size": VOCABULARY,
            "num_layers": size.layers,
            "embed_dim": size.width,
            "mlp_dim": size.inner,
            "num_heads": size.heads,
            "num_kv_heads": size.kv_heads,
            "tie_embeddings": True,
            "max_length": 512,
            "scan_layers": False,
        },
        "precision": {"params": "float32", "compute": "float32"},
        "data": {
            "sources": {"prompts": {"path": str(folder / "data"), "epochs": None}},
            "seq_length": size.prompt + 1 + size.tokens,
            "batch_size": size.prompts,
            "packing": "pad",
        },
        "objective": "grpo",
        "grpo": {
            "rewards": [f"pattern(regex={REGEX!r}, where='anywhere')"],
            "num_generations": size.samples,
            "max_completion_length": size.tokens,
            "slots": size.prompts * size.samples,
        },
        "optimizer": {"learning_rate": LEARNING_RATE},
        "schedule": {"name": "constant", "warmup_steps": 0},
        "mesh": {"simulated_devices": 1},
        "observe": {
            "progress": "off",
            "trackers": [],
            "plot": False,
            "prompts": [],
            "num_samples": 0,
            "peak_tflops": 1.0,
        },
    }


def our_turn(folder: Path, size: BenchmarkSize, number: int) -> SpeedResult:
    """A run of ours."""
    name = f"turn-{number}"
    words = [f"config={folder / 'ours.yaml'}", f"run_name={name}"]
    _run([sys.executable, "-m", "maxtrain.train", *words])
    records = [r for r in read_metrics(folder / "runs" / name) if r["kind"] == "train"]
    completions = size.prompts * size.samples
    sampling = []
    whole = []
    for record in records[1:]:
        tokens = completions * record["completion_length"]
        sampling.append(tokens / record["sampling_seconds"])
        parts = ("rollout_seconds", "step_seconds", "data_wait_seconds")
        whole.append(tokens / sum(record[part] for part in parts))
    length = statistics.mean(record["completion_length"] for record in records)
    return SpeedResult(sampling, whole, {"length": length})


def their_turn(folder: Path, size: BenchmarkSize, python: str) -> SpeedResult:
    """A run of TRL."""
    script = Path(__file__).with_name("trl_grpo.py")
    said = json.loads(_run([python, str(script), str(folder)]).splitlines()[-1])
    tokens = said["tokens"]
    sampling = [count / took for count, took in zip(tokens[1:], said["generating"][1:])]
    whole = [count / took for count, took in zip(tokens[1:], said["steps"][1:])]
    length = statistics.mean(tokens) / size.prompts / size.samples
    return SpeedResult(sampling, whole, said | {"length": length})


def _run(command: Sequence[str]) -> str:
    """Return the output of a command. RuntimeError: it failed."""
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{command[1:3]}: {result.stdout[-2000:]}{result.stderr[-4000:]}")
    return result.stdout


def row(name: str, turns: Sequence[SpeedResult]) -> str:
    """A line of the table: medians over all steps, and the least and most."""
    cells = [name]
    for rates in (
        [rate for turn in turns for rate in turn.sampling],
        [rate for turn in turns for rate in turn.step],
    ):
        cells.append(f"{statistics.median(rates):,.0f}")
        cells.append(f"{min(rates):,.0f} to {max(rates):,.0f}")
    cells.append(f"{statistics.mean(turn.about['length'] for turn in turns):.1f}")
    return f"| {' | '.join(cells)} |"


def has_trl(python: str | None) -> bool:
    """Return whether that Python can import TRL."""
    if python is None:
        return False
    command = [python, "-c", "import torch, transformers, trl, datasets"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def measure(size: BenchmarkSize, turns: int, python: str | None) -> list[str]:
    """Return the table, and the lines below it."""
    ours = []
    theirs = []
    loads = []
    beside = has_trl(python)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder, size)
        for number in range(turns):
            loads.append(os.getloadavg()[0])
            ours.append(our_turn(folder, size, number))
            print(f"ours: {ours[-1]}", file=sys.stderr, flush=True)
            if beside:
                assert python is not None
                theirs.append(their_turn(folder, size, python))
                print(f"TRL: {theirs[-1]}", file=sys.stderr, flush=True)
    lines = [
        "| stack | rollouts, tokens/s | least to most | whole step, tokens/s | least to most "
        "| tokens of a completion |",
        "|---|--:|--:|--:|--:|--:|",
        row("maxtrain", ours),
    ]
    said = f"Load before each turn: {', '.join(f'{load:.1f}' for load in loads)}."
    if beside:
        lines.append(row("transformers' generate, TRL's GRPOTrainer", theirs))
        about = theirs[0].about
        packages = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
        said = f"{about['parameters'] / 1e6:.1f} million parameters; {packages}. {said}"
    else:
        lines.append("| TRL | not measured | | | | |")
        said = f"No Python with torch, transformers and TRL was named (--other-python). {said}"
    return [*lines, "", said]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.rl_speed", description=__doc__)
    parser.add_argument("--other-python", metavar="PYTHON", help="that has torch and TRL")
    parser.add_argument("--turns", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--write", action="store_true", help=f"write results/{RESULTS.name}")
    for name, value in BenchmarkSize()._asdict().items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=int, default=value, help="(default: %(default)s)")
    args = parser.parse_args(argv)
    size = BenchmarkSize(**{name: getattr(args, name) for name in BenchmarkSize._fields})
    lines = measure(size, args.turns, args.other_python)
    print("\n".join(lines))
    if args.write:
        day = time.strftime("%Y-%m-%d", time.gmtime())
        RESULTS.write_text(
            "# Steps of GRPO\n\n"
            "`python -m benchmarks.rl_speed --other-python PYTHON --write` on "
            f"{os.cpu_count()} cores of {processor()}, Python {platform.python_version()}, jax "
            f"{version('jax')}, {day}. A Qwen2 of {size.layers} layers of {size.width}, vocabulary "
            f"{VOCABULARY:,}, float32; {size.prompts} prompts of {size.prompt + 1} tokens with "
            f"{size.samples} completions of {size.tokens} each, no divergence, AdamW. Medians over "
            f"{args.turns} turns of {size.steps - 1} steps; the stacks took turns.\n\n"
            + "\n".join(lines)
            + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
