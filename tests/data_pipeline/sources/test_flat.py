"""nanoGPT's .bin and OLMo's .npy: documents between end marks, in any width, however divided; wrong
tokenizers are found."""

import io
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.prepare.build import make_units
from data_pipeline.shards import Manifest, TokenShards
from data_pipeline.sources import flat
from data_pipeline.sources.document import InputOptions, held_out
from data_pipeline.tokenizer import ByteTokenizer

TEXTS = [f"document {n} é 東 " * (n % 7 + 1) for n in range(2500)]
OPTIONS = InputOptions("text", 257, 256)  # of the tokenizer `bytes`


def ids_of(texts):
    """Ids of documents, each with its end."""
    return np.array([i for text in texts for i in (*text.encode(), 256)])


def documents(pieces):
    return [document for piece in pieces for document in flat.documents(piece)]


def decoded(pieces):
    return [bytes(document.tokens.tolist()).decode() for document in documents(pieces)]


@pytest.mark.every_dose
@pytest.mark.long
@pytest.mark.parametrize(
    ("dtype", "name"), [("<u2", "nanogpt"), ("<u2", "olmo"), ("<u4", "olmo"), ("<i8", "nanogpt")]
)
def test_raw_ids_of_either_width(tmp_path, prepared, dtype, name):
    ids_of(TEXTS).astype(dtype).tofile(tmp_path / "a.bin")
    out = prepared.out(f"--{name}", tmp_path / "a.bin", "--tokenizer", "bytes")
    assert prepared.read(out) == TEXTS
    assert Manifest.load(out).text_bytes == len("".join(TEXTS).encode())
    assert TokenShards.open(out).num_tokens == len(ids_of(TEXTS))


@pytest.mark.parametrize("dtype", ["<u2", ">u4", "<i8"])
def test_numpy_files(tmp_path, prepared, dtype):
    np.save(tmp_path / "a.npy", ids_of(TEXTS[:50]).astype(dtype))
    assert prepared.texts("--olmo", tmp_path / "a.npy", "--tokenizer", "bytes") == TEXTS[:50]


def test_large_vocabulary_takes_uint32(tmp_path):
    ids = np.array([70_000, 1, 100_000, 2, 3], "<u4")
    ids.tofile(tmp_path / "a.npy")
    pieces = flat.find_olmo(str(tmp_path / "a.npy"), InputOptions("text", 100_278, 100_000))
    assert [document.tokens.tolist() for document in documents(pieces)] == [[70_000, 1], [2, 3]]


def test_division_loses_and_repeats_nothing(tmp_path):
    ids_of(TEXTS).astype("<u2").tofile(tmp_path / "a.bin")
    (whole,) = flat.find_nanogpt(str(tmp_path / "a.bin"), OPTIONS)
    assert whole.size == (tmp_path / "a.bin").stat().st_size
    units = make_units([whole])
    assert len(units) > 3 and decoded(itertools.chain(*units)) == TEXTS


@given(
    st.lists(st.lists(st.integers(0, 4), max_size=6), max_size=8),
    st.lists(st.integers(1, 40), max_size=4),
    st.booleans(),
)
def test_any_cuts_of_any_documents(tmp_path_factory, lists, cuts, ended):
    """5 ends documents; empty ones are counted, and the last need not be ended."""
    path = tmp_path_factory.getbasetemp() / "any.bin"
    ids = [i for one in lists for i in (*one, 5)]
    np.array(ids if ended else ids[:-1], "<u2").tofile(path)
    (whole,) = flat.find_nanogpt(str(path), InputOptions("text", 6, 5))
    places = sorted({0, *(flat.cut(whole, min(at, whole.stop)) for at in cuts), whole.stop})
    found = documents(whole._replace(start=a, stop=b) for a, b in itertools.pairwise(places))
    wanted = lists if ended or not lists or lists[-1] else lists[:-1]
    assert [[] if d.tokens is None else d.tokens.tolist() for d in found] == wanted
    assert all(
        document.problem == ("empty, or only whitespace" if document.tokens is None else "")
        for document in found
    )


@pytest.mark.every_dose
@pytest.mark.long
def test_holdout(tmp_path, prepared):
    ids_of(TEXTS).astype("<u2").tofile(tmp_path / "a.bin")
    command = ["--nanogpt", tmp_path / "a.bin", "--tokenizer", "bytes", "--holdout", "0.1"]
    out = prepared.out(*command)
    held = [held_out(np.array([*text.encode()], "<i4").tobytes(), 0.1) for text in TEXTS]
    assert (
        prepared.read(out / "eval") == list(itertools.compress(TEXTS, held))
        and 150 < sum(held) < 350
    )
    out = prepared.out(*command, "--holdout-by", "tail")
    train, held = prepared.read(out / "train"), prepared.read(out / "eval")
    assert train + held == TEXTS and 0.08 < sum(map(len, held)) / sum(map(len, TEXTS)) < 0.12


def test_a_tokenizer_must_be_given_and_must_be_the_right_one(tmp_path, prepared, monkeypatch):
    ids_of(TEXTS).astype("<u2").tofile(tmp_path / "a.bin")
    command = ["--nanogpt", tmp_path / "a.bin"]
    for more in ([], ["--tokenizer", "chars"], ["--tokenizer", "bpe:300"]):
        error = prepared.error(64, *command, *more)
        assert (
            "a.bin: the files hold token ids" in error
            and "Give --tokenizer the path of its tokenizer.json" in error
        )
    (tmp_path / "tokenizer.json").write_text('{"type": "chars", "characters": "abc", "eod": false}')
    error = prepared.error(64, *command, "--tokenizer", tmp_path, "--eod", "none")
    assert "the tokenizer has none. Name it as eos_token in a tokenizer_config.json" in error
    np.array([1, 2, 256, 3, 300, 256], "<u2").tofile(tmp_path / "a.bin")
    for on_bad in ("raise", "skip"):
        error = prepared.error(65, *command, "--tokenizer", "bytes", "--on-bad", on_bad)
        assert (
            "a.bin: id 300 at byte 8 is outside [0, 257)" in error
            and "the tokenizer that made these ids" in error
        )
    np.save(tmp_path / "a.bin.npy", np.array([1, -2]))
    error = prepared.error(65, "--olmo", tmp_path / "a.bin.npy", "--tokenizer", "bytes")
    assert "id -2 at byte 136 is outside" in error
    monkeypatch.setattr(flat, "_LONGEST", 1)
    assert "has no end-of-document id (256) in 2 tokens from token 0 on" in prepared.error(
        65, *command, "--tokenizer", "bytes"
    )


@pytest.mark.parametrize("damage", ['"', "\x17", "(", "[" * 40, "\x00", "9" * 40])
def test_a_damaged_header_of_numpy_is_told(tmp_path, prepared, damage):
    content = io.BytesIO()
    np.save(content, np.arange(300, dtype="<u2") % 256)
    (tmp_path / "tokenizer.json").write_bytes(ByteTokenizer().content)
    good = content.getvalue()
    (tmp_path / "a.npy").write_bytes(good[:20] + damage.encode() + good[20 + len(damage) :])
    error = prepared.error(65, "--olmo", f"{tmp_path}/a.npy", "--tokenizer", tmp_path)
    assert (
        "has numpy's header, but" in error and "Restore it from a copy, or make it again" in error
    )


def test_files_that_can_not_be_used(tmp_path, prepared):
    path = tmp_path / "a.npy"
    command = ["--olmo", path, "--tokenizer", "bytes"]
    path.write_bytes(b"abc")
    assert "has 3 bytes, which are no whole number of uint16 ids" in prepared.error(65, *command)
    path.write_bytes(np.array([20240520, 1, *[0] * 254], "<i4").tobytes() + b"ab")
    assert "begins with llm.c's header of 1024 bytes. Take it off: tail -c +1025" in prepared.error(
        65, *command
    )
    np.save(path, np.zeros((2, 2), int))
    assert "holds int64 (2, 2). Save ids as one row of integers" in prepared.error(65, *command)
    np.save(path, np.array([{}]), allow_pickle=True)
    assert "has numpy's header, but " in prepared.error(65, *command)
    np.save(path, np.arange(100))
    path.write_bytes(path.read_bytes()[:-50])
    assert "Restore it from a copy, or make it again." in prepared.error(65, *command)
    path.write_bytes(b"")
    assert "holds no text at all (no documents). Give other input" in prepared.error(65, *command)
