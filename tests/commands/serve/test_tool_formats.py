"""Completions are split into reasoning, content and calls, whatever parts they come in."""

import json
import random

import pytest

from maxtrain.commands.serve.tool_formats import (
    CompletionReader,
    FirstCallEnd,
    TextPart,
    ToolCall,
    detect_format,
    has_reasoning,
)

# Markers that distinguish the templates of models.
TEMPLATES = {
    "hermes": "{% if tools %}<tools>{{ tools }}</tools> in <tool_call></tool_call>{% endif %}",
    "qwen3_coder": "{% if tools %}<tool_call>\n<function=a>\n<parameter=b>{% endif %}",
    "mistral": "{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]",
    "mistral_args": "{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]name[ARGS]",
    "llama3_json": '<|start_header_id|>{% if tools %}{"name": n, "parameters": p}{% endif %}',
}
TOOLS = {
    "add": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
    "say": {
        "name": "say",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
    },
}
ADD = ToolCall("add", '{"a": 1, "b": 2}')
SAY = ToolCall("say", '{"text": "a } </tool_call> \\" é"}')


def read(name, text, seed=None, **options):
    """Content, reasoning and calls of a text that comes in parts."""
    reader = CompletionReader(detect_format(TEMPLATES.get(name, "")), TOOLS, **options)
    rng = random.Random(seed)
    found = []
    at = 0
    while at < len(text):
        count = len(text)
        if seed is not None:
            count = rng.randint(1, 6)
        found += reader.feed(text[at : at + count])
        at += count
    found += reader.feed("", is_last=True)

    def joined(kind):
        return "".join(p.text for p in found if isinstance(p, TextPart) and p.kind == kind)

    calls = [part for part in found if isinstance(part, ToolCall)]
    return joined("content"), joined("reasoning"), calls


def hermes(call):
    return f'<tool_call>\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n</tool_call>'


def llama(call):
    return f'{{"name": "{call.name}", "parameters": {call.arguments}}}'


XML_ADD = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n"
    "</function>\n</tool_call>"
)
XML_SAY = (
    "<tool_call>\n<function=say>\n"
    "<parameter=text>\n12\nx<b>\n</parameter>\n</function>\n</tool_call>"
)
LISTED = (
    f'[{{"name": "add", "arguments": {ADD.arguments}}}, '
    f'{{"name": "say", "arguments": {SAY.arguments}}}]'
)
CASES = [
    ("hermes", "Hello.", "Hello.", []),
    ("hermes", hermes(ADD), "", [ADD]),
    ("hermes", "\n\n" + hermes(ADD), "", [ADD]),
    (
        "hermes",
        "Let me see.\n" + hermes(ADD) + "\n" + hermes(SAY) + "\n",
        "Let me see.",
        [ADD, SAY],
    ),
    # Some models leave out the end.
    ("hermes", hermes(ADD).removesuffix("</tool_call>"), "", [ADD]),
    (
        "hermes",
        "<tool_call>\n{not JSON}\n</tool_call> a",
        "<tool_call>\n{not JSON}\n</tool_call> a",
        [],
    ),
    ("hermes", '<tool_call>\n{"name": "add"', '<tool_call>\n{"name": "add"', []),
    ("hermes", "a <tool_cal", "a <tool_cal", []),
    ("hermes", "a <tool_call> b", "a <tool_call> b", []),
    ("qwen3_coder", XML_ADD, "", [ADD]),
    ("qwen3_coder", "I say\n" + XML_SAY, "I say", [ToolCall("say", '{"text": "12\\nx<b>"}')]),
    ("qwen3_coder", XML_ADD + "\n" + XML_ADD, "", [ADD, ADD]),
    # Without the mark around it.
    ("qwen3_coder", XML_ADD[len("<tool_call>\n") : -len("\n</tool_call>")], "", [ADD]),
    ("qwen3_coder", "<tool_call>\nwhat", "<tool_call>\nwhat", []),
    ("mistral", f"[TOOL_CALLS]{LISTED}", "", [ADD, SAY]),
    ("mistral", f"[TOOL_CALLS] {LISTED}", "", [ADD, SAY]),
    ("mistral", "[TOOL_CALLS] [1", "[TOOL_CALLS] [1", []),
    (
        "mistral_args",
        f"[TOOL_CALLS]add[ARGS]{ADD.arguments}[TOOL_CALLS]say[ARGS]{SAY.arguments}",
        "",
        [ADD, SAY],
    ),
    ("mistral_args", f"ok[TOOL_CALLS]add[CALL_ID]1[ARGS]{ADD.arguments}", "ok", [ADD]),
    ("llama3_json", llama(ADD), "", [ADD]),
    ("llama3_json", f"<|python_tag|>{llama(ADD)}; {llama(SAY)}", "", [ADD, SAY]),
    ("llama3_json", '{"a": 1}', '{"a": 1}', []),
    (
        "llama3_json",
        '{"name": "other", "parameters": {}}',
        '{"name": "other", "parameters": {}}',
        [],
    ),
    ("llama3_json", "A brace { here", "A brace { here", []),
    ("llama3_json", "<|python_tag|>search.call()", "<|python_tag|>search.call()", []),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_calls_are_found_whatever_parts_they_come_in(name, text, content, calls):
    for seed in (None, *range(12)):
        found = read(name, text, seed)
        assert found == (content, "", calls), seed


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_without_parallel_calls_the_first_call_ends_the_completion(name, text, content, calls):
    expected = (content if not calls else content.rstrip(), "", calls[:1])
    for seed in (None, *range(12)):
        assert read(name, text + "\nmore" * bool(calls), seed, parallel=False) == expected, seed
        tool_format = detect_format(TEMPLATES[name])
        find_end = FirstCallEnd(CompletionReader(tool_format, TOOLS, parallel=False))
        rng = random.Random(seed)
        at = 0
        cut = None
        while cut is None and at < len(text):
            part = text[at : at + (rng.randint(1, 6) if seed is not None else len(text))]
            cut = find_end(part)
            at += len(part) if cut is None else cut
        # What is left at the end of the text is a call too, once no more text comes.
        assert read(name, text[:at], parallel=False) == expected
        if len(calls) > 1:
            assert cut is not None and at < len(text)


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_are_told_apart(name):
    assert detect_format(TEMPLATES[name]).name == name


def test_a_template_without_a_known_form_has_none():
    assert detect_format("{{ messages }}") is None
    assert detect_format("{{ tools }}") is None
    # Calls alone, of conversations that have them; the model would not be told of tools.
    assert detect_format("<tool_call>") is None


THOUGHT = "<think>\nI think < so.\n</think>\n\n"


@pytest.mark.parametrize(
    ("text", "options", "content", "reasoning", "calls"),
    [
        (THOUGHT + "Yes.", {"reasons": True}, "Yes.", "I think < so.", []),
        ("Yes.", {"reasons": True}, "Yes.", "", []),
        ("<thin", {"reasons": True}, "<thin", "", []),
        ("I think", {"is_in_reasoning": True}, "", "I think", []),
        ("so.\n</think>\n\nYes.", {"is_in_reasoning": True}, "Yes.", "so.", []),
        (THOUGHT + hermes(ADD), {"reasons": True}, "", "I think < so.", [ADD]),
        # In the reasoning, it is no call.
        (f"<think>{hermes(ADD)}</think>a", {"reasons": True}, "a", hermes(ADD), []),
    ],
)
def test_reasoning_is_no_content(text, options, content, reasoning, calls):
    for seed in (None, *range(12)):
        assert read("hermes", text, seed, **options) == (content, reasoning, calls), seed
    assert has_reasoning("<think>...</think>") and not has_reasoning("think")


def test_a_long_call_takes_linear_time():
    """Counted: how often its text is looked at."""
    arguments = json.dumps({"text": "{" * 50_000})
    form = detect_format(TEMPLATES["hermes"])
    looks = []

    def counting(text, is_last, tools, parallel):
        looks.append(len(text))
        return form.read(text, is_last, tools, parallel)

    reader = CompletionReader(form._replace(read=counting), TOOLS)
    text = hermes(ToolCall("say", arguments))
    found = []
    for at in range(0, len(text), 4):
        found += reader.feed(text[at : at + 4])
    found += reader.feed("", is_last=True)
    assert found == [ToolCall("say", arguments)]
    assert sum(looks) < 20 * len(text)
