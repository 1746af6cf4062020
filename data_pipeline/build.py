"""From pieces of input files to a finished directory of token shards: in parallel, resumable, the
same bytes every time.

The pieces are grouped into units by their sizes. A worker turns a unit into one shard and then
writes the unit's record, so a killed build goes on from the records; when all are there, the
manifest is written. Before that, if duplicates are to be left out, each unit is read for its
digests. Knows neither a command line nor where the workers run.
"""

import functools
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.dedupe import DUPLICATE, Digests, compare
from data_pipeline.errors import DataError, StorageError
from data_pipeline.remote import RemotePath, read_ranges
from data_pipeline.runner import Job, Run, Tasks
from data_pipeline.shards import (
    ATTEMPT,
    TOKENIZER,
    Manifest,
    ShardEntry,
    ShardWriter,
    move_into,
    token_dtype,
    write_atomic,
)
from data_pipeline.shards.manifest import digest_of
from data_pipeline.sources import FORMATS
from data_pipeline.sources.document import HARMLESS, Document, Piece
from data_pipeline.strict_json import loads
from data_pipeline.tokenizer import CharTokenizer, Tokenizer, bpe_entries, load_tokenizer, train_bpe

_UNIT_BYTES = (1 << 16, 1 << 28)
_TRAINING_BYTES = (
    1 << 30
)  # a BPE tokenizer learns from about this much text, spread over the whole input
_EXAMPLES = 3
_DECODED_TOKENS = 1 << 20
Unit = list[Piece]
Problems = dict[str, dict[str, Any]]  # by kind: count, how many of them were left out, examples


def make_units(pieces: list[Piece]) -> list[Unit]:
    """Group pieces, in order, into units of work of similar size; files of many documents are
    divided where they can be."""
    size = min(max(sum(piece.size for piece in pieces) // 32, _UNIT_BYTES[0]), _UNIT_BYTES[1])
    units: list[Unit] = [[]]
    for piece in pieces:
        format, step = FORMATS[piece.format], max(int(size / piece.scale), 1)
        places = (
            format.cut(piece, at)
            for at in range(piece.start + step, piece.stop, step)
            if format.many
        )
        cuts = sorted({at for at in places if at is not None and at < piece.stop})
        for start, stop in itertools.pairwise([piece.start, *cuts, piece.stop]):
            part = piece._replace(start=start, stop=stop)
            if units[-1] and unit_bytes(units[-1]) + part.size > size:
                units.append([])
            units[-1].append(part)
    return units


def unit_bytes(unit: Unit) -> int:
    """Bytes of input in a unit."""
    return sum(piece.size for piece in unit)


def usable(
    unit: Unit, on_bad: str, problems: Problems, digests: Digests | None = None
) -> Iterator[Document]:
    """Documents to use, by the on_bad rule; counts what was wrong. DataError: a bad one, and
    `on_bad` is raise.

    `digests`, of this unit, say which of them are left out because they repeat an earlier one;
    None: no matter.
    """
    repeated, number = digests and digests.repeated(), -1
    for piece in unit:
        for document in FORMATS[piece.format].documents(piece):
            if accept(document, on_bad, problems):
                number += 1
                if repeated and repeated[number]:
                    _count(problems, DUPLICATE, 1, 1, [document.where])
                else:
                    yield document


def accept(document: Document, on_bad: str, problems: Problems) -> bool:
    """Whether a document, perhaps a mended one, is to be used."""
    if not document.problem:
        return True
    harmless = document.problem in HARMLESS
    if on_bad == "raise" and not harmless:
        problem = document.problem + document.detail
        raise DataError(
            f"{document.where}: {problem}. Mend the file, or give --on-bad skip or replace."
        )
    kept = not document.empty and (harmless or on_bad == "replace")
    _count(problems, document.problem, 1, int(not kept), [document.where])
    return kept


def _count(problems: Problems, kind: str, count: int, left_out: int, examples: list[str]) -> None:
    entry = problems.setdefault(kind, {"count": 0, "left_out": 0, "examples": []})
    entry["count"] += count
    entry["left_out"] += left_out
    entry["examples"] = (entry["examples"] + examples)[:_EXAMPLES]


def train_tokenizer(
    spec: str,
    eod: str,
    units: list[Unit],
    on_bad: str,
    seen: Callable[[int], None],
    digests: Path | RemotePath | None = None,
) -> Tokenizer:
    """Train the tokenizer that `spec` asks for, "chars" or "bpe:SIZE", on the units; `seen` gets
    input bytes when read.

    `digests` is the folder that `find_duplicates` filled for these units and perhaps others after
    them.
    """
    step = 1 if spec == "chars" else -(-sum(map(unit_bytes, units)) // _TRAINING_BYTES) or 1

    def texts() -> Iterator[str]:
        for number, unit in list(enumerate(units))[::step]:
            for document in usable(unit, on_bad, {}, digests and Digests(digests, number)):
                yield from (
                    [text for text, _ in document.spans]
                    if document.spans
                    else [document.text or ""]
                )
            seen(unit_bytes(unit) * step)

    if spec == "chars":
        return CharTokenizer(set().union(*texts()), eod == "append")
    return train_bpe(texts(), bpe_entries(spec))


def find_duplicates(
    folder: Path | RemotePath,
    here: Path,
    units: list[Unit],
    on_bad: str,
    run: Run,
    seen: Callable[[int], None],
) -> None:
    """Find, for all units of all parts, in order, which documents repeat an earlier one; goes on
    where it was interrupted.

    Fills `folder`, which all workers see, with files of `Digests`; `here` is one of this machine,
    for what is compared, or the same. `seen` gets input bytes as they are read. For errors see
    `build_part`.
    """
    for each in (folder, here):
        each.mkdir(parents=True, exist_ok=True)
    tasks = [(Digests(folder, number), unit, on_bad) for number, unit in enumerate(units)]
    done = {*folder.iterdir()}
    todo = [task for task in tasks if task[0].path not in done]
    seen(sum(map(unit_bytes, units)) - sum(unit_bytes(unit) for _, unit, _ in todo))
    _work(run, _digest_unit, todo, seen)
    compare(folder, len(units), here)


def _digest_unit(digests: Digests, unit: Unit, on_bad: str) -> None:
    digests.save(usable(unit, on_bad, {}))


def encode_unit(
    record: Path | RemotePath, unit: Unit, directory: Path | RemotePath, tokenizer: tuple[str, int | None], eod: str,
    on_bad: str, digests: Digests | None = None, here: Path | None = None,
) -> None:  # fmt: skip
    """Write the shard of a unit, unless it has no text, and after it the unit's record; both are
    named by its number.

    `tokenizer`: sha256 and eod_id of the one in the directory. `digests`: see `usable`. `here`: see
        `build_part`.
    """
    worker = _tokenizer(directory / TOKENIZER, *tokenizer)
    beside = (
        record.parent if isinstance(record, Path) else here if here and here.is_dir() else None
    )  # None: the system's
    with tempfile.TemporaryDirectory(
        prefix=ATTEMPT, dir=beside
    ) as name:  # of this attempt: there may be another
        own, shards, problems = Path(name), [], {}
        writer = ShardWriter(own, f"tokens-{record.stem}", worker.vocab_size)
        try:
            text_bytes = _write_documents(
                writer, usable(unit, on_bad, problems, digests), worker, eod, on_bad, problems
            )
            shards = [vars(writer.close())] if writer.tokens else []
        finally:
            writer.abort()
        move_into(directory, own.iterdir())
        content = {"shards": shards, "text_bytes": text_bytes, "problems": problems}
        content["digest"] = digest_of(content)
        write_atomic(own / record.name, json.dumps(content).encode())
        move_into(record.parent, [own / record.name])


def _write_documents(
    writer: ShardWriter,
    documents: Iterator[Document],
    tokenizer: Tokenizer,
    eod: str,
    on_bad: str,
    problems: Problems,
) -> int:
    """Encode and write documents; returns the UTF-8 bytes of the text of their targets."""
    text_bytes, end = 0, tokenizer.eod_id if eod == "append" else None
    for document in documents:
        content = document.text or ""
        if unknown := tokenizer.unknown(
            content if document.spans is None else tokenizer.plain(document.spans)
        ):
            content = content.translate(dict.fromkeys(map(ord, unknown)))
            where = f"{document.where}: {unknown[0]!r} (U+{ord(unknown[0]):04X})"
            if not accept(
                Document(content, where, "character without an id in the tokenizer"),
                on_bad,
                problems,
            ):
                continue
        ids, mask, size = _encode(document._replace(text=content), tokenizer)
        if len(ids):
            writer.append(
                ids, mask=mask, end=end
            )  # never a target beside a mask: a template ends its turns itself
            text_bytes += size
    return text_bytes


def _encode(document: Document, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray | None, int]:
    """Ids [T] of a document, its loss mask [T] (None: all are targets), and the UTF-8 bytes of the
    text of its targets."""
    if document.spans is not None:
        return *tokenizer.encode_spans(document.spans), sum(
            len(text.encode()) for text, target in document.spans if target
        )
    if (
        document.tokens is not None
    ):  # decoded in windows, so that the lists that this takes stay small
        ids = document.tokens
        windows = (
            ids[at : at + _DECODED_TOKENS].tolist() for at in range(0, len(ids), _DECODED_TOKENS)
        )
        return ids, None, sum(len(tokenizer.decode(window).encode()) for window in windows)
    text = document.text or ""
    return tokenizer.encode(text), None, len(text.encode())


@functools.lru_cache(maxsize=1)  # a worker has many units of one build
def _tokenizer(path: Path | RemotePath, sha256: str, eod_id: int | None) -> Tokenizer:
    tokenizer = load_tokenizer(path)
    assert tokenizer.sha256 == sha256
    tokenizer.eod_id = eod_id
    return tokenizer


def _work(run: Run, job: Job, tasks: Tasks, seen: Callable[[int], None]) -> None:
    """Run tasks, whose second item is a unit."""
    for task in run(job, tasks):
        seen(unit_bytes(task[1]))


def build_part(
    directory: Path | RemotePath, work: Path | RemotePath, units: list[Unit], tokenizer: Tokenizer, eod: str, on_bad: str,
    run: Run, seen: Callable[[int], None], digests: Digests | None = None, here: Path | None = None, **origin: Any,
) -> int:  # fmt: skip
    """Build one directory of shards, or go on with one: shards and, last, the manifest; `work` has
    records of finished units.

    `eod`: "append" the end-of-document token to each document, or "none". `on_bad`: "raise", "skip"
        or "replace" text that is
    not clean. `seen` gets input bytes as they are done. `digests`: of the first unit, if duplicates
    are to be left out. `here`: a folder for shards that are made and then sent to a URL, on
    machines that have it. `origin` has fields of the manifest: sources, settings, command. Returns
    how many tokens were made now, not by an earlier call. DataError: bad input, or no document at
    all. TryAgainError: a worker was lost.
    """
    for folder in (directory, work):
        folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(directory)
    names = [work / f"{number:05d}.json" for number in range(len(units))]
    done = {
        *work.iterdir()
    }  # by listing: a file system of many machines may remember for a while that a name was not there
    identity = tokenizer.sha256, tokenizer.eod_id
    tasks = [
        (
            record,
            unit,
            directory,
            identity,
            eod,
            on_bad,
            digests and digests._replace(number=digests.number + number),
            here,
        )
        for number, (record, unit) in enumerate(zip(names, units))
    ]
    todo = [task for task in tasks if task[0] not in done]
    seen(sum(map(unit_bytes, units)) - sum(unit_bytes(task[1]) for task in todo))
    _work(run, encode_unit, todo, seen)
    problems: Problems = {}
    built = [_parse_record(name, content) for name, content in zip(names, _read_all(names))]
    for kind, entry in (item for record in built for item in record["problems"].items()):
        _count(problems, kind, **entry)
    shards = tuple(ShardEntry(**entry) for record in built for entry in record["shards"])
    if not shards:
        mend = "Give other input, or no --dedupe" if DUPLICATE in problems else "Give other input"
        raise DataError(
            f"{directory}: the input holds no text at all ({describe_problems(problems)}). {mend}."
        )
    now = sum(
        shard["tokens"]
        for name, record in zip(names, built)
        if name not in done
        for shard in record["shards"]
    )
    special_ids, size = {"eod": tokenizer.eod_id}, tokenizer.vocab_size
    identity = {
        "name": tokenizer.name,
        "sha256": tokenizer.sha256,
        "vocab_size": size,
        "special_ids": special_ids,
    }
    text_bytes = sum(record["text_bytes"] for record in built)
    Manifest(
        identity, token_dtype(size).name, eod, text_bytes, shards, problems=problems, **origin
    ).save(directory)
    return now


def _read_all(files: Sequence[Path | RemotePath]) -> list[bytes]:
    """The contents of files; those behind URLs at the same time."""
    here = [file.read_bytes() for file in files if isinstance(file, Path)]
    return here or read_ranges([(file, 0, None) for file in files if isinstance(file, RemotePath)])


def _parse_record(path: Path | RemotePath, content: bytes) -> dict[str, Any]:
    """The record of a finished unit. StorageError: it is not what `encode_unit` wrote."""
    try:
        record = loads(content)
        whole = isinstance(record, dict) and record.pop("digest", "") == digest_of(record)
    except ValueError:
        whole = False
    if not whole:
        mend = "Remove it and run the same command again: what it tells of is made again"
        raise StorageError(
            f"{path}: is not the record that prepare wrote: damaged, or of an older version. {mend}."
        )
    return record


def describe_problems(problems: Problems) -> str:
    """Counts and first examples of all kinds, in one line each."""
    lines = [
        f"{entry['count']:,} x {kind}: {', '.join(entry['examples'])}"
        for kind, entry in problems.items()
    ]
    return "\n".join(lines) or "no documents"
