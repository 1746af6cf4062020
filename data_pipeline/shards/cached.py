"""Shards behind a URL, mapped like local ones: sparse files of the cache, filled block by block as
they are first touched.

A block is there if its crc32 is right, so nothing has to remember which were fetched: a hole, half
a write and a flipped bit all mean that it is fetched (again). Files are named by the digests of the
content, whatever URL it comes from.
"""

import functools
import hashlib
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from zlib_ng.zlib_ng import crc32

from data_pipeline.base.errors import DataError, StorageError
from data_pipeline.base.remote import RemotePath, read_ranges
from data_pipeline.config import Verify
from data_pipeline.shards import files
from data_pipeline.shards.cache import Cache
from data_pipeline.shards.checked import MAPPED, CheckedFiles, Wanted, touched
from data_pipeline.shards.manifest import Manifest

# Neighbours that one request gets, at most.
_REQUEST_BLOCKS = 16
# Blocks that are in memory at a time.
_AT_ONCE_BLOCKS = 128
# A file can be removed from the cache while it is filled: so often it is filled again.
_TRIES = 10


class _Mapping(NamedTuple):
    """A mapped file of the cache; `pending` blocks were not compared yet, and may not be there."""

    number: int
    suffix: str
    data: np.ndarray
    pending: set[int]
    inode: int


class _CacheFileRemovedError(Exception):
    """The file that is mapped is no longer the cache's."""


class CachedFiles(CheckedFiles):
    """Files of a directory behind a URL, through a cache. Blocks are compared with their crc32
    before use, always."""

    path: RemotePath

    def __init__(self, path: RemotePath, manifest: Manifest, verify: Verify, cache: Cache):
        super().__init__(path, manifest, verify)
        self._cache = cache
        self._generation = cache.generation()
        self._mapping = functools.lru_cache(MAPPED)(self._map_sparse)
        # The crc32 of each block of a shard: a few bytes a MiB.
        self._tables: dict[int, np.ndarray] = {}
        self._checks = self._table

    def checked(
        self, number: int, suffix: str, starts=(0,), length: int | None = None
    ) -> np.ndarray:
        """See `CheckedFiles.checked`."""
        mapping = self._mapping(number, suffix)
        if not mapping.pending:
            return mapping.data
        return self._fetch([(number, suffix, starts, length)])[0]

    def expect(self, wanted: Callable[[], list[Wanted]]) -> None:
        """Fetch what is wanted next together: one after the other would wait for the network each
        time."""
        generation = self._cache.generation()
        if generation != self._generation:
            self._generation = generation
            # The space of removed files is free only when nobody maps them.
            self._mapping.cache_clear()
        self._fetch(wanted())

    def _fetch(self, wanted: list[Wanted]) -> list[np.ndarray]:
        """The mapped files, with what is wanted of each in it, and compared."""
        for _ in range(_TRIES):
            mappings = [self._mapping(number, suffix) for number, suffix, *_ in wanted]
            try:
                self._fill(_missing(mappings, wanted))
            except _CacheFileRemovedError:
                self._mapping.cache_clear()
                continue
            return [mapping.data for mapping in mappings]
        what = f"files were removed {_TRIES} times while they were filled"
        fix = f"Set data.cache_bytes={self._cache.limit} higher, or run it again"
        raise StorageError(f"{self._cache.folder}: {what}. {fix}.")

    def _fill(self, todo: list[tuple[_Mapping, int]]) -> None:
        """Make blocks be there, and right; DataError: they are not, behind the URL."""
        if not todo:
            return
        self._load_tables(sorted({mapping.number for mapping, _ in todo}))
        missing = []
        for mapping, block in todo:
            descriptor = self._open(mapping)
            try:
                data = os.pread(descriptor, files.BLOCK_BYTES, block * files.BLOCK_BYTES)
            finally:
                os.close(descriptor)
            if crc32(data) == self._expected(mapping.number, mapping.suffix, block):
                mapping.pending.discard(block)
            else:
                missing.append((mapping, block))
        for at in range(0, len(missing), _AT_ONCE_BLOCKS):
            part = missing[at : at + _AT_ONCE_BLOCKS]
            for (mapping, block), data in zip(part, self._download(part)):
                descriptor = self._open(mapping)
                try:
                    self._cache.write(descriptor, data, block * files.BLOCK_BYTES)
                finally:
                    os.close(descriptor)
                mapping.pending.discard(block)
        if missing:
            self._cache.trim()

    def _download(self, wanted: list[tuple[_Mapping, int]]) -> list[memoryview]:
        """The content of blocks, compared; neighbours in one request. DataError: it is wrong a
        second time, too."""
        runs: list[list[tuple[_Mapping, int]]] = []
        for mapping, block in wanted:
            if runs and _goes_on(runs[-1], mapping, block):
                runs[-1].append((mapping, block))
            else:
                runs.append([(mapping, block)])
        requests = []
        for run in runs:
            mapping, first_block = run[0]
            requests.append(self._range(mapping, first_block, len(run)))
        found = []
        for run, data in zip(runs, read_ranges(requests)):
            for nth, (mapping, block) in enumerate(run):
                start = nth * files.BLOCK_BYTES
                content = memoryview(data)[start : start + files.BLOCK_BYTES]
                try:
                    self._compare(mapping.number, mapping.suffix, block, content)
                except DataError:
                    # It may have been damaged on its way: once more.
                    content = memoryview(read_ranges([self._range(mapping, block, 1)])[0])
                    self._compare(mapping.number, mapping.suffix, block, content)
                found.append(content)
        return found

    def _range(self, mapping: _Mapping, block: int, count: int) -> tuple[RemotePath, int, int]:
        start = block * files.BLOCK_BYTES
        stop = min(start + count * files.BLOCK_BYTES, mapping.data.nbytes)
        return self._remote(mapping.number, mapping.suffix), start, stop

    def _remote(self, number: int, suffix: str) -> RemotePath:
        return (self.path / self.manifest.shards[number].path).with_suffix(suffix)

    def _name(self, number: int, suffix: str) -> str:
        entry = self.manifest.shards[number]
        content = f"{entry.sha256} {entry.checks_sha256}"
        return hashlib.sha256(content.encode()).hexdigest()[:40] + suffix

    def _map_sparse(self, number: int, suffix: str) -> _Mapping:
        size = self.manifest.shards[number].sizes[suffix]
        descriptor = self._cache.open(self._name(number, suffix), size)
        inode = os.fstat(descriptor).st_ino
        data = files.map_read_only(descriptor, size).view(self._dtypes[suffix])
        return _Mapping(number, suffix, data, set(range(files.num_blocks(size))), inode)

    def _open(self, mapping: _Mapping) -> int:
        """A descriptor of the file that is mapped; _Removed: there is another one, or none, in its
        place."""
        descriptor = self._cache.open(
            self._name(mapping.number, mapping.suffix), mapping.data.nbytes
        )
        if os.fstat(descriptor).st_ino != mapping.inode:
            os.close(descriptor)
            raise _CacheFileRemovedError
        return descriptor

    def _load_tables(self, numbers: list[int]) -> None:
        """Have the crc32 tables of shards: from the cache, or fetched together; DataError: one is
        damaged."""
        missing = []
        for number in numbers:
            if number in self._tables:
                continue
            entry = self.manifest.shards[number]
            size = entry.sizes[".crc"]
            descriptor = self._cache.open(self._name(number, ".crc"), size)
            try:
                data = os.pread(descriptor, size, 0)
            finally:
                os.close(descriptor)
            if hashlib.sha256(data).hexdigest() == entry.checks_sha256:
                self._tables[number] = np.frombuffer(data, "<u4")
            else:
                missing.append((number, size))
        requests = [(self._remote(number, ".crc"), 0, size) for number, size in missing]
        for (number, size), data in zip(missing, read_ranges(requests)):
            expected = self.manifest.shards[number].checks_sha256
            found = hashlib.sha256(data).hexdigest()
            if found != expected:
                what = f"expected sha256 {expected}, found {found}: changed after it was built"
                raise self._damage(self._remote(number, ".crc"), what)
            descriptor = self._cache.open(self._name(number, ".crc"), size)
            try:
                self._cache.write(descriptor, data, 0)
            finally:
                os.close(descriptor)
            self._tables[number] = np.frombuffer(data, "<u4")

    def _table(self, number: int) -> np.ndarray:
        self._load_tables([number])
        return self._tables[number]

    @functools.cached_property
    def _listing(self) -> dict[str, int]:
        """Bytes of each file of the directory: one look for all of them."""
        return {found.path.name: found.size for found in self.path.files(depth=1)}

    def _check_size(self, number: int, suffix: str) -> None:
        path = self._remote(number, suffix)
        found = self._listing.get(path.name)
        if found is None:
            raise self._damage(path, "can't be read (No such file or directory)")
        self._compare_size(path, self.manifest.shards[number].sizes[suffix], found)

    def _check_content(self, number: int) -> str:
        """See `CheckedFiles._check_content`; what is behind the URL is compared, and nothing put
        into the cache."""
        digest = hashlib.sha256()
        for suffix, size in self.manifest.shards[number].sizes.items():
            if suffix == ".crc":
                continue
            for block, data in self._stream(number, suffix, size):
                self._compare(number, suffix, block, data)
                if suffix == ".bin":
                    digest.update(data)
        return digest.hexdigest()

    def _stream(self, number: int, suffix: str, size: int) -> Iterator[tuple[int, memoryview]]:
        """The blocks of a file behind the URL, each with its number."""
        path = self._remote(number, suffix)
        step = _REQUEST_BLOCKS * files.BLOCK_BYTES
        for at in range(0, size, step):
            (content,) = read_ranges([(path, at, min(at + step, size))])
            data = memoryview(content)
            for start in range(0, len(data), files.BLOCK_BYTES):
                yield (at + start) // files.BLOCK_BYTES, data[start : start + files.BLOCK_BYTES]


def _missing(mappings: list[_Mapping], wanted: list[Wanted]) -> list[tuple[_Mapping, int]]:
    """The blocks that are wanted of mapped files, and were not compared yet."""
    blocks_of: dict[int, set[int]] = {}
    by_id = {}
    for mapping, (_, _, starts, length) in zip(mappings, wanted):
        if not mapping.pending:
            continue
        if length is None:
            length = mapping.data.nbytes
        by_id[id(mapping)] = mapping
        blocks = blocks_of.setdefault(id(mapping), set())
        blocks.update(mapping.pending.intersection(touched(starts, length)))
    return [(by_id[key], block) for key, blocks in blocks_of.items() for block in sorted(blocks)]


def _goes_on(run: list[tuple[_Mapping, int]], mapping: _Mapping, block: int) -> bool:
    """Return whether a block continues a request that is not too large already."""
    last_mapping, last_block = run[-1]
    return len(run) < _REQUEST_BLOCKS and last_mapping is mapping and last_block + 1 == block
