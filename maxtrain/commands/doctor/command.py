"""`maxtrain doctor [config=NAME key=value ...]`: measures the devices, network, clocks, disks and
bucket of all processes of a job, started as `train` would be, and says what is broken.

It ends with 70 if something is. Nothing is trained, and what is written is removed again.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import platform
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from data_pipeline.base.console import SafeConsole
from data_pipeline.base.errors import (
    LostProcessError,
    TryAgainError,
    UsageError,
    UserError,
    run_command,
)
from maxtrain.commands.doctor import host
from maxtrain.commands.doctor.bucket import bucket
from maxtrain.commands.doctor.devices import clock_offsets, measure, measure_sums
from maxtrain.commands.doctor.show import show
from maxtrain.commands.doctor.verdict import notes, problems
from maxtrain.config import RunConfig, fit_to_devices
from maxtrain.config.load import load_with_notes
from maxtrain.config.run_path import run_path, run_url
from maxtrain.config.schema import MeshConfig
from maxtrain.models.known import MODELS
from maxtrain.parallel import distributed
from maxtrain.parallel.agreement import connect_peers, gather, losing_others
from maxtrain.parallel.mesh import make_mesh


def main(argv: Sequence[str], prog: str = "maxtrain doctor") -> int:
    """Measures, and prints what was found; the exit code."""
    lost = False

    def job() -> None:
        nonlocal lost
        try:
            with losing_others():
                _examine(_parse(argv, prog))
        except LostProcessError:
            lost = True
            raise

    code = run_command(job, resumes=False)
    if code:
        distributed.announce_end(code)
        distributed.leave(code, lost)
    return code


def _parse(argv: Sequence[str], prog: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} [--json] [--seconds N] [--patience N] [config=NAME key=value ...]",
        description=(__doc__ or "").partition(": ")[2],
    )
    parser.add_argument(
        "settings", nargs="*", metavar="key=value", help="of a run: mesh, output_dir, data"
    )
    parser.add_argument("--json", action="store_true", help="print all that was found as JSON")
    parser.add_argument(
        "--seconds",
        type=float,
        default=1.0,
        metavar="N",
        help="for each measurement; default: %(default)s",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=600.0,
        metavar="N",
        help="seconds until it ends with 75, if something hangs; default: %(default)s",
    )
    options = parser.parse_intermixed_args(argv)
    for name in ("seconds", "patience"):
        value = getattr(options, name)
        # NaN is not above anything.
        if not 0 < value < math.inf:
            raise UsageError(
                f"--{name} {value:g} must be a time above 0. Set --{name} to 1 or more."
            )
    return options


def _examine(args: argparse.Namespace) -> None:
    """Run the command. UserError: something is broken."""
    config = RunConfig()
    if args.settings:
        loaded = load_with_notes(args.settings, MODELS)
        config = loaded.config
        for note in loaded.notes:
            print(f"maxtrain doctor: {note}", file=sys.stderr)
    with _patience(args.patience) as doing:
        doing("starting devices, waiting for other processes")
        distributed.start(config.mesh, config.observe.compilation_cache)
        reports = _reports(config, bool(args.settings), args.seconds, doing)
    broken = problems(reports)
    if jax.process_index() == 0:
        worth_a_look = notes(reports)
        if args.json:
            found = {"problems": broken, "notes": worth_a_look, "processes": reports}
            print(json.dumps(found, indent=1))
        else:
            show(reports, broken, worth_a_look, SafeConsole())
    if broken:
        count = f"{len(broken)} things are broken"
        if len(broken) == 1:
            count = "one thing is broken"
        raise UserError(f"{count}. See what process 0 has printed, and fix that.")


@contextlib.contextmanager
def _patience(seconds: float) -> Iterator[Any]:
    """End the process with exit code 75 if the block takes longer than this; yields a function that
    sets the name of the current action.
    """
    current = ["starting"]

    def doing(what: str) -> None:
        current[0] = what

    def give_up() -> None:
        # jax may be what hangs.
        who = f"process {os.getpid()} on {platform.node()}"
        rule = f"{who} hangs for {seconds:g} s (--patience), in: {current[0]}"
        fix = "If another process says nothing, look at its host"
        print(f"error: {rule}. {fix}.", file=sys.stderr, flush=True)
        code = TryAgainError.exit_code
        distributed.announce_end(code)
        os._exit(code)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield doing
    finally:
        timer.cancel()


def _reports(config: RunConfig, is_given: bool, seconds: float, doing: Any) -> list[dict[str, Any]]:
    """Return what all processes have found, in their order; `is_given`: the config was typed."""
    mesh = make_mesh(_fitted(config, is_given))
    connect_peers(mesh)
    doing("comparing clocks")
    ahead = clock_offsets()
    report: dict[str, Any] = {
        "host": platform.node(),
        "clock": ahead[jax.process_index()],
        "versions": host.versions(),
    }
    report["versions"]["runtime"] = jax.devices()[0].client.platform_version.splitlines()[0]
    folder = run_path(config).parent
    doing(f"writing to {folder}")
    report["disk"] = host.disk(folder)
    report["bucket"] = None
    if run_url(config) is not None:
        doing(f"writing to {config.output_dir}, and reading that")
        report["bucket"] = bucket(config.output_dir)
    doing("reading data")
    report["data"] = host.data(_data_paths(config))
    report["devices"] = []
    for device in jax.local_devices():
        doing(f"multiplying on device {device.id}")
        report["devices"].append(measure(device, seconds))
    doing("summing over the mesh, or waiting for other processes")
    # Nobody is measured while others still compute.
    gather({})
    report["sums"] = [found._asdict() for found in measure_sums(mesh, seconds)]
    return _of_all(report)


def _fitted(config: RunConfig, is_given: bool) -> MeshConfig:
    """The mesh of a run; all devices in one axis, if no config was typed."""
    if is_given:
        return fit_to_devices(config, jax.device_count()).mesh
    return dataclasses.replace(config.mesh, fsdp=jax.device_count())


def _data_paths(config: RunConfig) -> dict[str, str]:
    """Return where the run reads, by keys."""
    paths = {}
    for name, source in config.data.sources.items():
        paths[f"data.sources.{name}.path"] = source.path
    for name, held_out in config.eval.sets.items():
        paths[f"eval.sets.{name}.path"] = held_out.path
    return paths


def _of_all(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The reports of all processes."""
    size = len(json.dumps(report, ensure_ascii=False).encode(errors="backslashreplace"))
    longest = max(said["size"] for said in gather({"size": size}))
    return gather(report, longest)
