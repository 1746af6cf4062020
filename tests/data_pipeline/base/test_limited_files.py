"""Files that are read whole have a limit."""

import pytest

from data_pipeline.base import limited_files, strict_json
from data_pipeline.base.errors import DataError
from data_pipeline.base.limited_files import read_limited
from data_pipeline.chat.chat import load_template
from data_pipeline.shards.manifest import Manifest
from data_pipeline.tokenizer import beside, load_tokenizer
from maxtrain.inference.chat import ends_of_generation


def test_a_file_may_have_as_many_bytes_as_the_limit(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_limited(path, 5) == b"12345"
    with pytest.raises(DataError, match="more than 4 bytes"):
        read_limited(path, 4)
    with pytest.raises(FileNotFoundError):
        read_limited(tmp_path / "none", 4)


def sparse(path, size):
    """A file of zeros that takes no place on the disk."""
    with path.open("wb") as file:
        file.truncate(size)


@pytest.mark.every_dose
@pytest.mark.long
@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.json", "tokenizer.model", "x.tiktoken"])
def test_tokenizers_of_strangers_have_a_limit(tmp_path, name):
    sparse(tmp_path / name, limited_files.MAX_TOKENIZER_BYTES + 1)
    with pytest.raises(DataError, match="has more than 268,435,456 bytes"):
        load_tokenizer(tmp_path / name)


def test_files_beside_a_tokenizer_and_manifests_have_a_limit(tmp_path):
    beside_it = tmp_path / "tokenizer_config.json"
    sparse(beside_it, strict_json.MAX_FILE_BYTES + 1)
    with pytest.raises(DataError, match="has more than"):
        beside.read_settings(tmp_path / "tokenizer.json")
    with pytest.raises(DataError, match="has more than"):
        beside.files_beside(tmp_path / "tokenizer.json")
    with pytest.raises(DataError, match="has more than"):
        load_template(str(beside_it), "bytes", {}, "2026-01-01")
    with pytest.raises(DataError, match="has more than"):
        ends_of_generation(beside_it)
    sparse(tmp_path / "manifest.json", limited_files.MAX_MANIFEST_BYTES + 1)
    with pytest.raises(DataError, match="has more than"):
        Manifest.load(tmp_path)
