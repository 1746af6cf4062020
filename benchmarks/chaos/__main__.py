"""Injects faults into real runs, and counts those that the runs do not survive.

    python -m benchmarks.chaos --kills 500 --seed 1

sends SIGKILL at random instants and places; it is the same as `kills --trials 500`.

The seed decides which faults are drawn, but what they hit depends on the machine's timing; so the
runs that failed are kept below `failed`.
"""

import argparse
import gc
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.chaos.bucket import bucket_faults, bucket_kills
from benchmarks.chaos.deaths import deaths, hangs
from benchmarks.chaos.disk import disk
from benchmarks.chaos.flips import flips_of_checkpoints, flips_of_shards
from benchmarks.chaos.goodput import goodput
from benchmarks.chaos.kills import kills
from benchmarks.chaos.local_saves import local_kills
from benchmarks.chaos.meaning import meaning
from benchmarks.chaos.meshes import meshes
from benchmarks.chaos.report import Tally, write
from benchmarks.chaos.rollbacks import rollbacks
from benchmarks.chaos.rollouts import rollouts
from benchmarks.chaos.terms import terms

# It gets a folder, what to count, and the options.
Job = Callable[[Path, Tally, argparse.Namespace], None]

DOSE = {
    "kills": 3,
    "rollbacks": 2,
    "rollouts": 2,
    "meshes": 1,
    "meaning": 4,
    "terms": 4,
    "disk": 2,
    "checkpoints": 22,
    "shards": 22,
}


def dose(folder: Path, tally: Tally, args: argparse.Namespace) -> None:
    """A little of each fault of one process."""
    for name, trials in DOSE.items():
        part = Tally(name, trials * tally.wanted)
        FAULTS[name][0](folder, part, args)
        tally.rows += part.rows
        tally.failures += part.failures


FAULTS: dict[str, tuple[Job, int, str]] = {
    "kills": (kills, 500, "SIGKILL at random instants, and at named places"),
    "terms": (terms, 105, "SIGTERM and SIGINT in every phase"),
    "deaths": (deaths, 200, "one of four processes killed"),
    "hangs": (hangs, 50, "one of four processes stopped"),
    "rollbacks": (rollbacks, 100, "SIGKILL around rollbacks"),
    "rollouts": (rollouts, 100, "SIGKILL of runs that learn from rewards"),
    "meshes": (meshes, 30, "gone on with another mesh, accumulation or number of processes"),
    "meaning": (
        meaning,
        300,
        "whole bytes of a wrong meaning: worthless weights, files of another run, or gone",
    ),
    "disk": (disk, 20, "a full disk"),
    "checkpoints": (flips_of_checkpoints, 1000, "damaged checkpoints"),
    "shards": (flips_of_shards, 1000, "damaged data shards"),
    "bucket-kills": (bucket_kills, 200, "SIGKILL of runs behind s3://"),
    "bucket-faults": (bucket_faults, 200, "a store that fails, of runs behind s3://"),
    "local-kills": (local_kills, 100, "SIGKILL of runs behind s3:// that save between uploads"),
    "goodput": (goodput, 10, "goodput under Poisson kills"),
    "dose": (dose, 1, "a few trials of each fault of one process, as CI runs them"),
}


def main(argv: list[str]) -> int:
    """Runs one kind of fault; 1: something failed."""
    args = _parse(_with_fault(argv))
    load, _, _ = os.getloadavg()
    began = time.monotonic()
    folder = args.directory or Path(tempfile.mkdtemp(prefix="chaos-"))
    folder = folder.expanduser().absolute()
    # So that the garbage collector of a fork does not look through all that was imported.
    gc.collect()
    gc.freeze()
    job, _, about = FAULTS[args.fault]
    tally = Tally(args.fault, args.trials, args.minutes)
    tally.stop_when_asked()
    job(folder, tally, args)
    print(f"\n{tally.text()}\n\n{time.monotonic() - began:,.0f} s")
    if args.write:
        words = list(argv)
        if "--directory" in words:
            # A folder of this machine means nothing to readers of the results.
            at = words.index("--directory")
            del words[at : at + 2]
        command = shlex.join(["python", "-m", "benchmarks.chaos", *words])
        write(about, tally.text(), command, load)
    if tally.failures:
        print(f"what failed is kept in {folder}", file=sys.stderr)
    elif args.directory is None:
        shutil.rmtree(folder)
    return int(bool(tally.failures))


def _with_fault(argv: list[str]) -> list[str]:
    """Return the words of the command line with the name of a fault, which is `kills` if none is
    given.
    """
    if "--help" in argv:
        return argv
    if argv and not argv[0].startswith("--"):
        return argv
    return ["kills", *argv]


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    faults = parser.add_subparsers(dest="fault", required=True, metavar="FAULT")
    for name, (_, trials, about) in FAULTS.items():
        sub = faults.add_parser(name, help=about, description=about)
        sub.add_argument(
            "--trials",
            "--kills",
            type=int,
            default=trials,
            metavar="N",
            help="default: %(default)s",
        )
        sub.add_argument("--seed", type=int, default=1, help="of the draws (default: %(default)s)")
        sub.add_argument(
            "--minutes",
            type=float,
            default=float("inf"),
            help="end after so long, with fewer trials",
        )
        sub.add_argument(
            "--commands",
            type=float,
            default=0.05,
            help="share of attempts that are no forks (%(default)s)",
        )
        if name == "goodput":
            sub.add_argument(
                "--mtbf",
                type=float,
                default=60,
                help="mean seconds between failures (default: %(default)s)",
            )
        sub.add_argument(
            "--directory",
            type=Path,
            help="where to work, kept afterwards (default: a temporary one)",
        )
        sub.add_argument(
            "--write", action="store_true", help="write its section of results/reliability.md"
        )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
