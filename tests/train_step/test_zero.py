"""ZeRO over `data`: each stage makes the same steps, holds the share it should, and reads the
others' checkpoints."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from maxtrain.checkpoint.manager import Checkpoints
from maxtrain.config.schema import CheckpointConfig
from maxtrain.train_step.state import shardings, zero_summary

pytestmark = pytest.mark.usefixtures("optax_dtypes")
SHAPE = (8, 1, 1)


@functools.cache
def ran(tiny, zero, shape=SHAPE, accumulation=1):
    """Parts, bytes of the compiled step's arguments and temporaries on a device, and state and
    losses after three steps."""
    optimizer = dataclasses.replace(tiny.optimizer, zero=zero)
    parts, losses = tiny.parts(shape, accumulation, optimizer=optimizer), []
    with jax.set_mesh(parts.mesh):
        state, batches = parts.new_state(), [parts.put(tiny.batch(i)) for i in range(3)]
        compiled = parts.step.lower(state, batches[0]).compile()
        for batch in batches:
            state, metrics = compiled(state, batch)
            losses.append(float(metrics["loss"]))
    return parts, compiled.memory_analysis(), state, losses


def size(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


@pytest.mark.long
@pytest.mark.parametrize(("shape", "accumulation"), [(SHAPE, 1), ((2, 2, 2), 2)], ids=str)
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_every_stage_makes_the_same_steps(tiny, zero, shape, accumulation):
    _, _, expected, losses = ran(tiny, 0, shape, accumulation)
    parts, _, state, ours = ran(tiny, zero, shape, accumulation)
    np.testing.assert_allclose(ours, losses, rtol=2e-6)
    for x, other in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(
            np.asarray(x), np.asarray(other), rtol=0, atol=2e-6 * max(1, np.abs(other).max())
        )
    assert jax.tree.map(lambda x: x.sharding, state) == shardings(parts.abstract)


@pytest.mark.long
def test_each_stage_holds_its_share(tiny):
    """There are 3 P bytes on 8 devices: P of parameters and 2 P of Adam's moments."""
    held = {}
    for zero in range(4):
        parts, memory, _, _ = ran(tiny, zero)
        held[zero] = memory.argument_size_in_bytes
    params, batch = size(parts.abstract.trainable), held[0] - 3 * size(parts.abstract.trainable)
    assert 0 < batch < 4096
    for zero, expected in (
        (1, params + 2 * params / 8),
        (2, params + 2 * params / 8),
        (3, 3 * params / 8),
    ):
        assert held[zero] - batch == pytest.approx(expected, rel=1e-3), zero


@pytest.mark.long
def test_the_summary_says_what_cannot_be_divided(tiny):
    parts = ran(tiny, 3)[0]
    megabytes = size(parts.abstract.trainable) / 1e6
    optimizer, params = f"{megabytes / 4:,.3f} MB a device", f"{megabytes / 8:,.3f} MB a device"
    rest = "0.000 of it not divided"
    assert (
        zero_summary(parts.abstract, 3)
        == f"zero 3: optimizer state {optimizer}, {rest}, parameters {params}, {rest}"
    )
    assert zero_summary(parts.abstract, 1) == f"zero 1: optimizer state {optimizer}, {rest}"
    whole = ran(tiny, 0)[0].abstract
    assert (
        f"{2 * megabytes:,.3f} MB a device, {2 * megabytes:,.3f} of it not divided"
        in zero_summary(whole, 1)
    )


@pytest.mark.long
@pytest.mark.parametrize(("saved", "wanted"), [(3, 0), (0, 3), (1, 2)])
def test_a_checkpoint_fits_every_stage(tiny, tmp_path, saved, wanted):
    _, _, state, _ = ran(tiny, saved)
    target = ran(tiny, wanted)[0].abstract
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    checkpoints.save(3, state, {})
    restored, _ = checkpoints.restore(target, 3)
    checkpoints.close()
    assert shardings(restored) == shardings(target)
    for x, y in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
