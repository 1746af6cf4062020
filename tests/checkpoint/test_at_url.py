"""Steps at a URL, as a host sees them: what is damaged on its way, or here, is fetched again, and
what is damaged there does not count."""

import json

import pytest

from benchmarks.faulty_s3 import Fault
from data_pipeline.remote import RemotePath
from maxtrain.checkpoint import at_url
from maxtrain.checkpoint.integrity import FORMAT, encode_commit, hash_files

pytestmark = pytest.mark.usefixtures("s3")
HOME = "runs/x/checkpoints/"
RECORD = {"step": 3, "format": FORMAT}


@pytest.fixture
def step(s3, tmp_path):
    """A step at a URL without arrays, whose answers have no checksums."""
    made = tmp_path / "made"
    made.mkdir()
    (made / "record.json").write_text(json.dumps(RECORD))
    commit = {"format": FORMAT, "step": 3, "arrays": {}}
    commit["files"] = hash_files(made, ["record.json"])
    contents = {"record.json": (made / "record.json").read_bytes()}
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
