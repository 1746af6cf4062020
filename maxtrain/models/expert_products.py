"""Results of experts for a device's tokens, with all experts on the device or sharded.

This code runs on each device of a mesh by itself, inside `jax.shard_map`, or on a single device.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from data_pipeline.base.errors import ConfigError
from maxtrain.models.expert_bank import added_by_pairs, added_by_sets
from maxtrain.models.mlp import gated
from maxtrain.models.specs import MoeSpec
from maxtrain.ops.dot import MatmulPrecision
from maxtrain.ops.einsum import contract
from maxtrain.ops.expert_all_to_all import Exchange, Weights, exchanged, room_of, to_experts
from maxtrain.ops.experts import (
    add_bias,
    block_size,
    combine,
    dispatch,
    expert_dot,
    expert_of_rows,
    grouped_dot,
    order_by_pair,
    order_by_place,
    quantized_expert_dot,
    quantized_grouped_dot,
)
from maxtrain.ops.names import GATE_UP, named
from maxtrain.ops.quantized import QuantizedArray
from maxtrain.ops.recompute import elementwise


class ExpertAssignment(NamedTuple):
    """Expert choices of tokens with their weights; E for no expert."""

    experts: Int[Array, "B T C"]
    weights: Float[Array, "B T C"]
    # The index of each choice among those of its row that its expert accepts, if experts have a
    # capacity.
    places: Int[Array, "B T C"]
    # The adapter set of each token's row; 0 for none. It has the dims of the other arrays, so that
    # it is sharded like them.
    sets: Int[Array, "B T 1"]


class ExpertSharding(NamedTuple):
    """The sharding of experts over the mesh; None: not sharded.

    Attributes:
        units: mesh axis of the experts' hidden units.
        experts: mesh axis of whole experts.
        has_own_tokens: whether tokens are also sharded over the axis of experts. If not, all of its
            devices have the same tokens.
        deals_out: whether results of sharded hidden units are reduce-scattered over tokens along
            that axis.
        axes: all axes of the mesh.
    """

    units: str | None = None
    experts: str | None = None
    has_own_tokens: bool = False
    deals_out: bool = False
    axes: tuple[str, ...] = ()


class ExpertSettings(NamedTuple):
    """Settings of the experts' computation.

    Attributes:
        moe: spec of the block.
        recipe: types of its products.
        capacity: capacity of an expert for each row; None: unlimited.
    """

    moe: MoeSpec
    recipe: MatmulPrecision
    capacity: int | None


def share(
    work: ExpertSettings,
    layout: ExpertSharding,
    x: Float[Array, "B T D"],
    taken: ExpertAssignment,
    weights: Weights,
) -> Float[Array, "B S D"]:
    """Return the experts' results for a device's tokens, float32; or its part of them, see the
    sharding.

    Args:
        work: settings of the computation.
        layout: the sharding of experts and tokens.
        x: the device's tokens.
        taken: their expert choices, by numbers in the whole model.
        weights: the device's part of the experts, by names such as `up.kernel` and `down.bias`; see
            `ExpertLinear.parts`.
    """
    tokens = x.reshape(-1, x.shape[-1])
    summed = []
    if layout.units is not None and not layout.deals_out:
        summed.append(layout.units)
    if layout.units is not None and "down.bias" in weights:
        # Only the first of the devices that share hidden units adds the bias.
        bias = weights["down.bias"]
        is_first = jax.lax.axis_index(layout.units) == 0
        weights = weights | {"down.bias": jnp.where(is_first, bias, jnp.zeros_like(bias))}
    if layout.experts is None:
        out = _here(work, tokens, taken, weights)
    elif layout.has_own_tokens:
        out = _everywhere(work, layout, layout.experts, tokens, taken, weights)
    else:
        out = _here(work, tokens, _numbered_here(taken, layout.experts, weights), weights)
        summed.append(layout.experts)
    out = out.reshape(x.shape)
    if layout.deals_out:
        assert layout.units is not None
        out = jax.lax.psum_scatter(out, layout.units, scatter_dimension=1, tiled=True)
    if summed:
        out = jax.lax.psum(out, tuple(summed))
    return out


def _num_experts(weights: Weights) -> int:
    """Return the number of experts on the device."""
    return next(iter(weights.values())).shape[0]


def _numbered_here(taken: ExpertAssignment, axis: str, weights: Weights) -> ExpertAssignment:
    """Renumber experts by their index on this device; choices of other devices' experts get no
    expert."""
    count = _num_experts(weights)
    numbers = taken.experts - jax.lax.axis_index(axis) * count
    is_here = (numbers >= 0) & (numbers < count)
    return taken._replace(experts=jnp.where(is_here, numbers, count))


def _here(
    work: ExpertSettings, x: Float[Array, "N D"], taken: ExpertAssignment, weights: Weights
) -> Float[Array, "N D"]:
    """Return the results of this device's experts, by their numbers here."""
    E = _num_experts(weights)
    num_choices = taken.experts.shape[-1]
    gates = taken.weights.reshape(-1, num_choices)
    experts = taken.experts.reshape(-1, num_choices)
    if work.moe.routing.kernel == "eager":
        return _by_all(work, x, experts, gates, taken.sets.reshape(-1), weights)
    if work.capacity is not None:
        order = order_by_place(taken.experts, taken.places, E, work.capacity)
        rows = dispatch(x, order)
        sets = jnp.repeat(taken.sets[:, 0, 0], work.capacity)
        made = _with_capacity(work, rows.reshape(E, -1, rows.shape[-1]), sets, weights)
        return combine(made.reshape(rows.shape), gates, order)
    return _by_chosen(work, x, experts, gates, taken.sets.reshape(-1), weights)


def _num_sets(weights: Weights) -> int:
    """Return the number of adapter sets, including the empty one."""
    banks = [value for name, value in weights.items() if name.endswith(".bank_a")]
    if not banks:
        return 1
    return banks[0].shape[1]


def _everywhere(
    work: ExpertSettings,
    layout: ExpertSharding,
    axis: str,
    x: Float[Array, "N D"],
    taken: ExpertAssignment,
    weights: Weights,
) -> Float[Array, "N D"]:
    """Return the results of all experts, which are sharded over the same axis as the tokens.

    Raises a ConfigError if rows have adapters of their own, whose numbers are not sent with tokens.
    """
    if _num_sets(weights) > 1:
        raise ConfigError(
            "mesh.expert: rows that have adapters of their own need all experts on their device. "
            "Set mesh.expert=1, and mesh.fsdp or mesh.tensor higher."
        )
    each = _num_experts(weights)
    num_devices = jax.lax.axis_size(axis)
    num_choices = taken.experts.shape[-1]
    gates = taken.weights.reshape(-1, num_choices)
    if work.moe.routing.kernel == "eager":
        return _by_all_everywhere(work, axis, x, taken, weights)
    if work.capacity is not None:
        E = work.moe.num_experts
        order = order_by_place(taken.experts, taken.places, E, work.capacity)
        rows = dispatch(x, order)
        received = to_experts(rows, axis).reshape(num_devices, each, -1, x.shape[-1])
        of_experts = received.swapaxes(0, 1).reshape(each, -1, x.shape[-1])
        sets = jnp.zeros(of_experts.shape[1], jnp.int32)
        made = _with_capacity(work, of_experts, sets, weights)
        made = made.reshape(each, num_devices, -1, x.shape[-1]).swapaxes(0, 1)
        return combine(to_experts(made.reshape(rows.shape), axis), gates, order)

    def of_rows(rows: Array, experts: Array, weights: Weights) -> Array:
        alone = jnp.ones((rows.shape[0], 1), jnp.float32)
        sets = jnp.zeros(rows.shape[0], jnp.int32)
        out = _by_chosen(work, rows, experts[:, None], alone, sets, weights)
        # Rounded to the type of one expert's result, as before the sum.
        return out.astype(work.recipe.result)

    most = x.shape[0] * min(num_choices, each)
    factor = work.moe.routing.exchange_factor
    room = room_of(x.shape[0] * num_choices, num_devices, factor, most)
    exchange = Exchange(axis, num_devices, each, room, most, layout.axes, of_rows)
    return exchanged(exchange, x, taken.experts.reshape(-1, num_choices), gates, weights)


def _by_all_everywhere(
    work: ExpertSettings,
    axis: str,
    x: Float[Array, "N D"],
    taken: ExpertAssignment,
    weights: Weights,
) -> Float[Array, "N D"]:
    """Compute the oracle for sharded experts: each device gathers all tokens for its own
    experts."""

    def of_all(array: Array) -> Array:
        return jax.lax.all_gather(array, axis, tiled=True)

    gathered = _numbered_here(ExpertAssignment(*map(of_all, taken)), axis, weights)
    out = _here(work, of_all(x), gathered, weights)
    return jax.lax.psum_scatter(out, axis, tiled=True)


def _by_all(
    work: ExpertSettings,
    x: Float[Array, "N D"],
    experts: Int[Array, "N C"],
    gates: Float[Array, "N C"],
    sets: Int[Array, " N"],
    weights: Weights,
) -> Float[Array, "N D"]:
    """Compute the oracle: every expert for every token, most of them with weight 0."""
    E = _num_experts(weights)
    recipe = work.recipe
    is_chosen = jax.nn.one_hot(experts, E, dtype=jnp.float32)
    of_experts = (is_chosen * gates[..., None]).sum(1)
    added = functools.partial(added_by_sets, numbers=sets, recipe=recipe)

    def biased(y: Array, bias: Array) -> Array:
        return y.astype(jnp.float32) + bias.astype(jnp.float32)[:, None]

    inputs = jnp.broadcast_to(x, (E, *x.shape))
    products = _Products(expert_dot, quantized_expert_dot, added, biased)
    out = _hidden_and_out(work, inputs, weights, products)
    return contract("ne,end->nd", of_experts, out.astype(jnp.float32))


def _with_capacity(
    work: ExpertSettings, x: Float[Array, "E R D"], sets: Int[Array, " R"], weights: Weights
) -> Float[Array, "E R D"]:
    """Compute the results of rows, with the same number for each expert."""
    E, R, _ = x.shape
    recipe = work.recipe
    added = functools.partial(added_by_sets, numbers=sets, recipe=recipe)

    def biased(y: Array, bias: Array) -> Array:
        flat = add_bias(y.reshape(E * R, -1), bias, jnp.arange(E).repeat(R))
        return flat.reshape(y.shape)

    products = _Products(expert_dot, quantized_expert_dot, added, biased)
    return _hidden_and_out(work, x, weights, products)


def _by_chosen(
    work: ExpertSettings,
    x: Float[Array, "N D"],
    experts: Int[Array, "N C"],
    gates: Float[Array, "N C"],
    sets: Int[Array, " N"],
    weights: Weights,
) -> Float[Array, "N D"]:
    """Compute only the chosen experts of each token."""
    E = _num_experts(weights)
    recipe = work.recipe
    block = block_size(experts.size, E)
    order, pairs = order_by_pair(experts, sets, E, _num_sets(weights), block)
    kernel = work.moe.routing.kernel
    assert kernel != "eager"
    added = functools.partial(
        added_by_pairs, pairs=pairs, block=block, kernel=kernel, recipe=recipe
    )

    def grouped(inputs: Array, matrices: Array, recipe: MatmulPrecision) -> Array:
        return grouped_dot(inputs, matrices, order, block, kernel, recipe)

    def quantized(inputs: Array, stored: QuantizedArray, recipe: MatmulPrecision) -> Array:
        return quantized_grouped_dot(inputs, stored, order, block, kernel, recipe)

    def biased(y: Array, bias: Array) -> Array:
        return add_bias(y, bias, expert_of_rows(order, block))

    products = _Products(grouped, quantized, added, biased)
    out = _hidden_and_out(work, dispatch(x, order), weights, products)
    return combine(out, gates, order)


class _Products(NamedTuple):
    """The products of rows, sorted by expert, with the weights.

    Attributes:
        with_matrices, with_quantized: products with plain and with quantised weights.
        of_bank: contribution of the rows' own adapters, from x and all A and B; float32.
        biased: adds the biases of experts to results; float32.
    """

    with_matrices: Callable[[Array, Array, MatmulPrecision], Array]
    with_quantized: Callable[[Array, QuantizedArray, MatmulPrecision], Array]
    of_bank: Callable[[Array, Array, Array], Array]
    biased: Callable[[Array, Array], Array]


def _product(
    x: Array, weights: Weights, name: str, recipe: MatmulPrecision, products: _Products
) -> Array:
    """Multiply x with the weights of a name, and add the bias."""
    out = _without_bias(x, weights, name, recipe, products)
    bias = weights.get(f"{name}.bias")
    if bias is None:
        return out
    return products.biased(out, bias).astype(recipe.result)


def _without_bias(
    x: Array, weights: Weights, name: str, recipe: MatmulPrecision, products: _Products
) -> Array:
    """Multiply x with the weights of a name. For quantised weights, the adapter is a separate
    product."""
    kernel = weights.get(f"{name}.kernel")
    if kernel is not None:
        out = products.with_matrices(x, kernel, recipe)
        bank = weights.get(f"{name}.bank_a")
        if bank is None:
            return out
        added = products.of_bank(x, bank, weights[f"{name}.bank_b"])
        return (out.astype(jnp.float32) + added).astype(recipe.result)
    stored = QuantizedArray(weights[f"{name}.codes"], weights[f"{name}.scales"])
    out = products.with_quantized(x, stored, recipe)
    exact = MatmulPrecision.of(recipe.inputs)
    low = products.with_matrices(x, weights[f"{name}.a"], exact)
    added = products.with_matrices(low, weights[f"{name}.b"], exact)
    return (out.astype(jnp.float32) + added).astype(recipe.result)


def _hidden_and_out(work: ExpertSettings, x: Array, weights: Weights, products: _Products) -> Array:
    """Compute hidden units of x, and the output from them."""
    activated = functools.partial(gated, work.moe.activation)
    gate = named(_product(x, weights, "gate", work.recipe, products), GATE_UP)
    up = named(_product(x, weights, "up", work.recipe, products), GATE_UP)
    hidden = elementwise(activated, gate, up)
    return _product(hidden, weights, "down", work.recipe, products)
