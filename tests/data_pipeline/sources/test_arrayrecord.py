"""ArrayRecord files of documents: every record once; what the library takes for an empty file is an
error."""

import itertools
import sys

import pytest

from data_pipeline.base.extras import install_command
from data_pipeline.sources import arrayrecord
from data_pipeline.sources.document import InputOptions

module = pytest.importorskip("array_record.python.array_record_module")
TEXTS = [f"document {n} é 東 " * (n % 7 + 1) for n in range(900)]


def write(path, records):
    writer = module.ArrayRecordWriter(str(path), "group_size:8")
    for record in records:
        writer.write(record)
    writer.close()


@pytest.fixture
def file(tmp_path):
    write(tmp_path / "a.array_record", [text.encode() for text in TEXTS])
    return tmp_path / "a.array_record"


def test_every_record_once_however_divided(file, prepared):
    assert prepared.texts("--arrayrecord", file) == TEXTS
    (piece,) = arrayrecord.find(str(file), InputOptions())
    assert (piece.start, piece.stop, piece.size) == (0, 900, 900)  # of which padding is nearly all
    cuts = itertools.pairwise([0, 1, 7, 8, 500, 900])
    found = [d for a, b in cuts for d in arrayrecord.documents(piece._replace(start=a, stop=b))]
    assert [document.text for document in found] == TEXTS and found[500].where == f"{file}, row 500"


def test_records_that_are_not_clean(tmp_path, prepared):
    write(tmp_path / "a.ar", [b"fine", b"caf\xe9", b"", b"last"])
    command = ["--arrayrecord", tmp_path / "a.ar", "--on-bad"]
    assert "a.ar, row 1: not UTF-8. Correct the file, or give --on-bad skip" in prepared.error(
        65, *command, "raise"
    )
    assert prepared.texts(*command, "replace") == ["fine", "caf\ufffd", "last"]


def test_files_that_are_torn_or_of_another_kind(file, prepared):
    whole = file.read_bytes()
    for data in (b"", b"text", whole[: len(whole) // 2], b"x" * len(whole)):
        file.write_bytes(data)
        error = prepared.error(65, "--arrayrecord", file)
        assert (
            "a.array_record: is not an ArrayRecord file (" in error
            and "Restore it from a copy, or leave it out." in error
        )
    file.write_bytes(whole[:5000] + bytes([whole[5000] ^ 255]) + whole[5001:])
    error = prepared.error(65, "--arrayrecord", file)
    assert (
        "a.array_record, row " in error and "can't be read (Corrupted Riegeli/records file" in error
    )


def test_without_the_package(file, prepared, monkeypatch):
    monkeypatch.setitem(sys.modules, "array_record.python.array_record_module", None)
    assert f"Install it: {install_command('arrayrecord')}" in prepared.error(
        64, "--arrayrecord", file
    )
