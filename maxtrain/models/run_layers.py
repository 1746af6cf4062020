"""Runs a stack of layers: its period as one scanned loop or unrolled, with the same results.

Remat policies (`model.remat`), by what the backward pass finds stored instead of computing it
again:
    none           everything
    dots           results of all matrix products
    dots_no_batch  results of products with weights, not those of attention's scores
    full           the input of each layer only

All of these are stored in the type of activations; what attention stores of its own, such as the
scores under dots, stays float32.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxtrain.config.schema import PipelineConfig
from maxtrain.models.cache import Caches, KVCache
from maxtrain.models.context import Context
from maxtrain.models.layers import LayerOut
from maxtrain.models.pipeline import form_for, pipelined
from maxtrain.models.stack import Stack
from maxtrain.ops.dot import PRODUCT
from maxtrain.ops.sums import Sum
from maxtrain.parallel.sharding import stages

Policy = Callable[..., Any]
_POLICIES = jax.checkpoint_policies
REMAT: dict[str, Policy | None] = {
    "full": None,
    "dots": _POLICIES.checkpoint_dots,
    "dots_no_batch": _POLICIES.checkpoint_dots_with_no_batch_dims,
}
Sums = dict[str, Sum]


def _is_product_of_attention(primitive: Any, *arrays: Any, **options: Any) -> bool:
    """A policy: what is stored are the results of products of activations with each other, which
    are those with batch dims."""
    if _POLICIES.checkpoint_dots_with_no_batch_dims(primitive, *arrays, **options):
        return False
    return _POLICIES.checkpoint_dots(primitive, *arrays, **options)


# Products accumulate in float32. Where activations are stored in fewer bits, the results that are
# kept are those that have been rounded.
_ROUNDED = _POLICIES.save_only_these_names(PRODUCT)
REMAT_OF_ROUNDED: dict[str, Policy | None] = {
    "full": None,
    "dots": _POLICIES.save_from_both_policies(_ROUNDED, _is_product_of_attention),
    "dots_no_batch": _ROUNDED,
}


class StackOut(NamedTuple):
    """What all layers together give back."""

    x: Float[Array, "B T D"]
    caches: Caches | None
    terms: Sums  # of the loss, added up over layers
    stats: Sums  # what is recorded, added up over layers
    # By the path of the buffer, such as `0.mlp.bias`; [R, ...] for a place in the period.
    observed: dict[str, Array]


class _Inputs(NamedTuple):
    """What one layer has of its own; stacked over repeats for a place in the period."""

    params: Any
    cache: KVCache | None
    index: Array | None  # of the layer, where something is random


class _Kept(NamedTuple):
    """What is kept of a layer's output until all have run."""

    cache: KVCache | None
    terms: Sums
    stats: Sums
    observed: dict[str, Array]


def run_layers(
    stack: Stack,
    x: Float[Array, "B T D"],
    context: Context,
    caches: Caches | None,
    *,
    scan: bool,
    remat: str,
    pipeline: PipelineConfig,
) -> StackOut:
    """x through all layers, in order.

    Args:
        stack: the layers.
        x: [B, T, D] what the first one gets.
        context: what they share. Noise is drawn by the number of a layer.
        caches: as of `Stack.new_caches`; None: there are none.
        scan: the period as one loop, which compiles fast; else unrolled, which runs fast.
        remat: a name of the tables above. With caches there is no backward pass, and no remat.
        pipeline: how rows go through the stages of the current mesh, if it has any. With caches
            they don't: each device computes all layers.
    """
    spec = stack.spec
    if caches is not None:
        remat = "none"
    indices = None
    if context.noise is not None:
        indices = jnp.arange(spec.num_layers)
    in_period = len(spec.period) * spec.repeats
    policies = REMAT
    if x.dtype != jnp.float32:
        policies = REMAT_OF_ROUNDED
    run = _Run(stack, context, remat, policies, caches, indices)
    for number, name in enumerate(stack.prefix_names()):
        x = run.single(name, number, x)
    x = run.period(x, len(spec.prefix), scan, pipeline)
    for number, name in enumerate(stack.rest_names(), len(spec.prefix) + in_period):
        x = run.single(name, number, x)
    new_caches = None
    if caches is not None:
        new_caches = {name: run.new_caches[name] for name in caches}
    return StackOut(x, new_caches, run.terms, run.stats, run.observed)


class _Run:
    """One pass through a stack, and what it has gathered so far."""

    def __init__(
        self,
        stack: Stack,
        context: Context,
        remat: str,
        policies: dict[str, Policy | None],
        caches: Caches | None,
        indices: Array | None,
    ):
        self._stack = stack
        self._context = context
        self._remat = remat
        self._policies = policies
        self._caches = caches
        self._indices = indices
        self.new_caches: Caches = {}
        self.terms: Sums = {}
        self.stats: Sums = {}
        self.observed: dict[str, Array] = {}

    def single(self, name: str, number: int, x: Array) -> Array:
        """A layer of the prefix or of the rest."""
        graphdef, params = nnx.split(getattr(self._stack, name))
        index = None
        if self._indices is not None:
            index = self._indices[number]
        layer = self._function(graphdef, self._context)
        return self._take(name, layer(x, _Inputs(params, self._cache(name), index)))

    def period(self, x: Array, first: int, scan: bool, pipeline: PipelineConfig) -> Array:
        """The period, as often as it is repeated; `first` is the number of its first layer."""
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
            inputs.append(_Inputs(params, self._cache(name), index))

        def through(x: Array, context: Context, inputs: list[_Inputs]) -> tuple[Array, list[_Kept]]:
            """Some repeats, one after the other."""
            layers = [self._function(graphdef, context) for graphdef in graphdefs]

            def once(x: Array, parts: list[_Inputs]) -> tuple[Array, list[_Kept]]:
                kept = []
                for layer, part in zip(layers, parts, strict=True):
                    out = layer(x, part)
                    x = out.x
                    kept.append(_Kept(out.cache, out.terms, out.stats, out.observed))
                return x, kept

            if scan:
                return jax.lax.scan(once, x, inputs)
            each = []
            for parts in _unstack(inputs):
                x, kept = once(x, parts)
                each.append(kept)
            return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)

        if stages() > 1 and self._caches is None:
            form = form_for(x.shape[0], pipeline)
            x, stacked = pipelined(through, x, self._context, inputs, form)
        else:
            x, stacked = through(x, self._context, inputs)
        for name, out in zip(names, stacked, strict=True):
            if out.cache is not None:
                self.new_caches[name] = out.cache
            self._add(_total(out.terms), _total(out.stats))
            self._observe(name, out.observed)
        return x

    def _function(
        self, graphdef: nnx.GraphDef, context: Context
    ) -> Callable[[Array, _Inputs], LayerOut]:
        """A layer as a function."""
        num_layers = self._stack.spec.num_layers

        def layer(x: Array, inputs: _Inputs) -> LayerOut:
            own = context
            if context.noise is not None:
                assert inputs.index is not None
                own = context._replace(noise=context.noise.layer(inputs.index, num_layers))
            out = nnx.merge(graphdef, inputs.params)(x, own, inputs.cache)
            # No gradient changes a buffer.
            return out._replace(observed=jax.lax.stop_gradient(out.observed))

        if self._remat == "none":
            return layer
        return jax.checkpoint(layer, policy=self._policies[self._remat])

    def _cache(self, name: str) -> KVCache | None:
        if self._caches is None:
            return None
        return self._caches[name]

    def _take(self, name: str, out: LayerOut) -> Array:
        if out.cache is not None:
            self.new_caches[name] = out.cache
        self._add(out.terms, out.stats)
        self._observe(name, out.observed)
        return out.x

    def _observe(self, name: str, observed: dict[str, Array]) -> None:
        for path, value in observed.items():
            self.observed[f"{name}.{path}"] = value

    def _add(self, terms: Sums, stats: Sums) -> None:
        self.terms = _added(self.terms, terms)
        self.stats = _added(self.stats, stats)


def _added(sums: Sums, more: Sums) -> Sums:
    """Both, those of one name added up."""
    result = dict(sums)
    for name, new in more.items():
        if name in result:
            new = jax.tree.map(jnp.add, result[name], new)
        result[name] = new
    return result


def _total(sums: Sums) -> Sums:
    """Added up over repeats."""
    return jax.tree.map(lambda x: x.sum(0), sums)


def _unstack(tree: Any) -> list[Any]:
    """Splits the leading dim of every leaf. By `lax.split`, whose gradient is one concatenation:
    indexing layer by layer would add so many arrays of the full size."""
    leaves, structure = jax.tree.flatten(tree)
    parts = len(leaves[0])
    columns = []
    for leaf in leaves:
        columns.append([part[0] for part in jax.lax.split(leaf, (1,) * parts)])
    return [jax.tree.unflatten(structure, row) for row in zip(*columns, strict=True)]
