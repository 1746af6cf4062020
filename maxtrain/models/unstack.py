"""Converts a model to separate arrays for each layer, for generation.

Layers that are alike have stacked parameters, which training runs as one loop. Where a product
can't take a part of an array, as on CPUs, a matrix in a stack is copied each time it is used; that
is negligible beside the product of a whole batch, and doubles the time of a product of one token.
"""

import dataclasses
import re

import jax
from flax import nnx
from jaxtyping import Array, Int

from maxtrain.config.schema import InitConfig
from maxtrain.models.adapt import products
from maxtrain.models.decoder import Decoder
from maxtrain.models.specs import StackSpec
from maxtrain.models.stack import layer_names


def for_generation(model: Decoder) -> Decoder:
    """Return the model in the form that generates fastest on its devices; its arrays may be
    deleted, as by `unstacked`."""
    (device, *_) = model.embedding[...].devices()
    if device.platform == "cpu":
        return unstacked(model)
    return model


def unstacked(model: Decoder) -> Decoder:
    """Return the same model with separate arrays for each layer. The arrays of the given model are
    deleted one by one, so that the extra memory needed is hardly more than that of one of them.

    Args:
        model: the model with its arrays, on one or more devices.
    """
    stack = model.spec.stack
    layers = stack.layers()
    # The last layer is a period that occurs once.
    apart = StackSpec(period=layers[-1:], repeats=1, prefix=layers[:-1])
    spec = dataclasses.replace(model.spec, stack=apart)
    # New name of each layer, and its old location: the name, and the index in the stack of that
    # name.
    moves: dict[str, tuple[str, int | None]] = {}
    for new, old in zip(layer_names(apart), layer_names(stack), strict=True):
        moves[new.name] = (old.name, old.repeat)
    lora = model.config.lora
    if lora.rank is not None:
        # Patterns may name a place in the stack, and layers have other names now.
        lora = dataclasses.replace(lora, targets=_adapted(model, moves))
    config = dataclasses.replace(model.config, scan_layers=False, lora=lora)

    def build() -> Decoder:
        return Decoder(config, spec, model.precision, InitConfig(), nnx.Rngs(params=0))

    graphdef, abstract = nnx.split(nnx.eval_shape(build))
    arrays = dict(nnx.to_flat_state(nnx.state(model)))
    left = dict.fromkeys(arrays, 0)
    for path, _ in nnx.to_flat_state(abstract):
        left[_source(path, moves)[0]] += 1
    filled = {}
    for path, variable in nnx.to_flat_state(abstract):
        source, repeat = _source(path, moves)
        array = arrays[source].get_value()
        shape = variable.get_value().shape
        value = array
        if repeat is not None:
            value = _layer_of(value, repeat)
        if value.shape != shape:
            value = value.reshape(shape)
        filled[path] = variable.replace(value)
        left[source] -= 1
        if left[source] == 0 and value is not array:
            jax.block_until_ready(value)
            array.delete()
    return nnx.merge(graphdef, nnx.from_flat_state(filled))


def _adapted(model: Decoder, moves: dict[str, tuple[str, int | None]]) -> tuple[str, ...]:
    """Return patterns of the products that have adapters, by the new names of their layers."""
    found = []
    for path, module in products(model.layers):
        if module.adapter is None:
            continue
        _, place, product = path.split(".", 2)
        for new, (old, _) in moves.items():
            if old == place:
                found.append(f"^{re.escape(f'layers.{new}.{product}')}$")
    return tuple(found)


def _source(path: tuple, moves: dict[str, tuple[str, int | None]]) -> tuple[tuple, int | None]:
    """Return the old location of a variable of the new model: its path, and its index in the
    stack."""
    if path[0] != "layers":
        return path, None
    name, repeat = moves[path[1]]
    return ("layers", name, *path[2:]), repeat


@jax.jit
def _layer_of(array: Array, repeat: Int[Array, ""] | int) -> Array:
    return jax.lax.dynamic_index_in_dim(array, repeat, keepdims=False)
