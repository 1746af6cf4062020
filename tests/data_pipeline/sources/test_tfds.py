"""Data sets of tensorflow-datasets, made here without TensorFlow."""

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.base.extras import install_command
from data_pipeline.sources import tfds as source
from data_pipeline.sources.document import InputOptions

tfds = pytest.importorskip("tensorflow_datasets")
TEXTS = [f"document {n} é 東" for n in range(40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A data set of the splits train (two files) and test."""
    root = tmp_path_factory.mktemp("tfds")
    (root / "package").mkdir()

    class Tiny(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")
        pkg_dir_path = root / "package"
        url_infos = {}  # noqa: RUF012 - else looked for beside the code

        def _info(self):
            features = tfds.features.FeaturesDict(
                {"text": tfds.features.Text(), "size": tfds.features.Scalar(np.int32)}
            )
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, _):
            return {
                "train": self._generate_examples(TEXTS),
                "test": self._generate_examples(["held out"] * 2),
            }

        def _generate_examples(self, texts):
            yield from ((n, {"text": text, "size": len(text)}) for n, text in enumerate(texts))

    builder = Tiny(data_dir=root / "data", file_format="array_record")
    builder.download_and_prepare(download_config=tfds.download.DownloadConfig(num_shards=2))
    assert "tensorflow" not in sys.modules
    return Path(builder.data_dir)


def test_every_example_once(folder, prepared):
    assert sorted(prepared.texts("--tfds", folder)) == sorted(TEXTS)
    assert prepared.texts("--tfds", f"{folder}:test") == ["held out"] * 2
    pieces = source.find(str(folder), InputOptions())
    assert len(pieces) == 2 and sum(piece.stop for piece in pieces) == 40
    whole = [document.text for piece in pieces for document in source.documents(piece)]
    assert whole == [
        example["text"].decode()
        for example in tfds.builder_from_directory(str(folder)).as_data_source("train")
    ]
    parts = [
        piece._replace(start=a, stop=b)
        for piece in pieces
        for a, b in itertools.pairwise([0, 5, piece.stop])
    ]
    assert [document.text for piece in parts for document in source.documents(piece)] == whole


def test_by_name_among_what_is_on_disk(folder, monkeypatch):
    monkeypatch.setattr(tfds.core.constants, "DATA_DIR", str(folder.parents[1]))
    assert [piece.path for piece in source.find("tiny:test", InputOptions())] == sorted(
        map(str, folder.glob("*test*"))
    )


def test_data_sets_that_can_not_be_used(folder, tmp_path, prepared):
    error = prepared.error(65, "--tfds", "no_such_set")
    assert (
        "no_such_set: is not a data set on disk (" in error
        and "tfds build no_such_set --file_format=array_record" in error
    )
    error = prepared.error(65, "--tfds", tmp_path)
    assert "or name its folder, the one with dataset_info.json." in error
    error = prepared.error(65, "--tfds", f"{folder}:valid")
    assert f"has no split 'valid'. Name one: {folder}:train, {folder}:test." in error
    error = prepared.error(65, "--tfds", folder, "--key", "body")
    assert "has no feature 'body', but size, text. Name one with --key." in error
    error = prepared.error(65, "--tfds", folder, "--key", "size")
    assert "row 0: 'size' is not a string. Correct the file, or give --on-bad" in error


def test_other_file_formats_and_damage(folder, tmp_path, prepared):
    copy = tmp_path / "tiny" / "1.0.0"
    copy.mkdir(parents=True)
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    info = (copy / "dataset_info.json").read_text()
    (copy / "dataset_info.json").write_text(info.replace("array_record", "tfrecord"))
    error = prepared.error(65, "--tfds", copy)
    assert (
        "is stored as tfrecord, which has no random access. Build it with --file_format=array_record."
        in error
    )
    (copy / "dataset_info.json").write_text(info)
    torn = next(copy.glob("*train*-00001-of*"))
    torn.write_bytes(torn.read_bytes()[:70_000])
    assert "Correct the file, or give --on-bad skip" in prepared.error(65, "--tfds", copy)


def test_without_the_package(prepared, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    assert f"Install it: {install_command('tfds')}" in prepared.error(64, "--tfds", "tiny")
