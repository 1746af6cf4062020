"""Adapters on a quantised base: the model is that of the weights that codes and scales stand for,
in every family, on any mesh, and nothing but adapters trains."""

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
    LoraConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
)
from maxtrain.inference.engine import Engine
from maxtrain.inference.sampling import Sampling
from maxtrain.models.adapt import split_adapters
from maxtrain.models.cost import product_weights
from maxtrain.models.families.directory import read_config
from maxtrain.models.merged import merged
from maxtrain.models.quantized import count_weights, is_quantized, stored_kernels, whole
from maxtrain.models.registry import build_model
from maxtrain.ops.digest import leaf_names
from maxtrain.ops.quantized import QuantizedArray
from maxtrain.parallel.batches import BatchLayout
from maxtrain.parallel.mesh import make_mesh
from maxtrain.train_step.optimizer import paths
from maxtrain.train_step.state import abstract_model, policy_params, shardings, trained_summary
from maxtrain.train_step.trainable import frozen_paths
from maxtrain.trainer.job import make_parts
from tests.support.tiny import optax_dtypes

__all__ = ["optax_dtypes"]
PARITY = Path(__file__).parents[1] / "data" / "parity"
EXACT = PrecisionConfig(compute="float32")
TINY = ModelConfig(
    vocab_size=64, num_layers=2, embed_dim=32, mlp_dim=48, num_heads=4, num_kv_heads=2
)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 12)), jnp.int32)
FORMS = (pytest.param("int8", marks=pytest.mark.long), "nf4")
# With blocks that divide the inputs of all its products.
FAMILIES = [
    pytest.param("mixtral", 8, marks=pytest.mark.long),
    pytest.param("deepseek_v3", 4, marks=pytest.mark.slow),
    pytest.param("gpt_oss", 8, marks=pytest.mark.slow),
    pytest.param("qwen3_moe", 8, marks=pytest.mark.slow),
    pytest.param("gemma3", 8, marks=pytest.mark.slow),
]


def with_base(form, config=TINY, block=8, **options):
    section = {"rank": 3, "alpha": 6.0, "base": form, **options}
    if form != "full":
        section["base_block"] = block
    return dataclasses.replace(config, lora=LoraConfig(**section))


def build(config, seed=0, precision=EXACT):
    return jax.jit(lambda: build_model(config, precision, seed))()


def busy(model, seed=1):
    """The model with random numbers in what adapters begin with."""
    graphdef, state = nnx.split(model)
    flat = dict(nnx.to_flat_state(state))
    rng = np.random.default_rng(seed)
    for path, variable in flat.items():
        value = variable.get_value()
        if path[-2:] == ("adapter", "b"):
            new = 0.3 * rng.standard_normal(value.shape)
            flat[path] = variable.replace(jnp.asarray(new, value.dtype))
        if path[-1] == "magnitude":
            flat[path] = variable.replace(value * rng.uniform(0.5, 1.5, value.shape))
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def with_whole_base(model):
    """The same adapters on float32 weights that are what codes and scales stand for."""
    lora = dataclasses.replace(model.config.lora, base="full", base_block=64)
    config = dataclasses.replace(model.config, lora=lora)
    graphdef, abstract = nnx.split(nnx.eval_shape(lambda: build_model(config, EXACT)))
    here = dict(nnx.to_flat_state(nnx.state(model)))
    found = {}
    for path, variable in nnx.to_flat_state(abstract):
        if path in here:
            found[path] = here[path]
            continue
        codes = here[*path, "codes"]
        arrays = QuantizedArray(codes.get_value(), here[*path, "scales"].get_value())
        found[path] = variable.replace(whole(arrays, codes.get_metadata("stands_for")))
    return nnx.merge(graphdef, nnx.from_flat_state(found))


@nnx.jit
def logits(model, tokens):
    return model(tokens)


@functools.cache
def case_config(case):
    return dataclasses.replace(read_config(PARITY / case), vocab_size=64)


@pytest.mark.long
@pytest.mark.every_dose
@pytest.mark.parametrize("form", FORMS)
def test_it_begins_as_the_model_of_the_quantised_weights_bit_for_bit(form):
    model = build(with_base(form))
    found = np.asarray(logits(model, TOKENS))
    np.testing.assert_array_equal(found, logits(merged(model), TOKENS))
    plain = np.asarray(logits(build(TINY), TOKENS))
    difference = np.linalg.norm(found - plain) / np.linalg.norm(plain)
    assert 1e-4 < difference < {"int8": 0.02, "nf4": 0.3}[form]


@pytest.mark.long
@pytest.mark.parametrize("magnitudes", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", [pytest.param("int8", marks=pytest.mark.slow), "nf4"])
@pytest.mark.parametrize(("case", "block"), [("llama3", 8), *FAMILIES])
def test_the_model_is_that_of_the_changed_weights(case, block, form, magnitudes):
    """This holds with a cache, too, where latents are multiplied by the weights themselves."""
    config = with_base(form, case_config(case), block, magnitudes=magnitudes)
    model = busy(build(config))
    plain = merged(model)
    assert not any(is_quantized(v) for _, v in nnx.to_flat_state(nnx.state(plain)))
    expected = logits(plain, TOKENS)
    found = logits(model, TOKENS)
    np.testing.assert_allclose(found, expected, atol=2e-5 * float(jnp.abs(expected).max()))
    texts = []
    for one in (model, plain):
        engine = Engine(one, slots=1, chunk=4, piece=16)
        generation = engine.submit(list(range(20)), 8, Sampling(temperature=0.0))
        engine.run()
        texts.append((generation.ids, generation.logprobs))
    assert texts[0][0] == texts[1][0]
    np.testing.assert_allclose(texts[0][1], texts[1][1], atol=1e-4)


def adapter_gradients(model):
    """Return the gradients of the adapters alone, and the loss."""
    graphdef, state = nnx.split(model)
    others, adapters = split_adapters(state)

    @jax.jit
    def both(adapters):
        def loss(adapters):
            out = nnx.merge(graphdef, nnx.merge_state(others, adapters))(TOKENS)
            return jnp.square(out).mean()

        return jax.value_and_grad(loss)(adapters)

    value, grads = both(adapters)
    return float(value), {path: np.asarray(v[...]) for path, v in paths(grads).items()}


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("case", "block"), [(None, 8), *FAMILIES])
def test_gradients_are_those_with_whole_weights(case, block, form):
    """The gradients of the first layer's adapters have passed all products of the second one."""
    config = TINY if case is None else case_config(case)
    model = busy(build(with_base(form, config, block)))
    loss, found = adapter_gradients(model)
    of_whole, expected = adapter_gradients(with_whole_base(model))
    assert loss == pytest.approx(of_whole, rel=1e-6)
    assert found.keys() == expected.keys()
    largest = max(np.abs(gradient).max() for gradient in expected.values())
    # What an expert's adapter adds is a product of its own here, and a part of the weights there.
    tolerance = 1e-6 if case is None else 3e-6
    for path, gradient in expected.items():
        np.testing.assert_allclose(found[path], gradient, atol=tolerance * largest, err_msg=path)


@pytest.mark.long
@pytest.mark.parametrize("options", [{"magnitudes": True}, {"targets": (r"attention\.q",)}])
def test_gradients_with_magnitudes_and_of_some_products(options):
    model = busy(build(with_base("nf4", **options)))
    _, found = adapter_gradients(model)
    _, expected = adapter_gradients(with_whole_base(model))
    largest = max(np.abs(gradient).max() for gradient in expected.values())
    for path, gradient in expected.items():
        np.testing.assert_allclose(found[path], gradient, atol=1e-6 * largest, err_msg=path)


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "how",
    [
        {"scan_layers": False},
        {"remat": "full"},
        {"remat": "dots", "scan_layers": False},
        {"remat": "dots_no_batch"},
    ],
    ids=str,
)
def test_the_same_however_layers_run(how, form):
    config = dataclasses.replace(TINY, remat="none")
    _, expected = adapter_gradients(busy(build(with_base(form, config))))
    _, found = adapter_gradients(busy(build(with_base(form, dataclasses.replace(config, **how)))))
    largest = max(np.abs(gradient).max() for gradient in expected.values())
    for path, gradient in expected.items():
        np.testing.assert_allclose(found[path], gradient, atol=5e-6 * largest, err_msg=path)


@pytest.mark.long
@pytest.mark.parametrize("params", ["float32", "bfloat16"])
@pytest.mark.parametrize("activations", ["float32", "bfloat16"])
def test_products_round_as_those_of_whole_weights(params, activations):
    precision = PrecisionConfig(params=params, compute="bfloat16", activations=activations)
    model = busy(build(with_base("nf4"), precision=precision))
    base = {path: v for path, v in paths(nnx.state(model)).items() if path.endswith("codes")}
    assert {v.get_metadata("stands_for").dtype for v in base.values()} == {params}
    found = np.asarray(logits(model, TOKENS))
    plain = np.asarray(logits(merged(model), TOKENS))
    np.testing.assert_allclose(found, plain, atol=0.03 * np.abs(plain).max())


@pytest.mark.long
@pytest.mark.every_dose
def test_it_counts_parameters_and_not_bytes():
    whole_model = nnx.state(build(with_base("full")))
    sizes = {}
    for form in ("int8", "nf4"):
        state = nnx.state(build(with_base(form)))
        assert count_weights(state) == count_weights(whole_model)
        assert product_weights(state, TINY) == product_weights(whole_model, TINY)
        stored = [v.get_value() for _, v in nnx.to_flat_state(state) if is_quantized(v)]
        sizes[form] = sum(array.nbytes for array in stored)
    weights = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48)
    # A scale of two bytes for each block of eight.
    assert sizes == {"int8": weights * 10 // 8, "nf4": weights * 6 // 8}
    assert count_weights(whole_model) == sum(x.size for x in jax.tree.leaves(whole_model))


@pytest.mark.long
def test_magnitudes_are_lengths_of_the_quantised_weights():
    model = build(with_base("nf4", magnitudes=True))
    up = getattr(model.layers, "0").mlp.up
    lengths = np.linalg.norm(np.asarray(up.kernel.whole()), axis=1)
    np.testing.assert_allclose(up.adapter.magnitude[...], lengths, rtol=1e-6)
    plain = logits(build(with_base("nf4")), TOKENS)
    np.testing.assert_allclose(logits(model, TOKENS), plain, atol=1e-5)


@pytest.mark.long
@pytest.mark.every_dose
@pytest.mark.parametrize("form", FORMS)
def test_kernels_that_come_one_by_one_are_quantised_as_those_that_are_drawn(form):
    config = with_base(form)
    _, abstract = abstract_model(config, EXACT, make_mesh(MeshConfig(fsdp=2, tensor=2, data=2)))
    drawn = paths(nnx.state(build(config)))
    plain = paths(nnx.state(build(TINY)))
    kernels = stored_kernels(abstract)
    assert len(kernels) == 7
    for name, kernel in kernels.items():
        array = jax.device_put(plain[name][...], kernel.whole.sharding)
        codes, scales = kernel.quantized(array)
        assert array.is_deleted()
        np.testing.assert_array_equal(codes, drawn[f"{name}.codes"][...])
        np.testing.assert_array_equal(scales, drawn[f"{name}.scales"][...])


def config_of(form, mesh, **model):
    data, fsdp, tensor = mesh
    return RunConfig(
        steps=8,
        model=with_base(form, dataclasses.replace(TINY, mlp_dim=64, **model), block=4),
        precision=EXACT,
        # A large eps: with a small one the first step of Adam is the sign of each gradient, even of
        # those that are rounding noise.
        optimizer=OptimizerConfig(learning_rate=1e-2, eps=1e-2),
        schedule=ScheduleConfig(warmup_steps=0),
        mesh=MeshConfig(data=data, fsdp=fsdp, tensor=tensor),
    )


def batch_of(number):
    rng = np.random.default_rng(number)
    tokens = rng.integers(1, 64, (8, 17)).astype(np.int32)
    return {
        "inputs": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segment_ids": np.ones((8, 16), np.int32),
        "positions": np.broadcast_to(np.arange(16, dtype=np.int32), (8, 16)),
        "loss_mask": np.ones((8, 16), np.float32),
        "source": np.zeros(8, np.int32),
    }


@functools.cache
def trained(form, mesh=(1, 1, 1), **model):
    """The first state and that after five steps, as arrays by name on the host, and the losses."""
    parts = make_parts(config_of(form, mesh, **model), jax.devices()[: np.prod(mesh)], 8, 0)
    with jax.set_mesh(parts.mesh):
        step = parts.make_step()
        state = parts.initial_state()
        first = jax.device_get(policy_params(state))
        layout = BatchLayout(parts.mesh, 8, 16)
        losses = []
        for number in range(5):
            state, metrics = step(state, layout.to_global(batch_of(number)))
            losses.append(float(metrics["loss"]))
        last = jax.device_get(policy_params(state))
    return _named(first), _named(last), losses


def _named(tree):
    return dict(zip(leaf_names(tree), jax.tree.leaves(tree), strict=True))


MESHES = [
    ((1, 1, 1), {}),
    ((1, 4, 2), {}),
    ((2, 2, 2), {"scan_layers": False}),
    ((1, 2, 4), {"family": "mixtral"}),
]


@pytest.mark.long
@pytest.mark.usefixtures("optax_dtypes")
@pytest.mark.parametrize(("mesh", "model"), MESHES)
@pytest.mark.parametrize("form", FORMS)
def test_training_moves_adapters_alone_and_the_same_on_any_mesh(form, mesh, model):
    if "family" in model:
        model = model | {"num_heads": 4, "num_kv_heads": 4}
    elif mesh[2] > 2:
        model = model | {"num_kv_heads": 4}
    first, last, losses = trained(form, mesh, **model)
    _, alone, expected = trained(form, (1, 1, 1), **model)
    np.testing.assert_allclose(losses, expected, atol=1e-5)
    for name, array in last.items():
        if ".adapter." not in name:
            assert array.tobytes() == first[name].tobytes(), name
            assert array.tobytes() == alone[name].tobytes(), name
        else:
            assert array.tobytes() != first[name].tobytes(), name
            np.testing.assert_allclose(array, alone[name], atol=1e-5, err_msg=name)


def test_the_launch_counts_what_trains_of_all_parameters():
    parts = make_parts(config_of("nf4", (1, 1, 1)), jax.devices()[:1], 8, 0)
    total = sum(
        x.size for x in jax.tree.leaves(nnx.state(build(config_of("full", (1,) * 3).model)))
    )
    assert f" of {total:,} parameters" in trained_summary(parts.abstract)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"block": 64},
            r"base_block=64 must divide the 32 inputs of layers\.0\.attention\.k and of 6 more: "
            r"each block has a scale\. Set model\.lora\.base_block=16\.",
        ),
        ({"block": 64, "targets": (r"mlp\.up",)}, r"Set model\.lora\.base_block=32\."),
        ({"block": 10}, r"Set model\.lora\.base_block=2\."),
        ({"block": 9, "form": "int8", "embed_dim": 24, "mlp_dim": 27}, r"base_block=3\."),
        ({"block": 12, "embed_dim": 24, "mlp_dim": 27}, r"Set model\.lora\.base=full, or leave"),
    ],
)
def test_blocks_that_do_not_divide_the_inputs_are_refused(options, message):
    options = {"form": "nf4", **options}
    sizes = {key: options.pop(key) for key in ("embed_dim", "mlp_dim") if key in options}
    config = dataclasses.replace(TINY, **sizes)
    with pytest.raises(ConfigError, match=message):
        build(with_base(options.pop("form"), config, **options))


@pytest.mark.long
def test_blocks_that_the_mesh_does_not_divide_are_on_every_device():
    mesh = make_mesh(MeshConfig(fsdp=4, tensor=2))
    _, abstract = abstract_model(with_base("int8", block=16), EXACT, mesh)
    found = paths(shardings(abstract))
    for name, spec in (("mlp.up", (None, None, None, "tensor")), ("mlp.down", (None,) * 3)):
        codes = found[f"layers.0.{name}.kernel.codes"].get_value().spec
        assert tuple(codes)[: len(spec)] == spec, name
    single = busy(build(with_base("int8", block=16)))
    expected = logits(single, TOKENS)
    with jax.set_mesh(mesh):
        placed = jax.device_put(nnx.state(single), shardings(abstract))
        found = logits(nnx.merge(nnx.graphdef(single), placed), TOKENS)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_hidden_units_of_experts_are_not_cut_inside_a_block():
    config = dataclasses.replace(TINY, family="mixtral")
    message = (
        r"base_block=16 makes 3 blocks of the 48 inputs of the experts' layers\.0\.mlp\.down, "
        r"which mesh\.tensor=2 must divide\. Set model\.lora\.base_block=8\."
    )
    mesh = make_mesh(MeshConfig(fsdp=4, tensor=2))
    with pytest.raises(ConfigError, match=message):
        abstract_model(with_base("nf4", config, block=16), EXACT, mesh)


def test_codes_and_scales_are_split_as_the_kernel_is():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    _, abstract = abstract_model(with_base("nf4"), EXACT, mesh)
    of_kernel = paths(shardings(abstract_model(TINY, EXACT, mesh)[1]))
    found = paths(shardings(abstract))
    for name in ("layers.0.attention.o.kernel", "layers.0.mlp.up.kernel"):
        layers, inputs, *outputs = of_kernel[name].get_value().spec
        if name.endswith("o.kernel"):
            _, *outputs = outputs
        assert tuple(found[f"{name}.codes"].get_value().spec) == (layers, inputs, None, *outputs)
        assert tuple(found[f"{name}.scales"].get_value().spec) == (layers, inputs, *outputs)


def test_quantised_weights_do_not_train():
    params = nnx.state(nnx.eval_shape(lambda: build_model(with_base("nf4"), EXACT)))
    message = r"attention\.q\.kernel\.codes, and weights that are kept as nf4 do not train\. Name"
    with pytest.raises(ConfigError, match=message):
        frozen_paths(TrainConfig(only=(r"attention\.q",)), params)
    frozen = frozen_paths(TrainConfig(only=("norm",)), params)
    assert any(name.endswith(".codes") for name in frozen)
    assert not any("norm" in name for name in frozen)
