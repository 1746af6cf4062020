"""Attention over sharded rows by all-to-all (Ulysses): each device gets whole rows of some heads.

Queries, keys and values change from a part of the tokens with all heads to all tokens with a part
of the heads. Any kernel attends, and its result changes back. If there are fewer key heads than
devices, each key head is given to several devices.

Communication of each device and layer: its queries, keys, values and results once, except for the
share that it keeps. Memory: the scores of whole rows, as the kernel needs them.

Source: Jacobs et al. 2023, https://arxiv.org/abs/2309.14509.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxtrain.ops.attention.mask import Mask
from maxtrain.ops.attention.ring import AXIS
from maxtrain.ops.attention.share import shares


def all_to_all_attention(
    q: Array,
    k: Array,
    v: Array,
    mask: Mask,
    *,
    kernel: Callable[..., Array],
    sinks: Array | None = None,
    **options: Any,
) -> Array:
    """Compute `attention` with rows sharded over the mesh axis `context`.

    Args:
        kernel: the kernel on one device, called with `options`.
    """
    of = shares()
    specs = [of.queries, of.keys, of.keys, of.tokens]
    arrays = [q, k, v, mask.q_segments]
    if sinks is not None:
        specs.append(of.heads)
        arrays.append(sinks)
    window = mask.window

    def on_one_device(
        q: Array, k: Array, v: Array, segments: Array, sinks: Array | None = None
    ) -> Array:
        parts = jax.lax.axis_size(AXIS)
        segments = jax.lax.all_gather(segments, AXIS, axis=1, tiled=True)
        more = dict(options)
        if sinks is not None:
            own = sinks.shape[0] // parts
            first = jax.lax.axis_index(AXIS) * own
            more["sinks"] = jax.lax.dynamic_slice_in_dim(sinks, first, own)
        whole = Mask.of_rows(segments).within(window)
        out = kernel(_to_heads(q), *(_to_heads(_repeated(x, parts)) for x in (k, v)), whole, **more)
        return jax.lax.all_to_all(out, AXIS, split_axis=1, concat_axis=2, tiled=True)

    split = jax.shard_map(
        on_one_device, in_specs=tuple(specs), out_specs=of.queries, check_vma=False
    )
    return split(*arrays)


def _to_heads(x: Array) -> Array:
    """Reshard [B, T / C, N, H] to [B, T, N / C, H]."""
    return jax.lax.all_to_all(x, AXIS, split_axis=2, concat_axis=1, tiled=True)


def _repeated(x: Array, parts: int) -> Array:
    """Repeat key heads, so that there is one for each device."""
    heads = x.shape[2]
    if heads >= parts:
        return x
    return jnp.repeat(x, parts // heads, axis=2)
