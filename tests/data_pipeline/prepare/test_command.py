"""prepare: the same bytes whatever happens, every odd document accounted for, and errors that say
what to do."""

import gzip
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from data_pipeline import shards
from data_pipeline.base.errors import DataError
from data_pipeline.prepare import build, dedupe
from data_pipeline.prepare import command as prepare
from data_pipeline.shards import Manifest, TokenShards
from data_pipeline.sources import reading
from data_pipeline.sources import text as text_source
from data_pipeline.sources.document import InputOptions, held_out
from data_pipeline.tokenizer import load_tokenizer
from tests.support.shared import WORDS


def contents(directory):
    """Every file below a directory, by relative name."""
    return {
        str(p.relative_to(directory)): p.read_bytes()
        for p in sorted(directory.rglob("*"))
        if p.is_file()
    }


def texts(directory):
    """Every document of prepared data, decoded."""
    shards, tokenizer = TokenShards.open(directory, "full"), load_tokenizer(directory)
    spans = [shards.document(number) for number in range(shards.num_documents)]
    return [tokenizer.decode(shards.read(first, length)) for first, length in spans]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """40 text files in folders and a JSONL file, 1.3 MB together."""
    rng = random.Random(3)
    folder = tmp_path_factory.mktemp("corpus")

    def words(count):
        return " ".join(rng.choices(WORDS, k=count)) + "\n"

    for number in range(40):
        path = folder / f"part{number % 3}" / f"text{number}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(words(12) for _ in range(rng.randrange(1, 400))))
    with open(folder / "lines.jsonl", "w") as file:
        for _ in range(4000):
            file.write(json.dumps({"text": words(rng.randrange(1, 80)), "n": 1}) + "\n")
    return folder


def arguments(corpus, out, *more):
    inputs = ["--text", f"{corpus}/**/*.txt", "--jsonl", f"{corpus}/*.jsonl"]
    return [str(out), *inputs, "--tokenizer", "bpe:400", "--holdout", "0.1", *more]


@pytest.fixture(scope="module")
def reference(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("reference") / "out"
    assert prepare.main(arguments(corpus, out, "--workers", "1")) == 0
    return contents(out)


@pytest.mark.every_dose
@pytest.mark.long
def test_every_document_arrives_once_in_order(corpus, tmp_path, capsys):
    out = tmp_path / "out"
    assert prepare.main(arguments(corpus, out, "--workers", "1")) == 0
    parts = {part: texts(out / part) for part in ("train", "eval")}
    files = sorted(corpus.rglob("*.txt"), key=lambda path: str(path.relative_to(corpus)))
    lines = (corpus / "lines.jsonl").read_bytes().splitlines()
    for part in parts:
        wanted = [
            f.read_text()
            for f in files
            if held_out(str(f.relative_to(corpus)), 0.1) == (part == "eval")
        ]
        wanted += [
            json.loads(line)["text"] for line in lines if held_out(line, 0.1) == (part == "eval")
        ]
        assert parts[part] == wanted
        manifest = Manifest.load(out / part)
        assert manifest.num_documents == len(wanted)
        assert manifest.text_bytes == sum(len(text.encode()) for text in wanted)
    assert 300 < len(parts["eval"]) < 500
    assert len(Manifest.load(out / "train").shards) > 5
    shown = capsys.readouterr().out
    assert f"{len(parts['train']):,}" in shown and "complete" in shown
    assert prepare.main(["verify", str(out)]) == 0
    assert prepare.main(["show", str(out / "eval"), "--document", "2"]) == 0
    assert capsys.readouterr().out.endswith(parts["eval"][2])


@pytest.mark.long
@pytest.mark.every_dose
@pytest.mark.processes
@pytest.mark.parametrize("workers", [2, 3])
def test_same_bytes_for_any_number_of_workers(corpus, reference, tmp_path, workers):
    assert prepare.main(arguments(corpus, tmp_path / "out", "--workers", str(workers))) == 0
    assert contents(tmp_path / "out") == reference


@pytest.fixture(scope="module")
def packed(corpus, tmp_path_factory):
    """Options of inputs that are compressed and full of duplicates, and what becomes of them."""
    folder = tmp_path_factory.mktemp("packed")
    lines = (corpus / "lines.jsonl").read_bytes().splitlines(keepends=True)
    for number in range(6):
        with gzip.open(folder / f"lines{number}.jsonl.gz", "wb") as file:
            file.writelines(lines[number * 500 : number * 500 + 1000])
    inputs = [
        "--jsonl",
        f"{folder}/*.gz",
        f"{corpus}/*.jsonl",
        "--dedupe",
        "--tokenizer",
        "bpe:400",
        "--holdout",
        "0.1",
    ]
    out = tmp_path_factory.mktemp("reference") / "out"
    assert prepare.main([str(out), *inputs, "--workers", "1"]) == 0
    kept = texts(out / "train") + texts(out / "eval")
    assert len(kept) == len(set(kept)) == len({json.loads(line)["text"] for line in lines})
    return inputs, contents(out)


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("which", ["plain", "packed, without duplicates"])
def test_killed_at_any_instant_it_goes_on_to_the_same_bytes(
    corpus, reference, packed, tmp_path, which
):
    """One build, killed again and again at random instants, with what it leaves checked each
    time."""
    out, rng, kills = tmp_path / "out", random.Random(11), 0
    inputs, wanted = (arguments(corpus, out)[1:], reference) if which == "plain" else packed
    command = [sys.executable, "-m", "data_pipeline.prepare", str(out), *inputs, "--workers", "2"]
    for attempt in range(12):
        process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=Path(__file__).parents[3],
        )
        try:
            # the first kills come soon after whatever comes next: the tokenizer, the first records,
            # the first manifest
            for found in (out / ".prepare.json", *sorted(out.glob(".prepare/*/0000*.[jdr]*"))[-1:]):
                while attempt < 9 and process.poll() is None and not found.exists():
                    time.sleep(0.002)
            process.wait(timeout=rng.uniform(0.02, 0.7) if attempt < 9 else 60)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
        for part in ("train", "eval"):
            if (out / part / "manifest.json").exists():
                TokenShards.open(out / part, "full")
        if process.returncode == 0:
            break
    assert process.returncode == 0 and kills >= 3
    assert contents(out) == wanted


@pytest.mark.every_dose
@pytest.mark.long
@pytest.mark.parametrize("which", ["plain", "packed, without duplicates"])
def test_killed_inside_every_step_of_a_unit(
    corpus, reference, packed, tmp_path, monkeypatch, which
):
    """Stops at each durable write in turn, as a kill would."""
    real, out = build.write_atomic, tmp_path / "out"
    inputs, wanted = (arguments(corpus, out)[1:], reference) if which == "plain" else packed
    count = 0

    class PrepareKill(BaseException):
        pass

    def write(path, data):
        nonlocal count
        if rng.random() < 0.12:
            count += 1
            raise PrepareKill
        real(path, data)

    rng = random.Random(5)
    for module in (
        build,
        dedupe,
        prepare,
        shards.files,
        shards.manifest,
        sys.modules["data_pipeline.tokenizer.base"],
    ):
        monkeypatch.setattr(module, "write_atomic", write)
    while count < 400:
        try:
            assert prepare.main([str(out), *inputs, "--workers", "1"]) == 0
            break
        except PrepareKill:
            continue
    assert count > 5
    assert contents(out) == wanted


@pytest.mark.every_dose
@pytest.mark.long
def test_finished_output_is_left_alone(corpus, reference, tmp_path, capsys):
    copy, out = tmp_path / "corpus", tmp_path / "out"
    shutil.copytree(corpus, copy)
    assert prepare.main(arguments(copy, out, "--workers", "1")) == 0
    uid = Manifest.load(out / "train").uid
    assert (
        uid == json.loads(reference["train/manifest.json"])["uid"]
    )  # another place, the same content
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert prepare.main(arguments(copy, out)) == 0
    assert "already complete and unchanged" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    assert prepare.main(arguments(copy, out, "--on-bad", "skip")) == 64
    assert (
        "on_bad: there raise, requested skip" in (error := capsys.readouterr().err)
        and "--overwrite" in error
    )
    data = bytearray((copy / "lines.jsonl").read_bytes())
    data[12] ^= 1
    (copy / "lines.jsonl").write_bytes(data)
    assert prepare.main(arguments(copy, out)) == 64
    assert (
        "input files were written to since it was begun. Choose another OUT, or give"
        in capsys.readouterr().err
    )
    (copy / "part0" / "new.txt").write_text("one more")
    assert prepare.main(arguments(copy, out)) == 64
    assert re.search(
        r"input: there .*'files': 40,.*requested .*'files': 41,", capsys.readouterr().err
    )
    assert prepare.main(arguments(copy, out, "--overwrite", "--workers", "1")) == 0
    assert Manifest.load(out / "train").uid != uid
    (out / "train" / "tokens-00000.idx").unlink()
    assert prepare.main(arguments(copy, out)) == 65
    assert "tokens-00000.idx: can't be read" in capsys.readouterr().err
    assert prepare.main(["verify", str(out)]) == 65


def test_half_of_an_output_is_not_whole(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("".join(f"line {number}\n" for number in range(100)))
    out, given = (
        tmp_path / "out",
        [
            "--text",
            f"{tmp_path}/a.txt",
            "--holdout",
            "0.2",
            "--holdout-by",
            "tail",
            "--workers",
            "1",
        ],
    )
    assert prepare.main([str(out), *given]) == prepare.main(["verify", str(out)]) == 0
    for part in ("eval", "train"):
        (out / part / "manifest.json").rename(tmp_path / "kept")
        capsys.readouterr()
        assert prepare.main(["verify", str(out)]) == 65
        assert re.search(rf"{out}/{part}: .*Make one with", capsys.readouterr().err)
        (tmp_path / "kept").rename(out / part / "manifest.json")


BAD = [
    ("latin1.txt", b"ok\ncaf\xe9\n", "not UTF-8", 2, "ok\ncaf\ufffd\n"),
    ("nul.txt", b"a\n\nb\0c", "NUL character", 3, "a\n\nb\ufffdc"),
    ("broken.jsonl", b'{"text": "fine"}\n{"text": \n', "broken JSON", 2, None),
    ("key.jsonl", b'{"text": "fine"}\n{"body": 1}\n', "no key 'text'", 2, None),
    ("null.jsonl", b'{"text": "fine"}\n{"text": null}\n', "key 'text' is null", 2, None),
    ("number.jsonl", b'{"text": "fine"}\n{"text": 3}\n', "key 'text' is not a string", 2, None),
    ("list.jsonl", b'{"text": "fine"}\n[1]\n', "not a JSON object", 2, None),
    (
        "twice.jsonl",
        b'{"text": "fine"}\n{"text": "a", "text": "b"}\n',
        "a key occurs twice",
        2,
        None,
    ),
    (
        "inner.jsonl",
        b'{"text": "fine"}\n{"text": "a", "meta": {"k": 1, "k": 2}}\n',
        "a key occurs twice",
        2,
        None,
    ),
    (
        "nan.jsonl",
        b'{"text": "fine"}\n{"text": "a", "x": NaN}\n',
        "NaN or Infinity, which JSON does not have",
        2,
        None,
    ),
    (
        "big.jsonl",
        b'{"text": "fine"}\n{"text": "a", "x": 1e999}\n',
        "a number does not fit into a 64-bit float",
        2,
        None,
    ),
    (
        "long.jsonl",
        b'{"text": "fine"}\n{"text": "a", "x": ' + b"9" * 5000 + b"}\n",
        "a number has too many digits",
        2,
        None,
    ),
    (
        "deep.jsonl",
        b'{"text": "fine"}\n' + b"[" * 100_000 + b"\n",
        "lists or objects are more than 200 deep",
        2,
        None,
    ),
    ("bytes.jsonl", b'{"text": "fine"}\n{"text": "\xff"}\n', "not UTF-8", 2, "\ufffd"),
    (
        "surrogate.jsonl",
        b'{"text": "fine"}\n{"text": "a\\ud800b"}\n',
        "lone surrogate",
        2,
        "a\ufffd\ufffd\ufffdb",
    ),
    ("nulls.jsonl", b'{"text": "fine"}\n{"text": "a\\u0000b"}\n', "NUL character", 2, "a\ufffdb"),
]


@pytest.mark.every_dose
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "data", "problem", "line", "mended"), BAD, ids=[bad[0] for bad in BAD]
)
def test_documents_that_are_not_clean(tmp_path, capsys, name, data, problem, line, mended):
    (tmp_path / name).write_bytes(data)
    (tmp_path / f"z{name}").write_bytes(b'{"text": "good"}')
    out = tmp_path / "out"
    command = [
        str(out),
        "--jsonl" if name.endswith("jsonl") else "--text",
        f"{tmp_path}/*{name}",
        "--on-bad",
    ]
    assert prepare.main([*command, "raise"]) == 65
    error = capsys.readouterr().err
    keys = r"(; its keys are \w+(\. Name the one .*--key \w+)?)?"
    assert re.search(
        rf"{name}:{line}: {problem}{keys}\. Correct the file, or give --on-bad skip or replace\.",
        error,
    )
    assert "Traceback" not in error
    good = ["fine", "good"] if name.endswith("jsonl") else ['{"text": "good"}']
    for mode, wanted in (
        ("skip", good),
        ("replace", [*good[:-1], mended, good[-1]] if mended else good),
    ):
        assert prepare.main([*command, mode, "--overwrite"]) == 0
        where, left_out = f"{tmp_path}/{name}:{line}", int(mended is None or mode == "skip")
        share = f"{1 / (len(wanted) + left_out):.2%}"
        assert re.search(
            rf" 1 x {problem} \({share}\), such as\n +{re.escape(where)}\n", capsys.readouterr().out
        )
        assert texts(out) == wanted
        assert Manifest.load(out).problems == {
            problem: {"count": 1, "left_out": left_out, "examples": [where]}
        }


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            {"id": "7", "body of it": "long text"},
            "no key 'text'; its keys are id, body of it. Name .* --key 'body of it'. Correct",
        ),
        (
            {"text": ["a"], "content": "b"},
            "key 'text' is not a string; its keys are text, content. Name .* --key content. Correct",
        ),
        ({"text": None, "n": 1}, "key 'text' is null; its keys are text, n. Correct"),
        ({}, "no key 'text', and no other. Correct"),
        (
            {f"k{i:02d}" * 30: 1 for i in range(99)},
            r"its keys are (k00){20}, .*, (k11){20} and more. Correct",
        ),
    ],
)
def test_a_missing_text_field_names_those_there_are_and_the_option(tmp_path, capsys, line, said):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + json.dumps(line))
    command = [str(tmp_path / "out"), "--jsonl", f"{tmp_path}/a.jsonl"]
    assert prepare.main(command) == 65
    assert re.search(f"a.jsonl:2: .*{said} the file", capsys.readouterr().err)
    assert prepare.main([*command, "--on-bad", "skip"]) == 0
    (kind,) = Manifest.load(tmp_path / "out").problems
    assert "keys are" not in kind, "documents with other keys are of one kind"


def test_the_mend_of_a_missing_part_makes_that_part(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    for part in ("train", "eval"):
        with pytest.raises(
            DataError,
            match=rf"{tmp_path}/web/{part}: .*prepare {tmp_path}/web --text 'GLOB' --holdout 0.05`",
        ):
            Manifest.load(tmp_path / "web" / part)
    assert prepare.main([str(tmp_path / "web"), "--text", f"{tmp_path}/a.txt"]) == 0
    with pytest.raises(
        DataError,
        match=rf"but {tmp_path}/web is, made without --holdout. Name that, or make both parts by",
    ):
        Manifest.load(tmp_path / "web" / "train")
    (tmp_path / "web").rename(tmp_path / "train")
    with pytest.raises(
        DataError, match=rf"but its folders train have. Name one of them: {tmp_path}/train\."
    ):
        Manifest.load(tmp_path)


def test_harmless_oddities_are_kept_or_counted(tmp_path, capsys):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfmark\r\nkept\r\n")
    (tmp_path / "b.txt").write_bytes(b"")
    (tmp_path / "c.txt").write_bytes(b" \n\t")
    (tmp_path / "é 東.txt").write_text("name")
    (tmp_path / "d.jsonl").write_bytes(
        b'\xef\xbb\xbf{"text": "first"}\r\n\n{"text": ""}\n{"text": "last\\r\\n"}'
    )
    with gzip.open(tmp_path / "e.jsonl.gz", "wb") as file:
        file.write(b'{"text": "packed"}\n')
    out = tmp_path / "öut"
    command = [str(out), "--text", f"{tmp_path}/*.txt", "--jsonl", f"{tmp_path}/*.jsonl*"]
    assert prepare.main(command) == 0
    assert texts(out) == ["mark\r\nkept\r\n", "name", "first", "last\r\n", "packed"]
    shown = capsys.readouterr().out
    assert "4 x empty, or only whitespace" in shown and "1 x byte order mark removed" in shown
    # the output of an earlier run is not taken for input, and plain names work as well as globs
    assert (
        prepare.main([str(tmp_path / "two"), "--text", *map(str, sorted(tmp_path.glob("*.txt")))])
        == 0
    )
    assert texts(tmp_path / "two") == ["mark\r\nkept\r\n", "name"]


@pytest.mark.parametrize("content", ["", "[]", "null", '{"key": NaN}', "[" * 100_000, "\xff"])
def test_a_damaged_note_of_what_an_output_is_made_from_is_told(tmp_path, capsys, content):
    (tmp_path / "a.txt").write_text("text")
    out = tmp_path / "out"
    command = [str(out), "--text", f"{tmp_path}/a.txt"]
    assert prepare.main(command) == 0
    (out / ".prepare.json").write_text(content, encoding="latin-1")
    assert prepare.main(command) == 65
    error = capsys.readouterr().err
    assert (
        ".prepare.json: is damaged: it is not what prepare wrote. Choose another OUT, or give --overwrite."
        in error
    )
    assert prepare.main([*command, "--overwrite"]) == 0


def test_a_damaged_record_of_a_finished_unit_is_told_and_made_again(tmp_path, capsys, monkeypatch):
    (tmp_path / "a.txt").write_text("text")
    out = tmp_path / "out"
    command = [str(out), "--text", f"{tmp_path}/a.txt"]

    def interrupt(self, directory):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Manifest, "save", interrupt)
        assert prepare.main(command) == 75
    (record,) = out.glob(".prepare/all/*.json")
    good = record.read_bytes()
    for bad in (b"", b"[]", b"{", good.replace(b'"tokens": 5', b'"tokens": 6'), b"[" * 100_000):
        assert bad != good
        record.write_bytes(bad)
        assert prepare.main(command) == 74
        assert "00000.json: is not the record that prepare wrote" in capsys.readouterr().err
    record.unlink()
    assert prepare.main(command) == 0 and texts(out) == ["text"]


def test_broken_archive_and_unreadable_file(tmp_path, capsys, monkeypatch):
    (tmp_path / "good.jsonl").write_text('{"text": "good"}\n')
    packed = gzip.compress(b'{"text": "one"}\n' * 1000)
    (tmp_path / "torn.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    command = [str(tmp_path / "out"), "--jsonl", f"{tmp_path}/*.jsonl*"]
    assert prepare.main(command) == 65
    assert "can't be read (Compressed file ended" in capsys.readouterr().err
    assert prepare.main([*command, "--on-bad", "skip"]) == 0
    assert texts(tmp_path / "out")[0] == "good"

    def refuse(path):
        raise PermissionError(13, "Permission denied", path)

    (tmp_path / "secret.txt").write_text("x")
    monkeypatch.setattr(reading, "_LocalFile", refuse)
    assert prepare.main([str(tmp_path / "other"), "--text", f"{tmp_path}/secret.txt"]) == 65
    assert (
        "secret.txt:1: can't be read (Permission denied). Correct the file, or give --on-bad skip"
        in capsys.readouterr().err
    )


def test_commands_that_can_not_be_done(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"type": "chars", "characters": "etx", "eod": False})
    )
    text, out = ["--text", f"{tmp_path}/a.txt"], str(tmp_path / "out")
    for command, code, message in (
        ([], 64, "required: OUT"),
        ([out], 64, "no input. Give --text GLOB"),
        ([out, *text, "--wrong"], 64, "unrecognized arguments: --wrong"),
        ([out, *text, "--holdout", "5"], 64, "--holdout 5.0: must be between 0 and 1"),
        ([out, *text, "--workers", "0"], 64, "--workers 0: must be at least 1"),
        ([out, *text, "--tokenizer", "bpe"], 64, "Give bpe:4096, for example"),
        ([out, *text, "--tokenizer", "bpe:100"], 64, "at least 257"),
        ([out, *text, "--tokenizer", "bpe:0"], 64, "at least 257.*Give bpe:4096"),
        ([out, *text, "--tokenizer", "bpe:"], 64, "number of entries. Give bpe:4096"),
        ([out, *text, "--tokenizer", "bpe:-5"], 64, "number of entries. Give bpe:4096"),
        ([out, *text, "--tokenizer", "bpe:1e3"], 64, "number of entries. Give bpe:4096"),
        (
            [out, *text, "--tokenizer", "bpe:99999999999999"],
            64,
            "bpe:99999999999999 must have .* at most 16,777,216",
        ),
        ([out, *text, "--tokenizer", "bpe:" + "9" * 5000], 64, "at most 16,777,216"),
        (
            [out, *text, "--tokenizer", "absent.json"],
            65,
            "tokenizer=absent.json: can't be read.*or `bytes`",
        ),
        (
            [out, *text, "--tokenizer", str(tmp_path)],
            65,
            "no end-of-document token.*Name it as eos_token.*--eod none",
        ),
        (
            [out, *text, "--holdout", "0.01"],
            65,
            "nothing is left for eval, out of 1 files.*--holdout-by tail",
        ),
        ([out, "--text", f"{tmp_path}/*.md"], 65, "matches no file. Check the path; quote globs"),
        ([out, "--text", f"{tmp_path}/b.txt"], 65, "matches no file"),
        (
            [out, "--text", str(tmp_path)],
            65,
            r"is a directory. Name its files: --text '.*/\*\*/\*'",
        ),
        (
            [out, "--text", f"{tmp_path}/empty.txt"],
            65,
            "holds no text at all.*1 x empty.*Give other input",
        ),
        ([f"{tmp_path}/a.txt", *text], 64, "is a file. Name a directory"),
        ([str(tmp_path), *text], 64, "which prepare did not make. Choose a new or empty directory"),
        (["verify", out], 65, "Make one with"),
        (["show", f"{tmp_path}/absent"], 65, "Make one with"),
    ):
        assert prepare.main(command) == code, command
        error = capsys.readouterr().err
        assert re.search(message, error, re.DOTALL), (message, error)
        assert "Traceback" not in error


def test_characters_and_the_held_out_tail(tmp_path, capsys):
    lines = [f"line {number}\n" for number in range(100)]
    (tmp_path / "play.txt").write_text("".join(lines) + "Z")
    command = [
        str(tmp_path / "out"),
        "--text",
        f"{tmp_path}/play.txt",
        "--tokenizer",
        "chars",
        "--holdout",
        "0.2",
    ]
    assert prepare.main([*command, "--holdout-by", "tail"]) == 65
    assert (
        "play.txt:82: 'Z' (U+005A): character without an id in the tokenizer. Correct the file, or give --on-bad"
        in capsys.readouterr().err
    )
    assert prepare.main([*command, "--holdout-by", "tail", "--on-bad", "replace"]) == 0
    (train,), (held,) = texts(tmp_path / "out/train"), texts(tmp_path / "out/eval")
    assert train + held == "".join(lines) and 0.15 < len(held) / len(train + held) < 0.25
    shards = TokenShards.open(tmp_path / "out/train")
    assert shards.vocab_size == len(set(train)) and shards.manifest.eod == "none"
    assert shards.num_tokens == len(train)


@pytest.mark.every_dose
@pytest.mark.long
def test_document_longer_than_a_shard_and_given_tokenizer(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 100_000)
    (tmp_path / "b.txt").write_text("y" * 10)
    out = tmp_path / "out"
    assert prepare.main([str(out), "--text", f"{tmp_path}/?.txt"]) == 0
    assert [shard.tokens for shard in Manifest.load(out).shards] == [100_001, 11]
    assert sorted(TokenShards.open(out).windows(np.array([0]), 100_012)[1].tolist()) == [0, 100_001]
    assert (
        prepare.main(
            [str(tmp_path / "again"), "--text", f"{tmp_path}/?.txt", "--tokenizer", str(out)]
        )
        == 0
    )
    assert Manifest.load(tmp_path / "again").tokenizer == Manifest.load(out).tokenizer


def test_full_disk_and_interruption_say_how_to_go_on(tmp_path, capsys, monkeypatch):
    (tmp_path / "a.txt").write_text("text")
    for error, code, message in (
        (
            OSError(28, "No space left on device"),
            74,
            "error: No space left on device. Free space or restore access, then run the same",
        ),
        (
            KeyboardInterrupt(),
            75,
            "interrupted. Run the same command again: it goes on where it was.",
        ),
    ):

        def fail(*args, error=error, **kwargs):
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(build, "ShardWriter", fail)
            assert prepare.main([str(tmp_path / "out"), "--text", f"{tmp_path}/a.txt"]) == code
        assert message in capsys.readouterr().err and not (tmp_path / "out/manifest.json").exists()
    assert prepare.main([str(tmp_path / "out"), "--text", f"{tmp_path}/a.txt"]) == 0
    assert texts(tmp_path / "out") == ["text"]


def test_two_at_once_are_refused(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "out").mkdir()
    holder = os.open(tmp_path / "out", os.O_RDONLY)
    prepare.fcntl.flock(holder, prepare.fcntl.LOCK_EX)
    try:
        assert prepare.main([str(tmp_path / "out"), "--text", f"{tmp_path}/a.txt"]) == 74
    finally:
        os.close(holder)
    assert "another prepare is at work here. Wait for it" in capsys.readouterr().err


def test_standard_library_preset_is_code_without_tests():
    names = [piece.name for piece in text_source.python_stdlib("", InputOptions())]
    assert {"argparse.py", "json/decoder.py"} <= set(names) and names == sorted(names)
    assert not [
        name
        for name in names
        if {"test", "tests", "idle_test", "site-packages"} & set(name.split("/"))
    ]


def test_help_is_fast_and_shows_examples():
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "data_pipeline.prepare", "--help"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    assert (
        done.returncode == 0
        and "--python-stdlib --tokenizer bpe:4096" in done.stdout
        and not done.stderr
    )
    assert (
        time.perf_counter() - started < 2
    )  # a third of a second on an idle machine; others may be busy


@pytest.mark.parametrize("verb", [[], ["tokenizer"]])
def test_a_text_that_is_too_short_for_all_entries_is_told(verb, tmp_path, capsys):
    (tmp_path / "text").write_text("low lower lowest " * 9)
    options = [str(tmp_path / "out"), "--text", str(tmp_path / "text"), "--workers", "1"]
    assert prepare.main([*verb, *options, "--tokenizer", "bpe:3000"]) == 0
    told = capsys.readouterr().out
    found = load_tokenizer(tmp_path / "out").vocab_size
    assert found < 300
    assert f"requested 3,000 entries, and the text gives {found}" in told
    assert prepare.main([*verb, *options, "--tokenizer", f"bpe:{found}", "--overwrite"]) == 0
    assert "requested" not in capsys.readouterr().out
