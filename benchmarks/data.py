"""What loading costs: tokens per second of the host's batches, a plan look-up far into a run, and a launch.

    python -m benchmarks.data [--write]

Makes shards of random tokens (documents of 600 tokens on average) in a temporary directory, so nothing has to be there; all
of it fits in the page cache. The process is pinned to one core. Every figure is the median of several runs.
"""

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np

from data_pipeline.config import DataConfig, SourceConfig
from data_pipeline.loader import TrainingData, open_training
from data_pipeline.plan import Plan, PlanSource
from data_pipeline.shards import Manifest, ShardWriter
from data_pipeline.tokenizer import CharTokenizer

RESULTS = Path(__file__).parent / "results" / "data.md"
VOCAB_SIZE = 32_000
SHAPES = ((8, 4096), (64, 4096), (32, 512), (12, 64))  # rows, tokens in a row
REPEATS = 5


def make_source(directory: Path, seed: int, documents: int) -> Path:
    """A directory of two shards of random documents."""
    directory.mkdir()
    random_ids, entries = np.random.default_rng(seed), []
    for number in range(2):
        lengths = random_ids.geometric(1 / 600, documents // 2)
        writer = ShardWriter(directory, f"tokens-{number:05d}", VOCAB_SIZE)
        writer.append(random_ids.integers(0, VOCAB_SIZE, lengths.sum()), lengths)
        entries.append(writer.close())
    kept = CharTokenizer(map(chr, range(1000, 1000 + VOCAB_SIZE - 1)), eod=True)
    kept.save(directory)
    special = {"eod": kept.eod_id}
    tokenizer = {"name": "random", "sha256": kept.sha256, "vocab_size": kept.vocab_size, "special_ids": special}
    Manifest(tokenizer, "uint16", "append", 4 * sum(e.tokens for e in entries), tuple(entries)).save(directory)
    return directory


def median_seconds(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Median time of one call, in seconds."""
    seconds = []
    for _ in range(REPEATS):
        start = clock()
        work()
        seconds.append(clock() - start)
    return statistics.median(seconds)


def rates(data: TrainingData) -> list[float]:
    """Millions of tokens per second: `.batch` in a loop, then through grain; each by wall clock and by processor time."""
    tokens = data.config.batch_size * data.config.seq_length
    steps = max(30, min(3000, 8_000_000 // tokens))
    for shards in data.shards:  # every block was read and compared with its crc32 before the clock starts
        shards.read(0, shards.num_tokens)

    def loop() -> None:
        for step in range(steps):
            data.batch(step)

    def through_grain() -> None:
        for _ in data.iterate(0, stop_step=steps):
            pass

    results = []
    for work in (loop, through_grain):
        work()
        results += [steps * tokens / median_seconds(work, clock) / 1e6 for clock in (time.perf_counter, time.process_time)]
    return results


def plan_milliseconds() -> float:
    """Look-up of 4,096 rows at global row 10^12 of a mixture of 6 sources."""
    weights = {name: 10.0**-i for i, name in enumerate("abcdef")}
    sources = {
        name: PlanSource(f"uid-{name}", int(4e12 * weight), {4096: int(1e9 * weight)}) for name, weight in weights.items()
    }
    named = {name: SourceConfig(name, weight, None) for name, weight in weights.items()}
    plan = Plan.solve(0, sources, DataConfig(sources=named, seq_length=4096, batch_size=4096), 10**9)
    return 1e3 * median_seconds(lambda: plan.rows(10**12, 10**12 + 4096))


def machine() -> str:
    """Processor and versions, one line."""
    info = Path("/proc/cpuinfo")
    names = (
        [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        if info.exists()
        else []
    )
    versions = ", ".join(f"{name} {version(name)}" for name in ("numpy", "grain"))
    return f"{names[0] if names else platform.processor()}, Python {platform.python_version()}, {versions}"


def report() -> str:
    """Measure everything; Markdown."""
    lines = [
        "Millions of tokens per second, by wall clock and by processor time (which other processes on the core do not share):",
        "",
        "| rows x tokens | `.batch` in a loop | by processor time | through grain | by processor time |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    with tempfile.TemporaryDirectory() as root:
        paths = [make_source(Path(root) / name, seed, size) for seed, (name, size) in enumerate((("a", 80_000), ("b", 10_000)))]
        sources = {path.name: SourceConfig(str(path), weight, None) for path, weight in zip(paths, (0.8, 0.2), strict=True)}
        for rows, length in SHAPES:
            config = DataConfig(sources=sources, batch_size=rows, seq_length=length)
            figures = rates(open_training(config, seed=0, steps=10_000))
            lines.append(f"| {rows} x {length:,} | " + " | ".join(f"{figure:,.1f}" for figure in figures) + " |")
        launch = median_seconds(lambda: open_training(config, seed=0, steps=10_000))
        first = median_seconds(lambda: open_training(config, seed=0, steps=10_000).batch(0))
    lines += [
        "",
        "| what | figure |",
        "| --- | ---: |",
        f"| plan look-up, 4,096 rows at row 10^12, 6 sources | {plan_milliseconds():.2f} ms |",
        f"| launch: open 2 sources, solve the plan | {launch:.4f} s |",
        f"| launch and first batch, with the crc32 of the blocks that it touches | {first:.4f} s |",
    ]
    return "\n".join(lines)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.parent.name}/{RESULTS.name}")
    arguments = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    load = os.getloadavg()[0]
    table = report()
    print(table)
    if arguments.write:
        RESULTS.parent.mkdir(exist_ok=True)
        command = "python -m benchmarks.data --write"
        runs = f"Medians of {REPEATS} runs inside one `{command}`"
        alone = f"{os.cpu_count()} cores with a load average of {load:.1f} before it began (above 0: not alone)"
        text = f"# Loading\n\nOne core of {machine()}.\n{runs}; {alone}.\n\n{table}\n"
        RESULTS.write_text(text)


if __name__ == "__main__":
    main()
