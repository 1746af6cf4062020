"""Records of a run go to its URL and come back, whole."""

import os

import pytest

from benchmarks.faulty_s3 import RequestFault, names_below
from data_pipeline.base.errors import DataError, LockedError, StorageError, UsageError
from data_pipeline.base.remote import RemoteFile, RemotePath
from maxtrain.storage import reading, records
from maxtrain.storage.records import Records, is_record, pull_records, require_copy_of


def write(folder, **files):
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def folder(url, tmp_path):
    folder = tmp_path / "here"
    folder.mkdir()
    require_copy_of(folder, url, set())
    write(folder, run_json="{}", metrics_jsonl="1\n", a__b_txt="b", checkpoints__x="no", lock="no")
    write(folder, _metrics_jsonl_tmp="no")
    return folder


@pytest.fixture
def pushed(url, folder):
    """Records that are uploaded when `push` is called."""
    pushed = Records(folder, url, lambda: None)
    yield pushed
    pushed.close()


def test_what_changed_is_uploaded_and_what_is_gone_goes(store, url, folder, pushed):
    pushed.push()
    assert names_below(url) == ["a/b.txt", "metrics.jsonl", "run.json"]
    store.seen.clear()
    pushed.push()
    assert not store.seen
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("2\n")
    (folder / "a" / "b.txt").unlink()
    pushed.push()
    assert (url / "metrics.jsonl").read_bytes() == b"1\n2\n"
    assert names_below(url) == ["metrics.jsonl", "run.json"]


def test_a_folder_that_somebody_emptied_empties_nothing(url, folder, pushed):
    pushed.push()
    for name in ("run.json", "metrics.jsonl"):
        (folder / name).unlink()
    pushed.push()
    assert names_below(url) == ["a/b.txt", "metrics.jsonl", "run.json"]


def test_what_fails_is_uploaded_the_next_time_and_losers_upload_nothing(store, url, folder, pushed):
    store.faults.append(RequestFault("PUT .*/metrics.jsonl", status=403, code="AccessDenied"))
    with pytest.raises(StorageError, match=r"metrics.jsonl: writing is not allowed"):
        pushed.push()
    store.faults.clear()
    pushed.push()
    assert "metrics.jsonl" in names_below(url)

    def lost() -> None:
        raise LockedError("another one writes")

    late = Records(folder, url, lost)
    write(folder, new_txt="new")
    with pytest.raises(LockedError):
        late.push()
    late.close()
    assert "new.txt" not in names_below(url)


def test_another_host_gets_what_is_there_and_the_same_host_only_what_changed(
    store, url, folder, pushed, tmp_path
):
    pushed.push()
    other = tmp_path / "there"
    # The supervisor of this host is there first.
    write(other, attempts_jsonl="1\n2\n")
    require_copy_of(other, url, set())
    write(other, stale_txt="of another launch")
    (url / "gone.txt").write_bytes(b"")
    listing = url.tree()
    (url / "gone.txt").remove()
    pull_records(other, url, listing)
    assert (other / "a" / "b.txt").read_text() == "b" and not (other / "stale.txt").exists()
    assert (other / "attempts.jsonl").read_text() == "1\n2\n"
    assert not (other / "gone.txt").exists()
    (url / "metrics.jsonl").write_bytes(b"other\n")
    os.utime(folder / "run.json", (1, 1))
    store.seen.clear()
    pull_records(folder, url, url.tree())
    assert (folder / "metrics.jsonl").read_text() == "other\n"
    read = [
        seen for seen in store.seen if seen.startswith("GET") and seen.endswith((".jsonl", "n"))
    ]
    assert sorted({seen.rpartition("/")[2] for seen in read}) == ["metrics.jsonl", "run.json"]
    assert not any(seen.endswith("b.txt") for seen in store.seen)


def test_a_folder_of_something_else_is_left_alone(url, tmp_path):
    write(tmp_path, precious_txt="mine")
    with pytest.raises(StorageError, match=rf"is not a copy of {url}.*set local_dir to another"):
        require_copy_of(tmp_path, url, {"lock"})
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]


def test_readers_are_told_of_an_empty_place_and_of_what_they_cannot_write(url):
    with pytest.raises(UsageError, match=r"nothing is there. Name the URL of a run"):
        reading.readable(str(url))
    for place in ("s3://b/out", "s3:/b/out"):
        with pytest.raises(UsageError, match=f"OUT={place}: is a URL.* Name a path"):
            reading.require_no_url(place, "OUT")
    reading.require_no_url("runs/x", "OUT")
    assert not records.is_record("checkpoints/00000001/commit.json")


def test_records_that_changed_on_their_way_do_not_become_those_of_the_run(
    store, url, folder, pushed, tmp_path
):
    pushed.push()
    store.fill(
        url.url.removeprefix(f"{store.url}/"), {"/metrics.jsonl": b"1\n", "/run.json": b"{}"}
    )
    other = tmp_path / "there"
    other.mkdir()
    require_copy_of(other, url, set())
    listing = url.tree()
    store.begin([RequestFault("GET .*/metrics.jsonl", flip=True, times=1)])
    pull_records(other, url, listing)
    assert (other / "metrics.jsonl").read_text() == "1\n"


# Keys below the folder of a run that a stranger may give objects of a bucket.
HOSTILE = [
    "{outside}/canary",
    "/canary",
    "../canary",
    "a/../../canary",
    "a\\..\\canary",
    "a\nb",
    "C:/canary",
    "checkpoints/00000003/../../../canary",
    "x" * 256,
]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_listing_writes_nothing_outside_the_folder(url, tmp_path, monkeypatch, name):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "canary").write_text("mine")
    key = name.format(outside=outside)
    listing = {
        "run.json": RemoteFile(url / "run.json", 2, "1"),
        key: RemoteFile(url / "evil", 4, "2"),
    }

    def download(self, file):
        file.write_bytes(b"evil")

    monkeypatch.setattr(RemotePath, "download_exactly", download)
    monkeypatch.setattr(RemotePath, "download", download)
    folder = tmp_path / "a" / "here"
    folder.mkdir(parents=True)
    if is_record(key):
        with pytest.raises(DataError, match="must stay inside its folder"):
            pull_records(folder, url, listing)
    # The listing of a store itself is refused at once, for all commands.
    monkeypatch.setattr(
        RemotePath,
        "_files_below",
        lambda self, fs, path, depth: {f"{path}/{key}": {"name": key, "size": 4, "ETag": "x"}},
    )
    for read in (url.tree, lambda: reading.readable(str(url))):
        with pytest.raises(StorageError, match="Remove that object"):
            read()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files == [outside / "canary"] and (outside / "canary").read_text() == "mine"


def test_names_of_another_place_in_a_listing_are_refused(url, monkeypatch):
    monkeypatch.setattr(
        RemotePath, "_files_below", lambda self, fs, path, depth: {"elsewhere/x": {"size": 4}}
    )
    with pytest.raises(StorageError, match="is not below it"):
        url.tree()


def test_records_are_not_written_through_a_link(url, tmp_path):
    (url / "logs" / "canary").write_bytes(b"evil")
    outside = tmp_path / "outside"
    folder = tmp_path / "here"
    for made in (outside, folder):
        made.mkdir()
    (folder / "logs").symlink_to(outside)
    with pytest.raises(StorageError, match="through a symbolic link"):
        pull_records(folder, url, url.tree())
    assert not any(outside.iterdir())


def test_honest_names_are_copied(url, tmp_path):
    names = ["a..b", "with space/é.txt", "curves (1).png", "a/b..c"]
    for name in names:
        (url / name).write_bytes(b"x")
    pull_records(tmp_path, url, {name: url.tree()[name] for name in names})
    assert all((tmp_path / name).read_bytes() == b"x" for name in names)
