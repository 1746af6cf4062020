"""One tokenizer for several corpora: trained on all of them, used again, and the command that
re-encodes data of different tokenizers."""

import json
import re
import shlex
from pathlib import Path

import pytest

from data_pipeline.base.errors import ConfigError
from data_pipeline.config import DataConfig, SourceConfig
from data_pipeline.loader.loader import open_training
from data_pipeline.loader.one_tokenizer import remake_command, require_one_tokenizer
from data_pipeline.prepare import command as prepare
from data_pipeline.shards import Manifest, TokenShards
from data_pipeline.tokenizer import load_tokenizer


@pytest.fixture(autouse=True)
def corpora(tmp_path, monkeypatch):
    """Two folders of text, in the working directory."""
    for name, word in (("web", "page"), ("code", "return")):
        (tmp_path / name).mkdir()
        for number in range(20):
            (tmp_path / name / f"{number}.txt").write_text(f"{word} {number} " * 50)
    monkeypatch.chdir(tmp_path)


def made(*arguments):
    return prepare.main([*map(str, arguments), "--workers", "1"])


def open_both(web="data/web", code="data/code"):
    sources = {"web": SourceConfig(web), "code": SourceConfig(code)}
    return open_training(DataConfig(sources=sources, seq_length=16, batch_size=2), 0, 5)


@pytest.mark.parametrize("spec", ["bpe:280", "chars"])
def test_a_tokenizer_of_several_inputs_is_used_for_each(tmp_path, capsys, spec):
    assert (
        made("tokenizer", "data/both", "--text", "web/*.txt", "code/*.txt", "--tokenizer", spec)
        == 0
    )
    said = capsys.readouterr().out
    size = load_tokenizer("data/both").vocab_size
    assert (
        f"data/both: complete, {size:,} entries. Use it: python -m data_pipeline.prepare OUT ... --tokenizer"
        in said
    )
    assert sorted(path.name for path in (tmp_path / "data/both").iterdir()) == [
        ".prepare.json",
        "tokenizer.json",
    ]
    content = (tmp_path / "data/both/tokenizer.json").read_bytes()
    assert made("data/whole", "--text", "web/*.txt", "code/*.txt", "--tokenizer", spec) == 0
    assert (tmp_path / "data/whole/tokenizer.json").read_bytes() == content
    for name in ("web", "code"):
        eod = ["--eod", "none"] if spec == "chars" else []
        assert (
            made(f"data/{name}", "--text", f"{name}/*.txt", "--tokenizer", "data/both", *eod) == 0
        )
    assert open_both().vocab_size == size


def test_a_tokenizer_is_made_once_and_never_over_something_else(capsys):
    command = ["tokenizer", "data/both", "--text", "web/*.txt", "--tokenizer", "bpe:280"]
    assert made(*command) == made(*command) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert made("tokenizer", "data/both", "--text", "code/*.txt", "--tokenizer", "bpe:280") == 64
    assert "was made from other input or settings" in capsys.readouterr().err
    assert made("data/both", "--text", "web/*.txt", "--tokenizer", "bpe:280") == 64
    assert "makes: there tokenizer, requested None" in capsys.readouterr().err
    for spec in ([], ["--tokenizer", "bytes"]):
        assert made("tokenizer", "data/other", "--text", "web/*.txt", *spec) == 64
        assert (
            "there is nothing to train. Give --tokenizer bpe:ENTRIES or chars."
            in capsys.readouterr().err
        )


def test_what_is_held_out_is_not_trained_on(tmp_path):
    for name in ("0", "1"):
        (tmp_path / "web" / f"{name}.txt").write_text("é" if name == "0" else "ü")
    held = ["--text", "web/*.txt", "--tokenizer", "chars", "--holdout", "0.4"]
    assert (
        made("data/web", *held, "--on-bad", "skip")
        == made("tokenizer", "data/chars", *held, "--on-bad", "skip")
        == 0
    )
    assert load_tokenizer("data/chars").sha256 == load_tokenizer("data/web").sha256, (
        "the part train of data/web has one"
    )


def test_the_error_prints_the_command_that_mends_it(tmp_path, capsys):
    assert (
        made("data/web", "--text", "web/*.txt", "--tokenizer", "bpe:280", "--holdout", "0.2") == 0
    )
    assert made("data/code", "--text", "code/*.txt") == 0
    with pytest.raises(ConfigError) as caught:
        open_both("data/web/train")
    assert "data.sources.code was made with tokenizer bytes (257 entries" in str(caught.value)
    (command,) = re.findall(
        r"Make data.sources.code again, in its place, .*: `(.*)`", str(caught.value)
    )
    assert command == (
        "python -m data_pipeline.prepare data/code --text 'code/*.txt' --tokenizer data/web/train --overwrite"
    )
    assert prepare.main(shlex.split(command)[3:]) == 0
    assert open_both("data/web/train").vocab_size == load_tokenizer("data/web").vocab_size


def test_a_trained_tokenizer_is_kept_before_bytes_and_that_of_sources_before_that_of_sets():
    assert made("data/web", "--text", "web/*.txt") == 0
    assert made("data/code", "--text", "code/*.txt", "--tokenizer", "bpe:280") == 0
    with pytest.raises(
        ConfigError,
        match=r"Make data\.sources\.web again.*prepare data/web .* --tokenizer data/code --over",
    ):
        open_both("data/web", "data/code")
    opened = {
        "data.sources.web": TokenShards.open("data/web"),
        "eval.sets.code": TokenShards.open("data/code"),
    }
    with pytest.raises(
        ConfigError,
        match=r"Make eval\.sets\.code again.*prepare data/code .* --tokenizer data/web --over",
    ):
        require_one_tokenizer(opened)


def manifest_of(name, kinds, command, eod=256):
    """Return the manifest of data that is never read."""
    identity = {"name": name, "sha256": name, "vocab_size": 300, "special_ids": {"eod": eod}}
    sources = [{"kind": kind} for kind in kinds]
    whole = f"python -m data_pipeline.prepare {command}"
    return Manifest(identity, "uint16", "append", 1, (), sources=sources, command=whole)


@pytest.mark.parametrize(
    ("path", "command", "kinds", "eod", "expected"),
    [
        (
            "d/train",
            "OUT --text 'a b.txt' --holdout 0.1",
            ["text"],
            3,
            "d --text 'a b.txt' --holdout 0.1 --tokenizer web",
        ),
        ("d/train", "OUT --text a", ["text"], 3, "d/train --text a --tokenizer web"),
        (
            "d",
            "OUT --tokenizer bpe:300 --jsonl a",
            ["jsonl"],
            None,
            "d --jsonl a --eod none --tokenizer web",
        ),
        ("d", "OUT --tokenizer t.json --nanogpt a", ["nanogpt"], 3, None),
        ("d", "", ["text"], 3, None),
    ],
)
def test_the_command_is_that_of_the_data_with_another_tokenizer(
    path, command, kinds, eod, expected
):
    theirs = TokenShards(Path(path), manifest_of("theirs", kinds, command), "off")
    ours = TokenShards(Path("web"), manifest_of("ours", ["text"], "OUT --text w", eod), "off")
    command = f"python -m data_pipeline.prepare {expected} --overwrite" if expected else ""
    assert remake_command(theirs, ours) == command


def test_chats_keep_their_tokenizer(tmp_path, capsys):
    tokens = json.loads(load_trained(tmp_path))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for token in ("<|im_start|>", "<|im_end|>"):
        tokens["added_tokens"].append(
            {"id": 400 + len(tokens["added_tokens"]), "content": token, "special": True} | flags
        )
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokens))
    said = {
        "messages": [
            {"role": "user", "content": "page"},
            {"role": "assistant", "content": "return"},
        ]
    }
    (tmp_path / "a.jsonl").write_text(json.dumps(said))
    assert (
        made(
            "data/web",
            "--chat",
            "a.jsonl",
            "--tokenizer",
            "tokenizer.json",
            "--chat-template",
            "chatml",
        )
        == 0
    )
    assert made("data/code", "--text", "code/*.txt") == 0
    for web, code, again in (("data/web", "data/code", "code"), ("data/code", "data/web", "web")):
        with pytest.raises(
            ConfigError,
            match=rf"Make data\.sources\.{again} again.*prepare data/code .*--tokenizer data/web",
        ):
            open_both(web, code)


def load_trained(tmp_path):
    assert made("tokenizer", "data/both", "--text", "web/*.txt", "--tokenizer", "bpe:280") == 0
    return (tmp_path / "data/both/tokenizer.json").read_text()
