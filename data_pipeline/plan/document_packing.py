"""Rows of whole documents: which documents share a row, planned once and kept beside the manifest.

A document takes a position of a row for each of its tokens, the end mark too. `bins` puts documents
into rows of `length` positions by best fit, the longest first; `pad` gives each a row of its own. A
document is in at most one row and never divided. One that is longer than a row has a row of its
own, cut, or is left out, or is refused. Its targets are its tokens; without end marks (`eod: none`)
all but its first.

`bins-LENGTH.plan` is a sha256 over the manifest's uid, the length and the rest, then little-endian
int64: the number of long documents, the tokens of the others, the number of rows, their offsets and
documents (see `Bins`), long ones in the last rows.

Documents that belong together (`group` of the manifest: pairs) are planned as one: a row has whole
groups, whose size is the sum of those of their documents, and a plan file has the numbers of
groups. A group that is longer than a row is left out or refused; cutting one would take its
meaning.
"""

import bisect
import contextlib
import dataclasses
import hashlib
import os
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from data_pipeline.base.errors import ConfigError, DataError
from data_pipeline.base.remote import RemotePath
from data_pipeline.shards import TokenShards, ranges, write_atomic

# Of a plan, by what the manifest says about end marks.
_VERSIONS = {"append": 1, "none": 2}
_DIGEST_BYTES = 32


@dataclasses.dataclass(frozen=True, eq=False)
class Bins:
    """The rows of one source for one row length. Build it with `open_bins`. Picklable.

    Row r holds the documents `numbers[offsets[r] : offsets[r + 1]]`, by their numbers in the
    shards, in this order; those of a group follow each other.

    Attributes:
        length: tokens that a row has room for.
        offsets: int64 [num_rows + 1].
        numbers: int64 [documents in rows].
        num_tokens: tokens in the rows, whatever their loss mask.
        num_targets: targets with a loss mask of 1; the manifest's num_targets, if no document is
            too long.
        skipped: groups left out because they are too long; a group is a document, or documents
            that belong together.
        truncated: documents cut because they are too long.
        group: documents that belong together.
    """

    length: int
    offsets: np.ndarray
    numbers: np.ndarray
    num_tokens: int
    num_targets: int
    skipped: int
    truncated: int
    group: int = 1

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
        first = self.offsets[at]
        counts = self.offsets[at + inside] - first
        offsets = np.concatenate([[0], np.cumsum(counts)])
        return offsets, self.numbers[ranges(first, counts)]

    def describe(self) -> str:
        """Describe the rows in one line, for the start of a run."""
        line = f"{self.num_rows:,} rows of {len(self.numbers):,} documents"
        if self.group > 1:
            line += f" in groups of {self.group}"
        line += f", {self.fill:.2%} full"
        if self.skipped or self.truncated:
            line += f"; longer than {self.length:,} tokens: "
            line += f"{self.skipped:,} left out, {self.truncated:,} cut"
        return line


class _BinsPlan(NamedTuple):
    """Contents of a plan file, as the module describes it. The rows of long documents are the last
    ones.
    """

    num_long: int
    num_tokens: int
    offsets: np.ndarray
    numbers: np.ndarray

    @classmethod
    def parse(cls, content: np.ndarray) -> "_BinsPlan":
        """Read a plan from the int64 numbers of a plan file."""
        num_long, num_tokens, num_rows = content[:3].tolist()
        offsets = content[3 : num_rows + 4]
        return cls(num_long, num_tokens, offsets, content[num_rows + 4 :])

    def of_documents(self, group: int) -> "_BinsPlan":
        """Return the plan with offsets and numbers of documents instead of groups of `group`
        documents.
        """
        if group == 1:
            return self
        numbers = self.numbers[:, None] * group + np.arange(group)
        return self._replace(offsets=self.offsets * group, numbers=numbers.ravel())


def document_targets(shards: TokenShards, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where in the stream the targets of documents begin, and how many they are; both int64
    [n].
    """
    first, sizes = shards.documents(numbers)
    if shards.manifest.eod == "none":
        # No end mark before a document says that it begins, so its first token is no target.
        return first + 1, sizes - 1
    return first, sizes


def document_sizes(shards: TokenShards, numbers: np.ndarray) -> np.ndarray:
    """Return how many positions of a row documents take, int64 [n]; 0: nothing can be learnt from
    the document, so no row has it."""
    _, lengths = shards.documents(numbers)
    is_alone = shards.group == 1 and not shards.has_columns
    if shards.manifest.eod == "none" and is_alone:
        # Nothing comes before its only token, so that nothing could predict it.
        lengths[lengths == 1] = 0
    return lengths


def group_sizes(shards: TokenShards) -> np.ndarray:
    """Return the positions of a row that each group takes, int64 [num_groups]: sums over its
    documents."""
    sizes = document_sizes(shards, np.arange(shards.num_documents))
    return sizes.reshape(-1, shards.group).sum(axis=1)


def open_bins(
    shards: TokenShards,
    length: int,
    packing: Literal["bins", "pad"],
    on_long: Literal["raise", "skip", "truncate"],
) -> Bins:
    """Rows of `length` tokens of all documents; the plan of `bins` is read if it is there, else
    made and kept.

    Where the directory can't be written to, the plan is made each time. That of a directory behind
    a URL is kept in the cache of each host, for many would write it there at once, but read there
    if somebody put it there.

    Raises:
        ConfigError: a group is longer than a row, and `on_long` is "raise"; or it is "truncate",
            and the group is of several documents.
        DataError: the plan that is there is damaged, or of other data.
    """
    group = shards.group
    if group > 1 and on_long == "truncate":
        what = f"{shards.path} holds {shards.manifest.unit}s of {group} documents"
        rule = "which can't be cut: the documents would no longer be compared as they are"
        raise ConfigError(
            f"data.on_long=truncate, but {what}, {rule}. Set data.on_long to raise or skip."
        )
    if packing == "bins":
        plan = _BinsPlan.parse(_kept_plan(shards, length))
    else:
        plan = _BinsPlan.parse(_make_plan(shards, length, packing))
    plan = plan.of_documents(group)
    all_targets = shards.manifest.num_targets
    if not plan.num_long:
        return Bins(
            length=length,
            offsets=plan.offsets,
            numbers=plan.numbers,
            num_tokens=plan.num_tokens,
            num_targets=all_targets,
            skipped=0,
            truncated=0,
            group=group,
        )

    num_short_rows = len(plan.offsets) - 1 - plan.num_long
    num_short = plan.offsets[num_short_rows]
    long = plan.numbers[num_short:]
    first, sizes = shards.documents(long)
    if on_long == "raise":
        unit = shards.manifest.unit
        totals = sizes.reshape(-1, group).sum(axis=1)
        rule = f"but {unit} {long[0] // group} of {shards.path} has {totals[0]:,}; "
        rule += f"{plan.num_long:,} {unit}s have too many"
        fix = f"Set data.seq_length to at least {totals.max():,}, or data.on_long to skip"
        if group == 1:
            fix += " or truncate"
        what = f"data.seq_length={length:,} is the number of tokens a row has room for"
        raise ConfigError(f"{what}, {rule}. {fix}.")
    if on_long == "skip":
        return Bins(
            length=length,
            offsets=plan.offsets[: num_short_rows + 1],
            numbers=plan.numbers[:num_short],
            num_tokens=plan.num_tokens,
            num_targets=all_targets - _count_targets(shards, *document_targets(shards, long)),
            skipped=plan.num_long,
            truncated=0,
            group=group,
        )
    return Bins(
        length=length,
        offsets=plan.offsets,
        numbers=plan.numbers,
        num_tokens=plan.num_tokens + plan.num_long * length,
        num_targets=all_targets - _count_targets(shards, first + length, sizes - length),
        skipped=0,
        truncated=plan.num_long,
    )


def _kept_plan(shards: TokenShards, length: int) -> np.ndarray:
    """The int64 of the plan file of `bins`, read or made."""
    identity = f"bins | {_VERSIONS[shards.manifest.eod]} | {shards.uid} | {length}"
    name = f"bins-{length}.plan"
    path = shards.path / name
    if path.exists():
        return _load(path, identity)
    if isinstance(path, RemotePath):
        assert shards.cache is not None, "shards behind a URL have one"
        path = shards.cache.path(f"{shards.uid}-{name}")
        # Another process may remove it at any time.
        with contextlib.suppress(FileNotFoundError):
            content = path.read_bytes()
            if _digest(identity, content[_DIGEST_BYTES:]) == content[:_DIGEST_BYTES]:
                return np.frombuffer(content, "<i8", offset=_DIGEST_BYTES)
        path.parent.mkdir(parents=True, exist_ok=True)
    plan = _make_plan(shards, length, "bins")
    if os.access(path.parent, os.W_OK):
        _save(path, identity, plan)
    return plan


def _count_targets(shards: TokenShards, starts: np.ndarray, sizes: np.ndarray) -> int:
    """Return how many tokens in these parts of the stream have a loss mask of 1."""
    if not shards.masked:
        return int(sizes.sum())
    masks = (shards.mask(starts[i : i + 1], size) for i, size in enumerate(sizes.tolist()))
    return sum(int(np.count_nonzero(mask)) for mask in masks)


def _make_plan(shards: TokenShards, length: int, packing: Literal["bins", "pad"]) -> np.ndarray:
    """The int64 of a plan file. A document without targets is in no row."""
    sizes = group_sizes(shards)
    short = np.flatnonzero((sizes > 0) & (sizes <= length))
    long = np.flatnonzero(sizes > length)
    if packing == "bins":
        offsets, order = best_fit(sizes[short], length)
    else:
        offsets = np.arange(short.size + 1)
        order = np.arange(short.size)
    # Each long document has a row of its own.
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
    # numpy sorts 16 bits by radix, several times as fast.
    key_type = np.int64
    if length < 1 << 16:
        key_type = np.uint16
    order = np.argsort((length - sizes).astype(key_type), kind="stable")
    counts = np.bincount(sizes, minlength=1)
    # Rows by the room that is left in them; `rooms` are the keys of `groups`, sorted.
    groups: dict[int, list[np.ndarray]] = {}
    rooms: list[int] = []
    # The row of each item, in `order`.
    placed = [np.empty(0, np.int64)]
    num_rows = 0

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
                room = length
                new = -(-left // (length // size))
                rows = np.arange(num_rows, num_rows + new)
                num_rows += new
            # These rows take as many items as fit, then one may take the rest, and the others
            # stay as they are.
            each = room // size
            num_full = min(rows.size, left // each)
            rest = 0
            if num_full < rows.size:
                rest = min(left - num_full * each, each)
            num_used = num_full
            if rest:
                num_used += 1
            full = rows[:num_full]
            partly = rows[num_full:num_used]
            placed.append(np.repeat(full, each))
            placed.append(np.repeat(partly, rest))
            keep(full, room - each * size)
            keep(partly, room - rest * size)
            keep(rows[num_used:], room)
            left -= num_full * each + rest
    row = np.concatenate(placed)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=num_rows))])
    return offsets, order[np.argsort(row, kind="stable")]


def _digest(identity: str, body: bytes) -> bytes:
    return hashlib.sha256(identity.encode() + body).digest()


def _save(path: Path, identity: str, plan: np.ndarray) -> None:
    # Several hosts may make it at once; the bytes are the same.
    body = plan.tobytes()
    write_atomic(path, _digest(identity, body) + body)


def _load(path: Path | RemotePath, identity: str) -> np.ndarray:
    content = path.read_bytes()
    found = content[:_DIGEST_BYTES]
    expected = _digest(identity, content[_DIGEST_BYTES:])
    if found != expected:
        what = f"expected digest {expected.hex()}, found {found.hex()}"
        cause = "it is damaged, or was made for other tokens"
        fix = "Delete it: it is made again when it is next needed"
        raise DataError(f"{path}: {what}: {cause}. {fix}.")
    return np.frombuffer(content, "<i8", offset=_DIGEST_BYTES)
