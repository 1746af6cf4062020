"""A wrong bit on one of several devices is found, and the device and the array are named; without
one, nothing is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from data_pipeline.base.errors import TryAgainError
from maxtrain.config.schema import IntegrityConfig
from maxtrain.train_step.integrity import Integrity, device_digests, differing_copies, unrepeated

SPECS = {"copied": (), "split": ("a", "b"), "half": ("b",), "counter": ()}
SHAPES = {"copied": (3, 5), "split": (8, 4), "half": (6, 2), "counter": ()}


def mesh():
    return Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("a", "b"))


def tree():
    return {
        name: jax.device_put(jnp.ones(shape), NamedSharding(mesh(), PartitionSpec(*SPECS[name])))
        for name, shape in SHAPES.items()
    }


def flipped(arrays, name, device, element=0):
    """The same with one bit changed in one device's part of one array."""
    parts = [np.array(shard.data) for shard in arrays[name].addressable_shards]
    parts[device].reshape(-1).view(np.uint32)[element] ^= 1
    placed = [
        jax.device_put(part, shard.device)
        for part, shard in zip(parts, arrays[name].addressable_shards)
    ]
    array = arrays[name]
    return arrays | {
        name: jax.make_array_from_single_device_arrays(array.shape, array.sharding, placed)
    }


@settings(deadline=None, max_examples=30)
@given(
    name=st.sampled_from(["copied", "half", "counter"]), device=st.integers(0, 7), data=st.data()
)
def test_one_wrong_bit_of_a_copy_names_its_device_and_array(name, device, data):
    arrays = tree()
    part = arrays[name].addressable_shards[device].data
    wrong = flipped(arrays, name, device, data.draw(st.integers(0, part.size - 1)))
    assert differing_copies(arrays, device_digests(arrays)) == []
    assert differing_copies(wrong, device_digests(wrong)) == [
        (name, arrays[name].addressable_shards[device].device)
    ]


def test_where_copies_are_even_all_are_named_and_where_there_are_none_no_one():
    arrays, devices = tree(), list(mesh().devices.flat)
    wrong = flipped(flipped(arrays, "half", 1), "half", 3)  # of four copies of that half
    assert differing_copies(wrong, device_digests(wrong)) == [
        ("half", devices[i]) for i in (1, 3, 5, 7)
    ]
    alone = flipped(arrays, "split", 2)
    assert differing_copies(alone, device_digests(alone)) == [], "nothing to compare it with"
    assert unrepeated(alone, device_digests(arrays), device_digests(alone)) == [
        ("split", devices[2])
    ]


def test_it_is_looked_when_it_is_time_and_before_saves():
    check, wrong = (
        Integrity(IntegrityConfig(replicas_interval=5), mesh()),
        flipped(tree(), "copied", 6),
    )
    check.check(4, wrong)
    for step, save in ((5, False), (7, True)):
        with pytest.raises(
            TryAgainError, match="If a device is named again, take it out"
        ) as caught:
            check.check(step, wrong, save=save)
        device = mesh().devices.flat[6]
        assert f"differ between devices after step {step}" in str(caught.value)
        assert f"* copied on {device} of process 0 on " in str(caught.value)
    off = Integrity(IntegrityConfig(), mesh())
    off.check(5, wrong, save=True)
    assert off.repeat(5, jax.jit(lambda state, batch: (state, {})), wrong, {}) is None


@pytest.mark.long
def test_a_step_that_does_not_repeat_is_found_and_its_argument_survives_donation():
    check, arrays = Integrity(IntegrityConfig(repeat_interval=3), mesh()), tree()
    step = jax.jit(
        lambda state, batch: (jax.tree.map(lambda x: x * batch, state), {}), donate_argnums=0
    )
    assert check.repeat(2, step, arrays, 3.0) is None
    repeated = check.repeat(3, step, arrays, 3.0)
    after, _ = step(arrays, 3.0)
    check.check(3, after, repeated)
    with pytest.raises(TryAgainError, match="Nothing of it is saved") as caught:
        check.check(3, flipped(after, "split", 5), repeated)
    assert "step 3, made twice from the same state, gave different bits" in str(caught.value)
    assert (
        f"* split on {mesh().devices.flat[5]} of process 0" in str(caught.value)
        and str(caught.value).count("*") == 1
    )
