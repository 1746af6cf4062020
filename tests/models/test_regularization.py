"""Regularisation in the whole model: against what the equations say, the same masks however it
runs, off outside training."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from data_pipeline.base.errors import ConfigError
from maxtrain.config.schema import (
    LoraConfig,
    MeshConfig,
    ModelConfig,
    PrecisionConfig,
    RegularizationConfig,
)
from maxtrain.models.adapt import split_adapters
from maxtrain.models.context import TrainNoise
from maxtrain.models.registry import build_model
from maxtrain.objectives.next_token import next_token
from maxtrain.objectives.objective import POLICY
from maxtrain.ops.attention import Dropout, attention
from maxtrain.ops.attention.eager import eager_attention
from maxtrain.ops.attention.mask import Mask
from maxtrain.parallel.mesh import make_mesh
from maxtrain.parallel.sharding import named_sharding
from maxtrain.train_step.evaluate import make_eval_step
from maxtrain.train_step.step import gradients, row_keys
from maxtrain.train_step.trainable import models_from

EXACT = PrecisionConfig(params="float32", compute="float32")
MODEL = ModelConfig(
    vocab_size=96,
    num_layers=3,
    embed_dim=32,
    mlp_dim=56,
    num_heads=8,
    num_kv_heads=4,
    head_dim=6,
    attention="eager",
    max_length=64,
)
ALL = RegularizationConfig(
    attention_dropout=0.1,
    residual_dropout=0.2,
    embedding_dropout=0.1,
    stochastic_depth=0.3,
    embedding_noise=5.0,
)
# Routers' noise has its tests in test_moe.py, where there are routers.
EACH = [
    RegularizationConfig(**{field.name: getattr(ALL, field.name)})
    for field in dataclasses.fields(ALL)
    if not field.name.startswith("router_noise")
]
NO_LORA = LoraConfig()
B, T = 8, 12


@functools.cache
def weights(lora=NO_LORA):
    """The weights of the model; the initial adapters are not 0."""
    state = nnx.state(build_model(dataclasses.replace(MODEL, lora=lora), EXACT, 0))
    rng = np.random.default_rng(1)
    others, adapters = split_adapters(state)
    drawn = jax.tree.map(lambda x: jnp.float32(0.3 * rng.standard_normal(x.shape)), adapters)
    return nnx.merge_state(others, drawn)


def batch():
    tokens = np.random.default_rng(0).integers(0, 96, (2, B, T)).astype(np.int32)
    ones = np.ones((B, T), np.int32)
    return {
        "inputs": tokens[0],
        "targets": tokens[1],
        "segment_ids": ones,
        "positions": np.tile(np.arange(T, dtype=np.int32), (B, 1)),
        "loss_mask": np.float32(ones),
    }


def keys(step=4):
    return {"keys": row_keys(7, jnp.int32(step), B)}


@functools.cache
def compiled(regularization, accumulation, **model):
    """(loss, gradients) of parameters, the batch, and a step."""
    graphdef = nnx.split(
        nnx.eval_shape(lambda: build_model(dataclasses.replace(MODEL, **model), EXACT))
    )[0]
    objective = next_token(regularization=regularization)

    @jax.jit
    def forward(params, arrays, step):
        arrays = arrays | keys(step)
        result, grads = gradients(
            models_from({"policy": graphdef}),
            params,
            arrays,
            objective,
            objective.scales(arrays),
            accumulation,
        )
        return result.loss, grads

    return forward


def run(regularization=ALL, accumulation=1, step=4, mesh=(1, 1, 1), **model):
    """(loss, gradients) of the batch of a step."""
    forward = compiled(regularization, accumulation, **model)
    devices = make_mesh(MeshConfig(*mesh), jax.devices()[: np.prod(mesh)])
    rows = named_sharding(devices, ("activation_batch", "activation_length"))
    params = jax.tree.map(np.asarray, weights(model.get("lora", NO_LORA)))
    arrays = jax.device_put(batch(), rows)
    with jax.set_mesh(devices):
        return jax.tree.map(np.asarray, forward(params, arrays, np.int32(step)))


@functools.cache
def plain(regularization=ALL):
    return run(regularization)


def assert_same(one, other):
    """Another mask anywhere would show in the third digit."""
    np.testing.assert_allclose(one[0], other[0], rtol=1e-5)
    for a, b in zip(*map(jax.tree.leaves, (one[1], other[1])), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(b).max(), rtol=0)


@pytest.mark.long
@pytest.mark.parametrize(
    "regularization", EACH, ids=lambda r: next(k for k, v in vars(r).items() if v)
)
def test_each_key_does_something_that_follows_the_keys_of_rows(regularization):
    loss = plain(regularization)[0]
    assert abs(loss - plain(RegularizationConfig())[0]) > 1e-4
    assert abs(loss - run(regularization, step=5)[0]) > 1e-4


@pytest.mark.long
def test_masks_are_the_same_scanned_or_unrolled_and_recomputed():
    assert_same(run(scan_layers=False), plain())
    assert_same(run(remat="full"), plain())


@pytest.mark.long
def test_masks_are_the_same_on_every_mesh_and_for_every_split_into_micro_batches():
    assert_same(run(accumulation=4), plain())
    assert_same(run(accumulation=2, mesh=(2, 1, 4)), plain())


@pytest.mark.long
def test_dropout_of_adapters_follows_the_keys_of_rows_too():
    """However it runs; and in evaluation there is none."""
    lora = LoraConfig(rank=2, alpha=2.0, dropout=0.3)
    none = RegularizationConfig()
    expected = run(none, lora=lora)
    without = run(none, lora=dataclasses.replace(lora, dropout=0.0))
    assert abs(expected[0] - without[0]) > 1e-4
    assert abs(expected[0] - run(none, lora=lora, step=5)[0]) > 1e-4
    split = {"accumulation": 2, "mesh": (2, 1, 4)}
    assert_same(run(none, **split, lora=lora, scan_layers=False, remat="full"), expected)
    model = dataclasses.replace(MODEL, lora=lora)
    graphdef = nnx.split(nnx.eval_shape(lambda: build_model(model, EXACT)))[0]
    nll = make_eval_step({POLICY: graphdef}, next_token())
    evaluated = nll({POLICY: weights(lora)}, batch() | keys())["nll"]
    assert float(evaluated.mean()) == pytest.approx(float(without[0]), rel=1e-6)


@pytest.mark.long
def test_evaluation_draws_nothing_even_where_there_are_keys():
    graphdef = nnx.split(nnx.eval_shape(lambda: build_model(MODEL, EXACT)))[0]
    step = make_eval_step({POLICY: graphdef}, next_token(regularization=ALL))
    for given in ({}, keys()):
        nll = step({POLICY: weights()}, batch() | given)["nll"]
        assert float(nll.mean()) == pytest.approx(float(plain(RegularizationConfig())[0]), rel=1e-6)


@pytest.mark.long
def test_noise_of_embeddings_in_fine_tuning_is_what_is_added_to_them():
    """Rows of several conversations with padding, of which answers alone are targets: loss and
    gradients are those without noise, of embeddings that it was added to by hand."""
    noisy = RegularizationConfig(embedding_noise=5.0)
    arrays = batch()
    arrays["segment_ids"] = np.repeat([[1, 2, 3, 0]], 3, axis=1).repeat(B, axis=0).astype(np.int32)
    answers = np.tile(np.arange(T) % 4 > 1, (B, 1))
    arrays["loss_mask"] = np.float32(answers & (arrays["segment_ids"] > 0))
    added = TrainNoise(noisy, keys()["keys"]).embedded(jnp.zeros((B, T, MODEL.embed_dim)))
    bound = 5.0 / (T * MODEL.embed_dim) ** 0.5
    assert 0.9 * bound < np.abs(added).max() <= bound * 1.0001
    graphdef = nnx.split(nnx.eval_shape(lambda: build_model(MODEL, EXACT)))[0]

    def loss(params, regularization, arrays):
        objective = next_token(regularization=regularization)
        scales = objective.scales(arrays)
        return objective.forward({POLICY: nnx.merge(graphdef, params)}, arrays, scales).loss

    value = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    off = RegularizationConfig()
    by_hand = value(weights(), off, arrays | {"embedding_offset": added})
    assert_same(value(weights(), noisy, arrays | keys()), by_hand)
    assert abs(by_hand[0] - value(weights(), off, arrays)[0]) > 1e-4


@pytest.mark.long
@pytest.mark.every_dose
def test_nothing_random_is_compiled_where_all_rates_are_zero():
    def program(regularization):
        objective = next_token(regularization=regularization)
        graphdef = nnx.split(nnx.eval_shape(lambda: build_model(MODEL, EXACT)))[0]
        return str(
            jax.make_jaxpr(
                lambda p, b: (
                    objective.forward({POLICY: nnx.merge(graphdef, p)}, b, {"nll": 1.0}).loss
                )
            )(weights(), batch() | keys())
        )

    assert "random_bits" in program(ALL) and "random_" not in program(RegularizationConfig())


@pytest.mark.long
def test_stochastic_depth_leaves_out_later_blocks_more_often():
    """A share of 0.4 (i + 1) / 4 of 2,000 rows skips each block of layer i of 4, and not the same
    rows in both."""
    noise, x = (
        TrainNoise(
            RegularizationConfig(stochastic_depth=0.4), jax.random.split(jax.random.key(0), 2000)
        ),
        jnp.ones((2000, 1, 2)),
    )
    for index in range(4):
        layer = noise.layer(jnp.int32(index), 4)
        out = [np.asarray(layer.added(x, block))[:, 0, 0] == 0 for block in (0, 1)]
        assert (
            all(abs(dropped.mean() - 0.1 * (index + 1)) < 0.055 for dropped in out)
            and (out[0] != out[1]).any()
        )


def _gradients_of_dropped(q, k, v, rows, weights, kept):
    """Return the gradients of a sum of outputs times g with respect to queries, keys and values,
    one after another: jax's, and by hand in float64."""
    g = np.random.default_rng(1).standard_normal((B, T, 4, T))
    mask = Mask.of_rows(jnp.ones((B, T), jnp.int32))
    group = 2  # query heads of a key head

    def total(q, k, v):
        rate = Dropout(rows, 0.25)
        out = eager_attention(q, k, v, mask, dtype="float32", scale=T**-0.5, dropout=rate)
        return (out * jnp.float32(g)).sum()

    ours = jax.grad(total, (0, 1, 2))(q, k, v)
    q64, (k64, v64) = np.float64(q), (np.repeat(np.float64(x), group, axis=2) for x in (k, v))
    p = weights.transpose(0, 2, 1, 3).astype(
        np.float64
    )  # [B, N, T, S], as the values were the identity
    factor = kept.transpose(0, 2, 1, 3) / 0.75
    dv = np.einsum("bnts,btnh->bsnh", p * factor, g)
    dp = np.einsum("btnh,bsnh->bnts", g, v64) * factor
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) / T**0.5
    dq, dk = np.einsum("bnts,bsnh->btnh", ds, k64), np.einsum("bnts,btnh->bsnh", ds, q64)
    dk, dv = (x.reshape(B, T, -1, group, T).sum(3) for x in (dk, dv))
    return tuple(np.concatenate([np.ravel(x) for x in these]) for these in (ours, (dq, dk, dv)))


@pytest.mark.long
def test_dropped_attention_weights_are_zero_and_the_others_larger():
    """Values that are the identity show the weights."""
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.standard_normal((B, T, n, T)), jnp.float32) for n in (4, 2))
    v = jnp.broadcast_to(jnp.eye(T)[None, :, None], (B, T, 2, T))
    mask = Mask.of_rows(jnp.ones((B, T), jnp.int32))
    rows = jax.random.split(jax.random.key(0), B)
    weights, dropped = (
        np.asarray(eager_attention(q, k, v, mask, dtype="float32", scale=T**-0.5, dropout=d))
        for d in (None, Dropout(rows, 0.25))
    )
    kept = dropped > 0
    np.testing.assert_allclose(dropped[kept], weights[kept] / 0.75, rtol=1e-5)
    assert abs(kept[weights > 0].mean() - 0.75) < 5 * (0.25 * 0.75 / (weights > 0).sum()) ** 0.5
    np.testing.assert_allclose(*_gradients_of_dropped(q, k, v, rows, weights, kept), atol=2e-5)
    with pytest.raises(ConfigError, match=r"Set model\.attention=eager"):
        attention(q, k, v, mask, kernel="xla", dtype="float32", dropout=Dropout(rows, 0.25))
