"""Adapters: nothing at first, then what the weights with their changes would do, in every
family."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from data_pipeline.base.errors import ConfigError
from maxtrain.config.schema import (
    InitConfig,
    LoraConfig,
    MeshConfig,
    ModelConfig,
    PrecisionConfig,
    RegularizationConfig,
    TrainConfig,
)
from maxtrain.inference.engine import Engine
from maxtrain.inference.sampling import Sampling
from maxtrain.models.adapt import split_adapters, with_magnitudes
from maxtrain.models.context import TrainNoise
from maxtrain.models.families.directory import read_config
from maxtrain.models.init import Initializer
from maxtrain.models.linear import Linear
from maxtrain.models.lora import Adapter, scale_of
from maxtrain.models.merged import merged
from maxtrain.models.registry import build_model
from maxtrain.ops.dot import MatmulPrecision
from maxtrain.parallel.mesh import make_mesh
from maxtrain.train_step.optimizer import paths
from maxtrain.train_step.state import abstract_model, shardings
from maxtrain.train_step.trainable import frozen_paths, split

PARITY = Path(__file__).parents[1] / "data" / "parity"
EXACT = PrecisionConfig(compute="float32")
TINY = ModelConfig(
    vocab_size=64, num_layers=2, embed_dim=32, mlp_dim=48, num_heads=4, num_kv_heads=2
)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 12)), jnp.int32)


def with_lora(config=TINY, **options):
    return dataclasses.replace(config, lora=LoraConfig(**{"rank": 3, "alpha": 6.0, **options}))


@functools.cache
def case_config(case):
    return read_config(PARITY / case)


def build(config, seed=0):
    return jax.jit(lambda: build_model(config, EXACT, seed))()


def busy(model, seed=1):
    """The model with random numbers in what adapters begin with."""
    graphdef, state = nnx.split(model)
    flat = dict(nnx.to_flat_state(state))
    rng = np.random.default_rng(seed)
    for path, variable in flat.items():
        value = variable.get_value()
        if path[-1] == "b" and path[-2] == "adapter":
            new = 0.3 * rng.standard_normal(value.shape)
            flat[path] = variable.replace(jnp.asarray(new, value.dtype))
        if path[-1] == "magnitude":
            flat[path] = variable.replace(value * rng.uniform(0.5, 1.5, value.shape))
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


@nnx.jit
def logits(model, tokens):
    return model(tokens)


FAMILIES = [
    *(pytest.param(case, marks=pytest.mark.long) for case in ("llama3", "qwen2")),
    *(
        pytest.param(case, marks=pytest.mark.slow)
        for case in ("deepseek_v3", "qwen3_moe", "gpt_oss", "gemma3")
    ),
]


@pytest.mark.parametrize("magnitudes", [True, False])
@pytest.mark.parametrize("case", FAMILIES)
def test_the_model_is_that_of_the_changed_weights(case, magnitudes):
    """Attention, dense blocks, experts, with biases and without; and with a cache, where latents
    are multiplied by the weights themselves."""
    config = dataclasses.replace(case_config(case), vocab_size=64)
    model = busy(build(with_lora(config, magnitudes=magnitudes)))
    plain = merged(model)
    assert not split_adapters(nnx.state(plain))[1]
    assert plain.config == dataclasses.replace(
        config, lora=dataclasses.replace(model.config.lora, rank=None)
    )
    expected = logits(plain, TOKENS)
    found = logits(model, TOKENS)
    np.testing.assert_allclose(found, expected, atol=2e-5 * float(jnp.abs(expected).max()))
    assert np.abs(np.asarray(found) - logits(build(config), TOKENS)).max() > 1e-2
    texts = []
    for one in (model, plain):
        engine = Engine(one, slots=1, chunk=4, piece=16)
        generation = engine.submit(list(range(20)), 8, Sampling(temperature=0.0))
        engine.run()
        texts.append((generation.ids, generation.logprobs))
    assert texts[0][0] == texts[1][0]
    np.testing.assert_allclose(texts[0][1], texts[1][1], atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("case", [None, pytest.param("qwen3_moe", marks=pytest.mark.long)])
def test_new_adapters_change_no_bit(case):
    config = TINY if case is None else dataclasses.replace(case_config(case), vocab_size=64)
    model = build(with_lora(config))
    plain = build(config)
    assert np.array_equal(logits(model, TOKENS), logits(plain, TOKENS))
    base, adapters = split_adapters(nnx.state(model))
    for ours, theirs in zip(jax.tree.leaves(base), jax.tree.leaves(nnx.state(plain)), strict=True):
        assert np.array_equal(ours, theirs)
    for path, variable in paths(adapters).items():
        assert variable.dtype == jnp.float32
        if path.endswith(".a") and case is None:
            bound = 1 / np.sqrt(np.prod(variable.shape[1:-1]))
            assert 0.9 * bound < np.abs(variable[...]).max() <= bound


@pytest.mark.long
def test_with_magnitudes_it_begins_as_without_to_rounding():
    model = build(with_lora(magnitudes=True))
    np.testing.assert_allclose(logits(model, TOKENS), logits(build(TINY), TOKENS), atol=1e-5)


@pytest.mark.long
def test_magnitudes_are_those_of_the_weights_beside_them():
    """The weights came from elsewhere and are not those with which the adapters were made."""
    graphdef, state = nnx.split(build(with_lora(magnitudes=True), seed=0))
    base, _ = split_adapters(nnx.state(build(with_lora(magnitudes=True), seed=5)))
    _, adapters = split_adapters(state)
    variables = nnx.merge_state(base, adapters)
    model = nnx.merge(graphdef, with_magnitudes(variables))
    np.testing.assert_allclose(
        logits(model, TOKENS), logits(build(TINY, seed=5), TOKENS), atol=1e-5
    )
    unlike = nnx.merge(graphdef, variables)
    assert np.abs(np.asarray(logits(unlike, TOKENS) - logits(model, TOKENS))).max() > 1e-3


def gradients_of(model):
    graphdef, state = nnx.split(model)

    @jax.jit
    def grads(state):
        def loss(state):
            out = nnx.merge(graphdef, state)(TOKENS)
            return jnp.square(out).mean()

        return jax.grad(loss)(state)

    return {path: np.asarray(v[...], np.float64) for path, v in paths(grads(state)).items()}


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [None, *(pytest.param(c, marks=pytest.mark.slow) for c in ("deepseek_v3", "mixtral"))],
)
def test_gradients_are_those_of_the_weights_by_the_chain_rule(case):
    """For W + s A B: dA = s dW B^T and dB = s A^T dW."""
    config = TINY if case is None else dataclasses.replace(case_config(case), vocab_size=64)
    model = busy(build(with_lora(config)))
    found = gradients_of(model)
    of_weights = gradients_of(merged(model))
    values = paths(nnx.state(model))
    seen = 0
    for path, variable in values.items():
        if not path.endswith("adapter.a"):
            continue
        seen += 1
        product = path.removesuffix(".adapter.a")
        a = np.asarray(variable[...], np.float64)
        b = np.asarray(values[f"{product}.adapter.b"][...], np.float64)
        rank = a.shape[-1]
        axes = variable.get_metadata("axes")
        stacked = b.shape[: a.ndim - len(axes) + axes.count("exp")]
        flat_a = a.reshape(*stacked, -1, rank)
        flat_b = b.reshape(*stacked, rank, -1)
        dw = of_weights[f"{product}.kernel"].reshape(*stacked, flat_a.shape[-2], flat_b.shape[-1])
        scale = scale_of(model.config.lora)
        expected = {
            "a": scale * dw @ flat_b.swapaxes(-1, -2),
            "b": scale * flat_a.swapaxes(-1, -2) @ dw,
        }
        for name, gradient in expected.items():
            ours = found[f"{product}.adapter.{name}"].reshape(gradient.shape)
            np.testing.assert_allclose(ours, gradient, atol=3e-5 * np.abs(gradient).max())
    assert seen >= 7


@pytest.mark.long
def test_lengths_are_constants_for_gradients():
    """The gradient of a magnitude is that of the product's direction, and A and B get none through
    the lengths: as of a product that is divided by numbers."""
    config = with_lora(dataclasses.replace(TINY, num_layers=1), magnitudes=True)
    config = dataclasses.replace(
        config, lora=dataclasses.replace(config.lora, targets=(r"mlp\.down",))
    )
    model = busy(build(config))
    found = gradients_of(model)
    of_weights = gradients_of(merged(model))["layers.0.mlp.down.kernel"][0]
    adapter = getattr(model.layers, "0").mlp.down.adapter
    kernel = np.asarray(paths(nnx.state(model))["layers.0.mlp.down.kernel"][...], np.float64)[0]
    a = np.asarray(adapter.a[...], np.float64)[0]
    b = np.asarray(adapter.b[...], np.float64)[0]
    m = np.asarray(adapter.magnitude[...], np.float64)[0]
    changed = kernel + 2.0 * a @ b
    lengths = np.sqrt((changed**2).sum(0))
    expected = {
        "a": 2.0 * (of_weights * m / lengths) @ b.T,
        "b": 2.0 * a.T @ (of_weights * m / lengths),
        "magnitude": (of_weights * changed / lengths).sum(0),
    }
    for name, gradient in expected.items():
        ours = found[f"layers.0.mlp.down.adapter.{name}"][0]
        np.testing.assert_allclose(ours, gradient, atol=3e-5 * np.abs(gradient).max())


def test_outputs_whose_weights_are_all_0_stay_0_and_finite():
    """Padded heads and units of released models are like that."""
    lora = LoraConfig(rank=2, magnitudes=True)
    kernel = jnp.asarray(np.random.default_rng(0).standard_normal((6, 4)), jnp.float32)
    kernel = kernel.at[:, 1].set(0)
    init = Initializer(InitConfig(), TINY, "float32")
    adapter = Adapter(kernel, ("embed", "mlp"), 1, lora, init, jax.random.key(0), 0)
    graphdef, state = nnx.split(adapter)
    x = jnp.ones((3, 6))

    def loss(state, kernel):
        adapter = nnx.merge(graphdef, state)
        out = adapter.added(x, x @ kernel, MatmulPrecision.of("float32"))
        out = adapter.scaled(out, kernel)
        return jnp.square(out - 1).sum(), (out, adapter.adapted(kernel))

    (_, outputs), gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(state, kernel)
    for array in jax.tree.leaves(gradients):
        assert np.isfinite(array).all()
    out, adapted = outputs
    np.testing.assert_allclose(out, x @ kernel, atol=1e-5)
    np.testing.assert_allclose(adapted, kernel, atol=1e-6)
    assert not out[:, 1].any()


@pytest.mark.long
def test_scanned_and_unrolled_are_the_same():
    config = with_lora(magnitudes=True)
    scanned = busy(build(config))
    unrolled = busy(build(dataclasses.replace(config, scan_layers=False)))
    np.testing.assert_allclose(logits(scanned, TOKENS), logits(unrolled, TOKENS), atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("axes", [{"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_the_same_on_any_mesh(axes):
    config = dataclasses.replace(with_lora(magnitudes=True), vocab_size=64)
    single = busy(build(config))
    expected = logits(single, TOKENS)
    mesh = make_mesh(MeshConfig(**axes))
    with jax.set_mesh(mesh):
        graphdef, abstract = abstract_model(config, EXACT, mesh)
        placed = jax.device_put(nnx.state(single), shardings(abstract))
        found = logits(nnx.merge(graphdef, placed), TOKENS)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_the_scale_is_what_the_section_says():
    assert scale_of(LoraConfig(rank=4, alpha=8.0)) == 2.0
    assert scale_of(LoraConfig(rank=16, alpha=8.0, scaling="root")) == 2.0


@pytest.mark.long
@pytest.mark.every_dose
@pytest.mark.parametrize(
    ("targets", "products"),
    [
        ((r"attention\.(q|v)",), {"attention.q", "attention.v"}),
        (("down",), {"mlp.down"}),
        (("attention", r"mlp\.up"), {*(f"attention.{x}" for x in "qkvo"), "mlp.up"}),
    ],
)
def test_patterns_say_what_has_an_adapter(targets, products):
    model = build(with_lora(targets=targets))
    _, adapters = split_adapters(nnx.state(model))
    found = {path.partition(".adapter")[0].removeprefix("layers.0.") for path in paths(adapters)}
    assert found == products


def test_patterns_of_nothing_are_refused_together_with_what_there_is():
    with pytest.raises(
        ConfigError, match=r"targets: q_proj is found .*layers\.0\.attention\.q"
    ) as told:
        build(with_lora(targets=("mlp", "q_proj", "v_proj")))
    assert len(told.value.problems) == 2


def test_dropout_of_what_experts_see_is_refused():
    config = dataclasses.replace(case_config("mixtral"), lora=LoraConfig(rank=2, dropout=0.1))
    with pytest.raises(
        ConfigError, match=r"dropout=0\.1 can't be of layers\.0\.mlp\.down.*Set model"
    ):
        nnx.eval_shape(lambda: build_model(config, EXACT, 0))
    attention = dataclasses.replace(config.lora, targets=(r"attention\.", r"mlp\.router"))
    nnx.eval_shape(lambda: build_model(dataclasses.replace(config, lora=attention), EXACT, 0))


@pytest.mark.long
@pytest.mark.parametrize("case", ["qwen3", "deepseek_v2"])
def test_dropout_reaches_every_product_of_attention(case):
    """Each of them alone has adapters: then the pass with noise is another one."""
    config = dataclasses.replace(case_config(case), num_layers=1)
    names = {"q", "k", "v", "o"}
    if case == "deepseek_v2":
        names = {"q", "kv_down", "k_rope", "k", "v", "o"}
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, config.vocab_size, (2, 8)), jnp.int32)
    segments = jnp.ones((2, 8), jnp.int32)
    noise = TrainNoise(RegularizationConfig(), jax.random.split(jax.random.key(2), 2))
    for name in names:
        lora = LoraConfig(rank=2, alpha=8.0, dropout=0.5, targets=(rf"attention\.{name}$",))
        model = busy(build(dataclasses.replace(config, lora=lora)))
        plain, dropped = [
            model.forward(tokens, segments, noise=given).hidden for given in (None, noise)
        ]
        assert np.abs(plain - dropped).max() > 1e-4, name


@pytest.mark.every_dose
@pytest.mark.long
@pytest.mark.parametrize("magnitudes", [True, False])
def test_dropout_is_of_what_adapters_see(magnitudes):
    """The formula is PEFT's, with its masks: W x + (m / l - 1) W d + (m / l) s B A d, where d is x
    after dropout, and without magnitudes m / l is 1. Forward, and the gradient of everything."""
    rng = np.random.default_rng(0)
    init = Initializer(InitConfig(), TINY, "float32")
    recipe = MatmulPrecision.of("float32")
    linear = Linear(jax.random.key(0), {"heads": 2, "head_dim": 3}, {"embed": 5}, init, recipe)
    lora = LoraConfig(rank=2, alpha=6.0, dropout=0.4, magnitudes=magnitudes)
    axes = linear.kernel_axes
    linear.adapter = Adapter(linear.kernel[...], axes, 2, lora, init, jax.random.key(1), 2**32 - 1)
    graphdef, state = nnx.split(linear)
    state = jax.tree.map(lambda x: jnp.asarray(rng.uniform(0.5, 1.5, x.shape), x.dtype), state)
    x = jnp.asarray(rng.standard_normal((4, 7, 2, 3)), jnp.float32)
    noise = TrainNoise(RegularizationConfig(), jax.random.split(jax.random.key(2), 4))
    mask = noise.of_adapter(jnp.ones((4, 7, 6)), 2**32 - 1, 0.4)
    assert 0.2 < float((mask == 0).mean()) < 0.6
    assert (mask != noise.of_adapter(jnp.ones((4, 7, 6)), 0, 0.4)).any(), "each product has its own"

    def ours(state, x, noise=noise):
        return nnx.merge(graphdef, state)(x, noise)

    def theirs(state, x):
        named = {name: variable[...] for name, variable in paths(state).items()}
        x = x.reshape(4, 7, 6)
        left = x * mask
        kernel = named["kernel"].reshape(6, 5)
        change = 3.0 * named["adapter.a"].reshape(6, 2) @ named["adapter.b"]
        if not magnitudes:
            return x @ kernel + left @ change
        length = jax.lax.stop_gradient(jnp.linalg.norm(kernel + change, axis=0))
        ratio = named["adapter.magnitude"] / length
        return x @ kernel + (ratio - 1) * (left @ kernel) + ratio * (left @ change)

    def total(function):
        return jax.value_and_grad(lambda *given: jnp.sin(function(*given)).sum(), (0, 1))

    found = jax.tree.leaves((total(ours)(state, x), ours(state, x)))
    expected = jax.tree.leaves((total(theirs)(state, x), theirs(state, x)))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
    plain = dataclasses.replace(lora, dropout=0.0)
    linear.adapter = Adapter(linear.kernel[...], axes, 2, plain, init, jax.random.key(1), 0)
    without = nnx.merge(nnx.split(linear)[0], state)
    np.testing.assert_array_equal(ours(state, x, None), without(x, noise))


def test_adapters_train_and_what_is_named_beside_them():
    params = nnx.state(nnx.eval_shape(lambda: build_model(with_lora(), EXACT)))
    names = set(paths(params))
    of_adapters = {name for name in names if ".adapter." in name}
    assert frozen_paths(TrainConfig(), params) == names - of_adapters
    also = frozen_paths(TrainConfig(only=("final_norm", "head")), params)
    assert names - also == {*of_adapters, "final_norm.scale", "head.kernel"}
    some = frozen_paths(TrainConfig(freeze=(r"mlp\..*adapter",)), params)
    assert names - some == {name for name in of_adapters if "mlp" not in name}
    trainable, _ = split(params, frozen_paths(TrainConfig(), params))
    count = sum(leaf.size for leaf in jax.tree.leaves(trainable))
    # 3 (inputs + outputs) for each of the seven products of two layers.
    sizes = [(32, 32), (32, 16), (32, 16), (32, 32), (32, 48), (32, 48), (48, 32)]
    assert count == 2 * 3 * sum(map(sum, sizes))
