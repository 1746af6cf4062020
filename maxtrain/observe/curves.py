"""The curves of a run as a picture. Works on records of `read_metrics`."""

import io
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from data_pipeline.shards import write_atomic
from maxtrain.observe import human
from maxtrain.observe.panels import REWARD, CurvePanel, has_rewards, panels_of
from maxtrain.observe.series import LEAST_SMOOTHED, columns, evaluation_series, smooth
from maxtrain.ops.quantity import NLL, Metric

_PANEL_INCHES = 1.2
# Letters in a line of small print.
_SUBTITLE_WIDTH = 110
_LEFT_OUT = "left out"


class _MainChart(NamedTuple):
    """Main chart: the names of its numbers in records of training and evaluations, and the label of
    its axis.
    """

    of_training: str
    of_sets: str
    label: str


def plot_curves(
    records: Sequence[Mapping[str, Any]],
    path: str | Path,
    title: str,
    subtitle: str = "",
    left_out: Sequence[Sequence[int]] = (),
    resumes: Sequence[int] = (),
    changes: Sequence[int] = (),
    loss: Metric = NLL,
) -> None:
    """Draw loss, evaluations, gradient norm, speed and learning rate over steps as a PNG, which
    appears in one piece. Of a run that learns from rewards, draw these instead of the loss, and the
    panels of panels.py.

    Steps with anomalies are marked.

    Args:
        records: of `read_metrics`.
        path: of the picture.
        title: in large print.
        subtitle: one line in small print; empty for none.
        left_out: first and last of steps that a rollback left out, to be shaded.
        resumes: finished steps at which the run went on after a stop.
        changes: finished steps after which batches had another shape.
        loss: what the losses are, and are called in evaluations.
    """
    # Half a second, which only the end of a run has.
    from matplotlib.figure import Figure  # noqa: PLC0415

    train = [record for record in records if record["kind"] == "train"]
    evals = [record for record in records if record["kind"] == "eval"]
    panels = panels_of(train, evals)
    main = _MainChart("loss", loss.name, f"loss, {loss.unit}")
    # Losses fall, and rewards rise.
    corner = "upper right"
    if has_rewards(train):
        main = _MainChart(REWARD, REWARD, REWARD)
        corner = "lower right"
    heights = (4, *[1] * (len(panels) + 3))
    size = (9, 8 + _PANEL_INCHES * len(panels))
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    top, *drawn, norm, speed, rate = figure.subplots(
        len(heights), 1, sharex=True, height_ratios=heights
    )
    _write_title(top, title, subtitle)
    _draw_main(top, main, train, evals)
    _shade(top, left_out)
    _mark_anomalies(top, train)
    _mark_steps(top, resumes, ":", "resumed")
    _mark_steps(top, changes, "--", "other batches")
    top.legend(loc=corner, frameon=False)
    for axes, panel in zip(drawn, panels, strict=True):
        _draw_panel(axes, panel, train, evals)
        axes.set_ylabel(panel.label)
    norm.plot(*columns(train, "grad_norm"), color="C5")
    _draw_speed(speed, train)
    rate.plot(*columns(train, "learning_rate"), color="C4")
    top.set_ylabel(main.label)
    norm.set_ylabel("gradient norm")
    speed.set_ylabel("tokens/s")
    rate.set_ylabel("learning rate")
    rate.set_xlabel("step")
    for axes in (top, *drawn, norm, speed, rate):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    write_atomic(Path(path), picture.getvalue())


def _write_title(axes: Any, title: str, subtitle: str) -> None:
    # The layout makes room for all text, and a plan of many stages is wider than the picture.
    lines = textwrap.wrap(subtitle, _SUBTITLE_WIDTH)
    pad = 22 + 11 * max(0, len(lines) - 1)
    axes.set_title(title, loc="left", fontsize=14, fontweight="bold", pad=pad, parse_math=False)
    axes.annotate(
        "\n".join(lines),
        (0, 1),
        xytext=(0, 7),
        xycoords="axes fraction",
        textcoords="offset points",
        size=9,
        parse_math=False,
    )


def _draw_main(
    axes: Any,
    main: _MainChart,
    train: Sequence[Mapping[str, Any]],
    evals: Sequence[Mapping[str, Any]],
) -> None:
    """The curve of training, smoothed if it is long, and the points of each evaluation set."""
    steps, values = columns(train, main.of_training)
    label = "train"
    if len(values) >= LEAST_SMOOTHED:
        label = "train, smoothed"
        axes.plot(steps, values, color="C0", linewidth=0.8, alpha=0.3)
    axes.plot(steps, smooth(values), color="C0", label=label)
    for i, (name, series) in enumerate(evaluation_series(evals).items()):
        steps, values = columns(series, main.of_sets)
        # A set of text beside rewards.
        if main.of_sets == REWARD and not len(values):
            continue
        label = f"eval {name}"
        if len(values):
            label += f", {values[-1]:.4f} at step {steps[-1]:,.0f}"
        axes.plot(steps, values, ":o", color=f"C{1 + i % 9}", markersize=5, label=label)


def _shade(axes: Any, spans: Sequence[Sequence[int]]) -> None:
    """Steps that a rollback left out, each span by its first and last one."""
    for i, (first, last) in enumerate(spans):
        label = None if i else _LEFT_OUT
        axes.axvspan(first - 0.5, last + 0.5, color="C3", alpha=0.15, linewidth=0, label=label)


def _mark_anomalies(axes: Any, train: Sequence[Mapping[str, Any]]) -> None:
    """A mark at each record by which the counts of anomalies have grown."""
    found = []
    before = 0
    for record in train:
        count = sum(value for name, value in record.items() if name.startswith("anomalies/"))
        if count > before:
            found.append(record["step"])
        before = count
    if not found:
        return
    axes.plot(
        found,
        [0.02] * len(found),
        "^",
        color="C3",
        transform=axes.get_xaxis_transform(),
        label="anomalies",
    )


def _mark_steps(axes: Any, steps: Sequence[int], style: str, words: str) -> None:
    """A line after each of these steps."""
    for i, step in enumerate(steps):
        label = None if i else words
        axes.axvline(step + 0.5, color="0.5", linewidth=0.8, linestyle=style, label=label)


def _draw_speed(axes: Any, train: Sequence[Mapping[str, Any]]) -> None:
    axes.plot(*columns(train, "tokens_per_second"), color="C2", label="training")
    sampled = columns(train, "sampled_tokens_per_second")
    if sampled.size:
        axes.plot(*sampled, color="C1", label="sampling")
        _put_legend_beside(axes)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: human.count(value))


def _draw_panel(
    axes: Any,
    panel: CurvePanel,
    train: Sequence[Mapping[str, Any]],
    evals: Sequence[Mapping[str, Any]],
) -> None:
    """The lines of a panel; of what is evaluated, too, as points of the set's colour."""
    for name, words in panel.lines.items():
        values = columns(train, name)
        # Some are only evaluated.
        if values.size:
            axes.plot(*values, label=words or "train")
    has_evaluations = False
    for i, (name, series) in enumerate(evaluation_series(evals).items()):
        for number, words in panel.lines.items():
            steps, values = columns(series, number)
            if words or not len(values):
                continue
            has_evaluations = True
            color = f"C{1 + i % 9}"
            axes.plot(steps, values, ":o", color=color, markersize=4, label=f"eval {name}")
    if has_evaluations or any(panel.lines.values()):
        _put_legend_beside(axes)


def _put_legend_beside(axes: Any) -> None:
    """A small chart has no room for it."""
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=7)
