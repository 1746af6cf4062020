"""Optimizer updates one layer after another, with moments in host memory (optimizer.on_host).

A device holds all gradients, and the parameters unless they are on hosts as well. Of the arrays on
hosts, it holds one layer at a time: the layer is fetched, updated and sent back. Variables that
belong to no stack of layers (embeddings, the last norm) form one more piece. This works only for
optimizers that update each element independently, so that a layer's update does not depend on other
layers.

A step reads the moments twice, because all results must be known to be finite before any is
written.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Bool, Int, PyTree

from maxtrain.config.schema import OptimizerConfig, ScheduleConfig
from maxtrain.models.registry import logical_axes
from maxtrain.ops.finite import finite_leaves
from maxtrain.parallel.host_memory import layer_of, on_device, where_it_was
from maxtrain.train_step.optimizer import apply_updates, make_clipping, make_optimizer

# The depth of variables that belong to no stack of layers.
_REST = 0


class LayerUpdates(NamedTuple):
    """An optimizer in two parts.

    Attributes:
        clipping: needs all gradients together, and has no state.
        optimizer: all other parts; its state is that of the whole optimizer.
    """

    clipping: optax.GradientTransformation
    optimizer: optax.GradientTransformation


def make_layer_updates(
    config: OptimizerConfig,
    schedule: ScheduleConfig,
    num_steps: int,
    params: nnx.State,
    factors: PyTree | None = None,
) -> LayerUpdates:
    """Build the optimizer of `make_optimizer` in two parts; arguments and errors as there."""
    unclipped = make_optimizer(config, schedule, num_steps, params, factors, clips=False)
    return LayerUpdates(make_clipping(config), unclipped)


class PendingUpdate:
    """The update of a step, before any of it is written. For use inside jit.

    Args:
        rule: the optimizer.
        grads: gradients of all trainable parameters.
        params: the trainable parameters, on the devices or on hosts.
        opt_state: the state of the whole optimizer, on hosts.
    """

    def __init__(self, rule: LayerUpdates, grads: nnx.State, params: nnx.State, opt_state: PyTree):
        clipped, _ = rule.clipping.update(grads, rule.clipping.init(params), params)
        self._optimizer = rule.optimizer
        self._grads, self._grads_tree = jax.tree.flatten(clipped, is_leaf=_is_variable)
        self._before, self._tree = jax.tree.flatten((params, opt_state), is_leaf=_is_variable)
        self._depths = [_depth(x) for x in self._before]

    def finite(self) -> Bool[Array, " leaves"]:
        """Return for each array of parameters and then optimizer state whether all its new elements
        are finite."""
        # Counters are always finite.
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
                new = self._after_layer(depth, layer, _fetched(arrays, layer))
                return finite & finite_leaves(new)

            finite = jax.lax.fori_loop(0, depth, look, jnp.ones(len(places), bool))
            for number, place in enumerate(places):
                found[place] = finite[number]
        places = self._places(_REST)
        pieces = [on_device(array) for array in self._arrays(places)]
        after = self._after(_REST, pieces, _whole)
        for place in places:
            found[place] = finite_leaves(after[place])[0]
        return jnp.stack(found)

    def written_if(self, apply: Bool[Array, ""]) -> tuple[nnx.State, PyTree]:
        """Return parameters and optimizer state after the step: updated if `apply`, else
        unchanged."""
        written = list(self._before)

        def kept(new: Array, piece: Array, array: Array) -> Array:
            return where_it_was(jnp.where(apply, new, piece), array)

        for depth in self._stacks():
            places = self._places(depth)

            def write(
                layer: Int[Array, ""], arrays: list[Array], depth: int = depth
            ) -> list[Array]:
                pieces = _fetched(arrays, layer)
                changed = []
                after = self._after_layer(depth, layer, pieces)
                for array, piece, new in zip(arrays, pieces, after, strict=True):
                    sent = kept(new, piece, array)
                    changed.append(jax.lax.dynamic_update_slice_in_dim(array, sent, layer, 0))
                return changed

            arrays = jax.lax.fori_loop(0, depth, write, self._arrays(places))
            for place, array in zip(places, arrays, strict=True):
                written[place] = self._before[place].replace(array)
        places = self._places(_REST)
        arrays = self._arrays(places)
        pieces = [on_device(array) for array in arrays]
        after = self._after(_REST, pieces, _whole)
        for place, array, piece in zip(places, arrays, pieces, strict=True):
            new = after[place].get_value()
            written[place] = self._before[place].replace(kept(new, piece, array))
        for place in self._places(None):
            written[place] = jnp.where(apply, after[place], self._before[place])
        return jax.tree.unflatten(self._tree, written)

    def _stacks(self) -> list[int]:
        """Return the number of layers of each kind of stack."""
        return sorted({depth for depth in self._depths if depth is not None} - {_REST})

    def _places(self, depth: int | None) -> list[int]:
        """Return the indices of the variables of this depth."""
        return [place for place, found in enumerate(self._depths) if found == depth]

    def _arrays(self, places: list[int]) -> list[Array]:
        """Return the arrays of the variables at these indices."""
        return [self._before[place].get_value() for place in places]

    def _after_layer(self, depth: int, layer: Int[Array, ""], pieces: list[Array]) -> list[Array]:
        """Update one layer of the stacks of this depth, [1, ...] each, on the devices."""

        def of_layer(gradient: Array) -> Array:
            return layer_of(gradient, layer)

        after = self._after(depth, pieces, of_layer)
        return [after[place].get_value() for place in self._places(depth)]

    def _after(
        self, depth: int, pieces: list[Array], of_gradient: Callable[[Array], Array]
    ) -> list[PyTree]:
        """Return all variables and counters after the update of the variables of one depth. The
        others are empty arrays, so their update costs nothing.

        Args:
            pieces: the variables of this depth, on the devices.
            of_gradient: selects the same piece of a gradient.
        """
        given = dict(zip(self._places(depth), pieces, strict=True))

        def empty(variable: nnx.Variable) -> nnx.Variable:
            return variable.replace(jnp.zeros(0, variable.get_value().dtype))

        before = []
        for place, variable in enumerate(self._before):
            if place in given:
                before.append(variable.replace(given[place]))
            elif _is_variable(variable):
                before.append(empty(variable))
            else:
                before.append(variable)
        grads = []
        # Parameters come first, in the order of their gradients.
        for place, gradient in enumerate(self._grads):
            if place in given:
                grads.append(gradient.replace(of_gradient(gradient.get_value())))
            else:
                grads.append(empty(gradient))
        params, opt_state = jax.tree.unflatten(self._tree, before)
        updates, new_state = self._optimizer.update(
            jax.tree.unflatten(self._grads_tree, grads), opt_state, params
        )
        changed = (apply_updates(params, updates), new_state)
        changed = jax.tree.map(lambda new, old: new.astype(old.dtype), changed, (params, opt_state))
        return jax.tree.leaves(changed, is_leaf=_is_variable)


def _is_variable(x: PyTree) -> bool:
    return isinstance(x, nnx.Variable)


def _depth(x: PyTree) -> int | None:
    """Return the number of layers stacked in a variable; None: it is a counter."""
    if not _is_variable(x):
        return None
    axes = logical_axes(x)
    if axes and axes[0] == "layers":
        return x.get_value().shape[0]
    return _REST


def _fetched(arrays: list[Array], layer: Int[Array, ""]) -> list[Array]:
    """Fetch one layer of each array to the devices."""
    return [on_device(layer_of(array, layer)) for array in arrays]


def _whole(gradient: Array) -> Array:
    """Return the gradient itself, as the piece of a variable without layers."""
    return gradient
