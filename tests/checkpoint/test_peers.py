"""Files that another host sends: no file but the new one is written."""

import os

import jax
import numpy as np
import pytest

from maxtrain.checkpoint import peers


@pytest.fixture
def send(monkeypatch):
    """Writes what process 0 sends, as process 1."""
    monkeypatch.setattr(peers, "_LARGEST", 1 << 12)
    monkeypatch.setattr(jax, "process_index", lambda: 1)

    def run(path, content):
        left = [content[at : at + (1 << 12)] for at in range(0, max(1, len(content)), 1 << 12)]

        def from_one(piece, sender):
            assert sender == 0
            part = left.pop(0)
            return np.frombuffer(part.ljust(len(piece), b"\0"), np.uint8)

        monkeypatch.setattr(peers, "from_one", from_one)
        try:
            peers._send(path, len(content), 0, is_wanted=True)
        finally:
            assert not left, "the others wait for a process that sends no more"

    return run


@pytest.mark.parametrize("size", [0, 1, (1 << 12) - 1, 1 << 12, (1 << 13) + 5])
def test_a_file_is_what_was_sent(send, tmp_path, size):
    content = os.urandom(size)
    send(tmp_path / "new" / "file", content)
    assert (tmp_path / "new" / "file").read_bytes() == content
    assert os.listdir(tmp_path / "new") == ["file"]


def test_links_that_others_placed_are_not_written_through(send, tmp_path):
    other = tmp_path / "other"
    other.write_text("kept")
    folder = tmp_path / "step"
    folder.mkdir()
    for name in (".file.partial", ".file.tmp", "file"):
        (folder / name).symlink_to(other)
    send(folder / "file", b"sent")
    assert other.read_text() == "kept"
    assert not (folder / "file").is_symlink() and (folder / "file").read_bytes() == b"sent"


def test_what_can_not_be_written_leaves_nothing(send, tmp_path):
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "file").mkdir()
    with pytest.raises(OSError):
        send(tmp_path / "step" / "file", bytes(10_000))
    assert os.listdir(tmp_path / "step") == ["file"]
    (tmp_path / "no folder").write_text("")
    with pytest.raises(OSError):
        send(tmp_path / "no folder" / "file", bytes(10_000))
