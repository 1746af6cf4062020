"""What loading costs: tokens per second of the host's batches, a launch anywhere in a run, many
shards, and memory.

    python -m benchmarks.data [--write]

Makes shards of random tokens (documents of 600 tokens on average) in a temporary directory, so
nothing has to be there; all of it fits in the page cache. The process is pinned to one core. Every
figure is the median of several runs.
"""

import dataclasses
import itertools
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import grain
import numpy as np
from grain.experimental import FirstFitPackIterDataset

from benchmarks import one_core
from data_pipeline.config import DataConfig, SourceConfig
from data_pipeline.loader import TrainingData, open_training
from data_pipeline.plan import Plan, PlanSource
from data_pipeline.shards import TOKENIZER, Manifest, ShardWriter, TokenShards
from data_pipeline.tokenizer import CharTokenizer

VOCAB_SIZE = 32_000
ROWS = (  # packing, rows, tokens in a row
    *(("stream", rows, length) for rows, length in ((8, 4096), (64, 4096), (32, 512), (12, 64))),
    *(("bins", rows, length) for rows, length in ((8, 4096), (64, 4096))),
    *(("pad", rows, length) for rows, length in ((8, 4096), (64, 4096))),
)
REPEATS = 5
DOCUMENTS = 80_000
TOKENS = 8_000_000  # read in one run
CURSORS = (10**3, 10**6, 10**9, 10**12)
SHARDS = 10_000
MEMORY_TOKENS = 10**9  # of two bytes each


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
    tokenizer = {
        "name": "random",
        "sha256": kept.sha256,
        "vocab_size": kept.vocab_size,
        "special_ids": special,
    }
    Manifest(
        tokenizer, "uint16", "append", 4 * sum(e.tokens for e in entries), tuple(entries)
    ).save(directory)
    return directory


def median_seconds(
    work: Callable[[], object], clock: Callable[[], float] = time.perf_counter
) -> float:
    """Median time of one call, in seconds."""
    seconds = []
    for _ in range(REPEATS):
        start = clock()
        work()
        seconds.append(clock() - start)
    return statistics.median(seconds)


def rates(data: TrainingData) -> list[float]:
    """Millions of targets per second: `.batch` in a loop, then through grain; each by wall clock
    and by processor time."""
    steps = max(10, min(3000, TOKENS // (data.config.batch_size * data.config.seq_length)))
    for (
        shards
    ) in data.shards:  # every block was read and compared with its crc32 before the clock starts
        shards.read(0, shards.num_tokens)
    targets = sum(data.batch(step).num_targets for step in range(steps))

    def loop() -> None:
        for step in range(steps):
            data.batch(step)

    def through_grain() -> None:
        for _ in data.iterate(0, stop_step=steps):
            pass

    return [*speeds(loop, targets), *speeds(through_grain, targets)]


def speeds(work: Callable[[], object], targets: int) -> list[float]:
    """Millions of targets per second of something that reads so many, by wall clock and by
    processor time."""
    work()
    return [
        targets / median_seconds(work, clock) / 1e6
        for clock in (time.perf_counter, time.process_time)
    ]


def first_fit(shards: TokenShards, rows: int, length: int) -> list[float]:
    """The same of grain's own pipeline: one document an element, shuffled, packed by its first fit,
    batched.

    Rows have tokens, segment ids and positions, but neither targets apart from inputs, nor a loss
    mask, nor any check.
    """

    def document(number: int) -> dict[str, np.ndarray]:
        first, size = shards.document(number)
        return {"tokens": shards.read(first, min(size, length))}

    documents = (
        grain.MapDataset.range(shards.num_documents).shuffle(seed=0).map(document).to_iter_dataset()
    )
    packed = FirstFitPackIterDataset(
        documents, length_struct={"tokens": length}, num_packing_bins=rows
    ).batch(rows)
    num_batches = max(2, min(100, TOKENS // 8 // (rows * length)))

    def some() -> int:
        return sum(
            int(np.count_nonzero(batch["tokens_segment_ids"]))
            for batch in itertools.islice(packed, num_batches)
        )

    return speeds(some, some())


class Windows:
    """Rows of so many tokens, as grain's loader asks for them."""

    def __init__(self, shards: TokenShards, length: int):
        self.shards, self.length = shards, length

    def __len__(self) -> int:
        return self.shards.num_tokens // self.length

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"tokens": self.shards.read(int(index) * self.length, self.length)}


def data_loader(shards: TokenShards, rows: int, length: int) -> list[float]:
    """The same of grain's own DataLoader: one row an element, shuffled, batched in its process.
    Rows are nothing but tokens."""
    source = Windows(shards, length)
    sampler = grain.samplers.IndexSampler(len(source), shuffle=True, seed=0)
    loader = grain.DataLoader(
        data_source=source,
        sampler=sampler,
        operations=[grain.transforms.Batch(rows, drop_remainder=True)],
    )
    num_batches = max(2, min(200, TOKENS // (rows * length)))

    def some() -> int:
        return sum(batch["tokens"].size for batch in itertools.islice(iter(loader), num_batches))

    return speeds(some, some())


def many_shards(directory: Path, source: Path, number: int) -> Path:
    """A directory of so many shards that are all the first one of `source`."""
    directory.mkdir()
    manifest = Manifest.load(source)
    (directory / TOKENIZER).hardlink_to(source / TOKENIZER)
    for nth in range(number):
        for suffix in (".bin", ".idx", ".crc"):
            (directory / f"tokens-{nth:05d}{suffix}").hardlink_to(
                (source / manifest.shards[0].path).with_suffix(suffix)
            )
    shards = tuple(
        dataclasses.replace(manifest.shards[0], path=f"tokens-{nth:05d}.bin")
        for nth in range(number)
    )
    dataclasses.replace(manifest, shards=shards).save(directory)
    return directory


def memory(path: Path) -> dict[str, float]:
    """MiB of this process after it read everything in a directory once: of its own, and of mapped
    files."""
    data = open_training(
        DataConfig({"a": SourceConfig(str(path))}, batch_size=64, seq_length=4096),
        seed=0,
        steps="auto",
    )
    for _ in data.iterate(0):
        pass
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {
        words[0][:-1]: int(words[1]) / 1024
        for words in lines
        if words and words[0] in {"RssAnon:", "RssFile:"}
    }


def resume_lines(paths: list[Path]) -> list[str]:
    """Rows of the table: launch and first batch, from where a run of any length stands."""
    sources = {path.name: SourceConfig(str(path), 1.0, None) for path in paths}
    config = DataConfig(sources=sources, batch_size=8, seq_length=4096)
    steps = 2 * max(CURSORS) // 8
    seconds = {
        row: median_seconds(lambda row=row: open_training(config, 0, steps).batch(row // 8))
        for row in CURSORS
    }
    return [
        f"| launch and first batch at row {row:.0e} of a run | {value:.4f} s |"
        for row, value in seconds.items()
    ]


def scale_lines(root: Path, source: Path) -> list[str]:
    """Rows of the table: many shards, and memory."""
    few_tokens = make_source(root / "tiny", 2, 2 * 32)
    many = DataConfig(
        {"a": SourceConfig(str(many_shards(root / "many", few_tokens, SHARDS)), 1.0, None)},
        seq_length=512,
    )
    launch = median_seconds(lambda: open_training(many, 0, 10_000).batch(0))
    speed = rates(open_training(many, 0, 10_000))[0]
    copies = max(1, MEMORY_TOKENS // Manifest.load(source).shards[0].tokens)
    large = many_shards(root / "large", source, copies)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        own, mapped = process.submit(memory, large).result().values()
    size = Manifest.load(large).num_tokens * 2 / 1e9
    return [
        f"| launch and first batch, {SHARDS:,} shards (goal: under 1 s) | {launch:.4f} s |",
        f"| rows of 8 x 512 anywhere in {SHARDS:,} shards, `.batch` in a loop | {speed:.1f} M/s |",
        f"| memory after reading {size:.1f} GB of tokens: the process's own (goal: under 500 MiB) | {own:,.0f} MiB |",
        f"| and pages of mapped files, which the system takes back when it needs them | {mapped:,.0f} MiB |",
    ]


def plan_milliseconds() -> float:
    """Look-up of 4,096 rows at global row 10^12 of a mixture of 6 sources."""
    weights = {name: 10.0**-i for i, name in enumerate("abcdef")}
    sources = {
        name: PlanSource(f"uid-{name}", int(4e12 * weight), {4096: int(1e9 * weight)})
        for name, weight in weights.items()
    }
    named = {name: SourceConfig(name, weight, None) for name, weight in weights.items()}
    plan = Plan.solve(
        0, sources, DataConfig(sources=named, seq_length=4096, batch_size=4096), 10**9
    )
    return 1e3 * median_seconds(lambda: plan.rows(10**12, 10**12 + 4096))


def ahead(paths: list[Path]) -> list[str]:
    """The lines of `benchmarks.prefetch`: in a process of its own, as jax would count in the
    figures of memory."""
    command = [sys.executable, "-m", "benchmarks.prefetch", *map(str, paths)]
    return subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True
    ).stdout.splitlines()


def report() -> str:
    """Measure everything; Markdown."""
    lines = [
        "Millions of targets per second, by wall clock and by processor time (which other processes on the core do not share).",
        "Goals for 8 x 4,096 on one core: 100 for stream, 20 for bins.",
        "",
        "| rows | rows x tokens | `.batch` in a loop | by processor time | through grain | by processor time |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    with tempfile.TemporaryDirectory() as root:
        sizes = {"a": DOCUMENTS, "b": DOCUMENTS // 8}
        paths = [
            make_source(Path(root) / name, seed, size)
            for seed, (name, size) in enumerate(sizes.items())
        ]
        sources = {
            path.name: SourceConfig(str(path), weight, None)
            for path, weight in zip(paths, (0.8, 0.2), strict=True)
        }
        config = DataConfig(sources=sources, on_long="truncate")
        for packing, rows, length in ROWS:
            config = dataclasses.replace(
                config, packing=packing, batch_size=rows, seq_length=length
            )
            figures = rates(open_training(config, seed=0, steps=10_000))
            lines.append(
                f"| {packing} | {rows} x {length:,} | "
                + " | ".join(f"{figure:,.1f}" for figure in figures)
                + " |"
            )
        for name, theirs in (
            ("DataLoader, windows", data_loader),
            ("first fit, documents", first_fit),
        ):
            figures = " | ".join(
                f"{figure:,.1f}" for figure in theirs(TokenShards.open(paths[0]), 8, 4096)
            )
            lines.append(f"| grain's {name} of source a | 8 x 4,096 | | | {figures} |")
        config = dataclasses.replace(config, packing="stream")
        launch = median_seconds(lambda: open_training(config, seed=0, steps=10_000))
        lines += ["", "| what | figure |", "| --- | ---: |"]
        lines += [
            f"| plan look-up, 4,096 rows at row 10^12, 6 sources | {plan_milliseconds():.2f} ms |"
        ]
        lines += [f"| launch: open 2 sources, solve the plan | {launch:.4f} s |"]
        lines += [*resume_lines(paths), *scale_lines(Path(root), paths[0]), "", *ahead(paths)]
    return "\n".join(lines)


def main() -> None:
    """The command."""
    one_core.run("data", "Loading", __doc__ or "", report, ("numpy", "grain"), f"{REPEATS} runs")


if __name__ == "__main__":
    main()
