"""Arrays that no step changes: saved once, and noticed when they are not what they were."""

import json
import shutil
import types

import jax.numpy as jnp
import numpy as np
import pytest

from data_pipeline.base.errors import ConfigError, DamagedError, StorageError, TryAgainError
from data_pipeline.base.remote import RemotePath
from maxtrain.checkpoint import frozen_params, retention
from maxtrain.checkpoint.integrity import read_commit
from maxtrain.checkpoint.listing import complete, saved_digests, second_of
from maxtrain.checkpoint.manager import Checkpoints
from maxtrain.checkpoint.quarantine import put_aside
from maxtrain.commands.checkpoint import main
from maxtrain.config.schema import CheckpointConfig

SYNC = CheckpointConfig(asynchronous=False, keep=2)


def changing(value):
    return {"params": {"b": jnp.full((8, 4), value, jnp.float32)}, "step": jnp.int32(value)}


def constant(value=7):
    return {"params": {"a": jnp.full((16, 8), value, jnp.float32)}}


def whole(value=0):
    return {"params": {**changing(value)["params"], **constant()["params"]}}


def store_of(directory):
    """The only one."""
    (store,) = frozen_params.stores(directory)
    return store


def flip(directory):
    """Flip one bit of the array `params.a`."""
    (file,) = (store_of(directory) / "arrays/params.a").glob("0*")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


@pytest.fixture
def checkpoints(tmp_path):
    """Two steps that share an array."""
    made = Checkpoints(tmp_path / "run" / "checkpoints", SYNC)
    for step in (1, 2):
        made.save(step, changing(step), {"at": step}, constant())
    yield made
    made.close()


def test_frozen_arrays_are_written_once_and_read_with_every_step(checkpoints):
    place = store_of(checkpoints.directory)
    made = place.stat().st_mtime_ns
    checkpoints.save(3, changing(3), {}, constant())
    again = Checkpoints(checkpoints.directory, SYNC)
    again.save(4, changing(4), {}, constant())
    assert place.stat().st_mtime_ns == made
    assert again.steps() == [3, 4], "and no frozen array is taken for a step"
    state, _ = again.restore(whole(), 3, partial=True)
    assert (np.asarray(state["params"]["a"]) == 7).all()
    assert (np.asarray(state["params"]["b"]) == 3).all()
    assert again.frozen_names(4) == {"params.a"}
    assert set(saved_digests(checkpoints.directory)[4]) == {"params.a", "params.b", "step"}
    own = read_commit(checkpoints.directory / "00000004")["arrays"]
    assert set(own) == {"params.b", "step"}
    again.close()


def test_a_step_without_frozen_arrays_says_nothing_of_them(tmp_path):
    checkpoints = Checkpoints(tmp_path, SYNC)
    checkpoints.save(1, changing(1), {})
    assert frozen_params.KEY not in read_commit(tmp_path / "00000001")
    assert not (tmp_path / frozen_params.FOLDER).exists()
    checkpoints.close()


def test_a_state_that_lacks_a_frozen_array_is_refused(checkpoints):
    with pytest.raises(ConfigError, match=r"params\.a .*missing"):
        checkpoints.restore(changing(0), 2)
    wrong = {"params": {"a": jnp.zeros((16, 9)), "b": jnp.zeros((8, 4))}, "step": jnp.int32(0)}
    with pytest.raises(ConfigError, match=r"float32\[16, 8\]"):
        checkpoints.restore(wrong, 2)


def test_a_flipped_bit_is_noticed_and_every_step_needs_what_is_put_aside(checkpoints, capsys):
    flip(checkpoints.directory)
    with pytest.raises(DamagedError) as damage:
        checkpoints.restore(whole(), partial=True)
    assert damage.value.path == store_of(checkpoints.directory)
    assert "Copy frozen/ from a copy" in str(damage.value)
    assert "Remove or rename" not in str(damage.value)
    assert main(["verify", str(checkpoints.directory)]) == 74
    told = capsys.readouterr()
    assert "arrays/params.a" in told.out and "Copy frozen/ from a copy" in told.err
    put_aside(damage.value)
    assert "goes on if there is a copy" in capsys.readouterr().err
    with pytest.raises(StorageError, match=r"needs the frozen parameters.*is missing\. Copy"):
        checkpoints.restore(whole(), partial=True)
    assert checkpoints.steps() == [1, 2], "the steps themselves are not touched"
    assert main(["verify", str(checkpoints.directory)]) == 74
    told = capsys.readouterr()
    assert "its frozen parameters" in told.out
    assert "Copy frozen/ from a copy" in told.err and "Remove or rename" not in told.err
    assert main(["list", str(checkpoints.directory)]) == 0
    # The run goes on from another copy of its state, and writes them again.
    again = Checkpoints(checkpoints.directory, SYNC)
    again.save(3, changing(3), {}, constant())
    assert (np.asarray(again.restore(whole(), 2, partial=True)[0]["params"]["a"]) == 7).all()
    again.close()


def test_frozen_arrays_of_another_run_are_no_substitute(checkpoints, tmp_path):
    other = Checkpoints(tmp_path / "other", SYNC)
    other.save(1, changing(1), {}, constant(8))
    other.close()
    shutil.rmtree(checkpoints.directory / frozen_params.FOLDER)
    shutil.copytree(
        tmp_path / "other" / frozen_params.FOLDER, checkpoints.directory / frozen_params.FOLDER
    )
    with pytest.raises(StorageError, match="is missing"):
        checkpoints.restore(whole(), partial=True)
    # Not even by its name.
    other_store = store_of(checkpoints.directory)
    wanted = read_commit(checkpoints.directory / "00000002")[frozen_params.KEY]
    other_store.parent.rename(other_store.parent.with_name(wanted))
    with pytest.raises(StorageError, match="holds other arrays"):
        checkpoints.restore(whole(), partial=True)


def test_arrays_that_changed_in_memory_are_not_saved(checkpoints):
    again = Checkpoints(checkpoints.directory, SYNC)
    with pytest.raises(TryAgainError, match=r"not those that step 1 was saved .*fault of memory"):
        again.save(3, changing(3), {}, constant(8))
    assert again.steps() == [1, 2]
    again.close()
    # Nor later in a process, nor after a restore.
    with pytest.raises(TryAgainError, match="this run was restored or saved with"):
        checkpoints.save(3, changing(3), {}, constant(np.nan))
    restored = Checkpoints(checkpoints.directory, SYNC)
    restored.restore(whole(), partial=True)
    with pytest.raises(TryAgainError, match="this run was restored or saved with"):
        restored.save(3, changing(3), {}, constant(8))
    restored.close()


def test_what_disappears_is_written_again(checkpoints):
    shutil.rmtree(checkpoints.directory / frozen_params.FOLDER)
    checkpoints.save(3, changing(3), {}, constant())
    for step in (2, 3):
        state, _ = checkpoints.restore(whole(), step, partial=True)
        assert (np.asarray(state["params"]["a"]) == 7).all()


def test_what_is_left_of_a_killed_launch_is_read_before_it_is_used(checkpoints):
    flip(checkpoints.directory)
    again = Checkpoints(checkpoints.directory, SYNC)
    again.save(3, changing(3), {}, constant())
    state, _ = again.restore(whole(), 3, partial=True)
    assert (np.asarray(state["params"]["a"]) == 7).all()
    again.close()


def test_steps_of_two_runs_lie_side_by_side(checkpoints, tmp_path):
    other = Checkpoints(tmp_path / "other", SYNC)
    other.save(5, changing(5), {}, constant(8))
    other.close()
    place = tmp_path / "archive" / "checkpoints"
    assert main(["copy", str(checkpoints.directory), str(place)]) == 0
    assert main(["copy", str(tmp_path / "other"), str(place)]) == 0
    assert main(["verify", str(place)]) == 0
    archive = Checkpoints(place, SYNC)
    for step, value in ((2, 7), (5, 8)):
        state, _ = archive.restore(whole(), step, partial=True)
        assert (np.asarray(state["params"]["a"]) == value).all()
    archive.close()


def test_a_copy_that_is_there_is_checked_and_mended(checkpoints, tmp_path):
    place = tmp_path / "archive" / "checkpoints"
    assert main(["copy", str(checkpoints.directory), str(place), "--step", "1"]) == 0
    flip(place)
    assert main(["copy", str(checkpoints.directory), str(place), "--step", "2"]) == 0
    assert main(["verify", str(place)]) == 0


def test_space_is_asked_for_once(tmp_path, monkeypatch):
    small = {"b": jnp.zeros(10, jnp.float32)}
    large = {"a": jnp.zeros(1000, jnp.float32)}
    free = [4039]
    monkeypatch.setattr(
        retention.shutil, "disk_usage", lambda _: types.SimpleNamespace(free=free[0])
    )
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(asynchronous=False, keep=1))
    with pytest.raises(StorageError, match="and the frozen parameters once"):
        checkpoints.require_space(small, large)
    free[0] = 4080
    assert checkpoints.require_space(small, large) == ""
    checkpoints.save(1, small, {}, large)
    free[0] = 80
    assert checkpoints.require_space(small, large) == ""
    checkpoints.close()


def test_what_no_step_refers_to_is_written_again(checkpoints):
    """A run that was killed before its first checkpoint, and begins with another seed."""
    for step in (1, 2):
        shutil.rmtree(checkpoints.directory / f"{step:08d}")
    again = Checkpoints(checkpoints.directory, SYNC)
    again.save(1, changing(1), {}, constant(8))
    assert (np.asarray(again.restore(whole(), partial=True)[0]["params"]["a"]) == 8).all()
    again.close()


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    checkpoints = Checkpoints(tmp_path, SYNC)
    with pytest.raises(TryAgainError, match=r"params\.a not finite"):
        checkpoints.save(1, changing(1), {}, constant(np.nan))
    assert not complete(tmp_path)
    checkpoints.close()


def test_copies_have_them_too(tmp_path):
    (tmp_path / "far").mkdir()
    config = CheckpointConfig(asynchronous=False, copy_to=str(tmp_path / "far"))
    local = tmp_path / "near" / "run" / "checkpoints"
    far = second_of(local, config)
    checkpoints = Checkpoints(local, config, far)
    checkpoints.save(1, changing(1), {}, constant())
    assert checkpoints.settle(30) == "" and store_of(far).exists()
    assert main(["copy", str(local), str(tmp_path / "by_hand" / "checkpoints")]) == 0
    assert main(["verify", str(tmp_path / "by_hand" / "checkpoints")]) == 0
    # Read from the second directory when the first one is damaged, or gone.
    shutil.rmtree(local / frozen_params.FOLDER)
    assert (np.asarray(checkpoints.restore(whole(), partial=True)[0]["params"]["a"]) == 7).all()
    shutil.rmtree(local)
    assert (np.asarray(checkpoints.restore(whole(), partial=True)[0]["params"]["a"]) == 7).all()
    checkpoints.close()


def test_the_identity_is_of_every_name_shape_type_and_digest():
    entry = {"dtype": "float32", "shape": [2], "digest": "0" * 16, "finite": True}
    first = frozen_params.identity({"a": entry})
    assert first == frozen_params.identity({"a": entry | {"finite": False}})
    others = [
        {"b": entry},
        {"a": entry | {"dtype": "bfloat16"}},
        {"a": entry | {"shape": [1, 2]}},
        {"a": entry | {"digest": "1" * 16}},
        {"a": entry, "b": entry},
    ]
    assert len({first, *map(frozen_params.identity, others)}) == 6


def test_show_lists_them(checkpoints, capsys):
    assert main(["show", str(checkpoints.directory)]) == 0
    told = capsys.readouterr().out
    assert "frozen, in " in told and "params.a" in told and "params.b" in told
    assert main(["list", str(checkpoints.directory)]) == 0
    assert "frozen parameters, of all steps" in capsys.readouterr().out
    assert json.loads((checkpoints.directory / "00000002/commit.json").read_text())[
        frozen_params.KEY
    ]


def test_of_frozen_arrays_at_a_url_those_there_count_and_damage_there_is_written_anew(tmp_path):
    home = RemotePath(f"file://{tmp_path}/far")

    def save(step):
        """Save as the next process of the same host. Returns the frozen arrays at the URL, with
        their write times."""
        made = Checkpoints(tmp_path / "here", SYNC, home=home)
        made.save(step, changing(step), {"at": step}, constant())
        made.close()
        (file,) = (store_of(tmp_path / "far") / "arrays/params.a").glob("0*")
        return file.read_bytes(), file.stat().st_mtime_ns

    first = save(1)
    flip(tmp_path / "here")
    assert save(2) == first
    flip(tmp_path / "far")
    shutil.rmtree(store_of(tmp_path / "here") / "arrays")
    content, time = save(3)
    assert content == first[0] and time != first[1]
