"""Choices of tokens go to the devices that have their experts, and what comes of them goes back.

Along a mesh axis each of P devices has E / P experts in a row. A device sends each of them at most
`room` rows at a time. What is beyond goes in further turns, as many as the fullest device of the
whole mesh needs. So no choice is ever dropped, and buffers have P `room` rows however unevenly
tokens choose; without turns they would need P times as many as a device has choices.

Turns after the first are a loop that is rarely entered. It keeps nothing for the backward pass,
which sends their tokens, and computes what comes of them, once more.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maxtrain.ops.experts import SortedChoices, combine, dispatch, order_by_expert

# Rows are sent by eights.
_UNIT = 8
# Arrays of experts by name, as the device has them.
Weights = dict[str, Array]


class Exchange(NamedTuple):
    """Who sends what to whom.

    Attributes:
        axis: of the mesh, that experts are split over.
        num_devices: P, along it.
        experts_each: of a device.
        room: rows that a device sends to another in a turn.
        most: as many as it may have for another in all.
        together: axes of the mesh whose devices make turns together: all of them.
        work: what is made of the rows [M, D] that a device is sent, with the expert of each, from 0
            for the first one here (`experts_each`: the row is empty), and its weights.
    """

    axis: str
    num_devices: int
    experts_each: int
    room: int
    most: int
    together: tuple[str, ...]
    work: Callable[[Array, Array, Weights], Array]


class SendQueue(NamedTuple):
    """The choices of a device's tokens, as they wait to be sent.

    Attributes:
        experts: of each choice; E where it goes to none.
        devices: of each choice, who has its expert; P where it goes to none.
        places: of each choice, among those for its device; from 0.
        counts: of choices for each device.
    """

    experts: Int[Array, "N C"]
    devices: Int[Array, "N C"]
    places: Int[Array, "N C"]
    counts: Int[Array, " P"]


def queue_of(experts: Int[Array, "N C"], num_devices: int, experts_each: int) -> SendQueue:
    """How choices wait: for each device in the order of tokens.

    Args:
        experts: of each choice; E where it goes to none.
        num_devices: P.
        experts_each: of a device.
    """
    devices = experts // experts_each
    order = order_by_expert(devices, num_devices, 1)
    starts = order.starts[jnp.minimum(devices, num_devices - 1)]
    places = jnp.where(devices < num_devices, order.rows - starts, 0)
    return SendQueue(experts, devices, places, order.blocks)


def room_of(num_choices: int, num_devices: int, factor: float | None, most: int) -> int:
    """Rows that a device sends to another in a turn.

    Args:
        num_choices: of all tokens of a device.
        num_devices: P.
        factor: how many equal shares these are; None: as many as there may be.
        most: as many as there may be.
    """
    if factor is None:
        return most
    wanted = math.ceil(factor * num_choices / num_devices)
    return min(most, -(-wanted // _UNIT) * _UNIT)


def order_of_turn(queue: SendQueue, number: Int[Array, ""] | int, room: int) -> SortedChoices:
    """Where the choices of one turn lie among the rows that are sent, [P, room]. Those of other
    turns are nowhere."""
    num_devices = queue.counts.size
    num_rows = num_devices * room
    is_sent = (queue.devices < num_devices) & (queue.places // room == number)
    rows = jnp.where(is_sent, queue.devices * room + queue.places % room, num_rows)
    choices = jnp.full(num_rows, rows.size)
    choices = choices.at[rows.reshape(-1)].set(jnp.arange(rows.size), mode="drop")
    starts = jnp.arange(num_devices) * room
    # One block of all that a device is sent.
    return SortedChoices(rows, choices, starts, jnp.ones_like(starts))


def exchanged(
    exchange: Exchange,
    x: Float[Array, "N D"],
    experts: Int[Array, "N C"],
    weights: Float[Array, "N C"],
    of_experts: Weights,
) -> Float[Array, "N D"]:
    """What tokens get from experts, wherever these are: sums of outputs times weights, float32.

    Args:
        exchange: who sends what to whom.
        x: the device's own tokens.
        experts: of their choices; E where one goes to none.
        weights: of their choices.
        of_experts: what the device has of the experts.
    """
    queue = queue_of(experts, exchange.num_devices, exchange.experts_each)
    first = _turn(exchange, queue, 0, x, weights, of_experts)
    if exchange.room >= exchange.most:
        return first
    wanted = -(-queue.counts.max() // exchange.room)
    # In a turn all devices meet, also those that have nothing left to send.
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
    """What tokens get from the choices of one turn."""
    order = order_of_turn(queue, number, exchange.room)
    each = exchange.experts_each
    first = jnp.arange(exchange.num_devices).repeat(exchange.room) * each
    numbers = jnp.take(queue.experts.reshape(-1), order.choices, mode="clip") - first
    numbers = jnp.where(order.choices < queue.experts.size, numbers, each)
    received = to_experts(dispatch(x, order), exchange.axis)
    made = exchange.work(received, to_experts(numbers, exchange.axis), of_experts)
    # The way back is the way there: rows go to where they are from.
    return combine(to_experts(made, exchange.axis), weights, order)


def to_experts(rows: Array, axis: str) -> Array:
    """[P room, ...] for each device of an axis, to what each device has for this one."""
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
    """What tokens get in all turns but the first."""

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
