"""RMSNorm against its equation in float64, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtrain.ops.norm import rms_norm

EPS = 1e-5


def equation(x, scale, g):
    """Output, and the gradients of sum(output * g), written out by hand in float64."""
    x, scale, g = (np.asarray(a, np.float64) for a in (x, scale, g))
    r = 1 / np.sqrt((x**2).mean(-1, keepdims=True) + EPS)
    dy = g * scale
    dx = r * dy - x * r**3 * (x * dy).mean(-1, keepdims=True)
    return x * r * scale, dx, (g * x * r).reshape(-1, x.shape[-1]).sum(0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", [(24,), (5, 24), (2, 3, 4, 24)])
def test_equals_the_equation_forward_and_backward(shape, dtype):
    rng = np.random.default_rng(0)
    x = jnp.asarray(
        rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 4, (*shape[:-1], 1)), dtype
    )  # rows of all sizes
    scale, g = (
        jnp.asarray(rng.standard_normal(24), dtype),
        rng.standard_normal(shape).astype(np.float32),
    )
    out, vjp = jax.vjp(lambda x, scale: rms_norm(x, scale, EPS), x, scale)
    dx, dscale = vjp(jnp.asarray(g))
    assert (out.dtype, dx.dtype, dscale.dtype) == (jnp.float32, dtype, dtype)
    expected, expected_dx, expected_dscale = equation(x, scale, g)
    np.testing.assert_allclose(out, expected, rtol=2e-6, atol=1e-6)
    # Only the last step of a gradient, to the type of its argument, is rounded to bfloat16
    # (relative 2**-8).
    rtol = 2e-5 if dtype == jnp.float32 else 2.0**-8
    row = np.abs(expected_dx).max(-1, keepdims=True)
    assert (np.abs(np.asarray(dx, np.float64) - expected_dx) <= rtol * row).all()
    np.testing.assert_allclose(
        np.asarray(dscale, np.float64), expected_dscale, rtol=rtol, atol=1e-5
    )


def test_zeros_give_zeros_and_finite_gradients():
    out, dx = jax.value_and_grad(lambda x: rms_norm(x, jnp.ones(8), EPS).sum())(jnp.zeros((2, 8)))
    assert out == 0
    np.testing.assert_allclose(dx, np.full((2, 8), EPS**-0.5), rtol=1e-6)
