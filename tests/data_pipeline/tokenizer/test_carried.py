"""The tokenizer that a run carries is restored unchanged, or is refused with the file's name."""

import json
import shutil

import pytest

from data_pipeline.base.errors import DataError
from data_pipeline.prepare.command import main as prepare
from data_pipeline.tokenizer import (
    BESIDE,
    CARRIED,
    TokenizerRecord,
    carry_data,
    carry_imported,
    load_tokenizer,
)

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
ROW = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """`plain`, text; `chat` and `kind`, conversations by two templates; all of one tokenizer with
    files beside it."""
    folder = tmp_path_factory.mktemp("carried")
    for number in range(3):
        (folder / f"{number}.txt").write_text("the cat sat on the mat and the dog " * 20)
    (folder / "rows.jsonl").write_text(f"{json.dumps(ROW)}\n")
    text = ["--text", f"{folder}/*.txt", "--workers", "1"]
    assert prepare([str(folder / "plain"), *text, "--tokenizer", "bpe:300"]) == 0
    for name, more in (("chat", ""), ("kind", "{# kind #}")):
        (folder / f"{name}.jinja").write_text(TEMPLATE + more)
        words = ["--chat", f"{folder}/rows.jsonl", "--tokenizer", str(folder / "plain")]
        words += ["--chat-template", f"{folder}/{name}.jinja", "--system", name, "--workers", "1"]
        assert prepare([str(folder / name), *words]) == 0
    return folder


def carried(folder, out, *names):
    sources = {name: str(folder / name) for name in names}
    return carry_data(out / "tokenizer", sources, BESIDE)


def test_the_tokenizer_of_data_is_that_of_the_run(folder, tmp_path):
    assert carried(folder, tmp_path, "plain") == ""
    own = load_tokenizer(tmp_path)
    theirs = load_tokenizer(folder / "plain")
    assert (own.sha256, own.name, own.eod_id) == (theirs.sha256, theirs.name, theirs.eod_id)
    assert load_tokenizer(tmp_path / "tokenizer").sha256 == theirs.sha256
    found = TokenizerRecord.load(tmp_path / "tokenizer")
    assert not found.is_rendered and not found.is_imported and found.system == {}


def test_templates_of_all_sources_of_chats_are_carried(folder, tmp_path):
    carried(folder, tmp_path, "plain", "chat", "kind")
    found = TokenizerRecord.load(tmp_path / "tokenizer")
    own = tmp_path / "tokenizer"
    assert (own / "chat_template.jinja").read_text() == TEMPLATE
    assert (own / "additional_chat_templates" / "kind.jinja").read_text() == TEMPLATE + "{# kind #}"
    assert found.is_rendered and found.system == {"chat": "chat", "kind": "kind"}
    assert load_tokenizer(own).beside["chat_template.jinja"].decode() == TEMPLATE


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer.json",
        "chat_template.jinja",
        "additional_chat_templates/kind.jinja",
        CARRIED,
    ],
)
@pytest.mark.parametrize("how", ["changed", "torn", "gone"])
def test_damage_is_found_and_mended_from_the_data(folder, tmp_path, name, how):
    carried(folder, tmp_path, "chat", "kind")
    whole = (tmp_path / "tokenizer" / name).read_bytes()
    file = tmp_path / "tokenizer" / name
    if how == "gone":
        file.unlink()
    elif how == "torn":
        file.write_bytes(whole[: len(whole) // 2])
    else:
        file.write_bytes(whole[:-20] + bytes([whole[-20] ^ 1]) + whole[-19:])
    with pytest.raises(DataError) as caught:
        TokenizerRecord.load(tmp_path / "tokenizer")
    assert name in str(caught.value)
    problem = carried(folder, tmp_path, "chat", "kind")
    # A folder that was never finished is no damage.
    assert bool(problem) == ((name, how) != (CARRIED, "gone"))
    assert file.read_bytes() == whole
    TokenizerRecord.load(tmp_path / "tokenizer")
    assert carried(folder, tmp_path, "chat", "kind") == ""


def test_what_the_data_says_now_counts(folder, tmp_path):
    carried(folder, tmp_path, "chat", "kind")
    assert carried(folder, tmp_path, "plain") != ""
    assert not (tmp_path / "tokenizer" / "additional_chat_templates").exists()
    assert not TokenizerRecord.load(tmp_path / "tokenizer").is_rendered


def test_data_with_a_damaged_tokenizer_is_not_carried(folder, tmp_path):
    shutil.copytree(folder / "plain", tmp_path / "plain")
    (tmp_path / "plain" / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="not the tokenizer that this data was built with"):
        carried(tmp_path, tmp_path, "plain")
    assert not (tmp_path / "tokenizer").exists()


def test_an_imported_tokenizer_says_so(folder, tmp_path):
    carry_imported(tmp_path / "tokenizer", load_tokenizer(folder / "chat"))
    assert TokenizerRecord.load(tmp_path / "tokenizer").is_imported
    own = load_tokenizer(tmp_path)
    theirs = load_tokenizer(folder / "chat")
    assert (own.sha256, own.eod_id, own.beside) == (theirs.sha256, theirs.eod_id, theirs.beside)
