"""Norms of each layer's gradient, weights and update, taken on the device within the step.

A parameter that is stacked over repeats of layers has a norm for each of them.
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

# What norms are of, in the order of the rows of `measure_norms`.
MEASURED = ("gradient", "weight", "update")
_PLACE = re.compile(r"layers\.(prefix_|rest_)?(\d+)\.(.*)")


def norm_names(params: PyTree, whole: PyTree | None = None) -> list[str]:
    """Names such as `layers.3.mlp.up.kernel`, in the order of `measure_norms`.

    Layers are counted through the model from 0, those of a prefix, of the repeated period and of a
    rest. What belongs to no layer keeps its path.

    Args:
        params: abstract ones, or arrays.
        whole: all parameters of the model, which layers are counted by; None: these are all.
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
    """Of each leaf, whether its first dim is that of repeated layers."""
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
    """Euclidean norms in float32, a row for each of MEASURED, whole on every device.

    Args:
        stacked: of each leaf, see `is_stacked`.
        grads: of the loss, unscaled and before clipping.
        before: parameters that the update is of.
        after: parameters that it would make.
        is_applied: whether the step is not refused. One that is updates nothing.
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
    """Zeros, where norms are not due."""
    count = 0
    for leaf, is_repeated in zip(jax.tree.leaves(params), stacked, strict=True):
        count += leaf.shape[0] if is_repeated else 1
    return constrain(jnp.zeros((len(MEASURED), count)), None, None)


def _norms(
    stacked: Sequence[bool], numbers: Callable[..., Array], *trees: nnx.State
) -> Float[Array, "N"]:
    """Norms of what `numbers` makes of the leaves of the trees, which lie in one place."""
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
