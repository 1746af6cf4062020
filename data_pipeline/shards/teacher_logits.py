"""Stored logits of a teacher for each token of prepared data, kept beside the shards.

`DATA/teacher-NAME/` holds `SHARD.top` for each shard: of each of its tokens, in their order, one
entry of fixed size: `tail`, float32, the log of the mass that the likeliest K tokens leave over;
`log_probs`, float32 [K], their log-probabilities, the highest first; and `ids`, uint16 or uint32
[K]. All are little-endian, at the temperature of the record, given the tokens of the same document
before. What is no target, or lies behind the record's length in its document, has zeros.
`SHARD.top.crc` has the crc32 of each block of a .top, uint32. `record.json` is written last: it
says of which data and of which teacher they are, with the sizes of all files, a digest of each .crc
and one of itself. So a chain of digests leads from it to every byte.

An entry is found by the number of its token alone, whatever the order of rows.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from zlib_ng.zlib_ng import crc32

from data_pipeline.base import strict_json
from data_pipeline.base.errors import ConfigError, DataError
from data_pipeline.base.inner_names import is_file_name
from data_pipeline.base.remote import RemotePath
from data_pipeline.config import Verify
from data_pipeline.shards import BLOCK_BYTES, TokenShards, write_atomic
from data_pipeline.shards.files import map_read_only, num_blocks

RECORD = "record.json"
_VERSION = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
# Names of the arrays of a batch.
IDS = "teacher_ids"
LOG_PROBS = "teacher_log_probs"
TAIL = "teacher_tail"


@dataclasses.dataclass(frozen=True)
class TeacherFile:
    """A .top file: its name, its bytes, and the sha256 of its .crc."""

    name: str
    bytes: int
    checks_sha256: str


@dataclasses.dataclass(frozen=True)
class TeacherRecord:
    """record.json.

    Attributes:
        data: the uid of the shards.
        teacher: a digest of its weights, and one of its settings.
        described: where the teacher was.
        precision: its number formats.
        vocab_size: entries of its distributions.
        top: entries that are kept of each.
        temperature: that divided its logits.
        length: targets of a document, of which those behind are not kept.
        files: of the shards, in their order.
    """

    data: str
    teacher: str
    described: str
    precision: dict[str, Any]
    vocab_size: int
    top: int
    temperature: float
    length: int
    files: tuple[TeacherFile, ...] = ()
    version: int = _VERSION

    def digest(self) -> str:
        """Digest of the record, without the teacher's location, as hex."""
        values = dataclasses.asdict(self)
        del values["described"]
        text = json.dumps(values, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def entry(self) -> np.dtype:
        """The dtype of one token's entry."""
        return entry_type(self.top, self.vocab_size)

    def save(self, folder: Path) -> None:
        """Writes record.json: from now on, the files are whole."""
        values = {"digest": self.digest(), **dataclasses.asdict(self)}
        write_atomic(folder / RECORD, json.dumps(values, indent=1).encode())

    @classmethod
    def load(cls, folder: Path) -> Self:
        """DataError: there is none, or it is damaged."""
        path = folder / RECORD
        fix = f"Remove {folder} and make it again with `maxtrain teach`"
        try:
            values = strict_json.read(path)
            expected = values.pop("digest")
            files = tuple(TeacherFile(**file) for file in values.pop("files"))
            record = cls(**values, files=files)
            for file in files:
                if not is_file_name(file.name):
                    raise ValueError(f"{file.name!r:.120} is no name of a file beside it")
        except FileNotFoundError as error:
            raise DataError(
                f"{folder} was never finished, or is not there: it has no {RECORD}. Make it with "
                "`maxtrain teach`."
            ) from error
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise DataError(f"{path}: can't be read ({error}). {fix}.") from error
        if record.digest() != expected:
            found = record.digest()
            raise DataError(f"{path}: expected digest {expected}, found {found}. {fix}.")
        if record.version != _VERSION:
            raise DataError(f"{path}: is of version {record.version}, not {_VERSION}. {fix}.")
        return record


def entry_type(top: int, vocab_size: int) -> np.dtype:
    """Return the dtype of one token's entry."""
    ids = "<u4"
    if vocab_size <= 1 << 16:
        ids = "<u2"
    return np.dtype([("tail", "<f4"), ("log_probs", "<f4", (top,)), ("ids", ids, (top,))])


def folder_of(shards: TokenShards, name: str, key: str) -> Path:
    """Return the folder of the files with this name. ConfigError: the name is not valid, or the
    data is not local.

    `key`: what gave the name, such as `distill.stored`.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{key}={name} must be a name of letters, digits, '_', '-' and '.'. The files are "
            "beside the data, in the folder teacher-NAME: name only NAME."
        )
    if isinstance(shards.path, RemotePath):
        raise ConfigError(
            f"{key}={name}: {shards.path} is behind a URL, and a teacher's logits are kept beside "
            "local data only. Copy the data to this machine."
        )
    return shards.path / f"teacher-{name}"


def checks_of(path: Path) -> bytes:
    """The crc32 of each block of a file."""
    found = []
    with open(path, "rb") as file:
        while block := file.read(BLOCK_BYTES):
            found.append(crc32(block))
    return np.array(found, "<u4").tobytes()


class StoredTeacher:
    """Reader of a teacher's stored logits for the tokens of shards. Use `open`. Picklable; threads
    may share an instance.

    Args:
        folder: of the files.
        record: of them.
        tokens: of each shard.
        verify: as of `TokenShards.open`.
    """

    def __init__(self, folder: Path, record: TeacherRecord, tokens: Sequence[int], verify: Verify):
        self.folder = folder
        self.record = record
        self._tokens = tuple(tokens)
        self._verify = verify
        self._starts = np.cumsum([0, *tokens])
        self._entries: dict[int, np.ndarray] = {}
        # Blocks of each file whose crc32 was not compared yet, and the crc32 of each block.
        self._pending: dict[int, set[int]] = {}
        self._checks: dict[int, np.ndarray] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredTeacher, (self.folder, self.record, self._tokens, self._verify)

    @classmethod
    def open(cls, folder: Path, shards: TokenShards, verify: Verify = "lazy") -> Self:
        """The files of a folder, which must be of these shards.

        DataError: they are not whole, damaged, or of other data.
        """
        record = TeacherRecord.load(folder)
        if record.data != shards.uid:
            raise DataError(
                f"{folder} is of other data (uid {record.data}) than {shards.path} holds (uid "
                f"{shards.uid}): it was prepared again since. Remove the folder and make it again "
                "with `maxtrain teach`."
            )
        opened = cls(folder, record, [entry.tokens for entry in shards.manifest.shards], verify)
        if verify != "off":
            opened._check_sizes()
        if verify == "full":
            for number in range(len(record.files)):
                opened._compare(number, sorted(opened._map(number)[1]))
        return opened

    def read(self, tokens: np.ndarray, top: int) -> dict[str, np.ndarray]:
        """Return the stored logits of tokens.

        Args:
            tokens: int64 [n], their numbers in the stream of the shards; -1: there is none.
            top: number of kept entries to read; the mass of the others is added to the tail.

        Returns:
            By IDS int32 [n, top], LOG_PROBS float32 [n, top] and TAIL float32 [n]; zeros for -1.

        Raises:
            DataError: a block is damaged.
        """
        entries = np.zeros(len(tokens), self.record.entry())
        is_there = np.flatnonzero(tokens >= 0)
        wanted = tokens[is_there]
        shard = np.searchsorted(self._starts, wanted, "right") - 1
        for number in np.unique(shard).tolist():
            of_shard = shard == number
            entries[is_there[of_shard]] = self._of_shard(
                number, wanted[of_shard] - self._starts[number]
            )
        log_probs = entries["log_probs"]
        tail = entries["tail"].copy()
        if top < self.record.top:
            dropped = np.logaddexp.reduce(log_probs[:, top:], axis=1)
            tail[is_there] = np.logaddexp(tail, dropped)[is_there]
        return {
            IDS: entries["ids"][:, :top].astype(np.int32),
            LOG_PROBS: np.ascontiguousarray(log_probs[:, :top]),
            TAIL: tail,
        }

    def _of_shard(self, number: int, places: np.ndarray) -> np.ndarray:
        """The entries of tokens of a shard, compared."""
        entries, pending = self._map(number)
        if pending:
            size = entries.itemsize
            first = places * size // BLOCK_BYTES
            last = ((places + 1) * size - 1) // BLOCK_BYTES
            touched: set[int] = set()
            for begin, end in np.unique(np.stack([first, last]), axis=1).T.tolist():
                touched.update(range(begin, end + 1))
            self._compare(number, sorted(pending & touched))
        return entries[places]

    def _map(self, number: int) -> tuple[np.ndarray, set[int]]:
        """The entries of a shard, and blocks that were not compared yet."""
        if number not in self._entries:
            file = self.record.files[number]
            data = map_read_only(self.folder / file.name, file.bytes)
            pending = set()
            if self._verify in ("lazy", "full"):
                pending = set(range(num_blocks(file.bytes)))
                self._checks[number] = self._read_checks(file)
            self._pending[number] = pending
            self._entries[number] = data.view(self.record.entry())
        return self._entries[number], self._pending[number]

    def _read_checks(self, file: TeacherFile) -> np.ndarray:
        path = self.folder / f"{file.name}.crc"
        try:
            content = path.read_bytes()
        except OSError as error:
            raise self._damage(path, f"can't be read ({error.strerror})") from error
        found = hashlib.sha256(content).hexdigest()
        if found != file.checks_sha256:
            raise self._damage(path, f"expected sha256 {file.checks_sha256}, found {found}")
        return np.frombuffer(content, "<u4")

    def _compare(self, number: int, blocks: Sequence[int]) -> None:
        """DataError: one of the blocks is not what was written."""
        content = self._entries[number].view(np.uint8)
        for block in blocks:
            start = block * BLOCK_BYTES
            found = crc32(content[start : start + BLOCK_BYTES])
            expected = int(self._checks[number][block])
            if found != expected:
                path = self.folder / self.record.files[number].name
                what = f"expected crc32 {expected:08x}, found {found:08x}"
                raise self._damage(path, f"block {block} from byte {start} on: {what}")
            self._pending[number].discard(block)

    def _check_sizes(self) -> None:
        itemsize = self.record.entry().itemsize
        if len(self.record.files) != len(self._tokens):
            what = f"names {len(self.record.files)} files for {len(self._tokens)} shards"
            raise self._damage(self.folder / RECORD, what)
        for file, tokens in zip(self.record.files, self._tokens):
            path = self.folder / file.name
            try:
                found = path.stat().st_size
            except OSError as error:
                raise self._damage(path, f"can't be read ({error.strerror})") from error
            if not found == file.bytes == tokens * itemsize:
                raise self._damage(path, f"expected {tokens * itemsize} bytes, found {found}")

    def _damage(self, path: Path, what: str) -> DataError:
        fix = f"Restore it, or remove {self.folder} and make it again with `maxtrain teach`"
        return DataError(f"{path}: {what}: changed after it was made. {fix}.")


class TeacherFiles:
    """Stored logits for the tokens of several sources, which are numbered through: the tokens of a
    source follow those of the source before it.

    Args:
        sources: of each source, in the order of the plan.
        sizes: tokens of each source.
        top: entries of a token that are read.
    """

    def __init__(self, sources: Sequence[StoredTeacher], sizes: Sequence[int], top: int):
        self._sources = tuple(sources)
        self._sizes = tuple(int(size) for size in sizes)
        self.top = top
        # Where the tokens of each source begin.
        self.begins = np.cumsum([0, *self._sizes])

    def __reduce__(self) -> tuple[Any, ...]:
        return TeacherFiles, (self._sources, self._sizes, self.top)

    def digest(self) -> str:
        """Digest of all records, as hex."""
        text = " ".join(source.record.digest() for source in self._sources)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def require_vocabulary(self, vocab_size: int) -> None:
        """Check that the teacher has the vocabulary size of the model. ConfigError: the sizes
        differ.
        """
        for source in self._sources:
            if source.record.vocab_size != vocab_size:
                raise ConfigError(
                    f"{source.folder} is of a teacher with {source.record.vocab_size:,} entries, "
                    f"and the model has {vocab_size:,}: their distributions can't be compared. Set "
                    f"model.vocab_size={source.record.vocab_size}."
                )
            if self.top > vocab_size:
                raise ConfigError(
                    f"distill.top={self.top} must be at most {vocab_size}, the entries of the "
                    f"model. Set distill.top={vocab_size}."
                )

    def arrays(self, places: np.ndarray) -> dict[str, np.ndarray]:
        """The arrays of a batch, [B, T, top] and [B, T].

        Args:
            places: int64 [B, T]: 1 + the number of each target among all tokens; 0: padding.
        """
        tokens = places.ravel() - 1
        found = empty_arrays(tokens.shape, self.top)
        of_source = np.searchsorted(self.begins, tokens, "right") - 1
        for number in np.unique(of_source[tokens >= 0]).tolist():
            which = np.flatnonzero((of_source == number) & (tokens >= 0))
            read = self._sources[number].read(tokens[which] - self.begins[number], self.top)
            for name, values in read.items():
                found[name][which] = values
        return {name: x.reshape(*places.shape, *x.shape[1:]) for name, x in found.items()}


def empty_arrays(shape: tuple[int, ...], top: int) -> dict[str, np.ndarray]:
    """The arrays of what is padding."""
    return {
        IDS: np.zeros((*shape, top), np.int32),
        LOG_PROBS: np.zeros((*shape, top), np.float32),
        TAIL: np.zeros(shape, np.float32),
    }
