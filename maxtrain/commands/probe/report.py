"""Report of a probe, as tables and a picture: memory by batch size, and loss by learning rate."""

import io
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table
from rich.text import Text

from data_pipeline.shards import write_atomic
from maxtrain.commands.probe.rate_search import RateChoice
from maxtrain.observe import human
from maxtrain.parallel.memory import GIB, size

# How words are placed beside a point.
_WORDS = {"textcoords": "offset points", "size": 8}
# The fewest steps of a training whose losses are compared.
LEAST_STEPS = 16
# The share of the steps of such a training, at its end, whose mean loss is compared.
_END = 0.2
# Losses that differ by a smaller share are the same: the rates make no difference.
_FLAT = 1e-3


class BatchSizeTrial(NamedTuple):
    """One compiled batch size."""

    rows: int
    # Memory on each device; None: the compiler refused it as too much.
    num_bytes: int | None
    # How long compiling took.
    seconds: float
    fits: bool

    def words(self, limit: int) -> tuple[str, str]:
        """Return the memory, and its share of the limit in bytes."""
        if self.num_bytes is None:
            return "too much", ""
        return size(self.num_bytes), f"{self.num_bytes / limit:.1%}"


class RateTrial(NamedTuple):
    """A short training with one learning rate.

    Attributes:
        rate: the peak of its schedule.
        loss: mean over the targets of its last steps; infinity if it diverged.
        steps: that were made; fewer than planned if it diverged.
        seconds: that it took, compilation included.
    """

    rate: float
    loss: float
    steps: int
    seconds: float

    @classmethod
    def of(
        cls, rate: float, losses: np.ndarray, weights: np.ndarray, planned: int, seconds: float
    ) -> "RateTrial":
        """Summarize a training by its last steps.

        Args:
            losses: mean loss of each step.
            weights: number of targets, or of whatever else the loss is a mean of.
            planned: steps that the training should have had; it diverged if it has fewer.
        """
        loss = math.inf
        if len(losses) == planned:
            last = steps_compared(planned)
            loss = float(np.average(losses[-last:], weights=weights[-last:]))
        if not math.isfinite(loss):
            loss = math.inf
        return cls(rate, loss, len(losses), seconds)

    def outcome(self) -> str:
        """The loss, as text."""
        if math.isfinite(self.loss):
            return f"{self.loss:.4f}"
        return f"diverged after {self.steps:,} steps"

    def describe(self) -> str:
        """The trial in one line."""
        return f"learning rate {self.rate:g}: {self.outcome()} ({human.duration(self.seconds)})"


def steps_compared(steps: int) -> int:
    """The number of steps at the end of a training whose losses are averaged."""
    return max(LEAST_STEPS // 2, round(_END * steps))


class RateTrials(NamedTuple):
    """Trainings with several learning rates, and the rate to recommend.

    Attributes:
        trials: in the order in which they were made.
        choice: the recommended rate and its neighbours.
        batch_size: rows of a step, in all trials.
        steps: of each trial.
        num_steps: of the whole run.
    """

    trials: list[RateTrial]
    choice: RateChoice
    batch_size: int
    steps: int
    num_steps: int

    @property
    def best(self) -> RateTrial:
        """The trial of the recommended rate."""
        return self.of_rate(self.choice.rate)

    @property
    def is_flat(self) -> bool:
        """Return whether all rates train alike, so that none can be recommended."""
        losses = [trial.loss for trial in self.trials]
        return len(losses) > 1 and max(losses) - min(losses) < _FLAT * abs(min(losses))

    def of_rate(self, rate: float) -> RateTrial:
        """The trial of a rate that was tried."""
        return next(trial for trial in self.trials if trial.rate == rate)

    def record(self) -> dict[str, Any]:
        """The numbers, for probe.json."""
        trials = []
        for trial in sorted(self.trials):
            loss = trial.loss if math.isfinite(trial.loss) else None
            trials.append(trial._asdict() | {"loss": loss})
        return {
            "batch_size": self.batch_size,
            "steps": self.steps,
            "steps_of_run": self.num_steps,
            "steps_compared": steps_compared(self.steps),
            "suggestion": self.choice.rate,
            "below": self.choice.below,
            "above": self.choice.above,
            "trials": trials,
        }

    def describe(self) -> str:
        """The recommendation in one line, with the losses of its neighbours."""
        neighbours = []
        for rate in (self.choice.below, self.choice.above):
            if rate is not None:
                neighbours.append(f"{rate:g}: {self.of_rate(rate).outcome()}")
        beside = ""
        if neighbours:
            beside = f"; beside it {', '.join(neighbours)}"
        return (
            f"recommended: learning rate {self.choice.rate:g} with {self.batch_size:,} rows a step "
            f"(loss {self.best.loss:.4f}{beside})"
        )

    def warnings(self, low: float, high: float) -> Iterator[str]:
        """Yield the limits of the measurement.

        Args:
            low, high: the lowest and the highest rate that could be tried.
        """
        ends = (
            (self.choice.below, "lower", f"--low={low:g}", self.choice.rate <= low),
            (self.choice.above, "higher", f"--high={high:g}", self.choice.rate >= high),
        )
        for neighbour, word, option, is_end in ends:
            if neighbour is None and is_end:
                yield (
                    f"{self.choice.rate:g} is the end of the range ({option}), and a {word} rate "
                    f"may be better. Set {option.partition('=')[0]} to a {word} rate to see."
                )
            elif neighbour is None:
                yield (
                    f"No {word} rate than {self.choice.rate:g} was tried. Set --tries to more "
                    "than the number of trainings above."
                )
        if self.steps < self.num_steps:
            yield (
                f"Each training had {self.steps:,} steps, with the schedule of the run shortened "
                f"to them. The run has {self.num_steps:,} steps, and longer runs often need lower "
                "rates: before a long run, compare this rate with the one below it in longer "
                "runs, or set --steps to more steps."
            )


class _Point(NamedTuple):
    """A try in the picture, with its memory in the picture's unit."""

    rows: int
    memory: float
    fits: bool


def table(tries: Sequence[BatchSizeTrial], limit: int, length: int, pending: int = 0) -> Table:
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


def rate_table(rates: RateTrials) -> Table:
    """A table of learning rates, from the lowest to the highest."""
    result = Table(box=None, header_style="bold", pad_edge=False)
    result.add_column("learning rate", justify="right")
    result.add_column(f"loss of the last {steps_compared(rates.steps):,} steps", justify="right")
    result.add_column("took", justify="right")
    result.add_column("", justify="left")
    for trial in sorted(rates.trials):
        verdict = Text("")
        if trial.rate == rates.choice.rate:
            verdict = Text("recommended", "green")
        result.add_row(f"{trial.rate:g}", trial.outcome(), human.duration(trial.seconds), verdict)
    return result


def draw(
    path: Path,
    title: str,
    tries: Sequence[BatchSizeTrial],
    limit: int,
    length: int,
    rates: RateTrials | None,
) -> None:
    """Draw what was probed as a PNG: a panel of memory, one of learning rates, or both.

    The file is written atomically.

    Args:
        path: of the file.
        title: above the panels.
        tries: empty: no panel of memory.
        limit: bytes of a device that may be used.
        length: tokens in a row.
        rates: None: no panel of learning rates.
    """
    # Importing matplotlib takes half a second, and only the end of a probe needs it.
    from matplotlib.figure import Figure  # noqa: PLC0415

    num_panels = int(bool(tries)) + int(rates is not None)
    figure = Figure(figsize=(5.5 * num_panels, 4.2), dpi=150, layout="constrained")
    panels = list(np.atleast_1d(figure.subplots(1, num_panels)))
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", parse_math=False)
    if tries:
        _memory(panels.pop(0), tries, limit, length)
    if rates is not None:
        _rates(panels.pop(0), rates)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    write_atomic(path, picture.getvalue())


def _memory(axes: Any, tries: Sequence[BatchSizeTrial], limit: int, length: int) -> None:
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


def _rates(axes: Any, rates: RateTrials) -> None:
    """Draw the loss by learning rate; trials that diverged are crosses at the top."""
    finished = sorted(trial for trial in rates.trials if math.isfinite(trial.loss))
    diverged = [trial.rate for trial in rates.trials if not math.isfinite(trial.loss)]
    losses = [trial.loss for trial in finished]
    axes.plot([trial.rate for trial in finished], losses, color="C0", marker="o", markersize=4)
    low = min(losses)
    room = max(max(losses) - low, 0.01 * abs(low), 1e-6)
    top = low + 1.2 * room
    axes.set_ylim(low - 0.3 * room, top + 0.1 * room)
    if diverged:
        heights = [top] * len(diverged)
        axes.scatter(diverged, heights, color="C1", marker="x", s=28, label="diverged")
    axes.axvline(
        rates.choice.rate, color="C2", linewidth=1.2, label=f"recommended, {rates.choice.rate:g}"
    )
    axes.set_xscale("log")
    axes.legend(frameon=False, fontsize=8, loc="lower left")
    rows = f"{rates.batch_size:,} rows, {rates.steps:,} steps"
    _finish(axes, f"learning rate ({rows})", "loss of the last steps")


def _finish(axes: Any, x: str, y: str) -> None:
    """Names the axes, and draws a light grid without a frame."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
