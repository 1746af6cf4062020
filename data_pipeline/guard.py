"""Cheap invariants of every host batch, and what to do about a batch without a single target.

An accelerator does not complain about wrong ids (it clamps, or gives NaN or zeros) nor about a batch of padding (loss 0.0,
while weight decay goes on), so both are caught here, on the host, before the batch is used.
"""

import collections
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import numpy as np

from data_pipeline.errors import DataError


def check_batch(arrays: dict[str, np.ndarray], vocab_size: int, describe: Callable[[int], str]) -> None:
    """Check the arrays of `packing.pack`; DataError: names the row, where it is from by `describe`, the value and the mend."""
    mend = "Run with data.verify=full to find a damaged shard, or prepare this source again"
    for name, first, wrong, rule in _invariants(arrays, vocab_size):
        if wrong.any():
            row, column = np.argwhere(wrong)[0].tolist()
            value = arrays[name][row, column + first]
            where = f"batch row {row} ({describe(row)}), position {column + first}"
            raise DataError(f"{where}: {name}={value}, but {rule}. {mend}.")


def _invariants(arrays: dict[str, np.ndarray], vocab_size: int) -> Iterator[tuple[str, int, np.ndarray, str]]:
    """(array, first column looked at, where it is wrong, the rule). Seen as uint32, a negative id is huge: one comparison."""
    segments, mask = arrays["segment_ids"], arrays["loss_mask"]
    for name, bound in (("inputs", vocab_size), ("targets", vocab_size), ("positions", segments.shape[1])):
        yield name, 0, arrays[name].view(np.uint32) >= bound, f"must be in [0, {bound:,})"
    rule = "segments must count 1, 2, ... with 0 only at the end"
    yield "segment_ids", 0, segments[:, :1].view(np.uint32) > 1, rule
    left, right = segments[:, :-1], segments[:, 1:]
    yield "segment_ids", 1, ((right - left).view(np.uint32) > (left != 0)) & (right != 0), rule
    yield "loss_mask", 0, (mask != 0) & (segments == 0), "padding must have no weight"
    yield "loss_mask", 0, ~((mask >= 0) & (mask < np.inf)), "weights must be finite and at least 0"


class Verdict(NamedTuple):
    """What to do about a batch: `stop` the run in good order, or go on; tell the user `message` either way."""

    stop: bool
    message: str


class BatchGuard:
    """Judges every step by its global batch: "raise" an error, "stop" in good order, or "warn".

    Found are: a batch without a target (which changes nothing); less than `min_fill` of the positions targets over `patience`
    steps; more than `max_empty_rows` of the rows without a target; and two batches of other rows with the same tokens.
    """

    _REMEMBERED = 1000  # batches

    def __init__(
        self, policy: Literal["raise", "stop", "warn"], min_fill: float = 0.0, max_empty_rows: float = 1.0, patience: int = 8
    ):
        self.policy, self.min_fill, self.max_empty_rows = policy, min_fill, max_empty_rows
        self._fills: collections.deque[float] = collections.deque(maxlen=patience)
        self._found = 0
        self._contents: collections.OrderedDict[int, tuple[str, int]] = collections.OrderedDict()

    def repeats(self, content: int, place: str, step: int) -> int | None:
        """An earlier step whose tokens, from another place, had this checksum: they may be the same. None: there is none."""
        before, earlier = self._contents.setdefault(content, (place, step))
        if len(self._contents) > self._REMEMBERED:
            self._contents.popitem(last=False)
        return earlier if before != place else None

    def observe(self, step: int, targets: float, empty_rows: float, shape: tuple[int, int], repeated: bool) -> Verdict | None:
        """Judge a step by the targets, the rows without one and the shape [B, T] of its global batch; None: all is well.

        DataError: it is not, and the policy is "raise".
        """
        self._fills.append(targets / (shape[0] * shape[1]))
        fill = sum(self._fills) / len(self._fills)
        if targets <= 0:
            what, key = f"the batch has {targets:g} target tokens, so there is nothing to learn from it", "data.zero_weight"
        elif len(self._fills) == self._fills.maxlen and fill < self.min_fill:
            what, key = f"{fill:.2%} of {len(self._fills)} batches are targets", f"data.min_fill={self.min_fill:g}"
        elif empty_rows > self.max_empty_rows * shape[0]:
            what, key = f"{empty_rows:g} of {shape[0]} rows have no target", f"data.max_empty_rows={self.max_empty_rows:g}"
        elif repeated:
            what, key = "its tokens are those of an earlier batch of other rows", "data.zero_weight"
        else:
            return None
        self._found += 1
        what = f"step {step:,}: {what} ({key})"
        mend = "Check the loss masks, and the documents of the sources for empty and repeated ones"
        if self.policy == "raise":
            raise DataError(f"{what}. {mend}, or set data.zero_weight to stop or warn.")
        unchanged = "weights stay as they are" if targets <= 0 else "the run goes on"
        result = "the run stops here" if self.policy == "stop" else f"{unchanged} ({self._found:,} such steps)"
        return Verdict(self.policy == "stop", f"{what}; {result}. {mend}.")
