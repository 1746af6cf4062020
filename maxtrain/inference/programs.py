"""The compiled programs of the engine, with the caches going in and out."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, UInt32

from maxtrain.inference.sampling import (
    History,
    SampledTokens,
    SamplingArrays,
    SamplingProgram,
    TopTokens,
    choose,
    row_keys,
    token_keys,
    token_logprobs,
    top_tokens,
)
from maxtrain.models.cache import Caches, cleared, enlarged, placed, put_rows, take_rows
from maxtrain.models.decoder import Decoder
from maxtrain.models.lora_bank import with_chosen
from maxtrain.parallel.sharding import constrain

# Number of prompt positions whose logits are in memory at a time.
_SCORED_AT_ONCE = 16


class CacheSizes(NamedTuple):
    """Sizes of the caches, known when a program is compiled.

    Args:
        rows: rows of the batch.
        columns: columns of a row's rings.
        most_tokens: most tokens of a row in one pass.
        pages: number of pages of layers without a window, for all rows; None: these layers have
            rings.
        paged: names of the layers that have pages.
    """

    rows: int
    columns: int
    most_tokens: int
    pages: int | None
    paged: frozenset[str]

    def empty(self, model: Decoder) -> Caches:
        """Return empty caches of these sizes."""
        return model.new_caches(self.rows, self.columns, self.most_tokens, self.pages)


class PrefillChunk(NamedTuple):
    """Pieces of prompts that are read together, as arguments of `Decoder.extend`."""

    # Rows of the batch; rows out of range are dropped.
    targets: Int[np.ndarray, " R"]
    tokens: Int[np.ndarray, "R T"]
    counts: Int[np.ndarray, " R"]
    lengths: Int[np.ndarray, " R"]
    whole_lengths: Int[np.ndarray, " R"]
    adapters: Int[np.ndarray, " R"]
    pages: Int[np.ndarray, "R M"] | None
    # The next prompt token after each one, if prompts are scored; None: they are not.
    following: Int[np.ndarray, "R T"] | None


class PromptLogProbs(NamedTuple):
    """Log-probabilities of the token after each one of a piece, and the likeliest tokens there."""

    logprobs: Float[Array, "R T"]
    top_tokens: Int[Array, "R T K"]
    top_logprobs: Float[Array, "R T K"]


class DecodeInputs(NamedTuple):
    """Inputs of decoding for each row."""

    # The newest token, which is not in the KV cache yet.
    last: Int[np.ndarray, " B"]
    # Number of tokens in the KV cache.
    lengths: Int[np.ndarray, " B"]
    # Most tokens to decode now; 0: none.
    wanted: Int[np.ndarray, " B"]
    # Seed and number of each row.
    seeds: UInt32[np.ndarray, "B 2"]
    # Number of the next token, for its random numbers.
    made: Int[np.ndarray, " B"]
    # Stop ids of each row, padded with -1.
    stop_ids: Int[np.ndarray, "B I"]
    settings: SamplingArrays
    history: History | None
    # Added to logits; minus infinity for tokens that must not come.
    bias: Float[np.ndarray, "B V"] | None
    adapters: Int[np.ndarray, " B"]
    pages: Int[np.ndarray, "B M"] | None


class DecodeOutputs(NamedTuple):
    """Results of decoding."""

    caches: Caches
    # The new tokens of each row, padded with -1.
    tokens: Int[Array, "B N"]
    logprobs: Float[Array, "B N"]
    # The likeliest tokens at each position; K is 0 if no row requests them.
    top_tokens: Int[Array, "B N K"]
    top_logprobs: Float[Array, "B N K"]


@functools.partial(jax.jit, static_argnums=(0, 1))
def new_caches(graphdef: nnx.GraphDef, room: CacheSizes, params: nnx.State) -> Caches:
    """Create empty caches."""
    model: Decoder = nnx.merge(graphdef, params)
    return placed(room.empty(model), room.paged)


@functools.partial(jax.jit, static_argnums=(0, 1))
def enlarge(graphdef: nnx.GraphDef, room: CacheSizes, params: nnx.State, caches: Caches) -> Caches:
    """Copy the caches into larger ones."""
    model: Decoder = nnx.merge(graphdef, params)
    shapes = jax.eval_shape(lambda: room.empty(model))
    return placed(enlarged(caches, shapes), room.paged)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def copy_rows(
    room: CacheSizes, caches: Caches, sources: Int[Array, " R"], targets: Int[Array, " R"]
) -> Caches:
    """Copy the rings of source rows to target rows; targets out of range are dropped."""
    taken = take_rows(caches, sources, room.paged)
    return placed(put_rows(caches, taken, targets, room.paged), room.paged)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def clear(
    room: CacheSizes,
    caches: Caches,
    is_row_kept: Bool[Array, " B"],
    is_page_kept: Bool[Array, " P"] | None,
) -> Caches:
    """Write zeros to the rows and pages of the caches that are not kept."""
    return placed(cleared(caches, is_row_kept, is_page_kept, room.paged), room.paged)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3), donate_argnums=5)
def read_into(
    graphdef: nnx.GraphDef,
    room: CacheSizes,
    from_start: bool,
    num_top: int,
    params: nnx.State,
    caches: Caches,
    piece: PrefillChunk,
) -> tuple[Caches, PromptLogProbs | None]:
    """Read more tokens of some rows into the caches, and score the tokens that follow, with
    `num_top` of the likeliest, if the piece has them."""
    model: Decoder = nnx.merge(graphdef, with_chosen(params, jnp.asarray(piece.adapters)))
    pages = None
    if piece.pages is not None:
        pages = jnp.asarray(piece.pages)
    targets = jnp.asarray(piece.targets)
    read = take_rows(caches, targets, room.paged)
    hidden, read = model.extend(
        jnp.asarray(piece.tokens),
        jnp.asarray(piece.counts),
        jnp.asarray(piece.lengths),
        read,
        from_start,
        jnp.asarray(piece.whole_lengths),
        pages,
    )
    caches = placed(put_rows(caches, read, targets, room.paged), room.paged)
    if piece.following is None:
        return caches, None
    return caches, _scores(model, hidden, jnp.asarray(piece.following), num_top)


def _scores(model: Decoder, hidden: Array, following: Array, num_top: int) -> PromptLogProbs:
    """Score the positions part by part, since logits of all of them take much memory."""

    def one(part: tuple[Array, Array]) -> PromptLogProbs:
        x, tokens = part
        logits = constrain(model.logits(x), None, None, None)
        top = top_tokens(logits, num_top)
        return PromptLogProbs(token_logprobs(logits, tokens), top.tokens, top.logprobs)

    length = following.shape[1]
    size = min(_SCORED_AT_ONCE, length)
    parts = [
        jnp.moveaxis(x.reshape(x.shape[0], length // size, size, *x.shape[2:]), 1, 0)
        for x in (hidden, following)
    ]
    found = jax.lax.map(one, (parts[0], parts[1]))

    def joined(x: Array) -> Array:
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(x.shape[0], length, *x.shape[3:])

    return PromptLogProbs(*(joined(x) for x in found))


class _DecodeCarry(NamedTuple):
    """The state between two tokens."""

    number: Int[Array, ""]
    last: Int[Array, " B"]
    lengths: Int[Array, " B"]
    is_active: Bool[Array, " B"]
    history: History | None
    made: DecodeOutputs


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3), donate_argnums=5)
def decode(
    graphdef: nnx.GraphDef,
    room: CacheSizes,
    program: SamplingProgram,
    chunk: int,
    params: nnx.State,
    caches: Caches,
    rows: DecodeInputs,
) -> DecodeOutputs:
    """Decode up to `chunk` more tokens of each row."""
    model: Decoder = nnx.merge(graphdef, with_chosen(params, jnp.asarray(rows.adapters)))
    count = rows.last.shape[0]
    stop_ids = jnp.asarray(rows.stop_ids)
    keys_of_rows = row_keys(jnp.asarray(rows.seeds))
    pages = None
    if rows.pages is not None:
        pages = jnp.asarray(rows.pages)

    bias = None
    if rows.bias is not None:
        bias = jnp.asarray(rows.bias)

    def choice(logits: Array, number: Array, history: History | None) -> SampledTokens:
        keys = token_keys(keys_of_rows, jnp.asarray(rows.made) + number)
        return choose(logits, rows.settings, keys, program, history, bias)

    def one(step: _DecodeCarry) -> _DecodeCarry:
        active = step.is_active
        counts = active.astype(jnp.int32)
        hidden, caches = model.extend(
            step.last[:, None], counts, step.lengths, step.made.caches, pages=pages
        )
        logits = constrain(model.logits(hidden)[:, 0], None, None)
        chosen = choice(logits, step.number, step.history)
        token = jnp.where(active, chosen.tokens, -1)
        top = chosen.top or TopTokens(
            jnp.zeros((count, 0), jnp.int32), jnp.zeros((count, 0), jnp.float32)
        )
        made = DecodeOutputs(
            caches,
            step.made.tokens.at[:, step.number].set(token),
            step.made.logprobs.at[:, step.number].set(chosen.logprobs),
            step.made.top_tokens.at[:, step.number].set(top.tokens),
            step.made.top_logprobs.at[:, step.number].set(top.logprobs),
        )
        number = step.number + 1
        history = step.history
        if history is not None:
            history = history.with_tokens(chosen.tokens)
        has_stopped = (token[:, None] == stop_ids).any(axis=1)
        still = active & ~has_stopped & (number < rows.wanted)
        return _DecodeCarry(number, chosen.tokens, step.lengths + counts, still, history, made)

    history = None
    if program.penalises:
        assert rows.history is not None
        history = History(*map(jnp.asarray, rows.history))
    first = _DecodeCarry(
        number=jnp.int32(0),
        last=jnp.asarray(rows.last),
        lengths=jnp.asarray(rows.lengths),
        is_active=jnp.asarray(rows.wanted) > 0,
        history=history,
        made=DecodeOutputs(
            caches,
            jnp.full((count, chunk), -1, jnp.int32),
            jnp.zeros((count, chunk), jnp.float32),
            jnp.zeros((count, chunk, program.num_top), jnp.int32),
            jnp.zeros((count, chunk, program.num_top), jnp.float32),
        ),
    )
    last = jax.lax.while_loop(lambda step: step.is_active.any(), one, first)
    return DecodeOutputs(
        placed(last.made.caches, room.paged),
        # Results are replicated, so that each process can read them.
        constrain(last.made.tokens, None, None),
        constrain(last.made.logprobs, None, None),
        constrain(last.made.top_tokens, None, None, None),
        constrain(last.made.top_logprobs, None, None, None),
    )
