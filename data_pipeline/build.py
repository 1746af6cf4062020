"""From pieces of input files to a finished directory of token shards: in parallel, resumable, the same bytes every time.

The pieces are grouped into units by their sizes alone. A worker turns a unit into shards of its own and then writes the unit's
record, so a killed build goes on from the records; when all are there, the manifest is written. Knows no command line.
"""

import concurrent.futures
import hashlib
import json
import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data_pipeline.errors import DataError, TryAgainError
from data_pipeline.shards import TOKENIZER, Manifest, ShardEntry, ShardWriter, token_dtype, write_atomic
from data_pipeline.sources import jsonl, text
from data_pipeline.sources.document import Document, Piece
from data_pipeline.tokenizer import CharTokenizer, Tokenizer, load_tokenizer, train_bpe

_READERS = {"text": text.documents, "jsonl": jsonl.documents}
_SMALLEST_UNIT = 1 << 20
_TRAINING_BYTES = 1 << 30  # a BPE tokenizer learns from about this much text, spread over the whole input
_BATCH_CHARACTERS = 1 << 20
_EXAMPLES = 3
Unit = list[Piece]
Problems = dict[str, dict[str, Any]]  # by kind: count, examples


class Rules(NamedTuple):
    """What decides the output, besides the input and the tokenizer."""

    eod: str  # append | none
    on_bad: str  # raise | skip | replace
    shard_tokens: int  # largest shard, unless one document is longer


def make_units(pieces: Iterable[Piece], shard_tokens: int) -> list[Unit]:
    """Group pieces, in order, into units of work of similar size; plain JSONL files may be divided. Depends on sizes only."""
    pieces = list(pieces)
    size = min(max(sum(piece.stop - piece.start for piece in pieces) // 32, _SMALLEST_UNIT), 4 * shard_tokens)
    units: list[Unit] = [[]]
    filled = 0
    for piece in pieces:
        step = size if piece.kind == "jsonl" and not piece.path.endswith(".gz") else max(1, piece.stop - piece.start)
        for start in range(piece.start, max(piece.stop, piece.start + 1), step):
            part = piece._replace(start=start, stop=min(start + step, piece.stop))
            if filled and filled + part.stop - part.start > size:
                units.append([])
                filled = 0
            units[-1].append(part)
            filled += part.stop - part.start
    return units


def unit_bytes(unit: Unit) -> int:
    """Bytes of input in a unit."""
    return sum(piece.stop - piece.start for piece in unit)


def usable(unit: Unit, on_bad: str, problems: Problems) -> Iterator[Document]:
    """Documents to use, by the on_bad rule; counts what was wrong in `problems`.

    Raises:
        DataError: the first bad document, if on_bad is "raise".
    """
    for piece in unit:
        for document in _READERS[piece.kind](piece):
            if document.problem:
                if on_bad == "raise" and not document.harmless:
                    raise DataError(f"{document.where}: {document.problem}. Mend the file, or give --on-bad skip or replace.")
                count_problem(problems, document.problem, 1, [document.where])
            if document.text is not None and (not document.problem or document.harmless or on_bad == "replace"):
                yield document


def count_problem(problems: Problems, kind: str, count: int, examples: list[str]) -> None:
    """Add to the count of a kind of problem; the first few examples are kept."""
    entry = problems.setdefault(kind, {"count": 0, "examples": []})
    entry["count"] += count
    entry["examples"] = (entry["examples"] + examples)[:_EXAMPLES]


def train_tokenizer(spec: str, units: list[Unit], rules: Rules, seen: Callable[[int], None]) -> Tokenizer:
    """Train the tokenizer that `spec` asks for, "chars" or "bpe:SIZE", on the units; `seen` gets input bytes when read."""

    def texts(step: int) -> Iterator[str]:
        for unit in units[::step]:
            for document in usable(unit, rules.on_bad, {}):
                yield document.text or ""
            seen(unit_bytes(unit) * step)

    if spec == "chars":
        return CharTokenizer(set().union(*texts(1)), rules.eod == "append")
    total = sum(map(unit_bytes, units))
    return train_bpe(texts(max(1, math.ceil(total / _TRAINING_BYTES))), int(spec.removeprefix("bpe:")))


def input_digest(units: list[Unit]) -> str:
    """sha256 that changes with any byte of the input."""
    return _combine(_unit_digest(unit) for unit in units)


def _combine(digests: Iterable[str]) -> str:
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _unit_digest(unit: Unit) -> str:
    digest = hashlib.sha256()
    for piece in unit:
        try:
            with open(piece.path, "rb") as file:
                file.seek(piece.start)
                for left in range(piece.stop - piece.start, 0, -(1 << 20)):
                    digest.update(file.read(min(left, 1 << 20)))
        except OSError as error:
            digest.update(str(error.strerror).encode())
    return digest.hexdigest()


def encode_unit(directory: Path, record: Path, number: int, unit: Unit, tokenizer: Tokenizer, rules: Rules) -> None:
    """Write the shards of a unit, tokens-NUMBER-00 and on, and after them its record.

    Raises:
        DataError: bad input, as the rules say.
    """
    problems: Problems = {}
    entries: list[ShardEntry] = []
    text_bytes = 0
    end = np.array([tokenizer.eod_id] if rules.eod == "append" else [], np.int32)
    writer: ShardWriter | None = None
    try:
        for content, ids in _encoded(usable(unit, rules.on_bad, problems), tokenizer, rules.on_bad, problems):
            if writer and writer.tokens + len(ids) + len(end) > rules.shard_tokens:
                entries.append(writer.close())
                writer = None
            writer = writer or ShardWriter(directory, f"tokens-{number:05d}-{len(entries):02d}", tokenizer.vocab_size)
            writer.append(np.concatenate([ids, end]))
            text_bytes += len(content.encode())
        entries += [writer.close()] if writer else []
    except BaseException:
        if writer:
            writer.abort()
        raise
    content = {"shards": [vars(entry) for entry in entries], "text_bytes": text_bytes, "problems": problems}
    write_atomic(record, json.dumps(content | {"input_sha256": _unit_digest(unit)}).encode())


def _encoded(
    documents: Iterator[Document], tokenizer: Tokenizer, on_bad: str, problems: Problems
) -> Iterator[tuple[str, np.ndarray]]:
    """Text and ids (at least one) of each document; one with a character without an id falls under the on_bad rule."""
    for batch in _batches(documents):
        texts = [document.text or "" for document in batch]
        try:
            encoded = tokenizer.encode_batch(texts)
        except DataError as error:
            texts = [tokenizer.known(text) for text in texts]
            bad = [document.where for document, text in zip(batch, texts) if text != document.text]
            if on_bad == "raise":
                mend = "Give --on-bad skip (leaves the document out) or replace (leaves the character out)."
                raise DataError(f"{bad[0]}: {error}. {mend}") from error
            count_problem(problems, "character without an id", len(bad), bad)
            if on_bad == "skip":
                texts = [text for document, text in zip(batch, texts) if text == document.text]
            encoded = tokenizer.encode_batch(texts)
        yield from (pair for pair in zip(texts, encoded) if len(pair[1]))


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text or "")
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    yield batch


def _start_worker(tokenizer: Path, eod_id: int | None) -> None:
    """Make a worker quiet, single-threaded, and unable to outlive its parent."""
    global _tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    _tokenizer = load_tokenizer(tokenizer)
    _tokenizer.eod_id = eod_id


def _encode_in_worker(directory: Path, record: Path, number: int, unit: Unit, rules: Rules) -> None:
    encode_unit(directory, record, number, unit, _tokenizer, rules)


def build_part(
    directory: Path,
    work: Path,
    units: list[Unit],
    tokenizer: Tokenizer,
    rules: Rules,
    workers: int,
    seen: Callable[[int], None],
    **origin: Any,
) -> Manifest:
    """Build one directory of shards, or go on with one.

    Args:
        directory: where the shards and, last, the manifest go.
        work: folder for the records of finished units of this part of this build.
        units: the input.
        tokenizer: gives the ids.
        rules: see Rules.
        workers: processes; 1: this one.
        seen: called with input bytes as they are done.
        origin: fields of the manifest that say where the data came from: sources, settings, command.

    Returns:
        the manifest, as written.

    Raises:
        DataError: bad input, or no document at all.
        TryAgainError: a worker was killed.
    """
    for folder in (directory, work):
        folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(directory)
    records = [work / f"{number:05d}.json" for number in range(len(units))]
    open_units = [number for number, record in enumerate(records) if not record.exists()]
    seen(sum(map(unit_bytes, units)) - sum(unit_bytes(units[number]) for number in open_units))
    if min(workers, len(open_units)) < 2:
        for number in open_units:
            encode_unit(directory, records[number], number, units[number], tokenizer, rules)
            seen(unit_bytes(units[number]))
    else:
        context, start = multiprocessing.get_context("spawn"), (directory / TOKENIZER, tokenizer.eod_id)
        pool = concurrent.futures.ProcessPoolExecutor(min(workers, len(open_units)), context, _start_worker, start)
        try:
            arguments = ((directory, records[number], number, units[number], rules) for number in open_units)
            futures = [pool.submit(_encode_in_worker, *each) for each in arguments]
            for number, future in zip(open_units, futures):
                future.result()
                seen(unit_bytes(units[number]))
        except concurrent.futures.BrokenExecutor as error:
            mend = "Run the same command again, with fewer --workers if memory was short; finished work is kept."
            raise TryAgainError(f"{directory}: a worker process was killed. {mend}") from error
        finally:
            pool.shutdown(cancel_futures=True)
    return _finish(directory, [json.loads(record.read_bytes()) for record in records], tokenizer, rules, origin)


def _finish(directory: Path, records: list[dict], tokenizer: Tokenizer, rules: Rules, origin: dict[str, Any]) -> Manifest:
    shards = tuple(ShardEntry(**entry) for record in records for entry in record["shards"])
    problems: Problems = {}
    for kind, entry in (item for record in records for item in record["problems"].items()):
        count_problem(problems, kind, entry["count"], entry["examples"])
    if not shards:
        raise DataError(f"{directory}: the input holds no text at all ({describe_problems(problems)}). Give other input.")
    manifest = Manifest(
        tokenizer={
            "name": tokenizer.name,
            "sha256": tokenizer.sha256,
            "vocab_size": tokenizer.vocab_size,
            "special_ids": {"eod": tokenizer.eod_id},
        },
        dtype=token_dtype(tokenizer.vocab_size).name,  # type: ignore[arg-type]
        eod=rules.eod,  # type: ignore[arg-type]
        text_bytes=sum(record["text_bytes"] for record in records),
        shards=shards,
        problems=problems,
        input_sha256=_combine(record["input_sha256"] for record in records),
        **origin,
    )
    manifest.save(directory)
    return manifest


def describe_problems(problems: Problems) -> str:
    """Counts and first examples of all kinds, in one line each."""
    lines = [f"{entry['count']:,} x {kind}: {', '.join(entry['examples'])}" for kind, entry in problems.items()]
    return "\n".join(lines) or "no documents"
