"""`maxtrain evaluate` of sets of prompts: each prompt is completed once by the likeliest tokens,
and its completion is rewarded. Rewards are those of a run that learns from them, or of --reward."""

import argparse
import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from data_pipeline.base.console import SafeConsole
from data_pipeline.base.errors import UsageError
from data_pipeline.loader.loader import EvaluationData
from data_pipeline.tokenizer import Tokenizer
from maxtrain.config.rollouts import rollout_settings
from maxtrain.config.schema import GrpoConfig, RunConfig
from maxtrain.config.sections.grpo import FROM_REWARDS
from maxtrain.inference.complete import show
from maxtrain.models.decoder import Decoder
from maxtrain.observe.samples import CompletionSample
from maxtrain.rl.evaluation import RewardedPromptEvaluator, ScoredCompletions
from maxtrain.rl.prompts import require_room
from maxtrain.rl.reward_calls import Rewards

_PARTS = ("reward/", "reward_outcomes/")


class PromptSetResult(NamedTuple):
    """The numbers of a set of prompts, and its first completions."""

    record: dict[str, Any]
    samples: list[CompletionSample]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments --reward, --max-completion-length and --show."""
    add = parser.add_argument
    add(
        "--reward",
        metavar="NAME",
        action="append",
        default=[],
        help="sets of prompts are completed, and this rewards completions, as in grpo.rewards "
        "(default: those of RUN); may be given several times",
    )
    add(
        "--max-completion-length",
        metavar="TOKENS",
        type=int,
        help="of sets of prompts: tokens of a completion at most "
        f"(default: as RUN, {GrpoConfig().max_completion_length} for others)",
    )
    add(
        "--show",
        metavar="N",
        type=int,
        help="number of completions to print for each set of prompts",
    )


def settings(args: argparse.Namespace, config: RunConfig | None) -> GrpoConfig | None:
    """Return the settings for evaluating sets of prompts; None: they are evaluated as text.

    Args:
        args: options of the command line.
        config: of the evaluated run; None for weights that are no run.

    Raises:
        UsageError: there is an option of completions, and no reward.
    """
    found = None
    if config is not None and config.objective in FROM_REWARDS:
        found = config.grpo
    if args.reward:
        found = dataclasses.replace(
            found or _as_sampled(config), rewards=tuple(args.reward), reward_weights=()
        )
    if found is None:
        for option in ("max_completion_length", "show"):
            if getattr(args, option) is not None:
                raise UsageError(
                    f"--{option.replace('_', '-')}: is of sets of prompts, whose completions are "
                    "rewarded. Name a reward, as --reward gsm8k."
                )
        return None
    if args.max_completion_length is not None:
        found = dataclasses.replace(found, max_completion_length=args.max_completion_length)
    if args.batch_size is not None:
        found = dataclasses.replace(found, slots=args.batch_size)
    return found


def _as_sampled(config: RunConfig | None) -> GrpoConfig:
    """Settings without rewards; completions are as long as those that a run has learnt from."""
    of_run = None
    if config is not None:
        of_run = rollout_settings(config)
    if of_run is None:
        return GrpoConfig()
    return GrpoConfig(max_completion_length=of_run.max_completion_length, slots=of_run.slots)


def require_room_in(
    sets: Mapping[str, EvaluationData], model: Decoder, objective: str, longest: int
) -> None:
    """ConfigError: a prompt of one of the sets leaves no room for a completion.

    Args:
        sets: by name.
        model: that is to complete them.
        objective: as of `require_room`.
        longest: tokens of a completion, at most.
    """
    for name, data in sets.items():
        length = min(data.config.seq_length, model.config.max_length)
        require_room(f"eval.sets.{name}", data.shards, length, objective, longest)


def evaluate_prompts(
    model: Decoder,
    tokenizer: Tokenizer,
    sets: Mapping[str, EvaluationData],
    counts: Mapping[str, int],
    config: GrpoConfig,
    num_shown: int,
) -> dict[str, PromptSetResult]:
    """Return the results of a model on sets of prompts.

    Args:
        model: on one device, or split over the current mesh.
        tokenizer: the model's own.
        sets: by name.
        counts: how many prompts of each set are completed.
        config: rewards, the longest completion, and how many are made at once.
        num_shown: completions of each set that are wanted themselves.

    Raises:
        ConfigError: a prompt without room for a completion, or there is no such reward.
    """
    require_room_in(sets, model, "grpo", config.max_completion_length)
    found = {}
    with contextlib.closing(Rewards(config, tokenizer)) as rewards:
        rewards.check()
        evaluator = RewardedPromptEvaluator(config, tokenizer, config.slots, rewards)
        for name, data in sets.items():
            answers: ScoredCompletions = evaluator(model, data.shards, counts[name])
            record = answers.record() | {"seconds": answers.seconds}
            found[name] = PromptSetResult(record, answers.samples(name, num_shown))
    return found


def table_of(answered: Mapping[str, PromptSetResult]) -> RenderableType:
    """Return the output for the user: a line for each set, and one for each reward and outcome
    of it.
    """
    heads = ("set", "accuracy", "reward", "tokens", "truncated", "prompts", "seconds")
    table = Table(box=None, header_style="bold", pad_edge=False)
    for head in heads:
        justify = "right"
        if head == "set":
            justify = "left"
        table.add_column(head, justify=justify, no_wrap=True)
    forms = {
        "accuracy": "{:.1%}",
        "reward": "{:.4f}",
        "completion_length": "{:.1f}",
        "truncated": "{:.1%}",
        "prompts": "{:,}",
        "seconds": "{:.1f}",
    }
    parts = Table(box=None, header_style="bold", pad_edge=False)
    parts.add_column("of rewards", no_wrap=True)
    parts.add_column("", justify="right")
    for name, (record, _) in answered.items():
        cells = [form.format(record[key]) if key in record else "-" for key, form in forms.items()]
        table.add_row(Text(name), *cells)
        for key, value in record.items():
            if key.startswith(_PARTS):
                parts.add_row(Text(f"{name}, {key}"), f"{value:.4g}")
    return Group(table, "", parts)


def show_samples(console: SafeConsole, answered: Mapping[str, PromptSetResult]) -> None:
    """Prints completions with their prompts and rewards."""
    samples = [sample for each in answered.values() for sample in each.samples]
    show(console, [sample.prompt for sample in samples], [sample.words() for sample in samples])
