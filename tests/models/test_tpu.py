"""The model, and a whole training step, compile for real TPUs: libtpu's compiler needs none, and
runs on any x86 with Linux."""

import importlib.util
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.experimental import topologies

from maxtrain.config.schema import (
    MeshConfig,
    ModelConfig,
    MoeConfig,
    PrecisionConfig,
    RoutingConfig,
)
from maxtrain.models.registry import build_model, logical_axes
from maxtrain.ops.cross_entropy import cross_entropy
from maxtrain.parallel.libtpu import answer_libtpu
from maxtrain.parallel.mesh import make_mesh
from maxtrain.parallel.sharding import named_sharding
from maxtrain.parallel.topologies import described_devices

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="libtpu, TPU's compiler, is for Linux on x86: pip install 'maxtrain[tpu]'",
    ),
]
B, T = 8, 512


def test_outer_axes_are_split_over_slices():
    """Two slices of eight chips: fsdp takes both, and tensor stays inside."""
    answer_libtpu()
    described = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4", num_slices=2)
    mesh = make_mesh(MeshConfig(data=1, fsdp=8, tensor=2), described.devices)
    slices = [device.slice_index for device in mesh.devices.flat]
    assert slices == [0] * 8 + [1] * 8
    assert len({device.id for device in mesh.devices.flat}) == 16


def test_stages_are_split_over_slices_where_that_is_asked_for():
    """Two slices of eight chips: a device gives micro-batches to one of the other slice."""
    answer_libtpu()
    described = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4", num_slices=2)
    mesh = make_mesh(MeshConfig(fsdp=4, tensor=2, dcn_stage=2), described.devices)
    assert mesh.shape["stage"] == 2
    slices = [[chip.slice_index for chip in chips.flat] for chips in mesh.devices[0]]
    assert slices == [[0] * 8, [1] * 8]


def case(axes: dict[str, int], attention: str, *marks: pytest.MarkDecorator):
    mesh = "-".join(f"{axis}{size}" for axis, size in axes.items())
    return pytest.param(axes, attention, marks=marks, id=f"{mesh}-{attention}")


@pytest.fixture
def no_cache():
    """Programs for devices elsewhere can't be read from the cache of this machine's."""
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", True)


def compiled_for_v5p(config, mesh):
    """Loss and gradients on four chips of a v5p, and the parameters as shapes; gradients are split
    as these are."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: build_model(config, PrecisionConfig(), 0)))

    def placed(variable):
        sharding = named_sharding(mesh, logical_axes(variable), variable.shape)
        return variable.replace(
            jax.ShapeDtypeStruct(variable.shape, variable.dtype, sharding=sharding)
        )

    state = jax.tree.map(placed, state, is_leaf=lambda v: isinstance(v, nnx.Variable))
    rows = named_sharding(mesh, ("activation_batch", "activation_length"), (B, T))
    tokens, weights = (
        jax.ShapeDtypeStruct((B, T), dtype, sharding=rows) for dtype in (jnp.int32, jnp.float32)
    )

    def loss(state, inputs, targets, segments, positions, weights):
        model = nnx.merge(graphdef, state)
        hidden = model.hidden(inputs, segments, positions)
        return cross_entropy(
            hidden, model.output_matrix(), targets, weights, chunks=4, dtype=model.precision.compute
        ).loss

    places = jax.tree.map(lambda x: x.sharding, state)
    with jax.set_mesh(mesh):
        step = jax.jit(jax.value_and_grad(loss), out_shardings=(None, places))
        compiled = step.lower(state, tokens, tokens, tokens, tokens, weights).compile()
    return compiled, state


def assert_each_device_has_its_share(compiled, state):
    """One device's share of the parameters comes in, and as much goes out as gradients, in the same
    places."""
    share = sum(math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(state)) * 4
    memory = compiled.memory_analysis()
    for size in (memory.argument_size_in_bytes, memory.output_size_in_bytes):
        assert share <= size < 1.05 * share + 500_000


@pytest.mark.usefixtures("no_cache")
@pytest.mark.parametrize(
    ("axes", "attention"),
    [
        case({"fsdp": 2, "tensor": 2}, "xla"),
        case({"fsdp": 4}, "flash"),
        case({"data": 2, "tensor": 2}, "xla", pytest.mark.slow),
        case({"fsdp": 4}, "xla", pytest.mark.slow),
        case({"data": 2, "tensor": 2}, "flash", pytest.mark.slow),
        case({"fsdp": 2, "tensor": 2}, "flash", pytest.mark.slow),
        case({"fsdp": 2, "stage": 2}, "xla"),
        case({"fsdp": 2, "stage": 2}, "flash", pytest.mark.slow),
    ],
)
def test_loss_and_gradients_compile_for_v5p(axes, attention):
    """On four chips of a v5p, parameters are split by the names of their dims, and so are their
    gradients."""
    config = ModelConfig(
        vocab_size=1024,
        num_layers=2,
        embed_dim=256,
        mlp_dim=512,
        num_heads=4,
        num_kv_heads=2,
        head_dim=128,
        remat="full",
        attention=attention,
    )
    mesh_config = MeshConfig(**{"fsdp": 1} | axes)
    mesh = make_mesh(mesh_config, described_devices("v5p:2x2x1"))
    compiled, state = compiled_for_v5p(config, mesh)
    text = compiled.as_text()
    assert "tpu" in mesh.devices.flat[0].platform and "all-reduce" in text
    assert ("tpu_custom_call" in text) == (attention == "flash")
    assert ("all-gather" in text) == (mesh_config.fsdp > 1)
    if mesh_config.stage > 1:
        # Stages give each other micro-batches, here of one row for each device.
        given = re.findall(r"= \((\w+\[[\d,]+\]).* collective-permute-start\(", text)
        assert given and set(given) <= {f"f32[1,1,{T},256]", f"bf16[1,1,{T},256]"}, given
    assert_each_device_has_its_share(compiled, state)


@pytest.mark.slow
@pytest.mark.usefixtures("no_cache")
@pytest.mark.parametrize("kernel", ["blocks", "ragged"])
def test_experts_that_are_split_compile_for_v5p(kernel):
    """Tokens go to them, and their weights stay."""
    config = ModelConfig(
        family="mixtral",
        vocab_size=1024,
        num_layers=2,
        embed_dim=256,
        mlp_dim=512,
        num_heads=4,
        num_kv_heads=2,
        head_dim=128,
        moe=MoeConfig(8, 2),
        routing=RoutingConfig(kernel=kernel),
    )
    mesh = make_mesh(MeshConfig(fsdp=1, expert=4), described_devices("v5p:2x2x1"))
    compiled, state = compiled_for_v5p(config, mesh)
    assert "all-to-all" in compiled.as_text()
    assert_each_device_has_its_share(compiled, state)


@pytest.mark.processes
def test_a_whole_step_compiles_and_activations_in_bfloat16_need_half():
    """It is compiled in a process of its own, as a user would do."""
    command = [sys.executable, "-m", "benchmarks.activations", "--topology", "v5p:2x2x1"]
    small = ["model.vocab_size=512", "model.num_layers=3", "model.scan_layers=true"]
    result = subprocess.run(
        [*command, "--rows", "8", "config=quickstart", *small, "mesh.fsdp=2", "mesh.tensor=2"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.startswith("4 x TPU v5, ")
    needed = [int(n.replace(",", "")) for n in re.findall(r"([\d,]+) MiB", result.stdout)]
    assert len(needed) == 2 and 0.3 * needed[0] < needed[1] < 0.7 * needed[0], result.stdout
