"""Tokens and chat templates that files beside a tokenizer.json declare.

Ids are those of transformers 5.24.
"""

import json

import pytest

from data_pipeline.base.errors import DataError
from data_pipeline.chat.chat import own_sources
from data_pipeline.tokenizer import (
    BESIDE,
    load_tokenizer,
    named_tokens,
    read_settings,
    tokenizer_path,
    train_bpe,
    unused_tokenizers,
)

BPE = train_bpe(["the cat sat on the mat\n"] * 20, 270)
FIRST = BPE.vocab_size
TURN = "<|im_start|>"
END = "<|im_end|>"


def written(directory, **files):
    directory.mkdir(exist_ok=True)
    BPE.save(directory)
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return load_tokenizer(directory)


DECODER = {
    str(FIRST): {"content": TURN, "special": True},
    str(FIRST + 1): {"content": END, "special": True},
}


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": {"added_tokens_decoder": DECODER}},
        {
            "added_tokens": {TURN: FIRST, END: FIRST + 1},
            "special_tokens_map": {"additional_special_tokens": [TURN, END]},
        },
        {"tokenizer_config": {"extra_special_tokens": [TURN, END]}},
        {"tokenizer_config": {"extra_special_tokens": {"turn_token": TURN, "end_token": END}}},
        {"tokenizer_config": {"additional_special_tokens": [{"content": TURN}, END]}},
        {"special_tokens_map": {"bos_token": {"content": TURN}, "pad_token": END}},
        {"tokenizer_config": {"bos_token": TURN, "image_token": END}},
    ],
)
def test_tokens_that_only_files_beside_declare(tmp_path, files):
    tokenizer = written(tmp_path / "a", **files)
    assert (tokenizer.special[TURN], tokenizer.special[END]) == (FIRST, FIRST + 1)
    ids, _, _ = tokenizer.locate(f"{TURN}the cat{END}")
    assert ids[0] == FIRST and ids[-1] == FIRST + 1
    # Text can't spell them, and what is saved is the same tokenizer.
    assert not {FIRST, FIRST + 1} & set(tokenizer.encode(TURN + END).tolist())
    assert tokenizer.sha256 != BPE.sha256
    (tmp_path / "b").mkdir()
    tokenizer.save(tmp_path / "b")
    again = load_tokenizer(tmp_path / "b")
    assert (again.sha256, again.beside) == (tokenizer.sha256, tokenizer.beside)


def test_flags_beside_replace_those_of_the_tokenizer(tmp_path):
    end = BPE.eod_id
    decoder = {str(end): {"content": "<|endoftext|>", "special": True, "lstrip": True}}
    tokenizer = written(tmp_path, tokenizer_config={"added_tokens_decoder": decoder})
    assert tokenizer.inner.get_added_tokens_decoder()[end].lstrip
    assert tokenizer.sha256 != BPE.sha256 and tokenizer.vocab_size == FIRST


def test_special_tokens_map_counts_unless_the_decoder_is_there(tmp_path):
    config = {"eos_token": "<a>"}
    more = {"eos_token": "<b>"}
    tokenizer = written(tmp_path, tokenizer_config=config, special_tokens_map=more)
    assert tokenizer.special["<b>"] == tokenizer.eod_id == FIRST
    config["added_tokens_decoder"] = {}
    tokenizer = written(tmp_path, tokenizer_config=config, special_tokens_map=more)
    assert tokenizer.special["<a>"] == tokenizer.eod_id == FIRST
    assert named_tokens(read_settings(tmp_path / "tokenizer.json")) == {"eos_token": "<a>"}


@pytest.mark.parametrize(
    ("i", "token"),
    [
        (FIRST + 7, {"content": TURN}),
        (5, {"content": TURN}),
        (FIRST, {"content": "<|endoftext|>"}),
        ("x", {"content": TURN}),
        (FIRST, {"content": 3}),
        (FIRST, "text"),
        (FIRST, {"content": TURN, "special": "yes"}),
    ],
)
def test_declarations_that_can_not_be_kept_are_refused(tmp_path, i, token):
    with pytest.raises(DataError):
        written(tmp_path, tokenizer_config={"added_tokens_decoder": {str(i): token}})


def test_precedence_of_chat_templates(tmp_path):
    listed = [{"name": "default", "template": "list"}, {"name": "tool_use", "template": "tools"}]
    written(tmp_path, chat_template={"chat_template": "processor"}, tokenizer_config={})
    path = tokenizer_path(tmp_path)

    def found():
        return own_sources(path, read_settings(path))[0]

    assert found() == {"default": "processor"}
    written(tmp_path, tokenizer_config={"chat_template": listed})
    assert found() == {"default": "list", "tool_use": "tools"}
    (tmp_path / "chat_template.jinja").write_text("file")
    assert found() == {"default": "file"}
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("more")
    assert found() == {"default": "file", "tool_use": "more"}
    beside = load_tokenizer(tmp_path).beside
    assert "additional_chat_templates/tool_use.jinja" in beside and "chat_template.json" in BESIDE


@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "Qwen2TokenizerFast", "LlamaTokenizer"])
def test_vocabulary_with_merges(tmp_path, kind):
    model = json.loads(BPE.content)["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
    if kind == "LlamaTokenizer":
        with pytest.raises(DataError):
            load_tokenizer(tmp_path)
        return
    tokenizer = load_tokenizer(tmp_path)
    text = "the cat's mat 123\n\nsat"
    if kind == "GPT2Tokenizer":
        assert tokenizer.encode(text).tolist() == BPE.encode(text).tolist()
    assert tokenizer.decode(tokenizer.encode(text)) == text and tokenizer.eod_id == BPE.eod_id
    BPE.save(tmp_path)
    assert unused_tokenizers(tmp_path) == ["vocab.json"]


def test_other_files_are_refused_with_what_to_do(tmp_path):
    tekken = {"config": {"pattern": ""}, "vocab": [{"rank": 0, "token_bytes": "AA=="}]}
    (tmp_path / "tekken.json").write_text(json.dumps(tekken))
    with pytest.raises(DataError, match=r"tokenizer\.json of the same repository"):
        load_tokenizer(tmp_path)
    (tmp_path / "tekken.json").unlink()
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n"
    (tmp_path / "tokenizer.model").write_text(pointer)
    with pytest.raises(DataError, match="git lfs pull"):
        load_tokenizer(tmp_path)
