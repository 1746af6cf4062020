"""Runs a stack of layers: its period as one scanned loop or unrolled, with the same results."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from maxtrain.config.schema import ModelConfig
from maxtrain.models.cache import Caches, KVCache
from maxtrain.models.context import Context
from maxtrain.models.layers import LayerOut
from maxtrain.models.pipeline import form_for, pipelined
from maxtrain.models.remat import rematerialized
from maxtrain.models.stack import LayerStack
from maxtrain.ops.sums import WeightedSum
from maxtrain.parallel.host_memory import on_device
from maxtrain.parallel.sharding import stages

Sums = dict[str, WeightedSum]


class LayerAux(NamedTuple):
    """The outputs of layers other than activations."""

    aux_losses: Sums  # terms of the loss, summed over layers
    metrics: Sums  # recorded numbers, summed over layers
    # By path of the buffer, such as `0.mlp.bias`; [R, ...] for a place in the period.
    buffer_inputs: dict[str, Array]

    def merged(
        self, name: str, aux_losses: Sums, metrics: Sums, buffer_inputs: dict[str, Array]
    ) -> "LayerAux":
        """Merge in the outputs of one more layer, or of one more place in the period."""
        by_path = {f"{name}.{path}": value for path, value in buffer_inputs.items()}
        return LayerAux(
            added_by_name(self.aux_losses, aux_losses),
            added_by_name(self.metrics, metrics),
            self.buffer_inputs | by_path,
        )

    def buffer_inputs_in_model(self) -> dict[str, Array]:
        """Return the inputs of buffers, by path of the buffer in the model."""
        return {f"layers.{path}": value for path, value in self.buffer_inputs.items()}


NOTHING = LayerAux({}, {}, {})


class StackOut(NamedTuple):
    """The outputs of all layers together."""

    x: Float[Array, "B T D"]
    caches: Caches | None
    aux: LayerAux


class LayerInputs(NamedTuple):
    """The inputs of one layer besides activations; stacked over repeats for a place in the
    period."""

    params: Any
    cache: KVCache | None
    index: Array | None  # index of the layer, where something is random


class ScannedLayerOut(NamedTuple):
    """The outputs of a layer that are kept until all layers have run."""

    cache: KVCache | None
    aux_losses: Sums
    metrics: Sums
    buffer_inputs: dict[str, Array]


def run_layers(
    stack: LayerStack,
    x: Float[Array, "B T D"],
    context: Context,
    caches: Caches | None,
    config: ModelConfig,
) -> StackOut:
    """Run x through all layers, in order.

    Args:
        stack: the layers.
        x: [B, T, D] input of the first layer.
        context: context shared by all layers. Noise is drawn by the number of a layer.
        caches: as from `LayerStack.new_caches`; None: there are none.
        config: decides whether the period is one loop, which compiles fast, or unrolled, which runs
            fast; what the backward pass recomputes; and how rows go through the stages of the
            current mesh. With caches there is no backward pass, and all devices compute all layers.
    """
    spec = stack.spec
    indices = None
    if context.noise is not None:
        indices = jnp.arange(spec.num_layers)
    in_period = len(spec.period) * spec.repeats
    run = _LayerScan(stack, context, config, caches, indices)
    for number, name in enumerate(stack.prefix_names()):
        x = run.single(name, number, x)
    x = run.period(x, len(spec.prefix))
    for number, name in enumerate(stack.rest_names(), len(spec.prefix) + in_period):
        x = run.single(name, number, x)
    new_caches = None
    if caches is not None:
        new_caches = {name: run.new_caches[name] for name in caches}
    return StackOut(x, new_caches, run.aux)


class _LayerScan:
    """One pass through a stack, with the outputs collected so far."""

    def __init__(
        self,
        stack: LayerStack,
        context: Context,
        config: ModelConfig,
        caches: Caches | None,
        indices: Array | None,
    ):
        self._stack = stack
        self._context = context
        self._config = config
        self._caches = caches
        self._indices = indices
        self.new_caches: Caches = {}
        self.aux = NOTHING

    def single(self, name: str, number: int, x: Array) -> Array:
        """Run one layer of the prefix or of the rest."""
        graphdef, params = nnx.split(getattr(self._stack, name))
        index = None
        if self._indices is not None:
            index = self._indices[number]
        layer = self._function(graphdef, self._context, x.dtype)
        out = layer(x, LayerInputs(params, self._cache(name), index))
        if out.cache is not None:
            self.new_caches[name] = out.cache
        self.aux = self.aux.merged(name, out.aux_losses, out.metrics, out.buffer_inputs)
        return out.x

    def period(self, x: Array, first: int) -> Array:
        """Run all repeats of the period; `first` is the number of its first layer."""
        spec = self._stack.spec
        names = self._stack.period_names()
        graphdefs = []
        inputs = []
        for place, name in enumerate(names):
            graphdef, params = nnx.split(getattr(self._stack, name))
            index = None
            if self._indices is not None:
                end = first + len(names) * spec.repeats
                index = self._indices[first + place : end : len(names)]
            graphdefs.append(graphdef)
            inputs.append(LayerInputs(params, self._cache(name), index))

        def through(
            x: Array, context: Context, inputs: list[LayerInputs]
        ) -> tuple[Array, list[ScannedLayerOut]]:
            """Run some repeats, one after the other."""
            layers = [self._function(graphdef, context, x.dtype) for graphdef in graphdefs]

            def once(x: Array, parts: list[LayerInputs]) -> tuple[Array, list[ScannedLayerOut]]:
                kept = []
                for layer, part in zip(layers, parts, strict=True):
                    out = layer(x, part)
                    x = out.x
                    kept.append(
                        ScannedLayerOut(out.cache, out.aux_losses, out.metrics, out.buffer_inputs)
                    )
                return x, kept

            if self._config.scan_layers:
                return jax.lax.scan(once, x, inputs)
            each = []
            for parts in _unstack(inputs):
                x, kept = once(x, parts)
                each.append(kept)
            return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)

        run = self._stack.run_period
        if run is not None and self._caches is None:
            return run(through, x, self._context, inputs)
        if stages() > 1 and self._caches is None:
            form = form_for(x.shape[0], self._config.pipeline)
            x, stacked = pipelined(through, x, self._context, inputs, form)
        else:
            x, stacked = through(x, self._context, inputs)
        for name, out in zip(names, stacked, strict=True):
            if out.cache is not None:
                self.new_caches[name] = out.cache
        self.aux = aux_of_period(names, stacked, self.aux)
        return x

    def _function(
        self, graphdef: nnx.GraphDef, context: Context, dtype: DTypeLike
    ) -> Callable[[Array, LayerInputs], LayerOut]:
        """Return a layer as a function of activations of this type."""
        num_layers = self._stack.spec.num_layers

        def layer(x: Array, inputs: LayerInputs) -> LayerOut:
            own = context
            if context.noise is not None:
                assert inputs.index is not None
                own = context._replace(noise=context.noise.layer(inputs.index, num_layers))
            # Weights in host memory are fetched again for the backward pass and are not kept on the
            # device.
            params = jax.tree.map(on_device, inputs.params)
            out = nnx.merge(graphdef, params)(x, own, inputs.cache)
            # No gradient changes a buffer.
            return out._replace(buffer_inputs=jax.lax.stop_gradient(out.buffer_inputs))

        if self._caches is not None:
            return layer
        return rematerialized(layer, self._config.remat, self._config.kept, dtype)

    def _cache(self, name: str) -> KVCache | None:
        if self._caches is None:
            return None
        return self._caches[name]


def aux_of_period(
    names: Sequence[str], stacked: Sequence[ScannedLayerOut], before: LayerAux = NOTHING
) -> LayerAux:
    """Return `before` with the outputs of the layers of the period merged in.

    Args:
        names: names of the places in the period.
        stacked: the kept outputs of each place, [R, ...].
    """
    aux = before
    for name, out in zip(names, stacked, strict=True):
        aux = aux.merged(name, _total(out.aux_losses), _total(out.metrics), out.buffer_inputs)
    return aux


def added_by_name(sums: Sums, more: Sums) -> Sums:
    """Return the union of both, with values of the same name added."""
    result = dict(sums)
    for name, new in more.items():
        if name in result:
            new = jax.tree.map(jnp.add, result[name], new)
        result[name] = new
    return result


def _total(sums: Sums) -> Sums:
    """Sum over repeats."""
    return jax.tree.map(lambda x: x.sum(0), sums)


def _unstack(tree: Any) -> list[Any]:
    """Split the leading dim of every leaf, with `lax.split`, whose gradient is one concatenation:
    indexing layer by layer would add one array of the full size per layer."""
    leaves, structure = jax.tree.flatten(tree)
    parts = len(leaves[0])
    columns = []
    for leaf in leaves:
        columns.append([part[0] for part in jax.lax.split(leaf, (1,) * parts)])
    return [jax.tree.unflatten(structure, row) for row in zip(*columns, strict=True)]
