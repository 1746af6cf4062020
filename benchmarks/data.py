"""Cost of loading: tokens per second of the host's batches, the time to launch anywhere in a run
and with many shards, and memory.

    python -m benchmarks.data [--write]

It makes shards of random tokens (documents of 600 tokens on average) in a temporary directory; all
of them fit in the page cache. The process is pinned to one core. Every figure is the median of
several runs.
"""

import dataclasses
import functools
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
from data_pipeline.loader.loader import TrainingData, open_training
from data_pipeline.plan.plan import Plan, PlanSource
from data_pipeline.shards import TOKENIZER, Manifest, ShardWriter, TokenShards
from data_pipeline.tokenizer import CharTokenizer

VOCAB_SIZE = 32_000
# Packing, rows, tokens in a row.
ROWS = (
    ("stream", 8, 4096),
    ("stream", 64, 4096),
    ("stream", 32, 512),
    ("stream", 12, 64),
    ("bins", 8, 4096),
    ("bins", 64, 4096),
    ("pad", 8, 4096),
    ("pad", 64, 4096),
)
REPEATS = 5
DOCUMENTS = 80_000
# Tokens that are read in one run.
TOKENS = 8_000_000
CURSORS = (10**3, 10**6, 10**9, 10**12)
SHARDS = 10_000
# Tokens of the data whose memory is measured, of two bytes each.
MEMORY_TOKENS = 10**9


def make_source(directory: Path, seed: int, documents: int) -> Path:
    """A directory of two shards of random documents."""
    directory.mkdir()
    rng = np.random.default_rng(seed)
    entries = []
    for number in range(2):
        lengths = rng.geometric(1 / 600, documents // 2)
        writer = ShardWriter(directory, f"tokens-{number:05d}", VOCAB_SIZE)
        writer.append(rng.integers(0, VOCAB_SIZE, lengths.sum()), lengths)
        entries.append(writer.close())
    kept = CharTokenizer(map(chr, range(1000, 1000 + VOCAB_SIZE - 1)), eod=True)
    kept.save(directory)
    tokenizer = {
        "name": "random",
        "sha256": kept.sha256,
        "vocab_size": kept.vocab_size,
        "special_ids": {"eod": kept.eod_id},
    }
    source_bytes = 4 * sum(entry.tokens for entry in entries)
    manifest = Manifest(tokenizer, "uint16", "append", source_bytes, tuple(entries))
    manifest.save(directory)
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
    tokens_of_step = data.config.batch_size * data.config.seq_length
    steps = max(10, min(3000, TOKENS // tokens_of_step))
    # Every block is read and compared with its crc32 before the clock starts.
    for shards in data.shards:
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
    """Return the millions of targets per second of work that reads `targets` targets, by wall clock
    and by processor time.
    """
    work()
    wall = median_seconds(work, time.perf_counter)
    processor = median_seconds(work, time.process_time)
    return [targets / wall / 1e6, targets / processor / 1e6]


def first_fit(shards: TokenShards, rows: int, length: int) -> list[float]:
    """The speed of grain's own pipeline: documents are shuffled, packed by its first fit, and
    batched.

    Its rows have tokens, segment ids and positions. Unlike ours they have no targets and no loss
    mask, and nothing is checked.
    """

    def document(number: int) -> dict[str, np.ndarray]:
        first, size = shards.document(number)
        return {"tokens": shards.read(first, min(size, length))}

    numbers = grain.MapDataset.range(shards.num_documents).shuffle(seed=0)
    documents = numbers.map(document).to_iter_dataset()
    packed = FirstFitPackIterDataset(
        documents, length_struct={"tokens": length}, num_packing_bins=rows
    )
    batches = packed.batch(rows)
    num_batches = max(2, min(100, TOKENS // 8 // (rows * length)))

    def read_some() -> int:
        num_tokens = 0
        for batch in itertools.islice(batches, num_batches):
            num_tokens += int(np.count_nonzero(batch["tokens_segment_ids"]))
        return num_tokens

    return speeds(read_some, read_some())


class TokenWindows:
    """Rows of `length` tokens, as Grain's loader requests them."""

    def __init__(self, shards: TokenShards, length: int):
        self.shards = shards
        self.length = length

    def __len__(self) -> int:
        return self.shards.num_tokens // self.length

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"tokens": self.shards.read(int(index) * self.length, self.length)}


def data_loader(shards: TokenShards, rows: int, length: int) -> list[float]:
    """The speed of grain's own DataLoader: rows are shuffled, and batched in this process. Its rows
    have tokens alone."""
    source = TokenWindows(shards, length)
    sampler = grain.samplers.IndexSampler(len(source), shuffle=True, seed=0)
    loader = grain.DataLoader(
        data_source=source,
        sampler=sampler,
        operations=[grain.transforms.Batch(rows, drop_remainder=True)],
    )
    num_batches = max(2, min(200, TOKENS // (rows * length)))

    def read_some() -> int:
        batches = itertools.islice(iter(loader), num_batches)
        return sum(batch["tokens"].size for batch in batches)

    return speeds(read_some, read_some())


def many_shards(directory: Path, source: Path, number: int) -> Path:
    """Make a directory of `number` shards that are all the first one of `source`."""
    directory.mkdir()
    manifest = Manifest.load(source)
    (directory / TOKENIZER).hardlink_to(source / TOKENIZER)
    first = manifest.shards[0]
    shards = []
    for nth in range(number):
        name = f"tokens-{nth:05d}"
        for suffix in (".bin", ".idx", ".crc"):
            original = (source / first.path).with_suffix(suffix)
            (directory / f"{name}{suffix}").hardlink_to(original)
        shards.append(dataclasses.replace(first, path=f"{name}.bin"))
    dataclasses.replace(manifest, shards=tuple(shards)).save(directory)
    return directory


def memory(path: Path) -> dict[str, float]:
    """MiB of this process after it has read all tokens in a directory: its own (RssAnon), and those
    of mapped files (RssFile)."""
    config = DataConfig({"a": SourceConfig(str(path))}, batch_size=64, seq_length=4096)
    data = open_training(config, seed=0, steps="auto")
    for _ in data.iterate(0):
        pass
    found = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("RssAnon", "RssFile"):
            kibibytes, _ = value.split()
            found[name] = int(kibibytes) / 1024
    return found


def resume_lines(paths: list[Path]) -> list[str]:
    """Rows of the table: launch and first batch, at several places of a long run."""
    sources = {path.name: SourceConfig(str(path), 1.0, None) for path in paths}
    config = DataConfig(sources=sources, batch_size=8, seq_length=4096)
    steps = 2 * max(CURSORS) // 8

    def launch(row: int) -> None:
        open_training(config, 0, steps).batch(row // 8)

    lines = []
    for row in CURSORS:
        seconds = median_seconds(functools.partial(launch, row))
        lines.append(f"| launch and first batch at row {row:.0e} of a run | {seconds:.4f} s |")
    return lines


def scale_lines(root: Path, source: Path) -> list[str]:
    """Rows of the table: many shards, and memory."""
    few_tokens = make_source(root / "tiny", 2, 2 * 32)
    path = many_shards(root / "many", few_tokens, SHARDS)
    many = DataConfig({"a": SourceConfig(str(path), 1.0, None)}, seq_length=512)
    launch = median_seconds(lambda: open_training(many, 0, 10_000).batch(0))
    in_a_loop, *_ = rates(open_training(many, 0, 10_000))
    copies = max(1, MEMORY_TOKENS // Manifest.load(source).shards[0].tokens)
    large = many_shards(root / "large", source, copies)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        mebibytes = process.submit(memory, large).result()
    size = Manifest.load(large).num_tokens * 2 / 1e9
    return [
        f"| launch and first batch, {SHARDS:,} shards (goal: under 1 s) | {launch:.4f} s |",
        f"| rows of 8 x 512 anywhere in {SHARDS:,} shards, `.batch` in a loop "
        f"| {in_a_loop:.1f} M/s |",
        f"| memory after reading {size:.1f} GB of tokens: the process's own (goal: under 500 MiB) "
        f"| {mebibytes['RssAnon']:,.0f} MiB |",
        "| and pages of mapped files, which the system takes back when it needs them "
        f"| {mebibytes['RssFile']:,.0f} MiB |",
    ]


def plan_milliseconds() -> float:
    """Look-up of 4,096 rows at global row 10^12 of a mixture of 6 sources."""
    weights = {name: 10.0**-i for i, name in enumerate("abcdef")}
    sources = {}
    named = {}
    for name, weight in weights.items():
        rows = {4096: int(1e9 * weight)}
        sources[name] = PlanSource(f"uid-{name}", int(4e12 * weight), rows)
        named[name] = SourceConfig(name, weight, None)
    config = DataConfig(sources=named, seq_length=4096, batch_size=4096)
    plan = Plan.solve(0, sources, config, 10**9)
    return 1e3 * median_seconds(lambda: plan.rows(10**12, 10**12 + 4096))


def ahead(paths: list[Path]) -> list[str]:
    """The lines of `benchmarks.prefetch`, which runs in a process of its own, so that jax does not
    count in the figures of memory."""
    command = [sys.executable, "-m", "benchmarks.prefetch", *map(str, paths)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.splitlines()


def report() -> str:
    """Measure everything; Markdown."""
    lines = [
        "Millions of targets per second, by wall clock and by processor time (which other "
        "processes on the core do not share).",
        "Goals for 8 x 4,096 on one core: 100 for stream, 20 for bins.",
        "",
        "| rows | rows x tokens | `.batch` in a loop | by processor time | through grain "
        "| by processor time |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    with tempfile.TemporaryDirectory() as root:
        sizes = {"a": DOCUMENTS, "b": DOCUMENTS // 8}
        weights = {"a": 0.8, "b": 0.2}
        paths = []
        sources = {}
        for seed, (name, size) in enumerate(sizes.items()):
            path = make_source(Path(root) / name, seed, size)
            paths.append(path)
            sources[name] = SourceConfig(str(path), weights[name], None)
        config = DataConfig(sources=sources, on_long="truncate")
        for packing, rows, length in ROWS:
            config = dataclasses.replace(
                config, packing=packing, batch_size=rows, seq_length=length
            )
            figures = rates(open_training(config, seed=0, steps=10_000))
            lines.append(f"| {packing} | {rows} x {length:,} | {cells(figures)} |")
        shards = TokenShards.open(paths[0])
        figures = cells(data_loader(shards, 8, 4096))
        lines.append(f"| grain's DataLoader, windows of source a | 8 x 4,096 | | | {figures} |")
        figures = cells(first_fit(shards, 8, 4096))
        lines.append(f"| grain's first fit, documents of source a | 8 x 4,096 | | | {figures} |")
        config = dataclasses.replace(config, packing="stream")
        launch = median_seconds(lambda: open_training(config, seed=0, steps=10_000))
        lookup = plan_milliseconds()
        lines += [
            "",
            "| what | figure |",
            "| --- | ---: |",
            f"| plan look-up, 4,096 rows at row 10^12, 6 sources | {lookup:.2f} ms |",
            f"| launch: open 2 sources, solve the plan | {launch:.4f} s |",
        ]
        lines += resume_lines(paths)
        lines += scale_lines(Path(root), paths[0])
        lines.append("")
        lines += ahead(paths)
    return "\n".join(lines)


def cells(figures: list[float]) -> str:
    """Cells of a table."""
    return " | ".join(f"{figure:,.1f}" for figure in figures)


def main() -> None:
    """The command."""
    one_core.run("data", "Loading", __doc__ or "", report, ("numpy", "grain"), f"{REPEATS} runs")


if __name__ == "__main__":
    main()
