"""Log-probabilities and entropies of tokens against float64, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtrain.ops.log_probs import LogProbsStaticArgs, plain_token_log_probs, token_log_probs

B, T, D, V = 3, 12, 16, 50


def example(seed=0):
    """Hidden states, head, targets, and factors of log-probabilities and entropies."""
    rng = np.random.default_rng(seed)
    hidden = rng.standard_normal((B, T, D))
    head = rng.standard_normal((D, V))
    targets = rng.integers(0, V, (B, T))
    factors = rng.standard_normal((2, B, T))
    return jnp.float32(hidden), jnp.float32(head), jnp.int32(targets), jnp.float32(factors)


def oracle(hidden, head, targets, factors, temperature, softcap):
    """Log-probabilities, entropies, and the gradients of their weighted sum, in float64."""
    x, w = np.asarray(hidden, np.float64), np.asarray(head, np.float64)
    logits = x @ w
    slope = np.ones_like(logits)
    if softcap is not None:
        bounded = np.tanh(logits / softcap)
        logits = softcap * bounded
        slope = 1 - bounded**2
    logits = logits / temperature
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    p = np.exp(log_p)
    hit = np.arange(V) == np.asarray(targets)[..., None]
    log_probs = (log_p * hit).sum(-1)
    entropy = -(p * log_p).sum(-1)
    of_log_probs, of_entropy = np.asarray(factors, np.float64)[..., None]
    dlogits = of_log_probs * (hit - p) - of_entropy * p * (log_p + entropy[..., None])
    dlogits = dlogits * slope / temperature
    dx = dlogits @ w.T
    dw = np.einsum("btd,btv->dv", x, dlogits)
    return log_probs, entropy, dx, dw


@pytest.mark.parametrize("chunks", ["plain", 1, 3])
@pytest.mark.parametrize(("temperature", "softcap"), [(1.0, None), (0.6, 4.0)])
def test_every_form_equals_the_oracle_forward_and_backward(chunks, temperature, softcap):
    hidden, head, targets, factors = example()

    def weighted(hidden, head):
        if chunks == "plain":
            form = LogProbsStaticArgs(1, "float32", softcap=softcap, temperature=temperature)
            found = plain_token_log_probs(hidden, head, targets, form)
        else:
            found = token_log_probs(
                hidden,
                head,
                targets,
                chunks=chunks,
                dtype="float32",
                softcap=softcap,
                temperature=temperature,
            )
        return (factors[0] * found.log_probs + factors[1] * found.entropy).sum(), found

    program = jax.jit(jax.value_and_grad(weighted, (0, 1), has_aux=True))
    (_, found), (dx, dw) = program(hidden, head)
    log_probs, entropy, expected_dx, expected_dw = oracle(
        hidden, head, targets, factors, temperature, softcap
    )
    np.testing.assert_allclose(found.log_probs, log_probs, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found.entropy, entropy, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dx, expected_dx, atol=1e-5 * np.abs(expected_dx).max())
    np.testing.assert_allclose(dw, expected_dw, atol=1e-5 * np.abs(expected_dw).max())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_lower_numbers_are_those_of_the_plain_form(dtype):
    hidden, head, targets, factors = example(1)
    hidden = hidden.astype(dtype)

    def weighted(function):
        def loss(hidden, head):
            found = function(hidden, head)
            return (factors[0] * found.log_probs + factors[1] * found.entropy).sum()

        return jax.jit(jax.value_and_grad(loss, (0, 1)))(hidden, head)

    form = LogProbsStaticArgs(1, dtype, dtype)
    plain, (plain_dx, plain_dw) = weighted(lambda x, w: plain_token_log_probs(x, w, targets, form))
    ours, (dx, dw) = weighted(
        lambda x, w: token_log_probs(x, w, targets, chunks=3, dtype=dtype, logits=dtype)
    )
    assert (dx.dtype, dw.dtype) == (plain_dx.dtype, plain_dw.dtype)
    np.testing.assert_allclose(ours, plain, rtol=1e-5)
    # dlogits is rounded before the products, and its rounding is at most this.
    unit = float(jnp.finfo(dtype).eps)
    for found, expected in ((dx, plain_dx), (dw, plain_dw)):
        expected = np.asarray(expected, np.float32)
        np.testing.assert_allclose(
            np.asarray(found, np.float32), expected, atol=2 * unit * np.abs(expected).max()
        )


def test_logits_of_a_chunk_only_are_held():
    """The compiled gradient needs less memory the more chunks there are."""
    hidden, head, targets, _ = example()
    wide = jnp.tile(head, (1, 40))

    def temporary_bytes(chunks):
        def loss(hidden, head):
            found = token_log_probs(hidden, head, targets, chunks=chunks, dtype="float32")
            return found.log_probs.sum()

        compiled = jax.jit(jax.grad(loss, (0, 1))).lower(hidden, wide).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    logits = B * T * wide.shape[1] * 4
    assert temporary_bytes(1) > logits
    assert temporary_bytes(T) < temporary_bytes(1) / 2
