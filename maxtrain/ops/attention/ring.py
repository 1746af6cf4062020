"""Attention over rows that are split over devices: keys and values go around a ring.

Each device keeps its queries. Keys and values, with the columns and segments of their tokens,
rotate between devices until all queries have met all keys; the next part is sent while one part is
multiplied. Parts are met in blocks, with a running maximum and sum for each query, and a block that
no query of another block sees by their columns is left out. With tokens in zigzag order
(context_split.py), the work of all devices is balanced.

Memory of a device: two parts of keys and values, and the scores of one block. Sent, by each device
and layer: its keys and values C - 1 times forward, and with their gradients C times backward.

Source: Liu et al. 2023, https://arxiv.org/abs/2310.01889; the order of the tokens: Brandon et al.
    2023, https://arxiv.org/abs/2311.09431.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxtrain.ops.attention.eager import MASKED
from maxtrain.ops.attention.mask import Mask
from maxtrain.ops.attention.share import shares
from maxtrain.ops.attention.xla import xla_attention
from maxtrain.ops.einsum import contract
from maxtrain.ops.names import ATTENTION, named

AXIS = "context"
# Most tokens of a block: its scores are B x N x 512 x 512 float32.
MAX_BLOCK = 512


class _RingStaticArgs(NamedTuple):
    """Static parameters; see `attention`."""

    dtype: str
    scale: float
    softcap: float | None
    window: int | None


class _TokenBlocks(NamedTuple):
    """Some tokens in blocks: their columns and segments, and their arrays of each head.

    The query heads of a group are consecutive: [blocks, B, K, G * t, H].
    """

    columns: Array  # [blocks, t]
    segments: Array  # [blocks, B, t]
    heads: tuple[Array, ...]  # each [blocks, B, K, tokens, H]


# A pair of arrays: of keys, and of values.
_Pair = tuple[Array, ...]


class _SoftmaxState(NamedTuple):
    """Running softmax state of a block of queries."""

    top: Array  # the largest score
    total: Array  # of exp(score - top)
    out: Array  # of exp(score - top) * value


def ring_attention(
    q: Array,
    k: Array,
    v: Array,
    mask: Mask,
    *,
    dtype: str,
    scale: float,
    softcap: float | None = None,
    sinks: Array | None = None,
) -> Array:
    """Compute `attention` with rows sharded over the mesh axis `context`, and an even number of
    tokens on each device. Whole rows, of a model outside of its mesh, need no ring."""
    if mask.exchange != "keys":
        return xla_attention(q, k, v, mask, dtype=dtype, scale=scale, softcap=softcap, sinks=sinks)
    form = _RingStaticArgs(dtype, scale, softcap, mask.window)
    of = shares()
    specs = [of.queries, of.keys, of.keys, of.columns, of.tokens]
    arrays = [x.astype(jnp.float32) for x in (q, k, v)]
    arrays += [mask.q_columns, mask.q_segments]
    if sinks is not None:
        specs.append(of.heads)
        arrays.append(sinks.astype(jnp.float32))

    def on_one_device(
        q: Array, k: Array, v: Array, columns: Array, segments: Array, sinks: Array | None = None
    ) -> Array:
        return _attend(q, k, v, sinks, columns, segments, form)

    split = jax.shard_map(
        on_one_device, in_specs=tuple(specs), out_specs=of.queries, check_vma=False
    )
    return split(*arrays)


def _block_size(tokens: int) -> int:
    """Return the largest divisor of half a part that does not exceed the largest block."""
    half = tokens // 2
    for size in range(min(half, MAX_BLOCK), 0, -1):
        if half % size == 0:
            return size
    raise AssertionError(f"a part of {tokens} tokens can't be split in two")


def _blocks_of(x: Array, size: int, axis: int) -> Array:
    """Split an array [..., T, ...] into blocks along a new first dim."""
    shape = x.shape
    split = x.reshape(*shape[:axis], shape[axis] // size, size, *shape[axis + 1 :])
    return jnp.moveaxis(split, axis, 0)


def _queries(x: Array, num_kv_heads: int, size: int) -> Array:
    """Reshape [B, T, N, H] to [blocks, B, K, G * t, H]."""
    B, _, N, H = x.shape
    blocks = _blocks_of(x, size, 1)
    grouped = blocks.reshape(-1, B, size, num_kv_heads, N // num_kv_heads, H)
    return grouped.transpose(0, 1, 3, 4, 2, 5).reshape(
        -1, B, num_kv_heads, N // num_kv_heads * size, H
    )


def _rows(x: Array, size: int) -> Array:
    """Reshape [blocks, B, K, G * t, H] to [B, T, N, H]."""
    blocks, B, K, M, H = x.shape
    split = x.reshape(blocks, B, K, M // size, size, H)
    return split.transpose(1, 0, 4, 2, 3, 5).reshape(B, blocks * size, -1, H)


def _keys(x: Array, size: int) -> Array:
    """Reshape [B, S, K, H] to [blocks, B, K, s, H]."""
    return _blocks_of(x, size, 1).swapaxes(2, 3)


def _of_sinks(sinks: Array, num_kv_heads: int, size: int) -> Array:
    """Repeat sinks [N] to [1, K, G * t, 1]: the sink of each query of a block."""
    grouped = sinks.reshape(1, num_kv_heads, -1, 1)
    return jnp.repeat(grouped, size, axis=2)


def _rotated[T](tree: T) -> T:
    """Return the arrays of the previous device in the ring."""
    size = jax.lax.axis_size(AXIS)
    ring = [(i, (i + 1) % size) for i in range(size)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, AXIS, ring), tree)


def _may_see(queries: Array, keys: Array, window: int | None) -> Array:
    """Return whether some query may see some key, by their columns [t] and [s]."""
    seen = keys.min() <= queries.max()
    if window is not None:
        seen &= keys.max() > queries.min() - window
    return seen


def _scores(queries: _TokenBlocks, keys: _TokenBlocks, form: _RingStaticArgs) -> Array:
    """Return the scaled, soft-capped and masked scores of a block of queries and one of keys [B, K,
    G * t, s]."""
    q = queries.heads[0]
    k = keys.heads[0]
    scores = contract("bkmh,bksh->bkms", q, k) * form.scale
    if form.softcap is not None:
        scores = form.softcap * jnp.tanh(scores / form.softcap)
    B, K, _, s = scores.shape
    t = queries.columns.shape[0]
    mask = Mask(queries.columns, keys.columns, queries.segments, keys.segments, form.window)
    visible = mask.visible()[:, None, None]
    return jnp.where(visible, scores.reshape(B, K, -1, t, s), MASKED).reshape(scores.shape)


def _met(
    state: _SoftmaxState, queries: _TokenBlocks, keys: _TokenBlocks, form: _RingStaticArgs
) -> _SoftmaxState:
    """Update the state of a block of queries with a block of keys."""

    def meet() -> _SoftmaxState:
        scores = _scores(queries, keys, form)
        top = jnp.maximum(state.top, scores.max(-1, keepdims=True))
        weights = jnp.exp(scores - top)
        before = jnp.exp(state.top - top)
        total = state.total * before + weights.sum(-1, keepdims=True)
        new = contract("bkms,bksh->bkmh", weights.astype(form.dtype), keys.heads[1])
        return _SoftmaxState(top, total, state.out * before + new)

    seen = _may_see(queries.columns, keys.columns, form.window)
    return jax.lax.cond(seen, meet, lambda: state)


def _meet_all(
    states: _SoftmaxState, queries: _TokenBlocks, keys: _TokenBlocks, form: _RingStaticArgs
) -> _SoftmaxState:
    """Update all blocks of queries with all blocks of a part of keys."""

    def of_queries(args: tuple[_SoftmaxState, _TokenBlocks]) -> _SoftmaxState:
        state, block = args

        def with_keys(state: _SoftmaxState, keys: _TokenBlocks) -> tuple[_SoftmaxState, None]:
            return _met(state, block, keys, form), None

        return jax.lax.scan(with_keys, state, keys)[0]

    return jax.lax.map(of_queries, (states, queries))


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _attend(
    q: Array,
    k: Array,
    v: Array,
    sinks: Array | None,
    columns: Array,
    segments: Array,
    form: _RingStaticArgs,
) -> Array:
    out, _ = _forward(q, k, v, sinks, columns, segments, form)
    return out


def _parts(
    q: Array, k: Array, v: Array, columns: Array, segments: Array, form: _RingStaticArgs
) -> tuple[_TokenBlocks, _TokenBlocks]:
    """Split a device's queries, and its keys and values, into blocks in the type of products."""
    size = _block_size(q.shape[1])
    columns = _blocks_of(columns, size, 0)
    segments = _blocks_of(segments, size, 1)
    q, k, v = (x.astype(form.dtype) for x in (q, k, v))
    queries = _TokenBlocks(columns, segments, (_queries(q, k.shape[2], size),))
    return queries, _TokenBlocks(columns, segments, (_keys(k, size), _keys(v, size)))


def _forward(
    q: Array,
    k: Array,
    v: Array,
    sinks: Array | None,
    columns: Array,
    segments: Array,
    form: _RingStaticArgs,
) -> tuple[Array, tuple]:
    queries, keys = _parts(q, k, v, columns, segments, form)
    size = queries.columns.shape[1]
    blocks, B, K, M, _ = queries.heads[0].shape
    top = jnp.full((blocks, B, K, M, 1), MASKED, jnp.float32)
    total = jnp.zeros_like(top)
    if sinks is not None:
        # A sink acts like the score of a key without a value, which all queries meet first.
        top = jnp.broadcast_to(_of_sinks(sinks, K, size), top.shape)
        total = jnp.ones_like(top)
    state = _SoftmaxState(top, total, jnp.zeros((blocks, B, K, M, v.shape[-1]), jnp.float32))

    def turn(
        carry: tuple[_SoftmaxState, _TokenBlocks], _: None
    ) -> tuple[tuple[_SoftmaxState, _TokenBlocks], None]:
        state, keys = carry
        # The next part is sent while this part is multiplied.
        following = _rotated(keys)
        return (_meet_all(state, queries, keys, form), following), None

    turns = jax.lax.axis_size(AXIS) - 1
    (state, last), _ = jax.lax.scan(turn, (state, keys), None, length=turns)
    state = _meet_all(state, queries, last, form)
    out = state.out / state.total
    lse = state.top + jnp.log(state.total)
    out = named(out, ATTENTION)
    lse = named(lse, ATTENTION)
    return _rows(out, size), (q, k, v, sinks, columns, segments, out, lse)


class _Gradients(NamedTuple):
    """Inputs of the backward pass of a block, beside the queries."""

    g: Array  # of the output [B, K, M, Hv], in the type of products
    lse: Array  # [B, K, M, 1]
    mean: Array  # of the gradient of weights: sum over keys of weight * gradient


def _met_backward(
    dq: Array,
    queries: _TokenBlocks,
    of: _Gradients,
    keys: _TokenBlocks,
    dkeys: _Pair,
    form: _RingStaticArgs,
) -> tuple[Array, _Pair]:
    """Add the contribution of a block of queries and a block of keys and values to the gradients of
    both."""
    k, v = keys.heads

    def meet() -> tuple[Array, _Pair]:
        scores = _scores(queries, keys, form)
        p = jnp.exp(scores - of.lse)
        dp = contract("bkmh,bksh->bkms", of.g, v)
        slope = form.scale
        if form.softcap is not None:
            # The slope of tanh. Masked scores are far outside, where it is 0.
            bounded = jnp.clip(scores / form.softcap, -1.0, 1.0)
            slope *= 1.0 - bounded * bounded
        ds = (p * (dp - of.mean) * slope).astype(form.dtype)
        dk, dv = dkeys
        dk = dk + contract("bkms,bkmh->bksh", ds, queries.heads[0])
        dv = dv + contract("bkms,bkmh->bksh", p.astype(form.dtype), of.g)
        return dq + contract("bkms,bksh->bkmh", ds, k), (dk, dv)

    seen = _may_see(queries.columns, keys.columns, form.window)
    return jax.lax.cond(seen, meet, lambda: (dq, dkeys))


def _backward(form: _RingStaticArgs, saved: tuple, g: Array) -> tuple:
    q, k, v, sinks, columns, segments, out, lse = saved
    queries, keys = _parts(q, k, v, columns, segments, form)
    size = queries.columns.shape[1]
    K = k.shape[2]
    g_blocks = _queries(g, K, size)
    mean = (g_blocks * out).sum(-1, keepdims=True)
    of = _Gradients(g_blocks.astype(form.dtype), lse, mean)

    def meet_all(dq: Array, keys: _TokenBlocks, dkeys: _Pair) -> tuple[Array, _Pair]:
        def of_queries(
            dkeys: _Pair, args: tuple[Array, _TokenBlocks, _Gradients]
        ) -> tuple[_Pair, Array]:
            dq, block, of_block = args

            def with_keys(dq: Array, args: tuple[_TokenBlocks, _Pair]) -> tuple[Array, _Pair]:
                return _met_backward(dq, block, of_block, *args, form)

            dq, dkeys = jax.lax.scan(with_keys, dq, (keys, dkeys))
            return dkeys, dq

        dkeys, dq = jax.lax.scan(of_queries, dkeys, (dq, queries, of))
        return dq, dkeys

    def turn(
        carry: tuple[Array, _TokenBlocks, _Pair], _: None
    ) -> tuple[tuple[Array, _TokenBlocks, _Pair], None]:
        dq, keys, dkeys = carry
        following = _rotated(keys)
        dq, dkeys = meet_all(dq, keys, dkeys)
        return (dq, following, _rotated(dkeys)), None

    dq = jnp.zeros(queries.heads[0].shape, jnp.float32)
    dkeys = tuple(jnp.zeros(x.shape, jnp.float32) for x in keys.heads)
    turns = jax.lax.axis_size(AXIS) - 1
    (dq, keys, dkeys), _ = jax.lax.scan(turn, (dq, keys, dkeys), None, length=turns)
    dq, dkeys = meet_all(dq, keys, dkeys)
    # One more rotation returns gradients to the device that has these keys.
    dk, dv = (_of_keys(x) for x in _rotated(dkeys))
    dsinks = None
    if sinks is not None:
        # The gradient of a score whose key has the value 0.
        p_sink = jnp.exp(_of_sinks(sinks, K, size) - lse)
        of_heads = -(p_sink * mean).reshape(*mean.shape[:3], -1, size)
        dsinks = of_heads.sum((0, 1, 4)).reshape(-1)
    return _rows(dq, size), dk, dv, dsinks, None, None


def _of_keys(x: Array) -> Array:
    """Reshape [blocks, B, K, s, H] to [B, S, K, H]."""
    blocks, B, K, s, H = x.shape
    return x.transpose(1, 0, 3, 2, 4).reshape(B, blocks * s, K, H)


_attend.defvjp(_forward, _backward)
