"""The gradient of the head on a mesh, where each device sums that of its own tokens, against that
of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtrain.config.schema import MeshConfig
from maxtrain.ops.cross_entropy import cross_entropy
from maxtrain.ops.log_probs import token_log_probs
from maxtrain.parallel.mesh import make_mesh
from maxtrain.parallel.sharding import named_sharding

B, T, D, V = 8, 12, 16, 24


def by_cross_entropy(hidden, head, targets, weights):
    return cross_entropy(hidden, head, targets, weights, chunks=3, dtype="float32").loss


def by_log_probs(hidden, head, targets, weights):
    found = token_log_probs(hidden, head, targets, chunks=3, dtype="float32")
    return (found.log_probs * weights + 0.1 * found.entropy * weights).sum()


@pytest.mark.every_dose
@pytest.mark.long
@pytest.mark.parametrize("loss", [by_cross_entropy, by_log_probs])
def test_devices_sum_the_gradients_of_their_own_tokens(loss):
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((B, T, D), np.float32)
    head = rng.standard_normal((D, V), np.float32)
    targets = rng.integers(0, V, (B, T)).astype(np.int32)
    weights = rng.uniform(0.1, 2, (B, T)).astype(np.float32)
    step = jax.value_and_grad(loss, (0, 1))
    expected = jax.jit(step)(hidden, head, targets, weights)
    mesh = make_mesh(MeshConfig(fsdp=2, context=2, tensor=2))
    tokens = named_sharding(mesh, ("activation_batch", "activation_length"))
    matrix = named_sharding(mesh, ("embed", "vocab"))
    arguments = [jax.device_put(x, tokens) for x in (hidden, targets, weights)]
    with jax.set_mesh(mesh):
        split = jax.jit(step)
        found = split(arguments[0], jax.device_put(head, matrix), *arguments[1:])
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    for ours, theirs in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    # It lies where the matrix does.
    assert found[1][1].sharding.is_equivalent_to(matrix, 2)
    assert jnp.abs(found[1][1]).max() > 0.1
