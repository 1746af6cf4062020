"""Writing a shard: its tokens as they come, and what is made of them when it is closed."""

import hashlib
import os
from pathlib import Path

import numpy as np
from zlib_ng.zlib_ng import crc32

from data_pipeline.errors import DataError
from data_pipeline.shards import files
from data_pipeline.shards.manifest import ShardEntry


def token_dtype(vocab_size: int) -> np.dtype:
    """Smallest stored type that holds all ids: uint16 up to 65,536 entries, else uint32;
    little-endian."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


class ShardWriter:
    """Writes one shard, `stem`.bin and its companions, which counts when `close` returns;
    `vocab_size` decides the dtype."""

    def __init__(self, directory: Path, stem: str, vocab_size: int):
        self.tokens = self._max_id = 0
        self._path, self._vocab_size, self._dtype = (
            directory / f"{stem}.bin",
            vocab_size,
            token_dtype(vocab_size),
        )
        self._lengths = bytearray()  # int64 each: a unit may hold millions of documents
        self._mask: bytearray | None = None  # one byte a token, if any document has a mask
        self._file = open(directory / f".{stem}.bin.tmp", "w+b")  # noqa: SIM115 - lives as long as the writer

    def append(
        self,
        tokens: np.ndarray,
        lengths: np.ndarray | None = None,
        mask: np.ndarray | None = None,
        end: int | None = None,
    ) -> None:
        """Add ids [T], one document or several of these `lengths` back to back; DataError: an id is
        not below vocab_size.

        `mask`: bool [T], True where the token is a training target; None: all are. With any mask
            the shard gets a .mask file.
        `end`: the id that ends this one document, after its tokens; no target if the document has a
            mask.
        """
        assert end is None or lengths is None, "an end is one of one document"
        lengths = np.array([len(tokens)]) if lengths is None else np.asarray(lengths)
        assert lengths.sum() == len(tokens) and (lengths > 0).all(), (
            "lengths must be positive and sum to the tokens"
        )
        assert mask is None or (mask.shape == (len(tokens),) and mask.dtype == bool), (
            "a mask is bool, one per token"
        )
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
        for at in range(
            0, len(tokens), files.BLOCK_BYTES
        ):  # a document may be large: it is not copied as a whole
            self._file.write(
                np.ascontiguousarray(tokens[at : at + files.BLOCK_BYTES], self._dtype).data
            )
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
        companions = {".idx": np.concatenate([[0], ends]).astype("<u8").tobytes()}
        targets = first_targets = None
        if self._mask is not None:
            mask = np.frombuffer(self._mask, bool)
            companions[".mask"] = np.packbits(mask, bitorder="little").tobytes()
            targets, first_targets = (
                int(np.count_nonzero(part)) for part in (mask, mask[ends - lengths])
            )
        self._file.flush()
        os.fsync(self._file.fileno())
        with self._file as file:
            file.seek(0)
            digest, checks = hashlib.sha256(), []
            while block := file.read(files.BLOCK_BYTES):
                digest.update(block)
                checks.append(crc32(block))
        for part in companions.values():
            checks += [
                crc32(part[at : at + files.BLOCK_BYTES])
                for at in range(0, len(part), files.BLOCK_BYTES)
            ]
        checks = np.array(checks, "<u4").tobytes()
        digests = digest.hexdigest(), hashlib.sha256(checks).hexdigest()
        os.replace(self._file.name, self._path)  # made durable by what comes next
        for suffix, content in {".crc": checks, **companions}.items():
            files.write_atomic(self._path.with_suffix(suffix), content)
        size, counts = self.tokens * self._dtype.itemsize, (targets, first_targets)
        return ShardEntry(
            self._path.name,
            self.tokens,
            len(lengths),
            size,
            digests[0],
            self._max_id,
            digests[1],
            *counts,
        )

    def abort(self) -> None:
        """Forget everything appended."""
        self._file.close()
        Path(self._file.name).unlink(missing_ok=True)
