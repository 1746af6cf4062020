"""Tokens are drawn as often as their distributions say, and alike whether logits are there at once
or in parts."""

import jax
import jax.numpy as jnp
import numpy as np

from maxtrain.ops.gumbel_sample import draw, drawn_tokens
from maxtrain.ops.log_probs import LogProbsStaticArgs

B, T, D, V = 3, 8, 16, 12


def test_parts_of_the_sequence_draw_what_whole_logits_do():
    """The expected tokens are drawn one by one, from logits in float64, with the temperature and
    the softcap."""
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(B, T, D)).astype(np.float32)
    head = rng.normal(size=(D, V)).astype(np.float32)
    keys = jax.random.split(jax.random.key(1), (B, T))
    form = LogProbsStaticArgs(4, "float32", softcap=3.0, temperature=0.7)
    found = jax.jit(drawn_tokens, static_argnums=3)(hidden, head, keys, form)
    logits = 3.0 * np.tanh(hidden.astype(np.float64) @ head / 3.0) / 0.7
    for row in range(B):
        for column in range(T):
            noise = np.asarray(jax.random.gumbel(keys[row, column], (V,)))
            assert int(found[row, column]) == int((logits[row, column] + noise).argmax())


def test_tokens_come_as_often_as_they_are_likely():
    """Within five standard deviations, of 20,000 draws."""
    count = 20_000
    log_p = jax.nn.log_softmax(jnp.array([2.0, 0.0, -1.0, 1.0]))
    keys = jax.random.split(jax.random.key(0), count)
    found = np.asarray(draw(jnp.broadcast_to(log_p, (count, 4)), keys))
    p = np.exp(np.asarray(log_p, np.float64))
    shares = np.bincount(found, minlength=4) / count
    np.testing.assert_array_less(np.abs(shares - p), 5 * np.sqrt(p * (1 - p) / count))
