"""Chat templates: the same text and masks as transformers', the assistant's turns found, and errors
a user can act on."""

import json
import re
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.base.errors import DataError, TryAgainError, UsageError
from data_pipeline.chat import template as chat_template
from data_pipeline.chat import template_process
from data_pipeline.chat.chat import ChatError, Template, load_template, render, render_spans
from data_pipeline.tokenizer import JsonTokenizer

# Made with transformers: texts, ids and masks of `templates` and `conversations`, with `tokenizer`.
EXPECTED = json.loads((Path(__file__).parents[2] / "data/chat/expected.json").read_text())
TOKENIZER = JsonTokenizer(json.dumps(EXPECTED["tokenizer"]).encode(), "expected")
TOKENS = (("bos_token", "<s>"), ("eos_token", "</s>"))
TEMPLATES = {
    name: Template(source, TOKENS, tuple(TOKENIZER.special), "2026-11-21")
    for name, source in EXPECTED["templates"].items()
}
CHATML = load_template("chatml", "bytes", ["<|im_start|>", "<|im_end|>"])[0]


@pytest.mark.parametrize(
    "case",
    EXPECTED["expected"],
    ids=lambda case: f"{case['template']}-{case['conversation']}-{case['prompt']}",
)
def test_text_ids_and_masks_are_those_of_transformers(case):
    template, conversation = (
        TEMPLATES[case["template"]],
        EXPECTED["conversations"][case["conversation"]],
    )
    messages, tools = conversation["messages"], conversation.get("tools")
    if "error" in case:
        with pytest.raises(
            ChatError, match=f"the chat template refuses it .*{re.escape(case['error'])}"
        ):
            render(template, messages, tools, case["prompt"])
        return
    assert render(template, messages, tools, case["prompt"]) == case["text"]
    if not case["prompt"]:
        ids, mask = TOKENIZER.encode_spans(render_spans(template, messages, tools))
        assert ids.tolist() == case["ids"]
        assert "mask" not in case or mask.astype(int).tolist() == case["mask"]


SAID = {
    ("chatml", "plain"): ["hello there<|im_end|>"],
    ("chatml", "turns"): ["sat\n<|im_end|>", " 東京 🙂<|im_end|>"],
    ("generation", "turns"): ["sat<|im_end|>", "東京 🙂<|im_end|>"],
    ("headers", "plain"): ["hello there<|eot|>"],
    ("headers", "tools"): ['{"name": "f", "arguments": {"where": "東京"}}<|eot|>', "cold<|eot|>"],
    ("inst", "turns"): [" sat </s>", " 東京 🙂 </s>"],
}


@pytest.mark.parametrize(("template", "conversation"), SAID)
def test_what_the_assistant_said_and_its_ends_of_turn_are_targets(template, conversation):
    chat = EXPECTED["conversations"][conversation]
    spans = render_spans(TEMPLATES[template], chat["messages"], chat.get("tools"))
    assert [text for text, target in spans if target] == SAID[template, conversation]
    assert "".join(text for text, _ in spans) == render(
        TEMPLATES[template], chat["messages"], chat.get("tools")
    )


def test_without_special_tokens_everything_up_to_the_next_turn_is_said():
    plain = Template(
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}{{ 'assistant:' if add_generation_prompt }}"
    )
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert render_spans(plain, messages) == [("user: a\nassistant:", False), (" b\n", True)]


TEXT = st.characters(
    exclude_categories=["Cs"], exclude_characters="\ufdd0\ufdd1"
)  # which prepare takes out before


@settings(max_examples=60, deadline=None)
@given(
    turns=st.lists(
        st.tuples(
            st.sampled_from(["system", "user", "assistant", "tool"]), st.text(TEXT, max_size=6)
        ),
        min_size=1,
        max_size=5,
    )
)
def test_generation_blocks_and_comparing_prefixes_agree(turns):
    messages = [{"role": role, "content": content} for role, content in turns]
    unmarked = CHATML._replace(
        source=CHATML.source.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    )
    if "assistant" not in dict(turns):
        for template in (CHATML, unmarked):
            with pytest.raises(ChatError, match="writes nothing of the assistant's"):
                render_spans(template, messages)
        return
    spans = render_spans(CHATML, messages)
    assert spans == render_spans(unmarked, messages)
    assert [text for text, target in spans if target] == [
        c + "<|im_end|>" for role, c in turns if role == "assistant"
    ]
    assert "".join(text for text, _ in spans) == "".join(
        f"<|im_start|>{r}\n{c}<|im_end|>\n" for r, c in turns
    )


def test_templates_that_change_earlier_turns_are_told():
    forgetful = "{% for m in messages %}{{ m.role + (m.content if loop.last else '') + '<|im_end|>' }}{% endfor %}"
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    with pytest.raises(
        ChatError, match=r"differently when more messages follow.*mark it with \{% generation %\}"
    ):
        render_spans(Template(forgetful), messages)


HEADERS = {
    "name": "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|im_end|>' }}{% endfor %}",
    "line": "{% for m in messages %}{{ m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}",
    "trimmed": "{% for m in messages %}{{ '### ' + m.role + ': ' + m.content | trim + '<|im_end|>' }}{% endfor %}",
    "between": "{% for m in messages %}{{ '\n' if not loop.first }}{{ m.role + ': ' + m.content }}<|im_end|>{% endfor %}",
    "unused": "{% set p = add_generation_prompt %}{% for m in messages %}{{ m.role + m.content }}<|im_end|>{% endfor %}",
}


@pytest.mark.parametrize("name", HEADERS)
def test_the_header_of_a_turn_is_no_target_without_a_generation_prompt_either(name):
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "assistant"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
    template = Template(HEADERS[name], special=("<|im_end|>",))
    spans = render_spans(template, messages)
    assert [text for text, target in spans if target] == ["assistant<|im_end|>", "d<|im_end|>"]
    assert "".join(text for text, _ in spans) == render(template, messages)


def test_tool_calls_and_thoughts_are_said_behind_a_header():
    source = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.thought %}{{ '(' + m.thought + ')' }}{% endif %}"
        "{{ m.content or '' }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}<|im_end|>{% endfor %}"
    )
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "thought": "hm"},
        {"role": "assistant", "content": None, "tool_calls": [1]},
    ]
    spans = render_spans(Template(source, special=("<|im_end|>",)), messages)
    assert [text for text, target in spans if target] == ["(hm)b<|im_end|>", "[1]<|im_end|>"]


def test_what_only_a_whole_conversation_ends_with_is_no_matter():
    end = "{{ 'assistant:' if add_generation_prompt else '<e>' }}"
    source = "{% for m in messages %}{{ m.role + ':' + m.content }}{% endfor %}" + end
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "b"}]
    assert render_spans(Template(source), messages) == [("user:uassistant:", False), ("b<e>", True)]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "{% for m in messages %}{{ m.role + m.content }}{% endfor %}{{ 'robot:' if add_generation_prompt }}",
            "begins a turn differently with add_generation_prompt than with an answer",
        ),
        (
            "{% for m in messages %}{{ m.role + ':' + m.content | upper }}{% endfor %}",
            "has no add_generation_prompt, and changes the text of an answer",
        ),
        (
            "{% for m in messages %}{{ ('long:' if m.content | length > 3 else 'short:') + m.content }}{% endfor %}",
            "has no add_generation_prompt, and begins its turns in several ways",
        ),
        ("{{ messages[-1].content }}", "writes a turn differently when more messages follow"),
        (
            "{% if messages | length % 2 %}{{ raise_exception('odd') }}{% endif %}{{ messages[0].content }}",
            "refuses it .odd., given only the messages before an answer",
        ),
    ],
)
def test_where_comparing_can_not_tell_the_template_is_refused_and_the_marker_named(source, message):
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(
        ChatError,
        match=rf"{message}.*can't be found: mark it with \{{% generation %\}} in the template, as in",
    ):
        render_spans(Template(source), messages)


def test_templates_are_other_people_s_programs():
    messages = [{"role": "user", "content": "a"}]
    for source in (
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 1 // 0 }}",
        "{{ cycler.__init__.__globals__ }}",
    ):
        with pytest.raises(ChatError, match="the chat template refuses it"):
            render(Template(source), messages)
    assert (
        render(
            Template(
                "{% for m in messages %}{{ m.content }}{% break %}{% endfor %}{{ tools is none }}"
            ),
            messages,
        )
        == "aTrue"
    )


FIRST_IS_SYSTEM = """
{%- if messages[0].role == 'system' %}S:{{ messages[0].content }}|{% else %}S:default|{% endif %}
{%- for m in messages if m.role in ('user', 'assistant') %}{{ m.role }}:{{ m.content }}|{% endfor %}"""
ANY_ROLE = "{% for m in messages %}{{ m.role }}:{{ m.content | trim }}|{% endfor %}"
TURN = [{"role": "user", "content": "U"}, {"role": "assistant", "content": "A"}]


def test_a_developer_is_a_system_where_the_template_knows_no_such_role():
    messages = [{"role": "developer", "content": " Speak Latin. "}, *TURN]
    text = render(Template(FIRST_IS_SYSTEM), messages)
    assert text == "S: Speak Latin. |user:U|assistant:A|"
    spans = render_spans(Template(FIRST_IS_SYSTEM), messages)
    assert "".join(part for part, _ in spans) == text
    # A template that writes the role is called for it, as in transformers.
    assert render(Template(ANY_ROLE), messages) == "developer:Speak Latin.|user:U|assistant:A|"


@pytest.mark.parametrize("role", ["system", "developer", "user"])
def test_a_message_that_the_template_leaves_out_is_refused(role):
    source = "{% for m in messages if m.role == 'assistant' %}{{ m.content }}{% endfor %}"
    late = [*TURN, {"role": role, "content": "Speak Latin."}, *TURN]
    with pytest.raises(ChatError, match="leaves out message 1, of the role user"):
        render(Template(source), late)
    messages = [*TURN, {"role": role, "content": [{"type": "text", "text": "x y"}]}, *TURN]
    parts = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% endif %}{% endfor %}"
    )
    with pytest.raises(ChatError, match=r"message 3, of the role (system|user): 'x y'"):
        render(Template(parts), messages)


def test_messages_that_a_template_moves_or_wraps_are_written():
    last = "{{ messages[-1].content }}{% for m in messages[:-1] %}{{ m.content | wordwrap(4) }}{% endfor %}"
    messages = [{"role": "user", "content": f"word {n} and more"} for n in range(40)]
    assert "word" in render(Template(last), messages)


@pytest.fixture
def quick_limit(monkeypatch):
    """A template may take one second."""
    monkeypatch.setattr(template_process, "CPU_SECONDS", 1)
    template_process._close()
    yield
    template_process._close()


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% if b > a * 9 %}x{% endif %}{% endfor %}{% endfor %}"


@pytest.mark.long
def test_a_template_that_does_not_end_is_ended_in_any_thread(quick_limit):
    messages = [{"role": "user", "content": "a"}]
    found = []

    def work():
        try:
            render(Template(LOOPS), messages)
        except DataError as error:
            found.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert re.search(r"takes more than 1 s of CPU time.*correct it", found[0])
    assert render(Template("{{ messages[0].content }}"), messages) == "a"  # by another process


@pytest.mark.long
def test_a_template_that_does_not_end_while_it_is_compiled_is_ended(tmp_path, quick_limit):
    (tmp_path / "t.jinja").write_text("{{ 9 ** (9 ** 9) }}")
    with pytest.raises(
        DataError, match=r"--chat-template .*t.jinja: takes more than 1 s of CPU time"
    ):
        load_template(str(tmp_path / "t.jinja"), "bytes", [])


@pytest.mark.every_dose
@pytest.mark.long
def test_a_template_gets_no_more_memory_than_there_is_for_it(monkeypatch):
    with pytest.raises(
        DataError, match=r"needs more than 2,147,483,648 bytes of memory.*correct it"
    ):
        render(
            Template("{{ ('x' * (messages | length + 1) * 2000000000) | length }}"),
            [{"role": "user"}],
        )
    with pytest.raises(ChatError, match="writes more than 67,108,864 characters"):
        render(Template("{{ 'x' * 67108865 }}"), [])


def test_a_template_does_not_see_the_secrets_of_the_environment(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "secret")
    template_process._close()
    process = template_process._open()
    environment = Path(f"/proc/{process._process.pid}/environ")
    template_process.ask("examine", "{{ messages }}")
    found = environment.read_bytes()
    assert b"SOME_API_KEY" not in found and b"PYTHONHASHSEED=0" in found
    template_process._close()


def test_a_process_that_was_killed_is_told_and_replaced():
    assert render(Template("a"), []) == "a"
    template_process._running[0]._process.kill()
    with pytest.raises(
        TryAgainError,
        match=r"its process was killed. Run the same command again, with fewer --workers",
    ):
        render(Template("a"), [])
    assert render(Template("a"), []) == "a"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}", "recursion"),
        ("{{ raise_exception('no') }}", "no"),
        ("{{ now() }}", "'now' is undefined"),
        ("{{ ('a' | list).append }}{{ joiner() }}", "address in memory"),
        ("{{ messages | map(attribute='role') }}", "address in memory"),
        ("{{ messages | map(attribute='role') | string }}", "address in memory"),
        (
            "{{ [1, 2, 3] | map('random') | list }}",
            "its filter random gives another text each time",
        ),
        ("{{ 'a'.encode() }}", "it writes bytes, not text"),
        ("{{ undefined_thing.a }}", "'undefined_thing' is undefined"),
    ],
)
def test_templates_that_give_no_text_or_another_each_time_are_refused(source, message):
    with pytest.raises(ChatError, match=message):
        render(Template(source), [{"role": "user", "content": "a"}])


def test_many_addresses_in_a_conversation_take_linear_time():
    text = "".join(f" at 0x{number:06x}>" for number in range(60_000))
    template = Template("{{ messages[0].content }}")
    began = time.process_time()
    assert chat_template.render(template, [{"role": "user", "content": text}]) == text
    # A search for each of them took 30 s.
    assert time.process_time() - began < 5


def test_an_address_that_a_conversation_has_is_text():
    messages = [{"role": "user", "content": "<object at 0x7f00>"}]
    assert (
        render(Template("{{ messages[0].content }}<a at 0x12>"), messages)
        == "<object at 0x7f00><a at 0x12>"
    )
    with pytest.raises(ChatError, match="address in memory"):
        render(Template("{{ messages[0].content }}{{ joiner() }}"), messages)


def test_where_a_template_comes_from(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    settings = {
        "chat_template": "of settings{{ bos_token }}{{ eos_token }}",
        "bos_token": {"content": "<s>"},
        "eos_token": None,
        # Not a token, but whether.
        "add_bos_token": False,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    template, files = load_template("", tmp_path, ["<s>"])
    assert template == Template(settings["chat_template"], (("bos_token", "<s>"),), ("<s>",))
    assert (
        files == [tmp_path / "tokenizer_config.json"] and render(template, []) == "of settings<s>"
    )
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "default"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": named}))
    assert load_template("", tmp_path / "tokenizer.json", [])[0].source == "default"
    (tmp_path / "chat_template.jinja").write_text("of the file\n")
    template, files = load_template("", tmp_path, [])
    assert template.source == "of the file\n" and files[0] == tmp_path / "chat_template.jinja"
    (tmp_path / "given.jinja").write_text("given")
    given = load_template(str(tmp_path / "given.jinja"), tmp_path, [])[0]
    assert given.source == "given" and given.sha256 != template.sha256 == template._replace().sha256


def test_conversations_with_tools_have_the_template_tool_use(tmp_path):
    """The choice is that of transformers' get_chat_template among named templates."""
    (tmp_path / "tokenizer.json").write_text("{}")

    def load(names, spec=""):
        listed = [
            {"name": name, "template": f"{name} {{{{ (tools or []) | length }}}}"} for name in names
        ]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))
        return load_template(spec, tmp_path, [])[0]

    user = [{"role": "assistant", "content": "a"}]
    both = load(["default", "tool_use", "rag"])
    assert render(both, user, [{}, {}]) == "tool_use 2"
    assert render(both, user) == render(both, user, []) == "default 0"
    assert both.sources == tuple(
        f"{name} {{{{ (tools or []) | length }}}}" for name in ("default", "tool_use")
    )
    assert render(load(["default", "rag"]), user, [{}]) == "default 1"
    assert render(load(["default", "rag"], "rag"), user, [{}]) == "rag 1"
    only = load(["tool_use"])
    assert render(only, user, [{}]) == "tool_use 1"
    with pytest.raises(ChatError, match="this conversation has no tools"):
        render(only, user)
    with pytest.raises(DataError, match=r"by the names rag, x.*Choose one with --chat-template NA"):
        load(["x", "rag"])


def test_targets_are_found_by_the_template_that_is_used():
    marked = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    compared = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    template = Template(compared, tool_use=marked)
    assert template.targets == "mixed"
    assert render_spans(template, messages, [{}]) == [("ab", True)]
    assert render_spans(template, messages) == [("<user>a<assistant>", False), ("b", True)]
    assert Template(marked, tool_use=marked).targets == "marked"


@pytest.mark.parametrize(
    ("spec", "source", "message"),
    [
        (
            "",
            "",
            "neither chat_template.jinja nor chat_template in tokenizer_config.json. Give --chat-template FILE",
        ),
        ("absent.jinja", "", "absent.jinja: can't be read .No such file.*Name a file, or chatml"),
        (
            "chatml",
            "",
            r"no special token <\|im_end\|>.*Give a tokenizer that has it, or --chat-template FILE",
        ),
        ("FILE", "x\n{% if %}", "line 2 is not jinja .*Correct the template"),
        (
            "FILE",
            "{{ bos_token }}",
            'bos_token, which no tokenizer_config.json.*Add "bos_token" there, with null',
        ),
        (
            "FILE",
            "{{ [1, 2] | random }}",
            "uses the filter random, which gives another text each time. Take it out",
        ),
        ("FILE", "{{ lipsum(1) }}", "uses lipsum, which gives another text each time. Take it out"),
        (
            "FILE",
            "(" * 9000 + "{{ " + "(" * 9000 + "1" + ")" * 9000 + " }}",
            "nested too deep.*Correct the template",
        ),
        ("FILE", "{{ " + "9" * 5000 + " }}", "is not jinja .*digits.*Correct the template"),
        (
            "FILE",
            "{% for a in b %}" * 30 + "{% endfor %}" * 30,
            "is not jinja .*too many statically nested blocks",
        ),
        (
            "FILE",
            "{% import 'os' as os %}{{ x | nothing }}",
            "No filter named 'nothing'.*Correct the template",
        ),
        ("FILE", "{{ strftime_now('%d') }}", "writes the date. Give --chat-date YYYY-MM-DD"),
    ],
)
def test_templates_that_can_not_be_used_say_what_to_do(tmp_path, spec, source, message):
    (tmp_path / "t.jinja").write_text(source)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    with pytest.raises(DataError, match=message):
        load_template(str(tmp_path / "t.jinja") if spec == "FILE" else spec, tmp_path, ["</s>"])


def test_bad_dates_settings_and_a_missing_package(tmp_path, monkeypatch):
    (tmp_path / "t.jinja").write_text("{{ strftime_now('%Y-%m-%d') }}")
    given, date = load_template(str(tmp_path / "t.jinja"), "bytes", [], "2024-02-29"), "2024-02-30"
    assert render(given[0], []) == "2024-02-29"
    with pytest.raises(DataError, match=r"--chat-date 2024-02-30: is not a date. Give YYYY-MM-DD"):
        load_template(str(tmp_path / "t.jinja"), "bytes", [], date)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(DataError, match=r"--tokenizer .*is not a JSON object. Correct the file"):
        load_template(str(tmp_path / "t.jinja"), tmp_path, [])
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "jinja2", None)
        with pytest.raises(UsageError, match=r"--chat: needs jinja2.*pip install -e .*\[chat\]'"):
            load_template(str(tmp_path / "t.jinja"), "bytes", [], "2024-02-29")
