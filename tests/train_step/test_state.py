"""The state: what is described is what is made, on every mesh, with the same bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from data_pipeline.base.errors import ConfigError
from maxtrain.config.schema import PrecisionConfig
from maxtrain.models.registry import logical_axes
from maxtrain.train_step.optimizer import make_optimizer
from maxtrain.train_step.state import shardings, state_from_variables

pytestmark = pytest.mark.usefixtures("optax_dtypes")
MESHES = [(1, 1, 1), (8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 2, 4)]


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


@pytest.fixture(scope="module")
def states(tiny):
    """(parts, state) by mesh."""
    made = {}
    for shape in MESHES:
        parts = tiny.parts(shape)
        with jax.set_mesh(parts.mesh):
            made[shape] = parts, parts.create()
    return made


@pytest.mark.long
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_the_abstract_tree_is_the_real_one(states, shape):
    parts, state = states[shape]
    assert jax.tree.structure(parts.abstract) == jax.tree.structure(state)
    for abstract, real in zip(jax.tree.leaves(parts.abstract), jax.tree.leaves(state), strict=True):
        assert (abstract.shape, abstract.dtype) == (real.shape, real.dtype)
        assert real.sharding == abstract.sharding


@pytest.mark.long
def test_the_same_bits_on_every_mesh(states):
    expected = bits(states[MESHES[0]][1])
    for shape in MESHES[1:]:
        assert len(states[shape][1].trainable["head"]["kernel"].get_value().devices()) == 8
        assert bits(states[shape][1]) == expected, shape


@pytest.mark.every_dose
@pytest.mark.long
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_optimizer_state_lies_like_its_parameter(states, shape):
    state = states[shape][1]
    params = dict(nnx.to_flat_state(state.trainable))
    moments = [x for x in jax.tree.leaves(state.opt_state, is_leaf=is_state) if is_state(x)]
    assert len(moments) == 2  # Adam's mean and mean of squares
    for moment in moments:
        flat = dict(nnx.to_flat_state(moment))
        assert flat.keys() == params.keys()
        for path, x in flat.items():
            assert x.get_value().sharding == params[path].get_value().sharding and not np.any(
                x.get_value()
            )
            assert logical_axes(x) == logical_axes(params[path])
    if shape == (1, 2, 4):
        spec = params["layers", "0", "mlp", "up", "kernel"].get_value().sharding.spec
        assert tuple(spec) == (None, "fsdp", "tensor")
        assert moments[0]["layers"]["0"]["mlp"]["up"]["kernel"].get_value().addressable_shards[
            0
        ].data.shape == (
            2,
            16,
            14,
        )


def is_state(x):
    return isinstance(x, nnx.State)


@pytest.mark.long
@pytest.mark.every_dose
def test_counters_start_at_nothing(states):
    state = states[1, 1, 1][1]
    for counter in (state.step, state.control.skipped, state.control.skipped_in_row):
        assert counter.dtype == jnp.int32 and counter.shape == () and counter == 0


@pytest.mark.long
@pytest.mark.every_dose
def test_parameters_are_counted_by_the_formula(tiny, states):
    c, H = tiny.model, tiny.model.head_dim
    layer = (
        c.embed_dim * H * (2 * c.num_heads + 2 * c.num_kv_heads)
        + 3 * c.embed_dim * c.mlp_dim
        + 2 * c.embed_dim
    )
    expected = 2 * c.vocab_size * c.embed_dim + c.num_layers * layer + c.embed_dim
    for parts, state in states.values():
        for params in (parts.abstract.trainable, state.trainable):
            assert sum(x.size for x in jax.tree.leaves(params)) == expected


def test_a_mesh_that_does_not_divide_a_dim_is_refused_with_the_numbers(tiny):
    with pytest.raises(
        ConfigError,
        match=r"layers.0.mlp.down.kernel: dim 'mlp' of size 58 must be divisible by mesh.tensor=4 = 4. Use a",
    ):
        tiny.parts((1, 2, 4), mlp_dim=58)


@pytest.mark.long
@pytest.mark.every_dose
def test_given_parameters_are_kept_and_the_optimizer_is_new(tiny, states):
    parts, state = states[1, 2, 4]
    optimizer = make_optimizer(tiny.optimizer, tiny.schedule, tiny.steps, parts.abstract.trainable)
    twice = jax.jit(
        lambda p: jax.tree.map(lambda x: 2 * x, p),
        out_shardings=shardings(parts.abstract.trainable),
    )(state.trainable)
    expected = bits(twice)
    with jax.set_mesh(parts.mesh):
        made = state_from_variables(parts.abstract, twice, optimizer)
    assert bits(made.trainable) == expected and bits(made.opt_state) == bits(state.opt_state)
    assert jax.tree.map(lambda x: x.sharding, made) == shardings(parts.abstract)
    # Imported weights exist once.
    for ours, given in zip(jax.tree.leaves(made.trainable), jax.tree.leaves(twice), strict=True):
        for mine, other in zip(ours.addressable_shards, given.addressable_shards, strict=True):
            assert mine.data.unsafe_buffer_pointer() == other.data.unsafe_buffer_pointer()


@pytest.mark.long
def test_bfloat16_masters_have_bfloat16_moments(tiny):
    low = PrecisionConfig(params="bfloat16", compute="bfloat16")
    abstract = tiny.parts(precision=low).abstract
    assert {
        x.dtype for x in jax.tree.leaves((abstract.trainable, abstract.opt_state)) if x.ndim
    } == {jnp.dtype("bfloat16")}


@pytest.mark.long
def test_other_seeds_give_other_parameters(tiny, states):
    parts, state = states[1, 1, 1]
    with jax.set_mesh(parts.mesh):
        other = parts.create(seed=1)
    assert bits(other.opt_state) == bits(state.opt_state)
    assert not np.array_equal(
        other.trainable["head"]["kernel"][...], state.trainable["head"]["kernel"][...]
    )
