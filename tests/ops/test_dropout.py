"""Dropout, dropped rows and noise: rates, means, and draws that depend on a row's key alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxtrain.config.schema import MeshConfig
from maxtrain.ops.dropout import drop_rows, dropout, embedding_noise, fold
from maxtrain.parallel.mesh import make_mesh
from maxtrain.parallel.sharding import named_sharding

B, T, D = 8, 50, 40
WAYS = {"dropout": dropout, "drop_rows": drop_rows, "embedding_noise": embedding_noise}


def keys(rows=B, seed=0):
    return jax.random.split(jax.random.key(seed), rows)


def ones(rows=B):
    return jnp.ones((rows, T, D))


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_rate_and_the_mean_are_as_asked_for(rate):
    """16,000 draws: five of their deviations are allowed."""
    out = np.asarray(dropout(ones(), keys(), rate))
    error = 5 * (rate * (1 - rate) / out.size) ** 0.5
    assert abs((out == 0).mean() - rate) < error
    assert abs(out.mean() - 1) < error / (1 - rate)
    np.testing.assert_allclose(out[out > 0], 1 / (1 - rate), rtol=1e-6)


@pytest.mark.parametrize("rate", [0.2, 0.7])
def test_rows_are_dropped_whole(rate):
    out = np.asarray(drop_rows(jnp.ones((4000, 2, 3)), keys(4000), rate))
    assert ((out == out[:, :1, :1]).all(axis=(1, 2))).all()
    dropped = out[:, 0, 0] == 0
    assert abs(dropped.mean() - rate) < 5 * (rate * (1 - rate) / 4000) ** 0.5
    np.testing.assert_allclose(out[~dropped], 1 / (1 - rate), rtol=1e-6)


def test_noise_is_uniform_and_as_large_as_neftune_says():
    noise = np.asarray(embedding_noise(ones(), keys(), 5.0) - 1)
    bound = 5 / (T * D) ** 0.5
    assert 0.99 * bound < np.abs(noise).max() <= bound * 1.0001 and abs(noise.mean()) < 0.03 * bound
    np.testing.assert_allclose(noise.std(), bound / 3**0.5, rtol=0.03)


@pytest.mark.parametrize("way", WAYS)
def test_rows_draw_apart_and_places_too(way):
    def drawn(keys):
        return np.asarray(WAYS[way](jnp.ones((256, 4, 8)), keys, 0.5)).reshape(256, -1)

    first, place = drawn(keys(256)), drawn(fold(keys(256), 3))
    for a, b in (
        (first[:128], first[128:]),
        (first, place),
    ):  # of two rows, or of a row's two places
        together = np.corrcoef(a.ravel(), b.ravel())[0, 1]
        assert abs(together) < 5 / len(a) ** 0.5


@pytest.mark.long
@settings(deadline=None, max_examples=4)
@given(order=st.permutations(range(B)), cut=st.integers(1, B - 1))
def test_draws_are_the_same_in_any_company(order, cut):
    x = jnp.arange(B * T * D, dtype=jnp.float32).reshape(B, T, D)
    order = np.array(order)
    for way in WAYS.values():
        whole = np.asarray(way(x, keys(), 0.3))
        for rows in (order[:cut], order[cut:]):
            assert (np.asarray(way(x[rows], keys()[rows], 0.3)) == whole[rows]).all()


@pytest.mark.every_dose
@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_bits_are_the_same_on_every_mesh(way):
    def draw(x, keys):
        return WAYS[way](x, keys, 0.3)

    alone = np.asarray(jax.jit(draw)(ones(), keys()))
    for shape in ((8, 1, 1), (2, 2, 2), (1, 1, 8)):
        mesh = make_mesh(MeshConfig(*shape), jax.devices()[:8])
        place = named_sharding(mesh, ("activation_batch", "activation_length", "mlp"))
        with jax.set_mesh(mesh):
            split = jax.jit(draw, out_shardings=place)(jax.device_put(ones(), place), keys())
        assert np.asarray(split).tobytes() == alone.tobytes()


def test_a_rate_of_nothing_costs_nothing():
    x = ones()
    assert dropout(x, keys(), 0.0) is x and embedding_noise(x, keys(), 0.0) is x
    assert "random" not in str(jax.make_jaxpr(lambda x, keys: dropout(x, keys, 0.0))(x, keys()))


def test_gradients_pass_where_numbers_do():
    out, back = jax.vjp(lambda x: dropout(x, keys(), 0.4), ones())
    np.testing.assert_array_equal(back(jnp.ones_like(out))[0], out)
