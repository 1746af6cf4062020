"""The end of a run for people: its curves as a picture and as text, and a summary. Works on records of `read_metrics`."""

import os
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

_GREEN, _PURPLE, _GREY = "#0d9488", "#9333ea", "#6b7280"
_BRAILLE = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # bits of the dots, by line and column


def plot_curves(records: Sequence[Mapping[str, Any]], path: str | Path, title: str, subtitle: str = "") -> None:
    """Draw loss, evaluations, speed and learning rate over steps as a PNG, which appears at its path in one piece.

    Args:
        records: of `read_metrics`.
        path: where the picture goes.
        title: name of the run.
        subtitle: one line in small print; empty for none.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - half a second, which only the end of a run has

    train = [record for record in records if record["kind"] == "train"]
    evals = [record for record in records if record["kind"] == "eval"]
    figure = Figure(figsize=(9, 6.2), dpi=150, layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.2))
    top.set_title(title, loc="left", fontsize=14, fontweight="bold", pad=22, parse_math=False)
    top.annotate(subtitle, (0, 1), xytext=(0, 7), xycoords="axes fraction", textcoords="offset points", color=_GREY, size=9)
    steps, losses = _columns(train, "loss")
    top.plot(steps, losses, color="C0", linewidth=0.8, alpha=0.3)
    top.plot(steps, _smooth(losses), label="train, smoothed")
    for name in dict.fromkeys(record["set"] for record in evals):
        steps, values = _columns([record for record in evals if record["set"] == name], "nll")
        last = f", at the end {values[-1]:.4f}" if len(values) else ""
        top.plot(steps, values, ":o", markersize=5, label=f"eval {name}{last}")
    top.legend(loc="upper right", frameon=False)
    top.set_ylabel("loss, nats per token")
    right = bottom.twinx()
    for axes, name, label, color in (
        (bottom, "tokens_per_second", "tokens/s", _GREEN),
        (right, "learning_rate", "learning rate", _PURPLE),
    ):
        axes.plot(*_columns(train, name), color=color)
        axes.set_ylim(bottom=0)
        axes.set_ylabel(label, color=color)
    bottom.yaxis.set_major_formatter(lambda value, _: human.count(value))
    right.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    bottom.set_xlabel("step")
    for axes in (top, bottom, right):
        axes.spines[["top", "left", "right"]].set_visible(False)
        axes.tick_params(length=0)
        axes.grid(axis="y", color="none" if axes is right else "#e5e7eb")
    beside = Path(f"{path}.partial")
    figure.savefig(beside, format="png")
    os.replace(beside, path)


def _columns(records: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    """Steps and values of the records in which that number is finite, as [2, records]."""
    pairs = np.array([(r["step"], r[name]) for r in records if r.get(name) is not None], float).reshape(-1, 2)
    return pairs[np.isfinite(pairs[:, 1])].T


def _smooth(values: np.ndarray) -> np.ndarray:
    """Mean over a centred window of up to a 25th of the curve, narrower at its ends."""
    index, sums = np.arange(len(values)), np.concatenate([[0.0], np.cumsum(values)])
    half = np.minimum(len(values) // 50, np.minimum(index, index[::-1]))
    return (sums[index + half + 1] - sums[index - half]) / (2 * half + 1)


def terminal_curve(steps: ArrayLike, values: ArrayLike, width: int = 72, height: int = 12) -> str:
    """A line chart in braille characters, two by four dots each, with labels on both axes.

    Args:
        steps: horizontal positions, ascending.
        values: one for each; those that are not finite are left out.
        width: characters of the whole chart, labels included.
        height: lines of the chart, without the two of the horizontal axis.

    Returns:
        `height` + 2 lines; empty if there are fewer than two finite values.
    """
    x, y = np.asarray(steps, float), np.asarray(values, float)
    x, y = x[np.isfinite(y)], y[np.isfinite(y)]
    if len(y) < 2 or x[0] == x[-1]:
        return ""
    low, spread = y.min(), np.ptp(y) or 1.0
    every = max(1, (height - 1) // 4)
    labels = ["" if row % every else f"{low + spread * (1 - row / (height - 1)):.4g}" for row in range(height)]
    gutter = max(map(len, labels))
    columns = max(8, width - gutter - 2)
    # One height for each column of dots: the mean of its points, or the line between its neighbours.
    column = np.round((x - x[0]) / (x[-1] - x[0]) * (2 * columns - 1)).astype(int)
    counts, sums = np.bincount(column), np.bincount(column, y)
    filled = np.flatnonzero(counts)
    line = np.interp(np.arange(2 * columns), filled, sums[filled] / counts[filled])
    dots = np.round((1 - (line - low) / spread) * (4 * height - 1)).astype(int)
    cells = np.zeros((height, columns), int)
    for i, dot in enumerate(dots):
        before = dots[max(i - 1, 0)]
        for j in range(min(before + 1, dot), max(before - 1, dot) + 1):  # down or up from the neighbour, to join the dots
            cells[j // 4, i // 2] |= _BRAILLE[j % 4][i % 2]
    rows = [
        f"{label:>{gutter}} {'┤' if label else '│'}{''.join(chr(0x2800 + cell) for cell in line)}"
        for label, line in zip(labels, cells)
    ]
    first, last = f"{x[0]:,.0f}", f"step {x[-1]:,.0f}"
    return "\n".join([*rows, f"{'':{gutter}} └{'─' * columns}", f"{'':{gutter + 2}}{first}{last:>{columns - len(first)}}"])


def summary(
    *,
    run_name: str,
    steps: int,
    tokens: int,
    final_loss: float | None,
    evaluations: Mapping[str, Mapping[str, Any]],
    seconds: Mapping[str, float],
    comparison: str = "",
    ending: str = "",
    curve: str = "",
    files: Mapping[str, str | Path] | None = None,
    next_commands: Mapping[str, str] | None = None,
) -> RenderableType:
    """What to print at the end of a run: rich text that also reads well without a terminal.

    Args:
        run_name: name of the run.
        steps: finished optimizer steps.
        tokens: target tokens trained on, since step 0.
        final_loss: nats per token of the last record; None if there is none.
        evaluations: by set, the last result: nll (nats per token), perplexity, bits_per_byte, tokens.
        seconds: wall time by cause, as `Stopwatch.seconds` gives it.
        comparison: a line to compare the evaluations with.
        ending: why the run ended; empty if it did all its steps.
        curve: of `terminal_curve`.
        files: what is where.
        next_commands: command by what it does; below the frame, so that they can be copied.
    """
    wall = sum(seconds.values())
    loss = "" if final_loss is None else f", training loss {final_loss:.4f}"
    parts: list[RenderableType] = [f"{steps:,} steps, {human.count(tokens)} tokens{loss}, {human.duration(wall)} of wall time"]
    if ending:
        parts.append(Text(ending, "yellow"))
    if curve:
        parts += ["", Text(curve, "cyan", no_wrap=True)]
    if evaluations:
        forms = {"nll": ".4f", "perplexity": ".2f", "bits_per_byte": ".4f", "tokens": ",.0f"}
        results = {name: [r.get(key) for key in forms] for name, r in evaluations.items()}
        cells = {k: ["-" if v is None else format(v, f) for v, f in zip(r, forms.values())] for k, r in results.items()}
        parts += ["", _table(("evaluation", "nats/token", "perplexity", "bits/byte", "tokens"), cells)]
    if comparison:
        parts.append(Text(comparison, "dim"))
    shares = {cause.replace("_", " "): [human.duration(s), f"{s / wall:.1%}"] for cause, s in seconds.items() if wall}
    for head, rows in ((("wall time", "", "share"), shares), (("files", ""), {k: [str(v)] for k, v in (files or {}).items()})):
        parts += ["", _table(head, rows)] if rows else []
    panel = Panel(Group(*parts), title=Text(run_name, "bold"), title_align="left", border_style="dim", padding=(0, 2))
    commands = [Text.assemble((f"{what}:\n", "dim"), (f"  {how}", "cyan")) for what, how in (next_commands or {}).items()]
    return Group(panel, *commands)


def _table(head: Sequence[str], rows: Mapping[str, Sequence[str]]) -> Table:
    """A table without lines; several columns after the first are numbers, one is text."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)
    for i, name in enumerate(head):
        table.add_column(name, justify="right" if i and len(head) > 2 else "left", overflow="fold")
    for name, cells in rows.items():
        table.add_row(Text(name), *map(Text, cells))
    return table
