"""`maxtrain probe config=NAME key=value ...`: a batch that fits and is worth using, and a sensible
learning rate.

The largest batch is found by compiling the real training step from shapes alone: nothing is
executed, nothing runs out of memory, and the devices may be TPUs or GPUs that are elsewhere
(--topology). What is recommended is a round number of rows that the data has room for, and beyond
which nothing gets faster; for that a few steps are made, if the devices are here. The rate is found
by a short run with the real step on the real data. Writes probe.json and probe.png into the run's
folder; reads and writes no checkpoint.
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

from data_pipeline.console import SafeConsole
from data_pipeline.errors import (
    ConfigError,
    DataError,
    DivergedError,
    StorageError,
    UsageError,
    run_command,
)
from data_pipeline.loader import open_training
from data_pipeline.shards import write_atomic
from maxtrain.config import RunConfig, fit_to_devices, from_command_line
from maxtrain.config.rollouts import rollout_settings
from maxtrain.config.schema import AnomalyConfig, PieceConfig, ScheduleConfig
from maxtrain.inputs import (
    attach_stored_teacher,
    data_section,
    data_seed,
    have_end_marks,
    open_data,
    require_answers,
    with_vocabulary,
)
from maxtrain.job import Job, make_parts
from maxtrain.models.known import MODELS
from maxtrain.observe import human
from maxtrain.observe.batch_advice import NEARLY, Advice, Data, fast_enough, fitting_data
from maxtrain.observe.metrics import Stopwatch
from maxtrain.observe.probe_report import Try, draw, table
from maxtrain.observe.progress import Progress
from maxtrain.observe.range_test import RangeTest, diverged, outcome
from maxtrain.parallel import distributed
from maxtrain.parallel.batches import abstract_batch
from maxtrain.parallel.memory import largest, memory_limit, parse_bytes, size
from maxtrain.parallel.topologies import described_devices
from maxtrain.step_memory import StepMemory
from maxtrain.storage.reading import require_no_url
from maxtrain.stored_reference import with_reference

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


def data_of(config: RunConfig) -> Data:
    """What the sources of a config hold. UserError: they are not here, or can't be planned."""
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
        return Data(None, one_pass)
    return Data(float(plan.tokens_at(plan.num_steps)), one_pass)


def probe_batch(
    memory: StepMemory, limit: int, length: int, show: Callable[[list[Try], int], None]
) -> list[Try]:
    """Tries batch sizes; the largest that fits is the one to use.

    It is found to the row below 100 times `unit`, and to 1 % above. `show` gets the tries so far,
    and the rows tried now or 0.

    Raises:
        ConfigError: the smallest batch does not fit.
    """
    tries: list[Try] = []

    def measure(n: int) -> int | None:
        show(tries, n * memory.unit)
        start = time.perf_counter()
        needed = memory.bytes(n * memory.unit, length)
        fits = needed is not None and needed <= limit
        tries.append(Try(n * memory.unit, needed, time.perf_counter() - start, fits))
        return needed

    if not largest(measure, limit, max(1, _MOST_TOKENS // (memory.unit * length)), within=0.01):
        needed = "more"
        if tries[0].num_bytes is not None:
            needed = size(tries[0].num_bytes)
        rule = (
            "is the smallest batch that mesh and accumulation divide, "
            f"but a step needs {needed} of {size(limit)} a device"
        )
        mend = "Set model.remat=full, a higher mesh.fsdp or mesh.tensor, or a lower data.seq_length"
        raise ConfigError(f"data.batch_size={memory.unit} {rule}. {mend}.")
    show(tries, 0)
    return tries


def fitting_tokens(
    memory: StepMemory,
    limit: int,
    multiple: int = 128,
    show: Callable[[int], None] = lambda tokens: None,
) -> int:
    """The most tokens in one row of each device that fit.

    That is the max_tokens of data_pipeline.balance.pack: a multiple of `multiple`, at most
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
    mend = "Set model.remat=full, or a higher mesh.fsdp or mesh.tensor"
    raise ConfigError(f"max_tokens=auto: {rule}. {mend}.")


def probe_learning_rate(config: RunConfig, low: float, high: float, steps: int) -> RangeTest:
    """A run from fresh weights over the first batches, whose learning rate grows.

    It grows exponentially from `low` to `high`.

    Raises:
        UserError: the loss never fell, or was not finite from the start; data and config do not fit
            together.
    """
    if rollout_settings(config) is not None:
        raise ConfigError(
            f"objective={config.objective}: a range test reads its batches ahead, and these are "
            "sampled from the weights of each step. Compare a few short runs in place of it."
        )
    data, _ = open_data(config, None)
    require_answers(config, data, {})
    attach_stored_teacher(config, data, {})
    optimizer = dataclasses.replace(config.optimizer, learning_rate=high)
    piece = PieceConfig("exponential", start=low / high, end=1.0)
    growth = ScheduleConfig("pieces", 0, pieces=(piece,))
    # Nothing may keep weights or rate as they are: that the loss goes up is what is looked for.
    blind = AnomalyConfig(loss_spike="off", grad_spike="off", dead="off", diverging="off")
    asked = dataclasses.replace(config, optimizer=optimizer, schedule=growth, anomaly=blind)
    asked = with_vocabulary(asked, data.vocab_size)
    steps = min(steps, data.plan.num_steps)
    devices = jax.devices()
    fitted = fit_to_devices(asked, len(devices))
    num_sources = len(data.plan.names)
    marks = have_end_marks(data)
    parts = make_parts(fitted, devices, steps, num_sources, has_end_marks=marks)
    job = Job(**vars(parts), asked=asked, data=data, sets={})
    step = job.make_step()
    rates: list[float] = []
    losses: list[float] = []
    with jax.set_mesh(job.mesh), Progress(config.observe.progress, steps) as progress:
        progress.phase("compiling the step")
        folder = Path(config.output_dir, config.run_name)
        state, _ = with_reference(job, folder, job.initial_state, progress, Stopwatch())
        for batch, _ in job.batches(0, steps):
            state, metrics = step(state, batch)
            rates.append(float(metrics["learning_rate"]))
            losses.append(float(metrics["loss"]))
            if diverged(losses):
                break
            told = None
            if len(losses) % 10 == 0:
                told = {"loss": losses[-1]}
            progress.update(len(losses), told)
    finite = np.isfinite(losses).nonzero()[0]
    if len(finite) < 8:
        mend = "Set --low to a tenth of it, or look at the data"
        rule = f"the loss was finite for {len(finite)} steps only, from learning rate {low:.3g} on"
        raise DivergedError(f"{rule}. {mend}.")
    # A loss is that of the updates before it.
    return outcome(np.array(rates)[finite[:-1]], np.array(losses)[finite[1:]])


def _require_numbers(config: RunConfig, looks_for_rows: bool) -> None:
    """ConfigError: a config whose rows, or micro-batches, are known with its steps only."""
    if looks_for_rows and config.data.packing == "balanced":
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


def probe(config: RunConfig, asked: argparse.Namespace, arguments: Sequence[str]) -> None:
    """What the command does.

    Args:
        arguments: those of the config, to be printed with what was found.
    """
    console = SafeConsole()
    what = asked.what
    if what is None:
        what = "batch" if asked.topology else "both"
    looks_for_rows = what in ("batch", "both")
    _require_numbers(config, looks_for_rows)
    devices = None
    require_no_url(config.output_dir, "output_dir")
    mesh = config.mesh
    if asked.topology:
        devices = described_devices(asked.topology)
        mesh = dataclasses.replace(config.mesh, platform="cpu", simulated_devices=None)
    distributed.start(mesh, config.observe.compilation_cache, config.determinism == "full")
    if jax.process_count() > 1:
        raise UsageError(
            "probe runs in one process, on one machine. "
            "Start it once, with --topology for devices elsewhere."
        )
    found: dict[str, Any] = {}
    record: dict[str, Any] = {}
    tries: list[Try] = []
    test = None
    limit = 0
    length = 0
    if what != "learning_rate":
        if config.model.vocab_size is None:
            data, _ = open_data(config, None)
            config = with_vocabulary(config, data.vocab_size)
        memory = StepMemory(config, devices or jax.devices())
        limit = asked.memory or memory_limit(memory.devices[0], described=bool(devices))
        if what == "max_tokens":
            _print_max_tokens(memory, limit, console)
            return
        of_stages = [stage.seq_length for stage in config.data.stages if stage.seq_length]
        length = max([config.data.seq_length, *of_stages])
        tries, record["batch"] = _look_for_batch(
            config, memory, limit, length, measure=devices is None, console=console
        )
        found["data.batch_size"] = record["batch"]["batch_size"]
    if what != "batch":
        of = f"{config.data.batch_size:,} rows a step, as data.batch_size says"
        rates = f"{asked.low:.3g} to {asked.high:.3g} in {asked.steps:,} steps"
        console.print(Text(f"learning rate: {rates}, {of}"))
        test = probe_learning_rate(config, asked.low, asked.high, asked.steps)
        found["optimizer.learning_rate"] = float(f"{test.suggestion:.2g}")
        record["learning_rate"] = _plain(test._asdict())
        record["learning_rate"]["batch_size"] = config.data.batch_size
    folder = Path(config.output_dir, config.run_name)
    folder.mkdir(parents=True, exist_ok=True)
    picture = folder / "probe.png"
    draw(picture, config.run_name, tries, limit, length, test)
    written = folder / "probe.json"
    record["overrides"] = found
    write_atomic(written, json.dumps(record, indent=1).encode())
    console.print(Text(f"picture: {picture}   record: {written}", "dim"), soft_wrap=True)
    rows = config.data.batch_size
    recommended = found.get("data.batch_size", rows)
    if test is not None and recommended != rows:
        options = f"data.batch_size={recommended} --what learning_rate"
        mend = f"Add {options} to look for that of the recommended batch."
        said = Text(f"The rate is for {rows:,} rows a step. {mend}", "yellow")
        console.print(said, soft_wrap=True)
    _print_command(arguments, found, console)


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    """Arrays as lists, for JSON."""
    plain = {}
    for name, value in fields.items():
        plain[name] = value.tolist() if isinstance(value, np.ndarray) else value
    return plain


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
) -> tuple[list[Try], dict[str, Any]]:
    """Finds the batch to use, and prints how; the batches tried, and the record of it."""
    rows = f"rows of {length:,} tokens, multiples of {memory.unit:,}"
    console.print(Text(f"batch: {_name(memory)}, {size(limit)} each; {rows}"))
    with contextlib.ExitStack() as shown:
        live = None
        if console.is_terminal:
            live = shown.enter_context(Live(console=console, transient=True))

        def show(tries: list[Try], pending: int) -> None:
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
) -> tuple[Advice, dict[int, float]]:
    """The batch to use of those that fit, told with the reason; and the speeds, if measured."""
    data = None
    try:
        data = data_of(config)
    except (ConfigError, DataError, StorageError) as error:
        said = f"not held against the size of the data, which is not here: {error}"
        console.print(Text(said.splitlines()[0], "yellow"))
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
        default=1e-5,
        help="first learning rate (default: %(default)s)",
    )
    parser.add_argument(
        "--high",
        metavar="RATE",
        type=_rate,
        default=1.0,
        help="last learning rate (default: %(default)s)",
    )
    parser.add_argument(
        "--steps",
        metavar="N",
        type=int,
        default=100,
        help="steps of the learning-rate test (default: %(default)s)",
    )
    asked, rest = parser.parse_known_args(argv)
    if asked.topology and asked.what in ("learning_rate", "both"):
        parser.error(
            "--topology has devices to compile for, not to run on: "
            "use --what batch, or leave --topology out"
        )
    if asked.low >= asked.high:
        mend = f"Set for example --low {asked.high / 1e5:g}"
        parser.error(f"--low {asked.low:g} must be less than --high {asked.high:g}. {mend}")
    if asked.steps < 16:
        mend = "Set --steps to 16 or more, such as 100"
        parser.error(f"--steps {asked.steps} are too few to see a curve. {mend}")
    return asked, rest


def main(argv: Sequence[str] | None = None, prog: str = "python -m maxtrain.probe") -> int:
    """Run the command `prog` with `argv` (None: the process's); the exit code."""
    if argv is None:
        argv = sys.argv[1:]
    try:
        asked, rest = _parse(argv, prog)
    # argparse has said why.
    except SystemExit as stop:
        return UsageError.exit_code if stop.code else 0
    config = from_command_line(rest, prog, MODELS)
    return run_command(lambda: probe(config, asked, rest), resumes=False)


if __name__ == "__main__":
    sys.exit(main())
