"""FLOPs of a token: against a count by hand, and against the products that a traced training step
really has."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from maxtrain.config.schema import ModelConfig, PrecisionConfig
from maxtrain.models.cost import product_weights, sequence_cost, token_flops
from maxtrain.models.registry import build_model
from maxtrain.ops.cross_entropy import CrossEntropyStaticArgs, plain_cross_entropy

LLAMA = ModelConfig(
    vocab_size=96,
    num_layers=2,
    embed_dim=32,
    mlp_dim=56,
    num_heads=8,
    num_kv_heads=4,
    head_dim=6,
    max_length=64,
)
LLAMA3_8B = ModelConfig(
    vocab_size=128_256, num_layers=32, embed_dim=4096, mlp_dim=14_336, num_heads=32, num_kv_heads=8
)


def test_a_small_model_by_hand():
    """Multiply-adds of one token in a row of 10: q and o 32 x 48 each, k and v 32 x 24 each, three
    of 32 x 56, 96 logits."""
    layer = 2 * 32 * 48 + 2 * 32 * 24 + 3 * 32 * 56
    scores_and_values = 2 * 48 * 10
    full, causal = token_flops(LLAMA, 10)
    assert full == 6 * (2 * (layer + scores_and_values) + 32 * 96)
    # Position t of 10 sees t + 1 keys: 5.5 on average.
    assert causal == 6 * (2 * (layer + 2 * 48 * 5.5) + 32 * 96)


def test_llama3_8b_by_hand():
    """8.03 billion parameters, of which the embedding table is only looked up, as norms hardly
    count; about 6 of each."""
    full, causal = token_flops(LLAMA3_8B, 8192)
    products = 8_030_261_248 - 128_256 * 4096 - (2 * 32 + 1) * 4096
    assert full == 6 * products + 12 * 32 * 4096 * 8192
    assert causal == pytest.approx(6 * products + 6 * 32 * 4096 * 8192, rel=1e-4)


def test_frozen_weights_have_no_gradient_of_their_own():
    """A third of the FLOPs of each; those of scores and of what trains stay."""
    config = dataclasses.replace(LLAMA, tie_embeddings=False)
    model = nnx.eval_shape(lambda: build_model(config, PrecisionConfig()))
    params = nnx.state(model)
    frozen = product_weights(params, config)
    full, causal = token_flops(config, 10)
    some, of_causal = token_flops(config, 10, frozen)
    scores = 6 * 2 * (2 * 48 * 10)
    assert full - some == causal - of_causal == 2 * frozen
    assert frozen == (full - scores) / 6
    tied = dataclasses.replace(config, tie_embeddings=True)
    assert product_weights(params, tied) == frozen + 96 * 32, "the embedding is the head"


def test_tying_the_head_changes_no_product():
    assert token_flops(dataclasses.replace(LLAMA, tie_embeddings=True), 10) == token_flops(
        LLAMA, 10
    )


@pytest.mark.long
@pytest.mark.parametrize("heads, kv_heads", [(8, 4), (8, 8)])
def test_full_counts_every_product_of_a_traced_step(heads, kv_heads):
    """The eager kernel computes the whole square; attention's products are shared by query heads of
    one group."""
    B, T = 2, 10
    config = dataclasses.replace(
        LLAMA, num_heads=heads, num_kv_heads=kv_heads, attention="eager", scan_layers=False
    )
    exact = PrecisionConfig(params="float32", compute="float32")
    graphdef, params = nnx.split(nnx.eval_shape(lambda: build_model(config, exact)))
    tokens = jax.ShapeDtypeStruct((B, T), jnp.int32)

    form = CrossEntropyStaticArgs(chunks=1, dtype="float32", logits="float32", smoothing=0.0)

    def loss(params, inputs, targets):
        model = nnx.merge(graphdef, params)
        weights = jnp.ones((B, T), jnp.float32)
        return plain_cross_entropy(
            model.hidden(inputs), model.output_matrix(), targets, weights, weights, None, form
        ).loss

    forward = flops(jax.make_jaxpr(loss)(params, tokens, tokens).jaxpr)
    both = flops(jax.make_jaxpr(jax.grad(loss))(params, tokens, tokens).jaxpr)
    assert both == B * T * token_flops(config, T).full and both == 3 * forward


def flops(jaxpr):
    """Return the FLOP of all matrix products in a jaxpr; a multiply-add is two."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            length = math.prod(equation.invars[0].aval.shape[dim] for dim in contracted)
            total += 2 * length * equation.outvars[0].aval.size
        inner_jaxprs = (
            getattr(value, "jaxpr", value)
            for value in jax.tree.leaves(equation.params, is_leaf=is_jaxpr)
        )
        total += sum(flops(value) for value in inner_jaxprs if hasattr(value, "eqns"))
    return total


def is_jaxpr(value):
    return hasattr(value, "eqns")


def test_the_cost_of_a_sequence_is_that_of_its_tokens():
    config = ModelConfig(
        vocab_size=1000, num_layers=3, embed_dim=64, mlp_dim=96, num_heads=4, num_kv_heads=2
    )
    a, b = sequence_cost(config)
    for length in (1, 7, 4096):
        assert a * length + b * length**2 == pytest.approx(
            length * token_flops(config, length).causal
        )
    assert b == 3 * 3 * 2 * 4 * 16, (
        "forward and backward, L layers, scores and values, N heads of H"
    )
