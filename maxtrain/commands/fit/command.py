"""`maxtrain fit config=NAME key=value ... topology=NAME`: whether a run fits onto devices that need
not be here, what its devices send each other, and how long a step takes at least.

The real training step is compiled from shapes alone, by the compiler of those devices. Writes
fit.json into the run's folder. The command ends with an error if the step does not fit.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.text import Text

from data_pipeline.base.console import SafeConsole
from data_pipeline.base.errors import ConfigError, DataError, StorageError, UsageError, run_command
from data_pipeline.loader.loader import TrainingData
from data_pipeline.shards import write_atomic
from maxtrain.commands.fit.estimate import (
    FitEstimate,
    RowBatchShape,
    batch_shape,
    fit_step,
    require_fit,
)
from maxtrain.commands.fit.report import duration, mesh_words, report, search_table
from maxtrain.commands.fit.search import search
from maxtrain.config import RunConfig, accumulations, from_command_line, with_accumulation
from maxtrain.models.known import MODELS
from maxtrain.parallel import distributed
from maxtrain.parallel.memory import bytes_on_device, fewest, memory_limit, parse_bytes, size
from maxtrain.parallel.mesh import AXES
from maxtrain.parallel.topologies import EXAMPLES, described_devices
from maxtrain.trainer.abstract_step import StepPrograms
from maxtrain.trainer.auto_accumulation import describe
from maxtrain.trainer.data import open_data, open_training_data, with_vocabulary

_MOST_TRIES = 32
_MOST_ROWS = 10


def fit(config: RunConfig, args: argparse.Namespace) -> None:
    """Run the command.

    Raises:
        ConfigError: the step does not fit, or nothing that was tried does.
    """
    console = SafeConsole()
    devices = described_devices(args.topology)
    mesh = dataclasses.replace(config.mesh, platform="cpu", simulated_devices=None)
    distributed.start(mesh, None, config.determinism == "full")
    if jax.process_count() > 1:
        raise UsageError("fit runs in one process, on one machine. Start it once.")
    data = None
    if config.model.vocab_size is None:
        data, _ = open_data(config, None)
        config = with_vocabulary(config, data.vocab_size)
    largest = None
    if config.data.packing == "balanced":
        largest = _largest_balanced(config, data, bool(args.search), console)
    limit = args.memory or memory_limit(devices[0], described=True)
    record: dict[str, Any] = {"topology": args.topology}
    if args.search:
        best = _search(config, devices, limit, args, console, record)
    else:
        best = _fit(config, devices, limit, largest, console)
        record |= best.record()
        console.print(report(best))
    folder = Path(config.output_dir, config.run_name)
    folder.mkdir(parents=True, exist_ok=True)
    written = folder / "fit.json"
    write_atomic(written, json.dumps(record, indent=1).encode())
    console.print(Text(f"record: {written}", "dim"), soft_wrap=True)
    require_fit(best)


def _largest_balanced(
    config: RunConfig, data: TrainingData | None, searches: bool, console: Console
) -> RowBatchShape | None:
    """The shape of the largest batch that is made of documents, and a line that says where it is
    from. None: a row for each document has to do, since the data is not here, or several sizes may
    be tried.

    Args:
        data: None: it is not open yet.
    """
    bound = batch_shape(config)
    why = "as for all batches of --search"
    if not searches:
        try:
            data = data or open_training_data(config, None)
        except (DataError, StorageError) as error:
            why = f"since their data can't be read here ({str(error).splitlines()[0]})"
        else:
            shapes = [RowBatchShape(*shape) for shape in data.largest_shapes(0)]
            largest = max(shapes, key=lambda shape: shape.rows * shape.length, default=bound)
            words = (
                f"data.packing=balanced: {largest.rows:,} rows, the most of all that are counted"
            )
            console.print(Text(f"{words} ahead."), soft_wrap=True)
            return largest
    words = (
        f"data.packing=balanced: counted with {bound.rows:,} rows, a row for each document, {why}."
    )
    console.print(Text(f"{words} There may be fewer.", "yellow"), soft_wrap=True)
    return None


def _fit(
    config: RunConfig,
    devices: Sequence[Any],
    limit: int,
    largest: RowBatchShape | None,
    console: Console,
) -> FitEstimate:
    """Return how the step fits; with optimizer.accumulation=auto that of the fewest micro-batches
    that do, or else of the most.
    """
    if config.optimizer.accumulation != "auto":
        return fit_step(config, devices, limit, largest)
    # If no choice divides batch and mesh, this raises the error to report.
    choices = accumulations(config, len(devices)) or [1]
    tried: list[FitEstimate] = []

    def measure(count: int) -> int | None:
        found = fit_step(with_accumulation(config, count), devices, limit)
        tried.append(found)
        if found.fits:
            return found.total
        return max(found.total or found.refused or 0, limit + 1)

    plain = StepPrograms(with_accumulation(config, 1), devices)
    found = fewest(choices, measure, bytes_on_device(plain.parts.abstract), limit)
    if found.count is not None:
        console.print(Text(describe(found, limit)), soft_wrap=True)
    elif not tried:
        measure(choices[-1])
    return tried[-1]


def _search(
    config: RunConfig,
    devices: Sequence[Any],
    limit: int,
    args: argparse.Namespace,
    console: Console,
    record: dict[str, Any],
) -> FitEstimate:
    """Searches, prints what fits, and reports the fastest; or, if nothing fits, what came
    closest."""
    where = f"{len(devices):,} x {devices[0].device_kind}, {size(limit)} each"
    all_tried: list[FitEstimate] = []

    def begin(num_choices: int) -> None:
        what = f"at most {args.tries:,} steps on {num_choices:,} meshes"
        if args.batches:
            what = f"at most {args.tries:,} steps on {num_choices:,} meshes with their batches"
        console.print(Text(f"{where}: compiling {what}, those first that promise most"))

    def show(found: FitEstimate) -> None:
        all_tried.append(found)
        words = "does not fit"
        if found.fits:
            assert found.times is not None
            words = duration(found.times.seconds)
        config = found.config
        what = f"{found.batch.rows:,} rows, accumulation={config.optimizer.micro_batches}"
        line = f"{mesh_words(found)}, {what}, remat={config.model.remat}: {words}"
        line = f"  {len(all_tried)}. {line}"
        console.print(Text(line, "dim"), soft_wrap=True)

    batches = args.batches or [config.data.batch_size]
    found = search(config, devices, limit, batches, args.tries, begin, show)
    if found.num_slower:
        slower = f"{found.num_slower:,} meshes send too much to be as fast as what fits"
        console.print(Text(f"not compiled: {slower}", "dim"), soft_wrap=True)
    record["tried"] = [one.record() for one in all_tried]
    if not found.is_whole:
        fix = f"Raise --tries from {args.tries} to see the others."
        console.print(Text(f"not all were compiled. {fix}", "yellow"))
    if found.fits:
        console.print(search_table(found.fits[:_MOST_ROWS]))
        record["best"] = found.fits[0].record()
        return _told(found.fits[0], console)
    if not all_tried:
        raise ConfigError(
            f"topology={args.topology}: the training state alone needs more than the "
            f"{size(limit)} of a device on every mesh. Take more devices, or a smaller model."
        )
    return min(all_tried, key=lambda one: one.total or one.refused or sys.maxsize)


def _told(best: FitEstimate, console: Console) -> FitEstimate:
    """Reports the best, and prints its settings."""
    console.print("")
    console.print(report(best))
    config = best.config
    settings = [
        *(f"mesh.{axis}={getattr(config.mesh, axis)}" for axis in AXES),
        f"data.batch_size={config.data.batch_size}",
        f"optimizer.accumulation={config.optimizer.micro_batches}",
        f"model.remat={config.model.remat}",
    ]
    if config.model.remat == "named":
        for place in ("on_device", "on_host"):
            names = ", ".join(getattr(config.model.kept, place))
            settings.append(f"'model.kept.{place}=[{names}]'")
    text = Text.assemble(("settings of the fastest:\n", "dim"), (f"  {' '.join(settings)}", "cyan"))
    console.print(text, soft_wrap=True)
    return best


def _rows(text: str) -> list[int]:
    try:
        rows = [int(word) for word in text.split(",")]
    except ValueError:
        rows = [0]
    if min(rows) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers of rows. Write 64,128.")
    return rows


def _parse(argv: Sequence[str], prog: str) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog=prog,
        allow_abbrev=False,
        description="See whether a run fits onto devices that need not be here, what they send "
        "each other, and how long a step takes at least. The config is as for `maxtrain train`.",
        usage=f"{prog} [options] config=NAME key=value ... topology=NAME",
    )
    parser.add_argument(
        "--topology", metavar="NAME", help=f"as topology=NAME; one of the kind of {EXAMPLES}"
    )
    parser.add_argument(
        "--memory",
        metavar="BYTES",
        type=parse_bytes,
        help="that programs may use of each device, such as 15.5GiB (default: what the compiler "
        "allows on TPUs, and 75 %% of a GPU, as JAX takes)",
    )
    parser.add_argument(
        "--search",
        action="store_true",
        help="try meshes (with parts of experts and replicas, too), remat and accumulation, and "
        "show those that fit, fastest first",
    )
    parser.add_argument(
        "--batches",
        metavar="ROWS,...",
        type=_rows,
        help="with --search: batch sizes to try (default: data.batch_size)",
    )
    parser.add_argument(
        "--tries",
        metavar="N",
        type=int,
        default=_MOST_TRIES,
        help="with --search: compile at most this many steps (default: %(default)s)",
    )
    words = []
    for word in argv:
        if word.startswith("topology="):
            word = f"--{word}"
        words.append(word)
    args, rest = parser.parse_known_args(words)
    if not args.topology:
        parser.error(f"topology=NAME is missing: the devices to compile for. Write {EXAMPLES}")
    if args.batches and not args.search:
        parser.error("--batches is for --search. Add it, or set data.batch_size")
    if args.tries < 1:
        parser.error(f"--tries {args.tries} must be at least 1. Leave it out for {_MOST_TRIES}")
    return args, rest


def main(argv: Sequence[str], prog: str = "maxtrain fit") -> int:
    """Run the command `prog` with `argv`; the exit code."""
    if argv is None:
        argv = sys.argv[1:]
    try:
        args, rest = _parse(argv, prog)
    # argparse has printed the reason.
    except SystemExit as stop:
        return UsageError.exit_code if stop.code else 0
    config = from_command_line(rest, prog, MODELS)
    return run_command(lambda: fit(config, args), resumes=False)
