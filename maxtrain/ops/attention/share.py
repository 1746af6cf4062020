"""Sharding of the arrays of attention over the current mesh, for kernels that work on each device's
shard."""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from maxtrain.parallel.sharding import LENGTH, partition_spec


class Shares(NamedTuple):
    """The partition specs of each kind of array."""

    queries: PartitionSpec  # [B, T, N, H]
    keys: PartitionSpec  # [B, T, K, H], and values
    tokens: PartitionSpec  # [B, T]
    columns: PartitionSpec  # [T]
    heads: PartitionSpec  # [N]


def shares() -> Shares:
    """Return the partition specs on the current mesh."""
    shape = jax.sharding.get_abstract_mesh().shape
    rows = ("activation_batch", LENGTH)
    return Shares(
        queries=partition_spec((*rows, "heads", "head_dim"), shape),
        keys=partition_spec((*rows, "kv_heads", "head_dim"), shape),
        tokens=partition_spec(rows, shape),
        columns=partition_spec((LENGTH,), shape),
        heads=partition_spec(("heads",), shape),
    )


def on_each_device(
    kernel: Callable[[Array, Array, Array, Array], Array],
    q: Array,
    k: Array,
    v: Array,
    segments: Array,
) -> Array:
    """Run a kernel on each device's shard of queries, keys, values and segments, since XLA cannot
    partition a custom kernel."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return kernel(q, k, v, segments)
    of = shares()
    split = jax.shard_map(
        kernel,
        in_specs=(of.queries, of.keys, of.keys, of.tokens),
        out_specs=of.queries,
        check_vma=False,
    )
    return split(q, k, v, segments)
