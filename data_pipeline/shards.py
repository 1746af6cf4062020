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
        self._sha, self._crcs, self._crc, self._filled = hashlib.sha256(), [], 0, 0
        self._file = open(directory / f".{stem}.bin.tmp", "wb")  # noqa: SIM115 - lives as long as the writer

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
        data = memoryview(np.ascontiguousarray(tokens, self._dtype)).cast("B")
        self._file.write(data)
        self._sha.update(data)
        while data:
            part = data[: BLOCK_BYTES - self._filled]
            data = data[len(part) :]
            self._crc, self._filled = zlib.crc32(part, self._crc), self._filled + len(part)
            if self._filled == BLOCK_BYTES:
                self._crcs.append(self._crc)
                self._crc = self._filled = 0

    def close(self) -> ShardEntry:
        """Make the shard durable and visible.

        Returns:
            its entry for the manifest.
        """
        lengths = np.concatenate(self._lengths)
        index = np.concatenate([[0], np.cumsum(lengths)]).astype("<u8").tobytes()
        crcs = self._crcs + [self._crc] * (self._filled > 0) + crc_blocks(index)
        checks = np.array(crcs, "<u4").tobytes()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        write_atomic(self._directory / f"{self._stem}.crc", checks)
        write_atomic(self._directory / f"{self._stem}.idx", index)
        path = self._directory / f"{self._stem}.bin"
        os.replace(self._file.name, path)
        sync_directory(self._directory)
        size = self.tokens * self._dtype.itemsize
        sha256, checks_sha256 = self._sha.hexdigest(), hashlib.sha256(checks).hexdigest()
        return ShardEntry(path.name, self.tokens, len(lengths), size, sha256, self._max_id, checks_sha256)

    def abort(self) -> None:
        """Forget everything appended."""
        self._file.close()
        os.unlink(self._file.name)


def crc_blocks(data: bytes | memoryview) -> list[int]:
    """crc32 of each 1 MiB block of `data`; the last may be shorter."""
    view = memoryview(data)
    return [zlib.crc32(view[at : at + BLOCK_BYTES]) for at in range(0, len(view), BLOCK_BYTES)]


class _OpenShard:
    """Memory maps of one shard; `pending` has a 1 for every block of the .bin whose crc32 was not compared yet."""

    def __init__(self, owner: "TokenShards", number: int):
        self.owner, self.entry = owner, owner.manifest.shards[number]
        self.path = owner.path / self.entry.path
        self.data = _map(self.path, self.entry.bytes, owner.mend)
        self.tokens = np.frombuffer(self.data, owner.dtype)
        self.pending = owner.pending.get(number)
        if self.pending is None:
            blocks = -(-self.entry.bytes // BLOCK_BYTES)
            self.pending = owner.pending[number] = bytearray([owner.verify == "lazy"]) * blocks
        self._index: np.ndarray | None = None

    @property
    def index(self) -> np.ndarray:
        """int64 [documents + 1]: where documents begin, then the number of tokens; checked as a whole when first used."""
        if self._index is None:
            path = self.path.with_suffix(".idx")
            data = _map(path, 8 * (self.entry.documents + 1), self.owner.mend)
            if self.owner.verify == "lazy" and self.path not in self.owner.checked_indexes:
                for block in range(-(-len(data) // BLOCK_BYTES)):
                    self._check(path, data, block, len(self.pending) + block)
                self.owner.checked_indexes.add(self.path)
            self._index = np.frombuffer(data, "<i8")  # signed, because a search with int64 keys would copy an unsigned array
        return self._index

    def window(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) in the stored dtype, a view; compares the crc32 of blocks never touched before."""
        size = self.tokens.itemsize
        first, last = start * size // BLOCK_BYTES, (stop * size - 1) // BLOCK_BYTES + 1
        while (block := self.pending.find(1, first, last)) >= 0:
            self._check(self.path, self.data, block, block)
            self.pending[block] = 0
        return self.tokens[start:stop]

    def problems(self) -> Iterator[str]:
        """Compare every byte with the digests, whatever was compared before."""
        index_path = self.path.with_suffix(".idx")
        for path, data, offset in (
            (self.path, self.data, 0),
            (index_path, _map(index_path, 8 * (self.entry.documents + 1), self.owner.mend), len(self.pending)),
        ):
            for block in range(-(-len(data) // BLOCK_BYTES)):
                try:
                    self._check(path, data, block, offset + block)
                except DataError as error:
                    yield str(error)
        if (found := hashlib.sha256(self.data).hexdigest()) != self.entry.sha256:
            yield f"{self.path}: expected sha256 {self.entry.sha256}, found {found}. {self.owner.mend}"

    def _check(self, path: Path, data: mmap.mmap, block: int, row: int) -> None:
        expected = int(self.owner.checks(self.path, self.entry)[row])
        start, stop = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, len(data))
        found = zlib.crc32(memoryview(data)[start:stop])
        if found != expected:
            raise DataError(
                f"{path}: bytes {start} to {stop - 1} (block {block}): expected crc32 {expected:08x}, found {found:08x}: "
                f"changed after it was built. {self.owner.mend}"
            )


def _map(path: Path, size: int, mend: str) -> mmap.mmap:
    try:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno()).st_size
            if found == size:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise DataError(f"{path}: can't be read ({error.strerror}). {mend}") from error
    raise DataError(f"{path}: expected {size} bytes, found {found}: cut short or changed after it was built. {mend}")


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
        self.mend = _mend(manifest.command)
        self.pending: dict[int, bytearray] = {}
        self.checked_indexes: set[Path] = set()
        self._starts = [0, *np.cumsum([s.tokens for s in manifest.shards]).tolist()]
        self._document_starts = [0, *np.cumsum([s.documents for s in manifest.shards]).tolist()]
        self._checks: dict[Path, np.ndarray] = {}
        self._open: dict[int, _OpenShard] = {}
        # Python's mmap keeps a descriptor, two per shard here; stay below half of what the process may have.
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
            shard = self._open.get(number) or self._map_shard(number)
            return shard.window(local, local + length).astype(np.int32)
        result = np.empty(length, np.int32)
        for number, at, first, last in self._spans(start, length):
            shard = self._open.get(number) or self._map_shard(number)
            result[at : at + last - first] = shard.window(first, last)
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
            index = (self._open.get(number) or self._map_shard(number)).index
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
        index = (self._open.get(shard) or self._map_shard(shard)).index
        first, last = index[number - self._document_starts[shard] :][:2].tolist()
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
        for number, entry in enumerate(self.manifest.shards):
            path = self.path / entry.path
            sizes = {".bin": entry.bytes, ".idx": 8 * (entry.documents + 1)}
            sizes[".crc"] = 4 * sum(-(-size // BLOCK_BYTES) for size in sizes.values())
            wrong = [found for suffix, size in sizes.items() if (found := self._size_problem(path.with_suffix(suffix), size))]
            yield from wrong
            if full and not wrong:
                try:
                    yield from _OpenShard(self, number).problems()
                except DataError as error:
                    yield str(error)

    def checks(self, path: Path, entry: ShardEntry) -> np.ndarray:
        """The crc32 table of a shard, compared with the manifest when first read; uint32 [blocks of .bin, then of .idx]."""
        table = self._checks.get(path)
        if table is None:
            sidecar = path.with_suffix(".crc")
            try:
                data = sidecar.read_bytes()
            except OSError as error:
                raise DataError(f"{sidecar}: can't be read ({error.strerror}). {self.mend}") from error
            if (found := hashlib.sha256(data).hexdigest()) != entry.checks_sha256:
                raise DataError(
                    f"{sidecar}: bytes 0 to {len(data) - 1}: expected sha256 {entry.checks_sha256}, found {found}: "
                    f"changed after it was built. {self.mend}"
                )
            table = self._checks[path] = np.frombuffer(data, "<u4")
        return table

    def _size_problem(self, path: Path, expected: int) -> str | None:
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

    def _map_shard(self, number: int) -> _OpenShard:
        with self._lock:
            shard = self._open.get(number)
            if shard is None:
                shard = _OpenShard(self, number)
                while len(self._open) >= self._limit:
                    del self._open[next(iter(self._open))]
                self._open[number] = shard
        return shard
