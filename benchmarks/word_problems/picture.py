"""The picture of the run in docs/posttraining.md: rewards and held-out accuracy over steps, and the
accuracy of each kind of problem before and after."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from benchmarks.word_problems.run import ALL_KINDS, AccuracyScore, ExperimentOutcome
from maxtrain.observe.metrics import read_metrics
from maxtrain.observe.series import columns, smooth

_BEFORE = "#9aa5b1"
_AFTER = "#1f6feb"
_REWARD = "#d9822b"
_INK = "#24292f"
_QUIET = "#6e7781"


def draw(outcome: ExperimentOutcome, run: Path, path: Path) -> None:
    """Draws it as a PNG.

    Args:
        outcome: the scores before and after.
        run: the folder of the run that learns from rewards.
        path: of the picture.
    """
    records = read_metrics(run)
    train = [record for record in records if record["kind"] == "train"]
    evals = [record for record in records if record["kind"] == "eval"]
    figure = Figure(figsize=(10, 5), dpi=130, layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(3, 2), wspace=0.04)
    accuracy, reward = left.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    kinds = right.subplots()
    _draw_accuracy(accuracy, evals)
    _draw_reward(reward, train)
    _draw_kinds(kinds, outcome.before, outcome.after)
    for axes in (accuracy, reward, kinds):
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(_QUIET)
        axes.tick_params(colors=_QUIET, labelcolor=_INK)
    figure.savefig(path)


def _title(axes: Any, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=11, fontweight="bold", color=_INK, pad=10)


def _draw_accuracy(axes: Any, evals: Sequence[Mapping[str, Any]]) -> None:
    """Draw the accuracy of the evaluation set, over steps."""
    steps, values = columns(evals, "accuracy")
    axes.plot(steps, values, color=_AFTER, linewidth=2, marker="o", markersize=5, clip_on=False)
    axes.fill_between(steps, values, values[0], color=_AFTER, alpha=0.08, linewidth=0)
    axes.axhline(values[0], color=_BEFORE, linewidth=1.2, linestyle=(0, (4, 3)))
    ends = (
        (steps[0], values[0], f"{values[0]:.1%} before", _QUIET, (10, -15), "left"),
        (steps[-1], values[-1], f"{values[-1]:.1%} after", _AFTER, (0, 9), "right"),
    )
    for step, value, words, colour, offset, side in ends:
        axes.annotate(
            words,
            (step, value),
            xytext=offset,
            textcoords="offset points",
            ha=side,
            color=colour,
            fontsize=11,
            fontweight="bold",
        )
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(axis="y", alpha=0.25)
    _title(axes, "Right answers to held-out questions")


def _draw_reward(axes: Any, train: Sequence[Mapping[str, Any]]) -> None:
    """Draw the reward of the completions that the steps train on."""
    steps, values = columns(train, "reward")
    axes.plot(steps, values, color=_REWARD, linewidth=0.8, alpha=0.35)
    axes.plot(steps, smooth(values), color=_REWARD, linewidth=2)
    axes.grid(axis="y", alpha=0.25)
    axes.set_xlabel("step of GRPO", color=_INK)
    axes.set_xlim(left=0, right=steps[-1])
    _title(axes, "Mean reward of sampled answers, at most 4")


def _draw_kinds(
    axes: Any, before: Mapping[str, AccuracyScore], after: Mapping[str, AccuracyScore]
) -> None:
    """A line from before to after for each kind of problem."""
    names = [name for name in before if name != ALL_KINDS]
    names.sort(key=lambda name: after[name].share)
    for height, name in enumerate(names):
        old = before[name].share
        new = after[name].share
        axes.plot([old, new], [height, height], color=_BEFORE, linewidth=3, zorder=1)
        axes.scatter(
            old, height, s=70, facecolor="white", edgecolor=_QUIET, linewidth=1.8, zorder=2
        )
        axes.scatter(new, height, s=80, color=_AFTER, zorder=3)
        axes.annotate(
            f"{new:.0%}",
            (max(old, new), height),
            xytext=(9, 0),
            textcoords="offset points",
            va="center",
            color=_AFTER,
            fontweight="bold",
        )
    axes.set_yticks(range(len(names)), names, fontsize=11)
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.set_xlim(0, 1.12)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1.0])
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(axis="x", alpha=0.25)
    axes.set_xlabel("right, before (open) and after (filled)", color=_INK)
    _title(axes, "By the kind of problem")
