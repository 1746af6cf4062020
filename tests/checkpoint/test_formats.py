"""Older steps are read as if they were of this version; newer ones are refused."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from data_pipeline.base.errors import ConfigError, DamagedError
from maxtrain.checkpoint import formats, integrity, manager, writing
from maxtrain.checkpoint.formats import MIGRATIONS, migrate, rename_arrays
from maxtrain.checkpoint.integrity import FORMAT, defect, encode_commit, read_commit
from maxtrain.checkpoint.listing import latest_record, saved_digests
from maxtrain.checkpoint.manager import Checkpoints
from maxtrain.config.schema import CheckpointConfig


@pytest.fixture
def checkpoints(tmp_path):
    """One step, of this version."""
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(asynchronous=False))
    checkpoints.save(
        1, {"w": jnp.arange(20.0), "old": {"b": jnp.int32(5)}}, {"step": 1, "cursor": 7}
    )
    yield checkpoints
    checkpoints.close()


def test_every_older_format_has_a_way_here():
    assert sorted(MIGRATIONS) == list(range(1, FORMAT))
    newer = {"format": FORMAT + 1, "tables": {}}
    assert migrate(newer, {"a": 1}) == (newer, {"a": 1})


def without_hashes(path, number):
    """Rewrites a commit record as one of an older format, which drops all that a step is checked
    by."""
    commit = json.loads((path / "commit.json").read_text())
    del commit["crc32"]
    commit["format"] = number
    for entry in commit["files"].values():
        del entry["crc32"]
    for array in commit["arrays"].values():
        del array["digest"]
    text = encode_commit(commit) if number > 1 else json.dumps(commit).encode()
    (path / "commit.json").write_bytes(text)


@pytest.mark.parametrize("number", [1, 2])
def test_a_commit_record_rewritten_as_an_older_format_counts_for_nothing(checkpoints, number):
    path = checkpoints.directory / "00000001"
    without_hashes(path, number)
    assert (
        defect(path)
        == f"commit.json says format {number}, but the step was saved with format {FORMAT}"
    )
    assert checkpoints.steps() == []


def test_a_step_of_format_1_that_nothing_vouches_for_counts_for_nothing(checkpoints):
    """Also one of format 2 that was rewritten so: its digests were not in the record."""
    path = checkpoints.directory / "00000001"
    (path / "record.json").write_text('{"step": 1}')
    without_hashes(path, 1)
    commit = json.loads((path / "commit.json").read_text())
    commit["files"]["record.json"]["bytes"] = (path / "record.json").stat().st_size
    (path / "commit.json").write_text(json.dumps(commit))
    assert "has no hashes, and record.json no digests" in defect(path)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"format": 0}, "it is not a commit record"),
        ({"format": True}, "it is not a commit record"),
        ({"format": "3"}, "it is not a commit record"),
        ({"step": "1"}, "step must be a whole number"),
        ({"files": []}, "files must be objects by name"),
        ({"files": {"record.json": 5}}, "files must be objects by name"),
        ({"files": {"record.json": {"bytes": "7"}}}, "must have bytes and crc32"),
        ({"files": {"record.json": {"bytes": 7, "crc32": 5}}}, "must have bytes and crc32"),
        ({"files": {"../../other": {"bytes": 7}}}, "has the part '..'"),
        ({"arrays": None}, "arrays must be objects by name"),
        ({"arrays": {"w": {"shape": "x", "dtype": "float32"}}}, "must have shape and dtype"),
    ],
)
def test_a_commit_record_with_wrong_types_counts_for_nothing(checkpoints, change, problem):
    path = checkpoints.directory / "00000001"
    (path / "commit.json").write_bytes(encode_commit(read_commit(path) | change))
    assert problem in defect(path) and checkpoints.steps() == []


GOOD = {
    "run": "a",
    "step": 1,
    "best": {"held": {"step": 1, "nll": 2.0}},
    "rollbacks": [],
    "metrics": None,
    "cursor": {},
}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"rollbacks": True}, "rollbacks is bool, not list"),
        (
            {"rollbacks": [{"step": 1, "kind": "a", "left_out": [1, 10**11]}]},
            "must go up from 1 or more",
        ),
        ({"cursor": 7}, "cursor is int, not dict"),
        ({"best": {"held": {"step": 1}}}, "record.json: "),
        ({"best": {"held": {"step": "1", "nll": 2.0}}}, "best must have step and a loss"),
        ({"metrics": {"records": "1"}}, "metrics must have records and crc32"),
        ({"unevaluated": [1]}, "unevaluated must be names"),
        ({"step": 1.5}, "step is float, not int"),
    ],
)
def test_a_record_that_can_not_be_gone_on_from_counts_for_nothing(tmp_path, change, problem):
    """Its hashes are right: it was written so."""
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(asynchronous=False))
    checkpoints.save(1, {"w": jnp.arange(20.0)}, GOOD)
    checkpoints.save(2, {"w": jnp.arange(20.0)}, GOOD | change)
    checkpoints.close()
    assert problem in defect(tmp_path / "00000002") and checkpoints.steps() == [1]


def test_deep_nesting_in_records_is_damage_and_no_crash(checkpoints):
    path = checkpoints.directory / "00000001"
    (path / "commit.json").write_bytes(b"[" * 100_000)
    assert "commit.json is not readable (lists or objects are more than" in defect(path)


def test_digests_that_a_step_of_format_1_has_in_its_record_are_checked(checkpoints):
    path, wanted = (
        checkpoints.directory / "00000001",
        {"w": jnp.zeros(20), "old": {"b": jnp.int32(0)}},
    )
    digests = saved_digests(checkpoints.directory)
    commit, record = read_commit(path), json.loads((path / "record.json").read_bytes())
    del record["format"]
    old = {"format": 1, "step": 1, "versions": {}, "arrays": commit["arrays"]}
    for array in old["arrays"].values():
        del array["digest"]

    def write(digests):
        (path / "record.json").write_text(json.dumps(record | {"digests": digests}))
        files = {name: {"bytes": (path / name).stat().st_size} for name in commit["files"]}
        (path / "commit.json").write_text(json.dumps(old | {"files": files}))

    write(digests[1])
    assert (
        saved_digests(checkpoints.directory) == digests
        and checkpoints.restore(wanted)[0]["old"]["b"] == 5
    )
    write(digests[1] | {"w": "0" * 16})
    with pytest.raises(DamagedError, match="array w: digest 0000000000000000 was saved"):
        checkpoints.restore(wanted)


def test_a_step_of_a_made_up_older_format_is_read_under_its_new_names(checkpoints, monkeypatch):
    def rename(commit, record):
        return rename_arrays(commit, {"old.b": "new.b"}), {
            "step": record["step"],
            "position": 10 * record["cursor"],
        }

    for module in (formats, integrity, manager, writing):
        monkeypatch.setattr(module, "FORMAT", FORMAT + 1)
    monkeypatch.setitem(MIGRATIONS, FORMAT, rename)
    path, wanted = (
        checkpoints.directory / "00000001",
        {"w": jnp.zeros(20), "new": {"b": jnp.int32(0)}},
    )
    before = (path / "commit.json").read_bytes()
    state, record = checkpoints.restore(wanted)
    assert state["new"]["b"] == 5 and np.array_equal(state["w"], np.arange(20.0))
    assert record == {"step": 1, "position": 70} == latest_record(checkpoints.directory)
    assert (path / "commit.json").read_bytes() == before, "what is on the disk stays as it is"
    with pytest.raises(ConfigError, match=r"old\.b +missing +int32"):
        checkpoints.restore({"old": wanted["new"]}, partial=True)
    commit = read_commit(path)
    commit["arrays"]["old.b"]["digest"] = "0" * 16
    (path / "commit.json").write_bytes(encode_commit(commit))
    with pytest.raises(DamagedError, match=r"array new\.b: digest 0000000000000000 was saved"):
        checkpoints.restore(wanted)
