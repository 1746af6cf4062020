"""A disk or a network file system that fails for a while: never a bad document, never the end of
finished work."""

import errno
import gzip
import json
import os
import sys

import numpy as np
import pytest

from data_pipeline import tokenizer as tokenizer_package
from data_pipeline.base.errors import StorageError, blame_storage
from data_pipeline.prepare import build
from data_pipeline.prepare import command as prepare
from data_pipeline.sources import reading
from data_pipeline.sources.document import InputOptions, InputRange, record_documents
from data_pipeline.tokenizer import load_tokenizer

TEXTS = [f"document {number} of some length " * 40 for number in range(200)]


def write_inputs(folder):
    """The documents in each format that is read by ourselves; the options that read them."""
    zstd = pytest.importorskip(
        "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
    )
    for number, text in enumerate(TEXTS):
        (folder / f"{number:03d}.txt").write_text(text)
    lines = "".join(
        json.dumps({"text": f"{text}{number}"}) + "\n" for number, text in enumerate(TEXTS)
    ).encode()
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    (folder / "c.jsonl.zst").write_bytes(zstd.compress(lines))
    np.concatenate([np.array([*text.encode(), 256], "<u2") for text in TEXTS]).tofile(
        folder / "d.bin"
    )
    return [
        "--text",
        f"{folder}/*.txt",
        "--jsonl",
        f"{folder}/*.jsonl*",
        "--nanogpt",
        f"{folder}/d.bin",
        "--tokenizer",
        "bytes",
    ]


def failing(name, code, after):
    """Input files of which the one with this name can't be read from byte `after` on."""

    class FailingFile(reading._LocalFile):
        def _blaming(self, call, *args):
            def fail(*_):
                raise OSError(code, os.strerror(code))

            here = (
                self._path.endswith(name) and call.__name__ == "readinto" and self.tell() >= after
            )
            return super()._blaming(fail if here else call, *args)

    return FailingFile


@pytest.mark.every_dose
@pytest.mark.long
@pytest.mark.parametrize("on_bad", ["raise", "skip"])
def test_it_ends_with_74_and_goes_on_where_it_was(tmp_path, monkeypatch, capsys, on_bad):
    (tmp_path / "in").mkdir()
    inputs = [*write_inputs(tmp_path / "in"), "--workers", "1", "--on-bad", on_bad]
    assert prepare.main([str(tmp_path / "whole"), *inputs]) == 0
    out, encoded, encode = tmp_path / "out", [], build.encode_unit
    monkeypatch.setattr(
        build, "encode_unit", lambda record, *rest: (encode(record, *rest), encoded.append(record))
    )
    for name, code, after in (
        ("150.txt", errno.EIO, 0),
        ("b.jsonl.gz", errno.ESTALE, 1),
        ("c.jsonl.zst", errno.ETIMEDOUT, 1),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(reading, "_LocalFile", failing(name, code, after))
            capsys.readouterr()
            assert prepare.main([str(out), *inputs]) == 74
        error = capsys.readouterr().err
        assert (
            f"{name}: can't be read now ({os.strerror(code)}). Look at the disk or network file system"
            in error
        )
        assert "run the same command again: it goes on where it was." in error
        assert len(encoded) == len([*out.glob(".prepare/all/*.json")]) > 0
    for name in ("a.jsonl", "d.bin"):  # which are looked at before work begins
        with monkeypatch.context() as patch:
            patch.setattr(reading, "_LocalFile", failing(name, errno.EIO, 0))
            assert prepare.main([str(out), *inputs]) == 74
    assert prepare.main([str(out), *inputs]) == 0
    assert len(encoded) == len(set(encoded)) > 10, "a finished unit is not done again"
    sides = [
        {p.relative_to(folder): p.read_bytes() for p in folder.rglob("tokens-*")}
        for folder in (tmp_path / "whole", out)
    ]
    assert sides[0] == sides[1]


def test_a_file_that_was_found_and_is_gone(tmp_path):
    with pytest.raises(
        StorageError,
        match=r"gone.txt: can't be read now \(No such file.*run the same command again",
    ):
        reading.open_file(str(tmp_path / "gone.txt"))


@pytest.mark.skipif(
    not os.path.exists("/proc/self/mem"), reason="a file of Linux whose first page is an I/O error"
)
@pytest.mark.parametrize("count", [1, -1])
def test_what_the_kernel_says(count):
    with (
        reading.open_file("/proc/self/mem") as file,
        pytest.raises(StorageError, match=r"mem: can't be read now \(Input/output"),
    ):
        file.read(count)


@pytest.mark.parametrize(
    ("error", "passing"),
    [
        (OSError(errno.ESTALE, "Stale file handle"), True),
        (OSError("Error reading bytes from file. Detail: [errno 5] Input/output error"), True),
        (RuntimeError("UNKNOWN: pread() failed: Input/output error; reading a; at byte 7"), True),
        (OSError("Corrupt snappy compressed data."), False),
        (PermissionError(errno.EACCES, "Permission denied"), False),
        (RuntimeError("Corrupted Riegeli/records file"), False),
    ],
    ids=str,
)
def test_libraries_that_read_files_themselves(error, passing):
    def records():
        yield "one"
        raise error

    read = record_documents(
        InputRange("parquet", "a", "a", 0, 3, InputOptions()), records(), OSError, RuntimeError
    )
    assert next(read).text == "one"
    if passing:
        with pytest.raises(
            StorageError, match=r"a: can't be read now .*run the same command again"
        ):
            next(read)
    else:
        assert next(read).problem.startswith("can't be read (")
        assert blame_storage("a", error) is None


def test_a_tokenizer_that_can_not_be_read_now(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    load_tokenizer("bytes").save(tmp_path)
    monkeypatch.setattr(tokenizer_package, "read_limited", fail)
    with pytest.raises(
        StorageError, match=r"tokenizer.json: can't be read now \(Input/output error\)"
    ):
        load_tokenizer(tmp_path)
