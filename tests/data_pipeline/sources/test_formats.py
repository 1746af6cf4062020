"""All formats together: the same documents give the same shards, whatever they come in; what the
command line says of each."""

import functools
import gzip
import json
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_pipeline.prepare import build
from data_pipeline.prepare import command as prepare
from data_pipeline.prepare.runner import run_local
from data_pipeline.shards import Manifest, TokenShards
from data_pipeline.sources import FORMATS
from data_pipeline.sources.document import Document, InputOptions, InputRange
from data_pipeline.tokenizer import load_tokenizer

arrow = pytest.importorskip("pyarrow")
pytest.importorskip("pyarrow.parquet")
records = pytest.importorskip("array_record.python.array_record_module")
zstd = pytest.importorskip("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")

# Marks and blank documents are dealt with by each format's own tests.
CHARACTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\0\ufeff")
DOCUMENTS = st.lists(
    st.text(CHARACTERS, min_size=1, max_size=40).filter(str.strip), min_size=1, max_size=6
)


def write_all(folder, documents):
    """The documents in every format, beside each other; the arguments that read each."""
    for number, document in enumerate(documents):
        (folder / f"{number:03d}.txt").write_bytes(document.encode())
    lines = "".join(json.dumps({"text": document}) + "\n" for document in documents).encode()
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    (folder / "a.jsonl.zst").write_bytes(zstd.compress(lines))
    table = arrow.table({"text": documents})
    arrow.parquet.write_table(table, folder / "a.parquet", row_group_size=2)
    (folder / "saved").mkdir()
    with arrow.ipc.new_stream(folder / "saved" / "data.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    (folder / "saved" / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    writer = records.ArrayRecordWriter(str(folder / "a.array_record"), "group_size:2")
    for document in documents:
        writer.write(document.encode())
    writer.close()
    ids = [[*document.encode(), 256] for document in documents]
    flat = np.concatenate(ids).astype("<u2")
    flat.tofile(folder / "a.bin")
    flat.tofile(folder / "a.npy")
    np.save(folder / "b.npy", flat)
    files = {
        "jsonl": ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"],
        "parquet": ["a.parquet"],
        "arrow": ["saved"],
    }
    files |= {"arrayrecord": ["a.array_record"], "nanogpt": ["a.bin"], "olmo": ["a.npy", "b.npy"]}
    named = [[f"--{name}", f"{folder}/{file}"] for name in files for file in files[name]]
    return [["--text", f"{folder}/*.txt"], *named]


@pytest.mark.long
@given(DOCUMENTS)
@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_same_documents_same_shards(tmp_path_factory, documents):
    folder = tmp_path_factory.mktemp("formats")
    uids = {}
    for number, command in enumerate(write_all(folder, documents)):
        out = folder / f"out{number}"
        assert prepare.main([str(out), *command, "--tokenizer", "bytes", "--workers", "1"]) == 0
        uids[command[1].removeprefix(f"{folder}/")] = Manifest.load(out).uid
    assert len(uids) == 10
    assert set(uids.values()) == {uids["*.txt"]}, uids


@pytest.mark.long
@pytest.mark.processes
def test_any_number_of_workers_and_any_interruption(tmp_path, monkeypatch):
    """Formats counted in bytes, records and tokens, divided into many units and built at once."""
    documents = [f"document {n} of some length " * (n % 9 + 1) for n in range(3000)]
    write_all(tmp_path, documents)
    command = [
        "--parquet",
        f"{tmp_path}/a.parquet",
        "--arrayrecord",
        f"{tmp_path}/a.array_record",
        "--arrow",
    ]
    command += [
        f"{tmp_path}/saved",
        "--nanogpt",
        f"{tmp_path}/a.bin",
        "--tokenizer",
        "bytes",
        "--holdout",
        "0.1",
    ]
    assert prepare.main([str(tmp_path / "one"), *command, "--workers", "1"]) == 0
    assert prepare.main([str(tmp_path / "two"), *command, "--workers", "2"]) == 0
    real, calls = build.encode_unit, []

    def stop_after_seven(*args, **kwargs):
        calls.append(args)
        if len(calls) == 8:
            raise KeyboardInterrupt
        real(*args, **kwargs)

    monkeypatch.setattr(build, "encode_unit", stop_after_seven)
    assert prepare.main([str(tmp_path / "three"), *command, "--workers", "1"]) == 75
    assert prepare.main([str(tmp_path / "three"), *command, "--workers", "1"]) == 0
    outs = [tmp_path / name for name in ("one", "two", "three")]
    built = [
        {path.relative_to(out): path.read_bytes() for path in out.rglob("*") if path.is_file()}
        for out in outs
    ]
    assert built[0] == built[1] == built[2] and len(built[0]) > 40
    counts = [Manifest.load(tmp_path / "one" / part).num_documents for part in ("train", "eval")]
    assert sum(counts) == 4 * 3000 and 900 < counts[1] < 1500


def test_input_beside_a_piece_is_watched_too(tmp_path, capsys):
    write_all(tmp_path, ["one", "two"])
    command = [str(tmp_path / "out"), "--arrow", f"{tmp_path}/saved", "--tokenizer", "bytes"]
    assert prepare.main(command) == 0
    state = tmp_path / "saved" / "state.json"
    state.write_bytes(state.read_bytes())
    assert prepare.main(command) == 64
    assert (
        "input files were written to since it was begun. Choose another OUT"
        in capsys.readouterr().err
    )


def test_help_lists_every_format_with_an_example(capsys):
    assert prepare.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name, format in FORMATS.items():
        assert f"--{name}" in shown and f"prepare OUT {format.example}\n" in shown
        assert f"--{name}" in format.example


def test_spans_become_ids_with_a_loss_mask(tmp_path, monkeypatch):
    tokenizer = load_tokenizer("bytes")
    spans = [("user: hé\n", False), ("yes", True), ("\n", False)]
    documents = [
        Document(None, "a:1", spans=spans),
        Document("plain", "a:2"),
        Document(None, "a:3", "empty", spans=[]),
    ]
    monkeypatch.setitem(
        FORMATS, "text", FORMATS["text"]._replace(documents=lambda piece: iter(documents))
    )
    unit, here = (
        [InputRange("text", "a", "a", 0, 1, InputOptions())],
        functools.partial(run_local, 1),
    )
    build.build_part(
        tmp_path / "out",
        tmp_path / "work",
        [unit],
        tokenizer,
        "append",
        "skip",
        here,
        lambda size: None,
    )
    shards = TokenShards.open(tmp_path / "out", "full")
    text = "user: hé\nyes\n"
    assert shards.read(0, shards.num_tokens).tolist() == [*text.encode(), 256, *b"plain", 256]
    mask = shards.mask(np.array([0]), shards.num_tokens)[0]
    assert mask.tolist() == [False] * 10 + [True] * 3 + [False] * 2 + [True] * 6
    assert shards.manifest.text_bytes == len("yes") + len("plain")
    assert list(shards.manifest.problems) == ["empty"]
