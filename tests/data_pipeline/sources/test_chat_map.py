"""--map: columns become messages by templates, and the same ones for prompts."""

import json

import pytest

from data_pipeline.base.errors import UsageError
from data_pipeline.chat.chat import ChatError
from data_pipeline.prepare import command as prepare
from data_pipeline.shards import Manifest, TokenShards
from data_pipeline.sources.chat_map import (
    MissingColumn,
    map_messages,
    map_prompt,
    read_map,
    require_answer,
    require_no_other_system,
)
from data_pipeline.tokenizer import load_tokenizer

PLAIN = (
    "{% for m in messages %}{{ '[' + m.role + ']' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + ';' }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)
GSM8K = {
    "question": "Ann has 48 clips and buys half as many. How many has she?",
    "answer": "She buys 48/2 = <<48/2=24>>24 clips.\nShe has 48+24 = $<<48+24=72>>1,072.\n#### 1,072",
}


@pytest.fixture
def files(tmp_path):
    """Writes records; and the options of `prepare` for them, with a template for any tokenizer."""

    def write(*records):
        path = tmp_path / "records.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        template = tmp_path / "plain.jinja"
        template.write_text(PLAIN)
        return path, "--tokenizer", "bytes", "--chat-template", template

    return write


def map_of(tmp_path, **values):
    """A map in a file."""
    path = tmp_path / "map.json"
    path.write_text(json.dumps(values))
    return read_map([str(path)])


def said(messages):
    """Messages as pairs."""
    return [(message["role"], message["content"]) for message in messages]


def test_templates_make_turns_of_columns(tmp_path, prepared, files):
    record = {"q": "1+1?", "a": 2, "why": {"steps": ["{so}", "x"]}, "f": [{"name": "add"}]}
    words = ["user=Add: {q}", "assistant={a}", "user=why?", "assistant={why.steps.0} {{1}}"]
    options = files(record, record | {"q": "2+0?", "f": None})
    out = prepared.out("--chat", *options, "--map", *words, "tools=f", "--system", "Be brief.")
    whole = (
        "[system]Be brief.[user]Add: 1+1?[assistant]2;[user]why?[assistant]{so} {1};"
        '[{"name": "add"}]'
    )
    assert prepared.read(out)[0].removesuffix("<|endoftext|>") == whole
    assert "2+0?" in prepared.read(out)[1]
    shards = TokenShards.open(out, "full")
    assert shards.manifest.num_targets == 2 * len("2;{so} {1};")
    settings = shards.manifest.settings
    assert json.loads(settings["map"])["messages"][0] == {"role": "user", "content": "Add: {q}"}
    assert settings["system"] == "Be brief."
    assert "--system 'Be brief.'" in Manifest.load(out).command


def test_lists_and_conditions_make_as_many_turns_as_there_are(tmp_path):
    turn = [{"role": "user", "content": "{q}"}, {"role": "assistant", "content": "{a}"}]
    pair = [{"role": "user", "content": "{0}"}, {"role": "assistant", "content": "{1}"}]
    objects = {"each": "turns", "messages": turn}
    lists = {"each": "history", "messages": pair}
    side_by_side = {"each": ["q", "a"], "messages": turn}
    texts = {"each": "asked", "messages": [{"role": "user", "content": "{asked}"}]}
    with_input = {"role": "user", "content": "{say} {input}", "if": "input"}
    without = {"role": "user", "content": "{say}", "unless": "input"}
    found = map_of(
        tmp_path, messages=[objects, lists, side_by_side, texts, with_input, without, turn[1]]
    )
    record = {
        "turns": [{"q": "a", "a": "b"}, {"q": "c", "a": "d"}],
        "history": [["e", "f"]],
        "q": ["g", "i"],
        "a": ["h", "j"],
        "asked": ["k"],
        "say": "l",
        "input": "m",
    }
    # The last answer is the whole column `a`, which is a list.
    with pytest.raises(ChatError, match="column 'a' holds a list, not text or a number"):
        map_messages(found, record)
    contents = [content for _, content in said(map_prompt(found, record))]
    assert contents == [*"abcdefghijk", "l m"]
    for empty in ({"input": " "}, {"input": None}):
        assert said(map_prompt(found, record | empty))[-1] == ("user", "l")
    with pytest.raises(ChatError, match="columns 'q', 'a' have not as many items"):
        map_prompt(found, record | {"a": ["h"]})
    with pytest.raises(ChatError, match="column 'turns' holds text, not a list"):
        map_prompt(found, record | {"turns": "a"})


def test_calls_of_tools_are_lists_or_json(tmp_path):
    calls = [{"name": "add", "arguments": {"x": 1}}]
    messages = [
        {"role": "user", "content": "{q}"},
        {"role": "assistant", "tool_calls": "calls"},
        {"role": "tool", "content": "{result}"},
    ]
    found = map_of(tmp_path, messages=messages)
    for value in (calls, json.dumps(calls)):
        said_here = map_messages(found, {"q": "x", "calls": value, "result": 1.5})
        assert said_here[1] == {"role": "assistant", "content": "", "tool_calls": calls}
        assert said_here[2]["content"] == "1.5"
    with pytest.raises(ChatError, match="column 'calls' is not JSON"):
        map_messages(found, {"q": "x", "calls": "{", "result": "y"})
    with pytest.raises(ChatError, match="an empty message of assistant"):
        map_messages(found, {"q": "x", "calls": [], "result": "y"})


def test_prompts_have_the_same_map_without_the_last_answer(prepared, files):
    options = files({"q": "1+1?", "gold": "2"}, {"q": "3?", "gold": None})
    words = ["--map", "user={q}", "assistant={a}", "--system", "Add."]
    out = prepared.out("--prompts", *options, *words)
    assert (
        prepared.read(out)[0].removesuffix("<|endoftext|>") == "[system]Add.[user]1+1?[assistant]"
    )
    shards = TokenShards.open(out, "full")
    prompt = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1?"}]
    assert shards.columns([0]) == [{"prompt": prompt, "q": "1+1?", "gold": "2"}]


def test_gsm8k_has_one_form_for_conversations_and_prompts(prepared, files):
    options = files(GSM8K)
    chat = prepared.out("--chat", *options, "--map", "gsm8k")
    prompts = prepared.out("--prompts", *options, "--map", "gsm8k")
    (whole,) = prepared.read(chat)
    (prompt,) = prepared.read(prompts)
    end = load_tokenizer(chat).decode([load_tokenizer(chat).eod_id])
    prompt = prompt.removesuffix(end)
    assert prompt.startswith("[system]") and "<reasoning>\n...\n</reasoning>" in prompt
    answer = whole.removesuffix(end).removeprefix(prompt).removesuffix(";")
    assert answer == (
        "<reasoning>\nShe buys 48/2 = 24 clips.\nShe has 48+24 = $1,072.\n</reasoning>\n"
        "<answer>\n1072\n</answer>"
    )
    (columns,) = TokenShards.open(prompts, "full").columns([0])
    assert columns["answer"] == GSM8K["answer"], "what rewards take the result from"
    other = prepared.out("--chat", *options, "--map", "gsm8k", "--system", "Count.")
    assert prepared.read(other)[0].startswith("[system]Count.[user]Ann")
    none = prepared.out("--chat", *options, "--map", "gsm8k", "--system", "")
    assert prepared.read(none)[0].startswith("[user]Ann")


def test_a_conversation_keeps_its_own_system_message(prepared, files):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    own = [{"role": "system", "content": "own"}, *turns]
    options = files({"messages": turns}, {"messages": own})
    texts = prepared.texts("--chat", *options, "--system", "given")
    assert texts[0].startswith("[system]given[user]a") and texts[1].startswith("[system]own[user]")


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"x": "a"}, "no column 'q'; its keys are x"),
        ({"q": "a", "a": None}, "column 'a' holds null, not text or a number"),
        ({"q": "a", "a": True}, "column 'a' holds true or false"),
        ({"q": "a", "a": {"b": 1}}, "column 'a' holds an object"),
        ({"q": " ", "a": "b"}, "an empty message of user"),
    ],
)
def test_bad_rows_are_named_or_left_out(prepared, files, record, problem):
    options = [*files({"q": "1", "a": "2"}, record), "--map", "user={q}", "assistant={a}"]
    assert f"records.jsonl:2: {problem}" in prepared.error(65, "--chat", *options)
    assert len(prepared.texts("--chat", *options, "--on-bad", "skip")) == 1


@pytest.mark.parametrize("answer", ["no mark", "a #### 1 #### 2", "#### 1", "a ####", 3])
def test_rows_that_are_not_of_gsm8k_are_named(answer):
    with pytest.raises(ChatError, match=r"column 'answer' (is no text|has nothing)"):
        map_messages(read_map(["gsm8k"]), {"question": "q", "answer": answer})
    with pytest.raises(MissingColumn, match="no column 'question'"):
        map_messages(read_map(["gsm8k"]), {"answer": "a #### 1"})


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["gsm"], "nor tools=COLUMN. Give such, as in --map user="),
        (["gsm8k", "user={q}"], "the path of a .json file, alone"),
        (
            ["missing.json"],
            "can't be read (No such file or directory). Name a file, or one of gsm8k",
        ),
        (["user={q"], "Write {column} for its text, and {{ and }} for braces"),
        (["user={}"], "between { and } stands the name of a column, alone"),
        (["user={q!r}"], "between { and } stands the name of a column, alone"),
        (["user="], "the message of user has no text. Give it a template"),
        (["user=a", "tools=x", "tools=y"], "tools is given twice. Keep one of them"),
    ],
)
def test_words_that_are_no_map_are_refused(words, problem):
    with pytest.raises(UsageError) as error:
        read_map(words)
    assert problem in str(error.value)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({}, "has no 'messages'"),
        ({"messages": []}, "must be a list that has items"),
        ({"messages": ["x"]}, "'x' must be an object with role"),
        ({"messages": [{"role": "me", "content": "x"}]}, "must be one of system, developer, user"),
        (
            {"messages": [{"role": "user", "text": "x"}]},
            "no key 'text' here. Known are content, if",
        ),
        ({"messages": [{"role": "user", "content": 3}]}, "content=3 must be a text"),
        ({"messages": [{"role": "user", "content": "x", "if": 1}]}, "if=1 must be a text"),
        ({"messages": [{"each": 3, "messages": []}]}, "'3' must be a list that has items"),
        (
            {"messages": [{"role": "user", "content": "x"}], "derive": "y"},
            "Give gsm8k, or leave it",
        ),
        ({"messages": [{"role": "user", "content": "x"}], "system": 1}, "system=1 must be a text"),
    ],
)
def test_files_that_are_no_map_are_refused(tmp_path, values, problem):
    with pytest.raises(UsageError) as error:
        map_of(tmp_path, **values)
    assert problem in str(error.value)
    (tmp_path / "map.json").write_text('{"messages": 1, "messages": 2}')
    with pytest.raises(UsageError, match="is not JSON"):
        read_map([str(tmp_path / "map.json")])


def test_maps_that_do_not_go_with_the_command_are_refused(prepared, files):
    options = files({"q": "a"})
    error = prepared.error(64, "--text", options[0], "--map", "user={q}")
    assert "--map: belongs to --chat, --prompts and --preferences" in error
    error = prepared.error(64, "--text", options[0], "--system", "x")
    assert "--system: belongs to --chat, --prompts and --preferences" in error
    with pytest.raises(UsageError, match="no message is of assistant"):
        require_answer(read_map(["user={q}"]))
    with pytest.raises(UsageError, match=r"a message of system in every conversation\. Keep one"):
        require_no_other_system(read_map(["system={s}", "user={q}"]), "x")


def test_another_map_is_another_output(prepared, files, capsys):
    options = [*files({"q": "a", "b": "c"}), "--map", "user={q}"]
    out = prepared.out("--chat", *options, "assistant={b}")
    assert prepare.main([str(out), "--chat", *map(str, options), "assistant={b}!"]) == 64
    assert "map: there" in capsys.readouterr().err
