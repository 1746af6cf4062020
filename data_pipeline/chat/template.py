"""Rendering of chat templates, as transformers' `apply_chat_template` does: from messages to text,
and to the parts that the assistant wrote.

A template is somebody else's program. Run it by `template_process`, which ends a template that does
not end by itself. The same messages always give the same text: a template can use neither random
numbers nor the clock, and text with memory addresses is refused.
"""

import datetime
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from data_pipeline.base.extras import load_package

# Text, and whether it is a training target.
Span = tuple[str, bool]
# Messages; tools; and the numbers of the messages that hold no target.
Conversation = tuple[list[dict[str, Any]], list[Any] | None, list[int]]
# Everything random that jinja2 has.
RANDOM_FILTERS = frozenset(["random"])
RANDOM_NAMES = frozenset(["lipsum"])
# The most that a template may write for one conversation.
MAX_CHARACTERS = 1 << 26
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# As Python writes an object that has no text of its own.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+>")
# Around generated text: noncharacters, which no text has.
_BEGIN = "\ufdd0"
_END = "\ufdd1"
# An answer that no conversation has.
_PROBE = "\ufdd0probe\ufdd1"
MARKS = re.compile(f"[{_BEGIN}{_END}]")
_UNTOLD = (
    "so the assistant's text can't be found: mark it with {% generation %} in the template, "
    "as in {% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}"
)
_PROMPT = "add_generation_prompt"
# The role whose text is learnt.
_SAYS = "assistant"
_SYSTEM = "system"
_DEVELOPER = "developer"
_USER = "user"
# Characters in which messages that are not where they are expected are looked for.
_MOST_SEARCHED = 1 << 26
_CHANGES = f"the chat template writes a turn differently when more messages follow, {_UNTOLD}"


class ChatError(ValueError):
    """A conversation is not valid, or does not go with the template. Other conversations are not
    affected."""


class Template(NamedTuple):
    """A chat template and what it needs besides messages.

    Attributes:
        source: the template of conversations; empty: there is only one for conversations with
            tools.
        tokens: the variables such as bos_token.
        special: the texts of the tokenizer's special tokens.
        date: in ISO form, the date that strftime_now formats; empty: the template does not call it.
        tool_use: the template of conversations with tools; empty: `source` is.
    """

    source: str
    tokens: tuple[tuple[str, str], ...] = ()
    special: tuple[str, ...] = ()
    date: str = ""
    tool_use: str = ""

    def source_for(self, tools: list[Any] | None) -> str:
        """Return the source of the template for a conversation with these tools, as transformers
        chooses it.

        Raises:
            ChatError: there are no tools, and the only template is for conversations with tools.
        """
        if tools and self.tool_use:
            return self.tool_use
        if not self.source:
            raise ChatError(
                "the tokenizer has a chat template tool_use for conversations with tools, none by "
                "the name default for others, and this conversation has no tools"
            )
        return self.source

    @property
    def sources(self) -> tuple[str, ...]:
        """The sources of all templates."""
        return tuple(filter(None, (self.source, self.tool_use)))

    @property
    def sha256(self) -> str:
        """Digest of the template."""
        return hashlib.sha256(json.dumps(self).encode()).hexdigest()

    @property
    def targets(self) -> str:
        """The method that finds the assistant's text: "marked" by {% generation %}, or "compared"
        with the text of fewer messages; "mixed" where one of two templates has marks.
        """
        found = {is_marked(source) for source in self.sources}
        if len(found) > 1:
            return "mixed"
        return "marked" if True in found else "compared"


def is_marked(source: str) -> bool:
    """Return whether a template marks the assistant's text by {% generation %}."""
    return _GENERATION.search(source) is not None


class TemplateNames(NamedTuple):
    """The names that a template uses: all names, the variables that are given from outside, and the
    filters; each sorted."""

    names: list[str]
    variables: list[str]
    filters: list[str]


def examine(source: str) -> TemplateNames | str:
    """Return what a template uses, or why it is not a template."""
    jinja2 = load_package("jinja2", "chat", "--chat")
    meta = load_package("jinja2.meta", "chat", "--chat")
    try:
        tree = _environment("").parse(source)
        names = {node.name for node in tree.find_all(jinja2.nodes.Name)}
        variables = meta.find_undeclared_variables(tree)
        filters = {node.name for node in tree.find_all(jinja2.nodes.Filter)}
        contents = TemplateNames(sorted(names), sorted(variables), sorted(filters))
        _compiled(source, "")
        return contents
    except jinja2.TemplateSyntaxError as error:
        return f"line {error.lineno} is not jinja ({error.message})"
    except RecursionError:
        return "is not jinja that can be read (something in it is nested too deep)"
    except (ValueError, SyntaxError, OverflowError) as error:
        # Found by Python when it compiles what jinja2 made of the template.
        return f"is not jinja ({str(error)[:200]})"


@functools.lru_cache(maxsize=4)
def _environment(date: str) -> Any:
    """jinja2 with what chat templates expect of it."""
    jinja2 = load_package("jinja2", "chat", "--chat")
    sandbox = load_package("jinja2.sandbox", "chat", "--chat")
    ext = load_package("jinja2.ext", "chat", "--chat")

    class GenerationTag(ext.Extension):
        """Jinja extension for {% generation %}, which marks its content as written by the
        assistant.
        """

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
        extensions=[GenerationTag, ext.loopcontrols],
        finalize=no_bytes,
    )
    # jinja2's own escapes HTML.
    environment.filters["tojson"] = to_json
    # Replaced, not removed: a template may name a filter as text, for `map`.
    for name in RANDOM_FILTERS:
        environment.filters[name] = refuse_random
    for name in RANDOM_NAMES:
        del environment.globals[name]
    day = None
    if date:
        day = datetime.datetime.fromisoformat(date)

    def strftime_now(form: str) -> str | None:
        if day is None:
            return None
        return day.strftime(form)

    environment.globals |= {"raise_exception": refuse, "strftime_now": strftime_now}
    return environment


@functools.lru_cache(maxsize=4)
def _compiled(source: str, date: str) -> Any:
    return _environment(date).from_string(source)


def _require_all_written(messages: list[dict[str, Any]], text: str) -> None:
    """ChatError: the text lacks what a system, developer or user message says: its role or its
    place is none that the template knows.

    Answers and tool results are not looked for: templates leave out reasoning, and write results
    as JSON.
    """
    at = 0
    searched = 0
    for number, message in enumerate(messages, 1):
        role = message.get("role")
        if role not in (_SYSTEM, _DEVELOPER, _USER):
            continue
        for part in _texts_of(message.get("content")):
            # Most are in their order, so that all searches together go through the text once.
            found = text.find(part, at)
            if found >= 0:
                at = found + len(part)
                continue
            searched += len(text)
            if searched > _MOST_SEARCHED:
                return
            if part not in text and _without_space(part) not in _without_space(text):
                raise ChatError(
                    f"the chat template leaves out message {number}, of the role {role}: "
                    f"{part[:60]!r}. Give it another role, or use a template that writes it"
                )


def _texts_of(content: Any) -> list[str]:
    """The texts of a message's content without the space around them: one, or one for each part."""
    texts = [content]
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
    return [text.strip() for text in texts if isinstance(text, str) and text.strip()]


def _without_space(text: str) -> str:
    return "".join(text.split())


def _render(
    template: Template,
    messages: list[dict[str, Any]],
    tools: list[Any] | None,
    prompt: bool = False,
) -> str:
    """Return the text of messages, with marks around what generation blocks hold. ChatError: the
    template refuses them."""
    # Without nulls, as in transformers: templates write a null as "None", but can deal with missing
    # keys.
    messages = [
        {key: value for key, value in message.items() if value is not None} for message in messages
    ]
    source = template.source_for(tools)
    compiled = _compiled(source, template.date)
    try:
        text = compiled.render(
            messages=messages,
            tools=tools,
            documents=None,
            add_generation_prompt=prompt,
            **dict(template.tokens),
        )
    except MemoryError:
        raise
    except Exception as error:
        # A template is a program, which may raise anything.
        raise ChatError(f"the chat template refuses it ({str(error)[:200]})") from error
    if len(text) > MAX_CHARACTERS:
        raise ChatError(f"the chat template writes more than {MAX_CHARACTERS:,} characters")
    if " at 0x" in text:
        given = source + json.dumps([messages, tools], ensure_ascii=False)
        # By a set, since a search for each of them would take quadratic time.
        if not set(_ADDRESS.findall(text)) <= set(_ADDRESS.findall(given)):
            raise ChatError(
                "the chat template writes an object's address in memory, which is another one each "
                "time"
            )
    return text


def render(
    template: Template,
    messages: list[dict[str, Any]],
    tools: list[Any] | None = None,
    prompt: bool = False,
) -> str:
    """See `chat.render`."""

    def write(messages: list[dict[str, Any]]) -> tuple[str, str]:
        text = MARKS.sub("", _render(template, messages, tools, prompt))
        return text, text

    return _write_all(write, messages)


def render_spans(
    template: Template,
    messages: list[dict[str, Any]],
    tools: list[Any] | None = None,
    untaught: Sequence[int] = (),
) -> list[Span]:
    """See `chat.render_spans`; nothing in the messages of the numbers `untaught` is a target."""

    def write(messages: list[dict[str, Any]]) -> tuple[list[Span], str]:
        text = _render(template, messages, tools)
        if is_marked(template.source_for(tools)):
            blocks = _blocks_of(template, messages, tools, untaught, text.count(_BEGIN))
            spans = _split_at_marks(text, blocks)
        else:
            spans = _compare(template, messages, tools, text, untaught)
        spans = _joined(spans)
        if not any(is_target for _, is_target in spans):
            raise ChatError("the chat template writes nothing of the assistant's")
        return spans, text

    return _write_all(write, messages)


def _write_all[T](
    write: Callable[[list[dict[str, Any]]], tuple[T, str]], messages: list[dict[str, Any]]
) -> T:
    """Return what `write` makes of messages, which also gives their text.

    A message of the role `developer` is written as transformers does it, if the template writes it
    so, and otherwise as one of the role `system`, which OpenAI's API has renamed.

    ChatError: the template refuses the messages, or leaves one out.
    """

    def write_checked(messages: list[dict[str, Any]]) -> T:
        result, text = write(messages)
        _require_all_written(messages, text)
        return result

    try:
        return write_checked(messages)
    except ChatError:
        if not any(message.get("role") == _DEVELOPER for message in messages):
            raise
    return write_checked(
        [
            message | {"role": _SYSTEM} if message.get("role") == _DEVELOPER else message
            for message in messages
        ]
    )


def _blocks_of(
    template: Template,
    messages: list[dict[str, Any]],
    tools: list[Any] | None,
    numbers: Sequence[int],
    num_blocks: int,
) -> set[int]:
    """Return which generation blocks, counted from 0, the template writes for messages of these
    numbers, out of all `num_blocks` blocks."""
    # Blocks are counted, not text compared: a template may write a turn differently when more
    # messages follow.
    found = set()
    wanted = set(numbers)
    starts = [number for number in numbers if number - 1 not in wanted]
    stops = [number + 1 for number in numbers if number + 1 not in wanted]
    try:
        for start, stop in zip(starts, stops, strict=True):
            before = 0
            if start:
                before = _render(template, messages[:start], tools).count(_BEGIN)
            found.update(range(before, _render(template, messages[:stop], tools).count(_BEGIN)))
    except ChatError:
        # The template refuses a part of the conversation. Then each answer has a block, or nothing
        # is known.
        turns = [number for number, message in enumerate(messages) if message["role"] == _SAYS]
        if len(turns) != num_blocks:
            raise
        found = {block for block, number in enumerate(turns) if number in wanted}
    return found


def _split_at_marks(text: str, untaught: set[int]) -> list[Span]:
    """Spans of a text with marks around what generation blocks hold, of which those of the numbers
    `untaught`, from 0 on, are no targets."""
    spans: list[Span] = []
    depth = 0
    block = -1
    for part in re.split(f"({MARKS.pattern})", text):
        if part == _BEGIN:
            depth += 1
            block += 1
        elif part == _END:
            depth -= 1
        else:
            spans.append((part, depth > 0 and block not in untaught))
    return spans


def _joined(spans: list[Span]) -> list[Span]:
    """Spans without empty ones; neighbours of the same kind become one."""
    joined: list[Span] = []
    filled = (span for span in spans if span[0])
    for is_target, group in itertools.groupby(filled, lambda span: span[1]):
        text = "".join(part for part, _ in group)
        joined.append((text, is_target))
    return joined


def render_all(template: Template, conversations: list[Conversation]) -> list[list[Span] | str]:
    """Return the spans of each conversation, or the message of its ChatError."""
    results: list[list[Span] | str] = []
    for conversation in conversations:
        try:
            results.append(render_spans(template, *conversation))
        except ChatError as error:
            results.append(str(error))
    return results


def _compare(
    template: Template,
    messages: list[dict[str, Any]],
    tools: list[Any] | None,
    text: str,
    untaught: Sequence[int],
) -> list[Span]:
    """Spans of a template without generation blocks. An answer is the text that the template adds
    when that message is added; messages of the numbers `untaught` are no targets."""
    spans: list[Span] = []
    at = 0
    for number, message in enumerate(messages):
        if message["role"] != _SAYS or number in untaught:
            continue
        before, after = _around(template, messages[: number + 1], tools)
        if not text.startswith(after):
            raise ChatError(_CHANGES)
        if at > len(before):
            raise ChatError(
                f"the chat template writes turns in another order than the messages, {_UNTOLD}"
            )
        answer = after[len(before) :]
        bare = answer.rstrip()
        # White space behind an end of turn is not part of the answer.
        if bare.endswith(template.special):
            answer = bare
        spans.append((text[at : len(before)], False))
        spans.append((answer, True))
        at = len(before) + len(answer)
    return [*spans, (text[at:], False)]


def _around(
    template: Template, messages: list[dict[str, Any]], tools: list[Any] | None
) -> tuple[str, str]:
    """The text before the last message, which is the assistant's, with the header of its turn; and
    the text with that message."""
    earlier = messages[:-1]
    try:
        unprompted = _render(template, earlier, tools)
        before = unprompted
        if _PROMPT in template.source_for(tools):
            before = _render(template, earlier, tools, prompt=True)
    except ChatError as error:
        raise ChatError(f"{error}, given only the messages before an answer, {_UNTOLD}") from error
    after = _render(template, messages, tools)
    if not after.startswith(before) and before == unprompted:
        raise ChatError(_CHANGES)
    if not after.startswith(before):
        raise ChatError(
            "the chat template begins a turn differently with add_generation_prompt than with an "
            f"answer, {_UNTOLD}"
        )
    if before != unprompted:
        return before, after
    # The template has no generation prompt. What it writes before any answer is the header of the
    # turn, which is not a training target.
    known = {key: messages[-1][key] for key in ("role", "name") if key in messages[-1]}
    try:
        probe = _render(template, [*earlier, known | {"content": _PROBE}], tools)
    except ChatError as error:
        raise ChatError(f"{error}, given another answer, {_UNTOLD}") from error
    header, found, _ = probe.partition(_PROBE)
    if not found or not header.startswith(before):
        raise ChatError(
            "the chat template has no add_generation_prompt, and changes the text of an answer, "
            f"{_UNTOLD}"
        )
    # A space before the answer belongs to its first token.
    if not header[len(before) :].strip():
        return before, after
    if not after.startswith(header):
        raise ChatError(
            "the chat template has no add_generation_prompt, and begins its turns in several ways, "
            f"{_UNTOLD}"
        )
    return header, after
