"""The end of a run for people: its curves as a picture and as text, and a summary. Works on records
of `read_metrics`."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from data_pipeline.shards import write_atomic
from maxtrain.observe import human
from maxtrain.observe.panels import REWARD, Curves, has_rewards, panels_of
from maxtrain.ops.quantity import NLL, Quantity

_BLOCKS = " ▁▂▃▄▅▆▇█"
_LONG = 1e6  # a perplexity that would make the table too wide
_SMOOTHING = 50  # a point is the mean of at most one part in so many of the curve, to each side
_LEAST_SMOOTHED = 2 * _SMOOTHING
_PANEL_INCHES = 1.2


def plot_curves(
    records: Sequence[Mapping[str, Any]],
    path: str | Path,
    title: str,
    subtitle: str = "",
    left_out: Sequence[Sequence[int]] = (),
    resumes: Sequence[int] = (),
    changes: Sequence[int] = (),
    loss: Quantity = NLL,
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
    first = "loss"
    of_sets = loss.name
    first_label = f"loss, {loss.unit}"
    if has_rewards(train):
        first = of_sets = first_label = REWARD
    heights = (4, *[1] * (len(panels) + 3))
    size = (9, 8 + _PANEL_INCHES * len(panels))
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    top, *drawn, norm, speed, rate = figure.subplots(
        len(heights), 1, sharex=True, height_ratios=heights
    )
    top.set_title(title, loc="left", fontsize=14, fontweight="bold", pad=22, parse_math=False)
    top.annotate(
        subtitle,
        (0, 1),
        xytext=(0, 7),
        xycoords="axes fraction",
        textcoords="offset points",
        size=9,
    )
    steps, losses = _columns(train, first)
    if is_smoothed := len(losses) >= _LEAST_SMOOTHED:
        top.plot(steps, losses, color="C0", linewidth=0.8, alpha=0.3)
    top.plot(
        steps, _smooth(losses), color="C0", label="train, smoothed" if is_smoothed else "train"
    )
    for i, (name, series) in enumerate(evaluation_series(evals).items()):
        steps, values = _columns(series, of_sets)
        # A set of text beside rewards.
        if of_sets == REWARD and not len(values):
            continue
        last = f", {values[-1]:.4f} at step {steps[-1]:,.0f}" if len(values) else ""
        top.plot(
            steps, values, ":o", color=f"C{1 + i % 9}", markersize=5, label=f"eval {name}{last}"
        )
    for i, (first, last) in enumerate(left_out):
        top.axvspan(
            first - 0.5,
            last + 0.5,
            color="C3",
            alpha=0.15,
            linewidth=0,
            label=None if i else "left out",
        )
    counts = [sum(v for k, v in r.items() if k.startswith("anomalies/")) for r in train]
    if found := [
        r["step"] for r, before, count in zip(train, [0, *counts], counts) if count > before
    ]:
        top.plot(
            found,
            [0.02] * len(found),
            "^",
            color="C3",
            transform=top.get_xaxis_transform(),
            label="anomalies",
        )
    for marked, style, label in ((resumes, ":", "resumed"), (changes, "--", "other batches")):
        for i, step in enumerate(marked):
            top.axvline(
                step + 0.5, color="0.5", linewidth=0.8, linestyle=style, label=None if i else label
            )
    # Losses fall, and rewards rise.
    corner = "upper right"
    if first == REWARD:
        corner = "lower right"
    top.legend(loc=corner, frameon=False)
    norm.plot(*_columns(train, "grad_norm"), color="C5")
    speed.plot(*_columns(train, "tokens_per_second"), color="C2", label="training")
    sampled = _columns(train, "sampled_tokens_per_second")
    if sampled.size:
        speed.plot(*sampled, color="C1", label="sampling")
        _put_legend_beside(speed)
    rate.plot(*_columns(train, "learning_rate"), color="C4")
    for axes, panel in zip(drawn, panels, strict=True):
        _draw_panel(axes, panel, train, evals)
    labels = (
        (top, first_label),
        *[(axes, panel.label) for axes, panel in zip(drawn, panels, strict=True)],
        (norm, "gradient norm"),
        (speed, "tokens/s"),
        (rate, "learning rate"),
    )
    for axes, label in labels:
        axes.set_ylabel(label)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
    speed.set_ylim(bottom=0)
    speed.yaxis.set_major_formatter(lambda value, _: human.count(value))
    rate.set_xlabel("step")
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    write_atomic(Path(path), picture.getvalue())


def _draw_panel(
    axes: Any,
    panel: Curves,
    train: Sequence[Mapping[str, Any]],
    evals: Sequence[Mapping[str, Any]],
) -> None:
    """The lines of a panel; of what is evaluated, too, as points of the set's colour."""
    for name, words in panel.lines.items():
        columns = _columns(train, name)
        # Some are only evaluated.
        if columns.size:
            axes.plot(*columns, label=words or "train")
    has_evaluations = False
    for i, (name, series) in enumerate(evaluation_series(evals).items()):
        for number, words in panel.lines.items():
            steps, values = _columns(series, number)
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


def evaluation_series(evals: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Records of evaluations that can be compared, by set; one that was exchanged goes on under a
    name of its own."""
    series: dict[str, list[Mapping[str, Any]]] = {}
    names: dict[str, list[str]] = {}  # of each set, the different texts that it was, in their order
    for record in evals:
        texts = names.setdefault(record["set"], [])
        text = record.get("data", texts[-1] if texts else "")
        if text not in texts:
            texts.append(text)
        number = texts.index(text) + 1
        series.setdefault(
            record["set"] if number == 1 else f"{record['set']} ({number})", []
        ).append(record)
    return series


def _columns(records: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    """Steps and values of the records in which that number is finite, as [2, records]."""
    pairs = np.array(
        [(r["step"], r[name]) for r in records if r.get(name) is not None], float
    ).reshape(-1, 2)
    return pairs[np.isfinite(pairs[:, 1])].T


def _smooth(values: np.ndarray) -> np.ndarray:
    """Mean over a centred window of up to a 25th of the curve, narrower at its ends; short curves
    as they are."""
    index, sums = np.arange(len(values)), np.concatenate([[0.0], np.cumsum(values)])
    half = np.minimum(len(values) // _SMOOTHING, np.minimum(index, index[::-1]))
    return (sums[index + half + 1] - sums[index - half]) / (2 * half + 1)


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
    columns = max(8, width - gutter - 2)
    line = np.interp(np.linspace(x[0], x[-1], columns), x, _smooth(y))
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
            f"{'':{gutter}} └{'─' * columns}",
            f"{'':{gutter + 2}}{first}{last:>{columns - len(first)}}",
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
    """What to print at the end of a run: rich text that also reads well without a terminal.

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
    asked = [r for r in evals if "prompts" in r]
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
    steps_drawn, values = _columns(train, drawn)
    if curve := terminal_curve(steps_drawn, values):
        if drawn == REWARD:
            parts += ["", Text("reward", "bold")]
        parts += ["", Text(curve, "cyan", no_wrap=True)]
    if asked:
        parts += ["", _table(_HEADS_OF_PROMPTS, _answered(asked))]
    if evaluations:
        columns = ("evaluation", "nats/token", "perplexity", "bits/byte", "targets")
        cells = {name: _evaluation(record) for name, record in evaluations.items()}
        parts += ["", _table(columns, cells)]
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


def _answered(asked: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """The first and the last evaluation of each set of prompts, as rows: before and after."""
    forms = {
        "accuracy": "{:.1%}",
        REWARD: "{:.4f}",
        "completion_length": "{:.1f}",
        "truncated": "{:.1%}",
        "prompts": "{:,}",
    }
    rows = {}
    for name, series in evaluation_series(asked).items():
        for record in (series[0], series[-1]):
            cells = []
            for number, form in forms.items():
                cells.append(form.format(record[number]) if number in record else "-")
            rows[f"{name}, step {record['step']:,}"] = cells
    return rows


def _last_reward(train: Sequence[Mapping[str, Any]]) -> list[str]:
    """The reward of the first rollout and of the last one."""
    _, rewards = _columns(train, REWARD)
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
    """What the training loss was in the end, and over how many steps; empty if no record has
    one."""
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
