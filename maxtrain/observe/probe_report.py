"""What a probe found, for people: memory by batch size as a table and a picture, and loss by
learning rate as a picture."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table
from rich.text import Text

from data_pipeline.shards import write_atomic
from maxtrain.observe import human
from maxtrain.observe.range_test import RangeTest
from maxtrain.parallel.memory import GIB, size

# How words are placed beside a point.
_WORDS = {"textcoords": "offset points", "size": 8}


class Try(NamedTuple):
    """One compiled batch size."""

    rows: int
    # Memory on each device; None: the compiler refused it as too much.
    num_bytes: int | None
    # How long compiling took.
    seconds: float
    fits: bool

    def words(self, limit: int) -> tuple[str, str]:
        """Its memory, and that as a share of the limit in bytes."""
        if self.num_bytes is None:
            return "too much", ""
        return size(self.num_bytes), f"{self.num_bytes / limit:.1%}"


class _Point(NamedTuple):
    """A try in the picture, with its memory in the picture's unit."""

    rows: int
    memory: float
    fits: bool


def table(tries: Sequence[Try], limit: int, length: int, pending: int = 0) -> Table:
    """A table of tries, one a line.

    Args:
        tries: in the order of the lines.
        limit: bytes of a device that may be used.
        length: tokens in a row.
        pending: rows of the batch that is being compiled now; 0: none is.
    """
    result = Table(box=None, header_style="bold", pad_edge=False)
    for head in ("rows", "tokens", "memory", "of limit", "compiled in"):
        result.add_column(head, justify="right")
    result.add_column("", justify="left")
    for t in tries:
        verdict = Text.from_markup("[yellow]does not fit[/]")
        if t.fits:
            verdict = Text.from_markup("[green]fits[/]")
        result.add_row(
            f"{t.rows:,}",
            human.count(t.rows * length),
            *t.words(limit),
            f"{t.seconds:.1f} s",
            verdict,
        )
    if pending:
        tokens = human.count(pending * length)
        result.add_row(f"{pending:,}", tokens, "", "", "", Text.from_markup("[dim]compiling[/]"))
    return result


def draw(
    path: Path, title: str, tries: Sequence[Try], limit: int, length: int, test: RangeTest | None
) -> None:
    """Draw what was probed as a PNG: a panel of memory, one of learning rates, or both.

    The file is written atomically.

    Args:
        path: of the file.
        title: above the panels.
        tries: empty: no panel of memory.
        limit: bytes of a device that may be used.
        length: tokens in a row.
        test: of learning rates; None: no panel of them.
    """
    # Importing matplotlib takes half a second, and only the end of a probe needs it.
    from matplotlib.figure import Figure  # noqa: PLC0415

    num_panels = int(bool(tries)) + int(test is not None)
    figure = Figure(figsize=(5.5 * num_panels, 4.2), dpi=150, layout="constrained")
    panels = list(np.atleast_1d(figure.subplots(1, num_panels)))
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", parse_math=False)
    if tries:
        _memory(panels.pop(0), tries, limit, length)
    if test is not None:
        _rates(panels.pop(0), test)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    write_atomic(path, picture.getvalue())


def _memory(axes: Any, tries: Sequence[Try], limit: int, length: int) -> None:
    """Draws memory by rows, and the limit."""
    unit = 1 << 20
    name = "MiB"
    if limit >= GIB:
        unit = GIB
        name = "GiB"
    limit_units = limit / unit
    compiled: list[_Point] = []
    refused = []
    for t in tries:
        if t.num_bytes is None:
            refused.append(t.rows)
        else:
            compiled.append(_Point(t.rows, t.num_bytes / unit, t.fits))
    compiled.sort()
    _limit_line(axes, limit_units, f"limit {size(limit)}")
    rows = [point.rows for point in compiled]
    axes.plot(rows, [point.memory for point in compiled], color="C7", linewidth=0.8, zorder=1)
    fitting = [point for point in compiled if point.fits]
    too_large = [point for point in compiled if not point.fits]
    _points(axes, fitting, "C2", "fits")
    _points(axes, too_large, "C1", "does not fit")
    if refused:
        heights = [limit_units] * len(refused)
        label = "refused by the compiler"
        axes.scatter(refused, heights, color="C1", marker="x", s=28, label=label)
    if fitting:
        largest = fitting[-1]
        axes.annotate(
            f"{largest.rows:,} rows",
            (largest.rows, largest.memory),
            (-8, -14),
            ha="right",
            fontweight="bold",
            **_WORDS,
        )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(_whole_number)
    # A try far above the limit would press all others to the bottom.
    top = limit_units
    for point in compiled:
        if point.memory < 2 * limit_units:
            top = max(top, point.memory)
    axes.set_ylim(0, 1.25 * top)
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    _finish(axes, f"rows of {length:,} tokens", f"memory of a device, {name}")


def _limit_line(axes: Any, height: float, words: str) -> None:
    axes.axhline(height, color="C3", linewidth=1)
    where = ("axes fraction", "data")
    axes.annotate(words, (0.01, height), (0, 4), where, color="C3", **_WORDS)


def _points(axes: Any, points: Sequence[_Point], color: str, label: str) -> None:
    rows = [point.rows for point in points]
    memory = [point.memory for point in points]
    axes.scatter(rows, memory, color=color, s=28, label=label, zorder=2)


def _whole_number(value: float, position: int | None) -> str:
    """The label of a tick."""
    return f"{value:,.0f}"


def _rates(axes: Any, test: RangeTest) -> None:
    """Draws loss by learning rate, and the rates that the test found."""
    axes.plot(test.rates, test.losses, color="C0", linewidth=0.8, alpha=0.35)
    axes.plot(test.rates, test.smooth, color="C0", label="loss, smoothed")
    low = test.smooth.min()
    high = test.smooth[0]
    room = high - low
    axes.set_ylim(max(0.0, low - 0.35 * room), high + 0.35 * room)
    for rate, color, style, label in (
        (test.steepest, "C7", ":", f"steepest fall, {test.steepest:.2g}"),
        (test.lowest, "C3", "--", f"lowest loss, {test.lowest:.2g}"),
        (test.suggestion, "C2", "-", f"suggested, {test.suggestion:.2g}"),
    ):
        axes.axvline(rate, color=color, linestyle=style, linewidth=1.2, label=label)
    axes.set_xscale("log")
    axes.legend(frameon=False, fontsize=8, loc="lower left")
    _finish(axes, "learning rate", "loss after a step, nats per token")


def _finish(axes: Any, x: str, y: str) -> None:
    """Names the axes, and draws a light grid without a frame."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
