"""Rows of whole documents: which documents share a row, planned once and kept beside the manifest.

A document's targets are its tokens, the end mark too; without end marks (`eod: none`) all but its
first. `bins` puts documents into rows of `length` targets by best fit, the longest first; `pad`
gives each a row of its own. A document is in at most one row and never divided. One that is longer
than a row has a row of its own, cut, or is left out, or is refused.

`bins-LENGTH.plan` is a sha256 over the manifest's uid, the length and the rest, then little-endian
int64: the number of long documents, the tokens of the others, the number of rows, their offsets and
    documents (see `Bins`), long ones in the last rows.
"""

import bisect
import contextlib
import dataclasses
import hashlib
import os
import time
import uuid
from pathlib import Path
from typing import Literal

import numpy as np

from data_pipeline.errors import ConfigError, DataError
from data_pipeline.remote import RemotePath
from data_pipeline.shards import TokenShards, ranges, write_atomic

_VERSION = 1


@dataclasses.dataclass(frozen=True, eq=False)
class Bins:
    """The rows of one source for one row length. Build it with `open_bins`. Picklable.

    Row r holds the documents `numbers[offsets[r] : offsets[r + 1]]`, by their numbers in the
    shards, in this order.
    """

    length: int  # targets that a row has room for
    offsets: np.ndarray  # int64 [num_rows + 1]
    numbers: np.ndarray  # int64 [documents in rows]
    num_tokens: int  # targets in the rows, whatever their loss mask
    num_targets: (
        int  # targets with a loss mask of 1; the manifest's num_targets, if no document is too long
    )
    skipped: int  # documents left out because they are too long
    truncated: int  # documents cut because they are too long

    @property
    def num_rows(self) -> int:
        """Rows in one epoch."""
        return len(self.offsets) - 1

    @property
    def fill(self) -> float:
        """Share of the rows' places that hold a target; the rest is padding."""
        return self.num_tokens / max(1, self.num_rows * self.length)

    def documents(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The documents of these rows, int64 [B], back to back: offsets into them, int64 [B + 1],
        and their numbers, int64.

        A row outside [0, num_rows) has none: it is padding.
        """
        inside = (rows >= 0) & (rows < self.num_rows)
        at = np.where(inside, rows, 0)
        first, last = self.offsets[at], self.offsets[at + inside]
        return np.concatenate([[0], np.cumsum(last - first)]), self.numbers[
            ranges(first, last - first)
        ]

    def describe(self) -> str:
        """One line for the start of a run."""
        line = f"{self.num_rows:,} rows of {len(self.numbers):,} documents, {self.fill:.2%} full"
        if self.skipped or self.truncated:
            line += f"; longer than {self.length:,} tokens: {self.skipped:,} left out, {self.truncated:,} cut"
        return line


def targets(shards: TokenShards, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where in the stream the targets of documents begin, and how many they are; both int64 [n]."""
    first, sizes = shards.documents(numbers)
    unannounced = int(
        shards.manifest.eod == "none"
    )  # the first token: no end mark before it says that it begins
    return first + unannounced, sizes - unannounced


def open_bins(
    shards: TokenShards,
    length: int,
    packing: Literal["bins", "pad"],
    on_long: Literal["raise", "skip", "truncate"],
) -> Bins:
    """Rows of `length` targets of all documents; the plan of `bins` is read if it is there, else
    made and kept.

    Where the directory can't be written to, the plan is made each time. That of a directory behind
    a URL is kept in the cache of each host, for many would write it there at once, but read there
    if somebody put it there.

    ConfigError: a document is longer than a row, and `on_long` is "raise". DataError: the plan that
        is there is damaged, or of
    other data.
    """
    identity = f"bins | {_VERSION} | {shards.uid} | {length}"
    plan = _kept(shards, length, identity) if packing == "bins" else _plan(shards, length, packing)
    num_long, num_tokens, num_rows = plan[:3].tolist()
    offsets, numbers, num_targets = (
        plan[3 : num_rows + 4],
        plan[num_rows + 4 :],
        shards.manifest.num_targets,
    )
    short = num_rows - num_long
    if num_long:
        long, kept = numbers[offsets[short] :], length if on_long == "truncate" else 0
        first, sizes = targets(shards, long)
        if on_long == "raise":
            rule = f"but document {long[0]} of {shards.path} has {sizes[0]:,}; {num_long:,} documents have too many"
            mend = f"Set data.seq_length to at least {sizes.max():,}, or data.on_long to skip or truncate"
            raise ConfigError(
                f"data.seq_length={length:,} is the number of targets a row has room for, {rule}. {mend}."
            )
        num_tokens += num_long * kept
        num_targets -= _count_targets(shards, first + kept, sizes - kept)
    if on_long == "skip":
        offsets, numbers = offsets[: short + 1], numbers[: offsets[short]]
    skipped, truncated = (num_long if on_long == policy else 0 for policy in ("skip", "truncate"))
    return Bins(length, offsets, numbers, num_tokens, num_targets, skipped, truncated)


def _kept(shards: TokenShards, length: int, identity: str) -> np.ndarray:
    """The content of the plan file of `bins` behind its digest, read or made."""
    name = f"bins-{length}.plan"
    path = shards.path / name
    if path.exists():
        return _load(path, identity)
    if isinstance(path, RemotePath):
        assert shards.cache is not None, "shards behind a URL have one"
        path = shards.cache.path(f"{shards.uid}-{name}")
        with contextlib.suppress(FileNotFoundError):  # another process may remove it at any time
            content = path.read_bytes()
            if _digest(identity, content[32:]) == content[:32]:
                return np.frombuffer(content, "<i8", offset=32)
        path.parent.mkdir(parents=True, exist_ok=True)
    plan = _plan(shards, length, "bins")
    if os.access(path.parent, os.W_OK):
        _save(path, identity, plan)
    return plan


def _count_targets(shards: TokenShards, starts: np.ndarray, sizes: np.ndarray) -> int:
    """How many tokens of these parts of the stream have a loss mask of 1."""
    if not shards.masked:
        return int(sizes.sum())
    masks = (shards.mask(starts[i : i + 1], size) for i, size in enumerate(sizes.tolist()))
    return sum(int(np.count_nonzero(mask)) for mask in masks)


def _plan(shards: TokenShards, length: int, packing: Literal["bins", "pad"]) -> np.ndarray:
    """The content of a plan file behind its digest. A document without targets is in no row."""
    sizes = targets(shards, np.arange(shards.num_documents))[1]
    short, long = np.flatnonzero((sizes > 0) & (sizes <= length)), np.flatnonzero(sizes > length)
    each = np.arange(short.size)
    offsets, order = (
        best_fit(sizes[short], length) if packing == "bins" else (np.append(each, short.size), each)
    )
    offsets = np.concatenate([offsets, offsets[-1] + 1 + np.arange(long.size)])
    header = [long.size, sizes[short].sum(), offsets.size - 1]
    return np.concatenate([header, offsets, short[order], long]).astype("<i8")


def best_fit(sizes: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Best fit, the largest first: each item, of a size in [1, length], goes where it leaves the
    least room in a row.

    Takes int64 [n] sizes. Returns offsets, int64 [rows + 1], into the numbers of the items, int64
    [n], of each row. Rows are handled in groups of equal room. A row takes items of one size until
    none fits, which more than halves its room, so a group is moved at most log2(length) times: O(n
    log n) for sorting, and O(length log length) of Python.
    """
    order = np.argsort(
        (length - sizes).astype(np.uint16 if length < 1 << 16 else np.int64), kind="stable"
    )
    counts = np.bincount(sizes, minlength=1)
    groups: dict[int, list[np.ndarray]] = {}  # rows by the room that is left in them
    rooms: list[int] = []  # the keys of `groups`, sorted
    placed, num_rows = [np.empty(0, np.int64)], 0  # the row of each item, in `order`

    def keep(rows: np.ndarray, room: int) -> None:
        if rows.size and room:
            if room not in groups:
                bisect.insort(rooms, room)
            groups.setdefault(room, []).append(rows)

    for size in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[size])
        while left:
            at = bisect.bisect_left(rooms, size)
            if at < len(rooms):
                room = rooms[at]
                rows = groups[room].pop()
                if not groups[room]:
                    del groups[room], rooms[at]
            else:
                room, new = length, -(-left // (length // size))
                rows = np.arange(num_rows, num_rows + new)
                num_rows += new
            each = room // size
            full = min(rows.size, left // each)
            rest = min(left - full * each, each) if full < rows.size else 0  # for one row more
            one = full + (rest > 0)
            placed += [np.repeat(rows[:full], each), np.repeat(rows[full:one], rest)]
            keep(rows[:full], room - each * size)
            keep(rows[full:one], room - rest * size)
            keep(rows[one:], room)
            left -= full * each + rest
    row = np.concatenate(placed)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=num_rows))])
    return offsets, order[np.argsort(row, kind="stable")]


def _digest(identity: str, body: bytes) -> bytes:
    return hashlib.sha256(identity.encode() + body).digest()


def _save(path: Path, identity: str, plan: np.ndarray) -> None:
    own = path.with_name(
        f"{path.stem}.{uuid.uuid4().hex}.plan"
    )  # several hosts may make it at once: the bytes are the same
    body = plan.tobytes()
    write_atomic(own, _digest(identity, body) + body)
    os.replace(own, path)
    for left in path.parent.glob(
        f"*{path.stem}.*.plan*"
    ):  # by a process that was killed; others may be at it just now
        with contextlib.suppress(OSError):  # or somebody else has removed it
            if left.stat().st_mtime < time.time() - 3600:
                left.unlink()


def _load(path: Path | RemotePath, identity: str) -> np.ndarray:
    content = path.read_bytes()
    found, expected = content[:32], _digest(identity, content[32:])
    if found != expected:
        what = "it is damaged, or was made for other tokens"
        mend = "Delete it: it is made again when it is next needed"
        raise DataError(
            f"{path}: expected digest {expected.hex()}, found {found.hex()}: {what}. {mend}."
        )
    return np.frombuffer(content, "<i8", offset=32)
