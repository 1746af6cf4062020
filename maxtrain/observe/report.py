"""The end of a run for people: its curves as a picture and as text, and a summary. Works on records of `read_metrics`."""

import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from maxtrain.observe import human

_Numbers = Sequence[float] | np.ndarray
_BLUE, _ORANGE, _GREEN, _PURPLE, _INK, _GREY = "#2563eb", "#ea580c", "#0d9488", "#9333ea", "#1f2937", "#9ca3af"
_EVAL_STYLES = ((_ORANGE, "o"), ("#be123c", "D"), ("#a16207", "s"), ("#4d7c0f", "^"))
_BRAILLE = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # bits of the dots, by line and column
_MOST_LABELS = 8  # values written beside the points of one evaluation set


def plot_curves(records: Sequence[Mapping[str, Any]], path: str | Path, title: str, subtitle: str = "") -> None:
    """Draw loss, evaluations, speed and learning rate as a PNG, which appears at its path in one piece.

    Args:
        records: of `read_metrics`. The horizontal axis is tokens if training records have `tokens_seen`, else steps.
        path: where the picture goes.
        title: name of the run.
        subtitle: one line in small print; empty for none.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - half a second, which only the end of a run has

    train = [record for record in records if record["kind"] == "train"]
    known_steps, known_tokens = np.concatenate([[[0.0], [0.0]], _columns(train, "tokens_seen")], axis=1)

    def place(steps: np.ndarray) -> np.ndarray:
        return np.interp(steps, known_steps, known_tokens) if len(known_steps) > 1 else steps

    figure = Figure(figsize=(9, 6.2), dpi=150, facecolor="white", layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.2))
    top.set_title(title, loc="left", fontsize=14, fontweight="bold", color=_INK, pad=22 if subtitle else 10)
    top.annotate(subtitle, (0, 1), xytext=(0, 7), xycoords="axes fraction", textcoords="offset points", color="#6b7280", size=9)
    _draw_losses(top, records, place)
    right = bottom.twinx()
    for axes, name, color in ((bottom, "tokens_per_second", _GREEN), (right, "learning_rate", _PURPLE)):
        steps, values = _columns(train, name)
        axes.plot(place(steps), values, color=color, linewidth=1.4)
        axes.set_ylim(0, 1.1 * max([v for v in values if np.isfinite(v)], default=0) or 1)
        axes.set_ylabel(name.replace("_per_", "/").replace("second", "s").replace("_", " "), color=color)
        axes.tick_params(axis="y", colors=color)
        axes.locator_params(axis="y", nbins=4)
    right.yaxis.set_major_formatter(lambda v, _: f"{v:.1e}".replace(".0e", "e").replace("e-0", "e-") if v else "0")
    bottom.set_xlabel("training tokens" if len(known_steps) > 1 else "step")
    for axis in (bottom.xaxis, bottom.yaxis):
        axis.set_major_formatter(lambda value, _: human.count(value, trim=True))
    for axes in (top, bottom, right):
        axes.spines[["top", "left", "right"]].set_visible(False)
        axes.spines["bottom"].set_color(_GREY)
        axes.tick_params(length=0, labelsize=9)
        axes.margins(x=0.02)
        axes.grid(axis="y", color="#e5e7eb" if axes is not right else "none", linewidth=0.8)
        axes.set_axisbelow(True)
    beside = Path(f"{path}.partial")
    figure.savefig(beside, format="png")
    os.replace(beside, path)


def _columns(records: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    """Steps and values of the records that have that number, as [2, records]."""
    return np.array([(r["step"], r[name]) for r in records if r.get(name) is not None], float).reshape(-1, 2).T


def _draw_losses(axes: Any, records: Sequence[Mapping[str, Any]], place: Callable[[np.ndarray], np.ndarray]) -> None:
    """Training loss, raw and smoothed, and the evaluations of each set with their values."""
    steps, losses = _columns([r for r in records if r["kind"] == "train"], "loss")
    axes.plot(place(steps), losses, color=_BLUE, linewidth=0.8, alpha=0.3)
    axes.plot(place(steps), _smooth(losses), color=_BLUE, linewidth=1.8, label="train, smoothed")
    ranges = [_visible_range(losses)]
    evals = [r for r in records if r["kind"] == "eval"]
    last = {r["set"]: r["nll"] for r in evals}
    for (color, marker), name in zip(itertools.cycle(_EVAL_STYLES), last):
        steps, values = _columns([r for r in evals if r["set"] == name], "nll")
        x = place(steps)
        axes.plot(x, values, f":{marker}", color=color, markersize=5, linewidth=0.8, label=f"eval {name}", zorder=4)
        below = len(last) > 1 and name == min(last, key=last.__getitem__)
        style = {"textcoords": "offset points", "ha": "center", "size": 8, "color": color, "zorder": 5, "annotation_clip": True}
        for i in np.unique(np.linspace(0, len(x) - 1, _MOST_LABELS).round().astype(int)):
            axes.annotate(f"{values[i]:.3f}", (x[i], values[i]), xytext=(0, -14 if below else 7), **style)
        ranges.append(_visible_range(values))
    low, high = min(r[0] for r in ranges), max(r[1] for r in ranges)
    if low <= high:
        margin = 0.06 * (high - low) or 0.1
        axes.set_ylim(low - margin, high + 2 * margin)
    axes.legend(loc="upper right", frameon=False, fontsize=9)
    axes.set_ylabel("loss, nats per token", color=_INK)


def _visible_range(values: np.ndarray) -> tuple[float, float]:
    """Lowest and highest value worth drawing: the first losses, near log(vocabulary), would squeeze the rest of a curve."""
    values = values[np.isfinite(values)]
    if not len(values):
        return math.inf, -math.inf
    low, most, high = np.quantile(values, (0, 0.97, 1))
    return float(low), float(most if high - most > 0.3 * (most - low) > 0 else high)


def _smooth(values: np.ndarray) -> np.ndarray:
    """Mean over a centred window of up to a 25th of the curve, narrower where it starts; passes over what isn't finite."""
    index = np.arange(len(values))
    half = np.minimum(len(values) // 50, index // 4)
    finite = np.isfinite(values)
    sums, counts = (np.concatenate([[0.0], np.cumsum(x)]) for x in (np.where(finite, values, 0), finite))
    first, last = index - half, np.minimum(index + half + 1, len(values))
    with np.errstate(invalid="ignore"):
        return (sums[last] - sums[first]) / (counts[last] - counts[first])


def terminal_curve(steps: _Numbers, values: _Numbers, width: int = 72, height: int = 12) -> str:
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
    low, high = _visible_range(y)
    spread = high - low or 1.0
    decimals = max(0, 2 - math.floor(math.log10(spread)))
    every = max(1, (height - 1) // 4)
    labels = ["" if row % every else f"{high - spread * row / (height - 1):.{decimals}f}" for row in range(height)]
    gutter = max(map(len, labels))
    columns = max(8, width - gutter - 2)
    # One height for each column of dots: the mean of its points, or the line between its neighbours.
    column = np.round((x - x[0]) / (x[-1] - x[0]) * (2 * columns - 1)).astype(int)
    counts, sums = np.bincount(column), np.bincount(column, y)
    filled = np.flatnonzero(counts)
    line = np.interp(np.arange(2 * columns), filled, sums[filled] / counts[filled])
    dots = np.round((high - line.clip(low, high)) / spread * (4 * height - 1)).astype(int)
    cells = np.zeros((height, columns), int)
    for i, dot in enumerate(dots):
        before = dots[max(i - 1, 0)]
        for j in range(min(before + 1, dot), max(before - 1, dot) + 1):  # down or up from the neighbour, to join the dots
            cells[j // 4, i // 2] |= _BRAILLE[j % 4][i % 2]
    rows = [f"{label:>{gutter}} {'┤' if label else '│'}" for label in labels]
    rows = [row + "".join(chr(0x2800 + cell) for cell in line).rstrip("\u2800") for row, line in zip(rows, cells)]
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
    parts: list[RenderableType] = [
        Text(f"{steps:,} steps, {human.count(tokens)} tokens{loss}, {human.duration(wall)} of wall time")
    ]
    if ending:
        parts.append(Text(ending, "yellow"))
    if curve:
        parts += ["", Text(curve, "cyan", no_wrap=True)]
    table = _table("evaluation", "nats/token", "perplexity", "bits/byte", "tokens")
    for name, result in evaluations.items():
        forms = {"nll": ".4f", "perplexity": ".2f", "bits_per_byte": ".4f", "tokens": ",.0f"}
        cells = [format(result[key], form) if result.get(key) is not None else "-" for key, form in forms.items()]
        table.add_row(Text(name), *cells[:2], Text(cells[2], "bold green"), cells[3])
    parts += ["", table] if evaluations else []
    if comparison:
        parts.append(Text(comparison, "dim"))
    if wall > 0:
        table = _table("wall time", "", "share")
        for cause, value in sorted(seconds.items(), key=lambda item: -item[1]):
            table.add_row(cause.replace("_", " "), human.duration(value), f"{value / wall:.1%}")
        parts += ["", table]
    if files:
        table = _table("files")
        table.add_column("", overflow="fold")
        for name, where in files.items():
            table.add_row(Text(name), Text(str(where)))
        parts += ["", table]
    panel = Panel(Group(*parts), title=Text(run_name, "bold"), title_align="left", border_style="dim", padding=(0, 2))
    commands = [Text.assemble((f"{what}:\n", "dim"), (f"  {how}", "cyan")) for what, how in (next_commands or {}).items()]
    return Group(panel, *commands)


def _table(first: str, *numbers: str) -> Table:
    """A table without lines whose columns after the first are numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)
    table.add_column(first)
    for name in numbers:
        table.add_column(name, justify="right")
    return table
