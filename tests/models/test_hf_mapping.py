"""Steps between our parameters and another format's tensors: what goes there comes back, bit for
bit, whole and in parts."""

from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from maxtrain.config.schema import MeshConfig, PrecisionConfig
from maxtrain.models.families import FAMILIES
from maxtrain.models.families.directory import read_config
from maxtrain.models.hf_mapping import (
    Flatten,
    Join,
    LazyArray,
    Offset,
    ParamMapping,
    Permute,
    Split,
    StackLayers,
    Transpose,
    everything,
    in_memory,
    slices,
    tensors_in_order,
)
from maxtrain.ops.digest import leaf_names
from maxtrain.parallel.mesh import make_mesh
from maxtrain.train_step.state import abstract_model
from tests.support.shared import PARITY_CASES, in_time

PARITY = Path(__file__).parents[1] / "data" / "parity"
# Steps, and the shapes of what they are given.
STEPS = {
    "stack": ((StackLayers(),), [(3, 4, 5)]),
    "stack of every second layer": ((StackLayers(1, 2),), [(3, 4)]),
    "stack of experts": ((StackLayers(), StackLayers()), [(2, 3, 4, 5)]),
    "flatten": ((Flatten(1),), [(4, 3, 5)]),
    "flatten inputs": ((Flatten(2),), [(4, 3, 5)]),
    "transpose": ((Transpose(),), [(4, 6)]),
    "split": ((Split(1, (2, 3, 1)),), [(4, 6)]),
    "join": ((Join(0, (2, 5)),), [(2, 4), (5, 4)]),
    "permute": ((Permute(0, (3, 2, 4), (0, 2, 1)),), [(24, 5)]),
    "permute inner": ((Permute(1, (2, 3, 2), (2, 0, 1)),), [(4, 12)]),
    "attention": ((StackLayers(), Flatten(1), Transpose()), [(2, 8, 4, 6)]),
    "attention with rope in pairs": (
        (StackLayers(), Flatten(1), Transpose(), Permute(0, (4, 2, 3), (0, 2, 1))),
        [(2, 8, 4, 6)],
    ),
    "joined layers": ((Join(2, (4, 6)), StackLayers(), Transpose()), [(2, 3, 4), (2, 3, 6)]),
    "split layers": ((StackLayers(), Split(0, (1, 2))), [(2, 3, 4)]),
}


def entry_of(steps, shapes):
    ours = tuple(f"ours{i}" for i in range(len(shapes)))
    pieces = 1
    for step in steps:
        if isinstance(step, Split):
            pieces = len(step.sizes)
    stacks = sum(isinstance(step, StackLayers) for step in steps)
    theirs = tuple(f"theirs{i}" + ".{}" * stacks for i in range(pieces))
    return ParamMapping(ours, theirs, tuple(steps))


def made(shapes, dtype=np.float32):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def shapes_of(config):
    """The shape of each parameter, by its path."""
    mesh = make_mesh(MeshConfig(fsdp=8))
    _, params = abstract_model(config, PrecisionConfig(), mesh)
    names = leaf_names(params)
    return {name: leaf.shape for name, leaf in zip(names, jax.tree.leaves(params), strict=True)}


def bits(array):
    return np.ascontiguousarray(array).tobytes()


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_the_inverse_of_a_step_gives_the_same_bits(name, dtype):
    steps, shapes = STEPS[name]
    entry = entry_of(steps, shapes)
    arrays = made(shapes, dtype)
    theirs = entry.forward([in_memory(array) for array in arrays])
    written = {name: in_memory(tensor.whole()) for name, tensor in theirs.items()}
    assert {name: tensor.shape for name, tensor in written.items()} == entry.tensor_shapes(shapes)
    back = entry.inverse(written, shapes)
    assert tuple(back) == entry.params
    for array, lazy in zip(arrays, back.values(), strict=True):
        assert lazy.shape == array.shape and bits(lazy.whole()) == bits(array)
    again = entry.forward(list(back.values()))
    for name, tensor in again.items():
        assert bits(tensor.whole()) == bits(written[name].whole())


@given(st.data())
def test_a_part_is_that_part_of_the_whole(data):
    steps, shapes = STEPS[data.draw(st.sampled_from(sorted(STEPS)))]
    entry = entry_of(steps, shapes)
    arrays = made(shapes)
    theirs = entry.forward([in_memory(array) for array in arrays])
    back = entry.inverse(theirs, shapes)
    for lazy in [*theirs.values(), *back.values()]:
        part = tuple(drawn_range(data, size) for size in lazy.shape)
        np.testing.assert_array_equal(lazy.read(part), lazy.whole()[slices(part)])


def drawn_range(data, size):
    start = data.draw(st.integers(0, size - 1))
    return range(start, data.draw(st.integers(start + 1, size)))


def test_names_have_the_numbers_of_the_stacked_dims():
    entry = ParamMapping(
        ("layers.1.up",), ("blk.{}.up.{}", "blk.{}.more.{}"), (StackLayers(1, 2), StackLayers())
    )
    assert entry.names([(2, 2, 3)])[:3] == ["blk.1.up.0", "blk.1.more.0", "blk.1.up.1"]
    assert entry.names([(2, 2, 3)])[-1] == "blk.3.more.1"
    assert entry.pattern() == "blk.N.up.N + blk.N.more.N"


def test_only_what_a_part_needs_is_read():
    asked = []

    def counting(array):
        def read(part):
            asked.append(tuple(map(len, part)))
            return array[slices(part)]

        return LazyArray(array.shape, read)

    entry = entry_of(*STEPS["attention"])
    theirs = entry.forward([in_memory(made([(2, 8, 4, 6)])[0])])
    counted = {name: counting(tensor.whole()) for name, tensor in theirs.items()}
    [lazy] = entry.inverse(counted, [(2, 8, 4, 6)]).values()
    lazy.read((range(1, 2), range(2, 4), range(0, 3), range(6)))
    assert asked == [(18, 2)], "one layer; three of four heads, two of eight inputs"


@given(st.floats(-4, 4, width=16), st.sampled_from([1.0, -1.0, 0.5]))
def test_an_offset_comes_back_where_the_sum_needs_no_rounding(value, offset):
    array = np.array([value], np.float16).astype(np.float32)
    entry = ParamMapping(("ours",), ("theirs",), (Offset(offset),))
    there = entry.forward([in_memory(array)])
    back = entry.inverse(there, [(1,)])["ours"].whole()
    assert there["theirs"].whole() == array + np.float32(offset)
    assert back.dtype == np.float32 and np.abs(back - array) <= np.spacing(np.float32(8)) / 2
    if value == 0 or abs(value) >= 2**-13:
        np.testing.assert_array_equal(back, array)


@pytest.mark.parametrize("case", ("llama3", *in_time(PARITY_CASES[1:])))
def test_export_after_import_and_import_after_export_change_no_bit(case):
    config = read_config(PARITY / case)
    table = FAMILIES[config.family].table(config)
    tensors = load_file(PARITY / case / "model.safetensors")
    lazy = {name: in_memory(tensor) for name, tensor in tensors.items()}
    shapes = shapes_of(config)
    ours = {}
    for entry in table:
        ours |= entry.inverse(lazy, [shapes[name] for name in entry.params])
    assert {name: array.shape for name, array in ours.items()} == shapes
    written = {name: tensor.whole() for name, tensor in tensors_in_order(table, ours).items()}
    assert written.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert written[name].shape == tensor.shape and bits(written[name]) == bits(tensor)
    kept = {name: in_memory(array.whole()) for name, array in ours.items()}
    again = {
        name: in_memory(array.whole()) for name, array in tensors_in_order(table, kept).items()
    }
    for entry in table:
        back = entry.inverse(again, [kept[name].shape for name in entry.params])
        for name, array in back.items():
            assert bits(array.whole()) == bits(ours[name].whole())


def test_tensors_come_layer_by_layer():
    config = read_config(PARITY / "qwen3")
    table = FAMILIES["qwen3"].table(config)
    shapes = shapes_of(config)
    ours = {name: in_memory(np.zeros(shape)) for name, shape in shapes.items()}
    names = list(tensors_in_order(table, ours))
    assert names[0] == "model.embed_tokens.weight" and names[-1] == "model.norm.weight"
    layers = [int(name.split(".")[2]) for name in names[1:-1]]
    assert layers == sorted(layers) and set(layers) == {0, 1, 2}
    assert [name.removeprefix("model.layers.1.") for name in names if ".1." in name] == [
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
        "self_attn.o_proj.weight",
        "self_attn.q_norm.weight",
        "self_attn.k_norm.weight",
        "mlp.gate_proj.weight",
        "mlp.up_proj.weight",
        "mlp.down_proj.weight",
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
    ]


def test_the_part_that_is_the_whole():
    assert everything((2, 3)) == (range(2), range(3))
