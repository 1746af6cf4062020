"""Cost of preparing data: tokens per second of one core, compared with the `tokenizers` library
called in a bare loop.

    python -m benchmarks.prepare [--write]

The documents are the running Python's standard library, tokenized with a BPE of 32,000 entries that
is trained on it once and kept in the temporary directory. The bare loop encodes the same texts, one
call each, and drops the ids; `prepare` also reads the files, checks the text, writes the shards and
computes their digests. A first turn is not counted: it fills the cache of words, which a worker of
`prepare` has filled after its first unit. All run in this process, pinned to one core, in turns.
"""

import functools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import tokenizers

from benchmarks import one_core
from data_pipeline.prepare.build import (
    Unit,
    build_part,
    find_duplicates,
    make_units,
    train_tokenizer,
    usable,
)
from data_pipeline.prepare.dedupe import Digests
from data_pipeline.prepare.runner import run_local
from data_pipeline.shards import TOKENIZER, Manifest
from data_pipeline.sources.document import InputOptions, InputRange
from data_pipeline.sources.text import python_stdlib
from data_pipeline.tokenizer import Tokenizer, load_tokenizer

ENTRIES = 32_000
INPUT_BYTES = 6_000_000
REPEATS = 5


def trained(pieces: list[InputRange]) -> Tokenizer:
    """The tokenizer of this benchmark, trained if it is not there yet."""
    name = f"maxtrain-benchmark-bpe-{ENTRIES}-{version('tokenizers')}"
    folder = Path(tempfile.gettempdir()) / name
    if not (folder / TOKENIZER).exists():
        folder.mkdir(exist_ok=True)
        units = make_units(pieces)
        tokenizer = train_tokenizer(f"bpe:{ENTRIES}", "append", units, "replace", no_progress)
        tokenizer.save(folder)
    return load_tokenizer(folder)


def no_progress(size: int) -> None:
    """Nobody watches how far it is."""


def seconds(work: Callable[[], object]) -> float:
    """Processor time of one call, in this process."""
    start = time.process_time()
    work()
    return time.process_time() - start


# The library makes the list of ids on access, so the access is part of the work.
def encode_one_by_one(bare: tokenizers.Tokenizer, texts: list[str]) -> None:
    """The `tokenizers` library in a bare loop."""
    for text in texts:
        _ = bare.encode(text, add_special_tokens=False).ids


def encode_all_at_once(bare: tokenizers.Tokenizer, texts: list[str]) -> None:
    """One call of the `tokenizers` library, without offsets."""
    for encoding in bare.encode_batch_fast(texts):
        _ = encoding.ids


def encode_as_prepare(tokenizer: Tokenizer, texts: list[str]) -> None:
    """Our tokenizer in a loop."""
    for text in texts:
        tokenizer.encode(text)


def prepare(root: Path, units: list[Unit], tokenizer: Tokenizer, dedupe: bool) -> None:
    """Shards in the folder `out` below the root, made anew."""
    out = root / "out"
    work = root / "work"
    for folder in (out, work):
        shutil.rmtree(folder, ignore_errors=True)
    here = functools.partial(run_local, 1)
    digests = None
    if dedupe:
        folder = work / "digests"
        digests = Digests(folder, 0)
        find_duplicates(folder, folder, units, "replace", here, no_progress)
    build_part(
        out,
        work / "records",
        units,
        tokenizer,
        "append",
        "replace",
        here,
        no_progress,
        digests,
    )


def report() -> str:
    """Measure everything; Markdown."""
    library = python_stdlib("", InputOptions())
    tokenizer = trained(library)
    pieces = []
    size = 0
    for piece in library:
        if size < INPUT_BYTES:
            pieces.append(piece)
            size += piece.size
    units = make_units(pieces)
    texts = [document.text or "" for document in usable([*pieces], "replace", {})]
    bare = tokenizers.Tokenizer.from_str(tokenizer.content.decode())
    partial = functools.partial
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        jobs = {
            "`tokenizers` in a bare loop": partial(encode_one_by_one, bare, texts),
            "the same, all texts at once, without offsets": partial(
                encode_all_at_once, bare, texts
            ),
            "`Tokenizer.encode`, as `prepare` calls it": partial(
                encode_as_prepare, tokenizer, texts
            ),
            "`prepare`": partial(prepare, root, units, tokenizer, dedupe=False),
            "`prepare --dedupe`": partial(prepare, root, units, tokenizer, dedupe=True),
        }
        for job in jobs.values():
            job()
        tokens = Manifest.load(root / "out").num_tokens
        turns = [{name: seconds(job) for name, job in jobs.items()} for _ in range(REPEATS)]
    first = next(iter(jobs))
    lines = [
        f"{tokens:,} tokens of {len(texts):,} documents of Python, {size:,} bytes; "
        f"BPE of {tokenizer.vocab_size:,} entries.",
        "",
        "| goals: 1.5, and a ratio of 0.8 | millions of tokens per second of one core "
        "| ratio to the bare loop |",
        "| --- | ---: | ---: |",
    ]
    for name in jobs:
        speed = tokens / statistics.median(turn[name] for turn in turns) / 1e6
        ratio = statistics.median(turn[first] / turn[name] for turn in turns)
        lines.append(f"| {name} | {speed:.2f} | {ratio:.2f} |")
    return "\n".join(lines)


def main() -> None:
    """The command."""
    # As in the workers of `prepare`.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    one_core.run(
        "prepare",
        "Preparing",
        __doc__ or "",
        report,
        ("numpy", "tokenizers"),
        f"{REPEATS} turns, by processor time,",
    )


if __name__ == "__main__":
    main()
