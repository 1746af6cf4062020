"""What preparing costs: tokens per second of one core, beside the `tokenizers` library called in a
bare loop.

    python -m benchmarks.prepare [--write]

The documents are the running Python's standard library, tokenized with a BPE of 32,000 entries that
is trained on it once and kept in the temporary directory. The bare loop encodes the same texts, one
call each, and drops the ids; `prepare` also reads the files, checks the text, writes and digests
the shards. Words that came before are known from the first turn on, which is not counted, as they
are in a worker that has done its first unit. All run in this process, pinned to one core, in turn.
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
from data_pipeline.build import build_part, find_duplicates, make_units, train_tokenizer, usable
from data_pipeline.dedupe import Digests
from data_pipeline.runner import run_local
from data_pipeline.shards import TOKENIZER, Manifest
from data_pipeline.sources.document import Options, Piece
from data_pipeline.sources.text import python_stdlib
from data_pipeline.tokenizer import Tokenizer, load_tokenizer

ENTRIES = 32_000
INPUT_BYTES = 6_000_000
REPEATS = 5


def trained(pieces: list[Piece]) -> Tokenizer:
    """The tokenizer of this benchmark, trained if it is not there yet."""
    folder = (
        Path(tempfile.gettempdir()) / f"maxtrain-benchmark-bpe-{ENTRIES}-{version('tokenizers')}"
    )
    if not (folder / TOKENIZER).exists():
        folder.mkdir(exist_ok=True)
        train_tokenizer(
            f"bpe:{ENTRIES}", "append", make_units(pieces), "replace", lambda size: None
        ).save(folder)
    return load_tokenizer(folder)


def seconds(work: Callable[[], object]) -> float:
    """Processor time of one call, in this process."""
    start = time.process_time()
    work()
    return time.process_time() - start


def report() -> str:
    """Measure everything; Markdown."""
    library = python_stdlib("", Options())
    tokenizer = trained(library)
    pieces, size = [], 0
    for piece in library:
        if size < INPUT_BYTES:
            pieces.append(piece)
            size += piece.size
    units = make_units(pieces)
    here = functools.partial(run_local, 1)
    texts = [document.text or "" for document in usable([*pieces], "replace", {})]
    bare = tokenizers.Tokenizer.from_str(tokenizer.content.decode())

    def loop() -> None:
        for text in texts:
            bare.encode(text, add_special_tokens=False).ids  # noqa: B018 - the list of ids is part of the work

    with tempfile.TemporaryDirectory() as root:

        def build(dedupe: bool) -> None:
            out, work = Path(root) / "out", Path(root) / "work"
            for folder in (out, work):
                shutil.rmtree(folder, ignore_errors=True)
            folder = work / "digests"
            digests = Digests(folder, 0) if dedupe else None
            if digests:
                find_duplicates(folder, folder, units, "replace", here, lambda size: None)
            build_part(
                out,
                work / "records",
                units,
                tokenizer,
                "append",
                "replace",
                here,
                lambda size: None,
                digests,
            )

        jobs = {
            "`tokenizers` in a bare loop": loop,
            "the same, all texts at once, without offsets": lambda: [
                e.ids for e in bare.encode_batch_fast(texts)
            ],
            "`Tokenizer.encode`, as `prepare` calls it": lambda: [
                tokenizer.encode(text) for text in texts
            ],
            "`prepare`": lambda: build(False),
            "`prepare --dedupe`": lambda: build(True),
        }
        for job in jobs.values():
            job()
        tokens = Manifest.load(Path(root) / "out").num_tokens
        turns = [{name: seconds(job) for name, job in jobs.items()} for _ in range(REPEATS)]
    first = next(iter(jobs))
    lines = [
        f"{tokens:,} tokens of {len(texts):,} documents of Python, {size:,} bytes; BPE of {tokenizer.vocab_size:,} entries.",
        "",
        "| goals: 1.5, and a ratio of 0.8 | millions of tokens per second of one core | ratio to the bare loop |",
        "| --- | ---: | ---: |",
    ]
    for name in jobs:
        speed = tokens / statistics.median(turn[name] for turn in turns) / 1e6
        ratio = statistics.median(turn[first] / turn[name] for turn in turns)
        lines.append(f"| {name} | {speed:.2f} | {ratio:.2f} |")
    return "\n".join(lines)


def main() -> None:
    """The command."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as in the workers of `prepare`
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
