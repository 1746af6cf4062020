"""A model whose weights have taken in what its adapters do."""

import dataclasses

import jax
from flax import nnx
from jaxtyping import Array

from maxtrain.config.schema import InitConfig
from maxtrain.models.adapt import products, split_adapters, without_adapters
from maxtrain.models.decoder import Decoder
from maxtrain.models.linear import ExpertLinear, Linear


def merged(model: Decoder) -> Decoder:
    """The model without adapters that computes the same, to rounding: changes are added in float32,
    and the sums rounded once to the type of the weights. Weights without an adapter are the same
    arrays.

    Args:
        model: with its arrays; one without adapters comes back as it is.
    """
    if model.config.lora.rank is None:
        return model
    config = dataclasses.replace(model.config, lora=without_adapters(model.config.lora))

    def build() -> Decoder:
        return Decoder(config, model.spec, model.precision, InitConfig(), nnx.Rngs(params=0))

    graphdef, _ = nnx.split(nnx.eval_shape(build))
    base, _ = split_adapters(nnx.state(model))
    weights = dict(nnx.to_flat_state(base))
    for path, module in products(model.layers):
        if module.adapter is not None:
            kernel = (*_path(path, weights), "kernel")
            weights[kernel] = weights[kernel].replace(_taken_in(module))
    return nnx.merge(graphdef, nnx.from_flat_state(weights))


def _path(name: str, weights: dict) -> tuple:
    """The path of a product among those of weights, whose parts are names or numbers."""
    for path in weights:
        if ".".join(map(str, path[:-1])) == name:
            return path[:-1]
    raise AssertionError(name)


def _taken_in(module: Linear | ExpertLinear) -> Array:
    """The kernel of a product, of each layer if they are stacked."""
    graphdef, state = nnx.split(module)
    stacked = module.kernel.ndim - len(module.kernel.get_metadata("axes"))

    def weights(state: nnx.State) -> Array:
        return nnx.merge(graphdef, state).weights()

    for _ in range(stacked):
        weights = jax.vmap(weights)

    def rounded(state: nnx.State) -> Array:
        return weights(state).astype(module.kernel.dtype)

    return jax.jit(rounded)(state)
