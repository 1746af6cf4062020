"""Adapters in a model: adding them, and merging their changes into its weights."""

import dataclasses
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Key

from data_pipeline.base.errors import ConfigError
from maxtrain.config.schema import LoraConfig
from maxtrain.models.init import Initializer
from maxtrain.models.linear import ExpertLinear, Linear
from maxtrain.models.lora import Adapter, AdapterParam, lengths
from maxtrain.models.quantized import (
    CODES,
    SCALES,
    QuantizedKernel,
    kernel_of,
    require_whole_blocks,
    whole,
)
from maxtrain.models.stack import LayerStack
from maxtrain.ops.quantized import QuantizedArray


def products(stack: LayerStack) -> Iterator[tuple[str, Linear | ExpertLinear]]:
    """Iterate over the matrix products of all layers, by their paths in the model."""
    for path, module in nnx.iter_modules(stack):
        if isinstance(module, Linear | ExpertLinear):
            yield ".".join(["layers", *map(str, path)]), module


def attach(stack: LayerStack, lora: LoraConfig, init: Initializer, key: Key[Array, ""]) -> None:
    """Add new adapters to the products that the config names, and quantise their kernels if the
    config says so.

    Args:
        stack: the layers.
        lora: the config, with a rank.
        init: draws the adapters.
        key: random key; each adapter uses a part of it, by its path.

    Raises:
        ConfigError: a pattern matches no product, there is dropout for experts, or blocks do not
            divide inputs.
    """
    assert lora.rank is not None
    named = sorted(products(stack))
    adapted = {}
    for name, module in named:
        if any(re.search(pattern, name) for pattern in lora.targets):
            adapted[name] = module
    problems = list(_target_problems([name for name, _ in named], adapted, lora))
    if problems:
        raise ConfigError(problems)
    if lora.base != "full":
        _quantize(adapted, lora)
    for name, module in adapted.items():
        place = zlib.crc32(name.encode())
        own = jax.random.fold_in(key, place)
        kernel = kernel_of(module.kernel)
        module.adapter = Adapter(
            kernel, module.kernel_axes, module.num_inputs, lora, init, own, place
        )


def _target_problems(
    names: Sequence[str], adapted: Mapping[str, Linear | ExpertLinear], lora: LoraConfig
) -> Iterator[str]:
    """Yield patterns that match no product, and dropout where it is not possible.

    Args:
        names: paths of all products.
        adapted: the products with adapters.
    """
    for pattern in lora.targets:
        if not any(re.search(pattern, name) for name in names):
            yield (
                f"model.lora.targets: {pattern} is found in the path of no product. "
                f"Set it to a part of one of these: {', '.join(names)}."
            )
    experts = [name for name, module in adapted.items() if isinstance(module, ExpertLinear)]
    if lora.dropout and experts:
        yield (
            f"model.lora.dropout={lora.dropout} can't be of {', '.join(experts)}: adapters of "
            "experts change weights, and PEFT has no dropout for these either. Set "
            r"model.lora.targets='[attention\.]', for example, or model.lora.dropout=0."
        )


def _quantize(adapted: Mapping[str, Linear | ExpertLinear], lora: LoraConfig) -> None:
    """Replace the kernels of these products by their quantised form."""
    sizes = {name: math.prod(module.input_shape) for name, module in adapted.items()}
    require_whole_blocks(sizes, lora)
    for module in adapted.values():
        kernel = kernel_of(module.kernel)
        module.kernel = QuantizedKernel(kernel, module.kernel_axes, module.num_inputs, lora)


def split_adapters(variables: nnx.State) -> tuple[nnx.State, nnx.State]:
    """Split the variables of a model into those without adapters and those of adapters."""
    adapters, others = nnx.split_state(variables, AdapterParam, ...)
    return others, adapters


def is_adapter(variable: Any) -> bool:
    """Return whether a variable belongs to an adapter."""
    return isinstance(variable, AdapterParam)


def with_magnitudes(variables: nnx.State) -> nnx.State:
    """Set the magnitudes of new adapters to the norms of the weights beside them."""
    flat = dict(nnx.to_flat_state(variables))
    for path, variable in flat.items():
        if path[-2:] != ("adapter", "magnitude"):
            continue
        value = variable.get_value()
        kernel = _kernel_beside(flat, path[:-2])
        stacked = value.ndim - len(variable.get_metadata("axes"))
        summed = tuple(range(stacked, stacked + kernel.ndim - value.ndim))
        measure = jax.jit(lengths, static_argnums=1, out_shardings=value.sharding)
        flat[path] = variable.replace(measure(kernel, summed))
    return nnx.from_flat_state(flat)


def _kernel_beside(flat: Mapping[tuple, nnx.Variable], product: tuple) -> Array:
    """Return the kernel of a product among variables by path."""
    kernel = flat.get((*product, "kernel"))
    if kernel is not None:
        return kernel.get_value()
    codes = flat[*product, "kernel", CODES]
    scales = flat[*product, "kernel", SCALES]
    arrays = QuantizedArray(codes.get_value(), scales.get_value())
    return jax.jit(whole, static_argnums=1)(arrays, codes.get_metadata("stands_for"))


def without_adapters(lora: LoraConfig) -> LoraConfig:
    """Return the config section of a model after its adapters were merged."""
    return dataclasses.replace(lora, rank=None)
