"""Matrix products: what is rounded, where sums are float32, and that gradients follow the same
rule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtrain.ops.dot import MatmulPrecision, dot

BFLOAT16 = MatmulPrecision.of("bfloat16")
# Leading dims of x. A single row has a form of its own on CPUs.
SHAPES = [(7,), (3, 5), (2, 3, 4), (1,), (1, 1)]


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def rounded(x, dtype):
    """Float64 array of the values that x has after rounding to `dtype`."""
    return np.asarray(x).astype(jnp.dtype(dtype)).astype(np.float64)


def assert_product(actual, a, b):
    """`actual` is a @ b up to float32 accumulation: the standard bound n * 2**-24 * |a| @ |b|,
    whatever the order."""
    assert actual.dtype == np.float32
    error = np.abs(np.asarray(actual, np.float64) - a @ b)
    assert (error <= a.shape[-1] * 2.0**-24 * (np.abs(a) @ np.abs(b)) + 1e-30).all(), error.max()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("leading", SHAPES)
def test_is_the_product_of_rounded_inputs_forward_and_backward(leading, dtype):
    x, w, g = normal(0, *leading, 96), normal(1, 96, 40), normal(2, *leading, 40)

    @jax.jit
    def both(x, w, g):
        out, vjp = jax.vjp(lambda x, w: dot(x, w, MatmulPrecision.of(dtype)), x, w)
        return out, *vjp(g)

    out, dx, dw = both(x, w, g)
    X, W, G = (rounded(a, dtype) for a in (x, w, g))
    assert_product(out, X, W)
    assert_product(dx, G, W.T)
    assert_product(dw, X.reshape(-1, 96).T, G.reshape(-1, 40))


@pytest.mark.parametrize("inputs", [97, 98, 1])
def test_a_row_of_any_number_of_inputs_is_the_product(inputs):
    """Whose sum has parts only where they are equally long."""
    x, w = normal(0, 1, inputs), normal(1, inputs, 24)
    out = jax.jit(lambda x, w: dot(x, w, BFLOAT16))(x, w)
    assert out.shape == (1, 24)
    assert_product(out, rounded(x, "bfloat16"), rounded(w, "bfloat16"))


def test_bfloat16_results_are_not_rounded_to_bfloat16():
    """1 + 2**-12 needs the bits of a float32 accumulator and result."""
    x = jnp.array([[1.0, 2.0**-12]])
    assert dot(x, jnp.ones((2, 1)), BFLOAT16)[0, 0] == 1 + 2.0**-12
    dw = jax.grad(lambda w: dot(x.T, w, BFLOAT16).sum())(jnp.ones((1, 3)))
    assert (dw == 1 + 2.0**-12).all()


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("x_type", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("w_type", [jnp.float32, jnp.bfloat16])
def test_result_is_float32_and_gradients_have_the_types_of_their_arguments(x_type, w_type, compute):
    x, w = jnp.ones((2, 3, 8), x_type), jnp.ones((8, 4), w_type)
    out, (dx, dw) = jax.eval_shape(
        lambda x, w: jax.value_and_grad(
            lambda x, w: dot(x, w, MatmulPrecision.of(compute)).sum(), (0, 1)
        )(x, w),
        x,
        w,
    )
    assert (out.dtype, dx.dtype, dw.dtype) == (jnp.float32, x_type, w_type)
    assert (dx.shape, dw.shape) == (x.shape, w.shape)


def test_the_backward_pass_keeps_the_rounded_activation_and_the_weight():
    x, w = jnp.ones((4, 6, 8)), jnp.ones((8, 4))
    _, vjp = jax.eval_shape(lambda x, w: jax.vjp(lambda x, w: dot(x, w, BFLOAT16), x, w), x, w)
    kept = sorted((a.shape, a.dtype.name) for a in jax.tree.leaves(vjp) if a.shape)
    assert kept == [((4, 6, 8), "bfloat16"), ((8, 4), "float32")]


def test_a_recipe_says_the_types_of_inputs_gradient_and_result_each():
    x = jnp.asarray(normal(0, 5, 96))
    w = jnp.asarray(normal(1, 96, 40))
    g = normal(2, 5, 40)
    recipe = MatmulPrecision(inputs="bfloat16", gradient="float32", result="float32")
    _, vjp = jax.vjp(lambda x, w: dot(x, w, recipe), x, w)
    dx, dw = vjp(jnp.asarray(g))
    assert_product(dx, rounded(g, "float32"), rounded(w, "float32").T)
    assert_product(dw, rounded(x, "bfloat16").T, rounded(g, "float32"))
    low = MatmulPrecision(inputs="float32", gradient="float32", result="bfloat16")
    assert dot(x, w, low).dtype == jnp.bfloat16
