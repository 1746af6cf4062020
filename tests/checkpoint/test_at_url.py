"""Steps at a URL, as a host sees them: what is damaged on its way, or here, is fetched again, and
what is damaged there does not count."""

import json
import shutil

import jax.numpy as jnp
import pytest

from benchmarks.faulty_s3 import RequestFault, flipped
from data_pipeline.base.errors import DamagedError, StorageError
from data_pipeline.base.remote import RemotePath
from maxtrain.checkpoint import at_url, copying, manager, quarantine
from maxtrain.checkpoint.integrity import (
    FORMAT,
    defect,
    encode_commit,
    hash_files,
    read_commit,
)
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
        s3.begin([RequestFault(f"GET .*/{name}", flip=True, times=1, skip=skip)])
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
    s3.begin([RequestFault(f"GET .*/{name}", flip=True)])
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
    s3.begin([RequestFault("HEAD .*", headers=headers)])
    if name == ARRAY:
        with pytest.raises(DamagedError, match=f"at {step}: {ARRAY}, bytes 0 to 10: crc32"):
            bring()
    else:
        assert name in bring().lacking["00000003"]


@pytest.mark.parametrize(("name", "times"), [("record.json", 3), (ARRAY, 2)])
def test_without_an_md5_what_differs_from_one_time_to_the_next_is_no_damage(s3, bring, name, times):
    s3.begin(
        [
            RequestFault("HEAD .*", headers=SEALED),
            RequestFault(f"GET .*/{name}", flip=True, times=times),
        ]
    )
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
        quarantine, "gather", lambda mine: [mine | {"damaged": is_bad} for is_bad in hosts]
    )
    quarantine.put_aside(DamagedError(here, "arrays"))
    assert ("are fetched again" in capsys.readouterr().err) == any(hosts)
    assert (step / "commit.json").exists() == any(hosts)
    assert not (here / ARRAY).exists()


@pytest.mark.every_dose
@pytest.mark.long
@pytest.mark.parametrize(("longest", "is_told"), [(0.1, True), (100.0, False)])
def test_a_save_that_waited_for_an_upload_says_how_slow_it_was(
    s3, tmp_path, monkeypatch, longest, is_told
):
    monkeypatch.setattr(manager, "_LONG_WAIT", longest)
    s3.begin([RequestFault("PUT .*/00000001/arrays/.*", seconds=0.5)])
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


def test_the_url_that_a_stranger_wrote_into_a_step_is_not_followed(s3, step, tmp_path):
    here = tmp_path / "here"
    at_url.pull(step.parent, here)
    stranger = tmp_path / "stranger"
    shutil.copytree(here, stranger)
    theirs = stranger / "00000003"
    files = read_commit(theirs)["files"]
    s3.seen.clear()
    assert at_url.url_of(theirs) is None
    with pytest.raises(StorageError, match="name its URL instead of this folder"):
        at_url.fetch(theirs, files, files)
    copying.remove_here_and_at_url(theirs)
    assert not s3.seen and not theirs.exists()
    # Nor is that of a copy of this process, if it names another place.
    for other in (f"{step.parent}/00000004", f"file://{tmp_path}/made", "reference://x"):
        (here / "00000003" / "url").write_text(other)
        assert at_url.url_of(here / "00000003") is None
    # A directory that is reached through a link is the same one.
    (here / "00000003" / "url").write_text(str(step))
    (tmp_path / "linked").symlink_to(here)
    assert at_url.url_of(tmp_path / "linked" / "00000003") == step


def test_a_step_is_neither_fetched_nor_copied_through_a_link(step, tmp_path):
    here = tmp_path / "here"
    outside = tmp_path / "outside"
    at_url.pull(step.parent, here)
    outside.mkdir()
    theirs = here / "00000003"
    (theirs / "arrays").symlink_to(outside)
    files = read_commit(theirs)["files"]
    with pytest.raises(StorageError, match="through a symbolic link"):
        at_url.fetch(theirs, files, files)
    with pytest.raises(StorageError, match="through a symbolic link"):
        copying.copy_step(theirs, tmp_path / "copies")
    assert "through a symbolic link" in defect(theirs)
    assert not any(outside.iterdir())


def test_a_copy_is_not_written_into_a_folder_that_a_link_has_put_there(step, tmp_path):
    here = tmp_path / "here"
    outside = tmp_path / "outside"
    target = tmp_path / "copies"
    at_url.pull(step.parent, here)
    for made in (outside, target):
        made.mkdir()
    (target / ".00000003.partial").symlink_to(outside)
    copy = copying.copy_step(here / "00000003", target)
    assert (copy / ARRAY).read_bytes() == b"0123456789"
    assert not any(outside.iterdir())


@pytest.mark.parametrize(
    "name", ["url", "commit.json", "local.json", "../canary", "/canary", "arrays/../../canary"]
)
@pytest.mark.parametrize("number", [FORMAT, FORMAT + 1])
def test_a_commit_record_has_no_other_files(tmp_path, name, number):
    theirs = tmp_path / "run" / "00000003"
    theirs.mkdir(parents=True)
    (theirs / "record.json").write_text(json.dumps(RECORD))
    (theirs / "url").write_text("file:///etc")
    files = hash_files(theirs, ["record.json"]) | {name: {"bytes": 4, "crc32": ["00000000"]}}
    commit = {"format": number, "step": 3, "arrays": {}, "files": files}
    (theirs / "commit.json").write_bytes(encode_commit(commit))
    assert "files: " in defect(theirs)
    with pytest.raises(DamagedError):
        copying.copy_step(theirs, tmp_path / "copies")
    assert not (tmp_path / "copies" / "00000003").exists()


@pytest.mark.parametrize("change", [{"frozen": "../x"}, {"arrays": {"../x": {}}}])
def test_a_commit_record_names_no_other_folders(tmp_path, change):
    (tmp_path / "00000003").mkdir()
    arrays = {name: {"shape": [1], "dtype": "float32"} for name in change.get("arrays", ())}
    commit = {"format": FORMAT, "step": 3, "files": {}, **change, "arrays": arrays}
    (tmp_path / "00000003" / "commit.json").write_bytes(encode_commit(commit))
    assert "commit.json is not readable" in defect(tmp_path / "00000003")
