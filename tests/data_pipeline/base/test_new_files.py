"""Files are written through names that nobody can foresee, and never through links."""

import concurrent.futures
import os
import stat

import pytest

from data_pipeline.base.errors import StorageError
from data_pipeline.base.new_files import TEMPORARY, open_beside, remove_abandoned
from data_pipeline.shards import write_atomic


def test_links_in_the_place_of_a_file_are_replaced_and_not_followed(tmp_path):
    (tmp_path / "canary").write_bytes(b"mine")
    for name in ("a", ".a.tmp"):
        (tmp_path / name).symlink_to("canary")
    write_atomic(tmp_path / "a", b"new")
    assert (tmp_path / "canary").read_bytes() == b"mine"
    assert (tmp_path / "a").read_bytes() == b"new" and not (tmp_path / "a").is_symlink()
    assert sorted(os.listdir(tmp_path)) == [".a.tmp", "a", "canary"]


def test_a_name_that_is_taken_is_not_opened(tmp_path, monkeypatch):
    monkeypatch.setattr("secrets.token_hex", lambda count: "0" * 2 * count)
    (tmp_path / "canary").write_bytes(b"mine")
    (tmp_path / f".{'0' * 16}.tmp").symlink_to("canary")
    with pytest.raises(StorageError):
        write_atomic(tmp_path / "a", b"new")
    assert (tmp_path / "canary").read_bytes() == b"mine" and not (tmp_path / "a").exists()


def test_private_files_are_for_the_user_alone_and_others_follow_the_umask(tmp_path):
    before = os.umask(0o022)
    try:
        write_atomic(tmp_path / "private", b"x", private=True)
        write_atomic(tmp_path / "public", b"x")
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("private", "public")]
    assert modes == [0o600, 0o644]


def test_several_writers_of_one_file_do_not_disturb_each_other(tmp_path):
    contents = [bytes([n]) * 100_000 for n in range(8)]
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda content: write_atomic(tmp_path / "a", content), contents))
    assert (tmp_path / "a").read_bytes() in contents and os.listdir(tmp_path) == ["a"]


def test_what_killed_processes_left_goes_after_a_while(tmp_path):
    with open_beside(tmp_path / "a") as old, open_beside(tmp_path / "a") as new:
        pass
    (tmp_path / ".mine.tmp").touch()
    os.utime(old.name, (1, 1))
    os.utime(tmp_path / ".mine.tmp", (1, 1))
    remove_abandoned.cache_clear()
    write_atomic(tmp_path / "a", b"x")
    assert sorted(os.listdir(tmp_path)) == sorted([".mine.tmp", os.path.basename(new.name), "a"])
    assert TEMPORARY
