"""Megatron-LM's indexed data sets: documents of one or several sequences; a damaged index is never
read past."""

import itertools
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.base.errors import DataError
from data_pipeline.shards import Manifest
from data_pipeline.sources import megatron
from data_pipeline.sources.document import InputOptions

TEXTS = [f"document {n} é 東 " * (n % 7 + 1) for n in range(300)]
OPTIONS = InputOptions("text", 257, 256)  # of the tokenizer `bytes`
CODES = {"u1": 1, "<i2": 3, "<i4": 4, "<i8": 5, "<u2": 8}


def write(prefix, documents, dtype="<u2", extra=b"", **header):
    """Documents, each a list of sequences of ids."""
    sequences = [sequence for document in documents for sequence in document]
    ids = np.array([i for sequence in sequences for i in sequence], dtype)
    sizes = np.array([len(sequence) for sequence in sequences], "<i4")
    pointers = (np.cumsum([0, *sizes])[:-1] * ids.itemsize).astype("<i8")
    firsts = np.cumsum([0, *map(len, documents)]).astype("<i8")
    known = {
        "magic": b"MMIDIDX\0\0",
        "version": 1,
        "code": CODES[dtype],
        "S": len(sizes),
        "D": len(firsts),
    } | header
    data = (
        struct.pack("<9sQBQQ", *known.values())
        + sizes.tobytes()
        + pointers.tobytes()
        + firsts.tobytes()
        + extra
    )
    prefix.with_suffix(".bin").write_bytes(ids.tobytes())
    prefix.with_suffix(".idx").write_bytes(data)
    return data


def of_texts(texts, end=True):
    return [[[*text.encode(), *([256] if end else [])]] for text in texts]


@pytest.mark.every_dose
@pytest.mark.long
@pytest.mark.parametrize("dtype", ["<u2", "<i2", "<i4", "<i8"])
@pytest.mark.parametrize("end", [True, False])
def test_documents_with_and_without_end_marks(tmp_path, prepared, dtype, end):
    write(tmp_path / "web", of_texts(TEXTS, end), dtype)
    for name in ("web", "web.bin", "web.idx", "w*"):
        out = prepared.out("--megatron", tmp_path / name, "--tokenizer", "bytes")
        assert prepared.read(out) == TEXTS
        assert Manifest.load(out).text_bytes == len("".join(TEXTS).encode())


@given(
    st.lists(st.lists(st.lists(st.integers(0, 4), max_size=4), max_size=3), max_size=6),
    st.lists(st.integers(0, 6)),
)
def test_documents_of_several_sequences_however_divided(tmp_path_factory, documents, cuts):
    """5 ends documents, if at all."""
    if not any(documents):
        return
    prefix = tmp_path_factory.getbasetemp() / "any"
    write(prefix, documents)
    (whole,) = megatron.find(str(prefix), InputOptions("text", 6, 5))
    assert whole.stop == len(documents)
    places = sorted({0, *(min(at, whole.stop) for at in cuts), whole.stop})
    found = [
        d
        for a, b in itertools.pairwise(places)
        for d in megatron.documents(whole._replace(start=a, stop=b))
    ]
    wanted = [[i for sequence in document for i in sequence] for document in documents]
    assert [[] if d.tokens is None else d.tokens.tolist() for d in found] == wanted
    assert [document.where for document in found] == [
        f"{prefix}.bin, document {n}" for n in range(len(documents))
    ]


def test_ids_of_another_tokenizer(tmp_path, prepared):
    write(tmp_path / "a", [[[1, 2]], [[3], [4, 300]]], "<i4")
    command = ["--megatron", tmp_path / "a"]
    error = prepared.error(65, *command, "--tokenizer", "bytes", "--on-bad", "skip")
    assert (
        "a.bin: id 300 at byte 16 is outside [0, 257)" in error
        and "the tokenizer that made these ids" in error
    )
    assert "Give --tokenizer the path of its tokenizer.json." in prepared.error(64, *command)
    write(tmp_path / "a", [[[1, -2]]], "<i8")
    assert "id -2 at byte 8 is outside" in prepared.error(65, *command, "--tokenizer", "bytes")


def test_an_index_of_another_kind(tmp_path, prepared):
    prefix, command = tmp_path / "a", ["--megatron", tmp_path / "a", "--tokenizer", "bytes"]
    documents = of_texts(TEXTS[:5])
    for header, message in (
        (
            {"magic": b"TNTIDX\0\0\0"},
            "does not begin with b'MMIDIDX.*Restore it from a copy, or make it again",
        ),
        ({"version": 2}, r"has version 2, but this program reads version 1.*Make it with those"),
        ({"code": 7}, r"has ids of type 7, but .* types \[1, 2, 3, 4, 5, 8\]"),
        ({"S": 4}, r"has \d+ bytes, but its counts ask for \d+: damaged"),
        ({"D": 1 << 60}, r"has \d+ bytes, but its counts ask for \d+: damaged"),
    ):
        write(prefix, documents, **header)
        with pytest.raises(DataError, match=message):
            megatron.find(str(prefix), OPTIONS)
    write(prefix, documents, extra=b"\0\1\0\0\0")
    assert "some sequences are not text. Make it again without them." in prepared.error(
        65, *command
    )
    write(prefix, documents, extra=bytes(5))
    assert prepared.texts(*command) == TEXTS[:5]
    prefix.with_suffix(".idx").unlink()
    assert "a.bin: has no a.idx beside it. Name a data set of" in prepared.error(65, *command)
    assert "matches no file. Check the path" in prepared.error(
        65, "--megatron", tmp_path / "b", "--tokenizer", "bytes"
    )


@given(st.data())
def test_damage_never_reads_past_the_ids(tmp_path_factory, data):
    """Any byte of the index, or the end of either file: an error that says what to do, or documents
    out of the file's ids."""
    prefix = tmp_path_factory.getbasetemp() / "damaged"
    index = bytearray(write(prefix, of_texts(TEXTS[:4])))
    index[data.draw(st.integers(0, len(index) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    prefix.with_suffix(".idx").write_bytes(
        index[: data.draw(st.sampled_from([len(index), len(index) - 1, 20]))]
    )
    ids = prefix.with_suffix(".bin").read_bytes()
    prefix.with_suffix(".bin").write_bytes(
        ids[: data.draw(st.sampled_from([len(ids), len(ids) - 1, len(ids) // 2]))]
    )
    try:
        (piece,) = megatron.find(str(prefix), OPTIONS)
        found = list(megatron.documents(piece))
    except DataError as error:
        assert str(error).endswith(
            (
                "make it again.",
                "Make it with those.",
                "ids belong to.",
                "Make it again without them.",
            )
        )
    else:
        stored = np.frombuffer(ids, "<u2").astype("<i4").tobytes()
        assert all(
            document.tokens is None or document.tokens.tobytes() in stored for document in found
        )
