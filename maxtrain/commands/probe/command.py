"""`maxtrain probe config=NAME key=value ...`: a batch that fits and is worth using, and a sensible
learning rate for that batch.

The largest batch is found by compiling the real training step from shapes alone: nothing is
executed, nothing runs out of memory, and the devices may be TPUs or GPUs that are elsewhere
(--topology). The recommended batch is a round number of rows that the data has room for, and beyond
which nothing gets faster. To find it, a few steps are timed, if the devices are here. Learning
rates are compared in short trainings with the recommended batch. The command writes probe.json and
probe.png into the run's folder; it reads and writes no checkpoint.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.live import Live
from rich.text import Text

from data_pipeline.base.console import SafeConsole
from data_pipeline.base.errors import (
    ConfigError,
    DataError,
    DivergedError,
    StorageError,
    UsageError,
    run_command,
)
from data_pipeline.base.masking import masked
from data_pipeline.loader.loader import TrainingData, open_training
from data_pipeline.shards import write_atomic
from maxtrain.commands.probe.batch_size import (
    NEARLY,
    BatchSizeAdvice,
    DataSize,
    fast_enough,
    fitting_data,
)
from maxtrain.commands.probe.rate_search import DivergenceDetector, choose, next_rate
from maxtrain.commands.probe.report import (
    LEAST_STEPS,
    BatchSizeTrial,
    RateTrial,
    RateTrials,
    draw,
    rate_table,
    table,
)
from maxtrain.config import RunConfig, fit_to_devices, from_command_line
from maxtrain.config.across.steps import fit_warmup, shortened
from maxtrain.config.rollouts import rollout_settings
from maxtrain.config.schema import AnomalyConfig
from maxtrain.config.sections.schedule import warmup_fits
from maxtrain.models.known import MODELS
from maxtrain.objectives.objective import REFERENCE_SUM
from maxtrain.observe import human
from maxtrain.observe.metrics import Stopwatch
from maxtrain.observe.progress import Progress
from maxtrain.parallel import distributed
from maxtrain.parallel.batches import abstract_batch
from maxtrain.parallel.memory import largest, memory_limit, parse_bytes, size
from maxtrain.parallel.topologies import described_devices
from maxtrain.storage.reading import require_no_url
from maxtrain.trainer.abstract_step import StepMemory
from maxtrain.trainer.data import (
    attach_stored_teacher,
    data_section,
    data_seed,
    have_end_marks,
    open_data,
    require_answers,
    with_vocabulary,
)
from maxtrain.trainer.job import Job, make_parts
from maxtrain.trainer.reference_logprobs import with_reference

# In which steps are made to measure their speed.
_SECONDS_OF_A_TRY = 1.0
# In seconds: no larger batch is tried then.
_SLOWEST_STEP = 10.0
# In a step: more than anybody trains with.
_MOST_TOKENS = 1 << 26


def measured_speeds(
    memory: StepMemory,
    most: int,
    length: int,
    show: Callable[[int, float], None] = lambda rows, speed: None,
) -> dict[int, float]:
    """Tokens per second of batches, by rows: twice as many each time, up to `most`, while that
    makes them faster.

    `show` gets rows and speed of each.
    """
    speeds: dict[int, float] = {}
    rows = memory.unit
    with jax.set_mesh(memory.parts.mesh):
        state = memory.parts.initial_state()
        while rows not in speeds:
            batch = _made_up_batch(memory, rows, length)
            compiled = memory.step.lower(state, batch).compile()
            state, _ = jax.block_until_ready(compiled(state, batch))
            begin = time.perf_counter()
            steps = 0
            while steps < 2 or (time.perf_counter() - begin < _SECONDS_OF_A_TRY and steps < 50):
                state, _ = jax.block_until_ready(compiled(state, batch))
                steps += 1
            seconds = (time.perf_counter() - begin) / steps
            before = max(speeds.values(), default=0.0)
            speeds[rows] = rows * length / seconds
            show(rows, speeds[rows])
            if speeds[rows] < before / NEARLY or seconds > _SLOWEST_STEP:
                break
            rows = min(2 * rows, most)
    return speeds


def _made_up_batch(memory: StepMemory, rows: int, length: int) -> dict[str, jax.Array]:
    """A batch of one document a row, whose every token is a target.

    Speed does not depend on what they say.
    """
    size = memory.parts.config.model.vocab_size
    assert size is not None
    numbers = np.broadcast_to(np.arange(length), (rows, length)) % size
    values = {
        "loss_mask": 1,
        "segment_ids": 1,
        "inputs": numbers,
        "targets": numbers,
        "positions": np.arange(length),
    }
    shapes = abstract_batch(memory.parts.mesh, rows, length, memory.parts.objective.arrays)
    batch = {}
    for name, shape in shapes.items():
        value = np.asarray(values.get(name, 0), shape.dtype)
        batch[name] = jax.device_put(np.broadcast_to(value, shape.shape), shape.sharding)
    return batch


def data_of(config: RunConfig) -> DataSize:
    """Return what the sources of a config hold. UserError: they are not here, or can't be
    planned.
    """
    without_sets = dataclasses.replace(config, eval=dataclasses.replace(config.eval, sets={}))
    data, _ = open_data(without_sets, None)
    one_pass = 0.0
    for name, source in zip(data.plan.names, data.plan.sources):
        epochs = config.data.sources[name].epochs or 1.0
        one_pass += source.num_tokens * min(1.0, epochs)
    try:
        plan = open_training(data_section(config), data_seed(config), "auto").plan
    # No source ends.
    except ConfigError:
        return DataSize(None, one_pass)
    return DataSize(float(plan.tokens_at(plan.num_steps)), one_pass)


def probe_batch(
    memory: StepMemory, limit: int, length: int, show: Callable[[list[BatchSizeTrial], int], None]
) -> list[BatchSizeTrial]:
    """Tries batch sizes; the largest that fits is the one to use.

    It is found to the row below 100 times `unit`, and to 1 % above. `show` gets the tries so far,
    and the rows tried now or 0.

    Raises:
        ConfigError: the smallest batch does not fit.
    """
    tries: list[BatchSizeTrial] = []

    def measure(n: int) -> int | None:
        show(tries, n * memory.unit)
        start = time.perf_counter()
        needed = memory.bytes(n * memory.unit, length)
        fits = needed is not None and needed <= limit
        tries.append(BatchSizeTrial(n * memory.unit, needed, time.perf_counter() - start, fits))
        return needed

    if not largest(measure, limit, max(1, _MOST_TOKENS // (memory.unit * length)), within=0.01):
        needed = "more"
        if tries[0].num_bytes is not None:
            needed = size(tries[0].num_bytes)
        rule = (
            "is the smallest batch that mesh and accumulation divide, "
            f"but a step needs {needed} of {size(limit)} a device"
        )
        fix = "Set model.remat=full, a higher mesh.fsdp or mesh.tensor, or a lower data.seq_length"
        raise ConfigError(f"data.batch_size={memory.unit} {rule}. {fix}.")
    show(tries, 0)
    return tries


def fitting_tokens(
    memory: StepMemory,
    limit: int,
    multiple: int = 128,
    show: Callable[[int], None] = lambda tokens: None,
) -> int:
    """The most tokens in one row of each device that fit.

    That is the max_tokens of data_pipeline.loader.balance.pack: a multiple of `multiple`, at most
    model.max_length. `show` gets those tried now. ConfigError: not even `multiple` fit.
    """
    multiple = min(multiple, memory.config.model.max_length)

    def measure(n: int) -> int | None:
        show(n * multiple)
        return memory.bytes(memory.unit, n * multiple)

    found = largest(measure, limit, memory.config.model.max_length // multiple)
    if found:
        return found * multiple
    rule = f"not even {multiple} tokens in a row of each device fit into {size(limit)}"
    fix = "Set model.remat=full, or a higher mesh.fsdp or mesh.tensor"
    raise ConfigError(f"max_tokens=auto: {rule}. {fix}.")


def learning_rate_trials(
    config: RunConfig,
    low: float,
    high: float,
    steps: int,
    most: int,
    show: Callable[[RateTrial], object] = lambda trial: None,
) -> RateTrials:
    """Train for a few steps with one learning rate after another.

    The first rate is the config's own, and the others are those that `next_rate` asks for. Each
    trial starts with the same weights and reads the first batches of the run. Its schedule has the
    shape of the run's own schedule.

    Args:
        config: its batch is the one that the rates are measured with.
        low, high: the lowest and the highest rate to try.
        steps: of each trial; at most those of the run are made.
        most: trials, at most.
        show: gets each trial when it has ended.

    Raises:
        UserError: no rate trains; data and config do not fit together.
    """
    data, _ = open_data(config, None)
    require_answers(config, data, {})
    attach_stored_teacher(config, data, {})
    num_steps = data.plan.num_steps
    config = fit_warmup(with_vocabulary(config, data.vocab_size), num_steps)
    made = min(steps, num_steps)
    schedule = shortened(config.schedule, num_steps, made)
    if not warmup_fits(schedule, made):
        raise UsageError(
            f"--steps={made:,} is too short for schedule.name={schedule.name}, whose parts would "
            f"have no step each. Set --steps to a larger number, at most {num_steps:,}."
        )
    # A trial must not change its weights or its rate when the loss rises: that is the result.
    anomaly = AnomalyConfig(loss_spike="off", grad_spike="off", dead="off", diverging="off")
    config = dataclasses.replace(config, schedule=schedule, anomaly=anomaly)
    trials: list[RateTrial] = []
    losses: dict[float, float] = {}
    rate: float | None = min(max(config.optimizer.learning_rate, low), high)
    while rate is not None and len(trials) < most:
        trial = _try_rate(config, data, rate, made)
        trials.append(trial)
        losses[rate] = trial.loss
        show(trial)
        rate = next_rate(losses, low, high)
    choice = choose(losses)
    if choice is None:
        raise DivergedError(
            f"the loss diverged at every learning rate from {min(losses):.3g} to "
            f"{max(losses):.3g}. Set --low to a lower rate, or look at the data."
        )
    found = RateTrials(trials, choice, config.data.batch_size, made, num_steps)
    if found.is_flat:
        raise DataError(
            f"the loss is {found.best.loss:.4g} at every learning rate from {min(losses):.3g} to "
            f"{max(losses):.3g}, so none of them trains in {made:,} steps. Set --high to a higher "
            "rate, set --steps to more steps, or look at the data."
        )
    return found


def _try_rate(config: RunConfig, data: TrainingData, rate: float, steps: int) -> RateTrial:
    """Train for some steps with this peak rate, from the run's first weights and batches."""
    began = time.perf_counter()
    schedule = config.schedule
    if schedule.min_learning_rate is not None:
        lowest = min(schedule.min_learning_rate, rate)
        schedule = dataclasses.replace(schedule, min_learning_rate=lowest)
    optimizer = dataclasses.replace(config.optimizer, learning_rate=rate)
    requested = dataclasses.replace(config, optimizer=optimizer, schedule=schedule)
    devices = jax.devices()
    fitted = fit_to_devices(requested, len(devices))
    parts = make_parts(
        fitted, devices, steps, len(data.plan.names), has_end_marks=have_end_marks(data)
    )
    job = Job(**vars(parts), requested=requested, data=data, sets={})
    step = job.make_step()
    losses: list[float] = []
    weights: list[float] = []
    divergence = DivergenceDetector()
    with jax.set_mesh(job.mesh), Progress(config.observe.progress, steps) as progress:
        progress.phase(f"compiling the step for learning rate {rate:.3g}")
        folder = Path(config.output_dir, config.run_name)
        if REFERENCE_SUM in data.numbers:
            # An earlier trial has attached the numbers of the reference to the data.
            state = job.initial_state()
        else:
            state, _ = with_reference(job, folder, job.initial_state, progress, Stopwatch())
        for batch, _ in job.batches(0, steps):
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
            weights.append(float(metrics["loss_weight"]))
            if divergence.has_diverged(losses[-1]):
                break
            record = None
            if len(losses) % max(1, steps // 4) == 0:
                record = {"loss": losses[-1]}
            progress.update(len(losses), record)
    seconds = time.perf_counter() - began
    return RateTrial.of(rate, np.array(losses), np.array(weights), steps, seconds)


def _require_probeable(config: RunConfig, what: str) -> None:
    """Raise a ConfigError for a config whose batches, or steps, are known only while it trains."""
    if what in ("batch", "both") and config.data.packing == "balanced":
        raise ConfigError(
            "data.packing=balanced counts documents in data.batch_size, and probe looks for the "
            "rows that fit into memory. "
            "Set data.packing=bins to find them, or use --what learning_rate or max_tokens."
        )
    if config.optimizer.accumulation == "auto":
        raise ConfigError(
            "optimizer.accumulation=auto is chosen when a run begins, for its batch, and probe "
            "looks for the batch. Set optimizer.accumulation to a number, such as 1."
        )
    if config.checkpoint.fork_from is not None:
        raise ConfigError(
            f"checkpoint.fork_from={masked(config.checkpoint.fork_from)} continues another run in "
            "the middle of its schedule and with its batches, and probe looks for those of a new "
            "run. Leave checkpoint.fork_from out."
        )
    if what in ("learning_rate", "both") and rollout_settings(config) is not None:
        raise ConfigError(
            f"objective={config.objective} samples its batches from the weights of each step, and "
            "probe compares learning rates on the same batches. Use --what batch, and compare "
            "short runs with different rates."
        )


def probe(config: RunConfig, args: argparse.Namespace, arguments: Sequence[str]) -> None:
    """Run the command: look for a batch, then for a learning rate with that batch.

    Args:
        config: of the run.
        args: the options.
        arguments: those of the config, which the printed training command repeats.
    """
    console = SafeConsole()
    what = args.what
    if what is None:
        what = "batch" if args.topology else "both"
    _require_probeable(config, what)
    devices = None
    require_no_url(config.output_dir, "output_dir")
    mesh = config.mesh
    if args.topology:
        devices = described_devices(args.topology)
        mesh = dataclasses.replace(config.mesh, platform="cpu", simulated_devices=None)
    distributed.start(mesh, config.observe.compilation_cache, config.determinism == "full")
    if jax.process_count() > 1:
        raise UsageError(
            "probe runs in one process, on one machine. "
            "Start it once, with --topology for devices elsewhere."
        )
    found: dict[str, Any] = {}
    record: dict[str, Any] = {}
    tries: list[BatchSizeTrial] = []
    rates = None
    limit = 0
    length = 0
    if what != "learning_rate":
        if config.model.vocab_size is None:
            data, _ = open_data(config, None)
            config = with_vocabulary(config, data.vocab_size)
        memory = StepMemory(config, devices or jax.devices())
        limit = args.memory or memory_limit(memory.devices[0], described=bool(devices))
        if what == "max_tokens":
            _print_max_tokens(memory, limit, console)
            return
        of_stages = [stage.seq_length for stage in config.data.stages if stage.seq_length]
        length = max([config.data.seq_length, *of_stages])
        tries, record["batch"] = _look_for_batch(
            config, memory, limit, length, measure=devices is None, console=console
        )
        rows = record["batch"]["batch_size"]
        found["data.batch_size"] = rows
        # The rates are compared with the batch that is recommended.
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, batch_size=rows))
        # Its arrays would take the memory of the trials.
        del memory
    if what != "batch":
        rates = _look_for_rate(config, args, console)
        found["optimizer.learning_rate"] = rates.choice.rate
        record["learning_rate"] = rates.record()
    folder = Path(config.output_dir, config.run_name)
    folder.mkdir(parents=True, exist_ok=True)
    picture = folder / "probe.png"
    draw(picture, config.run_name, tries, limit, length, rates)
    written = folder / "probe.json"
    record["overrides"] = found
    write_atomic(written, json.dumps(record, indent=1).encode())
    console.print(Text(f"picture: {picture}   record: {written}", "dim"), soft_wrap=True)
    if rates is None:
        message = (
            f"optimizer.learning_rate={config.optimizer.learning_rate:g} was not measured with "
            f"{config.data.batch_size:,} rows a step."
        )
        if devices is None:
            message += " Use --what both to measure rates with this batch."
        console.print(Text(message, "yellow"), soft_wrap=True)
    _print_command(arguments, found, console)


def _look_for_rate(config: RunConfig, args: argparse.Namespace, console: Console) -> RateTrials:
    """Compare learning rates in short trainings, and print what was measured."""
    console.print(
        Text(
            f"learning rate: up to {args.tries} trainings of {args.steps:,} steps, "
            f"{config.data.batch_size:,} rows a step, each from the same weights and batches"
        )
    )

    def show(trial: RateTrial) -> None:
        console.print(f"  {trial.describe()}", style="dim")

    rates = learning_rate_trials(config, args.low, args.high, args.steps, args.tries, show)
    console.print(rate_table(rates))
    console.print(Text(rates.describe()), soft_wrap=True)
    for warning in rates.warnings(args.low, args.high):
        console.print(Text(warning, "yellow"), soft_wrap=True)
    return rates


def _print_command(arguments: Sequence[str], found: dict[str, Any], console: Console) -> None:
    """The training with what was found."""
    kept = [word for word in arguments if word.partition("=")[0] not in found]
    settings = [f"{key}={value}" for key, value in found.items()]
    command = shlex.join(["maxtrain", "train", *kept, *settings])
    text = Text.assemble(("to train with what was found:\n", "dim"), (f"  {command}", "cyan"))
    console.print(text, soft_wrap=True)


def _name(memory: StepMemory) -> str:
    return f"{len(memory.devices)} x {memory.devices[0].device_kind}"


def _print_max_tokens(memory: StepMemory, limit: int, console: Console) -> None:
    """Finds the max_tokens of pack, and prints it."""
    rule = "one row on each, at most model.max_length"
    console.print(Text(f"max_tokens: {_name(memory)}, {size(limit)} each; {rule}"))

    def show(tokens: int) -> None:
        console.print(f"compiling {tokens:,} tokens")

    tokens = fitting_tokens(memory, limit, show=show)
    console.print(f"  pack(lengths, max_tokens={tokens})", style="cyan")


def _look_for_batch(
    config: RunConfig,
    memory: StepMemory,
    limit: int,
    length: int,
    *,
    measure: bool,
    console: Console,
) -> tuple[list[BatchSizeTrial], dict[str, Any]]:
    """Finds the batch to use, and prints how; the batches tried, and the record of it."""
    rows = f"rows of {length:,} tokens, multiples of {memory.unit:,}"
    console.print(Text(f"batch: {_name(memory)}, {size(limit)} each; {rows}"))
    with contextlib.ExitStack() as shown:
        live = None
        if console.is_terminal:
            live = shown.enter_context(Live(console=console, transient=True))

        def show(tries: list[BatchSizeTrial], pending: int) -> None:
            if live:
                live.update(table(tries, limit, length, pending))
                return
            if tries:
                fits, *_ = tries[-1].words(limit)
                console.print(f"{tries[-1].rows:,} rows: {fits}")
            if pending:
                console.print(f"compiling {pending:,} rows")

        tries = probe_batch(memory, limit, length, show)
    console.print(table(tries, limit, length))
    most = max(one.rows for one in tries if one.fits)
    advice, speeds = _advise(config, memory, most, length, measure=measure, console=console)
    record = {
        "devices": _name(memory),
        "limit_bytes": limit,
        "seq_length": length,
        "unit": memory.unit,
        "batch_size": advice.rows,
        "why": advice.why,
        "largest": most,
        "tokens_per_second": speeds,
        "tries": [one._asdict() for one in tries],
    }
    return tries, record


def _advise(
    config: RunConfig,
    memory: StepMemory,
    most: int,
    length: int,
    *,
    measure: bool,
    console: Console,
) -> tuple[BatchSizeAdvice, dict[int, float]]:
    """Return the batch size to use among those that fit, with the reason; and the speeds, if
    measured.
    """
    data = None
    try:
        data = data_of(config)
    except (ConfigError, DataError, StorageError) as error:
        message = f"not compared with the size of the data, which is not here: {error}"
        console.print(Text(message.splitlines()[0], "yellow"))
    steps = None
    if config.steps != "auto":
        steps = config.steps
    advice = fitting_data(most, memory.unit, length, data, steps, config.data.batch_size)
    speeds: dict[int, float] = {}

    def show(rows: int, speed: float) -> None:
        console.print(f"  {rows:,} rows: {human.count(speed)} tokens/s", style="dim")

    if measure:
        speeds = measured_speeds(memory, advice.rows, length, show)
        advice = fast_enough(advice, config.data.batch_size, speeds)
    tokens = human.count(advice.rows * length)
    recommended = f"recommended: {advice.rows:,} rows, {tokens} tokens a step"
    if advice.why:
        recommended += f" ({advice.why})"
    console.print(Text(f"largest that fits: {most:,} rows; {recommended}"), soft_wrap=True)
    return advice, speeds


def _rate(text: str) -> float:
    rate = float(text)
    if not 0 < rate < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be more than 0. Write for example 1e-5")
    return rate


def _parse(argv: Sequence[str], prog: str) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog=prog,
        allow_abbrev=False,
        description="Find a batch size that fits and is worth using, and a good learning rate. "
        "The config is as for `maxtrain train`.",
        usage=f"{prog} [options] config=NAME ...",
    )
    parser.add_argument(
        "--what",
        choices=["batch", "learning_rate", "both", "max_tokens"],
        help="what to look for (default: both, with --topology batch); "
        "max_tokens: that of `pack`, for sequences of different lengths",
    )
    parser.add_argument(
        "--memory",
        metavar="BYTES",
        type=parse_bytes,
        help="memory of each device, such as 15.5GiB (default: what the device reports)",
    )
    parser.add_argument(
        "--topology",
        metavar="NAME",
        help="compile for devices that need not be here, such as v5e:2x4 or h100:8; needs the "
        "extra tpu or compile-gpu",
    )
    parser.add_argument(
        "--low",
        metavar="RATE",
        type=_rate,
        default=1e-6,
        help="lowest learning rate to try (default: %(default)s)",
    )
    parser.add_argument(
        "--high",
        metavar="RATE",
        type=_rate,
        default=10.0,
        help="highest learning rate to try (default: %(default)s)",
    )
    parser.add_argument(
        "--steps",
        metavar="N",
        type=int,
        default=100,
        help="steps of the training with each learning rate (default: %(default)s)",
    )
    parser.add_argument(
        "--tries",
        metavar="N",
        type=int,
        default=10,
        help="learning rates to try, at most (default: %(default)s)",
    )
    args, rest = parser.parse_known_args(argv)
    if args.topology and args.what in ("learning_rate", "both"):
        parser.error(
            "--topology has devices to compile for, not to run on: "
            "use --what batch, or leave --topology out"
        )
    if args.low >= args.high:
        fix = f"Set for example --low {args.high / 1e5:g}"
        parser.error(f"--low {args.low:g} must be less than --high {args.high:g}. {fix}")
    if args.steps < LEAST_STEPS:
        parser.error(
            f"--steps {args.steps} must be at least {LEAST_STEPS}, so that losses can be "
            "compared. Set for example --steps 100"
        )
    if args.tries < 3:
        parser.error(
            f"--tries {args.tries} must be at least 3: a rate and both its neighbours. "
            "Set for example --tries 10"
        )
    return args, rest


def main(argv: Sequence[str], prog: str = "maxtrain probe") -> int:
    """Run the command `prog` with `argv`; the exit code."""
    if argv is None:
        argv = sys.argv[1:]
    try:
        args, rest = _parse(argv, prog)
    # argparse has printed the reason.
    except SystemExit as stop:
        return UsageError.exit_code if stop.code else 0
    config = from_command_line(rest, prog, MODELS)
    return run_command(lambda: probe(config, args, rest), resumes=False)
