"""Reading token shards: windows, masks and documents of one cyclic stream."""

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from data_pipeline.base.errors import DataError
from data_pipeline.base.remote import RemotePath, place
from data_pipeline.base.strict_json import loads
from data_pipeline.config import Verify
from data_pipeline.shards.cache import Cache
from data_pipeline.shards.cached import CachedFiles
from data_pipeline.shards.checked import CheckedFiles, Wanted, block_starts, ranges
from data_pipeline.shards.manifest import Manifest

# Shards whose lines of columns are known at a time.
_MOST_LINES = 64


def _grouped(shard: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Each shard among these, int [n], and where it stands."""
    if not shard.size:
        return
    order = np.argsort(shard, kind="stable")
    borders = np.flatnonzero(np.diff(shard[order])) + 1
    for which in np.split(order, borders):
        yield int(shard[which[0]]), which


class TokenShards:
    """Reader of a prepared directory: one cyclic stream of tokens with document borders. Use
    `open`.

    Files are mapped when first used. Threads may share an instance; pickling gives a fresh reader
    of the same directory.
    """

    def __init__(
        self,
        path: Path | RemotePath,
        manifest: Manifest,
        verify: Verify,
        cache: Cache | None = None,
    ):
        self.path = path
        self.manifest = manifest
        self.verify = verify
        self.cache = cache
        self.num_tokens = manifest.num_tokens
        self.num_documents = manifest.num_documents
        self.group = manifest.group
        self.num_groups = manifest.num_groups
        self.text_bytes = manifest.text_bytes
        self.vocab_size = manifest.tokenizer["vocab_size"]
        self.uid = manifest.uid
        self.masked = any(shard.targets is not None for shard in manifest.shards)
        # A chat template has written the text.
        self.is_rendered = "chat_template" in manifest.settings
        self.valued = any(shard.has_values for shard in manifest.shards)
        # Documents are prompts, with what else is known of each.
        self.has_columns = any(shard.column_bytes is not None for shard in manifest.shards)
        self._lines = functools.lru_cache(_MOST_LINES)(self._find_lines)
        self._starts = np.cumsum([0, *(shard.tokens for shard in manifest.shards)])
        self._document_starts = np.cumsum([0, *(shard.documents for shard in manifest.shards)])
        if isinstance(path, RemotePath):
            self.cache = cache or Cache()
            self._files = CachedFiles(path, manifest, verify, self.cache)
        else:
            self._files = CheckedFiles(path, manifest, verify)

    @classmethod
    def open(
        cls, path: str | Path | RemotePath, verify: Verify = "lazy", cache: Cache | None = None
    ) -> Self:
        """Open a directory with manifest.json; DataError: it was never finished, is empty, or
        differs from its manifest.

        `verify`: "off" nothing; "size" file sizes now; "lazy" also the crc32 of each block when
            first read; "full" all now.
        What is behind a URL is fetched by block into the `cache` (None: the usual one), and each
        block always compared.
        """
        shards = cls(place(path), Manifest.load(place(path)), verify, cache)
        if not shards.num_tokens:
            raise DataError(f"{path}: holds 0 tokens. Prepare it from at least one document.")
        if verify != "off":
            for problem in shards.problems(full=verify == "full"):
                raise DataError(problem)
        return shards

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenShards, (self.path, self.manifest, self.verify, self.cache)

    def windows(self, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Windows of the stream, which goes round: token -1 is the last one, token num_tokens the
        first.

        `starts` are their first tokens, any integers [n]; `length`, at least 1, may exceed
        num_tokens. Returns tokens, int32 [n, length], and flat int64 indices into these where
        documents begin, in no order. DataError: a block is damaged.
        """
        result = np.empty((len(starts), length), np.int32)
        return result, self.fill(result, np.arange(len(starts)), starts)

    def fill(self, tokens: np.ndarray, rows: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """Write windows, as `windows` reads them, into these rows of `tokens`, int32 [B, length];
        returns flat indices into it where documents begin."""
        length = tokens.shape[1]
        borders = [np.empty(0, np.int64)]
        self._files.expect(lambda: list(self._wanted_windows(starts, length)))
        for which, at, number, first, size in self._parts(starts, length):
            to = rows[which]
            tokens[to, at : at + size] = self._read(number, first, size)
            which, offset = self._begins(number, first, size)
            borders.append(to[which] * length + (at + offset))
        return np.concatenate(borders)

    def _wanted_windows(self, starts: np.ndarray, length: int) -> Iterator[Wanted]:
        for _, _, number, first, tokens in self._parts(starts, length):
            size = self._files.itemsize
            yield number, ".idx", (0,), None
            yield number, ".bin", (first * size).tolist(), tokens * size
            if self.manifest.shards[number].targets is not None:
                yield number, ".mask", (first // 8).tolist(), (tokens + 14) // 8

    def borders(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Return where documents begin in windows, in the form of `windows`; no token is read."""
        borders = [np.empty(0, np.int64)]
        self._files.expect(
            lambda: [(part[2], ".idx", (0,), None) for part in self._parts(starts, length)]
        )
        for rows, at, number, first, size in self._parts(starts, length):
            which, offset = self._begins(number, first, size)
            borders.append(rows[which] * length + at + offset)
        return np.concatenate(borders)

    def mask(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Return which tokens of windows are training targets, bool [n, length]: all, where a shard
        has no mask.
        """
        result = np.ones((len(starts), length), bool)
        for rows, at, number, first, size in self._parts(starts, length):
            if self.manifest.shards[number].targets is not None:
                result[rows, at : at + size] = self._read_mask(number, first, size)
        return result

    def _parts(
        self, starts: np.ndarray, length: int
    ) -> Iterator[tuple[np.ndarray, int, int, np.ndarray, int]]:
        """Cut windows where shards end: rows, their first column, shard, where in it each row's
        part begins, its size."""
        starts = starts % self.num_tokens
        shard = np.searchsorted(self._starts, starts, "right") - 1
        inside = starts + length <= self._starts[shard + 1]
        for number in dict.fromkeys(shard[inside].tolist()):
            (rows,) = (inside & (shard == number)).nonzero()
            yield rows, 0, number, starts[rows] - self._starts[number], length
        # The others go on in the next shard, or in many.
        for row in (~inside).nonzero()[0].tolist():
            number = int(shard[row])
            first = starts[row] - self._starts[number]
            at = 0
            while at < length:
                size = int(min(length - at, self.manifest.shards[number].tokens - first))
                yield np.array([row]), at, number, np.array([first]), size
                number = (number + 1) % len(self.manifest.shards)
                first = 0
                at += size

    def read(self, start: int, length: int) -> np.ndarray:
        """Return the tokens of one window, int32 [length]; see `windows`."""
        return self.windows(np.array([start]), length)[0][0]

    def document(self, number: int) -> tuple[int, int]:
        """First token and length of document `number`, counted from 0; DataError if there is no
        such document."""
        first, length = self.documents(np.array([number]))
        return int(first[0]), int(length[0])

    def documents(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First tokens in the stream and lengths of documents, both int64 [n], by their numbers;
        see `document`."""
        wrong = numbers[(numbers < 0) | (numbers >= self.num_documents)]
        if wrong.size:
            fix = f"Choose one of 0 to {self.num_documents - 1}"
            raise DataError(f"{self.path}: document {wrong[0]} does not exist. {fix}.")
        first = np.empty_like(numbers)
        lengths = np.empty_like(numbers)
        shards = np.searchsorted(self._document_starts, numbers, "right") - 1
        self._files.expect(
            lambda: [(shard, ".idx", (0,), None) for shard in np.unique(shards).tolist()]
        )
        for shard, which in _grouped(shards):
            index = self._index(shard)
            nth = numbers[which] - self._document_starts[shard]
            begins = index[nth]
            first[which] = self._starts[shard] + begins
            lengths[which] = index[nth + 1] - begins
        return first, lengths

    def values(self, numbers: np.ndarray) -> np.ndarray:
        """The numbers that documents have, float32 [n]; only where `valued`."""
        result = np.empty(len(numbers), np.float32)
        shards = np.searchsorted(self._document_starts, numbers, "right") - 1
        wanted = []
        for shard, which in _grouped(shards):
            first = 4 * (numbers[which] - self._document_starts[shard])
            wanted.append((shard, ".val", block_starts(first, first + 3), 1))
        self._files.expect(lambda: wanted)
        for (shard, suffix, starts, length), (_, which) in zip(wanted, _grouped(shards)):
            data = self._files.checked(shard, suffix, starts, length)
            result[which] = data[numbers[which] - self._document_starts[shard]]
        return result

    def columns(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """Return the columns of documents beside their tokens, by their numbers; only where
        `has_columns`.
        """
        shards = np.searchsorted(self._document_starts, numbers, "right") - 1
        self._files.expect(
            lambda: [(shard, ".cols", (0,), None) for shard in np.unique(shards).tolist()]
        )
        found = []
        for number, shard in zip(numbers, shards.tolist()):
            data = self._files.checked(shard, ".cols")
            ends = self._lines(shard)
            nth = number - int(self._document_starts[shard])
            begin = 0
            if nth:
                begin = int(ends[nth - 1]) + 1
            found.append(loads(data[begin : int(ends[nth])].tobytes()))
        return found

    def _find_lines(self, shard: int) -> np.ndarray:
        """Return where the lines of a shard's columns end, int64 [documents]."""
        return np.flatnonzero(self._files.checked(shard, ".cols") == ord("\n"))

    def documents_at(self, tokens: np.ndarray) -> np.ndarray:
        """The numbers of the documents that these tokens of the stream, int64 [n] in [0,
        num_tokens), belong to."""
        result = np.empty_like(tokens)
        for shard, which in _grouped(np.searchsorted(self._starts, tokens, "right") - 1):
            offsets = tokens[which] - self._starts[shard]
            nth = np.searchsorted(self._index(shard), offsets, "right") - 1
            result[which] = self._document_starts[shard] + nth
        return result

    def spans(self, starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Parts of documents, int64 [n] starts in the stream and lengths, back to back: tokens,
        int32, and loss mask, bool."""
        size = self._files.itemsize
        total = int(lengths.sum())
        begins = np.cumsum(lengths) - lengths
        tokens = np.empty(total, np.int32)
        mask = np.ones(total, bool)
        self._files.expect(lambda: list(self._wanted_spans(starts, lengths)))
        for shard, which in _grouped(np.searchsorted(self._starts, starts, "right") - 1):
            first = starts[which] - self._starts[shard]
            last = first + lengths[which] - 1
            at = ranges(first, lengths[which])
            to = ranges(begins[which], lengths[which])
            data = self._files.checked(shard, ".bin", block_starts(first * size, last * size), 1)
            tokens[to] = data[at]
            if self.manifest.shards[shard].targets is not None:
                bits = self._files.checked(shard, ".mask", block_starts(first // 8, last // 8), 1)
                mask[to] = (bits[at >> 3] >> (at & 7).astype(np.uint8) & 1).view(bool)
        return tokens, mask

    def _wanted_spans(self, starts: np.ndarray, lengths: np.ndarray) -> Iterator[Wanted]:
        for shard, which in _grouped(np.searchsorted(self._starts, starts, "right") - 1):
            first = starts[which] - self._starts[shard]
            last = first + lengths[which] - 1
            size = self._files.itemsize
            yield shard, ".bin", block_starts(first * size, last * size), 1
            if self.manifest.shards[shard].targets is not None:
                yield shard, ".mask", block_starts(first // 8, last // 8), 1

    def problems(self, full: bool = True) -> Iterator[str]:
        """Compare the directory with its manifest, every byte or only the sizes: the first
        difference of each shard."""
        return self._files.problems(full)

    def _index(self, number: int) -> np.ndarray:
        """int64 [documents + 1]: where a shard's documents begin, then its number of tokens;
        checked as a whole."""
        return self._files.checked(number, ".idx")

    def _begins(
        self, number: int, starts: np.ndarray, length: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return, for each document that begins in a window inside one shard, the window and the
        place in it.
        """
        index = self._index(number)
        low = index.searchsorted(starts)
        high = index.searchsorted(starts + length)
        counts = high - low
        which = np.arange(len(starts)).repeat(counts)
        nth = np.arange(which.size) - (counts.cumsum() - counts)[which]
        return which, index[low[which] + nth] - starts[which]

    def _read(self, number: int, starts: np.ndarray, length: int) -> np.ndarray:
        """Windows inside one shard, [n, length]."""
        size = self._files.itemsize
        tokens = self._files.checked(number, ".bin", (starts * size).tolist(), length * size)
        # All windows of the shard, overlapping; numpy's sliding_window_view takes longer than
        # reading a row does.
        windows = np.ndarray(
            (tokens.size - length + 1, length), tokens.dtype, tokens, strides=tokens.strides * 2
        )
        return windows[starts]

    def _read_mask(self, number: int, starts: np.ndarray, length: int) -> np.ndarray:
        """The mask of windows inside one shard that has one, bool [n, length]."""
        first = starts // 8
        # Bytes that a window touches, at most. Past the end of the file, where no bit is used, the
        # last byte stands for them.
        size = (length + 14) // 8
        bits = self._files.checked(number, ".mask", first.tolist(), size)
        touched = bits.take(first[:, None] + np.arange(size), mode="clip")
        unpacked = np.unpackbits(touched, axis=1, bitorder="little")
        windows = sliding_window_view(unpacked, length, axis=1)
        return windows[np.arange(len(starts)), starts % 8].view(bool)
