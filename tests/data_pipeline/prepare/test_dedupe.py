"""Duplicates: the first in input order stays, whatever the units, ranges and workers; none is on
both sides of a hold-out."""

import json
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.prepare import command as prepare
from data_pipeline.prepare import dedupe
from data_pipeline.shards import Manifest, TokenShards
from data_pipeline.sources.document import Document, held_out
from data_pipeline.tokenizer import load_tokenizer


def texts(directory):
    """Every document of prepared data, decoded."""
    shards, tokenizer = TokenShards.open(directory, "full"), load_tokenizer(directory)
    spans = [shards.document(number) for number in range(shards.num_documents)]
    return [tokenizer.decode(shards.read(first, length)) for first, length in spans]


@pytest.mark.every_dose
@pytest.mark.long
@settings(deadline=None, max_examples=50)  # every file is synced to the disk
@given(
    units=st.lists(st.lists(st.integers(0, 20), max_size=30), max_size=6),
    at_once=st.sampled_from([1, 3, 50]),
)
def test_all_but_the_first_are_found(units, at_once):
    seen, wanted = set(), []
    for unit in units:
        wanted.append([value in seen or seen.add(value) is not None for value in unit])
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(dedupe, "_COMPARED", at_once):
        digests = [dedupe.Digests(Path(folder), number) for number in range(len(units))]
        for each, unit in zip(digests, units):
            each.save(Document(str(value), "") for value in unit)
        dedupe.compare(Path(folder), len(units), Path(folder))
        before = {path.name: path.stat().st_mtime_ns for path in Path(folder).iterdir()}
        dedupe.compare(Path(folder), len(units), Path(folder))
        assert {path.name: path.stat().st_mtime_ns for path in Path(folder).iterdir()} == before
        assert [[bool(flag) for flag in each.repeated()] for each in digests] == wanted


def test_what_makes_documents_the_same():
    text = dedupe.digest(Document("ab", "a:1"))
    assert len(text) == 16 and text == dedupe.digest(
        Document("ab", "b:2", "byte order mark removed")
    )
    ids = [
        dedupe.digest(Document(None, "", tokens=np.array(values, kind)))
        for values, kind in (([1, 2], "u2"), ([1, 2], "i4"))
    ]
    assert ids[0] == ids[1] != dedupe.digest(Document(None, "", tokens=np.array([2, 1])))
    spans = [
        [("ab", True)],
        [("ab", False)],
        [("a", True), ("b", True)],
        [("a", True), ("b", False)],
    ]
    assert (
        len({dedupe.digest(Document(None, "", spans=each)) for each in spans} | {text, ids[0]}) == 6
    )


@pytest.mark.long
@pytest.mark.processes
def test_the_first_stays_and_the_others_are_counted(tmp_path, capsys):
    kept = [f"document {number} " * 20 for number in range(2000)]
    lines = [
        json.dumps({"text": kept[number % 2000], "n": number}) + "\n" for number in range(5000)
    ]
    (tmp_path / "b.jsonl").write_text("".join(lines))
    (tmp_path / "a.txt").write_text(kept[7])
    command = [
        "--text",
        f"{tmp_path}/a.txt",
        "--jsonl",
        f"{tmp_path}/b.jsonl",
        "--dedupe",
        "--workers",
    ]
    assert prepare.main([str(tmp_path / "one"), *command, "1"]) == 0
    shown = capsys.readouterr().out
    assert prepare.main([str(tmp_path / "two"), *command, "2"]) == 0
    assert texts(tmp_path / "one") == [kept[7], *kept[:7], *kept[8:]]
    for path in (tmp_path / "one").rglob("*"):
        assert (
            path.is_dir()
            or path.read_bytes()
            == (tmp_path / "two" / path.relative_to(tmp_path / "one")).read_bytes()
        )
    problem = Manifest.load(tmp_path / "one").problems["duplicate of an earlier document"]
    assert (
        problem["count"] == 3001
        and problem["examples"][0] == f"{tmp_path}/b.jsonl:line 8 after byte 0"
    )
    assert (
        "3,001 x duplicate of an earlier document" in shown
        and "b.jsonl:line 8 after byte 0" in shown
    )
    # the choice is part of the settings: another one is refused, in both directions
    assert prepare.main([str(tmp_path / "one"), *command[:4]]) == 64
    assert (
        "dedupe: there True, requested None" in (error := capsys.readouterr().err)
        and "--overwrite" in error
    )
    assert prepare.main([str(tmp_path / "plain"), *command[:4]]) == 0
    assert len(texts(tmp_path / "plain")) == 5001
    assert prepare.main([str(tmp_path / "plain"), *command[:5]]) == 64
    assert "dedupe: there None, requested True" in capsys.readouterr().err


@pytest.mark.parametrize("by", ["document", "name", "tail"])
def test_no_text_is_on_both_sides_of_a_hold_out(tmp_path, by):
    """The same texts in lines that differ, in files of other names, and at both ends of a file:
    train keeps them."""
    if by == "name":
        for number in range(60):
            (tmp_path / f"a{number}.txt").write_text(f"text {number % 20}")
        side = {path.read_text(): set() for path in tmp_path.iterdir()}
        for path in tmp_path.iterdir():
            side[path.read_text()].add(held_out(path.name, 0.4))
        command = ["--text", f"{tmp_path}/*.txt", "--holdout", "0.4"]
    else:
        lines = [
            json.dumps({"text": f"text {number % 20}", "n": number}) + "\n" for number in range(50)
        ]
        lines += [json.dumps({"text": "last"}) + "\n"]
        (tmp_path / "a.jsonl").write_text("".join(lines))
        command = ["--jsonl", f"{tmp_path}/a.jsonl", "--holdout", "0.4", "--holdout-by", by]
        side = {f"text {number}": set() for number in range(20)} | {"last": set()}
        for number, line in enumerate(lines):
            in_eval = held_out(line.rstrip().encode(), 0.4) if by == "document" else number > 30
            side[json.loads(line)["text"]].add(in_eval)
    assert any(len(sides) == 2 for sides in side.values())  # without --dedupe it would leak
    assert prepare.main([str(tmp_path / "out"), *command, "--dedupe", "--workers", "1"]) == 0
    train, held = texts(tmp_path / "out/train"), texts(tmp_path / "out/eval")
    assert sorted(train) == sorted(text for text, sides in side.items() if False in sides)
    assert sorted(held) == sorted(text for text, sides in side.items() if sides == {True}) and held


def test_a_tokenizer_is_trained_on_what_is_kept(tmp_path):
    (tmp_path / "a.txt").write_text("one two one two three")
    (tmp_path / "b.txt").write_text("zzzzz zzzzz yyy")
    for name, copies in (("few", 1), ("many", 30)):
        for number in range(copies):
            (tmp_path / f"c{number}.txt").write_text("zzzzz zzzzz yyy")
        assert (
            prepare.main(
                [
                    str(tmp_path / name),
                    "--text",
                    f"{tmp_path}/*.txt",
                    "--dedupe",
                    "--tokenizer",
                    "bpe:262",
                ]
            )
            == 0
        )
    assert (tmp_path / "few/tokenizer.json").read_bytes() == (
        tmp_path / "many/tokenizer.json"
    ).read_bytes()
    assert (
        texts(tmp_path / "few")
        == texts(tmp_path / "many")
        == ["one two one two three", "zzzzz zzzzz yyy"]
    )


def test_nothing_left_to_hold_out_says_why(tmp_path, capsys):
    (tmp_path / "b.jsonl").write_text('{"text": "x"}\n' * 9 + '{"text": "x"}\n')
    out = str(tmp_path / "out")
    command = [
        out,
        "--jsonl",
        f"{tmp_path}/b.jsonl",
        "--holdout",
        "0.2",
        "--holdout-by",
        "tail",
        "--dedupe",
    ]
    assert prepare.main([*command, "--workers", "1"]) == 65
    error = capsys.readouterr().err
    assert "eval: the input holds no text at all (2 x duplicate of an earlier document" in error
    assert "Give other input, or no --dedupe." in error
