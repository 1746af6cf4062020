"""Puts adapters into a model, and their changes into its weights."""

import dataclasses
import re
import zlib
from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Key

from data_pipeline.errors import ConfigError
from maxtrain.config.schema import LoraConfig
from maxtrain.models.init import Initializer
from maxtrain.models.linear import ExpertLinear, Linear
from maxtrain.models.lora import Adapter, AdapterParam, lengths
from maxtrain.models.stack import Stack


def products(stack: Stack) -> Iterator[tuple[str, Linear | ExpertLinear]]:
    """The products with weights of all layers, by their paths in the model."""
    for path, module in nnx.iter_modules(stack):
        if isinstance(module, Linear | ExpertLinear):
            yield ".".join(["layers", *map(str, path)]), module


def attach(stack: Stack, lora: LoraConfig, init: Initializer, key: Key[Array, ""]) -> None:
    """Gives the products that the config names new adapters.

    Args:
        stack: the layers.
        lora: with a rank.
        init: draws them.
        key: that they are drawn from; each from a part of it, by its path.

    Raises:
        ConfigError: a pattern that is in the path of no product.
    """
    assert lora.rank is not None
    named = sorted(products(stack))
    names = [name for name, _ in named]
    for pattern in lora.targets:
        if not any(re.search(pattern, name) for name in names):
            raise ConfigError(
                f"model.lora.targets: {pattern} is found in the path of no product. "
                f"Set it to a part of one of these: {', '.join(names)}."
            )
    for name, module in named:
        if not any(re.search(pattern, name) for pattern in lora.targets):
            continue
        axes = module.kernel.get_metadata("axes")
        own = jax.random.fold_in(key, zlib.crc32(name.encode()))
        kernel = module.kernel[...]
        module.adapter = Adapter(kernel, axes, module.num_inputs, lora, init, own)


def split_adapters(variables: nnx.State) -> tuple[nnx.State, nnx.State]:
    """The variables of a model without those of adapters, and those."""
    adapters, others = nnx.split_state(variables, AdapterParam, ...)
    return others, adapters


def is_adapter(variable: Any) -> bool:
    return isinstance(variable, AdapterParam)


def with_magnitudes(variables: nnx.State) -> nnx.State:
    """The variables of a model with new adapters, whose magnitudes are the lengths of the weights
    that are beside them."""
    flat = dict(nnx.to_flat_state(variables))
    for path, variable in flat.items():
        if path[-2:] != ("adapter", "magnitude"):
            continue
        kernel = flat[*path[:-2], "kernel"].get_value()
        value = variable.get_value()
        stacked = value.ndim - len(variable.get_metadata("axes"))
        summed = tuple(range(stacked, stacked + kernel.ndim - value.ndim))
        measure = jax.jit(lengths, static_argnums=1, out_shardings=value.sharding)
        flat[path] = variable.replace(measure(kernel, summed))
    return nnx.from_flat_state(flat)


def without_adapters(lora: LoraConfig) -> LoraConfig:
    """The section of a model whose weights have taken the changes in."""
    return dataclasses.replace(lora, rank=None)
