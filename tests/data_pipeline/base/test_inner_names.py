"""Names of strangers stay inside their folder, by their text and through symbolic links."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.base.errors import DataError, StorageError
from data_pipeline.base.inner_names import (
    is_file_name,
    leads_out,
    require_inside,
    require_no_way_out,
    why_outside,
)

# What an attacker, or a broken tool, may write for a name.
OUTSIDE = [
    "", ".", "..", "/", "/abs/x", "//abs/x", "../x", "a/..", "a/../x", "a/../../x", "a/./x", "./a",
    "a//x", "a/", "a\\..\\x", "..\\x", "\\\\host\\x", "C:\\x", "C:/x", "C:x", "a\0b", "\0", "a\nb",
    "a\x1bb", "a\x7fb", "a\x85b", "\ud800", "x" * 256, "é" * 128, "/".join(["x" * 200] * 6),
]  # fmt: skip
INSIDE = [
    "a", "a..b", "..a", "a..", "...", ".hidden", "a b", " a", "a/b.c/d", "é", "模型/数据.bin", "~", "~root",
    "ab:c", "1:b", "x" * 255, "$HOME", "%2e%2e", "-rf", "a*b?[c]", "s3:x", "params.layers.0.w/0.0",
]  # fmt: skip


@pytest.mark.parametrize("name", [*OUTSIDE, None, 5, b"a", ["a"], {"a": 1}, True])
def test_a_name_that_leads_out_is_refused(name):
    assert why_outside(name) and not is_file_name(name)
    with pytest.raises(DataError, match=r"index.json: the name .* must stay inside .*Get it again"):
        require_inside(name, "index.json", "Get it again")


@pytest.mark.parametrize("name", INSIDE)
def test_honest_names_stay_as_they_are(name):
    assert require_inside(name, "index.json", "") == name
    assert is_file_name(name) == ("/" not in name)


@given(st.text("./\\aé:\0 ~C", max_size=12) | st.text(max_size=300))
def test_a_safe_name_is_below_its_folder_and_names_one_place(tmp_path_factory, name):
    if why_outside(name):
        return
    joined = os.path.join("/a/folder", name)
    assert os.path.normpath(joined) == joined and joined.startswith("/a/folder/")
    folder = tmp_path_factory.getbasetemp() / "names"
    assert not leads_out(folder, name) and not os.path.lexists(folder / name)


def test_links_lead_out_only_if_they_do(tmp_path):
    outside = tmp_path / "outside"
    home = tmp_path / "home"
    (home / "real").mkdir(parents=True)
    outside.mkdir()
    (home / "out").symlink_to(outside)
    (home / "gone").symlink_to(tmp_path / "nowhere")
    (home / "in").symlink_to("real")
    (home / "in-absolute").symlink_to(home / "real")
    (home / "real" / "up").symlink_to("../../outside")
    (home / "twice").symlink_to("out")
    for name in ("out", "out/x", "out/x/y", "gone", "in/up/x", "real/up", "twice/x"):
        assert leads_out(home, name), name
        with pytest.raises(StorageError, match="through a symbolic link"):
            require_no_way_out(home, name)
    for name in ("in", "in/x", "in-absolute/x", "real/x", "new/x"):
        assert require_no_way_out(home, name) == home / name
    # The folder of a user may itself be a link.
    (tmp_path / "linked").symlink_to(home)
    assert not leads_out(tmp_path / "linked", "in/x")
    assert leads_out(tmp_path / "linked", "out/x")
