"""What a probe found, for people: memory over batch sizes, and loss over learning rates, as one
picture and as a table."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from data_pipeline.shards import write_atomic
from maxtrain.observe import human
from maxtrain.observe.range_test import RangeTest
from maxtrain.parallel.memory import GIB, size


class Try(NamedTuple):
    """One compiled batch size."""

    rows: int
    num_bytes: int | None  # on each device; None: the compiler found them to be too many
    seconds: float  # of compiling
    fits: bool

    def words(self, limit: int) -> tuple[str, str]:
        """Its memory, and that as a share of the limit."""
        return (
            ("too much", "")
            if self.num_bytes is None
            else (size(self.num_bytes), f"{self.num_bytes / limit:.1%}")
        )


def table(tries: Sequence[Try], limit: int, length: int, pending: int = 0) -> Table:
    """A line for each try, in order; `pending` rows are being compiled now (0: none)."""
    result = Table(box=None, header_style="bold", pad_edge=False)
    for head in ("rows", "tokens", "memory", "of limit", "compiled in", ""):
        result.add_column(head, justify="right" if head else "left")
    for t in tries:
        verdict = "[green]fits[/]" if t.fits else "[yellow]does not fit[/]"
        result.add_row(
            f"{t.rows:,}",
            human.count(t.rows * length),
            *t.words(limit),
            f"{t.seconds:.1f} s",
            verdict,
        )
    if pending:
        result.add_row(
            f"{pending:,}", human.count(pending * length), "", "", "", "[dim]compiling[/]"
        )
    return result


def draw(
    path: Path, title: str, tries: Sequence[Try], limit: int, length: int, test: RangeTest | None
) -> None:
    """Draw what was probed (no tries, or no test: not that) as a PNG, which appears at its path in
    one piece."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - half a second, which only the end of a probe has

    wanted = [bool(tries), test is not None]
    figure = Figure(figsize=(5.5 * sum(wanted), 4.2), dpi=150, layout="constrained")
    panels = list(np.atleast_1d(figure.subplots(1, sum(wanted))))
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", parse_math=False)
    if tries:
        _memory(panels.pop(0), tries, limit, length)
    if test is not None:
        _rates(panels.pop(0), test)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    write_atomic(path, picture.getvalue())


def _memory(axes: Any, tries: Sequence[Try], limit: int, length: int) -> None:
    unit, name = (GIB, "GiB") if limit >= GIB else (1 << 20, "MiB")
    known = sorted((t.rows, t.num_bytes / unit, t.fits) for t in tries if t.num_bytes is not None)
    refused = [t.rows for t in tries if t.num_bytes is None]
    limit_units = limit / unit
    axes.axhline(limit_units, color="C3", linewidth=1)
    words = {"textcoords": "offset points", "size": 8}
    axes.annotate(
        f"limit {size(limit)}",
        (0.01, limit_units),
        (0, 4),
        ("axes fraction", "data"),
        color="C3",
        **words,
    )
    axes.plot(
        [rows for rows, _, _ in known],
        [needed for _, needed, _ in known],
        color="C7",
        linewidth=0.8,
        zorder=1,
    )
    for good, color, label in ((True, "C2", "fits"), (False, "C1", "does not fit")):
        these = [(rows, needed) for rows, needed, fits in known if fits == good]
        axes.scatter(*np.reshape(these, (-1, 2)).T, color=color, s=28, label=label, zorder=2)
    if refused:
        axes.scatter(
            refused,
            [limit_units] * len(refused),
            color="C1",
            marker="x",
            s=28,
            label="refused by the compiler",
        )
    for rows, needed, _ in [k for k in known if k[2]][-1:]:
        axes.annotate(
            f"{rows:,} rows", (rows, needed), (-8, -14), ha="right", fontweight="bold", **words
        )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_ylim(
        0,
        1.25 * max([limit_units, *(needed for _, needed, _ in known if needed < 2 * limit_units)]),
    )
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    _finish(axes, f"rows of {length:,} tokens", f"memory of a device, {name}")


def _rates(axes: Any, test: RangeTest) -> None:
    axes.plot(test.rates, test.losses, color="C0", linewidth=0.8, alpha=0.35)
    axes.plot(test.rates, test.smooth, color="C0", label="loss, smoothed")
    low, high = test.smooth.min(), test.smooth[0]
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
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
