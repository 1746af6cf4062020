"""Norms of each layer's gradient, weights and update, measured on the device within the step.

A parameter that is stacked over repeated layers has one norm for each layer.
"""

import re
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, PyTree

from maxtrain.models.registry import logical_axes
from maxtrain.parallel.host_memory import by_layer, is_on_host
from maxtrain.parallel.sharding import constrain
from maxtrain.train_step.optimizer import paths

# The rows of `measure_norms`, in their order.
MEASURED = ("gradient", "weight", "update")
_PLACE = re.compile(r"layers\.(prefix_|rest_)?(\d+)\.(.*)")


def norm_names(params: PyTree, whole: PyTree | None = None) -> list[str]:
    """Return names such as `layers.3.mlp.up.kernel`, in the order of `measure_norms`.

    Layers are numbered through the model from 0: prefix, repeated period, rest. A parameter that
    belongs to no layer keeps its path.

    Args:
        params: parameters to name, abstract or arrays.
        whole: all parameters of the model, by which layers are numbered; None: `params` are all.
    """
    if whole is None:
        whole = params
    named = paths(params)
    places: dict[str, set[int]] = {"prefix_": set(), "": set(), "rest_": set()}
    repeats = 0
    for path, variable in paths(whole).items():
        found = _PLACE.fullmatch(path)
        if found:
            kind = found[1] or ""
            places[kind].add(int(found[2]))
            if kind == "":
                repeats = variable.get_value().shape[0]
    num_prefix = len(places["prefix_"])
    period = len(places[""])
    names = []
    for path in named:
        found = _PLACE.fullmatch(path)
        if not found:
            names.append(path)
            continue
        kind = found[1] or ""
        place = int(found[2])
        if kind == "prefix_":
            numbers = [place]
        elif kind == "rest_":
            numbers = [num_prefix + period * repeats + place]
        else:
            numbers = [num_prefix + period * repeat + place for repeat in range(repeats)]
        names += [f"layers.{number}.{found[3]}" for number in numbers]
    return names


def is_stacked(params: PyTree) -> list[bool]:
    """Return for each leaf whether its first dim is that of repeated layers."""
    stacked = []
    for variable in paths(params).values():
        axes = logical_axes(variable)
        stacked.append(bool(axes) and axes[0] == "layers")
    return stacked


def measure_norms(
    stacked: Sequence[bool],
    grads: nnx.State,
    before: nnx.State,
    after: nnx.State,
    is_applied: Bool[Array, ""],
) -> Float[Array, "3 N"]:
    """Measure Euclidean norms in float32, a row for each of MEASURED, replicated on every device.

    Args:
        stacked: from `is_stacked`.
        grads: gradients of the loss, unscaled and before clipping.
        before: parameters before the update.
        after: parameters after the update.
        is_applied: whether the step is applied; otherwise the norms of the update are 0.
    """

    def change(new: Array, old: Array) -> Array:
        return new.astype(jnp.float32) - old.astype(jnp.float32)

    def itself(x: Array) -> Array:
        return x.astype(jnp.float32)

    update_norms = _norms(stacked, change, after, before)
    rows = [
        _norms(stacked, itself, grads),
        _norms(stacked, itself, before),
        jnp.where(is_applied, update_norms, jnp.zeros_like(update_norms)),
    ]
    return constrain(jnp.stack(rows), None, None)


def no_norms(stacked: Sequence[bool], params: nnx.State) -> Float[Array, "3 N"]:
    """Return zeros in the shape of `measure_norms`, for steps where norms are not due."""
    count = 0
    for leaf, is_repeated in zip(jax.tree.leaves(params), stacked, strict=True):
        count += leaf.shape[0] if is_repeated else 1
    return constrain(jnp.zeros((len(MEASURED), count)), None, None)


def _norms(
    stacked: Sequence[bool], numbers: Callable[..., Array], *trees: nnx.State
) -> Float[Array, "N"]:
    """Return the norms of `numbers(*leaves)` for corresponding leaves of the trees."""
    squares = []
    each = zip(*map(jax.tree.leaves, trees), strict=True)
    for leaves, is_repeated in zip(each, stacked, strict=True):
        if is_on_host(leaves[0]):
            squares.append(by_layer(lambda *layer: (numbers(*layer) ** 2).sum(), *leaves))
            continue
        rows = leaves[0].shape[0] if is_repeated else 1
        found = numbers(*leaves)
        dims = tuple(range(int(is_repeated), found.ndim))
        squares.append((found**2).sum(dims).reshape(rows))
    return jnp.sqrt(jnp.concatenate(squares))
