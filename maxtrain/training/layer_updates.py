"""Updates made one layer after another, of moments that lie in the memory of hosts.

A device holds parameters and gradients whole, and of the moments those of one layer: they are
fetched, changed and sent back. What belongs to no stack of layers (embeddings, the last norm) is
one more piece. Only for optimizers that change each number by itself: then a layer's update is what
it would be among all others.

A step reads moments twice: whether the result is finite is known before any of it is written.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Bool, Int, PyTree

from maxtrain.models.registry import logical_axes
from maxtrain.ops.finite import finite_leaves
from maxtrain.parallel.host_memory import on_device, where_it_was
from maxtrain.training.optimizer import apply_updates

# Of variables that belong to no stack of layers.
_REST = 0


class LayerUpdates(NamedTuple):
    """An optimizer in two parts.

    Attributes:
        clipping: looks at all gradients together, and keeps nothing.
        optimizer: all else; its state is that of the whole optimizer.
    """

    clipping: optax.GradientTransformation
    optimizer: optax.GradientTransformation


class PendingUpdate:
    """The update of a step, before any of it is written. To be used inside jit.

    Args:
        rule: of the updates.
        grads: of all parameters that train.
        params: these, on the devices.
        opt_state: of the whole optimizer; its arrays lie on hosts.
    """

    def __init__(self, rule: LayerUpdates, grads: nnx.State, params: nnx.State, opt_state: PyTree):
        clipped, _ = rule.clipping.update(grads, rule.clipping.init(params), params)
        self._optimizer = rule.optimizer
        self._grads, self._grads_tree = jax.tree.flatten(clipped, is_leaf=_is_variable)
        self._before, self._tree = jax.tree.flatten((params, opt_state), is_leaf=_is_variable)
        self._depths = [_depth(x) for x in self._before]

    def finite(self) -> Bool[Array, " leaves"]:
        """Of each array of parameters and then optimizer state, whether all its new numbers are
        finite."""
        found = [jnp.ones((), bool)] * len(self._before)
        for depth in self._stacks():
            places = self._places(depth)
            arrays = self._arrays(places)

            def look(
                layer: Int[Array, ""],
                finite: Bool[Array, " arrays"],
                depth: int = depth,
                arrays: list[Array] = arrays,
            ) -> Bool[Array, " arrays"]:
                return finite & finite_leaves(self._after_layer(depth, layer, arrays))

            finite = jax.lax.fori_loop(0, depth, look, jnp.ones(len(places), bool))
            for number, place in enumerate(places):
                found[place] = finite[number]
        for place, new in self._after_rest().items():
            found[place] = finite_leaves(new)[0]
        return jnp.stack(found)

    def written_if(self, apply: Bool[Array, ""]) -> tuple[nnx.State, PyTree]:
        """Parameters and optimizer state after the step: new ones, or those from before."""
        after = list(self._before)
        for depth in self._stacks():
            places = self._places(depth)

            def write(
                layer: Int[Array, ""], arrays: list[Array], depth: int = depth
            ) -> list[Array]:
                changed = self._after_layer(depth, layer, arrays)
                written = []
                for array, new in zip(arrays, changed, strict=True):
                    kept = jnp.where(apply, new, on_device(_at(array, layer)))
                    written.append(_with(array, where_it_was(kept, array), layer))
                return written

            arrays = jax.lax.fori_loop(0, depth, write, self._arrays(places))
            for place, array in zip(places, arrays, strict=True):
                after[place] = self._before[place].replace(array)
        for place, new in self._after_rest().items():
            old = self._before[place]
            if not _is_variable(old):
                after[place] = jnp.where(apply, new, old)
                continue
            there = old.get_value()
            kept = jnp.where(apply, new.get_value(), on_device(there))
            after[place] = old.replace(where_it_was(kept, there))
        return jax.tree.unflatten(self._tree, after)

    def _stacks(self) -> list[int]:
        """How many layers are stacked, of each kind of stack."""
        return sorted({depth for depth in self._depths if depth is not None} - {_REST})

    def _places(self, depth: int) -> list[int]:
        return [place for place, found in enumerate(self._depths) if found == depth]

    def _arrays(self, places: list[int]) -> list[Array]:
        return [self._before[place].get_value() for place in places]

    def _after_layer(self, depth: int, layer: Int[Array, ""], arrays: list[Array]) -> list[Array]:
        """What becomes of one layer of the stacks of this depth, [1, ...] each, on the devices."""
        values = dict(zip(self._places(depth), arrays, strict=True))

        def piece(place: int, variable: nnx.Variable) -> Array:
            return on_device(_at(values[place], layer))

        def gradient(place: int, variable: nnx.Variable) -> Array:
            return _at(variable.get_value(), layer)

        after = self._after(depth, piece, gradient)
        return [after[place].get_value() for place in values]

    def _after_rest(self) -> dict[int, PyTree]:
        """What becomes of all that belongs to no stack, by its place; counters among it."""

        def piece(place: int, variable: nnx.Variable) -> Array:
            return on_device(variable.get_value())

        after = self._after(_REST, piece, piece)
        places = [place for place, depth in enumerate(self._depths) if depth in (_REST, None)]
        return {place: after[place] for place in places}

    def _after(
        self,
        depth: int,
        piece: Callable[[int, nnx.Variable], Array],
        gradient: Callable[[int, nnx.Variable], Array],
    ) -> list[PyTree]:
        """All variables and counters after the update of a part of them. The others have no
        numbers: what is done to these costs nothing."""

        def part_of(
            variables: list[PyTree], of: Callable[[int, nnx.Variable], Array]
        ) -> list[PyTree]:
            found = []
            for place, variable in enumerate(variables):
                if not _is_variable(variable):
                    found.append(variable)
                elif self._depths[place] == depth:
                    found.append(variable.replace(of(place, variable)))
                else:
                    found.append(variable.replace(jnp.zeros(0, variable.get_value().dtype)))
            return found

        before = jax.tree.unflatten(self._tree, part_of(self._before, piece))
        # Parameters come first, in the order of their gradients.
        grads = jax.tree.unflatten(self._grads_tree, part_of(self._grads, gradient))
        params, opt_state = before
        updates, new_state = self._optimizer.update(grads, opt_state, params)
        changed = (apply_updates(params, updates), new_state)
        changed = jax.tree.map(lambda new, old: new.astype(old.dtype), changed, before)
        return jax.tree.leaves(changed, is_leaf=_is_variable)


def _is_variable(x: PyTree) -> bool:
    return isinstance(x, nnx.Variable)


def _depth(x: PyTree) -> int | None:
    """How many layers are stacked in a variable; None: it is a counter."""
    if not _is_variable(x):
        return None
    axes = logical_axes(x)
    if axes and axes[0] == "layers":
        return x.get_value().shape[0]
    return _REST


def _at(array: Array, layer: Int[Array, ""]) -> Array:
    return jax.lax.dynamic_slice_in_dim(array, layer, 1)


def _with(array: Array, new: Array, layer: Int[Array, ""]) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(array, new, layer, 0)
