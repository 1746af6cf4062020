"""The end of a run for people, as text: its curve, and a summary. Works on records of
`read_metrics`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from maxtrain.observe import human
from maxtrain.observe.panels import REWARD, has_rewards
from maxtrain.observe.series import columns, evaluation_series, smooth

_BLOCKS = " ▁▂▃▄▅▆▇█"
_LONG = 1e6  # a perplexity that would make the table too wide


def terminal_curve(steps: ArrayLike, values: ArrayLike, width: int = 72, height: int = 12) -> str:
    """The area below a curve in block characters, with labels on both axes.

    `width` counts the labels too; `height` does not count the two lines of the horizontal axis.
    Values that are not finite are left out; with fewer than two others, the chart is empty.
    """
    x, y = np.asarray(steps, float), np.asarray(values, float)
    x, y = x[np.isfinite(y)], y[np.isfinite(y)]
    if len(y) < 2 or x[0] == x[-1]:
        return ""
    low, spread = y.min(), np.ptp(y) or 1.0
    labels = [
        f"{low + spread * (row + 1) / height:.4g}" if row % 3 == 2 else "" for row in range(height)
    ]
    gutter = max(map(len, labels))
    num_columns = max(8, width - gutter - 2)
    line = np.interp(np.linspace(x[0], x[-1], num_columns), x, smooth(y))
    eighths = np.ceil((line - low) / spread * 8 * height).astype(int).clip(1)
    lines = []
    for row in reversed(range(height)):
        axis = "│"
        if labels[row]:
            axis = "┤"
        blocks = "".join(_BLOCKS[n] for n in (eighths - 8 * row).clip(0, 8))
        lines.append(f"{labels[row]:>{gutter}} {axis}{blocks}")
    first, last = f"{x[0]:,.0f}", f"step {x[-1]:,.0f}"
    return "\n".join(
        [
            *lines,
            f"{'':{gutter}} └{'─' * num_columns}",
            f"{'':{gutter + 2}}{first}{last:>{num_columns - len(first)}}",
        ]
    )


def summary(
    run_name: str,
    steps: int,
    records: Sequence[Mapping[str, Any]],
    seconds: Mapping[str, float],
    *,
    comparison: str = "",
    ending: str = "",
    made_by: str = "",
    files: Mapping[str, str | Path] | None = None,
    units: Mapping[str, str] | None = None,
    samples: RenderableType | None = None,
) -> RenderableType:
    """Return what to print at the end of a run: rich text that also reads well without a terminal.

    Args:
        run_name, steps: the run, and its finished optimizer steps.
        records: of `read_metrics`; shown are the loss over steps, and the last evaluation of each
            set.
        seconds: wall time by cause, of all launches, as `goodput` gives it.
        comparison: a line to compare the evaluations with.
        ending: what to say first: why the run ended, if not because it did all its steps; may be
            empty.
        made_by: a line about the machine and the versions.
        files: what is where.
        units: of numbers of evaluations that are shown beside the loss, by their names.
        samples: completions of prompts; None: there are none.
    """
    train = [r for r in records if r["kind"] == "train"]
    evals = [r for r in records if r["kind"] == "eval"]
    with_prompts = [r for r in evals if "prompts" in r]
    last = {r["set"]: r for r in evals if "prompts" not in r}
    evaluations = {
        name if r["step"] == steps else f"{name}, step {r['step']:,}": r for name, r in last.items()
    }
    wall = sum(seconds.values())
    head = [f"{steps:,} steps"]
    if train:
        head += [
            f"{human.count(train[-1]['tokens_seen'])} targets (tokens with a loss)",
        ]
        if has_rewards(train):
            head += _last_reward(train)
        else:
            head += _last_loss(train)
    parts: list[RenderableType] = [", ".join([*head, f"{human.duration(wall)} of wall time"])]
    if ending:
        parts.append(Text(ending, "yellow"))
    drawn = "loss"
    if has_rewards(train):
        drawn = REWARD
    steps_drawn, values = columns(train, drawn)
    if curve := terminal_curve(steps_drawn, values):
        if drawn == REWARD:
            parts += ["", Text("reward", "bold")]
        parts += ["", Text(curve, "cyan", no_wrap=True)]
    if with_prompts:
        parts += ["", _table(_HEADS_OF_PROMPTS, _answered(with_prompts))]
    if evaluations:
        heads = ("evaluation", "nats/token", "perplexity", "bits/byte", "targets")
        cells = {name: _evaluation(record) for name, record in evaluations.items()}
        parts += ["", _table(heads, cells)]
        others = _beside_the_loss(evaluations, units or {})
        if others:
            parts += ["", _table(("also evaluated", "", "unit"), others)]
    if samples is not None:
        parts += ["", samples]
    if comparison:
        parts.append(Text(comparison, "dim"))
    if made_by:
        parts.append(Text(made_by, "dim"))
    shares = {
        cause.replace("_", " "): [human.duration(s), f"{s / wall:.1%}"]
        for cause, s in seconds.items()
        if wall
    }
    for head, rows in (
        (("wall time", "", "share"), shares),
        (("files", ""), {k: [str(v)] for k, v in (files or {}).items()}),
    ):
        parts += ["", _table(head, rows)] if rows else []
    return Panel(
        Group(*parts),
        title=Text(run_name, "bold"),
        title_align="left",
        border_style="dim",
        padding=(0, 2),
    )


_HEADS_OF_PROMPTS = ("evaluation", "accuracy", "reward", "tokens", "truncated", "prompts")


def _answered(evals: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """The first and the last evaluation of each set of prompts, as rows: before and after."""
    forms = {
        "accuracy": "{:.1%}",
        REWARD: "{:.4f}",
        "completion_length": "{:.1f}",
        "truncated": "{:.1%}",
        "prompts": "{:,}",
    }
    rows = {}
    for name, series in evaluation_series(evals).items():
        for record in (series[0], series[-1]):
            cells = []
            for number, form in forms.items():
                cells.append(form.format(record[number]) if number in record else "-")
            rows[f"{name}, step {record['step']:,}"] = cells
    return rows


def _last_reward(train: Sequence[Mapping[str, Any]]) -> list[str]:
    """The reward of the first rollout and of the last one."""
    _, rewards = columns(train, REWARD)
    if not len(rewards):
        return []
    return [f"reward {rewards[0]:.4f} at first and {rewards[-1]:.4f} in the end"]


def _beside_the_loss(
    records: Mapping[str, Mapping[str, Any]], units: Mapping[str, str]
) -> dict[str, list[str]]:
    """The other numbers of the last evaluation of each set, with their units, as rows."""
    rows = {}
    for name, record in records.items():
        for quantity, unit in units.items():
            if quantity in record:
                rows[f"{name}, {quantity}"] = [f"{record[quantity]:.4f}", unit]
    return rows


def _evaluation(record: Mapping[str, Any]) -> list[str]:
    """The numbers of an evaluation as the cells of a row."""
    forms = {"nll": ".4f", "perplexity": ".2f", "bits_per_byte": ".4f", "tokens": ",.0f"}
    if record.get("perplexity", 0.0) >= _LONG:
        forms["perplexity"] = ".4g"
    return [format(record[key], form) if key in record else "-" for key, form in forms.items()]


def _last_loss(train: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what the training loss was in the end, and over how many steps; empty if no record has
    one.
    """
    known = [i for i, record in enumerate(train) if record["loss"] is not None]
    if not known:
        return []
    last = train[known[-1]]
    steps = last["step"] - (train[known[-1] - 1]["step"] if known[-1] else 0)
    mean = f" (mean of {steps:,} steps)" if steps > 1 and "step_loss" in last else ""
    return [f"training loss {last['loss']:.4f}{mean}"]


def _table(head: Sequence[str], rows: Mapping[str, Sequence[str]]) -> Table:
    """A table without lines; several columns after the first are numbers, one is text."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)
    for i, name in enumerate(head):
        table.add_column(name, justify="right" if i and len(head) > 2 else "left", overflow="fold")
    for name, cells in rows.items():
        table.add_row(Text(name), *map(Text, cells))
    return table
