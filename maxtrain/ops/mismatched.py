"""Rows in which each prompt is followed by the answer to another prompt.

An answer begins at the first target of a document; the prompt is the part before.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

ROWS = ("inputs", "targets", "segment_ids", "positions", "loss_mask")


class _DocumentSpans(NamedTuple):
    """Extents of the documents of a row, by segment number, [S]; 0 is padding."""

    begin: Int[Array, " S"]
    # The number of positions before the first target; all positions if there is no target.
    prompt: Int[Array, " S"]
    # The number of positions from the first target on.
    answer: Int[Array, " S"]


def mismatched(batch: dict[str, Array]) -> dict[str, Array]:
    """Return rows like these, in which each prompt has the answer of the previous document.

    The first document of a row gets the answer of the last, so that all answers of a row stay in it
    and fit. The only document of a row gets the answer of the last document of the previous row,
    truncated at the row's end; the row before the first row is the last row.

    A prompt whose new answer has no target, or that is the only one of all rows, becomes a document
    without targets.

    Args:
        batch: `ROWS`, each [B, T]; the documents of a row are consecutive from its first column on,
            and each begins at position 0.

    Returns:
        `ROWS`, each [B, T].
    """
    own = {name: batch[name] for name in ROWS}
    before = {name: jnp.roll(values, 1, axis=0) for name, values in own.items()}
    if own["inputs"].shape[0] == 1:
        before = jax.tree.map(jnp.zeros_like, before)
    return jax.vmap(_of_row)(own, before)


def _of_row(row: dict[str, Array], before: dict[str, Array]) -> dict[str, Array]:
    """Return a row, each [T], with answers of its own documents or of the previous row."""
    length = row["inputs"].size
    own = _documents(row)
    previous = _documents(before)
    count = row["segment_ids"].max()
    # Answers are looked up in both rows, first the previous row.
    donors = {name: jnp.concatenate([before[name], row[name]]) for name in ROWS}
    numbers = jnp.arange(length + 1, dtype=jnp.int32)
    giver = jnp.where(numbers > 1, numbers - 1, count)
    answer_begin = length + own.begin[giver] + own.prompt[giver]
    answer_length = own.answer[giver]
    last = before["segment_ids"].max()
    alone = count == 1
    answer_begin = jnp.where(alone, previous.begin[last] + previous.prompt[last], answer_begin)
    answer_length = jnp.where(alone, previous.answer[last], answer_length)

    is_document = (numbers >= 1) & (numbers <= count)
    lengths = jnp.where(is_document, own.prompt + answer_length, 0)
    ends = jnp.cumsum(lengths)
    columns = jnp.arange(length, dtype=jnp.int32)
    # The document of each column.
    number = jnp.searchsorted(ends, columns, side="right").astype(jnp.int32)
    is_token = number <= count
    number = jnp.where(is_token, number, 0)
    place = columns - (ends - lengths)[number]
    prompt = own.prompt[number]

    def of_prompt(name: str, places: Array) -> Array:
        return row[name][jnp.clip(own.begin[number] + places, 0, length - 1)]

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
