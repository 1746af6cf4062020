"""`maxtrain plan config=NAME key=value ...`: what a run would read and when; starts no device.

`maxtrain plan RUN --step N`: which rows and documents a step reads, or has read, and the beginning
of their text.
"""

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from data_pipeline.base.console import SafeConsole
from data_pipeline.base.errors import DataError, UsageError, UserError, run_command
from data_pipeline.loader.loader import TrainingData, open_training
from data_pipeline.plan.plan import Plan
from data_pipeline.prepare.preview import describe_step
from maxtrain.checkpoint.listing import complete, latest_state, read_record, second_of
from maxtrain.checkpoint.rollback import left_out, read_rollbacks
from maxtrain.checkpoint.run_state import RunState
from maxtrain.commands.plan.options import PlanOptions
from maxtrain.config import RunConfig
from maxtrain.config.rollouts import rollout_settings
from maxtrain.config.run_path import run_path, run_url
from maxtrain.observe.human import count
from maxtrain.observe.launches import launch_of, read_launches
from maxtrain.observe.metrics import read_metrics
from maxtrain.storage.reading import readable_or_new
from maxtrain.trainer.data import (
    data_section,
    data_seed,
    open_data,
    open_training_data,
    with_vocabulary,
)
from maxtrain.trainer.run_dir import launched_config

_BARS = " ▁▂▃▄▅▆▇█"


def table(plan: Plan) -> Table:
    """A line for each stretch of the run with one mixture and shape of batch.

    It has the share of each source, and its epochs at the end of the stretch.
    """
    result = Table(box=None, header_style="bold", pad_edge=False)
    of_sources = [f"{name}\nshare, epochs" for name in plan.names]
    for head in ("steps", "tokens", f"{plan.unit} x length", *of_sources):
        result.add_column(head, justify="right", overflow="fold")
    for first, end in itertools.pairwise(plan.changes()):
        shares = plan.shares_at(first)
        epochs = plan.epochs_at(end)
        span = plan.span(first)
        steps = f"{first:,} to {end:,}"
        tokens = count(plan.tokens_at(end) - plan.tokens_at(first))
        cells = []
        for name in plan.names:
            if shares[name]:
                cells.append(f"{shares[name]:.1%}  {epochs[name]:5.3g}")
            else:
                cells.append("-")
        result.add_row(steps, tokens, f"{span.batch_size:,} x {span.seq_length:,}", *cells)
    return result


def timeline(plan: Plan, width: int) -> str:
    """The share of each source over the steps of the run, as bars in `width` columns.

    The last line says which steps.
    """
    label = max(len(word) for word in (*plan.names, "step"))
    first = plan.changes()[0]
    end = f"{plan.num_steps:,}"
    columns = max(len(end) + 2, width - label - 2)
    steps = [first + i * (plan.num_steps - first) // columns for i in range(columns)]
    shares = [plan.shares_at(step) for step in steps]
    lines = []
    for name in plan.names:
        bars = [_BARS[math.ceil(8 * at[name])] for at in shares]
        lines.append(f"{name:>{label}}  {''.join(bars)}")
    lines.append(f"{'step':>{label}}  {first:<{columns - len(end)},}{end}")
    return "\n".join(lines)


def show(config: RunConfig, run: Path) -> None:
    """Print the plan of a run: the one that it goes on with, if it has begun.

    UserError: what can't be planned.
    """
    console = SafeConsole()
    data, _ = open_data(config, _newest_state(run, config))
    with_vocabulary(config, data.vocab_size)
    plan = data.plan
    console.print(Text(data.describe()), soft_wrap=True)
    console.print(table(plan))
    console.print(Text(timeline(plan, min(console.width, 120)), "cyan", no_wrap=True))


def show_step(options: PlanOptions, run: Path, step: int) -> None:
    """Print what a step, counted from 1, reads or has read.

    UserError: there is no such step, or its data is not known any more.
    """
    console = SafeConsole()
    data, known = step_data(options, run, step)
    for line in describe_step(data, step - 1, options.rows, min(max(console.width, 80), 160)):
        console.print(Text(line), soft_wrap=True)
    console.print(Text(known), soft_wrap=True)
    if step - 1 in left_out(read_rollbacks(run) or []):
        console.print("A rollback has left this step out: none of its targets counts.")


def _newest_state(run: Path, config: RunConfig) -> RunState | None:
    """The run at the checkpoint that it goes on from; None: it has none."""
    folder = run / "checkpoints"
    return latest_state(folder, second=second_of(folder, config.checkpoint))


def step_data(options: PlanOptions, run: Path, step: int) -> tuple[TrainingData, str]:
    """The data that a step, counted from 1, reads or has read; and how that is known.

    It is the data as the launch had it that made the step, or as the run will go on.

    Raises:
        UsageError: the run ends before that step.
        DataError: what is on record of the steps around it was read from other rows.
        UserError: the data can't be opened, or the config is not what it was.
    """
    recorded = _recorded_batches(run)
    if step > max(recorded, default=0):
        config = options.config
        data = open_training_data(config, _newest_state(run, config))
        _require_step(data, run, step)
        return data, "To be read, unless data or settings change before."
    return _data_as_read(options, run, step, recorded)


def _data_as_read(
    options: PlanOptions, run: Path, step: int, recorded: dict[int, str]
) -> tuple[TrainingData, str]:
    """Return the data of a step that has been made; see `step_data`. `recorded`: digests of batches
    by step.
    """
    launches = read_launches(run)
    launch = launch_of(launches, step)
    config = options.config
    if launch:
        config = launched_config(run, launch, options.overrides)
    recorded = {n: batch for n, batch in recorded.items() if launch_of(launches, n) is launch}
    near = {n: recorded[n] for n in _nearest(recorded, step)}
    planned = None
    if rollout_settings(config) is not None:
        # What is on record of their batches is of completions, and not of the prompts in the data.
        near = {}
        planned = launch and launch["data"]
    problems: list[UserError] = []
    for start in _starts(run, config, step):
        try:
            data = open_training(data_section(config), data_seed(config), config.steps, start)
        except UserError as error:
            problems.append(error)
            continue
        if planned and data.fingerprint_at(data.plan.num_steps) != planned:
            continue
        if _has_step(data, step) and _gives(data, near):
            if planned:
                return data, "Prompts of the step, as the launch that made it has them on record."
            return data, _how_known(list(near), step)
    if problems:
        raise problems[0]
    rule = "do not give the batches that are on record around that step"
    fix = "Bring back the data that the run has read, and leave out settings that it did not have"
    raise DataError(f"--step={step}: the data and settings of {run} {rule}. {fix}.")


def _has_step(data: TrainingData, step: int) -> bool:
    """Return whether a plan has a step, counted from 1."""
    return data.plan.spans[0].step < step <= data.plan.num_steps


def _gives(data: TrainingData, recorded: dict[int, str]) -> bool:
    """Return whether the batches of these steps, counted from 1, are those of these digests."""
    return all(
        _has_step(data, step) and data.digest_at(step - 1) == digest
        for step, digest in recorded.items()
    )


def _recorded_batches(run: Path) -> dict[int, str]:
    """The digests of the rows that steps have read, as far as they are on record, by step."""
    digests = {}
    for record in read_metrics(run):
        if record["kind"] == "train" and "batch" in record:
            digests[record["step"]] = record["batch"]
    return digests


def _starts(run: Path, config: RunConfig, step: int) -> Iterator[dict[str, Any] | None]:
    """Yield where the plan that a step was part of may have begun.

    That is the start of the run, or a change that was accepted.
    """
    yield None
    folder = run / "checkpoints"
    seen = []
    for path in reversed(complete(folder, second_of(folder, config.checkpoint)).values()):
        read = RunState.from_record(read_record(path)).data
        for start in (read.start, read.cursor):
            if start and start["step"] < step and start not in seen:
                seen.append(start)
                yield start


def _nearest(recorded: dict[int, str], step: int) -> list[int]:
    """The nearest recorded steps before and after a step; only that step, if it is recorded."""
    before = max((n for n in recorded if n <= step), default=None)
    after = min((n for n in recorded if n >= step), default=None)
    return sorted({n for n in (before, after) if n is not None})


def _how_known(near: list[int], step: int) -> str:
    if step in near:
        return "Read by the run: its record of this step names the same batch."
    if near:
        steps = " and ".join(f"step {n:,}" for n in near)
        return f"Read by the run, as the batches on record of {steps} show."
    return (
        "Read by the run, if data and settings are what they were: "
        "no batch of that launch is on record to compare with."
    )


def _require_step(data: TrainingData, run: Path, step: int) -> None:
    """UsageError: the plan ends before a step. DataError: it begins after it."""
    end = data.plan.num_steps
    if step > end:
        rule = f"is after the end of {run}, at step {end:,} because {data.plan.ends_because}"
        fix = f"Use a step from 1 to {end}, or set steps higher"
        raise UsageError(f"--step={step} {rule}. {fix}.")
    first = data.plan.spans[0].step
    if step <= first:
        rule = f"was read with other settings, which {run} has no record of"
        raise DataError(f"--step={step} {rule}. Use a step after {first}.")


def main(options: PlanOptions) -> int:
    """Runs the command; the exit code."""

    def job() -> None:
        config = options.config
        run = options.run or readable_or_new(run_path(config), run_url(config))
        if options.step is None:
            show(options.config, run)
        else:
            show_step(options, run, options.step)

    return run_command(job)
