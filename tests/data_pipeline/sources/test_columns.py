"""Parquet files and Hugging Face datasets on disk: every row once, whatever the layout; what is
damaged or no text is named."""

import contextlib
import io
import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.base.errors import DataError
from data_pipeline.base.extras import install_command
from data_pipeline.prepare.build import make_units
from data_pipeline.sources import FORMATS, arrow, columns, parquet
from data_pipeline.sources.document import InputOptions, find_files, held_out

pyarrow = pytest.importorskip("pyarrow")
pytest.importorskip("pyarrow.parquet")
pytest.importorskip("pyarrow.ipc")

TEXTS = [f"document {n} é 東 " * (n % 7 + 1) for n in range(2500)]


def write(path, texts, kind="string", key="text"):
    """A file in the layout that the path's ending asks for, in groups of 200 rows, among other
    columns."""
    column = pyarrow.array(texts, pyarrow.string())
    column = column.dictionary_encode() if kind == "dictionary" else column.cast(kind)
    other = pyarrow.array(
        [{"x": n} for n in range(len(texts))], pyarrow.struct({"x": pyarrow.int64()})
    )
    table = pyarrow.table({"meta": other, key: column, "n": range(len(texts))})
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=200)
        return
    new = pyarrow.ipc.new_file if path.suffix == ".feather" else pyarrow.ipc.new_stream
    with new(path, table.schema) as writer:
        for batch in table.to_batches(200):
            writer.write_batch(batch)


def save_to_disk(folder, texts, **state):
    """Write the files of `datasets`: two files and the state that lists them."""
    names = [f"data-0000{n}-of-00002.arrow" for n in range(2)]
    for name, part in zip(names, (texts[:1000], texts[1000:])):
        write(folder / name, part)
    content = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": "1",
        "_split": "train",
    } | state
    (folder / "state.json").write_text(json.dumps(content))
    (folder / "dataset_info.json").write_text("{}")


@pytest.mark.every_dose
@pytest.mark.long
@pytest.mark.parametrize("suffix", ["parquet", "arrow", "feather"])
@pytest.mark.parametrize("kind", ["string", "large_string", "binary", "string_view", "dictionary"])
def test_every_row_once_in_order(tmp_path, prepared, suffix, kind):
    if (suffix, kind) == ("parquet", "string_view"):
        kind = "large_binary"
    name = "parquet" if suffix == "parquet" else "arrow"
    write(tmp_path / f"a.{suffix}", TEXTS[:700], kind, "body")
    assert prepared.texts(f"--{name}", tmp_path / f"*.{suffix}", "--key", "body") == TEXTS[:700]


@pytest.mark.parametrize("name", ["parquet", "arrow"])
def test_division_loses_and_repeats_nothing(tmp_path, name):
    write(tmp_path / f"a.{name}", TEXTS)
    (whole,) = FORMATS[name].find(str(tmp_path / f"a.{name}"), InputOptions())
    assert whole.stop == 2500 and 0.5 < whole.size / sum(map(len, TEXTS)) < 3
    units = make_units([whole])
    assert len(units) > 1 and units == make_units([whole])
    rng = np.random.default_rng(4)
    cuts = [0, *sorted(rng.integers(0, 2500, 12).tolist()), 200, 400, 2500]
    for pieces in (
        itertools.chain(*units),
        [whole._replace(start=a, stop=b) for a, b in itertools.pairwise(sorted(cuts))],
    ):
        found = [document for piece in pieces for document in FORMATS[name].documents(piece)]
        assert [document.text for document in found] == TEXTS
        assert [document.where for document in found] == [
            f"{whole.path}, row {n}" for n in range(2500)
        ]


def test_holdout_by_document_and_by_tail(tmp_path, prepared):
    write(tmp_path / "a.parquet", TEXTS)
    out = prepared.out("--parquet", tmp_path / "a.parquet", "--holdout", "0.1")
    held = [held_out(text.encode(), 0.1) for text in TEXTS]
    assert (
        prepared.read(out / "eval") == list(itertools.compress(TEXTS, held))
        and 150 < sum(held) < 350
    )
    out = prepared.out(
        "--parquet", tmp_path / "a.parquet", "--holdout", "0.1", "--holdout-by", "tail"
    )
    assert (prepared.read(out / "train"), prepared.read(out / "eval")) == (
        TEXTS[:2250],
        TEXTS[2250:],
    )


def test_saved_dataset(tmp_path, prepared):
    save_to_disk(tmp_path / "saved", TEXTS)
    write(tmp_path / "saved" / "left-over.arrow", ["of another dataset"])
    assert prepared.texts("--arrow", tmp_path / "saved") == TEXTS
    save_to_disk(tmp_path / "both" / "train", TEXTS)
    (tmp_path / "both" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    error = prepared.error(65, "--arrow", tmp_path / "both")
    assert (
        f"Name one of them: --arrow {tmp_path}/both/train or --arrow {tmp_path}/both/test." in error
    )


def test_saved_datasets_that_can_not_be_used(tmp_path, prepared):
    save_to_disk(tmp_path / "rows", TEXTS, _indices_files=[{"filename": "indices.arrow"}])
    assert "Save it with flatten_indices().save_to_disk(DIR)" in prepared.error(
        65, "--arrow", tmp_path / "rows"
    )
    save_to_disk(tmp_path / "gone", TEXTS)
    (tmp_path / "gone" / "data-00001-of-00002.arrow").unlink()
    error = prepared.error(65, "--arrow", tmp_path / "gone")
    assert "data-00001-of-00002.arrow: is missing" in error and "save the dataset again" in error
    save_to_disk(tmp_path / "odd", TEXTS)
    for content in (
        "{",
        "[]",
        "{}",
        '{"_data_files": 3}',
        '{"_data_files": [3]}',
        '{"_data_files": [{"filename": 3}]}',
        '{"_data_files": [{"filename": "../rows/data-00000-of-00002.arrow"}]}',
        json.dumps({"_data_files": [{"filename": str(tmp_path / "rows" / "x.arrow")}]}),
        '{"_data_files": [{"filename": "a\\u0000b"}]}',
    ):
        (tmp_path / "odd" / "state.json").write_text(content)
        error = prepared.error(65, "--arrow", tmp_path / "odd")
        assert "is not what save_to_disk writes" in error and "Restore it from a copy" in error
    (tmp_path / "odd" / "dataset_dict.json").write_text('{"splits": ["../../etc"]}')
    assert "has the part '..'" in prepared.error(65, "--arrow", tmp_path / "odd")
    (tmp_path / "folder").mkdir()
    assert "folder: is a directory. Name its files" in prepared.error(
        65, "--arrow", tmp_path / "folder"
    )


@pytest.mark.parametrize("name", ["parquet", "arrow"])
def test_files_that_can_not_be_used(tmp_path, prepared, name):
    path = tmp_path / f"a.{name}"
    write(path, TEXTS, key="body")
    whole = path.read_bytes()
    error = prepared.error(65, f"--{name}", path)
    assert (
        f"a.{name}: has no column 'text', but meta, body, n. Name one of them with --key." in error
    )
    error = prepared.error(65, f"--{name}", path, "--key", "meta")
    assert (
        "column 'meta' holds struct<x: int64>, not text. Name a column of text with --key." in error
    )
    for data in (b"", b"text", whole[:-8], whole[: len(whole) // 2], whole[::-1]):
        path.write_bytes(data)
        error = prepared.error(65, f"--{name}", path, "--key", "body")
        assert (
            f"a.{name}: is not a" in error and "Restore it from a copy, or leave it out." in error
        )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_no_damage_to_an_arrow_file_reads_outside_of_it(tmp_path_factory, data):
    """Offsets of texts are bytes like any others: pyarrow itself would read wherever they lead."""
    folder = tmp_path_factory.mktemp("damaged")
    table, sink = pyarrow.table({"text": ["one", "two é", None, "three"] * 5}), io.BytesIO()
    with pyarrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    content = bytearray(sink.getvalue())
    for at in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=4)):
        content[at] = data.draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]))
    (folder / "a.arrow").write_bytes(content)
    with contextlib.suppress(DataError):
        for piece in arrow.find(str(folder / "a.arrow"), InputOptions()):
            assert sum(1 for _ in arrow.documents(piece)) <= piece.stop + 1


@pytest.mark.parametrize("name", ["parquet", "arrow"])
def test_rows_that_are_not_clean(tmp_path, prepared, name):
    table = pyarrow.table(
        {
            "text": pyarrow.array(
                [b"fine", None, b"caf\xe9", b"a\0b", b" ", b"last"], pyarrow.binary()
            )
        }
    )
    if name == "parquet":
        pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    else:
        with pyarrow.ipc.new_stream(tmp_path / "a.arrow", table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    command = [f"--{name}", tmp_path / f"a.{name}", "--on-bad"]
    assert (
        f"a.{name}, row 1: 'text' is null. Correct the file, or give --on-bad skip"
        in prepared.error(65, *command, "raise")
    )
    assert prepared.texts(*command, "skip") == ["fine", "last"]
    (piece,) = FORMATS[name].find(str(tmp_path / f"a.{name}"), InputOptions())
    parts = (
        FORMATS[name].documents(piece._replace(part=part, share=0.5)) for part in ("train", "eval")
    )
    assert sorted(document.where[-1] for document in itertools.chain(*parts)) == [
        *"012345"
    ]  # each in one part, bad or not
    assert prepared.texts(*command, "replace") == ["fine", "caf\ufffd", "a\ufffdb", "last"]


def test_damage_inside_a_parquet_file(tmp_path, prepared):
    write(tmp_path / "a.parquet", TEXTS)
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    data[len(data) // 3 : len(data) // 3 + 3000] = b"\xff" * 3000
    (tmp_path / "a.parquet").write_bytes(data)
    error = prepared.error(65, "--parquet", tmp_path / "a.parquet")
    assert (
        "a.parquet, row " in error
        and "can't be read (" in error
        and "Correct the file, or give --on-bad skip" in error
    )
    got = prepared.texts("--parquet", tmp_path / "a.parquet", "--on-bad", "skip")
    assert 0 < len(got) < 2500 and set(got) <= set(TEXTS)


@pytest.mark.parametrize("name", ["parquet", "arrow"])
def test_without_the_package(tmp_path, prepared, monkeypatch, name):
    write(tmp_path / f"a.{name}", TEXTS[:1])
    for module in ("pyarrow.parquet", "pyarrow.ipc"):
        monkeypatch.setitem(sys.modules, module, None)
    assert f"Install it: {install_command('parquet')}" in prepared.error(
        64, f"--{name}", tmp_path / f"a.{name}"
    )


def test_file_without_rows(tmp_path):
    write(tmp_path / "a.parquet", [])
    write(tmp_path / "a.arrow", [])
    for name in ("parquet", "arrow"):
        (piece,) = FORMATS[name].find(str(tmp_path / f"a.{name}"), InputOptions())
        assert piece.stop == piece.size == 0 and list(FORMATS[name].documents(piece)) == []
    with pytest.raises(DataError, match=r"matches no file\. Check the path"):
        FORMATS["parquet"].find(str(tmp_path / "absent*"), InputOptions())


DICTIONARY_BOMB = """
import resource, sys
import pyarrow as pa
import pyarrow.parquet
from data_pipeline.sources import parquet
from data_pipeline.sources.document import InputOptions, find_files

words = pa.DictionaryArray.from_arrays(pa.array([0] * 8000, pa.int16()), pa.array(["x" * (1 << 20)]))
pyarrow.parquet.write_table(pa.table({"text": words}), sys.argv[1], compression="zstd")
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
(piece,) = parquet.find(sys.argv[1], InputOptions(key="text"))
found = [len(document.text or "") for document in parquet.documents(piece)]
assert found == [1 << 20] * 8000, found[:3]
found = [len(row) for row in parquet.records(piece)]
assert len(found) == 8000
"""


@pytest.mark.long
def test_a_dictionary_whose_value_is_repeated_takes_little_memory(tmp_path):
    """The file has some 500 bytes, and its rows 8 GB."""
    file = str(tmp_path / "bomb.parquet")
    subprocess.run([sys.executable, "-c", DICTIONARY_BOMB, file], check=True)
    assert Path(file).stat().st_size < 10_000


def test_lists_with_more_elements_than_are_read_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "_MOST_ELEMENTS", 99)
    file = tmp_path / "lists.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"l": [[0] * 100]}), file)
    (piece,) = find_files(str(file), "parquet", InputOptions(key="l"), ".parquet")
    with pytest.raises(OSError, match="fewer rows in a row group"):
        list(parquet.records(parquet.find_records(piece, "test")))


def test_rows_of_a_large_batch_are_converted_one_by_one_up_to_a_limit(tmp_path, monkeypatch):
    file = tmp_path / "rows.parquet"
    rows = [[0] * 10, [1] * 10, [2] * 100]
    pyarrow.parquet.write_table(pyarrow.table({"l": rows}), file)
    (piece,) = find_files(str(file), "parquet", InputOptions(key="l"), ".parquet")
    piece = parquet.find_records(piece, "test")
    monkeypatch.setattr(columns, "_LARGE_BATCH_BYTES", 8)
    assert [json.loads(row)["l"] for row in parquet.records(piece)] == rows
    monkeypatch.setattr(columns, "_LARGEST_ROW_BYTES", 500)
    with pytest.raises(OSError, match="divide its lists"):
        list(parquet.records(piece))


def test_a_dictionary_larger_than_is_read_is_refused(tmp_path, monkeypatch):
    file = tmp_path / "words.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x" * 1000] * 3}), file)
    (piece,) = parquet.find(str(file), InputOptions(key="text"))
    monkeypatch.setattr(parquet, "_LARGEST_BYTES", 999)
    (document,) = parquet.documents(piece)
    assert document.text is None and "a dictionary of" in document.problem
