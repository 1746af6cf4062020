"""Digests: against a slow oracle in whole numbers of Python, on meshes of all sizes, and what they
must notice."""

import hashlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from maxtrain.ops.digest import (
    Digester,
    _compiled,
    digest,
    digests,
    hash_text,
    leaf_names,
    tree_digests,
)

DTYPES = [
    np.float32,
    ml_dtypes.bfloat16,
    np.float16,
    np.int32,
    np.int16,
    np.uint8,
    np.uint32,
    np.int8,
    np.bool_,
]
DTYPES += [ml_dtypes.float8_e4m3fn]
digest_jit = jax.jit(digest)


def mixed(x, a, b, c, d, e):
    x = (x ^ (x >> a)) * b % 2**32
    x = (x ^ (x >> c)) * d % 2**32
    return x ^ (x >> e)


def oracle(x):
    """Compute the digest element by element, with Python's integers."""
    murmur, lowbias = (16, 0x85EBCA6B, 13, 0xC2B2AE35, 16), (16, 0x7FEB352D, 15, 0x846CA68B, 16)
    header = hashlib.blake2b(f"{x.dtype} {x.shape}".encode(), digest_size=8).digest()
    words = [int.from_bytes(header[i : i + 4], "little") for i in (0, 4)]
    for i, bits in enumerate(
        x.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[x.itemsize]).ravel().tolist()
    ):
        place = mixed(i, *lowbias)
        words[0] += mixed(bits ^ place, *murmur)
        words[1] += mixed((bits + place) % 2**32, *lowbias)
    return [word % 2**32 for word in words]


def example(dtype, shape=(3, 5, 2), seed=0):
    return np.random.default_rng(seed).normal(0, 3, shape).astype(dtype)


def of(x):
    return tuple(np.asarray(digest_jit(x)).tolist())


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5, 2), (0, 4)], ids=str)
def test_equals_the_oracle(dtype, shape):
    x = example(dtype, shape)
    assert list(of(x)) == oracle(x)


@pytest.mark.parametrize(
    "dtype", [d for d in DTYPES if d is not np.bool_], ids=lambda d: np.dtype(d).name
)
def test_every_flipped_bit_changes_both_words(dtype):
    x = example(dtype, (2, 3))
    raw = x.view(f"u{x.itemsize}").ravel()
    changed = [raw.copy() for _ in range(8 * x.nbytes)]
    for flip, copy in enumerate(changed):
        copy[flip // (8 * x.itemsize)] ^= raw.dtype.type(1 << flip % (8 * x.itemsize))
    stacked = np.stack([copy.view(x.dtype).reshape(x.shape) for copy in [raw, *changed]])
    words = np.asarray(jax.jit(jax.vmap(digest))(stacked))
    assert (words[1:] != words[0]).all() and len({tuple(w) for w in words.tolist()}) == len(words)


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_two_changes_swaps_and_signs_do_not_cancel(data):
    """Sums of bits times odd constants would not see that two signs changed."""
    x = example(np.float32, (4, 6), data.draw(st.integers(0, 99)))
    i, j = data.draw(st.lists(st.integers(0, x.size - 1), min_size=2, max_size=2, unique=True))
    other = x.copy().ravel()
    match data.draw(st.sampled_from(["swap", "signs", "bits"])):
        case "swap":
            other[[i, j]] = other[[j, i]]
        case "signs":
            other[[i, j]] *= -1
        case "bits":
            a, b = data.draw(st.tuples(st.integers(0, 31), st.integers(0, 31)))
            other.view(np.uint32)[i] ^= np.uint32(1 << a)
            other.view(np.uint32)[j] ^= np.uint32(1 << b)
    assert of(other.reshape(x.shape)) != of(x)


def test_shape_type_order_zeros_and_nans_count():
    x = np.arange(16, dtype=np.float32).reshape(4, 4)
    nan = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    arrays = [
        x,
        x.T.copy(),
        -x,
        x.reshape(2, 8),
        x[::-1].copy(),
        x.view(np.int32),
        x.astype(np.float16),
        np.roll(x, 1),
    ]
    arrays += [
        np.zeros(3, np.float32),
        np.full(3, -0.0, np.float32),
        np.zeros(4, np.float32),
        nan[:1],
        nan[1:],
    ]
    assert len({of(array) for array in arrays}) == len(arrays)


def test_numbers_of_64_bits_and_random_keys():
    key, other = jax.random.key(1), jax.random.key(2)
    assert of(key) == of(jax.random.key_data(key)) != of(other)
    with jax.enable_x64(True):
        x = np.array([1.0, 2.0])
        changed = np.nextafter(x, 3.0)
        assert of(x) != of(changed) and of(x) == of(x.copy())


MESHES = [(1, 1), (2, 1), (1, 4), (2, 4), (4, 2), (8, 1)]


@pytest.mark.every_dose
@pytest.mark.long
@settings(deadline=None, max_examples=6)
@given(
    dtype=st.sampled_from([np.float32, ml_dtypes.bfloat16, np.int32]),
    spec=st.sampled_from([(), ("a",), (None, "b"), ("a", "b"), (("b", "a"),)]),
    seed=st.integers(0, 99),
)
def test_any_mesh_and_sharding_gives_the_same(dtype, spec, seed):
    x = example(dtype, (8, 16), seed)
    expected = oracle(x)
    for a, b in MESHES:
        mesh = jax.make_mesh(
            (a, b),
            ("a", "b"),
            devices=jax.devices()[: a * b],
            axis_types=(jax.sharding.AxisType.Auto,) * 2,
        )
        placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
        assert list(of(placed)) == expected, (a, b)


def test_a_split_array_is_not_gathered_and_nothing_of_its_size_is_made():
    mesh = jax.make_mesh((8,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.ShapeDtypeStruct(
        (512, 1024), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("a"))
    )
    compiled = _compiled(jax.default_backend(), (False,)).lower([x]).compile()
    assert "all-gather" not in compiled.as_text() and "all-reduce" in compiled.as_text()
    assert compiled.memory_analysis().temp_size_in_bytes < 512 * 1024 * 4 / 8 / 8


def test_a_tree_has_a_digest_for_each_leaf_and_one_for_all():
    tree = {"b": {"up": jnp.ones(3)}, "a": jnp.zeros((), jnp.int32)}
    assert leaf_names(tree) == ["a", "b.up"]
    found, words = tree_digests(tree), digests(tree)
    assert (
        [int(found["b.up"][i : i + 8], 16) for i in (0, 8)]
        == oracle(np.ones(3, np.float32))
        == words[1].tolist()
    )
    assert len(hash_text(words)) == 16 and hash_text(words) != hash_text(words[::-1])
    changed = digests(tree | {"a": jnp.ones((), jnp.int32)})
    assert hash_text(changed) != hash_text(words) == hash_text(np.asarray(words))


@pytest.mark.long
@settings(deadline=None, max_examples=20)
@given(
    sizes=st.lists(st.integers(0, 5), max_size=8),
    few=st.sampled_from([0, 20, 10**6]),
    before=st.sets(st.integers(0, 7)),
)
def test_arrays_that_come_one_after_another_have_the_digests_of_the_tree(sizes, few, before):
    tree = {f"w{i}": jnp.arange(size, dtype=jnp.int32) for i, size in enumerate(sizes)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("maxtrain.ops.digest._FEW_BYTES", few)
        digester = Digester(sum(x.nbytes for x in tree.values()))
        for i, (name, array) in enumerate(tree.items()):
            if i in before:
                digester.add(name, array)
        found = digester.finish(tree)
    assert found == (tree_digests(tree) if tree else {})
