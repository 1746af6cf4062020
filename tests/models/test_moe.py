"""The block of experts: kernels, meshes and splits agree; padding and noise; what it records."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxtrain.config.schema import (
    LatentConfig,
    MeshConfig,
    ModelConfig,
    MoeConfig,
    PrecisionConfig,
    RegularizationConfig,
    RoutingConfig,
)
from maxtrain.inference.complete import generate
from maxtrain.models.context import TrainNoise
from maxtrain.models.cost import product_weights, token_flops
from maxtrain.models.moe import LoadBalanceUpdate, load_numbers
from maxtrain.models.registry import build_model
from maxtrain.models.specs import MlpSpec, MoeSpec
from maxtrain.models.summary import Summary, summarise
from maxtrain.objectives.next_token import next_token
from maxtrain.objectives.objective import POLICY
from maxtrain.ops.quantity import Metric
from maxtrain.parallel.mesh import make_mesh
from maxtrain.train_step.step import gradients

EXACT = PrecisionConfig(compute="float32")
B, T, V = 8, 24, 61
SHARED = {"family": "qwen2_moe", "moe": MoeConfig(6, 2, expert_dim=24, shared_dim=16)}


def tiny(**changes):
    values = {
        "family": "qwen3_moe",
        "vocab_size": V,
        "num_layers": 2,
        "embed_dim": 16,
        "mlp_dim": 32,
        "num_heads": 4,
        "num_kv_heads": 2,
        "moe": MoeConfig(6, 2, expert_dim=24),
        "routing": RoutingConfig(z_loss=0.01),
    }
    return ModelConfig(**values | changes)


@functools.cache
def batch_of(seed=0):
    """Packed rows with padding at their ends."""
    rng = np.random.default_rng(seed)
    segments = np.sort(rng.integers(1, 4, (B, T)), axis=1)
    segments[:, 20:] *= rng.random((B, 1)) < 0.5
    starts = np.diff(segments, axis=1, prepend=0) != 0
    begin = np.maximum.accumulate(np.where(starts, np.arange(T), 0), axis=1)
    batch = {
        "inputs": rng.integers(0, V, (B, T)),
        "targets": rng.integers(0, V, (B, T)),
        "segment_ids": segments,
        "positions": np.arange(T) - begin,
        "loss_mask": segments > 0,
        "source": np.zeros(B),
    }
    return {name: jnp.asarray(x, jnp.int32) for name, x in batch.items()}


def grads_of(config, accumulation=1, mesh=None, batch=None):
    """Loss terms, observations and gradients by path, of a model with the same weights always."""
    batch = batch_of() if batch is None else batch
    objective = next_token()
    axes = mesh or {"fsdp": 1}
    count = int(np.prod(list(axes.values())))
    with jax.set_mesh(make_mesh(MeshConfig(**axes), jax.devices()[:count])):
        model = build_model(config, EXACT, jax.random.key(0))
        graphdef, params = nnx.split(model)

        @jax.jit
        def run(params, batch):
            def models(params):
                return {"policy": nnx.merge(graphdef, params)}

            scales = objective.scales(batch)
            return gradients(models, params, batch, objective, scales, accumulation)

        result, grads = run(params, batch)
    flat = {".".join(map(str, path)): np.asarray(x[...]) for path, x in nnx.to_flat_state(grads)}
    return result, flat


def assert_same_gradients(one, other, tolerance=2e-5):
    assert one.keys() == other.keys()
    for path, grad in one.items():
        largest = np.abs(grad).max()
        assert largest > 0, path
        np.testing.assert_allclose(
            other[path], grad, rtol=0, atol=tolerance * largest, err_msg=path
        )


@pytest.mark.long
@pytest.mark.parametrize("kernel", ["blocks", "ragged"])
@pytest.mark.parametrize("changes", [{}, SHARED], ids=["qwen3_moe", "qwen2_moe"])
def test_fast_kernels_equal_the_oracle(kernel, changes):
    slow, wanted = grads_of(tiny(routing=RoutingConfig(kernel="eager", z_loss=0.01), **changes))
    fast, found = grads_of(tiny(routing=RoutingConfig(kernel=kernel, z_loss=0.01), **changes))
    np.testing.assert_allclose(fast.loss, slow.loss, rtol=1e-6)
    assert_same_gradients(wanted, found)
    for path, counts in slow.buffer_inputs.items():
        np.testing.assert_array_equal(fast.buffer_inputs[path], counts)


@pytest.mark.every_dose
@pytest.mark.long
def test_a_step_records_the_part_of_choices_that_was_dropped():
    """Each of two experts that all tokens go to takes half a row: 4 of 8 tokens are too many, and 4
    with padding behind them are not."""
    config = tiny(
        num_layers=1,
        vocab_size=8,
        moe=MoeConfig(2, 2, expert_dim=8),
        routing=RoutingConfig(capacity_factor=0.5),
    )
    ones = np.ones((2, 8), np.int32)
    segments = np.array([[1] * 8, [1] * 4 + [0] * 4], np.int32)
    positions = np.broadcast_to(np.arange(8, dtype=np.int32), ones.shape)
    batch = {"inputs": ones, "targets": ones, "segment_ids": segments, "positions": positions}
    batch |= {"loss_mask": np.float32(segments), "source": np.zeros(2, np.int32)}
    model = jax.jit(lambda: build_model(config, EXACT, 0))()
    objective = next_token()

    @jax.jit
    def run(batch):
        return objective.forward({POLICY: model}, batch, objective.scales(batch)).of_layers

    # What a step records is all that is named here, from what the whole batch adds up to.
    assert "expert_dropped" in [quantity.name for quantity in model.quantities()]
    assert float(run(batch)["expert_dropped"].mean()) == pytest.approx(8 / 24)


@pytest.mark.long
@pytest.mark.parametrize(
    "factor",
    [
        pytest.param(0.7, marks=pytest.mark.long),
        1.5,
        pytest.param(100.0, marks=pytest.mark.long),
    ],
)
def test_with_a_capacity_the_kernel_equals_the_oracle(factor):
    routing = RoutingConfig(kernel="eager", capacity_factor=factor)
    slow, wanted = grads_of(tiny(routing=routing))
    fast, found = grads_of(tiny(routing=dataclasses.replace(routing, kernel="blocks")))
    np.testing.assert_allclose(fast.loss, slow.loss, rtol=1e-6)
    assert_same_gradients(wanted, found)
    share = fast.of_layers["expert_dropped"].mean()
    if factor == 100.0:
        assert share == 0
        whole, without = grads_of(tiny(routing=RoutingConfig()))
        np.testing.assert_allclose(fast.loss, whole.loss, rtol=1e-6)
        assert_same_gradients(without, found)
    else:
        assert 0.01 < share < 0.5


@pytest.mark.long
@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param({"fsdp": 8}, marks=pytest.mark.slow),
        pytest.param({"data": 2, "fsdp": 2, "tensor": 2}, marks=pytest.mark.long),
        {"fsdp": 4, "tensor": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"routing": RoutingConfig(capacity_factor=1.0)}, marks=pytest.mark.long),
        pytest.param({"routing": RoutingConfig(kernel="ragged")}, marks=pytest.mark.slow),
    ],
    ids=["dropless", "capacity", "ragged"],
)
def test_the_same_on_any_mesh(mesh, changes):
    one, wanted = grads_of(tiny(**SHARED | changes))
    many, found = grads_of(tiny(**SHARED | changes), mesh=mesh)
    np.testing.assert_allclose(many.loss, one.loss, rtol=1e-5)
    assert_same_gradients(wanted, found)
    for name, said in one.of_layers.items():
        np.testing.assert_allclose(many.of_layers[name].total, said.total, rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("accumulation", [pytest.param(2, marks=pytest.mark.long), 4])
def test_the_same_however_a_batch_is_split(accumulation):
    routing = RoutingConfig(balance=0.5, z_loss=0.1, capacity_factor=1.2)
    one, wanted = grads_of(tiny(routing=routing))
    split, found = grads_of(tiny(routing=routing), accumulation)
    np.testing.assert_allclose(split.loss, one.loss, rtol=1e-6)
    assert_same_gradients(wanted, found, 5e-6)
    for path, counts in one.buffer_inputs.items():
        np.testing.assert_array_equal(split.buffer_inputs[path], counts)


BALANCED = {
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
    "moe": MoeConfig(4, 2, expert_dim=8),
}


@functools.cache
def balanced_grads(scope, accumulation, axes=()):
    routing = RoutingConfig(balance=2.0, balance_scope=scope)
    return grads_of(tiny(**BALANCED, routing=routing), accumulation, dict(axes))


@pytest.mark.long
@pytest.mark.parametrize(("scope", "whole"), [("global", 1), ("micro_batch", 2)])
def test_shares_over_several_rows_are_the_same_on_a_mesh(scope, whole):
    """With two micro-batches on 2 x 2 devices, shares of the whole step are as with one
    micro-batch, and those of a micro-batch are not."""
    one, wanted = balanced_grads(scope, whole)
    many, found = balanced_grads(scope, 2, (("data", 2), ("fsdp", 2)))
    np.testing.assert_allclose(many.loss, one.loss, rtol=1e-5)
    assert_same_gradients(wanted, found, 1e-5)
    term = "expert_balance_loss"
    np.testing.assert_allclose(many.of_layers[term].total, one.of_layers[term].total, rtol=1e-5)
    np.testing.assert_array_equal(*(run.buffer_inputs["layers.0.mlp.load"] for run in (one, many)))


@pytest.mark.long
def test_a_micro_batch_is_not_the_whole_step():
    whole, _ = balanced_grads("global", 1)
    parts, _ = balanced_grads("micro_batch", 2)
    assert abs(parts.loss - whole.loss) > 1e-4


@pytest.mark.long
@pytest.mark.parametrize("scan", [True, False])
def test_shares_over_a_step_of_layers_that_are_not_alike(scan):
    """DeepSeek's, of which the first has no experts, in four micro-batches, with recomputation."""
    latent = LatentConfig(query_rank=None, kv_rank=8, rope_dim=4, value_dim=8)
    config = tiny(
        family="deepseek_v3",
        num_layers=3,
        num_kv_heads=4,
        head_dim=12,
        latent=latent,
        moe=MoeConfig(4, 2, expert_dim=8, dense_layers=1),
        routing=RoutingConfig(balance=2.0, balance_scope="global"),
        scan_layers=scan,
        remat="full",
    )
    one, wanted = grads_of(config)
    split, found = grads_of(config, 4)
    np.testing.assert_allclose(split.loss, one.loss, rtol=1e-5)
    assert wanted.pop("layers.0.mlp.correction").sum() == found.pop("layers.0.mlp.correction").sum()
    assert_same_gradients(wanted, found, 1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    "remat", ["full", "dots", pytest.param("dots_no_batch", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("scan", [True, False])
def test_the_same_scanned_unrolled_and_recomputed(remat, scan):
    _, wanted = grads_of(tiny())
    _, found = grads_of(tiny(remat=remat, scan_layers=scan))
    assert_same_gradients(wanted, found, 5e-6)


@pytest.mark.long
def test_padding_goes_to_no_expert_and_changes_nothing():
    config = tiny(routing=RoutingConfig(balance=0.5, z_loss=0.1))
    one, wanted = grads_of(config)
    batch = dict(batch_of())
    is_padding = batch["segment_ids"] == 0
    assert is_padding.any()
    batch["inputs"] = jnp.where(is_padding, (batch["inputs"] + 7) % V, batch["inputs"])
    other, found = grads_of(config, batch=batch)
    np.testing.assert_array_equal(other.loss, one.loss)
    assert_same_gradients(wanted, found, 1e-6)
    (load,) = one.buffer_inputs.values()
    assert (load.sum(-1) == 2 * (~is_padding).sum()).all()


@pytest.mark.long
def test_packed_documents_are_as_if_each_were_alone():
    model = build_model(tiny(**SHARED), EXACT, jax.random.key(0))
    batch = batch_of()
    packed = model(batch["inputs"], batch["segment_ids"], batch["positions"])
    for row in range(3):
        segments = np.asarray(batch["segment_ids"][row])
        for document in set(segments) - {0}:
            where = segments == document
            alone = model(batch["inputs"][row][where][None])
            np.testing.assert_allclose(packed[row][where], alone[0], rtol=0, atol=2e-5)


@pytest.mark.long
@pytest.mark.parametrize("factor", [pytest.param(None, marks=pytest.mark.long), 0.5])
def test_generation_drops_nothing(factor):
    """With a capacity, each token gets the same as without, independent of the texts generated
    beside it."""
    model = build_model(
        tiny(routing=RoutingConfig(capacity_factor=factor)), EXACT, jax.random.key(0)
    )
    free = build_model(tiny(), EXACT, jax.random.key(0))
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12]]
    texts = generate(model, prompts, max_tokens=6, temperature=0)
    for prompt, text in zip(prompts, texts, strict=True):
        tokens = list(prompt)
        for _ in range(6):
            logits = free(jnp.asarray([tokens]))
            tokens.append(int(logits[0, -1].argmax()))
        assert list(text)[-6:] == tokens[-6:]


def noisy(config, left=1.0, **changes):
    regularization = RegularizationConfig(**changes)
    model = build_model(config, EXACT, jax.random.key(0))
    keys = jax.random.split(jax.random.key(3), B)
    noise = TrainNoise(regularization, keys, router_noise=jnp.full(B, left))
    batch = batch_of()
    return model.hidden(batch["inputs"], batch["segment_ids"], batch["positions"], None, noise)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["jitter", "gaussian", "gumbel"])
def test_noise_changes_who_is_chosen_until_none_is_left(kind):
    without = noisy(tiny())
    changes = {"router_noise": kind, "router_noise_scale": 0.5}
    assert np.abs(np.asarray(noisy(tiny(), **changes) - without)).max() > 1e-3
    np.testing.assert_array_equal(noisy(tiny(), left=0.0, **changes), without)


@pytest.mark.long
def test_a_batch_says_how_much_noise_is_left():
    """It falls in a straight line, and stays 0."""
    objective = next_token(
        regularization=RegularizationConfig(
            router_noise="gaussian", router_noise_scale=0.5, router_noise_steps=100
        )
    )
    model = build_model(tiny(), EXACT, jax.random.key(0))
    keys = jax.random.split(jax.random.key(3), B)

    def loss(step):
        batch = batch_of() | {"keys": keys, "steps": jnp.full(B, step, jnp.int32)}
        return float(objective.forward({"policy": model}, batch, objective.scales(batch)).loss)

    evaluated = objective.evaluate({"policy": model}, batch_of() | {"keys": keys})
    still = next_token().evaluate({"policy": model}, batch_of())
    np.testing.assert_array_equal(evaluated["nll"].total, still["nll"].total)
    batch = batch_of()
    plain = next_token().forward({"policy": model}, batch, next_token().scales(batch))
    assert loss(0) != float(plain.loss)
    assert loss(50) not in (loss(0), float(plain.loss))
    assert loss(100) == loss(10_000) == float(plain.loss)


def test_a_step_evens_shares_out_by_one_rate():
    after = LoadBalanceUpdate(0.25)(jnp.zeros(4), jnp.asarray([10, 0, 5, 5]))
    np.testing.assert_array_equal(after, [-0.25, 0.25, 0, 0])


def test_loads_are_those_of_the_whole_batch():
    most, entropy, dead = load_numbers(jnp.asarray([[4, 4, 4, 4], [8, 8, 0, 0]]))
    assert float(most) == 2.0
    np.testing.assert_allclose(entropy, (1 + 0.5) / 2, rtol=1e-6)
    assert float(dead) == 2.0
    assert all(np.isfinite(load_numbers(jnp.zeros((2, 1), jnp.int32))))


def test_what_layers_observe_is_one_number_or_a_buffers():
    sums = Summary("load", 1, (Metric("all", "tokens"), Metric("layers", "layers")), _sums)
    observed = {
        "layers.prefix_0.mlp.load": jnp.asarray([1, 2]),
        "layers.0.mlp.load": jnp.asarray([[3, 4], [5, 6]]),
        "layers.0.mlp.correction": jnp.asarray([[3, 4], [5, 6]]),
    }
    found = summarise([sums], observed)
    assert {name: int(value) for name, value in found.numbers.items()} == {"all": 21, "layers": 3}
    assert list(found.of_buffers) == ["layers.0.mlp.correction"]


def _sums(of_layers):
    return of_layers.sum(), jnp.asarray(len(of_layers))


@pytest.mark.long
def test_flops_are_those_of_the_experts_that_a_token_goes_to():
    config = tiny(num_layers=1)
    weights = 16 * V + 16 * 4 * (4 + 2 + 2) + 4 * 4 * 16 + 3 * 2 * 16 * 24 + 16 * 6
    square = 2 * 4 * 4 * 10
    assert token_flops(config, 10).full == 6 * (weights + square)
    params = nnx.state(build_model(config, EXACT, jax.random.key(0)))
    assert product_weights(params, config) == weights


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_experts": 0}, "num_experts=0 must be at least 1"),
        ({"num_choices": 9}, "num_choices=9 must be at most 8"),
        ({"num_groups": 3}, "num_groups=3 must divide num_experts=8"),
        ({"num_groups": 4, "top_groups": 5}, "at least top_groups=5"),
        ({"num_groups": 4, "num_choices": 3}, "num_choices=3 must be at most 2"),
        ({"num_groups": 4, "best_of_group": 3}, "best_of_group=3 must be at most 2"),
    ],
)
def test_numbers_of_experts_that_do_not_fit_are_refused(changes, told):
    with pytest.raises(ValueError, match=told):
        MoeSpec(**{"num_experts": 8, "num_choices": 2, "width": 4} | changes)
    with pytest.raises(ValueError, match="Set gated=True"):
        MlpSpec(4, "clamped_swiglu", gated=False)
