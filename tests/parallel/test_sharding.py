"""The table from names of dims to mesh axes: what it splits, and what it refuses."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from data_pipeline.base.errors import ConfigError
from maxtrain.config.schema import MeshConfig
from maxtrain.parallel.mesh import AXES, make_mesh
from maxtrain.parallel.sharding import (
    RULES,
    batch_shards,
    constrain,
    constrain_residual,
    gather_residual,
    named_sharding,
    partition_spec,
)

SIZES = {"data": 2, "fsdp": 2, "tensor": 2}


def mesh_of(data, fsdp, tensor):
    return make_mesh(
        MeshConfig(data=data, fsdp=fsdp, tensor=tensor), jax.devices()[: data * fsdp * tensor]
    )


@pytest.mark.parametrize(
    ("axes", "mesh", "spec"),
    [
        (("embed", "heads", "head_dim"), SIZES, PartitionSpec("fsdp", "tensor", None)),
        (("layers", "mlp", "embed"), SIZES, PartitionSpec(None, "tensor", "fsdp")),
        (("activation_batch", "activation_length"), SIZES, PartitionSpec(("data", "fsdp"), None)),
        (
            ("activation_batch", None),
            {"data": 1, "fsdp": 4},
            PartitionSpec("fsdp", None),
        ),  # axes of size 1 are left out
        # Over `expert`, experts are split by their number, and other weights as over `fsdp`.
        (
            ("exp", "expert_embed", "mlp"),
            SIZES | {"expert": 2},
            PartitionSpec("expert", "fsdp", "tensor"),
        ),
        (("embed", "mlp"), SIZES | {"expert": 2}, PartitionSpec(("fsdp", "expert"), "tensor")),
        (
            ("activation_batch", "activation_length"),
            SIZES | {"expert": 2},
            PartitionSpec(("data", "fsdp", "expert"), None),
        ),
        (("embed", "mlp"), {}, PartitionSpec(None, None)),
        ((), SIZES, PartitionSpec()),
    ],
)
def test_dims_are_split_by_the_table(axes, mesh, spec):
    assert partition_spec(axes, mesh) == spec


def test_every_mesh_axis_of_the_table_exists():
    assert {axis for split in RULES.values() for axis in split} <= set(AXES)


def test_two_dims_on_one_mesh_axis_are_refused():
    with pytest.raises(ConfigError) as error:
        partition_spec(("heads", "mlp"), SIZES, name="decoder.odd")
    assert error.value.problems == [
        "decoder.odd: dims 'heads' and 'mlp' are both split over mesh axis 'tensor'. Set mesh.rules.heads or mesh.rules.mlp without tensor."
    ]
    assert partition_spec(("heads", "mlp"), {"data": 8, "tensor": 1}) == PartitionSpec(None, None)


def test_a_dim_that_cannot_be_divided_is_refused_with_its_numbers():
    with pytest.raises(ConfigError) as error:
        partition_spec(("embed", "mlp"), {"fsdp": 4, "tensor": 8}, (30, 60), "up")
    assert error.value.problems == [
        "up: dim 'embed' of size 30 must be divisible by mesh.fsdp=4 = 4. Use a divisor of 30, or change the size, "
        "or set mesh.rules.embed to fewer axes.",
        "up: dim 'mlp' of size 60 must be divisible by mesh.tensor=8 = 8. Use a divisor of 60, or change the size, "
        "or set mesh.rules.mlp to fewer axes.",
    ]
    with pytest.raises(
        ConfigError,
        match=r"size 6 must be divisible by mesh\.data=2 \* mesh\.fsdp=2 = 4\. Use a divisor of 6",
    ):
        partition_spec(("activation_batch",), SIZES, (6,))
    assert partition_spec(("embed", "mlp"), {"fsdp": 4, "tensor": 8}, (32, 64)) == PartitionSpec(
        "fsdp", "tensor"
    )


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(
        ConfigError, match=r"gate: unknown logical axis 'mpl'\. Use one of .*embed, .*mlp, .*vocab"
    ):
        partition_spec(("embed", "mpl"), SIZES, name="gate")


def test_outside_a_mesh_nothing_is_constrained():
    x = jnp.ones((3, 5))  # divisible by nothing
    assert constrain(x, "activation_batch", "mlp") is x
    assert batch_shards() == 1
    text = jax.jit(lambda x: constrain(x, "activation_batch", "mlp")).lower(x).as_text()
    assert "sharding" not in text
    with jax.set_mesh(mesh_of(1, 1, 1)):
        assert constrain(x, "activation_batch", "mlp") is x


def test_inside_a_mesh_an_array_is_where_its_names_say():
    mesh = mesh_of(2, 2, 2)
    with jax.set_mesh(mesh):
        assert batch_shards() == 4
        x = jax.jit(lambda x: constrain(x * 2, "activation_batch", "mlp"))(jnp.ones((8, 6)))
    assert x.sharding == named_sharding(mesh, ("activation_batch", "mlp"), x.shape)
    assert x.addressable_shards[0].data.shape == (2, 3)
    assert (x == 2).all()


@pytest.mark.parametrize(
    ("length", "own"),
    [
        (8, (2, 2, 6)),
        (6, (2, 3, 6)),  # not by 4, but by the context's 2
        (3, (2, 3, 6)),
    ],
)
def test_the_residual_stream_is_split_by_tokens_over_context_and_tensor(length, own):
    mesh = make_mesh(MeshConfig(fsdp=2, context=2, tensor=2), jax.devices())
    with jax.set_mesh(mesh):
        x = jax.jit(lambda x: constrain_residual(x * 2))(jnp.ones((4, length, 6)))
    assert x.addressable_shards[0].data.shape == own
    assert (x == 2).all()


def test_what_products_take_is_gathered_and_its_gradient_dealt_out_again():
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=4), jax.devices())

    def loss(x):
        taken = gather_residual(constrain_residual(x))
        return (taken**2).sum(), taken

    with jax.set_mesh(mesh):
        x = jnp.arange(4.0 * 8 * 6).reshape(4, 8, 6)
        gradient, taken = jax.jit(jax.grad(loss, has_aux=True))(x)
    assert taken.addressable_shards[0].data.shape == (2, 8, 6)
    assert gradient.addressable_shards[0].data.shape == (2, 2, 6)
    assert (taken == x).all()
    assert (gradient == 2 * x).all()


def test_a_named_sharding_is_checked_like_its_spec():
    mesh = mesh_of(1, 4, 2)
    sharding = named_sharding(mesh, ("embed", "mlp"), (8, 6))
    assert sharding.shard_shape((8, 6)) == (2, 3)
    with pytest.raises(
        ConfigError, match=r"table: dim 'embed' of size 6 must be divisible by mesh\.fsdp=4"
    ):
        named_sharding(mesh, ("embed", "mlp"), (6, 6), "table")
