"""Output for the user: the summary of a build in 80 columns, and rows with their segments and loss
mask."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from data_pipeline.config import DataConfig, SourceConfig
from data_pipeline.loader.loader import open_training
from data_pipeline.prepare import command as prepare
from data_pipeline.prepare import report
from data_pipeline.shards import Manifest, ShardWriter, TokenShards
from data_pipeline.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[3]


def make_shards(folder, lengths, masked=False):
    """Documents of letters, of these lengths with their end marks, in one shard of bytes."""
    folder.mkdir(exist_ok=True)
    tokenizer, writer = load_tokenizer("bytes"), ShardWriter(folder, "tokens-00000", 257)
    for number, length in enumerate(lengths):
        text = chr(97 + number % 26) * (length - 1)
        mask = np.arange(length - 1) >= (length - 1) // 2 if masked else None
        writer.append(tokenizer.encode(text), mask=mask, end=256)
    tokenizer.save(folder)
    identity = {
        "name": "bytes",
        "sha256": tokenizer.sha256,
        "vocab_size": 257,
        "special_ids": {"eod": 256},
    }
    Manifest(identity, "uint16", "append", sum(lengths) - len(lengths), (writer.close(),)).save(
        folder
    )
    return TokenShards.open(folder, "full")


def test_lengths_by_powers_of_two(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "_AT_ONCE", 3)
    lengths = [2, 3, 3, 4, 7, 8, 1000, 1024, 1025, 9]
    counts, longest = report.histogram(make_shards(tmp_path / "out", lengths))
    assert counts.tolist() == [0, 3, 2, 2, 0, 0, 0, 0, 0, 1, 2] and longest == 1025
    lines = list(report.bars(counts))
    assert len(lines) == 10 and lines[0].split() == ["2", "or", "more", "30.00%", "#" * 44]
    assert lines[3].split() == ["16", "or", "more", "0.00%"] and lines[-1].split()[3:] == [
        "20.00%",
        "#" * 30,
    ]
    assert max(map(len, report.bars(np.full(40, 10**12)))) <= 80


def test_summary_of_masked_data_counts_bytes_per_target(tmp_path):
    shards = make_shards(tmp_path / "out", [9, 17], masked=True)
    shown = "\n".join(report.summary(shards))
    assert shards.manifest.num_targets == 4 + 8
    assert (
        "12 of them targets, 24 bytes of text of targets\n  2.000 bytes per target (bytes, 257 entries)"
        in shown
    )
    assert "13.0 on average, 17 at most" in shown


def test_summary_of_a_build(tmp_path, capsys):
    lines = [json.dumps({"text": "word " * (number % 50 + 1)}) for number in range(100)] + [
        "{",
        "",
        '{"text": "a\\u0000b"}',
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    command = [
        str(tmp_path / "out"),
        "--jsonl",
        f"{tmp_path}/a.jsonl",
        "--on-bad",
        "replace",
        "--dedupe",
        "--workers",
        "1",
    ]
    assert prepare.main(command) == 0
    shown = capsys.readouterr().out
    assert "  left out or repaired, of 103 documents:\n" in shown
    for count, kind, share in (
        (50, "duplicate of an earlier document", "48.54"), (1, "broken JSON", "0.97"), (1, "NUL character", "0.97"),
    ):  # fmt: skip
        assert f" {count} x {kind} ({share}%), such as\n" in shown
    tokens = Manifest.load(tmp_path / "out").num_tokens
    assert f"{tokens:,} tokens made in " in shown and " tokens/s, 1 worker\n" in shown
    assert all(len(line) <= 80 for line in shown.splitlines() if str(tmp_path) not in line)
    assert prepare.main(command) == 0
    assert "nothing to do" in (again := capsys.readouterr().out) and "tokens made" not in again


@pytest.mark.parametrize("packing", ["stream", "bins", "pad"])
def test_rows_are_those_of_training(tmp_path, packing):
    shards = make_shards(tmp_path / "out", [6, 5, 9, 3], masked=True)
    source = {"a": SourceConfig(str(tmp_path / "out"))}
    config = DataConfig(
        sources=source, seq_length=7, batch_size=1, packing=packing, on_long="truncate"
    )
    trained = [batch.arrays for batch in open_training(config, seed=4, steps="auto").iterate(0)]
    shown = [
        report.row_arrays(shards, number, 7, packing, seed=4) for number in range(len(trained))
    ]
    for name in ("inputs", "targets", "segment_ids", "loss_mask"):
        assert sorted(row[name].tolist() for row in shown) == sorted(
            arrays[name][0].tolist() for arrays in trained
        )


def test_a_row_has_segments_and_a_dim_part(tmp_path):
    shards = make_shards(tmp_path / "out", [6, 5], masked=True)
    arrays = report.row_arrays(shards, 0, 14, "bins", 0)
    lines = list(report.describe_row(arrays, load_tokenizer("bytes")))
    assert [line.plain.rstrip("-") for line in lines] == [
        "--- segment 1: positions 0 to 5, 3 of 6 are targets ", "aaaaa",
        "--- segment 2: positions 6 to 10, 2 of 5 are targets ", "bbbb",
        "--- padding: 3 positions ",
    ]  # fmt: skip
    assert all(len(line.plain) <= 80 for line in lines)
    styles = [(span.start, span.end, str(span.style)) for span in lines[1].spans]
    assert styles[:2] == [(0, 2, "dim cyan italic"), (2, 5, "cyan")]
    assert str(lines[3].spans[0].style) == "dim yellow italic"
    with open("/dev/null", "w") as nowhere:
        console = Console(force_terminal=True, color_system="standard", record=True, file=nowhere)
        console.print(lines[1])
        assert "\x1b[2;3;36maa" in console.export_text(styles=True)


def test_without_colour_targets_are_in_brackets_where_not_all_are(tmp_path, monkeypatch):
    shards = make_shards(tmp_path / "out", [6, 5], masked=True)
    arrays = report.row_arrays(shards, 0, 14, "bins", 0)
    arrays["loss_mask"][6:11] = 1
    lines = [
        line.plain.rstrip("-")
        for line in report.describe_row(arrays, load_tokenizer("bytes"), marks=True)
    ]
    assert (
        lines[0] == "--- segment 1: positions 0 to 5, 3 of 6 are targets, in \u27e6\u27e7 "
        and lines[1] == "aa\u27e6aaa\u27e7"
    )
    assert (
        lines[2] == "--- segment 2: positions 6 to 10, 5 of 5 are targets " and lines[3] == "bbbb"
    )
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert prepare._has_colours(Console())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not prepare._has_colours(Console())


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (
            ["--row", "0"],
            64,
            "--seq-length None: a row has at least 1 token. Give the run's data.seq_length.",
        ),
        (
            ["--row", "0", "--seq-length", "0"],
            64,
            "--seq-length 0: a row has at least 1 token. Give the run's",
        ),
        (
            ["--row", "3", "--seq-length", "4"],
            65,
            "--row 3: .* has 3 rows of 4. Choose one of 0 to 2.",
        ),
        (["--row", "-1", "--seq-length", "4"], 65, "Choose one of 0 to 2."),
        (
            ["--row", "2", "--seq-length", "9", "--packing", "pad"],
            65,
            "has 2 rows of 9. Choose one of 0 to 1.",
        ),
        (["--row", "0", "--document", "1"], 64, "not allowed with argument"),
        (["--document", "2"], 65, "document 2 does not exist. Choose one of 0 to 1."),
    ],
)
def test_rows_that_can_not_be_shown(tmp_path, capsys, options, code, message):
    make_shards(tmp_path / "out", [6, 5])
    assert prepare.main(["show", str(tmp_path / "out"), *options]) == code
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.processes
def test_show_in_a_pipe_is_plain(tmp_path):
    make_shards(tmp_path / "out", [6, 5])
    command = [
        sys.executable,
        "-m",
        "data_pipeline.prepare",
        "show",
        str(tmp_path / "out"),
        "--row",
        "0",
        "--seq-length",
        "12",
    ]
    done = subprocess.run([*command, "--packing", "bins"], capture_output=True, text=True, cwd=ROOT)
    assert (
        done.returncode == 0
        and "\naaaaa\n" in done.stdout
        and "\x1b" not in done.stdout
        and done.stderr == "row 0: begins with token 256, the end-of-document token\n"
    )
