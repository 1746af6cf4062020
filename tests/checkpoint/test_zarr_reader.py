"""Arrays in plain files: what Orbax reads, on any mesh, with every file checked on the way."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from data_pipeline.base.errors import DamagedError
from maxtrain.checkpoint import integrity, reading, zarr_reader
from maxtrain.checkpoint.manager import Checkpoints
from maxtrain.config.schema import CheckpointConfig
from maxtrain.ops import digest

SYNC = CheckpointConfig(asynchronous=False, keep=100)
DTYPES = ["float32", "bfloat16", "int32", "bool", "uint8", "float8_e4m3fn"]


def bits(tree):
    return [(x.dtype, x.shape, np.asarray(x).tobytes()) for x in jax.tree.leaves(tree)]


def spread_over(shape, axes):
    """A sharding of a mesh of eight devices; what the axes do not name is replicated."""
    mesh = jax.make_mesh(shape, ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    return NamedSharding(mesh, PartitionSpec(*axes))


def hash_all(path):
    """Return the hashes of the files of a step, as a commit record has them."""
    names = [file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()]
    return integrity.hash_files(path, names)


SHARDINGS = st.builds(
    spread_over,
    st.sampled_from([(8, 1), (4, 2), (2, 4), (2, 2), (1, 1)]),
    st.sampled_from(
        [
            (None, None, None),
            ("a",),
            (None, "b"),
            ("a", "b"),
            ("b", None, "a"),
            (("a", "b"),),
            (None, ("b", "a")),
        ]
    ),
)


@pytest.mark.long
@settings(max_examples=8, deadline=None)
@given(saved=SHARDINGS, wanted=SHARDINGS, dtype=st.sampled_from(DTYPES))
def test_any_mesh_reads_what_any_mesh_saved_as_orbax_does(tmp_path_factory, saved, wanted, dtype):
    data = (
        np.random.default_rng(0)
        .integers(0, 2 if dtype == "bool" else 99, (16, 8, 8))
        .astype(jnp.dtype(dtype))
    )
    state = {
        "w": jax.device_put(data, saved),
        "one": jax.device_put(jnp.int32(7), NamedSharding(saved.mesh, PartitionSpec())),
    }
    checkpoints = Checkpoints(tmp_path_factory.mktemp("plain"), SYNC)
    checkpoints.save(1, state, {})
    target = {"w": jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=wanted)}
    target["one"] = jax.ShapeDtypeStruct(
        (), jnp.int32, sharding=NamedSharding(wanted.mesh, PartitionSpec())
    )
    ours = checkpoints.restore(target)[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "read_plain", lambda *args: (None, ""))
        orbax = checkpoints.restore(target)[0]
    assert bits(ours) == bits(orbax) == bits(state)
    assert ours["w"].sharding == wanted == orbax["w"].sharding
    jax.block_until_ready(
        jax.jit(lambda tree: jax.tree.map(lambda x: x, tree), donate_argnums=0)(ours)
    )
    checkpoints.close()


def test_blocks_of_large_files_are_read_apart_and_named(tmp_path, monkeypatch):
    for module in (integrity, zarr_reader):
        monkeypatch.setattr(module, "BLOCK_BYTES", 4096)
    checkpoints = Checkpoints(tmp_path, SYNC)
    state = {
        "w": jnp.asarray(np.random.default_rng(0).normal(size=(300, 100)).astype(np.float32)),
        "x": jnp.zeros(10),
    }
    checkpoints.save(1, state, {})
    assert bits(checkpoints.restore(state)[0]) == bits(state)
    file = tmp_path / "00000001" / "arrays" / "w" / "0.0"
    content = bytearray(file.read_bytes())
    content[50_000] ^= 1
    file.write_bytes(content)
    with pytest.raises(
        DamagedError,
        match=r"arrays/w/0\.0, bytes 49,152 to 53,248: crc32 \w{8} was written, \w{8} is there",
    ):
        checkpoints.restore(state)
    assert bits(checkpoints.restore({"x": state["x"]}, partial=True)[0]) == bits([state["x"]]), (
        "w is not read for x"
    )
    checkpoints.close()


@pytest.mark.parametrize("use_ocdbt", [True, False])
def test_compressed_arrays_and_those_of_several_processes_are_read_too(
    tmp_path, use_ocdbt, monkeypatch
):
    checkpoints = Checkpoints(tmp_path, SYNC)
    state = {
        "w": jnp.asarray(np.random.default_rng(0).normal(size=(30, 10)).astype(np.float32)),
        "step": jnp.int32(3),
    }
    checkpoints._orbax.close()
    checkpoints._orbax = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=use_ocdbt))
    checkpoints.save(1, state, {})
    checkpoints.close()
    checkpoints = Checkpoints(tmp_path, SYNC)
    assert bits(checkpoints.restore(state)[0]) == bits(state)
    file = max(
        (file for file in (tmp_path / "00000001" / "arrays").rglob("*") if file.is_file()),
        key=lambda f: f.stat().st_size,
    )
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    with pytest.raises(DamagedError, match=file.name):
        checkpoints.restore(state)
    checkpoints.close()


def test_digests_are_made_while_others_are_read_and_one_that_is_wrong_is_noticed(
    tmp_path, monkeypatch
):
    state = {f"w{i}": jnp.full((4, 4), i, jnp.float32) for i in range(16)}
    checkpoints = Checkpoints(tmp_path, SYNC)
    checkpoints.save(1, state, {})
    events, to_array, begin = [], zarr_reader._ReadPlan.to_array, digest.digests
    monkeypatch.setattr(digest, "_FEW_BYTES", 0)
    monkeypatch.setattr(
        zarr_reader._ReadPlan, "to_array", lambda plan: events.append("read") or to_array(plan)
    )
    monkeypatch.setattr(
        digest, "digests", lambda tree: events.append(f"digest {len(tree)}") or begin(tree)
    )
    assert bits(checkpoints.restore(state)[0]) == bits(state)
    assert events == ["read", "read", "digest 2"] * 8
    checkpoints.restore(state, check=False)
    assert events[24:] == ["read"] * 16
    path = tmp_path / "00000001"
    commit = integrity.read_commit(path)
    commit["arrays"]["w3"]["digest"] = "0123456789abcdef"
    (path / "commit.json").write_bytes(integrity.encode_commit(commit))
    with pytest.raises(
        DamagedError, match=r"array w3: digest 0123456789abcdef was saved, [0-9a-f]{16} was read"
    ):
        checkpoints.restore(state)
    checkpoints.close()


@pytest.mark.parametrize(
    "header",
    [
        b'{"shape": [4], "chunks": [0]}',
        b'{"shape": [4], "chunks": [-1]}',
        b'{"shape": [4], "chunks": [5]}',
        b'{"shape": [4], "chunks": [1, 1]}',
        b'{"shape": [4], "chunks": [true]}',
        b'{"shape": [4], "chunks": ["4"]}',
        b'{"shape": [4], "chunks": 4}',
        b'{"shape": [1000000000000], "chunks": [1]}',
        b'{"shape": [1000000000000], "chunks": [1000000000000]}',
        b'{"shape": 4, "chunks": [4]}',
        b'{"chunks": [4]}',
        b"[]",
        b"null",
        b'{"shape": [4], "shape": [4], "chunks": [4]}',
        b"[" * 100_000,
        b'{"shape": [4], "chunks": [4], "order": "C", "dtype": "<f8"}',
    ],
    ids=lambda header: header[:50].decode(),
)
def test_metadata_that_claims_what_the_array_is_not_is_damage(header, tmp_path):
    (tmp_path / "arrays" / "w").mkdir(parents=True)
    (tmp_path / "arrays" / "w" / ".zarray").write_bytes(header)
    (tmp_path / "arrays" / "w" / "0").write_bytes(bytes(32))
    files = hash_all(tmp_path)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=device)
    with pytest.raises(DamagedError):
        zarr_reader.read_plain(tmp_path, files, {"w": target})


def test_metadata_with_more_chunks_than_any_array_has_is_damage(tmp_path):
    (tmp_path / "arrays" / "w").mkdir(parents=True)
    (tmp_path / "arrays" / "w" / ".zarray").write_text('{"shape": [1000000000], "chunks": [1]}')
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.ShapeDtypeStruct((10**9,), jnp.float32, sharding=device)
    with pytest.raises(DamagedError, match="divides the shape"):
        zarr_reader.read_plain(tmp_path, hash_all(tmp_path), {"w": target})
