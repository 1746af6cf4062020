"""Rows that are split over devices attend as whole ones do, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtrain.config.schema import MeshConfig
from maxtrain.ops.attention import attention
from maxtrain.ops.attention.context_split import ContextSplit, zigzag_columns
from maxtrain.ops.attention.mask import Mask
from maxtrain.parallel.mesh import make_mesh

B, T, H = 2, 64, 8
# Attention: query heads, key heads, window, sinks, softcap.
KINDS = {
    "grouped": (4, 2, None, False, None),
    "window": (4, 4, 9, False, None),
    "a window within one part": (4, 4, 3, False, None),
    "sinks": (4, 1, 20, True, None),
    "softcap": (2, 2, None, False, 3.0),
}
MESHES = {"2": (1, 2, 1), "4": (2, 4, 1), "8": (1, 8, 1), "2 with tensor": (2, 2, 2)}


def mesh_of(name):
    data, context, tensor = MESHES[name]
    config = MeshConfig(data=data, fsdp=1, context=context, tensor=tensor)
    return make_mesh(config, jax.devices()[: data * context * tensor])


def example(kind):
    """Queries, keys, values, segments, sinks and what the output is weighted with."""
    N, K, _, has_sinks, _ = KINDS[kind]
    rng = np.random.default_rng(len(kind))
    shapes = [(B, T, N, H), (B, T, K, H), (B, T, K, H), (B, T, N, H)]
    q, k, v, g = [jnp.float32(rng.standard_normal(shape)) for shape in shapes]
    lengths = [[17, 1, 30, 9, 7], [64]]
    segments = [np.repeat(np.arange(1, len(row) + 1), row) for row in lengths]
    segments[0][-7:] = 0
    sinks = None
    if has_sinks:
        sinks = jnp.float32(rng.standard_normal(N))
    return q, k, v, g, sinks, jnp.array(np.stack(segments), jnp.int32)


def found(kind, kernel, mesh, dtype="float32", order=None):
    """The output, and the gradients of its weighted sum; `order`: the kernel whose order of tokens
    it is."""
    q, k, v, g, sinks, segments = example(kind)
    _, _, window, _, softcap = KINDS[kind]

    def weighted(q, k, v, sinks):
        split = ContextSplit.of_rows(T, order or kernel)
        q, k, v = split.enter(q), split.enter(k), split.enter(v)
        mask = split.mask(split.enter(segments)).within(window)
        options = {"kernel": kernel, "dtype": dtype, "softcap": softcap, "sinks": sinks}
        out = split.leave(attention(q, k, v, mask, **options))
        return (out * g).sum(), out

    with jax.set_mesh(mesh):
        arguments = (0, 1, 2)
        if sinks is not None:
            arguments = (0, 1, 2, 3)
        (_, out), grads = jax.jit(jax.value_and_grad(weighted, arguments, has_aux=True))(
            q, k, v, sinks
        )
    return [np.asarray(x) for x in (out, *grads)]


def whole(kind, dtype="float32"):
    """The oracle, on one device."""
    return found(kind, "eager", make_mesh(MeshConfig(fsdp=1), jax.devices()[:1]), dtype)


def applies(kind, kernel, mesh):
    """Return True if heads can be distributed."""
    N, K, *_ = KINDS[kind]
    _, context, tensor = MESHES[mesh]
    if N % tensor or K % tensor:
        return False
    if kernel == "ring":
        return True
    return N % (tensor * context) == 0


CASES = [
    pytest.param(kind, kernel, mesh, marks=() if mesh in ("4",) else pytest.mark.long)
    for kind in KINDS
    for kernel in ("ring", "xla")
    for mesh in MESHES
    if applies(kind, kernel, mesh)
]


@pytest.mark.long
@pytest.mark.every_dose
@pytest.mark.parametrize(("kind", "kernel", "mesh"), CASES)
def test_split_rows_attend_as_whole_ones_forward_and_backward(kind, kernel, mesh):
    for one, other in zip(found(kind, kernel, mesh_of(mesh)), whole(kind), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5 * np.abs(other).max())


@pytest.mark.long
def test_products_may_be_of_rounded_inputs():
    for one, other in zip(
        found("grouped", "ring", mesh_of("4"), "bfloat16"),
        whole("grouped", "bfloat16"),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, atol=2**-6 * np.abs(other).max())


@pytest.mark.every_dose
@pytest.mark.long
def test_the_oracle_reads_zig_zag_orders():
    for one, other in zip(
        found("sinks", "eager", mesh_of("4"), order="ring"), whole("sinks"), strict=True
    ):
        np.testing.assert_allclose(one, other, atol=2e-5 * np.abs(other).max())


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_every_device_has_as_much_to_do(parts):
    """Pairs of a query and a key that it sees, of each device's queries."""
    columns = np.asarray(zigzag_columns(T, parts))
    assert sorted(columns.tolist()) == list(range(T))
    pairs = (columns + 1).reshape(parts, -1).sum(axis=1)
    assert len(set(pairs.tolist())) == 1


@pytest.mark.parametrize("mesh", ["2", "4", "8"])
def test_tokens_leave_as_they_came(mesh):
    x = jnp.arange(B * T * 3).reshape(B, T, 3)
    with jax.set_mesh(mesh_of(mesh)):
        split = ContextSplit.of_rows(T, "ring")
        inside = jax.jit(split.enter)(x)
        again = jax.jit(split.leave)(inside)
    columns = zigzag_columns(T, MESHES[mesh][1])
    np.testing.assert_array_equal(inside, np.asarray(x)[:, columns])
    np.testing.assert_array_equal(again, x)


def test_rows_that_can_not_be_split_are_whole():
    with jax.set_mesh(mesh_of("4")):
        assert ContextSplit.of_rows(20, "ring").exchange is None
        assert ContextSplit.of_rows(24, "ring").exchange == "keys"
        assert ContextSplit.of_rows(24, "xla").exchange == "heads"
        assert ContextSplit.of_rows(24, "eager").exchange is None
    assert ContextSplit.of_rows(24, "ring").exchange is None
    mask = ContextSplit(None).mask(jnp.ones((1, 4), jnp.int32))
    assert mask.in_order and isinstance(mask, Mask)
