"""The files of a prepared directory, mapped when first used, and each block compared with its crc32
before it is."""

import errno
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from zlib_ng.zlib_ng import crc32

from data_pipeline.base.errors import DataError
from data_pipeline.base.remote import RemotePath
from data_pipeline.config import Verify
from data_pipeline.shards import files
from data_pipeline.shards.manifest import TOKENIZER, Manifest, fix

# The arguments of `CheckedFiles.checked`: shard, suffix, starts and length of windows.
Wanted = tuple[int, str, Iterable[int], int | None]
# Files of one reader that are mapped at a time; Linux lets a process have 65,530 mappings.
MAPPED = 1 << 14


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The integers of several ranges back to back: int64 [sum of lengths] from int64 [n] starts and
    lengths."""
    ends = np.cumsum(lengths)
    total = int(lengths.sum())
    return np.arange(total) + np.repeat(starts - ends + lengths, lengths)


class CheckedFiles:
    """Mapped files of a directory; for `verify` see `TokenShards.open`. Threads may share an
    instance."""

    def __init__(self, path: Path | RemotePath, manifest: Manifest, verify: Verify):
        self.path = path
        self.manifest = manifest
        self.verify = verify
        self._dtypes = {
            ".bin": np.dtype(manifest.dtype).newbyteorder("<"),
            ".idx": np.dtype("<i8"),
            ".mask": np.dtype("u1"),
            ".val": np.dtype("<f4"),
            ".cols": np.dtype("u1"),
        }
        # Blocks whose crc32 was not compared yet, by shard and suffix.
        self._pending: dict[tuple[int, str], set[int]] = {}
        self.map = functools.lru_cache(MAPPED)(self._map_file)
        self._checks = functools.lru_cache(MAPPED)(self._read_checks)

    @property
    def itemsize(self) -> int:
        """Bytes of a token."""
        return self._dtypes[".bin"].itemsize

    def problems(self, full: bool = True) -> Iterator[str]:
        """Compare the directory with its manifest, every byte or only the sizes: the first
        difference of each shard."""
        if full:
            yield from self._tokenizer_problems()
        for number in range(len(self.manifest.shards)):
            try:
                self._check_shard(number, full)
            except DataError as error:
                yield str(error)

    def _tokenizer_problems(self) -> Iterator[str]:
        path = self.path / TOKENIZER
        expected = self.manifest.tokenizer["sha256"]
        found = "no file"
        if path.exists():
            found = hashlib.sha256(path.read_bytes()).hexdigest()
        if found != expected:
            what = f"expected sha256 {expected}, found {found}: another tokenizer"
            yield str(self._damage(path, what))

    def _check_shard(self, number: int, full: bool) -> None:
        """DataError: the first difference of a shard, in its sizes or, if `full`, in any byte."""
        entry = self.manifest.shards[number]
        for suffix in entry.sizes:
            self._check_size(number, suffix)
        if not full:
            return
        found = self._check_content(number)
        if found != entry.sha256:
            what = f"expected sha256 {entry.sha256}, found {found}"
            raise self._damage(self._file(number, ".bin"), what)

    def _check_content(self, number: int) -> str:
        """Compare every block of a shard; returns the sha256 of its .bin."""
        for suffix, size in self.manifest.shards[number].sizes.items():
            if suffix == ".crc":
                continue
            for block in range(files.num_blocks(size)):
                self._check_block(number, suffix, block)
        return hashlib.sha256(self.map(number, ".bin")).hexdigest()

    def _damage(self, path: Path | RemotePath, what: str) -> DataError:
        out = self.path
        if self.manifest.settings.get("holdout"):
            out = self.path.parent
        command = self.manifest.command.replace(" OUT ", f" {out} ", 1)
        return DataError(f"{path}: {what}. {fix(command)}")

    def _file(self, number: int, suffix: str) -> Any:
        return (self.path / self.manifest.shards[number].path).with_suffix(suffix)

    def _check_size(self, number: int, suffix: str) -> None:
        path = self._file(number, suffix)
        try:
            found = path.stat().st_size
        except OSError as error:
            raise self._damage(path, f"can't be read ({error.strerror})") from error
        self._compare_size(path, self.manifest.shards[number].sizes[suffix], found)

    def _compare_size(self, path: Path | RemotePath, expected: int, found: int) -> None:
        """DataError: a file has another size than its manifest says."""
        if found != expected:
            what = f"expected {expected} bytes, found {found}"
            raise self._damage(path, f"{what}: cut short or changed after it was built")

    def _map_file(self, number: int, suffix: str) -> np.ndarray:
        """A mapped file; offsets are signed, because a search with int64 keys would copy an
        unsigned array."""
        self._check_size(number, suffix)
        path = self._file(number, suffix)
        size = self.manifest.shards[number].sizes[suffix]
        try:
            data = files.map_read_only(path, size)
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
            # Other readers of this process, or its device, have many mappings too.
            self.map.cache_clear()
            data = files.map_read_only(path, size)
        pending = set()
        if self.verify == "lazy":
            pending = set(range(files.num_blocks(size)))
        self._pending.setdefault((number, suffix), pending)
        return data.view(self._dtypes[suffix])

    def _read_checks(self, number: int) -> np.ndarray:
        """The crc32 table of a shard: uint32 [blocks of .bin, then of .idx, .mask, .val, .cols]."""
        path = self._file(number, ".crc")
        expected = self.manifest.shards[number].checks_sha256
        data = path.read_bytes()
        found = hashlib.sha256(data).hexdigest()
        if found != expected:
            what = f"expected sha256 {expected}, found {found}: changed after it was built"
            raise self._damage(path, what)
        return np.frombuffer(data, "<u4")

    def _check_block(self, number: int, suffix: str, block: int) -> None:
        start = block * files.BLOCK_BYTES
        content = self.map(number, suffix).view(np.uint8)
        self._compare(number, suffix, block, content[start : start + files.BLOCK_BYTES])

    def _compare(self, number: int, suffix: str, block: int, data: np.ndarray | memoryview) -> None:
        """DataError: these are not the bytes of a block."""
        expected = self._expected(number, suffix, block)
        found = crc32(data)
        if found == expected:
            return
        start = block * files.BLOCK_BYTES
        place = f"bytes {start} to {start + len(data) - 1} (block {block})"
        what = f"expected crc32 {expected:08x}, found {found:08x}: changed after it was built"
        raise self._damage(self._file(number, suffix), f"{place}: {what}")

    def _expected(self, number: int, suffix: str, block: int) -> int:
        """The crc32 of a block."""
        place = block
        for other, size in self.manifest.shards[number].sizes.items():
            if other == suffix:
                break
            place += files.num_blocks(size)
        return int(self._checks(number)[place])

    def checked(
        self, number: int, suffix: str, starts: Iterable[int] = (0,), length: int | None = None
    ) -> np.ndarray:
        """A mapped file whose blocks under these windows, in bytes, are what they should be; None:
        all from there on."""
        data = self.map(number, suffix)
        pending = self._pending[number, suffix]
        if not pending:
            return data
        if length is None:
            length = data.nbytes
        for block in pending.intersection(touched(starts, length)):
            self._check_block(number, suffix, block)
            pending.discard(block)
        return data

    def expect(self, wanted: Callable[[], list[Wanted]]) -> None:
        """Announce the blocks that `checked` will read next, for files that are not local."""


def touched(starts: Iterable[int], length: int) -> Iterator[int]:
    """The blocks under windows, in bytes."""
    for at in starts:
        yield from range(at // files.BLOCK_BYTES, (at + length - 1) // files.BLOCK_BYTES + 1)


def block_starts(first: np.ndarray, last: np.ndarray) -> list[int]:
    """Return the starts of the blocks that many small byte ranges touch; the ranges mostly share
    their blocks.
    """
    blocks = first // files.BLOCK_BYTES
    blocks = np.unique(ranges(blocks, last // files.BLOCK_BYTES - blocks + 1))
    return (blocks * files.BLOCK_BYTES).tolist()
