"""Steps at a URL, as a host sees them: what is damaged on its way, or here, is fetched again, and
what is damaged there does not count."""

import json
import shutil

import jax.numpy as jnp
import pytest

from benchmarks.faulty_s3 import Fault, flipped
from data_pipeline.errors import DamagedError, StorageError
from data_pipeline.remote import RemotePath
from maxtrain.checkpoint import at_url, damage, manager
from maxtrain.checkpoint.integrity import FORMAT, encode_commit, hash_files, read_commit
from maxtrain.config.schema import CheckpointConfig

pytestmark = pytest.mark.usefixtures("s3")
HOME = "runs/x/checkpoints/"
RECORD = {"step": 3, "format": FORMAT}
ARRAY = "arrays/x/0"
# An object whose ETag is no MD5.
SEALED = {"ETag": f'"{"0" * 32}"', "x-amz-server-side-encryption": "aws:kms"}


@pytest.fixture
def step(s3, tmp_path):
    """A step at a URL with a file of an array, whose answers have no checksums."""
    contents = {"record.json": json.dumps(RECORD).encode(), ARRAY: b"0123456789"}
    made = tmp_path / "made"
    for name, content in contents.items():
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_bytes(content)
    commit = {"format": FORMAT, "step": 3, "arrays": {}}
    commit["files"] = hash_files(made, contents)
    contents["commit.json"] = encode_commit(commit)
    s3.begin([])
    s3.fill(HOME, {f"00000003/{name}": content for name, content in contents.items()})
    yield RemotePath(f"s3://faulty/{HOME}") / "00000003"
    s3.begin([])


@pytest.mark.parametrize("name", ["record.json", "commit.json"])
def test_a_small_file_that_is_damaged_on_its_way_or_here_is_fetched_again(s3, step, tmp_path, name):
    for skip in range(2):
        s3.begin([Fault(f"GET .*/{name}", flip=True, times=1, skip=skip)])
        here = tmp_path / f"here-{skip}"
        assert at_url.pull(step.parent, here) == ([], {})
        assert json.loads((here / "00000003" / "record.json").read_bytes()) == RECORD
    damaged = here / "00000003" / name
    damaged.write_bytes(damaged.read_bytes()[:-9] + b"123456789")
    assert at_url.pull(step.parent, here) == ([], {})
    assert json.loads((here / "00000003" / "record.json").read_bytes()) == RECORD


def test_what_is_damaged_there_does_not_count(step, tmp_path):
    (step / "record.json").write_bytes(b"{}" + b" " * (len(json.dumps(RECORD)) - 2))
    pulled = at_url.pull(step.parent, tmp_path / "here")
    assert list(pulled.lacking) == ["00000003"] and "record.json" in pulled.lacking["00000003"]
    assert not (tmp_path / "here" / "00000003").exists()
    (step / "commit.json").remove()
    assert at_url.pull(step.parent, tmp_path / "here") == (["00000003"], {})


@pytest.fixture
def bring(step, tmp_path):
    """Brings the step, with the file of its array, to a new directory of this host."""
    here = tmp_path / "here"

    def bring():
        shutil.rmtree(here, ignore_errors=True)
        pulled = at_url.pull(step.parent, here)
        if not pulled.lacking:
            files = read_commit(here / "00000003")["files"]
            at_url.fetch(here / "00000003", files, [ARRAY])
        return pulled

    return bring


@pytest.mark.parametrize("name", ["record.json", "commit.json", ARRAY])
def test_what_is_always_read_wrong_is_no_damage(s3, step, bring, tmp_path, name):
    before = s3.contents(HOME)
    s3.begin([Fault(f"GET .*/{name}", flip=True)])
    message = f"{step}/{name}: other bytes are read than the store holds .*run the same command"
    with pytest.raises(StorageError, match=message) as raised:
        bring()
    assert not isinstance(raised.value, DamagedError)
    assert s3.contents(HOME) == before and not (tmp_path / "here" / "00000003" / name).exists()
    s3.begin([])
    assert bring() == ([], {})
    assert (tmp_path / "here" / "00000003" / ARRAY).read_bytes() == b"0123456789"


@pytest.mark.parametrize("name", ["record.json", ARRAY])
@pytest.mark.parametrize("headers", [{}, SEALED], ids=["md5", "no-md5"])
def test_what_the_store_holds_is_damage_if_it_is_not_what_was_saved(s3, step, bring, name, headers):
    (step / name).write_bytes(flipped((step / name).read_bytes()))
    s3.begin([Fault("HEAD .*", headers=headers)])
    if name == ARRAY:
        with pytest.raises(DamagedError, match=f"at {step}: {ARRAY}, bytes 0 to 10: crc32"):
            bring()
    else:
        assert name in bring().lacking["00000003"]


@pytest.mark.parametrize(("name", "times"), [("record.json", 3), (ARRAY, 2)])
def test_without_an_md5_what_differs_from_one_time_to_the_next_is_no_damage(s3, bring, name, times):
    s3.begin([Fault("HEAD .*", headers=SEALED), Fault(f"GET .*/{name}", flip=True, times=times)])
    with pytest.raises(StorageError, match="they differ from one time to the next") as raised:
        bring()
    assert not isinstance(raised.value, DamagedError)


@pytest.mark.parametrize("hosts", [[False, True], [False, False]])
def test_damage_on_the_disk_of_another_host_is_no_damage_at_the_url(
    s3, step, bring, tmp_path, monkeypatch, capsys, hosts
):
    bring()
    here = tmp_path / "here" / "00000003"
    monkeypatch.setattr(
        damage, "gather", lambda mine: [mine | {"damaged": is_bad} for is_bad in hosts]
    )
    damage.put_aside(DamagedError(here, "arrays"))
    assert ("are fetched again" in capsys.readouterr().err) == any(hosts)
    assert (step / "commit.json").exists() == any(hosts)
    assert not (here / ARRAY).exists()


@pytest.mark.parametrize(("longest", "is_told"), [(0.1, True), (100.0, False)])
def test_a_save_that_waited_for_an_upload_says_how_slow_it_was(
    s3, tmp_path, monkeypatch, longest, is_told
):
    monkeypatch.setattr(manager, "_LONG_WAIT", longest)
    s3.begin([Fault("PUT .*/00000001/arrays/.*", seconds=0.5)])
    home = RemotePath(f"{s3.url}/slow-{is_told}/checkpoints")
    checkpoints = manager.Checkpoints(tmp_path / "here", CheckpointConfig(), home=home)
    said = []
    for step in (1, 2):
        checkpoints.save(step, {"x": jnp.ones(1000)}, {})
        said.append(checkpoints.slow_upload)
    checkpoints.close()
    first, of_first = said
    assert first == ""
    if is_told:
        assert "s for the upload of step 1. Process 0 took longest: 0.0 MB at 0.0 MB/s" in of_first
        assert "`maxtrain doctor`" in of_first
    else:
        assert of_first == ""
