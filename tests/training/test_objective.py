"""The next-token objective: sums over targets, whatever their places, chunks and devices."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxtrain.ops.cross_entropy import token_nll
from maxtrain.training.objective import next_token


def test_total_and_weight_are_sums_over_targets(tiny):
    """Against the logits of the model, token by token."""
    parts, batch = tiny.parts(), tiny.batch()

    @jax.jit
    def both(params, batch):
        model = nnx.merge(parts.graphdef, params)
        logits = model(batch["inputs"], batch["segment_ids"], batch["positions"])
        return next_token().nll(model, batch), token_nll(logits, batch["targets"])

    with jax.set_mesh(parts.mesh):
        (total, weight), nll = both(parts.new_state().params, batch)
    assert total.dtype == weight.dtype == jnp.float32
    assert weight == batch["loss_mask"].sum()
    np.testing.assert_allclose(total, (np.float64(nll) * batch["loss_mask"]).sum(), rtol=1e-6)


def test_fractional_weights_count_as_much_as_they_say(tiny):
    parts, batch = tiny.parts(), tiny.batch()
    with jax.set_mesh(parts.mesh):
        params = parts.new_state().params
        whole = jax.jit(lambda batch: next_token().nll(nnx.merge(parts.graphdef, params), batch))
        full, quarter = whole(batch), whole(batch | {"loss_mask": batch["loss_mask"] / 4})
        nothing = whole(batch | {"loss_mask": np.zeros_like(batch["loss_mask"])})
    np.testing.assert_allclose(quarter, np.float32(full) / 4, rtol=1e-6)
    assert nothing.total == nothing.weight == 0


@pytest.mark.parametrize("chunk", [0, 1, 24, 10_000])
def test_the_size_of_chunks_changes_nothing(tiny, chunk):
    batch, results = tiny.batch(), []
    for parts in (tiny.parts(), tiny.parts(loss_chunk=chunk)):
        with jax.set_mesh(parts.mesh):
            params = parts.new_state().params
            results.append(jax.jit(lambda p, b, g=parts.graphdef: next_token().nll(nnx.merge(g, p), b))(params, batch))
    np.testing.assert_allclose(results[0], results[1], rtol=1e-6)


def test_logits_of_at_most_loss_chunk_tokens_exist_on_a_device(tiny):
    """8 rows of 24: on one device 64 tokens are 8 columns of all rows, on 8 devices (one row each) they are the whole row."""
    batch, model = tiny.batch(), dataclasses.replace(tiny.model)
    for shape, length in (((1, 1, 1), 8), ((2, 4, 1), 24), ((1, 2, 4), 12)):
        parts = tiny.parts(shape)
        with jax.set_mesh(parts.mesh):
            jaxpr = jax.make_jaxpr(lambda p, b, g=parts.graphdef: next_token().nll(nnx.merge(g, p), b))(
                parts.abstract.params, batch
            )
        assert f"f32[{tiny.rows},{length},{model.vocab_size}]" in str(jaxpr), shape
        assert length == tiny.length or f"f32[{tiny.rows},{tiny.length},{model.vocab_size}]" not in str(jaxpr)
