"""Paths behind URLs: the methods of Path that they have, the requests that are repeated, and the
messages for the user."""

import pickle

import pytest

from data_pipeline.base import remote
from data_pipeline.base.errors import StorageError, UsageError
from data_pipeline.base.remote import RemotePath, find, is_url, place, read_ranges
from data_pipeline.shards import TokenShards
from data_pipeline.tokenizer import load_tokenizer
from maxtrain.storage.reading import readable, readable_model


@pytest.mark.parametrize(
    "path", ["s3://bucket/data", "gs://b", "file:///data", "abfs://c@a.dfs.core.windows.net/x"]
)
def test_urls_are_urls(path):
    assert is_url(path) and place(path) == RemotePath(path)


@pytest.mark.parametrize(
    "path", ["data/train", "/data", "~/s3", "", "s3:/b", "C://data", "a/s3://b", "wiki40b/en:train"]
)
def test_paths_are_no_urls(path):
    assert not is_url(path) and str(place(path)) == (path or ".").replace("//", "/")


def test_a_path_is_put_together_and_taken_apart(url):
    path = place(url + "/") / "train" / "tokens-00000.bin"
    assert str(path) == f"{url}/train/tokens-00000.bin" and path / "" == path
    assert (path.name, path.stem, path.parent) == (
        "tokens-00000.bin",
        "tokens-00000",
        place(url) / "train",
    )
    assert (
        path.with_suffix(".idx").name == "tokens-00000.idx"
        and pickle.loads(pickle.dumps(path)) == path
    )


def test_files_are_written_found_read_and_removed(url, tmp_path):
    base = place(url)
    (tmp_path / "local").write_bytes(b"0123456789")
    (base / "a" / "one.txt").write_bytes(b"one")
    (base / "a" / "b" / "two.txt").upload(tmp_path / "local")
    assert (
        (base / "a" / "one.txt").read_bytes() == b"one"
        and (base / "a").is_dir()
        and not (base / "c").exists()
    )
    assert [(str(f.path)[len(url) :], f.size) for f in base.files()] == [
        ("/a/b/two.txt", 10),
        ("/a/one.txt", 3),
    ]
    assert [f.path.name for f in (base / "a").files(depth=1)] == ["one.txt"] and (
        base / "nothing"
    ).files() == []
    assert base.glob("**/*.txt") == [base / "a" / "b" / "two.txt", base / "a" / "one.txt"]
    two = base / "a" / "b" / "two.txt"
    assert read_ranges([(two, 2, 5), (base / "a" / "one.txt", 0, 2), (two, 9, 10)]) == [
        b"234",
        b"on",
        b"9",
    ]
    with two.open() as file:
        assert (file.seek(3), file.read(4), file.read()) == (3, b"3456", b"789")
    before = two.found()
    two.write_bytes(b"abcdefghij")
    assert (before.size, two.found().size) == (10, 10) and before.stamp != two.found().stamp
    two.remove()
    with pytest.raises(FileNotFoundError, match="no such file, folder or bucket"):
        two.read_bytes()


class BrokenFileSystem:
    """A file system each of whose calls raises."""

    def __init__(self, error):
        self.error, self.calls = error, 0

    def cat_file(self, path):
        self.calls += 1
        raise self.error


class NoCredentialsError(Exception):
    pass


class HttpError(Exception):
    """An error in the form that gcsfs raises."""

    code = 401


@pytest.mark.parametrize(
    ("error", "raised", "message", "calls"),
    [
        (
            PermissionError("Forbidden"),
            StorageError,
            r"s3://b/k: reading is not allowed \(.*Forbidden\). Give this machine",
            1,
        ),
        (
            NoCredentialsError("Unable to locate"),
            StorageError,
            r"not allowed \(NoCred.*\). Give this machine credentials",
            1,
        ),
        # As gcsfs has it of one request, of one among several, and of a caller without credentials.
        (
            OSError("Forbidden: https://storage/b/o\nno storage.objects.create access\n"),
            StorageError,
            r"not allowed \(Forbidden: no storage.objects.create access\). Give this machine cred",
            1,
        ),
        (
            OSError('{  "code": 403,  "message": "no storage.objects.delete access"}'),
            StorageError,
            r"not allowed \(OSError: .*no storage.objects.delete access.*\). Give this machine cred",
            1,
        ),
        (
            HttpError("Anonymous caller does not have storage.objects.get access"),
            StorageError,
            r"not allowed \(HttpError: Anonymous caller .*\). Give this machine credentials that may",
            1,
        ),
        (
            HttpError("Invalid Credentials, 401"),
            StorageError,
            r"reading failed 5 times \(HttpError: Invalid Cred.*\), which may pass",
            5,
        ),
        (
            OSError('{  "code": 503,  "message": "busy"}'),
            StorageError,
            r"reading failed 5 times \(OSError: .*busy.*\), which may pass",
            5,
        ),
        (
            TimeoutError("slow"),
            StorageError,
            r"reading failed 5 times \(TimeoutError: slow\), which may pass. .*again",
            5,
        ),
        (
            ImportError("Install s3fs"),
            UsageError,
            r"needs a package for s3://.*Install it: pip install -e .*\[s3\]'",
            1,
        ),
        (TypeError("a bug of ours"), TypeError, "a bug of ours", 1),
    ],
)
def test_what_may_pass_is_tried_again_and_the_rest_explained(
    monkeypatch, error, raised, message, calls
):
    fs, pauses = BrokenFileSystem(error), []
    monkeypatch.setattr(remote, "_file_system", lambda url: (fs, "b/k"))
    monkeypatch.setattr(remote.time, "sleep", pauses.append)
    with pytest.raises(raised, match=message):
        RemotePath("s3://b/k").read_bytes()
    assert fs.calls == calls and len(pauses) == calls - 1 and pauses == sorted(pauses)


@pytest.mark.parametrize(
    ("url", "ways"),
    [
        ("s3://b/k", r"may \(AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE\), or"),
        ("gs://b/k", r"may \(gcloud auth application-default login, or GOOGLE_APPLICATION_CRED"),
        ("abfs://b/k", r"credentials that may, or name another place"),
    ],
)
def test_credentials_are_those_of_the_store(monkeypatch, url, ways):
    fs = BrokenFileSystem(PermissionError("no"))
    monkeypatch.setattr(remote, "_file_system", lambda url: (fs, "b/k"))
    with pytest.raises(StorageError, match=ways):
        RemotePath(url).read_bytes()


@pytest.mark.parametrize(
    "url",
    [
        "nope://x/y",
        "reference://::file:///a",
        "reference://a.json",
        "simplecache::s3://b/x",
        "filecache::file:///a",
        "blockcache::zip://a::s3://b/x.zip",
        "zip://a.txt::file:///b.zip",
        "file:///a.txt::reference://b",
        "s3://b/a.txt::zip://x",
        "memory://x",
        "local:///etc/passwd",
        "dask::s3://b/x",
        "github://o:r@main/x",
        "sftp://host/x",
        "ssh://host/x",
        "smb://host/x",
        "ftp://host/x",
        "hf://datasets/x",
        "data://x",
        "git://x",
        "jlab://x",
        "S3://b/x",
        "generic://file://x",
    ],
)
def test_other_file_systems_are_refused_with_those_that_are_known(url):
    assert is_url(url)
    for opened in (
        RemotePath,
        place,
        TokenShards.open,
        lambda given: find(f"{given}/*"),
        load_tokenizer,
        readable,
        readable_model,
    ):
        with pytest.raises(UsageError, match=r"one plain URL. Use one of file://, s3://"):
            opened(url)


def test_names_with_colons_are_no_chains(tmp_path):
    folder = RemotePath(f"file://{tmp_path}")
    (folder / "ab::zip").write_bytes(b"x")
    assert list(folder.tree()) == ["ab::zip"] and (tmp_path / "ab::zip").exists()
    assert find(f"{folder.url}/*")[0].path.read_bytes() == b"x"


@pytest.mark.parametrize("url", ["s3://user:secret@b/x", "gs://a:secret@b", "file://a:secret@b/x"])
def test_passwords_are_refused_where_no_service_takes_them(url):
    with pytest.raises(UsageError, match="in the environment") as error:
        RemotePath(url)
    assert "secret" not in str(error.value)


def test_a_url_with_a_secret_is_shown_without_it_and_a_masked_one_is_not_opened():
    path = RemotePath("https://user:secret@host/a.txt?X-Amz-Signature=secret&x=1")
    assert "secret" in path.url
    assert "secret" not in f"{path}" + repr(path) and "x=1" in str(path)
    with pytest.raises(UsageError, match="secret was masked"):
        RemotePath(str(path))
    for call in (lambda: path.write_bytes(b""), lambda: path.create(b"")):
        with pytest.raises(UsageError, match="only read"):
            call()


def test_a_download_does_not_follow_a_link_and_leaves_nothing(tmp_path):
    (tmp_path / "there").write_bytes(b"new")
    (tmp_path / "canary").write_bytes(b"mine")
    here = tmp_path / "here"
    here.mkdir()
    for name in ("a", ".a.tmp"):
        (here / name).symlink_to(tmp_path / "canary")
    RemotePath(f"file://{tmp_path}/there").download(here / "a")
    assert (here / "a").read_bytes() == b"new" and not (here / "a").is_symlink()
    with pytest.raises(FileNotFoundError):
        RemotePath(f"file://{tmp_path}/absent").download(here / "b")
    assert (tmp_path / "canary").read_bytes() == b"mine"
    assert sorted(path.name for path in here.iterdir()) == [".a.tmp", "a"]


def test_no_bucket_and_no_key_are_explained(s3_server, monkeypatch):
    with pytest.raises(
        ValueError,
        match=r"s3://absent/x: is not a directory.*no such .*bucket. Make one with .*prepare",
    ):
        TokenShards.open("s3://absent/x")
