"""Common parts of benchmarks on one core: their command line, the choice of the core, and the head
of their file of results.
"""

import argparse
import os
import platform
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path


def run(
    name: str,
    title: str,
    description: str,
    report: Callable[[], str],
    packages: tuple[str, ...],
    runs: str,
) -> None:
    """The command `python -m benchmarks.NAME [--write]`, on one core of this machine.

    Args:
        name: of the benchmark.
        title: of its file of results.
        description: for --help.
        report: measures, and gives the result as Markdown.
        packages: those whose versions are named in the result.
        runs: what the figures are medians of.
    """
    results = Path(__file__).parent / "results" / f"{name}.md"
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    parser.add_argument(
        "--write", action="store_true", help=f"write {results.parent.name}/{results.name}"
    )
    arguments = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    load = os.getloadavg()[0]
    table = report()
    print(table)
    if arguments.write:
        results.parent.mkdir(exist_ok=True)
        versions = ", ".join(f"{package} {version(package)}" for package in packages)
        alone = (
            f"{os.cpu_count()} cores with a load average of {load:.1f} before it began "
            "(above 0: not alone)"
        )
        head = f"One core of {processor()}, Python {platform.python_version()}, {versions}."
        runs = f"Medians of {runs} inside one `python -m benchmarks.{name} --write`; {alone}."
        results.write_text(f"# {title}\n\n{head}\n{runs}\n\n{table}\n")


def processor() -> str:
    """The name of the processor."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if "model name" in line:
                _, _, name = line.partition(":")
                return name.strip()
    return platform.processor()
