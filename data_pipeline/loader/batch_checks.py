"""Cheap invariants of every host batch, and what to do about a batch without a single target.

An accelerator does not complain about wrong ids (it clamps, or gives NaN or zeros) nor about a
batch of padding (loss 0.0, while weight decay goes on), so both are caught here, on the host,
before the batch is used.
"""

import collections
import functools
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import numpy as np

from data_pipeline.base.errors import DataError

_MASK = 2**64 - 1


def check_batch(
    arrays: dict[str, np.ndarray], vocab_size: int, describe: Callable[[int], str], first: int = 0
) -> None:
    """Check the arrays of `packing.pack`, whose first column is column `first` of the rows.

    DataError: names the row, its source by `describe`, the value and the fix.
    """
    if _sound(arrays, vocab_size, first):
        return
    fix = "Run with data.verify=full to find a damaged shard, or prepare this source again"
    for name, after, wrong, rule in _invariants(arrays, vocab_size, first):
        if wrong.any():
            row, column = np.argwhere(wrong)[0].tolist()
            value = arrays[name][row, column + after]
            where = f"batch row {row} ({describe(row)}), position {first + column + after}"
            raise DataError(f"{where}: {name}={value}, but {rule}. {fix}.")


def _sound(arrays: dict[str, np.ndarray], vocab_size: int, first: int) -> bool:
    """True only if every one of `_invariants` holds; in a quarter of their time, and mostly True if
    they do."""
    segments, mask = arrays["segment_ids"], arrays["loss_mask"]
    return bool(
        all(
            arrays[name].view(np.uint32).max(initial=0) < vocab_size
            for name in ("inputs", "targets")
        )
        and arrays["positions"].view(np.uint32).max(initial=0) < first + segments.shape[1]
        and segments.min(initial=1) > 0  # no padding
        and segments[:, 0].max(initial=0) <= first + 1
        and (segments[:, 1:] - segments[:, :-1]).view(np.uint32).max(initial=0) <= 1
        and mask.view(np.uint32).max(initial=0)
        < 0x7F800000  # the bits of infinity: NaN and negative ones have higher ones
        and all(np.isfinite(array).all() for array in _numbers(arrays).values())
    )


def _invariants(
    arrays: dict[str, np.ndarray], vocab_size: int, first: int
) -> Iterator[tuple[str, int, np.ndarray, str]]:
    """(array, columns not looked at, where it is wrong, the rule). Seen as uint32, a negative id is
    huge: one comparison."""
    segments, mask = arrays["segment_ids"], arrays["loss_mask"]
    for name, bound in (
        ("inputs", vocab_size),
        ("targets", vocab_size),
        ("positions", first + segments.shape[1]),
    ):
        yield name, 0, arrays[name].view(np.uint32) >= bound, f"must be in [0, {bound:,})"
    rule = "segments must count 1, 2, ... with 0 only at the end"
    yield "segment_ids", 0, segments[:, :1].view(np.uint32) > first + 1, rule
    left = segments[:, :-1]
    right = segments[:, 1:]
    yield "segment_ids", 1, ((right - left).view(np.uint32) > (left != 0)) & (right != 0), rule
    yield "loss_mask", 0, (mask != 0) & (segments == 0), "padding must have no weight"
    yield "loss_mask", 0, ~((mask >= 0) & (mask < np.inf)), "weights must be finite and at least 0"
    for name, array in _numbers(arrays).items():
        yield name, 0, ~np.isfinite(array), "numbers of documents must be finite"


def _numbers(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays that have a number of each position's document."""
    found = {}
    for name, array in arrays.items():
        if name != "loss_mask" and array.dtype == np.float32:
            found[name] = array
    return found


@functools.lru_cache(maxsize=64)
def _odd_numbers(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**63, count, np.int64) * 2 + 1


def checksum(targets: np.ndarray, rows: np.ndarray, first: int) -> int:
    """Return a 64-bit checksum of targets, int32 [b, t], of these rows of a global batch, from
    column `first` on.

    Checksums of parts of a batch that do not overlap sum, modulo 2^64, to that of the batch,
    however it is cut.
    """
    end = first + targets.shape[1]
    # Of pairs of columns: the second one counts 2^32 times as much.
    pair_weights = _odd_numbers(1 << (end // 2).bit_length(), 0)
    if first % 2 == 0 and end % 2 == 0 and targets.flags.c_contiguous:
        words = targets.view("<i8")
        weights = pair_weights[first // 2 : end // 2]
    else:
        columns = np.arange(first, end)
        words = targets.astype(np.int64)
        weights = pair_weights[columns // 2] << (columns % 2 * 32)
    of_rows = np.einsum("rc,c->r", words, weights)
    most = int(rows.max(initial=0))
    row_weights = _odd_numbers(1 << most.bit_length(), 1)[rows]
    return int((of_rows * row_weights).sum()) & _MASK


class BatchVerdict(NamedTuple):
    """Decision about a batch: `stop` the run in good order, or go on; `message` is for the user, if
    it is not empty.

    `back`: "skip" or "rollback" if the run is to go back, and to leave out that step, or more; else
        empty.
    """

    stop: bool
    message: str
    back: str = ""


class GuardState(NamedTuple):
    """State of a guard, as JSON; at most 15 KB, and 20 bytes for each step of patience.

    found: steps at which something was found.
    fills: shares of targets in the batches of the last steps.
    seen: of the last batches, checksum in hexadecimal digits, place and step.
    """

    found: int
    fills: list[float]
    seen: list[list]


# What to do about batches of prepared documents that look wrong.
CHECK_DATA = "Check the loss masks, and the documents of the sources for empty and repeated ones"


class BatchGuard:
    """Checks every step by its global batch: "raise" an error, "stop" in good order, or "warn"; or
    go back, if tokens repeat.

    Found are: a batch without a target (which changes nothing); less than `min_fill` of the
    positions targets over `patience` steps; more than `max_empty_rows` of the rows without a
    target; and two batches of other rows with the same tokens. What it remembers is in `state`, so
    that a run that goes on from a checkpoint is checked as one that never stopped.
    """

    _REMEMBERED = 256  # batches

    def __init__(
        self,
        policy: Literal["raise", "stop", "warn"],
        min_fill: float = 0.0,
        max_empty_rows: float = 1.0,
        patience: int = 8,
        repeated: Literal["raise", "skip", "rollback", "stop", "warn"] = "raise",
        advice: str = CHECK_DATA,
    ):
        self.policy = policy
        # How to get more targets, without a full stop at its end.
        self.advice = advice
        self.min_fill = min_fill
        self.max_empty_rows = max_empty_rows
        self.repeated = repeated
        # Steps at which something was found.
        self.found = 0
        self._fills: collections.deque[float] = collections.deque(maxlen=patience)
        # Place and step, by content.
        self._seen: collections.OrderedDict[int, tuple[str, int]] = collections.OrderedDict()

    def state(self) -> GuardState:
        """All that it remembers."""
        seen = [[f"{content:x}", place, step] for content, (place, step) in self._seen.items()]
        return GuardState(self.found, list(self._fills), seen)

    def restore(self, state: GuardState) -> None:
        """Remember what `state` says."""
        self.found = state.found
        self._fills.extend(state.fills)
        for content, place, step in state.seen:
            self._seen[int(content, 16)] = (place, step)

    def repeats(self, content: int, place: str, step: int) -> bool:
        """Return whether an earlier step, from another place, had tokens with this checksum."""
        before, _ = self._seen.setdefault(content, (place, step))
        if len(self._seen) > self._REMEMBERED:
            self._seen.popitem(last=False)
        return before != place

    def observe(
        self, step: int, targets: float, empty_rows: float, shape: tuple[int, int], repeated: bool
    ) -> BatchVerdict | None:
        """Check a step by the targets, the rows without one and the shape [B, T] of its global
        batch; None: all is well.

        DataError: it is not, and the policy is "raise".
        """
        batch_size, seq_length = shape
        self._fills.append(targets / (batch_size * seq_length))
        policy = self.policy
        decides = "data.zero_weight"
        fix = self.advice
        fill = sum(self._fills) / len(self._fills)
        if targets <= 0:
            what = f"the batch has {targets:g} target tokens, so there is nothing to learn from it"
            key = decides
        elif len(self._fills) == self._fills.maxlen and fill < self.min_fill:
            what = f"{fill:.2%} of {len(self._fills)} batches are targets"
            key = f"data.min_fill={self.min_fill:g}"
        elif empty_rows > self.max_empty_rows * batch_size:
            what = f"{empty_rows:g} of {batch_size} rows have no target"
            key = f"data.max_empty_rows={self.max_empty_rows:g}"
        elif repeated:
            policy = self.repeated
            decides = "data.repeated"
            fix = CHECK_DATA
            what = "its tokens are those of an earlier batch of other rows"
            key = decides
        else:
            return None
        self.found += 1
        what = f"step {step:,}: {what} ({key})"
        if policy == "raise":
            raise DataError(f"{what}. {fix}, or set {decides} to stop or warn.")
        if policy == "stop":
            message = f"{what}; the run stops here. {fix}, or set {decides}=warn to go on."
            return BatchVerdict(True, message)
        if policy != "warn":
            return BatchVerdict(False, f"{what}.", policy)
        # After the first three, only the 4th, 8th, 16th, ... is reported.
        is_power_of_two = self.found & (self.found - 1) == 0
        if self.found > 3 and not is_power_of_two:
            return BatchVerdict(False, "")
        unchanged = "the run goes on"
        if targets <= 0:
            unchanged = "weights stay as they are"
        return BatchVerdict(False, f"{what}; {unchanged} ({self.found:,} such steps). {fix}.")
