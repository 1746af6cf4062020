"""Flash attention for GPUs in Triton, which separates the documents of a row and skips masked
blocks.

A program has a block of queries of one head, or in the backward pass a block of keys of one key
head. It loops over the blocks of the others that any of its own can meet. These are found
beforehand, from the smallest and the largest segment of each block. So the time of a row of many
short documents is proportional to their lengths, and that of a row with a short window to its
window.

The forward pass stores one logsumexp per query; the backward pass recomputes the weights. One
program sums a key head's gradient over all heads that share it, so the bits are always the same.

jax has announced that Pallas will drop its Triton backend. Its other GPU backend supports only
Hopper and Blackwell.

Source: Dao 2023, https://arxiv.org/abs/2307.08691.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from data_pipeline.base.errors import ConfigError
from maxtrain.ops.names import ATTENTION, named

# Rows are multiples of the smallest block that tensor cores support.
MIN_BLOCK = 16
# Block sizes of queries and keys: larger ones need more shared memory than an A100 has.
_FORWARD_BLOCKS = (128, 64)
_BACKWARD_BLOCKS = (64, 64)
# Far below any score, and finite, so that the difference of two is a number.
_MASKED = -1e30
_LOG2_E = math.log2(math.e)


class TritonStaticArgs(NamedTuple):
    """Static parameters; see `attention`."""

    dtype: str
    scale: float
    window: int | None
    interpret: bool


class _Tiles(NamedTuple):
    """Block sizes of queries and keys."""

    queries: int
    keys: int

    def key_blocks(self, i: Any) -> Any:
        """Return how many blocks of keys begin before the end of the i-th block of queries."""
        return ((i + 1) * self.queries + self.keys - 1) // self.keys

    def first_query_block(self, j: Any) -> Any:
        """Return the block of queries that contains the first key of the j-th block of keys."""
        return j * self.keys // self.queries


def tile_of(size: int) -> int:
    """Return the smallest supported tile size for heads of this size: a power of two."""
    return max(MIN_BLOCK, pl.next_power_of_2(size))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def attend(
    q: Array, k: Array, v: Array, segments: Array, form: TritonStaticArgs
) -> Float[Array, "B T N H"]:
    """Compute `attention`.

    Args:
        q: [B, T, N, H], float32; H is a power of two.
        k, v: [B, T, K, H].
        segments: [B, T].

    Returns:
        float32.
    """
    out, _ = _attend_forward(q, k, v, segments, form)
    return out


def _attend_forward(
    q: Array, k: Array, v: Array, segments: Array, form: TritonStaticArgs
) -> tuple[Array, tuple]:
    q = q.astype(form.dtype)
    k = k.astype(form.dtype)
    v = v.astype(form.dtype)
    B, T, N, H = q.shape
    group = N // k.shape[2]
    tiles = _tiles(T, _FORWARD_BLOCKS)
    first = _met(segments, tiles, form.window).argmax(2).astype(jnp.int32)
    of_queries = _of_block(tiles.queries, H)
    of_keys = _of_key_head(T, H, group)
    out, lse = _call(
        functools.partial(_forward_kernel, tiles=tiles, form=form),
        "attention_forward",
        form,
        grid=(T // tiles.queries, B, N),
        in_specs=[of_queries, of_keys, of_keys, _of_row(T), _of_row(first.shape[1])],
        out_specs=[of_queries, _numbers_of_block(tiles.queries)],
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((B, N, T), jnp.float32),
        ],
    )(q, k, v, segments, first)
    out = named(out, ATTENTION)
    lse = named(lse, ATTENTION)
    return out.astype(jnp.float32), (q, k, v, segments, out, lse)


def _attend_backward(form: TritonStaticArgs, saved: tuple, g: Array) -> tuple:
    q, k, v, segments, out, lse = saved
    B, T, N, H = q.shape
    K = k.shape[2]
    group = N // K
    g = g.astype(form.dtype)
    # The weighted mean of the gradients of each query's weights: [B, N, T].
    mean = (out.astype(jnp.float32) * g.astype(jnp.float32)).sum(-1).swapaxes(1, 2)
    tiles = _tiles(T, _BACKWARD_BLOCKS)
    met = _met(segments, tiles, form.window)
    first = met.argmax(2).astype(jnp.int32)
    end = (met.shape[1] - met[:, ::-1].argmax(1)).astype(jnp.int32)

    of_queries = _of_block(tiles.queries, H)
    of_keys = _of_key_head(T, H, group)
    of_numbers = _numbers_of_block(tiles.queries)
    dq = _call(
        functools.partial(_query_kernel, tiles=tiles, form=form),
        "attention_backward_queries",
        form,
        grid=(T // tiles.queries, B, N),
        in_specs=[
            of_queries,
            of_keys,
            of_keys,
            of_queries,
            of_numbers,
            of_numbers,
            _of_row(T),
            _of_row(first.shape[1]),
        ],
        out_specs=of_queries,
        out_shape=jax.ShapeDtypeStruct(q.shape, jnp.float32),
    )(q, k, v, g, lse, mean, segments, first)

    of_block = _of_block(tiles.keys, H)
    of_group = pl.BlockSpec((None, T, group, H), lambda j, b, n: (b, 0, n, 0))
    of_numbers = pl.BlockSpec((None, group, T), lambda j, b, n: (b, n, 0))
    dk, dv = _call(
        functools.partial(_key_kernel, tiles=tiles, form=form, group=group),
        "attention_backward_keys",
        form,
        grid=(T // tiles.keys, B, K),
        in_specs=[
            of_group,
            of_block,
            of_block,
            of_group,
            of_numbers,
            of_numbers,
            _of_row(T),
            _of_row(end.shape[1]),
        ],
        out_specs=[of_block, of_block],
        out_shape=[jax.ShapeDtypeStruct(k.shape, jnp.float32)] * 2,
    )(q, k, v, g, lse, mean, segments, end)
    return dq, dk, dv, None


attend.defvjp(_attend_forward, _attend_backward)


def _call(kernel: Any, name: str, form: TritonStaticArgs, **options: Any) -> Any:
    """Wrap a kernel as a function of arrays.

    Raises:
        ConfigError: this jax has no Triton backend of Pallas.
    """
    try:
        # The import is slow, and few runs need it.
        from jax.experimental.pallas import triton  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            f"model.attention=triton: jax {jax.__version__} has no Triton backend of Pallas "
            f"({error}). Set model.attention=xla, or install jax 0.12."
        ) from error

    H = options["in_specs"][0].block_shape[-1]
    params = triton.CompilerParams(num_warps=4 if H <= 64 else 8, num_stages=2)
    return pl.pallas_call(
        kernel, name=name, compiler_params=params, interpret=form.interpret, **options
    )


def _of_block(size: int, H: int) -> pl.BlockSpec:
    """Return the spec of a block of tokens of one head, by the number of the block."""
    return pl.BlockSpec((None, size, None, H), lambda i, b, n: (b, i, n, 0))


def _of_key_head(length: int, H: int, group: int) -> pl.BlockSpec:
    """Return the spec of all tokens of the key head that a head uses."""
    return pl.BlockSpec((None, length, None, H), lambda i, b, n: (b, 0, n // group, 0))


def _numbers_of_block(size: int) -> pl.BlockSpec:
    """Return the spec of one number per token of a block, of one head."""
    return pl.BlockSpec((None, None, size), lambda i, b, n: (b, n, i))


def _of_row(length: int) -> pl.BlockSpec:
    """Return the spec of all numbers of a row."""
    return pl.BlockSpec((None, length), lambda _, b, n: (b, 0))


def _tiles(length: int, largest: tuple[int, int]) -> _Tiles:
    """Return the largest block sizes that divide a row."""
    sizes = []
    for size in largest:
        while length % size:
            size //= 2
        sizes.append(size)
    return _Tiles(*sizes)


def _met(
    segments: Int[Array, "B T"], tiles: _Tiles, window: int | None
) -> Bool[Array, "B queries keys"]:
    """Return which blocks of keys some query of a block may see. This may include unseen blocks.
    Each block of queries sees at least the block of its own columns."""
    B, T = segments.shape
    of_queries = segments.reshape(B, -1, tiles.queries)
    of_keys = segments.reshape(B, -1, tiles.keys)
    met = of_queries.min(-1)[:, :, None] <= of_keys.max(-1)[:, None]
    met &= of_queries.max(-1)[:, :, None] >= of_keys.min(-1)[:, None]
    i = jnp.arange(T // tiles.queries)[:, None]
    j = jnp.arange(T // tiles.keys)
    met &= j < tiles.key_blocks(i)
    if window is not None:
        met &= (j + 1) * tiles.keys > i * tiles.queries - window + 1
    return met


def _dot(a: Array, b: Array) -> Array:
    """Multiply with accumulation in float32."""
    return jax.lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def _scores(q: Array, k: Array, form: TritonStaticArgs) -> Float[Array, "t s"]:
    """Return scaled scores in base 2."""
    return _dot(q, k.T) * (form.scale * _LOG2_E)


def _visible(
    i: Array, j: Array, q_segments: Array, kv_segments: Array, tiles: _Tiles, window: int | None
) -> Bool[Array, "t s"]:
    """Return which queries of a block see which keys of another."""
    columns = i * tiles.queries + jnp.arange(tiles.queries)[:, None]
    kv_columns = j * tiles.keys + jnp.arange(tiles.keys)[None]
    visible = (kv_columns <= columns) & (q_segments[:, None] == kv_segments[None])
    if window is not None:
        visible &= kv_columns > columns - window
    return visible


def _forward_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    segments_ref: Any,
    first_ref: Any,
    out_ref: Any,
    lse_ref: Any,
    *,
    tiles: _Tiles,
    form: TritonStaticArgs,
) -> None:
    """Compute a block of queries of one head, over the keys that it may see."""
    i = pl.program_id(0)
    q = q_ref[...]
    q_segments = segments_ref[pl.ds(i * tiles.queries, tiles.queries)]

    def meet(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        out, top, total = carry
        keys = pl.ds(j * tiles.keys, tiles.keys)
        visible = _visible(i, j, q_segments, segments_ref[keys], tiles, form.window)
        scores = jnp.where(visible, _scores(q, k_ref[keys, :], form), _MASKED)
        higher = jnp.maximum(top, scores.max(1))
        # Masked keys have no weight, even if a query has not seen any key yet.
        weights = jnp.where(visible, jnp.exp2(scores - higher[:, None]), 0.0)
        kept = jnp.exp2(top - higher)
        v = v_ref[keys, :]
        out = out * kept[:, None] + _dot(weights.astype(v.dtype), v)
        return out, higher, total * kept + weights.sum(1)

    start = (
        jnp.zeros(q.shape, jnp.float32),
        jnp.full(tiles.queries, _MASKED, jnp.float32),
        jnp.zeros(tiles.queries, jnp.float32),
    )
    out, top, total = jax.lax.fori_loop(first_ref[i], tiles.key_blocks(i), meet, start)
    out_ref[...] = (out / total[:, None]).astype(out_ref.dtype)
    lse_ref[...] = top + jnp.log2(total)


def _weights_and_slopes(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    lse: Array,
    mean: Array,
    visible: Array,
    form: TritonStaticArgs,
) -> tuple[Float[Array, "t s"], Float[Array, "t s"]]:
    """Recompute the weights of two blocks, and the gradients of their scores."""
    scores = _scores(q, k, form)
    weights = jnp.where(visible, jnp.exp2(scores - lse[:, None]), 0.0)
    return weights, weights * (_dot(g, v.T) - mean[:, None])


def _query_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    g_ref: Any,
    lse_ref: Any,
    mean_ref: Any,
    segments_ref: Any,
    first_ref: Any,
    dq_ref: Any,
    *,
    tiles: _Tiles,
    form: TritonStaticArgs,
) -> None:
    """Compute the gradient of a block of queries of one head."""
    i = pl.program_id(0)
    q = q_ref[...]
    g = g_ref[...]
    lse = lse_ref[...]
    mean = mean_ref[...]
    q_segments = segments_ref[pl.ds(i * tiles.queries, tiles.queries)]

    def meet(j: Array, dq: Array) -> Array:
        keys = pl.ds(j * tiles.keys, tiles.keys)
        k = k_ref[keys, :]
        visible = _visible(i, j, q_segments, segments_ref[keys], tiles, form.window)
        _, slopes = _weights_and_slopes(q, k, v_ref[keys, :], g, lse, mean, visible, form)
        return dq + _dot(slopes.astype(k.dtype), k)

    start = jnp.zeros(q.shape, jnp.float32)
    dq = jax.lax.fori_loop(first_ref[i], tiles.key_blocks(i), meet, start)
    dq_ref[...] = dq * form.scale


def _key_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    g_ref: Any,
    lse_ref: Any,
    mean_ref: Any,
    segments_ref: Any,
    end_ref: Any,
    dk_ref: Any,
    dv_ref: Any,
    *,
    tiles: _Tiles,
    form: TritonStaticArgs,
    group: int,
) -> None:
    """Compute the gradients of a block of keys and values of one key head, from all heads that
    share it."""
    j = pl.program_id(0)
    k = k_ref[...]
    v = v_ref[...]
    kv_segments = segments_ref[pl.ds(j * tiles.keys, tiles.keys)]

    def of_head(head: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        def meet(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            dk, dv = carry
            queries = pl.ds(i * tiles.queries, tiles.queries)
            q = q_ref[queries, head, :]
            g = g_ref[queries, head, :]
            visible = _visible(i, j, segments_ref[queries], kv_segments, tiles, form.window)
            lse = lse_ref[head, queries]
            mean = mean_ref[head, queries]
            weights, slopes = _weights_and_slopes(q, k, v, g, lse, mean, visible, form)
            dv += _dot(weights.astype(g.dtype).T, g)
            dk += _dot(slopes.astype(q.dtype).T, q)
            return dk, dv

        return jax.lax.fori_loop(tiles.first_query_block(j), end_ref[j], meet, carry)

    start = (jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32))
    dk, dv = jax.lax.fori_loop(0, group, of_head, start)
    dk_ref[...] = dk * form.scale
    dv_ref[...] = dv
