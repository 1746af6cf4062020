"""Choices reach the devices of their experts and come back, however many turns that takes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from maxtrain.config.schema import MeshConfig
from maxtrain.ops.expert_all_to_all import Exchange, exchanged, order_of_turn, queue_of, room_of
from maxtrain.parallel.mesh import make_mesh

E, N, C, D, F = 8, 40, 2, 6, 5


def choices(kind):
    """The experts of all tokens, [N, C]; E: none."""
    rng = np.random.default_rng(len(kind))
    experts = np.argsort(rng.random((N, E)), axis=1)[:, :C]
    if kind == "all to one device":
        experts = np.broadcast_to([5, 4], (N, C)).copy()
    if kind == "a crowd on the last device":
        experts[30:] = [6, 7]
    experts[rng.random((N, C)) < 0.1] = E
    return jnp.asarray(experts, jnp.int32)


def of_rows(rows, experts, of_experts):
    """Each row times the matrix of its expert; zeros for none."""
    w = of_experts["w"]
    is_chosen = jax.nn.one_hot(experts, w.shape[0], dtype=jnp.float32)
    return jnp.einsum("me,md,edf->mf", is_chosen, rows, w, precision="highest")


def numbers():
    rng = np.random.default_rng(0)
    shapes = [(N, D), (N, C), (E, D, D), (N, D)]
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def expected(kind):
    """Output and gradients of every expert for every token, on one device."""
    x, weights, w, g = numbers()

    def forward(x, weights, w):
        chosen = (jax.nn.one_hot(choices(kind), E) * weights[..., None]).sum(1)
        out = jnp.einsum("ne,nd,edf->nf", chosen, x, w, precision="highest")
        return (out * g).sum(), out

    (_, out), grads = jax.jit(jax.value_and_grad(forward, (0, 1, 2), has_aux=True))(x, weights, w)
    return out, *grads


def found(kind, axes, factor):
    """The same where tokens and experts are split."""
    x, weights, w, g = numbers()
    mesh = make_mesh(MeshConfig(**axes), jax.devices()[:4])
    devices = axes["expert"]
    each = E // devices
    tokens = N // 4
    most = tokens * C
    room = room_of(tokens * C, devices, factor, most)
    exchange = Exchange("expert", devices, each, room, most, mesh.axis_names, of_rows)

    def forward(x, weights, w):
        rows = PartitionSpec(("fsdp", "expert"))
        split = jax.shard_map(
            lambda x, experts, weights, w: exchanged(exchange, x, experts, weights, {"w": w}),
            in_specs=(rows, rows, rows, PartitionSpec("expert")),
            out_specs=rows,
            check_vma=False,
        )
        out = split(x, choices(kind), weights, w)
        return (out * g).sum(), out

    with jax.set_mesh(mesh):
        program = jax.jit(jax.value_and_grad(forward, (0, 1, 2), has_aux=True))
        (_, out), grads = program(x, weights, w)
    return out, *grads


@pytest.mark.every_dose
@pytest.mark.long
@pytest.mark.parametrize(
    ("axes", "factor"),
    [
        ({"fsdp": 1, "expert": 4}, None),
        ({"fsdp": 1, "expert": 4}, 0.25),
        # In one group of devices there may be nothing left to send, in the other there is.
        pytest.param({"fsdp": 2, "expert": 2}, 1.0, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("evenly", marks=pytest.mark.long),
        "all to one device",
        pytest.param("a crowd on the last device", marks=pytest.mark.long),
    ],
)
def test_nothing_is_dropped_forward_and_backward(kind, axes, factor):
    for ours, theirs in zip(found(kind, axes, factor), expected(kind), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6 * np.abs(theirs).max())


@pytest.mark.long
@pytest.mark.every_dose
@pytest.mark.parametrize("room", [3, 16, N * C])
def test_each_choice_has_one_row_in_one_turn(room):
    experts = choices("a crowd on the last device")
    queue = queue_of(experts, 4, 2)
    assert queue.counts.sum() == (experts < E).sum()
    turns = -(-int(queue.counts.max()) // room)
    seen = np.zeros((N, C), int)
    for number in range(turns):
        order = order_of_turn(queue, number, room)
        is_sent = np.asarray(order.rows < 4 * room)
        np.testing.assert_array_equal(
            np.asarray(order.rows)[is_sent] // room, np.asarray(experts)[is_sent] // 2
        )
        # There and back.
        sent = np.flatnonzero(is_sent)
        np.testing.assert_array_equal(order.choices[order.rows.reshape(-1)[sent]], sent)
        assert (order.choices < N * C).sum() == is_sent.sum()
        seen += is_sent
    np.testing.assert_array_equal(seen, experts < E)


@pytest.mark.parametrize(
    ("factor", "room"), [(None, 100), (0.001, 8), (1.0, 24), (1.5, 32), (50.0, 100)]
)
def test_room_is_a_multiple_of_a_share_and_never_more_than_needed(factor, room):
    assert room_of(80, 4, factor, 100) == room
