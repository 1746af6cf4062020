"""Failpoints act where they are set, and nowhere else."""

import errno
import os
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from data_pipeline.base.errors import UsageError
from maxtrain import ATTEMPT, failpoints
from maxtrain.failpoints import PLACES, VARIABLE, arm, hit

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def disarmed():
    yield
    failpoints._armed.clear()


def armed(monkeypatch, text, attempt=""):
    monkeypatch.setenv(VARIABLE, text)
    monkeypatch.setenv(ATTEMPT, attempt)
    arm()


def test_without_the_variable_values_pass_untouched(monkeypatch, capsys):
    monkeypatch.delenv(VARIABLE, raising=False)
    arm()
    value = object()
    assert hit("data", 1, value) is value and capsys.readouterr() == ("", "")


def test_a_fault_is_at_its_place_step_attempt_and_process_only(monkeypatch, capsys):
    armed(monkeypatch, "before_step:raise:7:2:0, eval:raise:9::1", attempt="2")
    assert hit("before_step", 6, 5) == 5 and hit("after_step", 7) is None and hit("eval", 9) is None
    with pytest.raises(RuntimeError, match="raised at before_step"):
        hit("before_step", 7)
    assert "raise at before_step of step 7" in capsys.readouterr().err, "never without a word"
    armed(monkeypatch, "before_step:raise:7:2:0", attempt="3")
    assert hit("before_step", 7, 5) == 5


def test_runs_come_by_every_place_that_is_listed():
    passed = set()
    for path in (ROOT / "maxtrain").rglob("*.py"):
        passed.update(re.findall(r'failpoints\.hit\(?,?\s*"(\w+)"', path.read_text()))
        passed.update(re.findall(r'partial\(failpoints\.hit, "(\w+)"', path.read_text()))
    assert passed == set(PLACES)


def test_a_full_disk_and_a_slow_one(monkeypatch):
    armed(monkeypatch, "before_commit:enospc,data:delay=0.25,data:delay")
    slept = []
    monkeypatch.setattr("time.sleep", slept.append)
    with pytest.raises(OSError) as caught:
        hit("before_commit", 3)
    assert caught.value.errno == errno.ENOSPC
    assert hit("data", 1, "batch") == "batch" and slept == [0.25, 1.0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nan_is_in_the_first_floating_array_alone(monkeypatch, dtype):
    armed(monkeypatch, "data:nan:4")
    batch = {
        "inputs": jnp.ones((2, 3), jnp.int32),
        "mask": jnp.ones((2, 3), dtype),
        "z": jnp.ones(2),
    }
    changed = hit("data", 4, batch)
    assert (
        np.isnan(np.asarray(changed["mask"], np.float32)).sum()
        == np.isnan(changed["mask"][0, 0])
        == 1
    )
    assert (
        changed["mask"].dtype == dtype
        and changed["z"] is batch["z"]
        and hit("data", 5, batch) is batch
    )


def test_nan_in_a_batch_is_in_the_weight_of_a_target(monkeypatch):
    """A batch without targets, as of a skipped step, is unchanged; in parameters the fault is in
    the first number."""
    armed(monkeypatch, "data:nan,before_step:nan")
    changed = hit("data", 1, {"mask": jnp.array([[0.0, 1.0], [1.0, 1.0]])})
    assert np.isnan(changed["mask"]).tolist() == [[False, True], [False, False]]
    assert not np.isnan(hit("data", 1, {"mask": jnp.zeros((2, 2))})["mask"]).any()
    assert np.isnan(hit("before_step", 1, jnp.zeros(3))).tolist() == [True, False, False]


def test_a_bit_of_one_copy_of_a_replicated_array(monkeypatch):
    armed(monkeypatch, "before_step:bitflip:1")
    mesh = Mesh(np.array(jax.devices()[:2]), "data")
    array = jax.device_put(jnp.arange(4.0), NamedSharding(mesh, PartitionSpec()))
    (changed,) = hit("before_step", 1, [array])
    first, second = (np.asarray(shard.data).view(np.uint32) for shard in changed.addressable_shards)
    assert list(first ^ second) == [1, 0, 0, 0] and changed.sharding == array.sharding
    np.testing.assert_array_equal(second.view(np.float32), np.arange(4.0))


def test_a_bit_of_a_checkpoint(monkeypatch, tmp_path):
    armed(monkeypatch, "after_commit:bitflip:8")
    (tmp_path / "a").mkdir()
    files = {tmp_path / "a" / "large": bytes(range(9)), tmp_path / "small": b"x"}
    for path, content in files.items():
        path.write_bytes(content)
    hit("after_commit", 8, tmp_path)
    assert (tmp_path / "small").read_bytes() == b"x"
    assert (tmp_path / "a" / "large").read_bytes() == bytes([0, 1, 2, 3, 5, 5, 6, 7, 8])


@pytest.mark.parametrize(
    ("word", "rule"),
    [
        ("kill", "PLACE 'kill' is none of data, before_step"),
        ("data:boom:3", "ACTION 'boom' is none of kill, term, raise"),
        ("eval:nan", "nan is for data, before_step, after_step"),
        ("data:kill:x", "STEP, ATTEMPT and PROCESS are whole numbers"),
        ("data:kill:1:2:3:4", "STEP, ATTEMPT and PROCESS are whole numbers"),
        ("data:kill=3", "only delay has a number of seconds"),
        ("data:delay=-1", "only delay has a number of seconds"),
    ],
)
def test_what_is_not_understood_is_refused_with_an_example(monkeypatch, word, rule):
    with pytest.raises(
        UsageError, match="such as before_step:kill:7, or unset MAXTRAIN_FAILPOINT"
    ) as caught:
        armed(monkeypatch, f"data:delay,{word}")
    assert f"{VARIABLE}={word}: " in str(caught.value) and rule in str(caught.value)
    assert caught.value.exit_code == 64 and not failpoints._armed, os.environ[VARIABLE]
