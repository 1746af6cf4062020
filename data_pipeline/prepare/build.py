"""Build a directory of token shards from pieces of input files: in parallel, resumable, with the
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
from typing import Any, NamedTuple

import numpy as np

from data_pipeline.base.errors import DataError, StorageError
from data_pipeline.base.remote import RemotePath, read_ranges
from data_pipeline.base.strict_json import loads
from data_pipeline.chat.chat import Span
from data_pipeline.prepare.dedupe import DUPLICATE, Digests, compare
from data_pipeline.prepare.runner import Job, Run, Tasks
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
from data_pipeline.sources.document import HARMLESS, Document, InputRange
from data_pipeline.tokenizer import CharTokenizer, Tokenizer, bpe_entries, load_tokenizer, train_bpe

_MIN_UNIT_BYTES = 1 << 16
_MAX_UNIT_BYTES = 1 << 28
# A BPE tokenizer learns from about this much text, spread over the whole input.
_TRAINING_BYTES = 1 << 30
# Number of documents that are named for each problem.
_EXAMPLES = 3
_DECODED_TOKENS = 1 << 20
Unit = list[InputRange]
# By kind: count, how many of them were left out, examples.
Problems = dict[str, dict[str, Any]]


def make_units(pieces: list[InputRange]) -> list[Unit]:
    """Group pieces, in order, into units of work of similar size; files of many documents are
    divided where they can be."""
    share = sum(piece.size for piece in pieces) // 32
    size = min(max(share, _MIN_UNIT_BYTES), _MAX_UNIT_BYTES)
    units: list[Unit] = [[]]
    for piece in pieces:
        for part in _divided(piece, size):
            if units[-1] and unit_bytes(units[-1]) + part.size > size:
                units.append([])
            units[-1].append(part)
    return units


def _divided(piece: InputRange, size: int) -> list[InputRange]:
    """A piece, cut into pieces of about `size` bytes where its format can be."""
    format = FORMATS[piece.format]
    if not format.many:
        return [piece]
    step = max(int(size / piece.scale), 1)
    cuts = set()
    for wanted in range(piece.start + step, piece.stop, step):
        at = format.cut(piece, wanted)
        if at is not None and at < piece.stop:
            cuts.add(at)
    borders = itertools.pairwise([piece.start, *sorted(cuts), piece.stop])
    return [piece._replace(start=start, stop=stop) for start, stop in borders]


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
    repeated = None
    if digests:
        repeated = digests.repeated()
    number = -1
    for piece in unit:
        for document in FORMATS[piece.format].documents(piece):
            if not accept(document, on_bad, problems):
                continue
            number += 1
            if repeated and repeated[number]:
                _count(problems, DUPLICATE, 1, 1, [document.where])
            else:
                yield document


def accept(document: Document, on_bad: str, problems: Problems) -> bool:
    """Return whether to use a document, which may be a repaired one."""
    if not document.problem:
        return True
    harmless = document.problem in HARMLESS
    if on_bad == "raise" and not harmless:
        problem = document.problem + document.detail
        fix = "Correct the file, or give --on-bad skip or replace"
        raise DataError(f"{document.where}: {problem}. {fix}.")
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
    # Every Nth unit, except for "chars", which has to see every character.
    step = 1
    if spec != "chars":
        step = max(1, -(-sum(map(unit_bytes, units)) // _TRAINING_BYTES))

    def texts() -> Iterator[str]:
        for number in range(0, len(units), step):
            unit = units[number]
            own = None
            if digests is not None:
                own = Digests(digests, number)
            for document in usable(unit, on_bad, {}, own):
                if document.spans:
                    for spans in document.members:
                        for text, _ in spans:
                            yield text
                else:
                    yield document.text or ""
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
    done = set(folder.iterdir())
    todo = [task for task in tasks if task[0].path not in done]
    seen(_bytes_done(units, [unit for _, unit, _ in todo]))
    _work(run, _digest_unit, todo, seen)
    compare(folder, len(units), here)


def _bytes_done(units: list[Unit], todo: list[Unit]) -> int:
    """Bytes of input in units that are not to be done any more."""
    return sum(map(unit_bytes, units)) - sum(map(unit_bytes, todo))


def _digest_unit(digests: Digests, unit: Unit, on_bad: str) -> None:
    digests.save(usable(unit, on_bad, {}))


def encode_unit(
    record: Path | RemotePath,
    unit: Unit,
    directory: Path | RemotePath,
    tokenizer: tuple[str, int | None],
    eod: str,
    on_bad: str,
    digests: Digests | None = None,
    here: Path | None = None,
) -> None:
    """Write the shard of a unit, unless it has no text, and after it the unit's record; both are
    named by its number.

    `tokenizer`: sha256 and eod_id of the one in the directory. `digests`: see `usable`. `here`: see
    `build_part`.
    """
    sha256, eod_id = tokenizer
    worker = _tokenizer(directory / TOKENIZER, sha256, eod_id)
    # A folder of this attempt, for there may be another one at the same unit: beside the record, or
    # `here`, or, where that is not on this machine, wherever the system has such folders.
    beside = None
    if isinstance(record, Path):
        beside = record.parent
    elif here and here.is_dir():
        beside = here
    with tempfile.TemporaryDirectory(prefix=ATTEMPT, dir=beside) as name:
        own = Path(name)
        shards = []
        problems: Problems = {}
        writer = ShardWriter(own, f"tokens-{record.stem}", worker.vocab_size)
        try:
            documents = usable(unit, on_bad, problems, digests)
            text_bytes = _write_documents(writer, documents, worker, eod, on_bad, problems)
            if writer.tokens:
                shards.append(vars(writer.close()))
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
    text_bytes = 0
    end = None
    if eod == "append":
        end = tokenizer.eod_id
    for document in documents:
        content = document.text or ""
        plain = content
        if document.spans is not None:
            plain = "".join(map(tokenizer.plain, document.members))
        unknown = tokenizer.unknown(plain)
        if unknown:
            content = content.translate(dict.fromkeys(map(ord, unknown)))
            where = f"{document.where}: {unknown[0]!r} (U+{ord(unknown[0]):04X})"
            repaired = Document(content, where, "character without an id in the tokenizer")
            if not accept(repaired, on_bad, problems):
                continue
        members = _encode(document._replace(text=content), tokenizer, end)
        if document.is_preference and not all(member.teaches for member in members):
            problem = "an answer of which the tokenizer leaves nothing"
            if not accept(Document(None, document.where, problem), on_bad, problems):
                continue
        for encoded in members:
            if not len(encoded.ids):
                continue
            # The end is no target beside a mask: a chat template ends its turns itself. Where there
            # is no template, it is among the ids, and a target.
            own_end = None if document.apart else end
            writer.append(
                encoded.ids,
                mask=encoded.mask,
                end=own_end,
                value=document.value,
                columns=document.columns,
            )
            text_bytes += encoded.text_bytes
    return text_bytes


class _EncodedDocument(NamedTuple):
    """A document in tokens: ids [T], loss mask [T] (None: all are targets), and the UTF-8 bytes of
    the text of its targets."""

    ids: np.ndarray
    mask: np.ndarray | None
    text_bytes: int

    @property
    def teaches(self) -> bool:
        """Return whether the document has a target."""
        return len(self.ids) > 0 and (self.mask is None or bool(self.mask.any()))


def _encode(document: Document, tokenizer: Tokenizer, end: int | None) -> list[_EncodedDocument]:
    """A document, or both of a pair; with the id of the end mark (None: there is none) where that
    is a target beside others that are not."""
    if document.spans is not None:
        encoded = []
        for spans in document.members:
            if document.apart:
                ids, mask = _encode_apart(spans, tokenizer, end)
            else:
                ids, mask = tokenizer.encode_spans(spans)
            targets = [text for text, is_target in spans if is_target]
            encoded.append(_EncodedDocument(ids, mask, sum(len(text.encode()) for text in targets)))
        return encoded
    if document.tokens is not None:
        # Decoded in windows, so that the lists that this takes stay small.
        ids = document.tokens
        text_bytes = 0
        for at in range(0, len(ids), _DECODED_TOKENS):
            window = ids[at : at + _DECODED_TOKENS].tolist()
            text_bytes += len(tokenizer.decode(window).encode())
        return [_EncodedDocument(ids, None, text_bytes)]
    text = document.text or ""
    return [_EncodedDocument(tokenizer.encode(text), None, len(text.encode()))]


def _encode_apart(
    spans: list[Span], tokenizer: Tokenizer, end: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Ids, int32 [T], and loss mask, bool [T], of spans that are encoded one by one, and of the end
    mark, which is what the last span is."""
    parts = [tokenizer.encode(text) for text, _ in spans]
    counts = [len(part) for part in parts]
    mask = np.repeat([is_target for _, is_target in spans], counts)
    if end is not None:
        parts.append(np.array([end], np.int32))
        mask = np.append(mask, spans[-1][1])
    return np.concatenate(parts), mask


@functools.lru_cache(maxsize=1)
def _tokenizer(path: Path | RemotePath, sha256: str, eod_id: int | None) -> Tokenizer:
    """The tokenizer of a build, kept: a worker has many units of one."""
    tokenizer = load_tokenizer(path)
    assert tokenizer.sha256 == sha256
    tokenizer.eod_id = eod_id
    return tokenizer


def _work(run: Run, job: Job, tasks: Tasks, seen: Callable[[int], None]) -> None:
    """Run tasks, whose second item is a unit."""
    for task in run(job, tasks):
        seen(unit_bytes(task[1]))


def build_part(
    directory: Path | RemotePath,
    work: Path | RemotePath,
    units: list[Unit],
    tokenizer: Tokenizer,
    eod: str,
    on_bad: str,
    run: Run,
    seen: Callable[[int], None],
    digests: Digests | None = None,
    here: Path | None = None,
    **origin: Any,
) -> int:
    """Build one directory of shards, or go on with one: shards and, last, the manifest.

    Args:
        directory: of the shards.
        work: where the records of finished units are.
        units: of input, in order.
        tokenizer: saved in the directory, and used.
        eod: "append" the end-of-document token to each document, or "none".
        on_bad: "raise", "skip" or "replace" text that is not clean.
        run: where the workers are.
        seen: gets input bytes as they are done.
        digests: of the first unit, if duplicates are to be left out.
        here: a folder for shards that are made and then sent to a URL, on machines that have it.
        origin: fields of the manifest: sources, settings, command.

    Returns:
        How many tokens were made now, not by an earlier call.

    Raises:
        DataError: bad input, or no document at all.
        TryAgainError: a worker was lost.
    """
    for folder in (directory, work):
        folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(directory)
    records = [work / f"{number:05d}.json" for number in range(len(units))]
    # By listing: a file system of many machines may remember for a while that a name was not there.
    done = set(work.iterdir())
    identity = (tokenizer.sha256, tokenizer.eod_id)
    tasks = []
    for number, (record, unit) in enumerate(zip(records, units)):
        if record in done:
            continue
        own = None
        if digests:
            own = digests._replace(number=digests.number + number)
        tasks.append((record, unit, directory, identity, eod, on_bad, own, here))
    seen(_bytes_done(units, [task[1] for task in tasks]))
    _work(run, encode_unit, tasks, seen)

    problems: Problems = {}
    shards = []
    text_bytes = 0
    made_now = 0
    for record, content in zip(records, _read_all(records)):
        built = _parse_record(record, content)
        for kind, entry in built["problems"].items():
            _count(problems, kind, **entry)
        entries = [ShardEntry(**entry) for entry in built["shards"]]
        shards += entries
        text_bytes += built["text_bytes"]
        if record not in done:
            made_now += sum(entry.tokens for entry in entries)
    if not shards:
        fix = "Give other input"
        if DUPLICATE in problems:
            fix += ", or no --dedupe"
        what = f"the input holds no text at all ({describe_problems(problems)})"
        raise DataError(f"{directory}: {what}. {fix}.")
    manifest = Manifest(
        tokenizer={
            "name": tokenizer.name,
            "sha256": tokenizer.sha256,
            "vocab_size": tokenizer.vocab_size,
            "special_ids": {"eod": tokenizer.eod_id},
        },
        dtype=token_dtype(tokenizer.vocab_size).name,
        eod=eod,
        text_bytes=text_bytes,
        shards=tuple(shards),
        problems=problems,
        **origin,
    )
    manifest.save(directory)
    return made_now


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
        what = "is not the record that prepare wrote: damaged, or of an older version"
        fix = "Remove it and run the same command again: its contents are built again"
        raise StorageError(f"{path}: {what}. {fix}.")
    return record


def describe_problems(problems: Problems) -> str:
    """Counts and first examples of all kinds, in one line each."""
    lines = []
    for kind, entry in problems.items():
        examples = ", ".join(entry["examples"])
        lines.append(f"{entry['count']:,} x {kind}: {examples}")
    return "\n".join(lines) or "no documents"
