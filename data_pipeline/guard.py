"""Cheap invariants of every host batch, and what to do about a batch without a single target.

An accelerator does not complain about wrong ids (it clamps, or gives NaN or zeros) nor about a batch of padding (loss 0.0,
while weight decay goes on), so both are caught here, on the host, before the batch is used.
"""

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


class ZeroWeight:
    """`data.zero_weight`, fed once per step: "raise" an error, "stop" in good order, or "warn" (the step changes nothing)."""

    def __init__(self, policy: Literal["raise", "stop", "warn"]):
        self.policy = policy
        self.steps = 0

    def observe(self, step: int, num_targets: float) -> Verdict | None:
        """Judge a step by the target tokens of its global batch: None if there are some; DataError if the policy is "raise"."""
        if num_targets > 0:
            return None
        self.steps += 1
        what = f"step {step:,}: the batch has {num_targets:g} target tokens, so there is nothing to learn from it"
        mend = "Check the loss masks and empty documents of the sources"
        if self.policy == "raise":
            raise DataError(f"{what}. {mend}, or set data.zero_weight to stop or warn.")
        result = "the run stops here" if self.policy == "stop" else f"weights stay as they are ({self.steps:,} such steps)"
        return Verdict(self.policy == "stop", f"{what}; {result}. {mend}.")
