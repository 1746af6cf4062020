"""Checkpoints whose bytes are whole and whose weights are not finite: never saved, never restored,
found by verify."""

import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from data_pipeline.base.errors import DamagedError, TryAgainError
from maxtrain.checkpoint.copying import copy_step
from maxtrain.checkpoint.finite import find_non_finite
from maxtrain.checkpoint.integrity import encode_commit, hash_files, read_commit
from maxtrain.checkpoint.manager import Checkpoints
from maxtrain.commands.checkpoint import main
from maxtrain.config.schema import CheckpointConfig
from maxtrain.ops.digest import tree_digests
from maxtrain.ops.finite import compiler_of_finite, non_finite_names


def state(value=1.0, dtype="float32"):
    weights = jnp.ones((3, 5), dtype).at[2, 4].set(value)
    return {"params": {"w": weights, "n": jnp.int32(3)}, "watch": {"best": jnp.float32(jnp.inf)}}


def forge(path, array):
    """Weights with all that vouches for them: file, hashes, digests and the commit record."""
    commit = read_commit(path)
    (file,) = [
        name
        for name in commit["files"]
        if name.startswith("arrays/params.w/") and "." not in name.split("/")[-1][:1]
    ]
    (path / file).write_bytes(np.asarray(array).tobytes())
    commit["files"] |= hash_files(path, [file])
    commit["arrays"]["params.w"]["digest"] = tree_digests({"w": array})["w"]
    (path / "commit.json").write_bytes(encode_commit(commit))


@pytest.fixture
def checkpoints(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", CheckpointConfig(asynchronous=False))
    yield checkpoints
    checkpoints.close()


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf, -jnp.inf])
def test_weights_that_are_not_finite_never_count(checkpoints, value):
    checkpoints.save(1, state(), {})
    with pytest.raises(
        TryAgainError,
        match=r"step 2 is not saved: params\.w not finite.*Run the same command again",
    ):
        checkpoints.save(2, state(value), {})
    assert checkpoints.steps() == [1] and not list(checkpoints.directory.glob(".*"))
    commit = read_commit(checkpoints.directory / "00000001")
    assert {name: array["finite"] for name, array in commit["arrays"].items()} == {
        "params.n": True,
        "params.w": True,
        "watch.best": False,  # it has seen nothing yet
    }


@pytest.mark.long
@pytest.mark.every_dose
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("value", [jnp.nan, -jnp.inf])
def test_a_step_with_such_weights_is_found_although_everything_vouches_for_it(
    checkpoints, dtype, value, capsys
):
    good, bad = state(dtype=dtype), state(value, dtype)
    checkpoints.save(1, good, {"step": 1})
    path = checkpoints.directory / "00000001"
    assert find_non_finite(path, read_commit(path)) == "" and main(["verify", str(path)]) == 0
    forge(path, bad["params"]["w"])
    with pytest.raises(DamagedError, match=r"array params\.w holds NaN or infinity"):
        checkpoints.restore(good)
    assert "not finite: arrays/params.w/" in find_non_finite(path, read_commit(path))
    assert main(["verify", str(path)]) == 74
    assert "array params.w is not finite" in capsys.readouterr().err
    assert jax.tree.leaves(checkpoints.restore(good, check=False)[0])[1].shape == (3, 5), (
        "replay looks at it all the same"
    )


def test_what_was_seen_when_a_step_was_saved_counts_where_files_can_not_be_read_plainly(
    checkpoints, tmp_path
):
    checkpoints.save(1, state(), {})
    path = copy_step(checkpoints.directory / "00000001", tmp_path / "copy")
    commit = json.loads((path / "commit.json").read_text())
    commit["arrays"]["params.w"]["finite"] = False
    assert "array params.w was not finite when it was saved" in find_non_finite(path, commit)


def test_names_of_arrays_that_are_not_finite():
    tree = {
        "a": jnp.ones(3),
        "b": {"c": jnp.array([1.0, jnp.nan])},
        "d": jnp.array([-jnp.inf]),
        "e": jnp.zeros((0, 3)),
        "f": jnp.int32(1),
    }
    assert non_finite_names(tree) == ["b.c", "d"]


def test_program_that_was_compiled_before_the_arrays_are_there(caplog):
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = {"a": jax.ShapeDtypeStruct((3, 11), "float32", sharding=here)}
    array = jax.device_put(np.full((3, 11), np.nan, np.float32), here)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        compiler_of_finite(shapes)()
        assert "Finished XLA compilation" in caplog.text
        caplog.clear()
        assert non_finite_names({"a": array}) == ["a"]
    assert "Finished XLA compilation" not in caplog.text
