"""Conversations as ids: what the template writes, and where an answer ends."""

import json
import shutil

import pytest

from data_pipeline.base.errors import DataError, UsageError
from data_pipeline.tokenizer import load_tokenizer
from maxtrain.inference.chat import Chat

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi {{ you }}"},
]


@pytest.fixture
def directory(pretrained_directory, tmp_path):
    return shutil.copytree(pretrained_directory, tmp_path / "model")


def chat_of(directory, template="chatml", **options):
    return Chat(load_tokenizer(directory), directory, template, **options)


def test_the_ids_are_those_of_the_templates_text(directory):
    chat = chat_of(directory)
    tokenizer = load_tokenizer(directory)
    start = tokenizer.special["<|im_start|>"]
    end = tokenizer.special["<|im_end|>"]
    expected = []
    for role, said in (("system", "Be brief."), ("user", "Hi {{ you }}")):
        expected += [start, *tokenizer.encode(f"{role}\n{said}").tolist(), end]
        expected += tokenizer.encode("\n").tolist()
    expected += [start, *tokenizer.encode("assistant\n").tolist()]
    assert chat.ids(MESSAGES) == expected


def test_an_answer_ends_at_the_end_of_its_turn_of_the_document_and_of_generation(directory):
    special = load_tokenizer(directory).special
    of_turn = special["<|im_end|>"]
    of_document = special["<|end|>"]
    assert set(chat_of(directory).stop_ids) == {of_turn, of_document}
    settings = directory / "generation_config.json"
    settings.write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert set(chat_of(directory).stop_ids) == {of_turn, of_document, 7, 9}
    settings.write_text(json.dumps({"eos_token_id": 5}))
    assert set(chat_of(directory).stop_ids) == {of_turn, of_document, 5}
    settings.write_text(json.dumps({"eos_token_id": "x"}))
    with pytest.raises(DataError, match="eos_token_id='x' must be an id or a list of ids"):
        chat_of(directory)
    settings.write_text("[")
    with pytest.raises(DataError, match="is not a JSON object"):
        chat_of(directory)


def test_the_template_beside_the_tokenizer_is_taken_and_may_write_the_date(directory):
    with pytest.raises(DataError, match="chat"):
        chat_of(directory, "")
    text = "{{ strftime_now('%d.%m.%Y') }}{% for m in messages %}{{ m.content }};{% endfor %}"
    (directory / "chat_template.jinja").write_text(text)
    chat = chat_of(directory, "", date="2024-03-01")
    tokenizer = load_tokenizer(directory)
    written = tokenizer.decode(chat.ids(MESSAGES))
    assert written == "01.03.2024Be brief.;Hi {{ you }};"
    # Nothing stands behind an answer but what is no token of its own.
    assert set(chat.stop_ids) == {tokenizer.special["<|end|>"]}


def test_a_conversation_without_a_system_message_gets_that_of_the_model(directory):
    chat = chat_of(directory, system="Be brief.")
    assert chat.ids(MESSAGES[1:]) == chat.ids(MESSAGES) == chat_of(directory).ids(MESSAGES)
    with pytest.raises(UsageError, match=r"system has the special token <\|im_end\|>"):
        chat_of(directory, system="Be <|im_end|>")


def test_special_tokens_are_refused_wherever_they_stand(directory):
    chat = chat_of(directory)
    hidden = "x<|im_end|>"
    for message in (
        {"role": "user", "content": "hi", "name": hidden},
        {"role": "user", "content": "hi", hidden: 1},
        {
            "role": "assistant",
            "tool_calls": [{"function": {"name": "f", "arguments": json.dumps({"a": hidden})}}],
        },
    ):
        with pytest.raises(UsageError, match=r"has the special token <\|im_end\|>"):
            chat.ids([message])
    with pytest.raises(UsageError, match=r"tools\[0\].description has the special token"):
        chat.ids(MESSAGES, [{"description": hidden}])


def test_messages_are_read_in_the_forms_that_training_data_has(directory, tmp_path):
    template = tmp_path / "own.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role }}:{{ m.thinking }}{{ m.content }}"
        "{% for call in m.tool_calls or [] %}{{ call.function.arguments.a }}{% endfor %}{% endfor %}"
    )
    chat = chat_of(directory, str(template))
    call = {"function": {"name": "f", "arguments": '{"a": "b"}'}}
    given = [
        {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
        {"role": "assistant", "content": "yo", "reasoning": "hm", "tool_calls": [call]},
    ]
    expected = "user:hiassistant:hmyob"
    assert chat.ids(given) == load_tokenizer(directory).encode(expected).tolist()


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages: is empty"),
        ([{"role": "wizard", "content": "x"}], r"messages\[0\].role='wizard' must be one of"),
        ([{"content": "x"}], r"messages\[0\].role=None must be one of"),
        ([*MESSAGES, {"role": "user"}], r"messages\[2\].content=None must be a text"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content=3 must be a text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "a part of type 'image_url'"),
        (
            [
                {
                    "role": "assistant",
                    "tool_calls": [{"name": "f", "arguments": '{"a": "\\u003c|im_end|>"}'}],
                }
            ],
            r"tool_calls\[0\].arguments.a has the special token <\|im_end\|>",
        ),
        (
            [{"role": "user", "content": "a<|im_end|>b"}],
            r"messages\[0\].content has the special token <\|im_end\|>",
        ),
        ([{"role": "assistant", "tool_calls": 3}], "tool_calls"),
        ([{"role": "assistant", "tool_calls": [{}]}], "has no name of a function"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}],
            "not a JSON object",
        ),
        (
            [{"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}],
            "the chat template refuses them",
        ),
    ],
)
def test_what_is_no_conversation_is_refused(directory, messages, message):
    with pytest.raises(UsageError, match=message):
        chat_of(directory).ids(messages)


def test_templates_get_variables_tools_and_arguments_as_values(directory):
    """Escaped in JSON, a special token is found as well."""
    source = (
        "{{ enable_thinking }};{{ tools[0].function.name }};"
        "{% for m in messages %}{% for c in m.tool_calls %}"
        "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v + 1 }}{% endfor %}"
        "{% endfor %}{{ m.content }};{% endfor %}"
    )
    (directory / "chat_template.jinja").write_text(source)
    chat = chat_of(directory, "")
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "x"},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert chat.text(messages, tools, {"enable_thinking": False}) == "False;f;hi;a=2;2;"
    call["function"]["arguments"] = json.dumps({"a": "<|im_end|>"}).replace("<", "\\u003c")
    with pytest.raises(UsageError, match=r"has the special token <\|im_end\|>"):
        chat.text(messages, tools)
