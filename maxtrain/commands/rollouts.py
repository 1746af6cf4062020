"""`maxtrain rollouts RUN`: prints the completions that a run learned from, with their rewards and
advantages. Starts no device."""

import argparse
import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data_pipeline.base.errors import DataError, run_command
from data_pipeline.base.terminal import visible
from data_pipeline.prepare.report import spell
from data_pipeline.tokenizer import Tokenizer, load_tokenizer
from maxtrain.inference.text import decode_new
from maxtrain.rl.advantages import weighted_sum
from maxtrain.rl.completions import completions_of
from maxtrain.rl.rollout import FOLDER, DamagedRolloutError, Rollout, load
from maxtrain.storage.reading import readable
from maxtrain.trainer.run_dir import require_run
from maxtrain.trainer.saved_run import tokenizer_place

_PROMPTS = 4
# Steps that an error names.
_MOST_STEPS = 12
_ALL = "all"
# What this program reads of the record of a rollout.
_NEEDED = ("steps", "sampled_after", "names", "weights_of_rewards", "judgements")
_FILE = re.compile(r"(\d{8,})\.npz")


class RewardRecord(NamedTuple):
    """Result of one reward for a completion; `value` is None where the reward does not apply."""

    value: float | None
    weight: float
    outcome: str
    detail: str


class CompletionRecord(NamedTuple):
    """A completion that a run learned from.

    Attributes:
        steps: the first and the last step that read it, counted from 1.
        prompt_number, completion_number: counted from 0, the latter among those of the prompt.
        prompt: its text, in which special tokens are written by their names.
        completion: its text, as rewards are given it.
        length: in tokens.
        truncated: whether it was cut at the longest that is allowed.
        reward: the weighted sum of the rewards that apply; None: none does.
        advantage: of the completion; with PPO the mean over its tokens; None: the run has none.
        rewards: by name.
    """

    steps: tuple[int, int]
    prompt_number: int
    completion_number: int
    prompt: str
    completion: str
    length: int
    truncated: bool
    reward: float | None
    advantage: float | None
    rewards: dict[str, RewardRecord]

    def record(self) -> dict[str, Any]:
        """The completion as JSON."""
        rewards = {name: reward._asdict() for name, reward in self.rewards.items()}
        return self._asdict() | {"rewards": rewards}


def stored_steps(run: Path) -> list[int]:
    """The first step, counted from 1, of each rollout that a run keeps, in order."""
    found = []
    for path in (run / FOLDER).glob("*.npz"):
        match = _FILE.fullmatch(path.name)
        if match:
            found.append(int(match[1]))
    return sorted(found)


def find_rollout(run: Path, step: int | None, name: str = "") -> Rollout:
    """The rollout that a step reads.

    Args:
        run: the folder of the run.
        step: counted from 1; None: the newest rollout.
        name: what to call the run; empty: by its folder.

    Raises:
        UsageError: there is no such folder.
        DataError: the run does not keep that rollout, or its file is damaged.
    """
    name = name or str(run)
    require_run(run, name)
    stored = stored_steps(run)
    if not stored:
        raise DataError(
            f"{name} keeps no rollouts. Name a run that learns from its own completions "
            "(objective=grpo or ppo, or objective=distill with distill.on_policy=true) and has "
            "made a step."
        )
    first = max((each for each in stored if step is None or each <= step), default=None)
    if first is not None:
        path = run / FOLDER / f"{first:08d}.npz"
        try:
            rollout = load(path)
        except DamagedRolloutError as damage:
            raise DataError(
                f"{path}: {damage}. Use --step with another step, or run the training command "
                "again: it makes the rollout again if it needs it."
            ) from damage
        problem = _problem_of(rollout)
        if problem:
            raise DataError(
                f"{path}: {problem}. Another version of maxtrain has written this file: print it "
                "with that version, or use --step with another step."
            )
        if step is None or step <= rollout.about["steps"][1]:
            return rollout
    raise DataError(
        f"--step={step}: {name} keeps no rollout of that step, but those that begin at step "
        f"{_listed(stored)}. Use one of these. A run keeps only the rollouts that its checkpoints "
        "need; with grpo.keep_rollouts=true (distill.keep_rollouts=true) it keeps all of them."
    )


def _problem_of(rollout: Rollout) -> str:
    """Return what this program needs to know of a rollout and its record does not say.

    Empty if nothing is missing.
    """
    about = rollout.about
    missing = [name for name in _NEEDED if name not in about]
    if missing:
        return f"its record has no {', '.join(missing)}"
    steps = about["steps"]
    if not (_is_list(steps, 2) and all(isinstance(step, int) for step in steps)):
        return f"steps={steps!r:.40} of its record are not the first and the last step"
    count = len(rollout.lengths)
    if not len(rollout.prompt_lengths) or count % len(rollout.prompt_lengths):
        return f"its {count:,} completions are not as many for each prompt"
    names = about["names"]
    for key in ("weights_of_rewards", "judgements"):
        # Without names of rewards, nothing of what is stored for rewards is read.
        if not isinstance(about[key], list) or len(about[key]) < len(names):
            return f"{key} of its record has not one entry for each of its {len(names)} rewards"
    if len(rollout.rewards) < len(names):
        return f"it has {len(rollout.rewards)} rewards, and its record {len(names)} names of them"
    for name, judgements in zip(names, about["judgements"]):
        if not _is_list(judgements, count) or not all(_is_list(each, 2) for each in judgements):
            return (
                f"judgements of its record have no outcome and detail of each completion for "
                f"reward {name}"
            )
    return ""


def _is_list(value: Any, length: int) -> bool:
    return isinstance(value, list) and len(value) == length


def _listed(steps: Sequence[int]) -> str:
    words = [f"{step:,}" for step in steps]
    if len(words) > _MOST_STEPS:
        words = [*words[: _MOST_STEPS - 1], "...", words[-1]]
    return ", ".join(words)


def read_completions(rollout: Rollout, tokenizer: Tokenizer) -> Iterator[CompletionRecord]:
    """The completions of a rollout in their order; those of a prompt follow each other."""
    about = rollout.about
    made = completions_of(rollout)
    group = len(made) // len(rollout.prompt_lengths)
    weights = about["weights_of_rewards"]
    totals = np.full(len(made), np.nan)
    if about["names"]:
        totals = weighted_sum(rollout.rewards, np.array(weights, np.float64))
    advantages = _advantages(rollout)
    prompts = np.split(rollout.prompts, np.cumsum(rollout.prompt_lengths)[:-1])
    spelled = ""
    for number, completion in enumerate(made):
        prompt_number, completion_number = divmod(number, group)
        prompt = prompts[prompt_number]
        if completion_number == 0:
            spelled = spell(tokenizer, prompt)
        ids = completion.ids
        if completion.has_ended:
            ids = ids[:-1]
        rewards = {}
        for place, name in enumerate(about["names"]):
            outcome, detail = about["judgements"][place][number]
            value = _number(rollout.rewards[place, number])
            rewards[name] = RewardRecord(value, weights[place], outcome, detail)
        first, last = about["steps"]
        yield CompletionRecord(
            steps=(first, last),
            prompt_number=prompt_number,
            completion_number=completion_number,
            prompt=spelled,
            completion=decode_new(tokenizer, prompt.tolist(), ids),
            length=len(completion.ids),
            truncated=not completion.has_ended,
            reward=_number(totals[number]),
            advantage=_number(advantages[number]),
            rewards=rewards,
        )


def _advantages(rollout: Rollout) -> np.ndarray:
    """The advantage of each completion; NaN: it has none."""
    if not rollout.about["names"]:
        return np.full(len(rollout.lengths), np.nan)
    if not rollout.token_advantages.size:
        return rollout.advantages
    ends = np.cumsum(rollout.lengths)[:-1]
    return np.array([part.mean() for part in np.split(rollout.token_advantages, ends)])


def _number(value: float) -> float | None:
    """A number as JSON has it: NaN and infinities are null there."""
    if not math.isfinite(value):
        return None
    return float(value)


def _heading(rollout: Rollout, name: str) -> str:
    """Describe a rollout in one line."""
    first, last = rollout.about["steps"]
    steps = f"step {first:,}"
    if last > first:
        steps = f"steps {first:,} to {last:,}"
    prompts = len(rollout.prompt_lengths)
    group = len(rollout.lengths) // prompts
    return (
        f"{name}: rollout of {steps}, sampled after step {rollout.about['sampled_after']:,}; "
        f"prompts: {prompts:,}, completions of each: {group:,}"
    )


def _lines(completion: CompletionRecord) -> Iterator[str]:
    """Yield how people read a completion; its prompt is above the first one of the prompt.

    Lines of texts from outside are marked, so that no text passes for a reward.
    """
    if completion.completion_number == 0:
        yield ""
        yield f"prompt {completion.prompt_number}"
        yield from _marked(completion.prompt)
    facts = [f"{completion.length:,} tokens"]
    if completion.truncated:
        facts.append("truncated")
    if completion.rewards:
        facts.append(f"reward {_words(completion.reward)}")
        facts.append(f"advantage {_words(completion.advantage)}")
    place = f"{completion.prompt_number}.{completion.completion_number}"
    yield f"completion {place}: {', '.join(facts)}"
    yield from _marked(completion.completion)
    for name, reward in completion.rewards.items():
        line = f"  {name} = {_words(reward.value)}, weight {reward.weight:g}: {reward.outcome}"
        if reward.detail:
            line += f" ({' '.join(reward.detail.split())})"
        yield visible(line)


def _marked(text: str) -> Iterator[str]:
    for line in visible(text).split("\n"):
        yield f"  | {line}"


def _words(value: float | None) -> str:
    if value is None:
        return "none"
    return f"{value:.4g}"


def _count(text: str) -> int | None:
    """Return the number of prompts; None for all."""
    if text == _ALL:
        return None
    return _positive(text)


def _positive(text: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,17}", text):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of at least 1")
    return int(text)


def main(argv: Sequence[str], prog: str = "maxtrain rollouts") -> int:
    """Prints the completions of a rollout; the exit code."""

    def job() -> None:
        _, _, about = (__doc__ or "").partition(": ")
        parser = argparse.ArgumentParser(prog=prog, description=" ".join(about.split()))
        parser.add_argument("run", metavar="RUN", help="folder or URL of a run")
        parser.add_argument(
            "--step",
            type=_positive,
            metavar="N",
            help="the step that reads them, counted from 1 (default: the newest that is kept)",
        )
        parser.add_argument(
            "--prompts",
            type=_count,
            default=_PROMPTS,
            metavar="N",
            help=f"prompts whose completions are shown, or `{_ALL}` (default: {_PROMPTS})",
        )
        parser.add_argument(
            "--json", action="store_true", help="print one JSON object for each completion"
        )
        options = parser.parse_args(argv)
        run = readable(options.run)
        rollout = find_rollout(run, options.step, options.run)
        tokenizer = load_tokenizer(tokenizer_place(run))
        if not options.json:
            print(visible(_heading(rollout, options.run)))
        for completion in read_completions(rollout, tokenizer):
            if options.prompts is not None and completion.prompt_number >= options.prompts:
                break
            if options.json:
                print(json.dumps(completion.record(), allow_nan=False))
            else:
                print("\n".join(_lines(completion)))

    return run_command(job, resumes=False)
