"""prepare --prompts: prompts as they are, or begun by a chat template, with their other columns."""

import json

import pytest

from data_pipeline.prepare import command as prepare
from data_pipeline.shards import TokenShards
from data_pipeline.tokenizer import load_tokenizer

TEMPLATE = (
    "{%- for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def write(tmp_path):
    def make(*records):
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return str(path)

    return make


@pytest.fixture
def template(tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE)
    return str(path)


def texts(out):
    """Return the content of the documents, without their end marks."""
    shards = TokenShards.open(out, "full")
    tokenizer = load_tokenizer(out)
    found = []
    for number in range(shards.num_documents):
        ids = shards.read(*shards.document(number))
        # A template's prompts end where the answer begins; plain text has an end mark behind it.
        assert (ids[-1] == tokenizer.eod_id) == (not shards.is_rendered)
        found.append(tokenizer.decode(ids))
    return found, shards.columns(range(shards.num_documents))


def test_text_stays_as_it_is_and_columns_are_kept(tmp_path, write):
    records = [
        {"prompt": "1+2=", "answer": "3", "level": 1},
        {"prompt": " a\nb", "answer": None, "tags": ["x", {"y": "\n"}]},
        {"prompt": "c"},
    ]
    out = tmp_path / "out"
    assert prepare.main([str(out), "--prompts", write(*records)]) == 0
    assert texts(out) == (["1+2=", " a\nb", "c"], records)
    assert prepare.main(["verify", str(out)]) == 0


def test_messages_end_with_the_beginning_of_the_answer(tmp_path, write, template):
    user = {"role": "user", "content": "hi"}
    records = [{"prompt": [user], "answer": "a"}, {"messages": [user, user]}, {"prompt": "how?"}]
    out = tmp_path / "out"
    options = ["--tokenizer", "bytes", "--chat-template", template]
    assert prepare.main([str(out), "--prompts", write(*records), *options]) == 0
    found, columns = texts(out)
    assert found == ["<user>hi<assistant>", "<user>hi<user>hi<assistant>", "<user>how?<assistant>"]
    assert columns[0] == records[0]
    assert columns[2] == {"prompt": [{"role": "user", "content": "how?"}]}


def test_columns_are_part_of_what_the_data_is(tmp_path, write):
    uids = set()
    for number, answer in enumerate(("3", "4", "3")):
        out = tmp_path / str(number)
        assert prepare.main([str(out), "--prompts", write({"prompt": "x", "a": answer})]) == 0
        uids.add(TokenShards.open(out).uid)
    assert len(uids) == 2
    columns = next(out.glob("*.cols"))
    columns.write_bytes(columns.read_bytes().replace(b"3", b"5"))
    assert prepare.main(["verify", str(out)]) == 65


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"text": "x"}, "no prompt: neither `prompt` nor `messages`; its keys are text"),
        ({"prompt": " "}, ""),
        ({"messages": [{"role": "user", "content": "x"}]}, "messages, and no --chat-template"),
    ],
)
def test_bad_records_are_named(tmp_path, write, capsys, record, problem):
    path = write({"prompt": "good"}, record)
    code = prepare.main([str(tmp_path / "out"), "--prompts", path])
    if not problem:
        assert code == 0
        assert texts(tmp_path / "out")[0] == ["good"]
        return
    assert code == 65
    assert f"{path}:2: {problem}" in capsys.readouterr().err


def test_an_answer_is_no_prompt(tmp_path, write, template, capsys):
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    options = ["--tokenizer", "bytes", "--chat-template", template]
    code = prepare.main([str(tmp_path / "o"), "--prompts", write({"messages": turns}), *options])
    assert code == 65
    assert "the last message is the assistant's" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--tokenizer", "chars"], "Give --eod append"),
        (["--text", "OTHER"], "--text: has documents that are no prompts"),
    ],
)
def test_what_prompts_do_not_go_with_is_refused(tmp_path, write, capsys, options, problem):
    other = tmp_path / "other.txt"
    other.write_text("x")
    options = [word.replace("OTHER", str(other)) for word in options]
    path = write({"prompt": "x"})
    assert prepare.main([str(tmp_path / "out"), "--prompts", path, *options]) == 64
    assert problem in capsys.readouterr().err


def test_prompts_are_read_in_the_forms_that_conversations_have(tmp_path, write, template):
    user = {"role": "user", "content": "hi"}
    shown = "<system>be<user>hi<assistant>"
    forms = [
        {"messages": [user], "system": "be"},
        {"prompt": "hi", "system_prompt": "be"},
        {"prompt": None, "messages": None, "conversations": [{"from": "human", "value": "hi"}]},
        {"prompt": [user | {"content": [{"type": "text", "text": "hi"}], "weight": 0}]},
    ]
    records = [forms[0], forms[1], *(form | {"system": "be"} for form in forms[2:])]
    out = tmp_path / "out"
    options = ["--tokenizer", "bytes", "--chat-template", template]
    assert prepare.main([str(out), "--prompts", write(*records), *options]) == 0
    found, columns = texts(out)
    assert found == [shown] * 4
    said = [{"role": "system", "content": "be"}, user]
    assert [record["prompt"] for record in columns] == [said] * 4


def test_a_system_message_is_not_lost_where_there_is_no_template(tmp_path, write, capsys):
    out = str(tmp_path / "out")
    record = {"prompt": "hi", "system": "be"}
    assert prepare.main([out, "--prompts", write(record), "--tokenizer", "bytes"]) == 65
    assert "there is no chat template" in capsys.readouterr().err
    assert prepare.main([out, "--prompts", write({"prompt": "hi"}, record)]) == 65
    assert "a system message, and no --chat-template" in capsys.readouterr().err


def test_columns_without_a_prompt_lead_to_a_map(tmp_path, write, capsys):
    record = {"question": "1+1?", "answer": "1 + 1 = 2\n#### 2"}
    assert prepare.main([str(tmp_path / "out"), "--prompts", write(record)]) == 65
    assert "such as with --map gsm8k" in capsys.readouterr().err
    record = {"my question": "1+1?"}
    assert prepare.main([str(tmp_path / "out"), "--prompts", write(record)]) == 65
    assert "such as with --map 'user={my question}'" in capsys.readouterr().err
