"""All-to-all exchange for expert parallelism: tokens go to the devices of their experts, and
results come back.

Along a mesh axis, each of P devices has E / P consecutive experts. A device sends each of them at
most `room` rows at a time. Further rows go in further turns, as many as the fullest device of the
whole mesh needs. So no choice is ever dropped, and buffers have P `room` rows however unevenly
tokens choose; without turns they would need P times as many rows as a device has choices.

Turns after the first are a loop that is rarely entered. It stores nothing for the backward pass,
which sends the tokens and computes the results once more.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maxtrain.ops.experts import SortedChoices, combine, dispatch, order_by_expert

# The number of sent rows is a multiple of this.
_UNIT = 8
# Arrays of a device's experts, by name.
Weights = dict[str, Array]


class Exchange(NamedTuple):
    """Settings of the all-to-all exchange.

    Attributes:
        axis: mesh axis that experts are sharded over.
        num_devices: P, the size of the axis.
        experts_each: experts per device.
        room: rows that a device sends to another in a turn.
        most: most rows that a device may have for another in total.
        together: all axes of the mesh, whose devices take turns together.
        work: function of the received rows [M, D], the expert of each row, from 0 for the first one
            here (`experts_each`: the row is empty), and the device's weights.
    """

    axis: str
    num_devices: int
    experts_each: int
    room: int
    most: int
    together: tuple[str, ...]
    work: Callable[[Array, Array, Weights], Array]


class SendQueue(NamedTuple):
    """The expert choices of a device's tokens, waiting to be sent.

    Attributes:
        experts: the expert of each choice; E for no expert.
        devices: the device of each choice's expert; P for no expert.
        places: the index of each choice among those for its device, from 0.
        counts: number of choices for each device.
    """

    experts: Int[Array, "N C"]
    devices: Int[Array, "N C"]
    places: Int[Array, "N C"]
    counts: Int[Array, " P"]


def queue_of(experts: Int[Array, "N C"], num_devices: int, experts_each: int) -> SendQueue:
    """Queue choices for each device, in the order of tokens.

    Args:
        experts: the expert of each choice; E for no expert.
        num_devices: P.
        experts_each: experts per device.
    """
    devices = experts // experts_each
    order = order_by_expert(devices, num_devices, 1)
    starts = order.starts[jnp.minimum(devices, num_devices - 1)]
    places = jnp.where(devices < num_devices, order.rows - starts, 0)
    return SendQueue(experts, devices, places, order.blocks)


def room_of(num_choices: int, num_devices: int, factor: float | None, most: int) -> int:
    """Return the number of rows that a device sends to another in a turn.

    Args:
        num_choices: number of choices of all tokens of a device.
        num_devices: P.
        factor: the rows as a multiple of an equal share; None: `most`.
        most: largest number of rows.
    """
    if factor is None:
        return most
    wanted = math.ceil(factor * num_choices / num_devices)
    return min(most, -(-wanted // _UNIT) * _UNIT)


def order_of_turn(queue: SendQueue, number: Int[Array, ""] | int, room: int) -> SortedChoices:
    """Return the order of the choices of one turn among the sent rows, [P, room]. Choices of other
    turns have no row."""
    num_devices = queue.counts.size
    num_rows = num_devices * room
    is_sent = (queue.devices < num_devices) & (queue.places // room == number)
    rows = jnp.where(is_sent, queue.devices * room + queue.places % room, num_rows)
    choices = jnp.full(num_rows, rows.size)
    choices = choices.at[rows.reshape(-1)].set(jnp.arange(rows.size), mode="drop")
    starts = jnp.arange(num_devices) * room
    # The rows of each device form one block.
    return SortedChoices(rows, choices, starts, jnp.ones_like(starts))


def exchanged(
    exchange: Exchange,
    x: Float[Array, "N D"],
    experts: Int[Array, "N C"],
    weights: Float[Array, "N C"],
    of_experts: Weights,
) -> Float[Array, "N D"]:
    """Return the results of experts on any device for the device's tokens: sums of outputs times
    weights, float32.

    Args:
        exchange: settings of the exchange.
        x: the device's own tokens.
        experts: the expert of each choice; E for no expert.
        weights: the weight of each choice.
        of_experts: arrays of the device's experts.
    """
    queue = queue_of(experts, exchange.num_devices, exchange.experts_each)
    first = _turn(exchange, queue, 0, x, weights, of_experts)
    if exchange.room >= exchange.most:
        return first
    wanted = -(-queue.counts.max() // exchange.room)
    # All devices take part in every turn, also those with nothing left to send.
    turns = jax.lax.pmax(jax.lax.stop_gradient(wanted), exchange.together)
    trained = {}
    constant = {}
    for name, array in of_experts.items():
        if jnp.issubdtype(array.dtype, jnp.floating):
            trained[name] = array
        else:
            constant[name] = array
    return first + _further(exchange, turns, queue, x, weights, trained, constant)


def _turn(
    exchange: Exchange,
    queue: SendQueue,
    number: Int[Array, ""] | int,
    x: Float[Array, "N D"],
    weights: Float[Array, "N C"],
    of_experts: Weights,
) -> Float[Array, "N D"]:
    """Return the results of the choices of one turn."""
    order = order_of_turn(queue, number, exchange.room)
    each = exchange.experts_each
    first = jnp.arange(exchange.num_devices).repeat(exchange.room) * each
    numbers = jnp.take(queue.experts.reshape(-1), order.choices, mode="clip") - first
    numbers = jnp.where(order.choices < queue.experts.size, numbers, each)
    received = to_experts(dispatch(x, order), exchange.axis)
    made = exchange.work(received, to_experts(numbers, exchange.axis), of_experts)
    # The same exchange returns rows to where they came from.
    return combine(to_experts(made, exchange.axis), weights, order)


def to_experts(rows: Array, axis: str) -> Array:
    """Exchange [P room, ...] over an axis: each device receives what all devices have for it."""
    return jax.lax.all_to_all(rows, axis, split_axis=0, concat_axis=0, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _further(
    exchange: Exchange,
    turns: Int[Array, ""],
    queue: SendQueue,
    x: Float[Array, "N D"],
    weights: Float[Array, "N C"],
    trained: Weights,
    constant: Weights,
) -> Float[Array, "N D"]:
    """Return the results of all turns but the first."""

    def add_turn(number: Array, out: Array) -> Array:
        return out + _turn(exchange, queue, number, x, weights, trained | constant)

    return jax.lax.fori_loop(1, turns, add_turn, jnp.zeros(x.shape, jnp.float32))


def _further_forward(
    exchange: Exchange,
    turns: Array,
    queue: SendQueue,
    x: Array,
    weights: Array,
    trained: Weights,
    constant: Weights,
) -> tuple[Array, tuple]:
    saved = (turns, queue, x, weights, trained, constant)
    return _further(exchange, *saved), saved


def _further_backward(exchange: Exchange, saved: tuple, g: Array) -> tuple:
    turns, queue, x, weights, trained, constant = saved
    inputs = (x, weights, trained)

    def add_turn(number: Array, sums: tuple) -> tuple:
        def turn(x: Array, weights: Array, trained: Weights) -> Array:
            return _turn(exchange, queue, number, x, weights, trained | constant)

        _, pull = jax.vjp(turn, *inputs)
        return jax.tree.map(lambda total, more: total + more.astype(jnp.float32), sums, pull(g))

    zeros = jax.tree.map(lambda array: jnp.zeros(array.shape, jnp.float32), inputs)
    sums = jax.lax.fori_loop(1, turns, add_turn, zeros)
    grads = jax.tree.map(lambda total, array: total.astype(array.dtype), sums, inputs)
    return None, None, *grads, None


_further.defvjp(_further_forward, _further_backward)
