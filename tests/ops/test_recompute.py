"""Element-wise functions of activations that are stored in fewer bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxtrain.config.schema import InitConfig, ModelConfig
from maxtrain.models.init import Initializer
from maxtrain.models.linear import Linear
from maxtrain.models.norm import Norm
from maxtrain.models.specs import NormSpec
from maxtrain.ops.dot import MatmulPrecision
from maxtrain.ops.dropout import drop_rows, dropout, embedding_noise
from maxtrain.ops.norm import rms_norm
from maxtrain.ops.recompute import elementwise

# More than bfloat16 can count to one by one: 256 + 1 is 256 there.
ROWS = 3000
WIDTH = 4
ROUNDED = MatmulPrecision.of("bfloat16", "bfloat16")
INIT = Initializer(InitConfig(), ModelConfig(embed_dim=WIDTH), "float32")


def normalise(x, scale):
    return rms_norm(x, scale, 1e-6)


def arrays(dtype):
    x = jax.random.normal(jax.random.key(0), (ROWS, WIDTH)).astype(dtype)
    return x, jnp.linspace(0.5, 1.5, WIDTH)


def test_of_float32_it_is_the_function_itself():
    x, scale = arrays("float32")
    ours = jax.make_jaxpr(lambda *a: elementwise(normalise, *a))(x, scale)
    assert str(ours) == str(jax.make_jaxpr(normalise)(x, scale))


def test_of_bfloat16_it_computes_in_float32_and_stores_only_what_came_in():
    x, scale = arrays("bfloat16")
    out, backward = jax.vjp(lambda *a: elementwise(normalise, *a), x, scale)
    assert out.dtype == jnp.bfloat16
    expected = normalise(x, scale)
    np.testing.assert_array_equal(out, expected.astype(jnp.bfloat16))
    assert {(leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(backward)} == {
        (x.shape, "bfloat16"),
        (scale.shape, "float32"),
    }
    dx, dscale = backward(jnp.ones_like(out))
    exact_dx, exact_dscale = jax.vjp(normalise, x.astype(jnp.float32), scale)[1](
        jnp.ones(x.shape, jnp.float32)
    )
    assert dx.dtype == jnp.bfloat16 and dscale.dtype == jnp.float32
    np.testing.assert_allclose(
        dx.astype(jnp.float32), exact_dx, atol=2**-8 * np.abs(exact_dx).max()
    )
    # Summed in float32: in bfloat16 sums of this number of rows would be off by far more.
    np.testing.assert_allclose(dscale, exact_dscale, rtol=1e-5, atol=1e-3)


def test_the_gradient_of_a_bias_is_summed_in_float32():
    linear = Linear(jax.random.key(0), {"embed": WIDTH}, {"mlp": WIDTH}, INIT, ROUNDED, bias=True)
    x, _ = arrays("bfloat16")
    graphdef, state = nnx.split(linear)
    out = nnx.merge(graphdef, state)(x)
    assert out.dtype == jnp.bfloat16
    gradient = jax.grad(lambda s: nnx.merge(graphdef, s)(x).astype(jnp.float32).sum())(state)
    assert gradient["bias"][...].dtype == jnp.float32
    np.testing.assert_array_equal(gradient["bias"][...], np.full(WIDTH, ROWS, np.float32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_random_and_norms_keep_the_type(dtype):
    keys = jax.random.split(jax.random.key(1), 2)
    x = jnp.ones((2, 3, WIDTH), dtype)
    rate = jnp.float32(0.5)
    assert dropout(x, keys, 0.5).dtype == dtype
    assert drop_rows(x, keys, rate).dtype == dtype
    assert embedding_noise(x, keys, 5.0).dtype == dtype
    assert Norm(WIDTH, NormSpec(1e-6), INIT)(x).dtype == dtype
