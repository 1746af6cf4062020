"""Token shards: the one training format, its writer, its reader and its checks.

A directory holds `NAME-00000.bin` (tokens, little-endian uint16 or uint32), `NAME-00000.idx` (uint64 offset of each document's
first token, then the number of tokens), `NAME-00000.mask` if not every token of the shard is a training target (one bit per
token, the lowest of a byte first, 1 for a target), `NAME-00000.crc` (uint32 crc32 of every 1 MiB block of the .bin, then of
the .idx, then of the .mask), a copy of the tokenizer, and `manifest.json`, which is written last: a directory without it was
never finished. The manifest holds a digest of itself and of every .crc file, so a chain of digests leads from it to every
byte. Documents never cross shards. Knows nothing of batches, rows or tokenizers' insides.
"""

import ctypes
import dataclasses
import errno
import functools
import hashlib
import itertools
import json
import mmap
import os
import weakref
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from data_pipeline.config import Verify
from data_pipeline.errors import DataError, StorageError

VERSION = 1
BLOCK_BYTES = 1 << 20
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
_MAPPED = 1 << 14  # files of one reader that are mapped at a time; Linux lets a process have 65,530 mappings


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that it is either whole or absent, even after a power cut; StorageError if the file system refuses."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)  # makes this and earlier renames in it durable
        finally:
            os.close(directory)
    except OSError as error:
        raise StorageError(f"{path}: can't be written ({error.strerror}). Free space or choose another place.") from error


def token_dtype(vocab_size: int) -> np.dtype:
    """Smallest stored type that holds all ids: uint16 up to 65,536 entries, else uint32; little-endian."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The integers of several ranges back to back: int64 [sum of lengths] from int64 [n] starts and lengths."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if ends.size else 0) + np.repeat(starts - ends + lengths, lengths)


def _blocks(size: int) -> int:
    return -(-size // BLOCK_BYTES)


@dataclasses.dataclass(frozen=True)
class ShardEntry:
    """One shard in the manifest: `path` of the .bin relative to it; bytes and sha256 of the .bin; sha256 of the .crc.

    A shard with a .mask counts its set bits, `targets`, and those of them at documents' first tokens; None: it has no .mask.
    """

    path: str
    tokens: int
    documents: int
    bytes: int
    sha256: str
    max_id: int
    checks_sha256: str
    targets: int | None = None
    first_targets: int | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each file of the shard, by suffix; the .crc, last, has the blocks of the others in this order."""
        sizes = {".bin": self.bytes, ".idx": 8 * (self.documents + 1)}
        sizes |= {} if self.targets is None else {".mask": -(-self.tokens // 8)}
        return sizes | {".crc": 4 * sum(map(_blocks, sizes.values()))}


@dataclasses.dataclass(frozen=True)
class Manifest:
    """manifest.json. `uid` is the identity of the content: the same for equal tokens, whatever the place or command."""

    tokenizer: dict[str, Any]  # name, sha256, vocab_size, special_ids {"eod": id or None}
    dtype: str  # uint16 | uint32
    eod: str  # append | none
    text_bytes: int  # UTF-8 bytes of all documents, without end-of-document marks
    shards: tuple[ShardEntry, ...]
    sources: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    command: str = ""
    problems: dict[str, Any] = dataclasses.field(default_factory=dict)  # what was left out or mended: counts and examples
    version: int = VERSION

    @property
    def num_tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def num_documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @property
    def num_targets(self) -> int:
        """Tokens that are targets in an epoch; where documents have no end mark, nothing announces their first tokens."""
        targets = sum(s.tokens if s.targets is None else s.targets for s in self.shards)
        first = sum(s.documents if s.first_targets is None else s.first_targets for s in self.shards)
        return targets - (first if self.eod == "none" else 0)

    @property
    def uid(self) -> str:
        """Hex digest over tokens, document borders, loss masks, tokenizer and end-of-document policy."""
        shards = [[s.tokens, s.documents, s.max_id, s.sha256, s.checks_sha256] for s in self.shards]
        for shard, content in zip(self.shards, shards):  # the uid of shards without masks must stay what it always was
            content += [] if shard.targets is None else [shard.targets]
        tokenizer = {name: self.tokenizer[name] for name in ("sha256", "vocab_size", "special_ids")}
        return _digest([self.version, self.dtype, self.eod, self.text_bytes, tokenizer, shards])[:16]

    def save(self, directory: Path) -> None:
        """Write manifest.json; the last thing a builder does."""
        content = dataclasses.asdict(self)
        names = ("num_tokens", "num_documents", "num_targets", "uid")
        content |= {name: getattr(self, name) for name in names}
        content["digest"] = _digest(content)
        write_atomic(directory / MANIFEST, (json.dumps(content, indent=1) + "\n").encode())

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Read and check manifest.json; DataError: missing, not a manifest, of a later version, or changed since written."""
        path = directory / MANIFEST
        try:
            content = json.loads(path.read_bytes())
        except OSError as error:
            if parts := sorted(p.parent.name for p in directory.glob(f"*/{MANIFEST}")):
                message = f"has no {MANIFEST}, but its folders {', '.join(parts)} have. Name one of them."
            else:
                what = f"{MANIFEST}: {error.strerror}" if directory.is_dir() else "is not a directory of token shards"
                message = f"{what}. Make one with `python -m data_pipeline.prepare {directory} --text 'GLOB'`."
            raise DataError(f"{directory}: {message}") from error
        except ValueError as error:
            raise DataError(f"{path}: is not JSON ({error}). {_mend()}") from error
        if not isinstance(content, dict) or not {"version", "shards", "digest"} <= content.keys():
            raise DataError(f"{path}: is not a manifest of token shards. Name a directory that `prepare` made.")
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


def _mend(command: str = "") -> str:
    return f"Restore it from a copy, or build it again: `{command or 'python -m data_pipeline.prepare ...'} --overwrite`."


@functools.cache
def _libc() -> ctypes.CDLL:
    """The C library, with the types of what is called here."""
    libc, size = ctypes.CDLL(None, use_errno=True), ctypes.c_size_t
    libc.mmap.argtypes = (ctypes.c_void_p, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_ssize_t)
    libc.mmap.restype, libc.munmap.argtypes = ctypes.c_void_p, (ctypes.c_void_p, size)
    return libc


def _map_read_only(path: Path, size: int) -> np.ndarray:
    """A file's `size` bytes, uint8, mapped. Keeps no descriptor, as Python's mmap does before 3.13; OSError if it can't."""
    libc = _libc()
    with open(path, "rb") as file:
        address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    memory = (ctypes.c_ubyte * size).from_address(address)  # lives as long as any array that looks at it
    weakref.finalize(memory, libc.munmap, address, size).atexit = False
    data = np.frombuffer(memory, np.uint8)
    data.flags.writeable = False
    return data


def _grouped(shard: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Each shard among these, int [n], and where it stands."""
    order = np.argsort(shard, kind="stable")
    for which in np.split(order, np.flatnonzero(np.diff(shard[order])) + 1) if order.size else ():
        yield int(shard[which[0]]), which


class ShardWriter:
    """Writes one shard, `stem`.bin and its companions, which counts when `close` returns; `vocab_size` decides the dtype."""

    def __init__(self, directory: Path, stem: str, vocab_size: int):
        self.tokens = self._max_id = 0
        self._path, self._vocab_size, self._dtype = directory / f"{stem}.bin", vocab_size, token_dtype(vocab_size)
        self._lengths = bytearray()  # int64 each: a unit may hold millions of documents
        self._mask: bytearray | None = None  # one byte a token, if any document has a mask
        self._file = open(directory / f".{stem}.bin.tmp", "w+b")  # noqa: SIM115 - lives as long as the writer

    def append(
        self, tokens: np.ndarray, lengths: np.ndarray | None = None, mask: np.ndarray | None = None, end: int | None = None
    ) -> None:
        """Add ids [T], one document or several of these `lengths` back to back; DataError: an id is not below vocab_size.

        `mask`: bool [T], True where the token is a training target; None: all are. With any mask the shard gets a .mask file.
        `end`: the id that ends this one document, after its tokens; no target if the document has a mask.
        """
        assert end is None or lengths is None, "an end is one of one document"
        lengths = np.array([len(tokens)]) if lengths is None else np.asarray(lengths)
        assert lengths.sum() == len(tokens) and (lengths > 0).all(), "lengths must be positive and sum to the tokens"
        assert mask is None or (mask.shape == (len(tokens),) and mask.dtype == bool), "a mask is bool, one per token"
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self._vocab_size:
            raise DataError(
                f"{self._path.stem}: token id {low if low < 0 else high} is outside [0, {self._vocab_size}), "
                f"the tokenizer's vocabulary ({self._dtype.name}). Build with the tokenizer that these ids belong to."
            )
        if mask is not None and self._mask is None:
            self._mask = bytearray(b"\1") * self.tokens
        if self._mask is not None:
            self._mask += mask.tobytes() if mask is not None else bytearray(b"\1") * len(tokens)
        for at in range(0, len(tokens), BLOCK_BYTES):  # a document may be large: it is not copied as a whole
            self._file.write(np.ascontiguousarray(tokens[at : at + BLOCK_BYTES], self._dtype).data)
        if end is not None:
            high, lengths = max(high, end), lengths + 1
            self._file.write(np.array([end], self._dtype).data)
            if self._mask is not None:
                self._mask.append(mask is None)
        self._max_id = max(self._max_id, high)
        self._lengths += lengths.astype(np.int64).tobytes()
        self.tokens += int(lengths.sum())

    def close(self) -> ShardEntry:
        """Make the shard durable and visible; returns its entry for the manifest."""
        lengths = np.frombuffer(self._lengths, np.int64)
        ends = np.cumsum(lengths)
        files = {".idx": np.concatenate([[0], ends]).astype("<u8").tobytes()}
        targets = first_targets = None
        if self._mask is not None:
            mask = np.frombuffer(self._mask, bool)
            files[".mask"] = np.packbits(mask, bitorder="little").tobytes()
            targets, first_targets = (int(np.count_nonzero(part)) for part in (mask, mask[ends - lengths]))
        self._file.flush()
        os.fsync(self._file.fileno())
        with self._file as file:
            file.seek(0)
            digest, checks = hashlib.sha256(), []
            while block := file.read(BLOCK_BYTES):
                digest.update(block)
                checks.append(zlib.crc32(block))
        for part in files.values():
            checks += [zlib.crc32(part[at : at + BLOCK_BYTES]) for at in range(0, len(part), BLOCK_BYTES)]
        checks = np.array(checks, "<u4").tobytes()
        digests = digest.hexdigest(), hashlib.sha256(checks).hexdigest()
        os.replace(self._file.name, self._path)  # made durable by what comes next
        for suffix, content in {".crc": checks, **files}.items():
            write_atomic(self._path.with_suffix(suffix), content)
        size, counts = self.tokens * self._dtype.itemsize, (targets, first_targets)
        return ShardEntry(self._path.name, self.tokens, len(lengths), size, digests[0], self._max_id, digests[1], *counts)

    def abort(self) -> None:
        """Forget everything appended."""
        self._file.close()
        Path(self._file.name).unlink(missing_ok=True)


class TokenShards:
    """Reader of a prepared directory: one cyclic stream of tokens with document borders. Use `open`.

    Files are mapped when first used. Threads may share an instance; pickling gives a fresh reader of the same directory.
    """

    def __init__(self, path: Path, manifest: Manifest, verify: Verify):
        self.path, self.manifest, self.verify = path, manifest, verify
        self.num_tokens, self.num_documents = manifest.num_tokens, manifest.num_documents
        self.text_bytes, self.vocab_size, self.uid = manifest.text_bytes, manifest.tokenizer["vocab_size"], manifest.uid
        self.masked = any(shard.targets is not None for shard in manifest.shards)
        self._dtypes = {".bin": np.dtype(manifest.dtype).newbyteorder("<"), ".idx": np.dtype("<i8"), ".mask": np.dtype("u1")}
        self._starts = np.cumsum([0, *(shard.tokens for shard in manifest.shards)])
        self._document_starts = np.cumsum([0, *(shard.documents for shard in manifest.shards)])
        self._pending: dict[tuple[int, str], set[int]] = {}  # blocks whose crc32 was not compared yet
        self._map = functools.lru_cache(_MAPPED)(self._map_file)
        self._checks = functools.lru_cache(_MAPPED)(self._read_checks)

    @classmethod
    def open(cls, path: str | Path, verify: Verify = "lazy") -> Self:
        """Open a directory with manifest.json; DataError: it was never finished, is empty, or differs from its manifest.

        `verify`: "off" nothing; "size" file sizes now; "lazy" also the crc32 of each block when first read; "full" all now.
        """
        shards = cls(Path(path), Manifest.load(Path(path)), verify)
        if not shards.num_tokens:
            raise DataError(f"{path}: holds 0 tokens. Prepare it from at least one document.")
        if verify != "off" and (problem := next(shards.problems(full=verify == "full"), None)):
            raise DataError(problem)
        return shards

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenShards, (self.path, self.manifest, self.verify)

    def windows(self, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Windows of the stream, which goes round: token -1 is the last one, token num_tokens the first.

        `starts` are their first tokens, any integers [n]; `length`, at least 1, may exceed num_tokens. Returns tokens, int32
        [n, length], and flat int64 indices into these where documents begin, in no order. DataError: a block is damaged.
        """
        result, borders = np.empty((len(starts), length), np.int32), [np.empty(0, np.int64)]
        for rows, at, number, first, size in self._parts(starts, length):
            result[rows, at : at + size], which, offset = self._read(number, first, size)
            borders.append(rows[which] * length + at + offset)
        return result, np.concatenate(borders)

    def mask(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Which tokens of such windows are training targets, bool [n, length]: all, where a shard has no mask."""
        result = np.ones((len(starts), length), bool)
        for rows, at, number, first, size in self._parts(starts, length):
            if self.manifest.shards[number].targets is not None:
                result[rows, at : at + size] = self._read_mask(number, first, size)
        return result

    def _parts(self, starts: np.ndarray, length: int) -> Iterator[tuple[np.ndarray, int, int, np.ndarray, int]]:
        """Cut windows where shards end: rows, their first column, shard, where in it each row's part begins, its size."""
        starts = starts % self.num_tokens
        shard = np.searchsorted(self._starts, starts, "right") - 1
        inside = starts + length <= self._starts[shard + 1]
        for number in np.unique(shard[inside]).tolist():
            rows = np.flatnonzero(inside & (shard == number))
            yield rows, 0, number, starts[rows] - self._starts[number], length
        for row in np.flatnonzero(~inside).tolist():  # these go on in the next shard, or in many
            number, at, first = int(shard[row]), 0, starts[row] - self._starts[shard[row]]
            while at < length:
                size = int(min(length - at, self.manifest.shards[number].tokens - first))
                yield np.array([row]), at, number, np.array([first]), size
                number, at, first = (number + 1) % len(self.manifest.shards), at + size, 0

    def read(self, start: int, length: int) -> np.ndarray:
        """One window, int32 [length]; see `windows`."""
        return self.windows(np.array([start]), length)[0][0]

    def document(self, number: int) -> tuple[int, int]:
        """First token and length of document `number`, counted from 0; DataError if there is no such document."""
        first, length = self.documents(np.array([number]))
        return int(first[0]), int(length[0])

    def documents(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First tokens in the stream and lengths of documents, both int64 [n], by their numbers; see `document`."""
        if (wrong := (numbers < 0) | (numbers >= self.num_documents)).any():
            number = numbers[wrong][0]
            raise DataError(f"{self.path}: document {number} does not exist. Choose one of 0 to {self.num_documents - 1}.")
        first, lengths = np.empty_like(numbers), np.empty_like(numbers)
        for shard, which in _grouped(np.searchsorted(self._document_starts, numbers, "right") - 1):
            index, nth = self._index(shard), numbers[which] - self._document_starts[shard]
            first[which], lengths[which] = self._starts[shard] + index[nth], index[nth + 1] - index[nth]
        return first, lengths

    def spans(self, starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Parts of documents, int64 [n] starts in the stream and lengths, back to back: tokens, int32, and loss mask, bool."""
        size, begins = int(lengths.sum()), np.cumsum(lengths) - lengths
        tokens, mask = np.empty(size, np.int32), np.ones(size, bool)
        for shard, which in _grouped(np.searchsorted(self._starts, starts, "right") - 1):
            first, data = starts[which] - self._starts[shard], self._map(shard, ".bin")
            last = first + lengths[which] - 1
            at, to = ranges(first, lengths[which]), ranges(begins[which], lengths[which])
            self._check_parts(shard, ".bin", first * data.itemsize, last * data.itemsize)
            tokens[to] = data[at]
            if self.manifest.shards[shard].targets is not None:
                bits = self._map(shard, ".mask")
                self._check_parts(shard, ".mask", first // 8, last // 8)
                mask[to] = (bits[at >> 3] >> (at & 7).astype(np.uint8) & 1).view(bool)
        return tokens, mask

    def problems(self, full: bool = True) -> Iterator[str]:
        """Compare the directory with its manifest, every byte or only the sizes: the first difference of each shard."""
        if full:
            path, expected = self.path / TOKENIZER, self.manifest.tokenizer["sha256"]
            found = hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else "no file"
            if found != expected:
                yield str(self._damage(path, f"expected sha256 {expected}, found {found}: another tokenizer"))
        for number, entry in enumerate(self.manifest.shards):
            try:
                for suffix in entry.sizes:
                    self._check_size(number, suffix)
                for suffix, size in entry.sizes.items() if full else ():
                    for block in range(_blocks(size) if suffix != ".crc" else 0):
                        self._check_block(number, suffix, block)
                if full and (found := hashlib.sha256(self._map(number, ".bin")).hexdigest()) != entry.sha256:
                    raise self._damage(self._file(number, ".bin"), f"expected sha256 {entry.sha256}, found {found}")
            except DataError as error:
                yield str(error)

    def _damage(self, path: Path, what: str) -> DataError:
        out = self.path.parent if self.manifest.settings.get("holdout") else self.path
        return DataError(f"{path}: {what}. {_mend(self.manifest.command.replace(' OUT ', f' {out} ', 1))}")

    def _file(self, number: int, suffix: str) -> Path:
        return (self.path / self.manifest.shards[number].path).with_suffix(suffix)

    def _check_size(self, number: int, suffix: str) -> None:
        path, expected = self._file(number, suffix), self.manifest.shards[number].sizes[suffix]
        try:
            found = path.stat().st_size
        except OSError as error:
            raise self._damage(path, f"can't be read ({error.strerror})") from error
        if found != expected:
            raise self._damage(path, f"expected {expected} bytes, found {found}: cut short or changed after it was built")

    def _map_file(self, number: int, suffix: str) -> np.ndarray:
        """A mapped file; offsets are signed, because a search with int64 keys would copy an unsigned array."""
        self._check_size(number, suffix)
        path, size = self._file(number, suffix), self.manifest.shards[number].sizes[suffix]
        try:
            data = _map_read_only(path, size)
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
            self._map.cache_clear()  # other readers of this process, or its device, have many mappings too
            data = _map_read_only(path, size)
        data = data.view(self._dtypes[suffix])
        self._pending.setdefault((number, suffix), set(range(_blocks(data.nbytes) if self.verify == "lazy" else 0)))
        return data

    def _read_checks(self, number: int) -> np.ndarray:
        """The crc32 table of a shard: uint32 [blocks of .bin, then of .idx, then of .mask]."""
        path, expected = self._file(number, ".crc"), self.manifest.shards[number].checks_sha256
        if (found := hashlib.sha256(data := path.read_bytes()).hexdigest()) != expected:
            raise self._damage(path, f"expected sha256 {expected}, found {found}: changed after it was built")
        return np.frombuffer(data, "<u4")

    def _check_block(self, number: int, suffix: str, block: int) -> None:
        start, data = block * BLOCK_BYTES, self._map(number, suffix).view(np.uint8)
        sizes = self.manifest.shards[number].sizes
        before = itertools.takewhile(lambda other: other != suffix, sizes)
        row = sum(_blocks(sizes[other]) for other in before) + block
        expected, found = int(self._checks(number)[row]), zlib.crc32(data[start : start + BLOCK_BYTES])
        if found != expected:
            place = f"bytes {start} to {min(start + BLOCK_BYTES, data.size) - 1} (block {block})"
            what = f"{place}: expected crc32 {expected:08x}, found {found:08x}: changed after it was built"
            raise self._damage(self._file(number, suffix), what)

    def _check(self, number: int, suffix: str, starts: Iterable[int], length: int) -> None:
        """Compare the blocks of windows, in bytes, that were never touched before."""
        if pending := self._pending[number, suffix]:
            touched = (range(start // BLOCK_BYTES, (start + length - 1) // BLOCK_BYTES + 1) for start in starts)
            for block in pending.intersection(itertools.chain(*touched)):
                self._check_block(number, suffix, block)
                pending.discard(block)

    def _check_parts(self, number: int, suffix: str, first: np.ndarray, last: np.ndarray) -> None:
        """The same for many small parts, from and to these bytes, that mostly share their blocks."""
        blocks = first // BLOCK_BYTES
        blocks = np.unique(ranges(blocks, last // BLOCK_BYTES - blocks + 1))
        self._check(number, suffix, (blocks * BLOCK_BYTES).tolist(), 1)

    def _index(self, number: int) -> np.ndarray:
        """int64 [documents + 1]: where a shard's documents begin, then its number of tokens; checked as a whole."""
        index = self._map(number, ".idx")
        self._check(number, ".idx", [0], index.nbytes)
        return index

    def _read(self, number: int, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Windows inside one shard [n, length]; for each document that begins in one: which window, and where in it."""
        tokens, index = self._map(number, ".bin"), self._index(number)
        self._check(number, ".bin", (starts * tokens.itemsize).tolist(), length * tokens.itemsize)
        low, high = index.searchsorted(starts), index.searchsorted(starts + length)
        which = np.repeat(np.arange(len(starts)), high - low)
        nth = np.arange(which.size) - (np.cumsum(high - low) - (high - low))[which]
        # All windows of the shard, overlapping; numpy's sliding_window_view takes longer than reading a row does.
        windows = np.ndarray((tokens.size - length + 1, length), tokens.dtype, tokens, strides=tokens.strides * 2)
        return windows[starts], which, index[low[which] + nth] - starts[which]

    def _read_mask(self, number: int, starts: np.ndarray, length: int) -> np.ndarray:
        """The mask of windows inside one shard that has one, bool [n, length]."""
        bits, size = self._map(number, ".mask"), (length + 14) // 8  # bytes that a window touches, at the most
        first = starts // 8
        self._check(number, ".mask", first.tolist(), size)
        touched = bits.take(first[:, None] + np.arange(size), mode="clip")  # past the end, where no bit is used
        unpacked = np.unpackbits(touched, axis=1, bitorder="little")
        return sliding_window_view(unpacked, length, axis=1)[np.arange(len(starts)), starts % 8].view(bool)
