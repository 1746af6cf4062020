"""Layout of completions after their prompts in the rows of a batch: a pure function of a rollout,
on the host."""

from typing import NamedTuple

import numpy as np

from data_pipeline.loader.balance import RowPlaces, balance_rows
from data_pipeline.plan.document_packing import best_fit
from maxtrain.objectives.grpo import (
    ADVANTAGES,
    IS_FIRST,
    NUM_COMPLETIONS,
    OLD,
    REFERENCE_LOG_PROBS,
    SAMPLED,
    VALUES,
)
from maxtrain.objectives.ppo import RETURNS
from maxtrain.rl.returns import counted_completions
from maxtrain.rl.rollout import Rollout


class RowShape(NamedTuple):
    """Settings of the layout of rows.

    Attributes:
        length: tokens of a row.
        unit: the number of rows is a multiple of it.
        quadratic: b of the cost n + b n^2 of a completion with its prompt.
        mask_truncated: whether truncated completions are no targets.
        room: tokens reserved after each prompt, so that the place of a completion does not depend
            on any completion's length; None: each has as much as it needs.
    """

    length: int
    unit: int
    quadratic: float
    mask_truncated: bool = False
    room: int | None = None


class CompletionIndices(NamedTuple):
    """The places of completions in a batch.

    Attributes:
        tokens: the index of each token of completions, int64 [S] in the order of `Rollout.tokens`,
            into flattened arrays [B, T].
        num_rows: the number of rows B.
    """

    tokens: np.ndarray
    num_rows: int

    def spread(self, values: np.ndarray, length: int) -> np.ndarray:
        """Scatter a number of each token into an array [B, length], 0 elsewhere."""
        found = np.zeros((self.num_rows, length), values.dtype)
        found.reshape(-1)[self.tokens] = values
        return found


def count_rows(least: int, unit: int) -> int:
    """Return the smallest allowed number of rows, among unit * 1, 2, 3, 4, 6, 8, 12, ...

    Each number is a shape to compile. There are few of them, and each is at most half larger than
    the one before.
    """
    units = 1
    while unit * units < least:
        if units & (units - 1):
            units = units // 3 * 4
        else:
            units += max(1, units // 2)
    return unit * units


def batch_arrays(
    rollout: Rollout, shape: RowShape, is_first: bool
) -> tuple[dict[str, np.ndarray], CompletionIndices]:
    """Build the arrays of a batch [B, T], as in data_pipeline.loader.loader.HostBatch and
    objectives/grpo.py.

    Args:
        rollout: the rollout to train on.
        shape: layout of the rows.
        is_first: whether the policy is still the one that computed the old log-probabilities.
    """
    group = len(rollout.lengths) // len(rollout.prompt_lengths)
    prompt_lengths = np.repeat(rollout.prompt_lengths, group).astype(np.int64)
    lengths = rollout.lengths.astype(np.int64)
    # The first token of a prompt is no target.
    sizes = prompt_lengths + lengths - 1
    taken = sizes
    if shape.room is not None:
        taken = prompt_lengths + shape.room - 1
    offsets, _ = best_fit(taken, shape.length)
    num_rows = count_rows(len(offsets) - 1, shape.unit)
    where = balance_rows(taken, shape.length, num_rows, shape.quadratic)

    arrays = {}
    for name in ("inputs", "targets", "segment_ids", "positions"):
        arrays[name] = np.zeros((num_rows, shape.length), np.int32)
    names = ["loss_mask", OLD, SAMPLED, ADVANTAGES]
    if rollout.reference.size:
        names.append(REFERENCE_LOG_PROBS)
    if rollout.values.size:
        names += [VALUES, RETURNS]
    for name in names:
        arrays[name] = np.zeros((num_rows, shape.length), np.float32)
    arrays["source"] = np.zeros(num_rows, np.int32)
    arrays[IS_FIRST] = np.full(num_rows, is_first, np.float32)
    arrays[NUM_COMPLETIONS] = np.bincount(where.row, minlength=num_rows).astype(np.float32)

    is_target = np.ones(len(lengths), bool)
    if rollout.returns.size:
        is_target = counted_completions(rollout, shape.mask_truncated)
    elif shape.mask_truncated:
        is_target = ~rollout.truncated
    segments = _segments(where)
    prompt_ends = np.cumsum(rollout.prompt_lengths)
    ends = np.cumsum(lengths)
    indices = []
    for i, (row, column) in enumerate(zip(where.row.tolist(), where.column.tolist())):
        end = int(prompt_ends[i // group])
        prompt = rollout.prompts[end - prompt_lengths[i] : end]
        part = slice(int(ends[i] - lengths[i]), int(ends[i]))
        whole = np.concatenate([prompt, rollout.tokens[part]])
        here = slice(column, column + int(sizes[i]))
        arrays["inputs"][row, here] = whole[:-1]
        arrays["targets"][row, here] = whole[1:]
        arrays["segment_ids"][row, here] = segments[i]
        arrays["positions"][row, here] = np.arange(sizes[i])
        arrays[ADVANTAGES][row, here] = rollout.advantages[i]
        of_completion = slice(here.stop - int(lengths[i]), here.stop)
        arrays["loss_mask"][row, of_completion] = is_target[i]
        begin = row * shape.length
        indices.append(np.arange(begin + of_completion.start, begin + of_completion.stop))
    places = CompletionIndices(np.concatenate(indices), num_rows)
    for name, values in (
        (OLD, rollout.old),
        (SAMPLED, rollout.sampled),
        (REFERENCE_LOG_PROBS, rollout.reference),
        (VALUES, rollout.values),
        (RETURNS, rollout.returns),
        (ADVANTAGES, rollout.token_advantages),
    ):
        if values.size:
            arrays[name] = places.spread(values.astype(np.float32), shape.length)
    return arrays, places


def _segments(where: RowPlaces) -> np.ndarray:
    """Return the number of each completion in its row, from 1 on."""
    order = np.lexsort((where.column, where.row))
    rows = where.row[order]
    first_of_row = np.searchsorted(rows, rows)
    segments = np.empty_like(order)
    segments[order] = np.arange(len(order)) - first_of_row + 1
    return segments
