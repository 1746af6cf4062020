"""Writing a shard: its tokens as they come, and what is made of them when it is closed."""

import hashlib
import os
from pathlib import Path

import numpy as np
from zlib_ng.zlib_ng import crc32

from data_pipeline.base.errors import DataError
from data_pipeline.base.new_files import open_beside
from data_pipeline.shards import files
from data_pipeline.shards.manifest import ShardEntry


def token_dtype(vocab_size: int) -> np.dtype:
    """Smallest stored type that holds all ids: uint16 up to 65,536 entries, else uint32;
    little-endian."""
    if vocab_size <= 1 << 16:
        return np.dtype("<u2")
    return np.dtype("<u4")


class ShardWriter:
    """Writes one shard, `stem`.bin and its companions, which counts when `close` returns;
    `vocab_size` decides the dtype."""

    def __init__(self, directory: Path, stem: str, vocab_size: int):
        self.tokens = 0
        self._max_id = 0
        self._path = directory / f"{stem}.bin"
        self._vocab_size = vocab_size
        self._dtype = token_dtype(vocab_size)
        # int64 each, as bytes: a unit may hold millions of documents.
        self._lengths = bytearray()
        # One byte a token, if any document has a mask.
        self._mask: bytearray | None = None
        # float32 each, as bytes, if the documents have one.
        self._values: bytearray | None = None
        # JSON lines, if the documents have columns.
        self._columns: bytearray | None = None
        # It lives as long as the writer.
        self._file = open_beside(self._path)

    def append(
        self,
        tokens: np.ndarray,
        lengths: np.ndarray | None = None,
        mask: np.ndarray | None = None,
        end: int | None = None,
        value: float | None = None,
        columns: str | None = None,
    ) -> None:
        """Add ids [T], one document or several of these `lengths` back to back; DataError: an id is
        not below vocab_size.

        `mask`: bool [T], True where the token is a training target; None: all are. With any mask
            the shard gets a .mask file.
        `end`: the id that ends this one document, after its tokens; no target if the document has a
            mask.
        `value`: a finite number of each of these documents, in a shard whose documents all have
        one. `columns`: a JSON object of this one document, in one line, in a shard whose documents
            all have one.
        """
        assert end is None or lengths is None, "an end is one of one document"
        if lengths is None:
            lengths = np.array([len(tokens)])
        lengths = np.asarray(lengths)
        assert lengths.sum() == len(tokens) and (lengths > 0).all(), (
            "lengths must be positive and sum to the tokens"
        )
        assert mask is None or (mask.shape == (len(tokens),) and mask.dtype == bool), (
            "a mask is bool, one per token"
        )
        has_value = value is not None
        if not self.tokens and has_value:
            self._values = bytearray()
        assert (self._values is not None) == has_value, "all documents have a value, or none"
        if self._values is not None:
            row = np.full(len(lengths), value, "<f4")
            assert np.isfinite(row).all(), "a value is finite in float32"
            self._values += row.tobytes()
        if not self.tokens and columns is not None:
            self._columns = bytearray()
        assert (self._columns is not None) == (columns is not None), "all have columns, or none"
        if columns is not None and self._columns is not None:
            assert len(lengths) == 1 and "\n" not in columns, "a line is of one document"
            self._columns += f"{columns}\n".encode()
        low = int(tokens.min())
        high = int(tokens.max())
        if low < 0:
            raise self._outside(low)
        if high >= self._vocab_size:
            raise self._outside(high)
        if mask is not None and self._mask is None:
            self._mask = bytearray(b"\1") * self.tokens
        if self._mask is not None:
            if mask is None:
                self._mask += bytearray(b"\1") * len(tokens)
            else:
                self._mask += mask.tobytes()
        # A document may be large: it is not copied as a whole.
        for at in range(0, len(tokens), files.BLOCK_BYTES):
            part = np.ascontiguousarray(tokens[at : at + files.BLOCK_BYTES], self._dtype)
            self._file.write(part.data)
        if end is not None:
            high = max(high, end)
            lengths = lengths + 1
            self._file.write(np.array([end], self._dtype).data)
            if self._mask is not None:
                self._mask.append(mask is None)
        self._max_id = max(self._max_id, high)
        self._lengths += lengths.astype(np.int64).tobytes()
        self.tokens += int(lengths.sum())

    def _outside(self, token: int) -> DataError:
        vocabulary = f"the tokenizer's vocabulary ({self._dtype.name})"
        rule = f"token id {token} is outside [0, {self._vocab_size}), {vocabulary}"
        fix = "Build with the tokenizer that these ids belong to"
        return DataError(f"{self._path.stem}: {rule}. {fix}.")

    def close(self) -> ShardEntry:
        """Make the shard durable and visible; returns its entry for the manifest."""
        lengths = np.frombuffer(self._lengths, np.int64)
        ends = np.cumsum(lengths)
        companions = {".idx": np.concatenate([[0], ends]).astype("<u8").tobytes()}
        targets = None
        first_targets = None
        if self._mask is not None:
            mask = np.frombuffer(self._mask, bool)
            companions[".mask"] = np.packbits(mask, bitorder="little").tobytes()
            targets = int(np.count_nonzero(mask))
            first_targets = int(np.count_nonzero(mask[ends - lengths]))
        if self._values is not None:
            companions[".val"] = bytes(self._values)
        column_bytes = None
        if self._columns is not None:
            companions[".cols"] = bytes(self._columns)
            column_bytes = len(self._columns)
        self._file.flush()
        os.fsync(self._file.fileno())
        digest = hashlib.sha256()
        checks = []
        with self._file as file:
            file.seek(0)
            while block := file.read(files.BLOCK_BYTES):
                digest.update(block)
                checks.append(crc32(block))
        for content in companions.values():
            for at in range(0, len(content), files.BLOCK_BYTES):
                checks.append(crc32(content[at : at + files.BLOCK_BYTES]))
        table = np.array(checks, "<u4").tobytes()
        # Made durable by what comes next.
        os.replace(self._file.name, self._path)
        for suffix, content in {".crc": table, **companions}.items():
            files.write_atomic(self._path.with_suffix(suffix), content)
        return ShardEntry(
            path=self._path.name,
            tokens=self.tokens,
            documents=len(lengths),
            bytes=self.tokens * self._dtype.itemsize,
            sha256=digest.hexdigest(),
            max_id=self._max_id,
            checks_sha256=hashlib.sha256(table).hexdigest(),
            targets=targets,
            first_targets=first_targets,
            has_values=self._values is not None,
            column_bytes=column_bytes,
        )

    def abort(self) -> None:
        """Forget everything appended."""
        self._file.close()
        Path(self._file.name).unlink(missing_ok=True)
