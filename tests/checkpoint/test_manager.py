"""Checkpoints: bitwise, onto any mesh, whole or not at all."""

import errno
import json
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types
import warnings
import zlib
from pathlib import Path
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from data_pipeline.base.errors import ConfigError, StorageError
from data_pipeline.base.remote import RemotePath
from maxtrain.checkpoint import copying, manager, writing
from maxtrain.checkpoint.listing import latest_record
from maxtrain.checkpoint.manager import FORMAT, Checkpoints
from maxtrain.config.schema import CheckpointConfig
from maxtrain.ops.digest import tree_digests
from maxtrain.parallel import agreement

SYNC = CheckpointConfig(asynchronous=False, keep=100)
REPOSITORY = Path(__file__).parents[2]


def mesh_of(*shape):
    return jax.make_mesh(shape, ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)


def state_on(mesh, seed=0, width=16):
    """Parameters of a two-layer network in two dtypes, Adam's moments and the step, sharded over
    the mesh."""
    rngs = nnx.Rngs(seed)
    layers = nnx.List(
        [nnx.Linear(8, width, rngs=rngs), nnx.Linear(width, 8, rngs=rngs, param_dtype=jnp.bfloat16)]
    )
    params = nnx.state(layers)
    tree = {"params": params, "optimizer": optax.adamw(1e-3).init(params), "step": jnp.int32(seed)}
    key = jax.random.key(seed)
    tree = jax.tree.map(lambda x: x + jax.random.normal(key, x.shape).astype(x.dtype), tree)
    return jax.tree.map(lambda x, s: jax.device_put(x, s), tree, shardings_of(tree, mesh))


def shardings_of(tree, mesh):
    spec = {0: PartitionSpec(), 1: PartitionSpec("tensor"), 2: PartitionSpec("fsdp", "tensor")}
    return jax.tree.map(lambda x: NamedSharding(mesh, spec[x.ndim]), tree)


def abstract(tree, mesh):
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        tree,
        shardings_of(tree, mesh),
    )


def bits(tree):
    return [(x.dtype, x.shape, np.asarray(x).tobytes()) for x in jax.tree.leaves(tree)]


def small(value=0.0, size=64):
    return {"w": jnp.full((size,), value, jnp.float32), "step": jnp.int32(value)}


@pytest.fixture
def checkpoints(tmp_path):
    manager = Checkpoints(tmp_path / "checkpoints", SYNC)
    yield manager
    manager.close()


@pytest.mark.long
@pytest.mark.parametrize(
    "shape",
    [(4, 2), *(pytest.param(shape, marks=pytest.mark.long) for shape in ((8, 1), (2, 4), (1, 1)))],
)
def test_restores_bitwise_onto_any_mesh(checkpoints, shape):
    state = state_on(mesh_of(4, 2))
    record = {"cursor": 12, "fingerprints": {"plan": "abc"}, "config": {"seed": 1}}
    assert checkpoints.save(3, state, record)
    mesh = mesh_of(*shape)
    restored, read = checkpoints.restore(abstract(state, mesh))
    assert bits(restored) == bits(state)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert all(
        x.sharding == s
        for x, s in zip(jax.tree.leaves(restored), jax.tree.leaves(shardings_of(state, mesh)))
    )
    assert read == record == latest_record(checkpoints.directory)


def test_special_floats_keep_their_bits(checkpoints):
    payload = np.array(
        [0x7FC00001, 0xFFC12345, 0x80000000, 0x00000001, 0x7F800000], np.uint32
    ).view(np.float32)
    checkpoints.save(1, {"w": jnp.asarray(payload)}, {})
    restored, _ = checkpoints.restore({"w": jax.ShapeDtypeStruct((5,), jnp.float32)})
    assert np.asarray(restored["w"]).tobytes() == payload.tobytes()
    assert restored["w"].devices() == {jax.devices()[0]}


@pytest.mark.every_dose
@pytest.mark.long
def test_asynchronous_save_is_a_snapshot(tmp_path):
    """Steps with donation that run while the save is being written must not change what it
    holds."""
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(asynchronous=True))
    for step, spec in enumerate((PartitionSpec("fsdp"), PartitionSpec())):
        sharding = NamedSharding(mesh_of(8, 1), spec)
        data = np.random.default_rng(step).normal(size=(8, 256, 128)).astype(np.float32)
        state = {name: jax.device_put(data + i, sharding) for i, name in enumerate("abcdef")}
        train_step = jax.jit(
            lambda tree: jax.tree.map(lambda x: x * 2 + 1, tree),
            donate_argnums=0,
            out_shardings=sharding,
        )
        state = jax.block_until_ready(train_step(state))
        expected = bits(state)
        record = {"cursor": [step]}
        checkpoints.save(step, state, record)
        record["cursor"].append(99)
        for _ in range(10):
            state = train_step(state)
        jax.block_until_ready(state)
        restored, read = checkpoints.restore(
            jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
        )
        assert bits(restored) == expected
        assert read == {"cursor": [step]}
    checkpoints.close()


@pytest.mark.every_dose
@pytest.mark.long
def test_retention_keeps_the_last_and_every_nth(tmp_path):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep=2, keep_every=4, asynchronous=True))
    for step in range(1, 12):
        checkpoints.save(step, small(step), {})
    checkpoints.wait()
    assert checkpoints.steps() == [4, 8, 10, 11]
    assert {path.name for path in tmp_path.iterdir()} == {f"{step:08d}" for step in (4, 8, 10, 11)}
    assert checkpoints.restore(small(), step=4)[0]["step"] == 4
    checkpoints.close()


def test_retention_keeps_the_best_of_each_evaluation_until_there_is_a_better_one(tmp_path):
    checkpoints = Checkpoints(
        tmp_path, CheckpointConfig(keep=1, keep_best=True, asynchronous=False)
    )
    left = []
    for step, (a, b) in enumerate([(1, 1), (1, 2), (1, 2), (4, 2), (4, 2)], 1):
        checkpoints.save(
            step,
            small(step),
            {"best": {"a": {"step": a, "nll": 1.0}, "b": {"step": b, "nll": 2.0}}},
        )
        left.append(checkpoints.steps())
    assert left == [[1], [1, 2], [1, 2, 3], [2, 4], [2, 4, 5]]
    checkpoints.close()


def test_space_is_looked_at_before_it_is_needed(checkpoints, monkeypatch):
    size = 65 * 4  # bytes of `small`
    for free, steps in ((size - 1, None), (size, "needs 101 more"), (101 * size, "")):
        monkeypatch.setattr(
            shutil, "disk_usage", lambda place, free=free: types.SimpleNamespace(free=free)
        )
        if steps is None:
            with pytest.raises(
                StorageError, match=r"GB free; a checkpoint takes.*set output_dir to another disk"
            ) as caught:
                checkpoints.require_space(small())
            assert caught.value.exit_code == 74
        else:
            warning = checkpoints.require_space(small())
            assert steps in warning and bool(warning) == bool(steps)


def test_behind_a_url_a_host_needs_space_for_its_part_alone(tmp_path, monkeypatch):
    """The test is one of four hosts, each of which holds a quarter."""
    quarters = dict(enumerate(["a", "b", "c", "d"]))
    sharding = types.SimpleNamespace(
        devices_indices_map=lambda shape: quarters,
        addressable_devices_indices_map=lambda shape: {2: quarters[2]},
    )
    leaf = types.SimpleNamespace(
        size=1000, shape=(1000,), dtype=jnp.dtype("float32"), sharding=sharding
    )
    monkeypatch.setattr(
        shutil, "disk_usage", lambda place: types.SimpleNamespace(free=2 * 1000 - 1)
    )
    home = RemotePath(f"file://{tmp_path}/bucket")
    at_url = Checkpoints(tmp_path / "here", CheckpointConfig(), home=home)
    assert "the newest, which stays on this host, needs 2 more" in at_url.require_space([leaf])
    monkeypatch.setattr(shutil, "disk_usage", lambda place: types.SimpleNamespace(free=2 * 1000))
    assert at_url.require_space([leaf]) == ""
    at_url.close()
    on_disk = Checkpoints(tmp_path / "disk", CheckpointConfig())
    with pytest.raises(StorageError, match=r"a checkpoint takes up to"):
        on_disk.require_space([leaf])
    on_disk.close()


def test_a_save_is_due_so_many_minutes_after_the_last_one(tmp_path, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(manager, "time", types.SimpleNamespace(monotonic=lambda: now))
    by_clock = Checkpoints(tmp_path, CheckpointConfig(minutes=1.5, asynchronous=False))
    never = Checkpoints(tmp_path, CheckpointConfig())
    told = []
    for now in (1000, 1089, 1090, 1200):  # noqa: B007 (the clock reads it)
        told.append((by_clock.due(), never.due()))
    by_clock.save(1, small(), {})
    for now in (1289, 1290):  # noqa: B007
        told.append((by_clock.due(), never.due()))
    by_clock.save(1, small(), {})  # is there already: that counts, too
    told.append((by_clock.due(), never.due()))
    assert told == [(due, False) for due in (False, False, True, True, False, True, False)]
    by_clock.close()
    never.close()


def test_steps_are_ordered_as_numbers(checkpoints):
    for step in (99_999_999, 100_000_000, 0):
        checkpoints.save(step, small(), {})
    assert (
        checkpoints.steps() == [0, 99_999_999, 100_000_000] and checkpoints.latest() == 100_000_000
    )


def test_a_complete_step_is_not_saved_twice(checkpoints):
    assert checkpoints.save(5, small(1), {"try": 1})
    assert not checkpoints.save(5, small(2), {"try": 2})
    assert checkpoints.restore(small())[0]["w"][0] == 1


def spoil_empty(path):
    shutil.rmtree(path)
    path.mkdir()


def spoil_no_commit(path):
    (path / "commit.json").unlink()


def spoil_half_commit(path):
    os.truncate(path / "commit.json", 40)


def spoil_missing_file(path):
    next((path / "arrays").rglob(".zarray")).unlink()


def spoil_short_file(path):
    largest = max(
        (path / "arrays").rglob("*"), key=lambda p: p.stat().st_size if p.is_file() else -1
    )
    os.truncate(largest, largest.stat().st_size - 1)


def spoil_other_step(path):
    shutil.rmtree(path)
    shutil.copytree(path.parent / "00000001", path)


@pytest.mark.parametrize(
    "spoil",
    [
        spoil_empty,
        spoil_no_commit,
        spoil_half_commit,
        spoil_missing_file,
        spoil_short_file,
        spoil_other_step,
    ],
)
def test_incomplete_steps_are_passed_over_and_saved_anew(checkpoints, spoil):
    checkpoints.save(1, small(1), {})
    checkpoints.save(2, small(2), {})
    spoil(checkpoints.directory / "00000002")
    assert checkpoints.latest() == 1
    assert checkpoints.restore(small())[0]["step"] == 1
    with pytest.raises(
        StorageError, match=r"not a complete checkpoint: .*Complete steps: 1. Ask for one of these"
    ):
        checkpoints.restore(small(), step=2)
    assert checkpoints.save(2, small(3), {})
    assert checkpoints.restore(small(), step=2)[0]["step"] == 3


@pytest.mark.parametrize("step", [0, 9])
def test_a_step_that_does_not_exist_is_said_not_to_and_the_others_are_named(checkpoints, step):
    for saved in (1, 2):
        checkpoints.save(saved, small(saved), {})
    with pytest.raises(
        StorageError, match=r"there is no such step\. Complete steps: 1, 2\. Ask for one of these"
    ):
        checkpoints.restore(small(), step=step)


def test_nothing_to_restore_names_what_is_there(checkpoints):
    assert checkpoints.latest() is None and checkpoints.steps() == []
    with pytest.raises(StorageError, match=r"has no complete checkpoint\. Check the path"):
        checkpoints.restore(small())
    (checkpoints.directory / "00000009").mkdir(parents=True)
    (checkpoints.directory / "notes").mkdir()
    assert checkpoints.latest() is None
    with pytest.raises(
        StorageError, match=r"00000009: commit.json is missing(.|\n)*Check the path"
    ) as caught:
        checkpoints.restore(small())
    assert caught.value.exit_code == 74


def test_differences_come_as_a_table_and_nothing_is_padded(checkpoints):
    checkpoints.save(
        1, {"a": jnp.zeros((4, 8)), "b": jnp.zeros(3), "c": jnp.zeros(2), "same": jnp.zeros(1)}, {}
    )
    wanted = {
        "a": jnp.zeros((8, 8)),
        "b": jnp.zeros(3, jnp.bfloat16),
        "d": jnp.zeros(5),
        "same": jnp.zeros(1),
    }
    with pytest.raises(ConfigError, match="set run_name to a new name") as caught:
        checkpoints.restore(wanted)
    lines = [" ".join(line.split()) for line in str(caught.value).splitlines()]
    assert "a float32[4, 8] float32[8, 8]" in lines
    assert "b float32[3] bfloat16[3]" in lines
    assert "c float32[2] missing" in lines
    assert "d missing float32[5]" in lines
    assert not any("same" in line for line in lines)
    with pytest.raises(ConfigError, match=r"d +missing +float32\[5\]"):
        checkpoints.restore({"a": jnp.zeros((4, 8)), "d": jnp.zeros(5)}, partial=True)


@pytest.mark.long
@pytest.mark.every_dose
def test_another_width_is_refused(checkpoints):
    checkpoints.save(1, state_on(mesh_of(1, 1)), {})
    with pytest.raises(ConfigError, match=r"optimizer.0.mu.0.bias +float32\[16\] +float32\[32\]"):
        checkpoints.restore(state_on(mesh_of(1, 1), width=32))


@pytest.mark.every_dose
@pytest.mark.long
def test_a_part_can_be_read_alone(checkpoints):
    state = state_on(mesh_of(2, 4))
    checkpoints.save(1, state, {})
    params, _ = checkpoints.restore(
        {"params": abstract(state, mesh_of(8, 1))["params"]}, partial=True
    )
    assert bits(params["params"]) == bits(state["params"])


def test_a_newer_format_is_refused(checkpoints):
    checkpoints.save(7, small(), {})
    path = checkpoints.directory / "00000007" / "commit.json"
    commit = json.loads(path.read_text())
    path.write_text(
        json.dumps(
            {
                "format": FORMAT + 1,
                "step": 7,
                "versions": {"maxtrain": "9.0"},
                "tables": commit["files"],
            }
        )
    )
    assert checkpoints.latest() == 7, (
        "a run must not quietly start over below a newer version's checkpoint"
    )
    with pytest.raises(StorageError, match=rf"format {FORMAT + 1}, .*9.0.*Upgrade maxtrain"):
        checkpoints.restore(small())


def test_the_commit_record_has_a_digest_of_every_array_and_hashes_of_every_file(checkpoints):
    checkpoints.save(7, small(3.0), {})
    path = checkpoints.directory / "00000007"
    commit = json.loads((path / "commit.json").read_text())
    assert commit["arrays"]["w"] == {
        "shape": [64],
        "dtype": "float32",
        "digest": tree_digests(small(3.0))["w"],
        "finite": True,
    }
    files = {p.relative_to(path).as_posix(): p.read_bytes() for p in path.rglob("*") if p.is_file()}
    del files["commit.json"]
    assert commit["files"] == {
        n: {"bytes": len(x), "crc32": [f"{zlib.crc32(x):08x}"]} for n, x in files.items()
    }
    assert commit["format"] == FORMAT and {"maxtrain", "jax", "orbax"} <= commit["versions"].keys()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_failed_save_never_removes_the_last_good_one(tmp_path, asynchronous, caplog):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(asynchronous=asynchronous, keep=1))
    noise = jnp.asarray(np.random.default_rng(0).normal(size=100_000).astype(np.float32))
    checkpoints.save(1, {"w": noise}, {})
    checkpoints.wait()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(
            StorageError,
            match="Free space or permit writing there, then run the same command again",
        ) as caught:
            checkpoints.save(2, {"w": noise + 1}, {})
            checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.exit_code == 74 and "saving step 2" in str(caught.value)
    assert not caplog.records, "Orbax's own tracebacks"
    assert [path.name for path in tmp_path.iterdir()] == ["00000001"], (
        "what was written is removed: its space is needed"
    )
    assert bits(checkpoints.restore({"w": noise})[0]) == bits({"w": noise})
    checkpoints.save(2, {"w": noise + 1}, {})
    checkpoints.wait()
    assert checkpoints.steps() == [2]
    checkpoints.close()


def test_who_cannot_write_waits_for_nobody_and_a_lost_process_is_no_error_of_the_disk(
    tmp_path, monkeypatch
):
    checkpoints, begun = Checkpoints(tmp_path, SYNC), []
    with monkeypatch.context() as patch:
        patch.setattr(writing, "digests", begun.append)
        patch.setattr(
            checkpoints._orbax,
            "save",
            Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))),
        )
        with pytest.raises(
            StorageError, match=r"No space left on device\. .*Free space or permit writing there"
        ):
            checkpoints.save(1, small(), {})
    assert not begun, (
        "others may wait for this process in Orbax, and it would wait for them in a program"
    )
    lost = jax.errors.JaxRuntimeError("UNKNOWN: Gloo all-reduce failed: connection closed by peer")
    with (
        monkeypatch.context() as patch,
        pytest.raises(jax.errors.JaxRuntimeError, match="connection closed by peer"),
    ):
        patch.setattr(writing, "digests", Mock(side_effect=lost))
        checkpoints.save(1, small(), {})
    checkpoints.close()
    assert checkpoints.steps() == []


def test_a_place_that_cannot_be_made_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    checkpoints = Checkpoints(tmp_path / "file" / "checkpoints", SYNC)
    with pytest.raises(StorageError, match="permit writing there"):
        checkpoints.save(1, small(), {})
    checkpoints.close()


def test_unreadable_arrays_are_a_storage_error(checkpoints):
    checkpoints.save(1, small(), {})
    for path in (checkpoints.directory / "00000001" / "arrays").rglob(".zarray"):
        path.write_bytes(b"x" * path.stat().st_size)
    with pytest.raises(
        StorageError, match=r"Remove or rename .*00000001 to go on from the checkpoint before it"
    ):
        checkpoints.restore(small())


VICTIM = """
    import os, shutil, signal, sys, threading, time
    from pathlib import Path
    import jax
    jax.config.update("jax_platforms", "cpu")
    import jax.numpy as jnp
    from maxtrain.checkpoint import manager
    from maxtrain.config.schema import CheckpointConfig

    directory, instant = Path(sys.argv[1]), sys.argv[2]
    checkpoints = manager.Checkpoints(directory, CheckpointConfig(keep=2))

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    def kill_at(owner, name, when, after=False):
        original = getattr(owner, name)
        def wrapper(*args, **kwargs):
            if not after and when(*args): die()
            result = original(*args, **kwargs)
            if after and when(*args): die()
            return result
        setattr(owner, name, wrapper)

    def arm():
        if instant == "arrays": kill_at(checkpoints._orbax, "save", lambda *a: True, after=True)
        if instant == "record": kill_at(checkpoints._orbax, "wait_until_finished", lambda *a: True, after=True)
        if instant == "commit": kill_at(Path, "write_bytes", lambda path, *a: path.name == "commit.json")
        published = lambda source, target: Path(target).name == "00000004"
        if instant == "rename": kill_at(os, "rename", published)
        if instant == "renamed": kill_at(os, "rename", published, after=True)
        retired = lambda path, *a: path.name == ".00000002.removed.partial" and path.exists()
        if instant == "retire": kill_at(shutil, "rmtree", retired)
        if instant.isdecimal(): threading.Timer(int(instant) / 1000, die).start()

    for step in range(1, 1000):
        if step == 4: checkpoints.wait(); arm()
        state = {"w": jnp.arange(200_000, dtype=jnp.float32) + step, "step": jnp.int32(step)}
        checkpoints.save(step, state, {"cursor": step})
"""


def test_what_orbax_drops_after_a_failure_is_not_told(checkpoints):
    """Futures that others forget to await are reported."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Checkpoints(checkpoints.directory, SYNC).close()
        fragments = "async_serialize_from_host.<locals>.write_fragment"
        for name in ("cancellable", fragments, "_Server.completions"):
            warnings.warn(f"coroutine '{name}' was never awaited", RuntimeWarning, stacklevel=1)
    told = [str(warning.message) for warning in caught]
    assert told == ["coroutine '_Server.completions' was never awaited"]


def test_writes_that_end_after_a_failure_say_nothing_and_other_errors_do(checkpoints, monkeypatch):
    seen = []
    monkeypatch.setattr(
        sys, "unraisablehook", lambda unraisable: seen.append(str(unraisable.exc_value))
    )
    for _ in range(2):  # once, however many are made
        Checkpoints(checkpoints.directory, SYNC).close()
    for text in ("Event loop is closed", "something else"):
        sys.unraisablehook(types.SimpleNamespace(exc_value=RuntimeError(text)))
    assert seen == ["something else"]


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize(
    ("instant", "latest"),
    [
        ("arrays", 3),
        ("record", 3),
        ("commit", 3),
        ("rename", 3),
        ("renamed", 4),
        ("retire", 4),
        ("5", None),
        ("60", None),
    ],
)
def test_killed_while_saving(tmp_path, instant, latest):
    """SIGKILL at named instants, and at some milliseconds: the newest complete step loads, and
    saving goes on."""
    command = [sys.executable, "-c", textwrap.dedent(VICTIM), str(tmp_path), instant]
    victim = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert victim.returncode == -signal.SIGKILL, victim.stderr
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep=2))
    found = checkpoints.latest()
    assert found >= 3 if latest is None else found == latest
    for step in checkpoints.steps():
        state, record = checkpoints.restore({"w": jnp.zeros(200_000), "step": jnp.int32(0)}, step)
        assert record["cursor"] == state["step"] == step
        np.testing.assert_array_equal(state["w"], np.arange(200_000, dtype=np.float32) + step)
    checkpoints.save(found + 1, state, {})
    checkpoints.close()
    assert checkpoints.steps() == [found, found + 1]
    assert not list(tmp_path.glob(".*")), "what the killed process left is removed"


def test_whether_a_step_is_there_already_is_for_process_0_to_say(tmp_path, monkeypatch):
    """Another one may see it later: it would wait for ever for those who do not save."""
    checkpoints = Checkpoints(tmp_path, SYNC)
    with monkeypatch.context() as patch:
        patch.setattr(jax, "process_index", lambda: 1)
        patch.setattr(writing, "gather", lambda mine: [{"there": True}, mine])
        assert not checkpoints.save(1, {"w": jnp.ones(2)}, {}) and not list(tmp_path.iterdir())
    assert checkpoints.save(1, {"w": jnp.ones(2)}, {}) and not checkpoints.save(
        1, {"w": jnp.ones(2)}, {}
    )
    checkpoints.close()


def test_a_save_that_waits_for_a_lost_process_is_left_as_it_is(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(asynchronous=True))
    checkpoints.save(1, small(), {})
    checkpoints.wait()
    comes = threading.Event()

    def report(what, text):
        comes.wait(60)
        return [text]

    monkeypatch.setattr(writing, "report", report)
    checkpoints.save(2, small(), {})
    begin = time.monotonic()
    checkpoints.abandon(0.05)
    checkpoints.close()
    assert time.monotonic() - begin < 30 and checkpoints.steps() == [1]
    comes.set()


def test_what_process_0_can_not_do_is_an_error_of_all(tmp_path, monkeypatch):
    """Left alone with it, the others would wait for it in their next step."""
    told = []

    def tell(error):
        told.append(error)
        together(error)

    together = agreement.raise_together
    monkeypatch.setattr(agreement, "raise_together", tell)
    checkpoints = Checkpoints(tmp_path, SYNC)
    for step in (1, 2):
        checkpoints.save(step, small(), {})
    (tmp_path / ".00000003.partial").touch()
    with pytest.raises(
        StorageError, match=r"saving step 3 to .* failed: .*Free space or permit writing there"
    ) as unsaved:
        checkpoints.save(3, small(), {})
    monkeypatch.setattr(copying, "remove_step", lambda *args: os.listdir(tmp_path / "nothing"))
    with pytest.raises(
        StorageError, match=r"removing steps after 1 of .* failed: .*Permit that, then run"
    ) as unremoved:
        checkpoints.discard_after(1)
    assert told == [None, None, unsaved.value, unremoved.value]


def test_writes_that_fail_after_the_first_one_are_no_tracebacks_and_other_tasks_are(
    tmp_path, caplog
):
    Checkpoints(tmp_path, SYNC).close()
    for module in ("site-packages/orbax/checkpoint/serialization.py", "elsewhere.py"):
        said = f"Task exception was never retrieved\nfuture: <Task coro=<write_fragment() done, defined at {module}:126>>"
        logging.getLogger("asyncio").error(said)
    assert ["elsewhere" in record.getMessage() for record in caplog.records] == [True]
