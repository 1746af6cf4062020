"""JSON lines: plain, .gz and .zst give the same; torn and damaged files are found."""

import gzip
import itertools
import json
import sys

import pytest

from data_pipeline.base.extras import install_command
from data_pipeline.shards import Manifest
from data_pipeline.sources import jsonl
from data_pipeline.sources.document import InputOptions

LINES = "".join(
    json.dumps({"text": f"document {n} é 東\n" * (n % 5 + 1)}) + "\n" for n in range(3000)
).encode()


def pack(name, data):
    if name == "gz":
        return gzip.compress(data)
    zstd = pytest.importorskip(
        "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
    )
    return zstd.compress(
        data, options={zstd.CompressionParameter.checksum_flag: 1}
    )  # as the program zstd does


@pytest.mark.every_dose
@pytest.mark.long
@pytest.mark.parametrize("packing", ["gz", "zst"])
def test_packed_is_as_plain(tmp_path, prepared, packing):
    (tmp_path / "a.jsonl").write_bytes(LINES)
    parts = (LINES[:5000], LINES[5000:])  # frames may follow each other, and lines may cross them
    (tmp_path / f"a.jsonl.{packing}").write_bytes(b"".join(pack(packing, part) for part in parts))
    plain, packed = (
        prepared.out("--jsonl", f"{tmp_path}/{name}") for name in ("a.jsonl", f"a.jsonl.{packing}")
    )
    assert prepared.read(plain) == prepared.read(packed)
    manifests = [Manifest.load(out) for out in (plain, packed)]
    assert (
        manifests[0].text_bytes == manifests[1].text_bytes
        and len(manifests[0].shards) > len(manifests[1].shards) == 1
    )


@pytest.mark.every_dose
@pytest.mark.long
@pytest.mark.parametrize("packing", ["gz", "zst"])
def test_damage_is_found(tmp_path, prepared, packing):
    whole = pack(packing, LINES)
    (tmp_path / "good.jsonl").write_bytes(LINES[: LINES.index(b"\n")])
    torn, flipped = (
        whole[: len(whole) // 2],
        whole[:100] + bytes(byte ^ 255 for byte in whole[100:200]) + whole[200:],
    )
    for data, reason in ((torn, "ended before the end"), (flipped, ""), (b"{}" * 50, "")):
        (tmp_path / f"bad.jsonl.{packing}").write_bytes(data)
        error = prepared.error(65, "--jsonl", f"{tmp_path}/*.jsonl*")
        assert (
            f"bad.jsonl.{packing}:" in error
            and f"can't be read ({'Compressed file ' if reason else ''}{reason}" in error
        )
        assert "Correct the file, or give --on-bad skip" in error
        assert (
            prepared.texts("--jsonl", f"{tmp_path}/*.jsonl*", "--on-bad", "skip")[-1]
            == "document 0 é 東\n"
        )


@pytest.mark.parametrize("packing", ["", "gz", "zst"])
def test_a_line_that_is_too_long_is_a_bad_document(tmp_path, prepared, monkeypatch, packing):
    monkeypatch.setattr(jsonl, "LONGEST_LINE", 1000)
    long = json.dumps({"text": "x" * 5000}).encode()
    exactly = json.dumps({"text": "y" * 987}).encode()
    assert len(exactly) == 999
    data = b'{"text": "one"}\n' + exactly + b"\n" + long + b'\n{"text": "two"}\n' + long
    path = tmp_path / f"a.jsonl{packing and f'.{packing}'}"
    path.write_bytes(pack(packing, data) if packing else data)
    error = prepared.error(65, "--jsonl", path)
    assert (
        f"{path}:3: a line of 1,000 bytes or more. Correct the file, or give --on-bad skip or replace"
        in error
    )
    assert prepared.texts("--jsonl", path, "--on-bad", "replace") == ["one", "y" * 987, "two"]


def test_zst_without_its_package(tmp_path, prepared, monkeypatch):
    (tmp_path / "a.jsonl.zst").write_bytes(b"")
    for name in ("compression.zstd", "backports.zstd"):
        monkeypatch.setitem(sys.modules, name, None)
    error = prepared.error(64, "--jsonl", f"{tmp_path}/a.jsonl.zst")
    assert "a.jsonl.zst: needs " in error and f"Install it: {install_command('zstd')}" in error


def test_packed_has_no_tail(tmp_path, prepared):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(LINES))
    error = prepared.error(
        64, "--jsonl", f"{tmp_path}/a.jsonl.gz", "--holdout", "0.1", "--holdout-by", "tail"
    )
    assert "a.jsonl.gz is compressed. Unpack it, or hold out by document." in error


def test_every_document_knows_its_place(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (piece,) = jsonl.find(str(tmp_path / "a.jsonl"), InputOptions())
    at = jsonl.cut(piece, 5000)
    pieces = [piece._replace(stop=at), piece._replace(start=at)]
    places = [document.where for document in itertools.chain(*map(jsonl.documents, pieces))]
    assert len(set(places)) == 3000 and places[0].endswith("a.jsonl:line 1 after byte 0")
    assert f"a.jsonl:line 1 after byte {at}" in places[LINES[:at].count(b"\n")]
