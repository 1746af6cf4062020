"""Token shards: the one training format, its writer, its reader and its checks.

A directory holds `NAME-00000.bin` (tokens, little-endian uint16 or uint32), `NAME-00000.idx` (uint64 offset of each document's
first token, then the number of tokens), `NAME-00000.crc` (uint32 crc32 of every 1 MiB block of the .bin, then of the .idx),
a copy of the tokenizer, and `manifest.json`, which is written last: a directory without it was never finished. The manifest
holds a digest of itself and of every .crc file, so a chain of digests leads from it to every byte. Documents never cross
shards. Knows nothing of batches, rows or tokenizers' insides.
"""

import dataclasses
import hashlib
import json
import mmap
import os
import resource
import threading
import zlib
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from data_pipeline.errors import DataError, StorageError

VERSION = 1
BLOCK_BYTES = 1 << 20
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
Verify = Literal["off", "size", "lazy", "full"]


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that it is either whole or absent, even after a power cut; StorageError if the file system refuses."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_directory(path.parent)
    except OSError as error:
        raise StorageError(f"{path}: can't be written ({error.strerror}). Free space or choose another place.") from error


def sync_directory(directory: Path) -> None:
    """Make renames inside `directory` durable."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def token_dtype(vocab_size: int) -> np.dtype:
    """Smallest stored type that holds all ids: uint16 up to 65,536 entries, else uint32; little-endian."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


@dataclasses.dataclass(frozen=True)
class ShardEntry:
    """One shard in the manifest: `path` of the .bin relative to it; bytes and sha256 of the .bin; sha256 of the .crc."""

    path: str
    tokens: int
    documents: int
    bytes: int
    sha256: str
    max_id: int
    checks_sha256: str

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each file of the shard, by suffix."""
        sizes = {".bin": self.bytes, ".idx": 8 * (self.documents + 1)}
        return sizes | {".crc": 4 * sum(-(-size // BLOCK_BYTES) for size in sizes.values())}


@dataclasses.dataclass(frozen=True)
class Manifest:
    """manifest.json. `uid` is the identity of the content: the same for equal tokens, whatever the place or command."""

    tokenizer: dict[str, Any]  # name, sha256, vocab_size, special_ids {"eod": id or None}
    dtype: Literal["uint16", "uint32"]
    eod: Literal["append", "none"]
    text_bytes: int  # UTF-8 bytes of all documents, without end-of-document marks
    shards: tuple[ShardEntry, ...]
    sources: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    command: str = ""
    problems: dict[str, Any] = dataclasses.field(default_factory=dict)  # what was left out or mended: count and examples
    input_sha256: str = ""
    version: int = VERSION

    @property
    def num_tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def num_documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @property
    def fingerprint(self) -> str:
        """Hex digest (64 characters) over tokens, document borders, tokenizer and end-of-document policy."""
        shards = [[s.tokens, s.documents, s.max_id, s.sha256, s.checks_sha256] for s in self.shards]
        tokenizer = {name: self.tokenizer[name] for name in ("sha256", "vocab_size", "special_ids")}
        return _digest([self.version, self.dtype, self.eod, self.text_bytes, tokenizer, shards])

    @property
    def uid(self) -> str:
        return self.fingerprint[:16]

    def save(self, directory: Path) -> None:
        """Write manifest.json; the last thing a builder does."""
        content = dataclasses.asdict(self)
        content |= {"num_tokens": self.num_tokens, "num_documents": self.num_documents, "uid": self.uid}
        content["digest"] = _digest(content)
        write_atomic(directory / MANIFEST, (json.dumps(content, indent=1) + "\n").encode())

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Read and check manifest.json.

        Raises:
            DataError: missing, not a manifest, of a later version, or changed since it was written.
        """
        path = directory / MANIFEST
        try:
            content = json.loads(path.read_bytes())
            if not isinstance(content, dict) or not {"version", "shards", "digest"} <= content.keys():
                raise DataError(f"{path}: is not a manifest of token shards. Name a directory that `prepare` made.")
        except OSError as error:
            raise DataError(_explain_missing(directory, error)) from error
        except ValueError as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"{path}: is not JSON ({error}). {_mend()}") from error
        if content["version"] != VERSION:
            raise DataError(
                f"{path}: version={content['version']}, but this program reads version {VERSION}. "
                "Update the program, or build the data again with `prepare --overwrite`."
            )
        expected = content.pop("digest")
        if (found := _digest(content)) != expected:
            raise DataError(f"{path}: expected digest {expected}, found {found}: changed after it was built. {_mend()}")
        content["shards"] = tuple(ShardEntry(**shard) for shard in content["shards"])
        return cls(**{field.name: content[field.name] for field in dataclasses.fields(cls)})


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _explain_missing(directory: Path, error: OSError) -> str:
    if directory.exists() and (parts := sorted(p.parent.name for p in directory.glob(f"*/{MANIFEST}"))):
        return f"{directory}: has no {MANIFEST}, but its folders {', '.join(parts)} have. Name one of them."
    what = f"can't read {MANIFEST} ({error.strerror})" if directory.is_dir() else "is not a directory of token shards"
    return f"{directory}: {what}. Make one with `python -m data_pipeline.prepare {directory} --text 'GLOB'`."


def _mend(command: str = "") -> str:
    return f"Restore it from a copy, or build it again: `{command or 'python -m data_pipeline.prepare ...'} --overwrite`."


class ShardWriter:
    """Writes one shard. Nothing is visible under its final name before `close`, and then all of it.

    Args:
        directory: where the files go; it exists.
        stem: file name without suffix, for example "tokens-00003".
        vocab_size: ids must be below it; also decides the dtype.

    Raises:
        DataError: from `append`, for an id outside [0, vocab_size).
    """

    def __init__(self, directory: Path, stem: str, vocab_size: int):
        self.tokens = 0
        self._directory, self._stem, self._vocab_size = directory, stem, vocab_size
        self._dtype = token_dtype(vocab_size)
        self._lengths: list[np.ndarray] = []
        self._max_id = 0
        self._file = open(directory / f".{stem}.bin.tmp", "w+b")  # noqa: SIM115 - lives as long as the writer

    def append(self, tokens: np.ndarray, lengths: np.ndarray | None = None) -> None:
        """Add documents.

        Args:
            tokens: integer ids [T] of one or more whole documents, back to back.
            lengths: tokens of each document, each at least 1, summing to T; None: one document.
        """
        lengths = np.array([len(tokens)]) if lengths is None else np.asarray(lengths)
        assert lengths.sum() == len(tokens) and (lengths > 0).all(), "lengths must be positive and sum to the tokens"
        if not len(tokens):
            return
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self._vocab_size:
            raise DataError(
                f"{self._stem}: token id {low if low < 0 else high} is outside [0, {self._vocab_size}), "
                f"the tokenizer's vocabulary ({self._dtype.name}). Build with the tokenizer that these ids belong to."
            )
        self._max_id = max(self._max_id, high)
        self._lengths.append(lengths.astype(np.int64))
        self.tokens += len(tokens)
        self._file.write(np.ascontiguousarray(tokens, self._dtype).data)

    def close(self) -> ShardEntry:
        """Make the shard durable and visible; returns its entry for the manifest."""
        lengths = np.concatenate(self._lengths)
        index = np.concatenate([[0], np.cumsum(lengths)]).astype("<u8").tobytes()
        self._file.flush()
        os.fsync(self._file.fileno())
        with self._file, mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            checks = np.array(crc_blocks(data) + crc_blocks(index), "<u4").tobytes()
            sha256, checks_sha256 = hashlib.sha256(data).hexdigest(), hashlib.sha256(checks).hexdigest()
        write_atomic(self._directory / f"{self._stem}.crc", checks)
        write_atomic(self._directory / f"{self._stem}.idx", index)
        path = self._directory / f"{self._stem}.bin"
        os.replace(self._file.name, path)
        sync_directory(self._directory)
        size = self.tokens * self._dtype.itemsize
        return ShardEntry(path.name, self.tokens, len(lengths), size, sha256, self._max_id, checks_sha256)

    def abort(self) -> None:
        """Forget everything appended."""
        self._file.close()
        Path(self._file.name).unlink(missing_ok=True)


def crc_blocks(data: bytes | mmap.mmap) -> list[int]:
    """crc32 of each 1 MiB block of `data`; the last may be shorter."""
    return [zlib.crc32(data[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES)]


class _File:
    """A mapped .bin or .idx. `pending`, kept by the reader, has a 1 for every block whose crc32 was not compared yet.

    Args:
        owner: the reader.
        entry: of the shard.
        suffix: ".bin" or ".idx".

    Raises:
        DataError: missing, or not of the size that the manifest gives.
    """

    def __init__(self, owner: "TokenShards", entry: ShardEntry, suffix: str):
        self.owner, self.entry, self.path = owner, entry, (owner.path / entry.path).with_suffix(suffix)
        if problem := owner.size_problem(self.path, entry.sizes[suffix]):
            raise DataError(problem)
        try:
            with open(self.path, "rb") as file:
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise DataError(f"{self.path}: can't be read ({error.strerror}). {owner.mend}") from error
        # Signed offsets, because a search with int64 keys would copy an unsigned array.
        self.values = np.frombuffer(self.data, owner.dtype if suffix == ".bin" else "<i8")
        blocks = bytearray([owner.verify == "lazy"]) * -(-len(self.data) // BLOCK_BYTES)
        self.pending = owner.pending.setdefault(self.path, blocks)
        self.first_row = 0 if suffix == ".bin" else -(-entry.bytes // BLOCK_BYTES)

    def window(self, start: int, stop: int) -> np.ndarray:
        """Values [start, stop), a view; compares the crc32 of blocks never touched before."""
        size = self.values.itemsize
        first, last = start * size // BLOCK_BYTES, (stop * size - 1) // BLOCK_BYTES + 1
        while (block := self.pending.find(1, first, last)) >= 0:
            if problem := self.block_problem(block):
                raise DataError(problem)
            self.pending[block] = 0
        return self.values[start:stop]

    def block_problem(self, block: int) -> str | None:
        """Compare one block, whatever was compared before."""
        start, stop = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, len(self.data))
        expected, found = int(self.owner.checks(self.entry)[self.first_row + block]), zlib.crc32(self.data[start:stop])
        if found == expected:
            return None
        numbers = f"bytes {start} to {stop - 1} (block {block}): expected crc32 {expected:08x}, found {found:08x}"
        return f"{self.path}: {numbers}: changed after it was built. {self.owner.mend}"

    def problems(self) -> Iterator[str]:
        """Compare all blocks, and the .bin with its sha256."""
        yield from (problem for block in range(len(self.pending)) if (problem := self.block_problem(block)))
        if self.first_row == 0 and (found := hashlib.sha256(self.data).hexdigest()) != self.entry.sha256:
            yield f"{self.path}: expected sha256 {self.entry.sha256}, found {found}. {self.owner.mend}"


class TokenShards:
    """Reader of a prepared directory: one cyclic stream of tokens with document borders.

    Use `open`. Opening reads the manifest (and the sizes of the files); files are mapped when first used. Threads may share
    an instance; pickling gives a fresh reader of the same directory.
    """

    def __init__(self, path: Path, manifest: Manifest, verify: Verify):
        self.path, self.manifest, self.verify = path, manifest, verify
        self.num_tokens, self.num_documents = manifest.num_tokens, manifest.num_documents
        self.text_bytes, self.vocab_size = manifest.text_bytes, manifest.tokenizer["vocab_size"]
        self.uid, self.fingerprint = manifest.uid, manifest.fingerprint
        self.tokenizer_path = path / TOKENIZER if (path / TOKENIZER).exists() else None
        self.dtype = np.dtype(manifest.dtype).newbyteorder("<")
        self.mend = _mend(
            manifest.command.replace(" OUT ", f" {path.parent if manifest.settings.get('holdout') else path} ", 1)
        )
        self.pending: dict[Path, bytearray] = {}
        self._starts = [0, *np.cumsum([s.tokens for s in manifest.shards]).tolist()]
        self._document_starts = [0, *np.cumsum([s.documents for s in manifest.shards]).tolist()]
        self._checks: dict[str, np.ndarray] = {}
        self._tokens: dict[int, _File] = {}
        self._indexes: dict[int, _File] = {}
        # Python's mmap keeps a descriptor; both kinds of files together stay below half of what the process may have.
        self._limit = max(4, min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
        self._lock = threading.Lock()

    @classmethod
    def open(cls, path: str | Path, verify: Verify = "lazy") -> Self:
        """Open a directory of shards.

        Args:
            path: directory with manifest.json.
            verify: "off" nothing; "size" file sizes now; "lazy" also the crc32 of each block when first read; "full" all now.

        Raises:
            DataError: not a finished directory, an empty one, or one that differs from its manifest.
        """
        path = Path(path)
        shards = cls(path, Manifest.load(path), verify)
        if not shards.num_tokens:
            raise DataError(f"{path}: holds 0 tokens. Prepare it from at least one document.")
        if verify != "off" and (problem := next(shards.problems(full=verify == "full"), None)):
            raise DataError(problem)
        return shards

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenShards, (self.path, self.manifest, self.verify)

    def read(self, start: int, length: int) -> np.ndarray:
        """A window of the stream, which goes round: token -1 is the last one.

        Args:
            start: first token, any integer.
            length: number of tokens; may exceed num_tokens.

        Returns:
            int32 [length].

        Raises:
            DataError: a block differs from its crc32.
        """
        start %= self.num_tokens
        number = bisect_right(self._starts, start) - 1
        local = start - self._starts[number]
        if start + length <= self._starts[number + 1]:
            return (self._tokens.get(number) or self._map(number, ".bin")).window(local, local + length).astype(np.int32)
        result = np.empty(length, np.int32)
        for number, at, first, last in self._spans(start, length):
            file = self._tokens.get(number) or self._map(number, ".bin")
            result[at : at + last - first] = file.window(first, last)
        return result

    def document_starts(self, start: int, length: int) -> np.ndarray:
        """Where documents begin inside a window of the (cyclic) stream.

        Args:
            start: first token, any integer.
            length: number of tokens.

        Returns:
            int64, ascending offsets in [0, length).
        """
        parts = []
        for number, at, first, last in self._spans(start % self.num_tokens, length):
            index = self._index(number)
            low, high = np.searchsorted(index, (first, last))
            parts.append(index[low:high] + (at - first))
        return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else np.empty(0, np.int64)

    def document(self, number: int) -> tuple[int, int]:
        """First token of document `number` (counted from 0) and the token after its last one.

        Raises:
            DataError: there is no such document.
        """
        if not 0 <= number < self.num_documents:
            raise DataError(f"{self.path}: document {number} does not exist. Choose one of 0 to {self.num_documents - 1}.")
        shard = bisect_right(self._document_starts, number) - 1
        first, last = self._index(shard)[number - self._document_starts[shard] :][:2].tolist()
        return self._starts[shard] + first, self._starts[shard] + last

    def problems(self, full: bool = True) -> Iterator[str]:
        """Compare the directory with its manifest.

        Args:
            full: compare every byte, not only the sizes.

        Yields:
            one message per difference.
        """
        if full and self.tokenizer_path:
            found, expected = hashlib.sha256(self.tokenizer_path.read_bytes()).hexdigest(), self.manifest.tokenizer["sha256"]
            if found != expected:
                yield f"{self.tokenizer_path}: expected sha256 {expected}, found {found}: another tokenizer. {self.mend}"
        elif full:
            yield f"{self.path / TOKENIZER}: is missing. {self.mend}"
        for entry in self.manifest.shards:
            paths = {(self.path / entry.path).with_suffix(suffix): size for suffix, size in entry.sizes.items()}
            wrong = [problem for path, size in paths.items() if (problem := self.size_problem(path, size))]
            yield from wrong
            if full and not wrong:
                try:
                    for suffix in (".bin", ".idx"):
                        yield from _File(self, entry, suffix).problems()
                except DataError as error:
                    yield str(error)

    def checks(self, entry: ShardEntry) -> np.ndarray:
        """The crc32 table of a shard, compared with the manifest when first read; uint32 [blocks of .bin, then of .idx]."""
        if entry.path not in self._checks:
            path = (self.path / entry.path).with_suffix(".crc")
            data = path.read_bytes() if path.exists() else b""
            if (found := hashlib.sha256(data).hexdigest()) != entry.checks_sha256:
                numbers = f"{len(data)} bytes: expected sha256 {entry.checks_sha256}, found {found}"
                raise DataError(f"{path}: {numbers}: changed after it was built. {self.mend}")
            self._checks[entry.path] = np.frombuffer(data, "<u4")
        return self._checks[entry.path]

    def size_problem(self, path: Path, expected: int) -> str | None:
        """What is wrong with the size of a file, if anything."""
        try:
            found = os.stat(path).st_size
        except OSError as error:
            return f"{path}: can't be read ({error.strerror}). {self.mend}"
        if found == expected:
            return None
        return f"{path}: expected {expected} bytes, found {found}: cut short or changed after it was built. {self.mend}"

    def _spans(self, start: int, length: int) -> Iterator[tuple[int, int, int, int]]:
        """(shard, offset in the window, first, last token in the shard) of the pieces of a window; 0 <= start < num_tokens."""
        number, at = bisect_right(self._starts, start) - 1, 0
        first = start - self._starts[number]
        while at < length:
            last = min(first + length - at, self.manifest.shards[number].tokens)
            yield number, at, first, last
            at += last - first
            number, first = (number + 1) % len(self.manifest.shards), 0

    def _index(self, number: int) -> np.ndarray:
        """int64 [documents + 1]: where a shard's documents begin, then its number of tokens; checked as a whole."""
        file = self._indexes.get(number) or self._map(number, ".idx")
        return file.window(0, len(file.values))

    def _map(self, number: int, suffix: str) -> _File:
        with self._lock:
            files = self._tokens if suffix == ".bin" else self._indexes
            if number not in files:
                while len(files) >= self._limit:
                    del files[next(iter(files))]
                files[number] = _File(self, self.manifest.shards[number], suffix)
            return files[number]
