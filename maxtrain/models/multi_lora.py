"""A model with the adapters of several fine-tunings (multi-LoRA)."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float

from data_pipeline.base.errors import UsageError
from maxtrain.config.schema import LoraConfig, ModelConfig
from maxtrain.models.adapt import products
from maxtrain.models.decoder import Decoder
from maxtrain.models.expert_bank import ExpertBank
from maxtrain.models.families import FAMILIES
from maxtrain.models.linear import ExpertLinear, Linear
from maxtrain.models.lora import scale_of
from maxtrain.models.lora_bank import AdapterBank
from maxtrain.models.quantized import QuantizedKernel
from maxtrain.models.specs import LatentSpec
from maxtrain.models.stack import layer_names


class AdapterSet(NamedTuple):
    """The adapters of one fine-tuning.

    Args:
        name: name for error messages.
        lora: rank and scaling.
        arrays: arrays by their paths in a model with stacked layers, such as
            `layers.0.attention.q.adapter.a`.
    """

    name: str
    lora: LoraConfig
    arrays: Mapping[str, np.ndarray]


class _Matrices(NamedTuple):
    """The adapter of one layer's product: a [*inputs, R] and b [R, *outputs], with a leading dim
    for experts."""

    a: np.ndarray
    b: np.ndarray
    magnitude: Float[np.ndarray, " O"] | None


# Adapters by the number of a layer, and the path of a product in it, such as `attention.q`.
_OfLayers = dict[tuple[int, str], _Matrices]


def with_banks(model: Decoder, sets: Sequence[AdapterSet]) -> Decoder:
    """Return the model with the adapters of all sets, numbered from 1 on. Its weights are the same
    arrays.

    Args:
        model: a model without adapters, with stacked or separate layers.
        sets: adapter sets for models of its config.

    Raises:
        UsageError: the model has adapters, or a set adapts a product that cannot have adapters per
            row.
    """
    if model.config.lora.rank is not None:
        raise UsageError(
            f"the model has adapters of its own (model.lora.rank={model.config.lora.rank}), beside "
            "which there can't be others. Take them into its weights: maxtrain export RUN OUT "
            "--format hf; or name the model that they are for, and them as --format peft writes "
            "them."
        )
    of_sets = [_of_layers(adapters, model.config) for adapters in sets]
    numbers: dict[str, list[int]] = {}
    for number, place in enumerate(layer_names(model.spec.stack)):
        numbers.setdefault(place.name, []).append(number)
    graphdef, variables = nnx.split(model)
    model = nnx.merge(graphdef, variables)
    # Products are collected first, because the banks are added inside them.
    for path, module in list(products(model.layers)):
        _, place, product = path.split(".", 2)
        keys = [(number, product) for number in numbers[place]]
        named = [
            adapters.name
            for adapters, of_layers in zip(sets, of_sets, strict=True)
            if any(key in of_layers for key in keys)
        ]
        if not named:
            continue
        if _goes_to_latents(path, model):
            raise UsageError(
                f"{named[0]}: has an adapter of {path}, which is one product for all texts, so "
                "that they can't have different ones. Take the adapters into the weights: "
                "maxtrain export RUN OUT --format hf."
            )
        matrices = [[of_layers.get(key) for of_layers in of_sets] for key in keys]
        if isinstance(module, ExpertLinear):
            module.adapter = _expert_bank(module, matrices, sets)
        else:
            module.adapter = _bank(module, matrices, sets)
    return model


def _goes_to_latents(path: str, model: Decoder) -> bool:
    """Return whether a product is also applied to the cached latents of all tokens."""
    mixers = [layer.mixer for layer in model.spec.stack.layers()]
    has_latents = any(isinstance(mixer, LatentSpec) for mixer in mixers)
    return has_latents and path.endswith((".attention.k", ".attention.v"))


def _of_layers(adapters: AdapterSet, config: ModelConfig) -> _OfLayers:
    """Return the adapters of a set, layer by layer."""
    found = {}
    places = layer_names(FAMILIES[config.family].spec(config).stack)
    for path, stacked_a in adapters.arrays.items():
        if not path.endswith(".adapter.a"):
            continue
        base = path.removesuffix(".a")
        _, name, product = base.removesuffix(".adapter").split(".", 2)
        for number, place in enumerate(places):
            if place.name != name:
                continue
            a = _layer(stacked_a, place.repeat)
            b = _layer(adapters.arrays[f"{base}.b"], place.repeat)
            magnitude = adapters.arrays.get(f"{base}.magnitude")
            if magnitude is not None:
                magnitude = _layer(magnitude, place.repeat).reshape(-1)
            found[number, product] = _Matrices(a, b, magnitude)
    return found


def _layer(array: np.ndarray, repeat: int | None) -> np.ndarray:
    """Return one layer of an array that may be stacked."""
    if repeat is None:
        return array
    return array[repeat]


def _bank(
    module: Linear, matrices: Sequence[Sequence[_Matrices | None]], sets: Sequence[AdapterSet]
) -> AdapterBank:
    """Build the bank of one product; `matrices` has the adapters of each stacked layer, and of each
    set."""
    # Quantised weights have adapters of their own.
    assert not isinstance(module.kernel, QuantizedKernel)
    is_stacked = module.kernel.ndim > len(module.kernel.get_metadata("axes"))
    kernels = module.kernel[...]
    if not is_stacked:
        kernels = kernels[None]
    shape = kernels.shape[1:]
    num_inputs = int(np.prod(shape[: module.num_inputs]))
    num_outputs = int(np.prod(shape[module.num_inputs :]))
    count = len(sets) + 1
    rank = max(adapters.lora.rank or 0 for adapters in sets)
    a = np.zeros((len(kernels), count, num_inputs, rank), np.float32)
    b = np.zeros((len(kernels), count, rank, num_outputs), np.float32)
    scale = np.zeros((len(kernels), count), np.float32)
    factor = np.ones((len(kernels), count, num_outputs), np.float32)
    for layer, of_sets in enumerate(matrices):
        for number, own in enumerate(of_sets, 1):
            if own is None:
                continue
            own_rank = own.a.shape[-1]
            own_a = own.a.reshape(num_inputs, own_rank)
            own_b = own.b.reshape(own_rank, num_outputs)
            a[layer, number, :, :own_rank] = own_a
            b[layer, number, :own_rank] = own_b
            scale[layer, number] = scale_of(sets[number - 1].lora)
            if own.magnitude is not None:
                kernel = np.asarray(kernels[layer], np.float32).reshape(num_inputs, num_outputs)
                changed = kernel + scale[layer, number] * (own_a @ own_b)
                length = np.linalg.norm(changed, axis=0)
                # No factor changes an output whose weights are all 0.
                np.divide(own.magnitude, length, out=factor[layer, number], where=length > 0)
    if not is_stacked:
        a = a[0]
        b = b[0]
        scale = scale[0]
        factor = factor[0]
    factors = None
    if any(adapters.lora.magnitudes for adapters in sets):
        factors = jnp.asarray(factor)
    return AdapterBank(jnp.asarray(a), jnp.asarray(b), jnp.asarray(scale), factors)


def _expert_bank(
    module: ExpertLinear,
    matrices: Sequence[Sequence[_Matrices | None]],
    sets: Sequence[AdapterSet],
) -> ExpertBank:
    """Build the bank of one product of every expert."""
    # Quantised weights have adapters of their own.
    assert not isinstance(module.kernel, QuantizedKernel)
    is_stacked = module.kernel.ndim > len(module.kernel.get_metadata("axes"))
    num_experts, num_inputs, num_outputs = module.kernel.shape[-3:]
    count = len(sets) + 1
    rank = max(adapters.lora.rank or 0 for adapters in sets)
    a = np.zeros((len(matrices), num_experts, count, num_inputs, rank), np.float32)
    b = np.zeros((len(matrices), num_experts, count, rank, num_outputs), np.float32)
    for layer, of_sets in enumerate(matrices):
        for number, own in enumerate(of_sets, 1):
            if own is None:
                continue
            own_rank = own.a.shape[-1]
            a[layer, :, number, :, :own_rank] = own.a
            b[layer, :, number, :own_rank] = scale_of(sets[number - 1].lora) * own.b
    if not is_stacked:
        a = a[0]
        b = b[0]
    return ExpertBank(jnp.asarray(a), jnp.asarray(b))
