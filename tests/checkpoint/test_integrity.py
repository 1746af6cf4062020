"""Damage of any kind to a checkpoint is noticed, by file and array, and nothing that is whole is
refused."""

import json
import mmap
import os
import random
import shutil
import threading
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from data_pipeline.base.errors import DamagedError, StorageError
from maxtrain.checkpoint import integrity, listing, reading, zarr_reader
from maxtrain.checkpoint.copying import remove_step
from maxtrain.checkpoint.integrity import (
    encode_commit,
    find_damage,
    hash_files,
    read_commit,
    survey,
)
from maxtrain.checkpoint.listing import latest_record, saved_steps
from maxtrain.checkpoint.manager import Checkpoints
from maxtrain.checkpoint.quarantine import put_aside, put_aside_incomplete
from maxtrain.checkpoint.zarr_reader import read_plain
from maxtrain.config.schema import CheckpointConfig

SYNC = CheckpointConfig(asynchronous=False, keep=100)


def state(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "w": jnp.asarray(rng.normal(size=(64, 96)).astype(np.float32)),
        "zeros": jnp.zeros((256, 64)),
        "half": jnp.asarray(rng.normal(size=(3000,)), jnp.bfloat16),
        "step": jnp.int32(seed),
    }


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def files_of(path):
    return sorted(entry for entry in path.rglob("*") if entry.is_file())


@pytest.fixture
def checkpoints(tmp_path):
    """Two steps."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", SYNC)
    for step in (1, 2):
        checkpoints.save(step, state(step), {"step": step, "cursor": list(range(50))})
    yield checkpoints
    checkpoints.close()


def flip(path, rng):
    """Flips one bit of a file; what undoes it."""
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    whole = path.read_bytes()
    path.write_bytes(content)
    return lambda: path.write_bytes(whole)


def assert_no_flip_is_silent(checkpoints, count, seed):
    """Flip one bit at a time: half of them in any file, half anywhere in the bytes of all."""
    rng, path = random.Random(seed), checkpoints.directory / "00000002"
    files = [file for file in files_of(path) if file.stat().st_size]
    sizes = [file.stat().st_size for file in files]
    for number in range(count):
        file = rng.choice(files) if number % 2 else rng.choices(files, sizes)[0]
        undo = flip(file, rng)
        with pytest.raises(
            StorageError, match="commit.json|record.json" if file.parent == path else file.name
        ) as caught:
            checkpoints.restore(state(), step=2)
        assert (
            "was written" in str(caught.value) and "is there" in str(caught.value)
        ) or file.name == "commit.json"
        undo()
    assert bits(checkpoints.restore(state(), step=2)[0]) == bits(state(2))


@pytest.mark.every_dose
@pytest.mark.long
def test_no_flipped_bit_is_silent(checkpoints):
    assert_no_flip_is_silent(checkpoints, 60, seed=1)


@pytest.mark.slow
def test_none_of_a_thousand_flipped_bits_is_silent(checkpoints):
    assert_no_flip_is_silent(checkpoints, 1000, seed=2)


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # tensorstore calls back a closed event loop
def test_digests_alone_notice_flipped_bits_of_arrays(checkpoints, monkeypatch):
    """Without the hashes of files, reading gives either the saved arrays or an error."""
    for module, name in (
        (reading, "find_damage"),
        (zarr_reader, "find_damage"),
        (zarr_reader, "describe_damage"),
    ):
        monkeypatch.setattr(module, name, lambda *args: "")
    largest = max(
        files_of(checkpoints.directory / "00000002"), key=lambda file: file.stat().st_size
    )
    rng, told = random.Random(3), []
    for _ in range(12):
        undo = flip(largest, rng)
        try:
            assert bits(checkpoints.restore(state(), step=2)[0]) == bits(state(2))
        except StorageError as error:
            told.append(str(error))
        undo()
    assert any("array" in text and "was saved" in text and "was read" in text for text in told), (
        told
    )


def test_an_array_that_is_read_wrongly_is_named_on_any_mesh(checkpoints, monkeypatch):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    sharded = jax.ShapeDtypeStruct(
        (64, 96), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("a", "b"))
    )
    target = {"w": sharded}
    assert bits(checkpoints.restore(target, 2, partial=True)[0]) == bits({"w": state(2)["w"]})
    monkeypatch.setattr(
        reading,
        "read_plain",
        lambda *args: ({"w": read_plain(*args)[0]["w"].at[3, 5].multiply(-1)}, ""),
    )
    with pytest.raises(
        DamagedError, match=r"array w: digest \w{16} was saved, \w{16} was read.*checkpoint verify"
    ):
        checkpoints.restore(target, 2, partial=True)


def zeroed(file):
    file.write_bytes(bytes(file.stat().st_size))


def longer(file):
    file.write_bytes(file.read_bytes() + b"x")


def shorter(file):
    os.truncate(file, file.stat().st_size - 1)


@pytest.mark.parametrize("spoil", [zeroed, longer, shorter, os.remove])
def test_every_file_counts(checkpoints, spoil):
    path = checkpoints.directory / "00000002"
    for name in [file.relative_to(path) for file in files_of(path) if any(file.read_bytes())]:
        kept = (path / name).read_bytes()
        spoil(path / name)
        with pytest.raises(StorageError, match=str(name)) as caught:
            checkpoints.restore(state(), step=2)
        assert caught.value.exit_code == 74
        (path / name).write_bytes(kept)
    assert bits(checkpoints.restore(state())[0]) == bits(state(2))


def test_files_of_another_step_are_noticed(checkpoints):
    """The same names and, but for the arrays, the same sizes."""
    for name in ("record.json", "commit.json"):
        one, two = (checkpoints.directory / step / name for step in ("00000001", "00000002"))
        kept = two.read_bytes()
        shutil.copy(one, two)
        assert checkpoints.steps() == [1]
        two.write_bytes(kept)
    assert checkpoints.steps() == [1, 2]


def test_blocks_are_hashed_apart_and_named(tmp_path, monkeypatch):
    monkeypatch.setattr(integrity, "BLOCK_BYTES", mmap.PAGESIZE)
    monkeypatch.setattr(integrity, "CHUNK_BYTES", 300)
    (tmp_path / "a").write_bytes(random.Random(1).randbytes(2 * mmap.PAGESIZE + 500))
    (tmp_path / "empty").touch()
    files = hash_files(tmp_path, ["a", "empty"])
    with monkeypatch.context() as patch:
        patch.setattr(integrity.mmap, "mmap", Mock(side_effect=OSError("not here")))
        assert hash_files(tmp_path, ["a", "empty"]) == files
    assert [len(files[name]["crc32"]) for name in ("a", "empty")] == [3, 0]
    assert len(set(files["a"]["crc32"])) == 3 and find_damage(tmp_path, files) == ""
    flip(tmp_path / "a", random.Random(0))
    told = find_damage(tmp_path, files)
    assert told.startswith("a, bytes ") and told == "".join(
        find_damage(tmp_path, files, part, 3) for part in range(3)
    )


def test_a_commit_record_needs_its_own_hash(checkpoints):
    path = checkpoints.directory / "00000002"
    commit = read_commit(path)
    del commit["crc32"]
    (path / "commit.json").write_text(json.dumps(commit))
    assert "crc32 is another" in survey(checkpoints.directory)[2]
    (path / "commit.json").write_bytes(encode_commit(commit))
    assert survey(checkpoints.directory) == {1: "", 2: ""}


def test_damaged_steps_are_put_aside_and_never_deleted(checkpoints, capsys):
    path = checkpoints.directory / "00000002"
    before = {file.relative_to(path): file.read_bytes() for file in files_of(path)}
    put_aside(DamagedError(path, "a file"))
    (aside,) = checkpoints.directory.glob("00000002.damaged-*")
    assert {file.relative_to(aside): file.read_bytes() for file in files_of(aside)} == before
    assert f"WARNING: {path} is damaged: a file." in capsys.readouterr().err
    assert latest_record(checkpoints.directory)["step"] == 1
    (checkpoints.directory / "00000001" / "commit.json").unlink()
    assert put_aside_incomplete(checkpoints.directory) == [
        f"{checkpoints.directory / '00000001'} is no checkpoint: commit.json is missing, so it was never finished or not "
        "copied whole. It is put aside; nothing goes on from it."
    ]
    assert put_aside_incomplete(checkpoints.directory) == []
    with pytest.raises(
        StorageError, match=r"only damaged ones:\n(.|\n)*Copy a good one there, or start afresh"
    ) as caught:
        latest_record(checkpoints.directory)
    assert all(step in str(caught.value) for step in ("00000001.damaged-", "00000002.damaged-"))


def test_a_step_that_is_removed_while_it_is_looked_at_is_no_step(checkpoints, monkeypatch):
    """A training prunes while somebody lists its checkpoints, or while another of its threads
    does."""
    looked, size = [], integrity._size

    def remove_first(path):
        if (
            path.is_relative_to(checkpoints.directory / "00000001")
            and not looked.append(path)
            and len(looked) == 3
        ):
            remove_step(checkpoints.directory / "00000001")
        return size(path)

    monkeypatch.setattr(integrity, "_size", remove_first)
    assert survey(checkpoints.directory) == {2: ""} and len(looked) >= 3
    there = {step: checkpoints.directory / f"{step:08d}" for step in (1, 2)}
    monkeypatch.setattr(listing, "complete", lambda directory: there)
    assert saved_steps(checkpoints.directory).keys() == {2}
    assert (
        size(checkpoints.directory / "00000002/commit.json/more") is None
        and size(checkpoints.directory) is None
    )


@pytest.mark.long
def test_steps_come_and_go_under_whoever_lists_them(checkpoints):
    """Hundreds of looks at two steps, one of which is there or not."""
    ended, errors = threading.Event(), []

    def come_and_go():
        path = checkpoints.directory / "00000001"
        kept = path.with_name(".kept")
        shutil.copytree(path, kept)
        while not ended.is_set():
            remove_step(path)
            shutil.copytree(kept, path.with_name(".new"))
            path.with_name(".new").rename(path)

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        for _ in range(300):
            assert {step for step, why in survey(checkpoints.directory).items() if not why} in (
                {1, 2},
                {2},
            )
            assert latest_record(checkpoints.directory)["step"] == 2
    except OSError as error:
        errors.append(error)
    finally:
        ended.set()
        thread.join()
    assert not errors
