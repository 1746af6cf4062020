"""Rows in which each prompt is followed by the answer to another one.

An answer is what comes from the first target of a document on; a prompt is what comes before.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

ROWS = ("inputs", "targets", "segment_ids", "positions", "loss_mask")


class _DocumentSpans(NamedTuple):
    """Of each document of a row, at the number of its segment, [S]; 0 is padding's."""

    begin: Int[Array, " S"]
    # How many targets come before the first one that counts: all, if none does.
    prompt: Int[Array, " S"]
    # How many come from there on.
    answer: Int[Array, " S"]


def mismatched(batch: dict[str, Array]) -> dict[str, Array]:
    """Rows like these, in which each prompt has the answer of the document before it; the first one
    of a row has that of the last, so that all answers of a row stay in it and fit. The only
    document of a row has the answer of the last document of the row before, of which the row's end
    cuts off what does not fit; the first row has the last row before it.

    A prompt whose other answer has no target, or that is the only one of all rows, is a document
    without targets.

    Args:
        batch: `ROWS`, each [B, T]; the documents of a row lie one behind the other from its
            first column on, and each begins at position 0.

    Returns:
        `ROWS`, each [B, T].
    """
    own = {name: batch[name] for name in ROWS}
    before = {name: jnp.roll(values, 1, axis=0) for name, values in own.items()}
    if own["inputs"].shape[0] == 1:
        before = jax.tree.map(jnp.zeros_like, before)
    return jax.vmap(_of_row)(own, before)


def _of_row(row: dict[str, Array], before: dict[str, Array]) -> dict[str, Array]:
    """The row, with answers of its own documents or of the row before; each [T]."""
    length = row["inputs"].size
    ours = _documents(row)
    theirs = _documents(before)
    count = row["segment_ids"].max()
    # Answers are looked up in both rows, theirs first.
    donors = {name: jnp.concatenate([before[name], row[name]]) for name in ROWS}
    numbers = jnp.arange(length + 1, dtype=jnp.int32)
    giver = jnp.where(numbers > 1, numbers - 1, count)
    answer_begin = length + ours.begin[giver] + ours.prompt[giver]
    answer_length = ours.answer[giver]
    last = before["segment_ids"].max()
    alone = count == 1
    answer_begin = jnp.where(alone, theirs.begin[last] + theirs.prompt[last], answer_begin)
    answer_length = jnp.where(alone, theirs.answer[last], answer_length)

    is_document = (numbers >= 1) & (numbers <= count)
    lengths = jnp.where(is_document, ours.prompt + answer_length, 0)
    ends = jnp.cumsum(lengths)
    columns = jnp.arange(length, dtype=jnp.int32)
    # Of each column, the document that it is in.
    number = jnp.searchsorted(ends, columns, side="right").astype(jnp.int32)
    is_token = number <= count
    number = jnp.where(is_token, number, 0)
    place = columns - (ends - lengths)[number]
    prompt = ours.prompt[number]

    def of_prompt(name: str, places: Array) -> Array:
        return row[name][jnp.clip(ours.begin[number] + places, 0, length - 1)]

    def of_answer(name: str) -> Array:
        found = jnp.clip(answer_begin[number] + place - prompt, 0, 2 * length - 1)
        return donors[name][found]

    in_prompt = place < prompt
    # The answer's first target is predicted from the last token of the prompt.
    last_token = jnp.where(prompt > 0, of_prompt("targets", prompt - 1), of_prompt("inputs", place))
    inputs = jnp.where(in_prompt, of_prompt("inputs", place), of_answer("inputs"))
    inputs = jnp.where(place == prompt, last_token, inputs)
    targets = jnp.where(in_prompt, of_prompt("targets", place), of_answer("targets"))
    mask = jnp.where(in_prompt, 0.0, of_answer("loss_mask").astype(jnp.float32))
    found = {
        "inputs": inputs,
        "targets": targets,
        "segment_ids": number,
        "positions": place,
        "loss_mask": mask,
    }
    return {name: jnp.where(is_token, values, 0) for name, values in found.items()}


def _documents(row: dict[str, Array]) -> _DocumentSpans:
    segments = row["segment_ids"]
    size = segments.size
    columns = jnp.arange(size, dtype=jnp.int32)
    lengths = jax.ops.segment_sum(jnp.ones_like(columns), segments, size + 1)
    begin = jnp.minimum(jax.ops.segment_min(columns, segments, size + 1), size)
    first = jnp.where(row["loss_mask"] > 0, columns, size)
    first = jax.ops.segment_min(first, segments, size + 1)
    prompt = jnp.minimum(first - begin, lengths)
    return _DocumentSpans(begin, prompt, lengths - prompt)
