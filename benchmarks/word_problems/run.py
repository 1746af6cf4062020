"""The commands of "A run from end to end" in docs/posttraining.md, one after the other, and what
the model has learnt from them."""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
SFT = "sft_word_problems"
GRPO = "grpo_word_problems"
_ASKED = "--system 'Give <reasoning> and <answer>.' --tokenizer problems/tokenizer --holdout 0.1"
_BEFORE = "evaluate before"
_AFTER = "evaluate after"
# Each with what it does.
COMMANDS: dict[str, str] = {
    "write the problems": "python -m maxtrain.examples.word_problems problems",
    "prepare worked answers": (
        f"maxtrain prepare data/worked --chat problems/worked.jsonl --map gsm8k {_ASKED}"
    ),
    "prepare results": f"maxtrain prepare data/results --prompts problems/results.jsonl {_ASKED}",
    "learn from worked answers (SFT)": f"maxtrain train config={SFT}",
    _BEFORE: (
        f"maxtrain evaluate runs/{SFT} --set held_out=data/results/eval --reward gsm8k "
        "--max-completion-length 64"
    ),
    "learn from rewards (GRPO)": f"maxtrain train config={GRPO}",
    _AFTER: f"maxtrain evaluate runs/{GRPO}",
}
_RIGHT = "gsm8k.correctness"
# More than there are.
_ALL = 1_000_000


class AccuracyScore(NamedTuple):
    """Score on a set of questions: how many were answered right."""

    right: int
    questions: int

    @property
    def share(self) -> float:
        return self.right / self.questions

    @property
    def standard_error(self) -> float:
        """Standard error of the share, by the choice of questions."""
        return (self.share * (1 - self.share) / self.questions) ** 0.5


class ExperimentOutcome(NamedTuple):
    """Outcome of all commands.

    Attributes:
        seconds: of each command, from its start to its end.
        before, after: scores of all held-out questions, and by the kind of problem.
        folder: the runs are in its folder `runs`.
    """

    seconds: dict[str, float]
    before: dict[str, AccuracyScore]
    after: dict[str, AccuracyScore]
    folder: Path


ALL_KINDS = "all"


def run_all(folder: Path, overrides: Sequence[str] = ()) -> ExperimentOutcome:
    """Runs all commands in a folder.

    Args:
        folder: where files are written.
        overrides: of both configs.

    Raises:
        RuntimeError: a command failed; with its output.
    """
    seconds = {}
    scores = {}
    for phase, command in COMMANDS.items():
        words = shlex.split(command)
        if words[:2] == ["maxtrain", "train"]:
            words += overrides
        if phase in (_BEFORE, _AFTER):
            words += ["--json", "--show", str(_ALL)]
        began = time.perf_counter()
        shown = _run(words, folder)
        seconds[phase] = time.perf_counter() - began
        print(f"{seconds[phase]:7.1f} s  {command}", flush=True)
        if phase in (_BEFORE, _AFTER):
            sets = json.loads(shown)["sets"]
            scores[phase] = by_kind(sets["held_out"]["samples"], kinds(folder))
    return ExperimentOutcome(seconds, scores[_BEFORE], scores[_AFTER], folder)


def _run(words: Sequence[str], folder: Path) -> str:
    """Return the output of a command."""
    program = [sys.executable]
    if words[0] == "maxtrain":
        program += ["-m", "maxtrain.cli"]
    # Programs that run for long are worth their compilation.
    own = {"PYTHONPATH": str(ROOT), "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
    result = subprocess.run(
        [*program, *words[1:]],
        cwd=folder,
        env=os.environ | own,
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        raise RuntimeError(f"{shlex.join(words)}\n{result.stdout}{result.stderr}")
    return result.stdout


def kinds(folder: Path) -> dict[str, str]:
    """The kind of each question that has a result."""
    lines = (folder / "problems" / "results.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {record["prompt"]: record["kind"] for record in records}


def by_kind(
    samples: Sequence[Mapping[str, Any]], kind_of: Mapping[str, str]
) -> dict[str, AccuracyScore]:
    """The scores of all questions and of each kind.

    Args:
        samples: completions, as `maxtrain evaluate --json --show` has them.
        kind_of: questions.
    """
    found = {ALL_KINDS: AccuracyScore(0, 0)} | {
        kind: AccuracyScore(0, 0) for kind in kind_of.values()
    }
    for sample in samples:
        _, _, question = sample["texts"]["prompt"].partition("user: ")
        is_right = sample["rewards"][_RIGHT] > 0
        for name in (ALL_KINDS, kind_of[question.strip()]):
            before = found[name]
            found[name] = AccuracyScore(before.right + is_right, before.questions + 1)
    return found
