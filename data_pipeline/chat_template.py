"""A chat template at work: messages to text, and which of it the assistant said, as transformers'
`apply_chat_template` does.

A template is somebody else's program: run it by `template_process`, which ends one that does not.
The same messages always give the same text: what is random or knows the time is taken away from it,
and memory addresses are refused.
"""

import datetime
import functools
import hashlib
import itertools
import json
import re
from typing import Any, NamedTuple

from data_pipeline.extras import load_package

Span = tuple[str, bool]  # text, and whether it is a training target
Conversation = tuple[list[dict[str, Any]], list[Any] | None]  # messages, and tools
RANDOM_FILTERS, RANDOM_NAMES = frozenset(["random"]), frozenset(["lipsum"])  # all that jinja2 has
MAX_CHARACTERS = 1 << 26  # that a template may write for one conversation
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_ADDRESS = re.compile(
    r" at 0x[0-9a-fA-F]+>"
)  # as Python writes an object that has no text of its own
_BEGIN, _END = "\ufdd0", "\ufdd1"  # around generated text; noncharacters, which no text has
_PROBE = "\ufdd0probe\ufdd1"  # an answer that no conversation has
MARKS = re.compile(f"[{_BEGIN}{_END}]")
_UNTOLD = (
    "so what the assistant said can't be told: mark it with {% generation %} in the template, as in "
    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}"
)
_PROMPT = "add_generation_prompt"
_CHANGES = f"the chat template writes a turn otherwise once more messages follow, {_UNTOLD}"


class ChatError(ValueError):
    """What is wrong with a conversation, or between it and the template; a matter of this
    conversation only."""


class Template(NamedTuple):
    """A chat template and what it needs besides messages.

    `tokens` are the variables such as bos_token; `special` the tokenizer's special tokens, as text
    spells them; `date`, in ISO form, is what strftime_now tells (empty: the template doesn't ask).
    """

    source: str
    tokens: tuple[tuple[str, str], ...] = ()
    special: tuple[str, ...] = ()
    date: str = ""

    @property
    def sha256(self) -> str:
        """Its identity."""
        return hashlib.sha256(json.dumps(self).encode()).hexdigest()

    @property
    def marked(self) -> bool:
        """Whether it says itself what is of the assistant, by {% generation %}."""
        return _GENERATION.search(self.source) is not None


class Contents(NamedTuple):
    """The names that a template uses: all, those that are given from outside, and those of filters;
    each sorted."""

    names: list[str]
    variables: list[str]
    filters: list[str]


def examine(source: str) -> Contents | str:
    """What a template uses, or why it can't be one."""
    jinja2, meta = (
        load_package(package, "chat", "--chat") for package in ("jinja2", "jinja2.meta")
    )
    try:
        tree = _environment("").parse(source)
        names = {node.name for node in tree.find_all(jinja2.nodes.Name)}
        filters = {node.name for node in tree.find_all(jinja2.nodes.Filter)}
        contents = Contents(
            sorted(names), sorted(meta.find_undeclared_variables(tree)), sorted(filters)
        )
        _compiled(source, "")
        return contents
    except jinja2.TemplateSyntaxError as error:
        return f"line {error.lineno} is not jinja ({error.message})"
    except RecursionError:
        return "is not jinja that can be read (something in it is nested too deep)"
    except (ValueError, SyntaxError, OverflowError) as error:  # what jinja2 leaves to Python
        return f"is not jinja ({str(error)[:200]})"


@functools.lru_cache(maxsize=4)
def _environment(date: str) -> Any:
    """jinja2 with what chat templates expect of it."""
    jinja2, sandbox, ext = (
        load_package(p, "chat", "--chat") for p in ("jinja2", "jinja2.sandbox", "jinja2.ext")
    )

    class Generation(ext.Extension):
        """{% generation %}: marks what it holds as said by the assistant."""

        tags = {"generation"}  # noqa: RUF012 - jinja2's way

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            return _BEGIN + caller() + _END

    def refuse(message: str) -> None:
        raise ChatError(message)

    def refuse_random(*_: Any) -> None:
        raise ChatError("its filter random gives another text each time")

    def no_bytes(value: Any) -> Any:
        if isinstance(value, bytes):
            raise ChatError("it writes bytes, not text")
        return value

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, ext.loopcontrols],
        finalize=no_bytes,
    )
    environment.filters["tojson"] = to_json  # jinja2's own escapes HTML
    for name in RANDOM_FILTERS:  # not removed: a template may name one as text, for `map`
        environment.filters[name] = refuse_random
    for name in RANDOM_NAMES:
        del environment.globals[name]
    day = datetime.datetime.fromisoformat(date) if date else None
    environment.globals |= {
        "raise_exception": refuse,
        "strftime_now": lambda form: day and day.strftime(form),
    }
    return environment


@functools.lru_cache(maxsize=4)
def _compiled(source: str, date: str) -> Any:
    return _environment(date).from_string(source)


def _render(
    template: Template,
    messages: list[dict[str, Any]],
    tools: list[Any] | None,
    prompt: bool = False,
) -> str:
    """Text, with marks around what generation blocks hold. ChatError: the template refuses."""
    # without nulls, as transformers has it: templates write them as "None", and know what to do
    # about missing keys
    messages = [
        {key: value for key, value in message.items() if value is not None} for message in messages
    ]
    arguments = {
        "messages": messages,
        "tools": tools,
        "documents": None,
        "add_generation_prompt": prompt,
    }
    compiled = _compiled(template.source, template.date)
    try:
        text = compiled.render(**arguments, **dict(template.tokens))
    except MemoryError:
        raise
    except Exception as error:  # of any type: a template is a program
        raise ChatError(f"the chat template refuses it ({str(error)[:200]})") from error
    if len(text) > MAX_CHARACTERS:
        raise ChatError(f"the chat template writes more than {MAX_CHARACTERS:,} characters")
    if " at 0x" in text:
        given = template.source + json.dumps([messages, tools], ensure_ascii=False)
        if any(address not in given for address in _ADDRESS.findall(text)):
            raise ChatError(
                "the chat template writes an object's address in memory, which is another one each time"
            )
    return text


def render(
    template: Template,
    messages: list[dict[str, Any]],
    tools: list[Any] | None = None,
    prompt: bool = False,
) -> str:
    """See `chat.render`."""
    return MARKS.sub("", _render(template, messages, tools, prompt))


def render_spans(
    template: Template, messages: list[dict[str, Any]], tools: list[Any] | None = None
) -> list[Span]:
    """See `chat.render_spans`."""
    text = _render(template, messages, tools)
    if template.marked:
        spans, depth = [], 0
        for part in re.split(f"({MARKS.pattern})", text):
            depth += (part == _BEGIN) - (part == _END)
            spans.append(("" if MARKS.match(part) else part, depth > 0))
    else:
        spans = _compare(template, messages, tools, text)
    spans = [
        ("".join(part for part, _ in group), target)
        for target, group in itertools.groupby(
            (span for span in spans if span[0]), lambda span: span[1]
        )
    ]
    if not any(target for _, target in spans):
        raise ChatError("the chat template writes nothing of the assistant's")
    return spans


def render_all(template: Template, conversations: list[Conversation]) -> list[list[Span] | str]:
    """Of each conversation its spans, or the message of the ChatError."""
    results: list[list[Span] | str] = []
    for messages, tools in conversations:
        try:
            results.append(render_spans(template, messages, tools))
        except ChatError as error:
            results.append(str(error))
    return results


def _compare(
    template: Template, messages: list[dict[str, Any]], tools: list[Any] | None, text: str
) -> list[Span]:
    """Spans of a template without generation blocks: an answer is what the template writes once
    that message is there."""
    spans: list[Span] = []
    at = 0
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = _around(template, messages[: number + 1], tools)
        if not text.startswith(after):
            raise ChatError(_CHANGES)
        if at > len(before):
            raise ChatError(
                f"the chat template writes a turn before the one that it follows, {_UNTOLD}"
            )
        said = after[len(before) :]
        bare = said.rstrip()
        if bare.endswith(template.special):  # nothing has to be said behind an end of turn
            said = bare
        spans.append((text[at : len(before)], False))
        spans.append((said, True))
        at = len(before) + len(said)
    return [*spans, (text[at:], False)]


def _around(
    template: Template, messages: list[dict[str, Any]], tools: list[Any] | None
) -> tuple[str, str]:
    """The text up to the last message, which is the assistant's, with the header of its turn; and
    the text with it."""
    earlier = messages[:-1]
    try:
        unprompted = _render(template, earlier, tools)
        before = (
            _render(template, earlier, tools, prompt=True)
            if _PROMPT in template.source
            else unprompted
        )
    except ChatError as error:
        raise ChatError(f"{error}, given only the messages before an answer, {_UNTOLD}") from error
    after = _render(template, messages, tools)
    if not after.startswith(before) and before == unprompted:
        raise ChatError(_CHANGES)
    if not after.startswith(before):
        raise ChatError(
            f"the chat template begins a turn otherwise with add_generation_prompt than with an answer, {_UNTOLD}"
        )
    if before != unprompted:
        return before, after
    # The template has no generation prompt. What it writes before any answer is the header, which
    # nobody has to learn.
    known = {key: messages[-1][key] for key in ("role", "name") if key in messages[-1]}
    try:
        probe = _render(template, [*earlier, known | {"content": _PROBE}], tools)
    except ChatError as error:
        raise ChatError(f"{error}, given another answer, {_UNTOLD}") from error
    header, found, _ = probe.partition(_PROBE)
    if not found or not header.startswith(before):
        raise ChatError(
            f"the chat template has no add_generation_prompt, and does not write an answer as it is, {_UNTOLD}"
        )
    if not header[len(before) :].strip():  # a space before the answer belongs to its first token
        return before, after
    if not after.startswith(header):
        raise ChatError(
            f"the chat template has no add_generation_prompt, and begins its turns in several ways, {_UNTOLD}"
        )
    return header, after
