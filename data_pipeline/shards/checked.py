"""The files of a prepared directory, mapped when first used, and each block compared with its crc32
before it is."""

import errno
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from zlib_ng.zlib_ng import crc32

from data_pipeline.config import Verify
from data_pipeline.errors import DataError
from data_pipeline.remote import RemotePath
from data_pipeline.shards import files
from data_pipeline.shards.manifest import TOKENIZER, Manifest, mend

Wanted = tuple[int, str, Iterable[int], int | None]  # see `CheckedFiles.checked`
MAPPED = (
    1 << 14
)  # files of one reader that are mapped at a time; Linux lets a process have 65,530 mappings


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The integers of several ranges back to back: int64 [sum of lengths] from int64 [n] starts and
    lengths."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if ends.size else 0) + np.repeat(starts - ends + lengths, lengths)


class CheckedFiles:
    """Mapped files of a directory; for `verify` see `TokenShards.open`. Threads may share an
    instance."""

    def __init__(self, path: Path | RemotePath, manifest: Manifest, verify: Verify):
        self.path, self.manifest, self.verify = path, manifest, verify
        self._dtypes = {
            ".bin": np.dtype(manifest.dtype).newbyteorder("<"),
            ".idx": np.dtype("<i8"),
            ".mask": np.dtype("u1"),
        }
        self._pending: dict[
            tuple[int, str], set[int]
        ] = {}  # blocks whose crc32 was not compared yet
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
            path, expected = self.path / TOKENIZER, self.manifest.tokenizer["sha256"]
            found = hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else "no file"
            if found != expected:
                yield str(
                    self._damage(
                        path, f"expected sha256 {expected}, found {found}: another tokenizer"
                    )
                )
        for number, entry in enumerate(self.manifest.shards):
            try:
                for suffix in entry.sizes:
                    self._check_size(number, suffix)
                if full and (found := self._check_content(number)) != entry.sha256:
                    raise self._damage(
                        self._file(number, ".bin"), f"expected sha256 {entry.sha256}, found {found}"
                    )
            except DataError as error:
                yield str(error)

    def _check_content(self, number: int) -> str:
        """Compare every block of a shard; returns the sha256 of its .bin."""
        for suffix, size in self.manifest.shards[number].sizes.items():
            for block in range(files.num_blocks(size) if suffix != ".crc" else 0):
                self._check_block(number, suffix, block)
        return hashlib.sha256(self.map(number, ".bin")).hexdigest()

    def _damage(self, path: Path | RemotePath, what: str) -> DataError:
        out = self.path.parent if self.manifest.settings.get("holdout") else self.path
        return DataError(
            f"{path}: {what}. {mend(self.manifest.command.replace(' OUT ', f' {out} ', 1))}"
        )

    def _file(self, number: int, suffix: str) -> Any:
        return (self.path / self.manifest.shards[number].path).with_suffix(suffix)

    def _check_size(self, number: int, suffix: str) -> None:
        path, expected = self._file(number, suffix), self.manifest.shards[number].sizes[suffix]
        try:
            found = path.stat().st_size
        except OSError as error:
            raise self._damage(path, f"can't be read ({error.strerror})") from error
        if found != expected:
            raise self._damage(
                path,
                f"expected {expected} bytes, found {found}: cut short or changed after it was built",
            )

    def _map_file(self, number: int, suffix: str) -> np.ndarray:
        """A mapped file; offsets are signed, because a search with int64 keys would copy an
        unsigned array."""
        self._check_size(number, suffix)
        path, size = self._file(number, suffix), self.manifest.shards[number].sizes[suffix]
        try:
            data = files.map_read_only(path, size)
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
            self.map.cache_clear()  # other readers of this process, or its device, have many mappings too
            data = files.map_read_only(path, size)
        data = data.view(self._dtypes[suffix])
        self._pending.setdefault(
            (number, suffix),
            set(range(files.num_blocks(data.nbytes) if self.verify == "lazy" else 0)),
        )
        return data

    def _read_checks(self, number: int) -> np.ndarray:
        """The crc32 table of a shard: uint32 [blocks of .bin, then of .idx, then of .mask]."""
        path, expected = self._file(number, ".crc"), self.manifest.shards[number].checks_sha256
        if (found := hashlib.sha256(data := path.read_bytes()).hexdigest()) != expected:
            raise self._damage(
                path, f"expected sha256 {expected}, found {found}: changed after it was built"
            )
        return np.frombuffer(data, "<u4")

    def _check_block(self, number: int, suffix: str, block: int) -> None:
        start = block * files.BLOCK_BYTES
        self._compare(
            number,
            suffix,
            block,
            self.map(number, suffix).view(np.uint8)[start : start + files.BLOCK_BYTES],
        )

    def _compare(self, number: int, suffix: str, block: int, data: np.ndarray | memoryview) -> None:
        """DataError: these are not the bytes of a block."""
        expected, found, start = (
            self._expected(number, suffix, block),
            crc32(data),
            block * files.BLOCK_BYTES,
        )
        if found != expected:
            place = f"bytes {start} to {start + len(data) - 1} (block {block})"
            what = f"{place}: expected crc32 {expected:08x}, found {found:08x}: changed after it was built"
            raise self._damage(self._file(number, suffix), what)

    def _expected(self, number: int, suffix: str, block: int) -> int:
        """The crc32 of a block."""
        sizes = self.manifest.shards[number].sizes
        before = itertools.takewhile(lambda other: other != suffix, sizes)
        return int(
            self._checks(number)[sum(files.num_blocks(sizes[other]) for other in before) + block]
        )

    def checked(
        self, number: int, suffix: str, starts: Iterable[int] = (0,), length: int | None = None
    ) -> np.ndarray:
        """A mapped file whose blocks under these windows, in bytes, are what they should be; None:
        all from there on."""
        data = self.map(number, suffix)
        if pending := self._pending[number, suffix]:
            for block in pending.intersection(
                touched(starts, data.nbytes if length is None else length)
            ):
                self._check_block(number, suffix, block)
                pending.discard(block)
        return data

    def expect(self, wanted: Callable[[], list[Wanted]]) -> None:
        """What `checked` will be asked for next; local files are there."""


def touched(starts: Iterable[int], length: int) -> Iterator[int]:
    """The blocks under windows, in bytes."""
    return itertools.chain(
        *(
            range(at // files.BLOCK_BYTES, (at + length - 1) // files.BLOCK_BYTES + 1)
            for at in starts
        )
    )


def block_starts(first: np.ndarray, last: np.ndarray) -> list[int]:
    """Where the blocks begin that many small parts touch, from and to these bytes; they mostly
    share their blocks."""
    blocks = first // files.BLOCK_BYTES
    blocks = np.unique(ranges(blocks, last // files.BLOCK_BYTES - blocks + 1))
    return (blocks * files.BLOCK_BYTES).tolist()
