"""Moments and weights in the memory of hosts: the same steps as on devices, and every check sees
them there."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh

from data_pipeline.base.errors import ConfigError
from maxtrain.config.schema import AnomalyConfig
from maxtrain.ops.digest import tree_digests
from maxtrain.ops.finite import non_finite_names
from maxtrain.parallel.host_memory import is_on_host, lies_in_layers, require_host_memory
from maxtrain.parallel.memory import (
    HOST_MEND,
    bytes_on_device,
    bytes_on_host,
    require_memory_of_host,
)
from maxtrain.parallel.topologies import described_devices
from maxtrain.train_step import integrity
from maxtrain.train_step.layer_updates import LayerUpdates, PendingUpdate
from maxtrain.train_step.optimizer import average_or_params, paths

pytestmark = pytest.mark.usefixtures("optax_dtypes")
RULES = {
    "adamw": {"name": "adamw", "clip_norm": 0.5},
    "adam": {"name": "adam", "clip_value": 0.01, "clip_adaptive": 0.02},
    "momentum": {"name": "momentum", "ema_decay": 0.9},
    "nesterov": {"name": "nesterov", "clip_norm": None},
    "lion": {"name": "lion", "no_decay": ("mlp",)},
}


@functools.cache
def ran(tiny, rule, on_host, shape=(1, 1, 1), accumulation=1, zero=0, weights="none", **model):
    """Parts, the state after four steps, and what was measured of each; the third one is refused."""
    changes = RULES[rule] | {"on_host": on_host, "zero": zero}
    optimizer = dataclasses.replace(tiny.optimizer, **changes)
    options = {"norms_interval": 2, "anomaly": AnomalyConfig(max_skipped=9)}
    model = {"num_layers": 3} | model
    parts = tiny.parts(
        shape, accumulation, optimizer=optimizer, step=options, weights_on_host=weights, **model
    )
    found = []
    with jax.set_mesh(parts.mesh):
        state = parts.create()
        for number in range(4):
            batch = dict(tiny.batch(number))
            if number == 2:
                batch["loss_mask"] = np.where(batch["loss_mask"] > 0, np.float32(np.nan), 0)
            before = tree_digests({"a": state.trainable, "b": state.opt_state})
            state, metrics = parts.step(state, parts.put(batch))
            refused = before == tree_digests({"a": state.trainable, "b": state.opt_state})
            assert refused == (number == 2), number
            found.append(jax.device_get(metrics))
    return parts, state, found


def assert_same_steps(ran_on_hosts, ran_on_devices):
    parts, state, ours = ran_on_hosts
    _, expected, theirs = ran_on_devices
    for x, other in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        scale = max(1, np.abs(np.asarray(other)).max())
        np.testing.assert_allclose(np.asarray(x), np.asarray(other), rtol=0, atol=2e-6 * scale)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        for name in mine:
            np.testing.assert_allclose(mine[name], other[name], rtol=2e-5, atol=1e-6, err_msg=name)
    shardings = jax.tree.map(lambda x: x.sharding, state)
    assert shardings == jax.tree.map(lambda x: x.sharding, parts.abstract)


@pytest.mark.long
@pytest.mark.parametrize(
    ("shape", "accumulation", "zero"),
    [((1, 1, 1), 1, 0), ((2, 2, 2), 2, 0), ((4, 2, 1), 1, 1), ((2, 4, 1), 1, 3)],
    ids=str,
)
@pytest.mark.parametrize("rule", RULES)
def test_steps_are_the_same_as_on_devices(tiny, rule, shape, accumulation, zero):
    on_devices = ran(tiny, rule, False, shape, accumulation, zero)
    assert_same_steps(ran(tiny, rule, True, shape, accumulation, zero), on_devices)


@pytest.mark.long
@pytest.mark.parametrize(
    ("shape", "accumulation", "zero"),
    [((1, 1, 1), 1, 0), ((2, 2, 2), 2, 2), ((4, 2, 1), 1, 1), ((2, 4, 1), 1, 3)],
    ids=str,
)
@pytest.mark.parametrize("remat", ["full", "dots"])
@pytest.mark.parametrize("rule", ["adamw", "momentum"])
def test_weights_on_hosts_take_the_same_steps(tiny, rule, remat, shape, accumulation, zero):
    on_devices = ran(tiny, rule, False, shape, accumulation, zero)
    on_hosts = ran(tiny, rule, True, shape, accumulation, zero, "all", remat=remat)
    assert_same_steps(on_hosts, on_devices)


@pytest.mark.every_dose
@pytest.mark.long
@pytest.mark.parametrize("weights", ["frozen", "all"])
def test_matrices_of_layers_lie_on_hosts_and_no_other_weights(tiny, weights):
    parts = ran(tiny, "adamw", True, weights=weights, remat="full")[0]
    for path, variable in paths(parts.abstract.trainable).items():
        # All of them train.
        expected = weights == "all" and path.startswith("layers") and variable.ndim > 2
        assert is_on_host(variable.get_value()) == expected, path


@pytest.mark.every_dose
@pytest.mark.long
def test_the_optimizer_lies_on_hosts_but_for_vectors_of_layers_and_nothing_else(tiny):
    parts, state, _ = ran(tiny, "momentum", True)
    for tree in (parts.abstract, state):
        for path, leaf in paths(tree.opt_state).items():
            if isinstance(leaf, nnx.Variable):
                is_vector = ".layers." in path and leaf.ndim == 2
                assert is_on_host(leaf.get_value()) != is_vector, path
        of_others = dataclasses.replace(tree, opt_state=())
        assert not any(is_on_host(x) for x in jax.tree.leaves(of_others))
    vectors = 0
    for path, variable in paths(parts.abstract.trainable).items():
        if path.startswith("layers") and variable.ndim == 2:
            vectors += bytes_on_device(variable)
    assert vectors
    # The trace and the average.
    others = bytes_on_device(parts.abstract.trainable) - vectors
    assert bytes_on_host(parts.abstract) == 2 * others
    assert 2 * vectors <= bytes_on_device(parts.abstract.opt_state) < 2 * vectors + 100


def test_an_update_that_would_not_be_finite_is_known_before_it_is_written():
    """The layer is one of several, and the error names its array."""
    params = nnx.State(
        {
            "layers": nnx.Param(jnp.ones((3, 2)), axes=("embed",)),
            "end": nnx.Param(jnp.ones(2), axes=("embed",)),
        }
    )
    rule = optax.chain(optax.trace(0.5), optax.scale(-3e38))
    state = rule.init(params)
    large = params["layers"].replace(jnp.ones((3, 2)).at[1, 0].set(4.0))
    grads = nnx.State({"layers": large, "end": params["end"]})

    def look(grads):
        pending = PendingUpdate(LayerUpdates(optax.identity(), rule), grads, params, state)
        finite = pending.finite()
        return finite, pending.written_if(finite.all()), pending.written_if(jnp.bool_(True))

    finite, kept, written = jax.jit(look)(grads)
    by_name = dict(
        zip(["end", "layers", "trace end", "trace layers"], finite.tolist(), strict=True)
    )
    assert by_name == {"end": True, "layers": False, "trace end": True, "trace layers": True}
    assert jax.tree.all(jax.tree.map(jnp.array_equal, kept, (params, state)))
    assert np.isinf(written[0]["layers"][...][1, 0]) and np.isfinite(written[0]["end"][...]).all()


@pytest.mark.every_dose
@pytest.mark.long
def test_checks_see_arrays_on_hosts(tiny):
    parts, state, _ = ran(tiny, "adamw", True, (2, 2, 2), 2)
    with jax.set_mesh(parts.mesh):
        there = state.opt_state
        devices = [x.sharding.with_memory_kind("device") for x in jax.tree.leaves(there)]
        here = jax.device_put(there, jax.tree.unflatten(jax.tree.structure(there), devices))
        assert tree_digests(there) == tree_digests(here)
        np.testing.assert_array_equal(
            integrity.device_digests(there), integrity.device_digests(here)
        )
        copies = integrity._copy(there)
        assert tree_digests(copies) == tree_digests(there)
        assert jax.tree.map(is_on_host, copies) == jax.tree.map(is_on_host, there)
        assert non_finite_names(there) == []
        bad = jax.tree.map(lambda x: jax.device_put(np.asarray(x) * np.nan, x.sharding), there)
        assert len(non_finite_names(bad)) == len(jax.tree.leaves(there))


@pytest.mark.long
def test_checks_fetch_layer_by_layer(tiny):
    """Digests, finiteness and copies of weights and moments, of which some are not in layers."""
    parts, state, _ = ran(tiny, "adamw", True, (2, 2, 2), 2, weights="all", remat="full")
    tree = (state.trainable, state.opt_state)
    assert {lies_in_layers(x) for x in jax.tree.leaves(tree)} == {True, False}
    with jax.set_mesh(parts.mesh):
        devices = [x.sharding.with_memory_kind("device") for x in jax.tree.leaves(tree)]
        here = jax.device_put(tree, jax.tree.unflatten(jax.tree.structure(tree), devices))
        expected = tree_digests(here)
        assert tree_digests(tree) == expected
        np.testing.assert_array_equal(
            integrity.device_digests(tree), integrity.device_digests(here)
        )
        copies = integrity._copy(tree)
        assert tree_digests(copies) == expected
        assert jax.tree.map(is_on_host, copies) == jax.tree.map(is_on_host, tree)
        assert non_finite_names(tree) == []
        leaves, structure = jax.tree.flatten(tree)
        chosen = next(number for number, x in enumerate(leaves) if lies_in_layers(x))
        bad = np.array(leaves[chosen])
        bad[-1, 0] = np.nan
        leaves[chosen] = jax.device_put(bad, leaves[chosen].sharding)
        assert len(non_finite_names(jax.tree.unflatten(structure, leaves))) == 1
        other = tree_digests(jax.tree.unflatten(structure, leaves))
        assert sum(other[name] != expected[name] for name in expected) == 1


def test_devices_that_name_no_memory_of_hosts_are_refused():
    described = Mesh(np.array(described_devices("h100:2")), ("fsdp",))
    said = r"train.on_host=all needs memory .* Set train.on_host=none"
    with pytest.raises(ConfigError, match=said):
        require_host_memory(described, "train.on_host=all", "train.on_host=none")
    here = Mesh(np.array(jax.devices()[:2]), ("fsdp",))
    require_host_memory(here, "train.on_host=all", "train.on_host=none")


def test_a_host_without_room_is_refused():
    said = r"on_host=true needs .* of this host's memory, of which .* are free"
    with pytest.raises(ConfigError, match=said):
        require_memory_of_host(1 << 62, "optimizer.on_host=true", HOST_MEND)
    require_memory_of_host(0, "optimizer.on_host=true", HOST_MEND)


@pytest.mark.every_dose
@pytest.mark.long
def test_the_average_of_weights_is_read_from_hosts(tiny):
    parts, state, _ = ran(tiny, "momentum", True)
    _, expected, _ = ran(tiny, "momentum", False)
    with jax.set_mesh(parts.mesh):
        for read in (average_or_params, jax.jit(average_or_params)):
            ours = read(state.trainable, state.opt_state)
            theirs = read(expected.trainable, expected.opt_state)
            assert not any(is_on_host(x) for x in jax.tree.leaves(ours))
            for x, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
                np.testing.assert_allclose(x, other, atol=2e-6)


@pytest.mark.every_dose
@pytest.mark.long
def test_the_average_of_weights_on_hosts_stays_there(tiny):
    parts, state, _ = ran(tiny, "momentum", True, weights="all", remat="full")
    _, expected, _ = ran(tiny, "momentum", False)
    with jax.set_mesh(parts.mesh):
        for read in (average_or_params, jax.jit(average_or_params)):
            ours = read(state.trainable, state.opt_state)
            places = jax.tree.map(is_on_host, ours)
            assert places == jax.tree.map(is_on_host, state.trainable)
            theirs = average_or_params(expected.trainable, expected.opt_state)
            for x, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
                np.testing.assert_allclose(np.asarray(x), other, atol=2e-6)
