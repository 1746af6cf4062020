"""A model that learns to answer word problems: first from worked answers, then from rewards.

    python -m benchmarks.word_problems --write

It runs the commands of "A run from end to end" in docs/posttraining.md one after the other, says
how many held-out questions are answered right before and after, and fails if rewards have not
taught enough. With --write, the table and the picture are those of the documents.
"""

import argparse
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from benchmarks.one_core import processor
from benchmarks.word_problems.picture import draw
from benchmarks.word_problems.run import ALL_KINDS, COMMANDS, GRPO, ROOT, ExperimentOutcome, run_all

RESULTS = ROOT / "benchmarks" / "results" / "word_problems.md"
PICTURE = ROOT / "docs" / "word_problems.png"
# What must be gained, as a share of all held-out questions: three standard errors.
GAIN = 0.06


def gain(outcome: ExperimentOutcome) -> float:
    """Return how many more of the held-out questions are answered right, as a share."""
    return outcome.after[ALL_KINDS].share - outcome.before[ALL_KINDS].share


def report(outcome: ExperimentOutcome, load: float) -> str:
    """The file of results."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("jax", "flax", "numpy"))
    questions = outcome.before[ALL_KINDS].questions
    lines = [
        "# Word problems, learnt from worked answers and from rewards",
        "",
        f"`python -m benchmarks.word_problems --write` on {processor()}, {os.cpu_count()} cores, "
        f"load {load:.1f} before; Python {platform.python_version()}, {packages}.",
        "",
        f"Right answers to {questions} held-out questions, 0 shots: the system message and the "
        "question, completed by the likeliest tokens. An answer is right if the number in the last "
        "`<answer>` is the result (`gsm8k.correctness`). ± is the standard error.",
        "",
        "| kind | questions | before, after SFT | after GRPO |",
        "|---|--:|--:|--:|",
    ]
    for kind, before in outcome.before.items():
        after = outcome.after[kind]
        cells = [f"{each.share:.1%} ± {each.standard_error:.1%}" for each in (before, after)]
        lines.append(f"| {kind} | {before.questions} | {cells[0]} | {cells[1]} |")
    lines += ["", "| | command | s |", "|---|---|--:|"]
    for phase, command in COMMANDS.items():
        lines.append(f"| {phase} | `{command}` | {outcome.seconds[phase]:.0f} |")
    lines.append(f"| all | | {sum(outcome.seconds.values()):.0f} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all of it and prints the tables; 1: rewards have not taught enough."""
    parser = argparse.ArgumentParser("python -m benchmarks.word_problems", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--folder", type=Path, help="for all files, which are kept (default: one that is removed)")
    add("--write", action="store_true", help=f"write {RESULTS.name} and {PICTURE.name}")
    args = parser.parse_args(argv)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="word-problems-") as passing:
        folder = args.folder or Path(passing)
        folder.mkdir(parents=True, exist_ok=True)
        outcome = run_all(folder)
        text = report(outcome, load)
        print(text)
        if args.write:
            RESULTS.write_text(text)
            draw(outcome, folder / "runs" / GRPO, PICTURE)
    gained = gain(outcome)
    if gained < GAIN:
        print(f"failed: a gain of {gained:.1%}, not {GAIN:.0%}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
