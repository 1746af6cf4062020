"""Cheap invariants of every host batch, and what to do about a batch without a single target.

An accelerator does not complain about wrong ids (it clamps, or gives NaN or zeros) nor about a batch of padding (loss 0.0,
while weight decay goes on), so both are caught here, on the host, before the batch is used.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

from data_pipeline.errors import DataError

_DTYPES = {"inputs": np.int32, "targets": np.int32, "segment_ids": np.int32, "positions": np.int32, "loss_mask": np.float32}


def check_batch(arrays: dict[str, np.ndarray], shape: tuple[int, int], vocab_size: int, describe: Callable[[int], str]) -> None:
    """Check a host batch; a fraction of a nanosecond per token and check.

    Args:
        arrays: see `packing.pack`.
        shape: (rows, positions) that every array must have.
        vocab_size: ids must be in [0, vocab_size).
        describe: where a row comes from, for the message; given its index.

    Raises:
        DataError: names the row, its source, the value and the mend.
    """
    mend = "Run with data.verify=full to find a damaged shard, or prepare this source again"
    if arrays.keys() != _DTYPES.keys():
        raise DataError(f"batch has arrays {', '.join(sorted(arrays))}; it must have {', '.join(sorted(_DTYPES))}. {mend}.")
    for name, array in arrays.items():
        if array.shape != shape or array.dtype != _DTYPES[name]:
            found, expected = f"{array.dtype} {array.shape}", f"{np.dtype(_DTYPES[name])} {shape}"
            raise DataError(f"batch: {name} is {found}, it must be {expected}. {mend}.")
    segments, mask = arrays["segment_ids"], arrays["loss_mask"]
    checks = []
    for name in ("inputs", "targets", "positions"):
        bound = shape[1] if name == "positions" else vocab_size
        if array_max(arrays[name]) >= bound:
            checks.append((name, arrays[name].view(np.uint32) >= bound, f"outside [0, {bound:,})"))
    left, right = segments[:, :-1], segments[:, 1:]
    steps = (right - left).view(np.uint32)
    ends = right == 0
    if segments[:, :1].view(np.uint32).max(initial=0) > 1 or not ((steps <= 1) & (left != 0) | ends).all():
        wrong = np.zeros(shape, bool)
        wrong[:, :1] = segments[:, :1].view(np.uint32) > 1
        wrong[:, 1:] = ~((steps <= 1) & (left != 0) | ends)
        checks.append(("segment_ids", wrong, "out of order: they must count 1, 2, ... with 0 only at the end"))
    padding_has_weight = (mask != 0) & (segments == 0)
    if padding_has_weight.any():
        checks.append(("loss_mask", padding_has_weight, "not 0 on padding"))
    if not (mask.min(initial=0) >= 0 and mask.max(initial=0) < np.inf):
        checks.append(("loss_mask", ~((mask >= 0) & (mask < np.inf)), "negative or not finite"))
    if checks:
        name, wrong, rule = checks[0]
        row, column = np.argwhere(wrong)[0].tolist()
        where = f"batch row {row} ({describe(row)}), position {column}"
        raise DataError(f"{where}: {name}={arrays[name][row, column]} is {rule}. {mend}.")


def array_max(array: np.ndarray) -> int:
    """Largest value with negative ones counted as huge, so that one pass checks both ends of a range."""
    return int(array.view(np.uint32).max(initial=0))


class Verdict(NamedTuple):
    """What to do about a batch: `stop` the run in good order, or go on; tell the user `message` either way."""

    stop: bool
    message: str


class ZeroWeight:
    """The policy `data.zero_weight`, fed once per step by the training loop.

    Args:
        policy: "raise" an error, "stop" in good order, or "warn" and go on (the step itself changes nothing).
    """

    def __init__(self, policy: Literal["raise", "stop", "warn"]):
        self.policy = policy
        self.steps = 0

    def observe(self, step: int, num_targets: float) -> Verdict | None:
        """Judge one step.

        Args:
            step: which.
            num_targets: target tokens (or their summed weight) in the global batch.

        Returns:
            None when there is a target.

        Raises:
            DataError: policy "raise".
        """
        if num_targets > 0:
            return None
        self.steps += 1
        what = f"step {step:,}: the batch has {num_targets:g} target tokens, so there is nothing to learn from it"
        mend = "Check the loss masks and empty documents of the sources"
        if self.policy == "raise":
            raise DataError(f"{what}. {mend}, or set data.zero_weight to stop or warn.")
        result = (
            "the run stops here" if self.policy == "stop" else f"weights stay as they are ({self.steps:,} such steps so far)"
        )
        return Verdict(self.policy == "stop", f"{what}; {result}. {mend}.")
