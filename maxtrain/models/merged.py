"""Merging of adapters into the weights of a model, and models without their adapters."""

import dataclasses

import jax
from flax import nnx
from jaxtyping import Array

from maxtrain.config.schema import InitConfig
from maxtrain.models.adapt import products, without_adapters
from maxtrain.models.decoder import Decoder
from maxtrain.models.linear import ExpertLinear, Linear
from maxtrain.models.quantized import kernel_dtype


def merged(model: Decoder) -> Decoder:
    """Merge the adapters into the weights: the result computes the same, up to rounding. Changes
    are added in float32, and the sums rounded once to the type of the weights. Weights without an
    adapter are the same arrays.

    Args:
        model: a model with arrays; one without adapters is returned unchanged.
    """
    if model.config.lora.rank is None:
        return model
    config = dataclasses.replace(model.config, lora=without_adapters(model.config.lora))

    def build() -> Decoder:
        return Decoder(config, model.spec, model.precision, InitConfig(), nnx.Rngs(params=0))

    graphdef, abstract = nnx.split(nnx.eval_shape(build))
    kept = dict(nnx.to_flat_state(nnx.state(model)))
    adapted = {}
    for name, module in products(model.layers):
        if module.adapter is not None:
            adapted[f"{name}.kernel"] = module
    weights = {}
    for path, variable in nnx.to_flat_state(abstract):
        module = adapted.get(".".join(map(str, path)))
        if module is None:
            weights[path] = kept[path]
        else:
            weights[path] = variable.replace(_taken_in(module))
    return nnx.merge(graphdef, nnx.from_flat_state(weights))


def adapters_off(model: Decoder) -> Decoder:
    """Return the model without its adapters, with the same arrays."""
    other = nnx.merge(*nnx.split(model))
    for _, product in products(other.layers):
        product.adapter = None
    return other


def _taken_in(module: Linear | ExpertLinear) -> Array:
    """Return the merged kernel of a product, for each layer if layers are stacked."""
    graphdef, state = nnx.split(module)
    assert module.adapter is not None
    a = module.adapter.a
    stacked = a.ndim - len(a.get_metadata("axes"))
    dtype = kernel_dtype(module.kernel)

    def weights(state: nnx.State) -> Array:
        return nnx.merge(graphdef, state).weights()

    for _ in range(stacked):
        weights = jax.vmap(weights)

    def rounded(state: nnx.State) -> Array:
        return weights(state).astype(dtype)

    return jax.jit(rounded)(state)
