"""Sums of small numbers, learnt from rewards alone: what is gained, over seeds and set-ups.

    python -m benchmarks.additions --write

Three seeds of the plain run; one each with adapters, one rollout ahead, on four devices, on two
processes and by PPO; and one whose advantages are those of other completions, which must learn nothing. A run
fails if it gains less than it should.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from benchmarks.additions.run import SHUFFLED, VARIANTS
from benchmarks.one_core import processor

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "additions.md"
STEPS = 150
# What a run must reach; the gain is of the mean reward.
GAIN = 0.7
RIGHT = 0.6
FORM = 0.95
GAIN_SHUFFLED = 0.1
SECONDS = 120.0


def run(steps: int, seed: int, variant: str) -> dict[str, float]:
    """Return what a run of its own process says that it has learnt.

    Raises:
        RuntimeError: it failed; with its output.
    """
    # Programs that run for long are worth their compilation.
    environment = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
    with tempfile.TemporaryDirectory(prefix="additions-") as folder:
        words = [folder, str(steps), str(seed), variant]
        command = [sys.executable, "-m", "benchmarks.additions.run", *words]
        result = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
    if result.returncode:
        raise RuntimeError(result.stdout + result.stderr)
    return json.loads(result.stdout.splitlines()[-1])


def problems(variant: str, found: dict[str, float]) -> list[str]:
    """Return what a run has not reached."""
    gain = found["after"] - found["before"]
    if variant == SHUFFLED:
        if gain < GAIN_SHUFFLED:
            return []
        return [f"a gain of {gain:.2f}, where nothing can be learnt"]
    missed = []
    if gain < GAIN:
        missed.append(f"a gain of {gain:.2f}, not {GAIN}")
    if found["right"] < RIGHT:
        missed.append(f"{found['right']:.0%} right, not {RIGHT:.0%}")
    if found["form"] < FORM:
        missed.append(f"{found['form']:.0%} with the form, not {FORM:.0%}")
    return missed


def row(variant: str, seed: int, found: dict[str, float]) -> str:
    cells = [
        variant,
        str(seed),
        f"{found['before']:.2f}",
        f"{found['after']:.2f}",
        f"{found['after'] - found['before']:.2f}",
        f"{found['right']:.0%}",
        f"{found['form']:.0%}",
        f"{found['sampler_gap']:.1e}",
        f"{found['seconds']:.0f}",
    ]
    return "| " + " | ".join(cells) + " |"


def main(argv: list[str] | None = None) -> int:
    """Runs and prints the table; 1: a run has not reached what it must."""
    parser = argparse.ArgumentParser("python -m benchmarks.additions", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--only", choices=list(VARIANTS), action="append", help="these variants")
    parser.add_argument("--seeds", type=int, default=3, help="of the plain run")
    parser.add_argument("--write", action="store_true", help=f"also to {RESULTS.name}")
    args = parser.parse_args(argv)
    load, _, _ = os.getloadavg()
    lines = [
        "| run | seed | reward before | after | gain | right | form | gap of the sampler | s |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    print("\n".join(lines), flush=True)
    failed = []
    for variant in args.only or VARIANTS:
        seeds = 1
        if variant == "plain":
            seeds = args.seeds
        for seed in range(seeds):
            found = run(args.steps, seed, variant)
            lines.append(row(variant, seed, found))
            print(lines[-1], flush=True)
            failed += [f"{variant}, seed {seed}: {what}" for what in problems(variant, found)]
    for what in failed:
        print(f"failed: {what}", file=sys.stderr)
    if args.write:
        RESULTS.write_text(report(lines, load, args.steps))
    return int(bool(failed))


def report(lines: list[str], load: float, steps: int) -> str:
    about = (
        f"`python -m benchmarks.additions --write` on {processor()}, {os.cpu_count()} cores, load "
        f"{load:.1f} before; Python {platform.python_version()}, jax {version('jax')}."
    )
    what = (
        f"A model of 2 layers of 64 learns a + b for a and b from 0 to 4 by GRPO: 25 prompts, 8 a "
        f"step with 16 completions each, {steps} steps, 2 iterations, beta 0.02. Before, 60 steps "
        "have taught it the form of answers, half of them broken, with random sums. Reward: 0.1 "
        'for a "<", 0.4 for the form, 1 for the sum; means of the first two and the last ten '
        "steps. Right, form: of the likeliest answers to all prompts. Seconds: of learning from "
        "rewards, with start and compilation."
    )
    return "\n\n".join(["# Sums, learnt from rewards", about, what, "\n".join(lines)]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
