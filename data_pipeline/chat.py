"""Chat templates: messages to text, and which of it the assistant said. Rendered as transformers' `apply_chat_template` does.

The same messages always give the same text: a template that writes today's date needs to be told one. Templates are other
people's programs and run in jinja2's sandbox. Knows neither files of conversations nor token ids.
"""

import datetime
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from data_pipeline.errors import DataError, UserError
from data_pipeline.extras import load_package
from data_pipeline.tokenizer import SETTINGS, named_token, read_settings, tokenizer_path

Span = tuple[str, bool]  # text, and whether it is a training target

_CHATML = """
{%- if tools %}{{ raise_exception('chatml has no form for tools') }}{% endif %}
{%- for message in messages %}
{%- if message.tool_calls %}{{ raise_exception('chatml has no form for tool_calls') }}{% endif %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ message.content + '<|im_end|>' }}{% endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
_CHATML_TOKENS = {"<|im_start|>", "<|im_end|>"}
_FILE = "chat_template.jinja"
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_BEGIN, _END = "\ufdd0", "\ufdd1"  # around generated text; noncharacters, which no text has
MARKS = re.compile(f"[{_BEGIN}{_END}]")


class ChatError(ValueError):
    """What is wrong with a conversation, or between it and the template; a matter of this conversation only."""


class Template(NamedTuple):
    """A chat template and what it needs besides messages.

    `tokens` are the variables such as bos_token; `special` the tokenizer's special tokens, as text spells them; `date`, in ISO
    form, is what strftime_now tells (empty: the template doesn't ask).
    """

    source: str
    tokens: tuple[tuple[str, str], ...] = ()
    special: tuple[str, ...] = ()
    date: str = ""

    @property
    def sha256(self) -> str:
        """Its identity."""
        return hashlib.sha256(json.dumps(self).encode()).hexdigest()


def load_template(spec: str, tokenizer: str | Path, special: Iterable[str], date: str = "") -> tuple[Template, list[Path]]:
    """The template that --chat-template names, and the files it is made of.

    Args:
        spec: a file, "chatml", or empty: chat_template.jinja or tokenizer_config.json beside the tokenizer.
        tokenizer: as for `load_tokenizer`; the tokenizer_config.json beside it tells bos_token, eos_token and the like.
        special: its special tokens.
        date: YYYY-MM-DD, for templates that write the date.
    Raises:
        DataError: there is none, it is not jinja, or it needs something that was not given.
    """
    beside = None if tokenizer == "bytes" else tokenizer_path(tokenizer)
    try:
        settings = read_settings(beside) if beside else {}
        source, files = _find_source(spec, beside, settings)
        named = {key: named_token(settings, key) for key in settings if key.endswith("_token")}
    except ValueError as error:
        raise error if isinstance(error, UserError) else DataError(f"--tokenizer {tokenizer}: {error}. Mend it.") from error
    name = f"--chat-template {spec or (files[0] if files else SETTINGS)}"
    files += [beside.with_name(SETTINGS)] if beside and settings else []
    missing = sorted(_CHATML_TOKENS.difference(special)) if spec == "chatml" else []
    if missing:
        raise DataError(
            f"{name}: the tokenizer has no special token {missing[0]}, so that any text could end a turn. "
            "Give a tokenizer that has it, or --chat-template FILE with a template of the tokenizer's own."
        )
    used, variables = _names(source, name)
    if unnamed := sorted(v for v in variables if v.endswith("_token") and v not in named):
        raise DataError(
            f"{name}: writes {unnamed[0]}, which no {SETTINGS} beside the tokenizer names. "
            f'Add "{unnamed[0]}" there, with null if there is no such token.'
        )
    if "strftime_now" in used and not date:
        raise DataError(f"{name}: writes the date. Give --chat-date YYYY-MM-DD, so that the same command gives the same bytes.")
    try:
        datetime.date.fromisoformat(date or "2000-01-01")
    except ValueError as error:
        raise DataError(f"--chat-date {date}: is not a date. Give YYYY-MM-DD.") from error
    tokens = tuple((key, token) for key, token in sorted(named.items()) if token is not None)
    return Template(source, tokens, tuple(sorted(special)), date), files


def _find_source(spec: str, tokenizer: Path | None, settings: dict[str, Any]) -> tuple[str, list[Path]]:
    """Text of the template, and the file that has it, unless `settings` have. DataError: there is none, or it can't be read."""
    if spec == "chatml":
        return _CHATML, []
    file = Path(spec) if spec else tokenizer.with_name(_FILE) if tokenizer else Path(_FILE)
    if spec or (tokenizer and file.exists()):
        try:
            return file.read_text(encoding="utf-8"), [file]
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise DataError(f"--chat-template {file}: can't be read ({reason}). Name a file, or chatml.") from error
    source = settings.get("chat_template")
    if isinstance(source, list):  # several, by name
        source = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}.get("default")
    if not isinstance(source, str):
        raise DataError(
            f"--chat: there is no chat template beside the tokenizer: neither {_FILE} nor chat_template in {SETTINGS}. "
            "Give --chat-template FILE, or --chat-template chatml if the tokenizer has its tokens."
        )
    return source, []


def _names(source: str, name: str) -> tuple[set[str], set[str]]:
    """The names in a template, and those of them that are given from outside. DataError: it is not jinja."""
    jinja2, meta = (load_package(package, "chat", "--chat") for package in ("jinja2", "jinja2.meta"))
    try:
        tree = _environment("").parse(source)
        return {node.name for node in tree.find_all(jinja2.nodes.Name)}, meta.find_undeclared_variables(tree)
    except jinja2.TemplateSyntaxError as error:
        raise DataError(f"{name}: line {error.lineno} is not jinja ({error.message}). Mend the template.") from error


@functools.lru_cache(maxsize=4)
def _environment(date: str) -> Any:
    """jinja2 with what chat templates expect of it."""
    jinja2, sandbox, ext = (load_package(p, "chat", "--chat") for p in ("jinja2", "jinja2.sandbox", "jinja2.ext"))

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

    def to_json(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json  # jinja2's own escapes HTML
    day = datetime.datetime.fromisoformat(date) if date else None
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: day and day.strftime(form)}
    return environment


@functools.lru_cache(maxsize=4)
def _compiled(source: str, date: str) -> Any:
    return _environment(date).from_string(source)


def _render(template: Template, messages: list[dict[str, Any]], tools: list[Any] | None, prompt: bool = False) -> str:
    """Text, with marks around what generation blocks hold. ChatError: the template refuses."""
    # without nulls, as transformers has it: templates write them as "None", and know what to do about missing keys
    messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
    arguments = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": prompt}
    compiled = _compiled(template.source, template.date)
    try:
        return compiled.render(**arguments, **dict(template.tokens))
    except Exception as error:  # of any type: a template is a program
        raise ChatError(f"the chat template refuses it ({str(error)[:200]})") from error


def render(template: Template, messages: list[dict[str, Any]], tools: list[Any] | None = None, prompt: bool = False) -> str:
    """The text of messages, each with at least `role`; `prompt`: begin the assistant's next turn. ChatError: refused."""
    return MARKS.sub("", _render(template, messages, tools, prompt))


def render_spans(template: Template, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> list[Span]:
    """The text of a conversation in spans, of which those are targets that the assistant said, ends of turns included.

    By the template's generation blocks; without them by comparing the whole with what it is up to each turn and after it.
    ChatError: the template refuses, changes what it wrote once more messages follow, or there is nothing of the assistant's.
    """
    text = _render(template, messages, tools)
    if _GENERATION.search(template.source):
        spans, depth = [], 0
        for part in re.split(f"({MARKS.pattern})", text):
            depth += (part == _BEGIN) - (part == _END)
            spans.append(("" if MARKS.match(part) else part, depth > 0))
    else:
        spans = _compare(template, messages, tools, text)
    spans = [
        ("".join(part for part, _ in group), target)
        for target, group in itertools.groupby((span for span in spans if span[0]), lambda span: span[1])
    ]
    if not any(target for _, target in spans):
        raise ChatError("the chat template writes nothing of the assistant's")
    return spans


def _compare(template: Template, messages: list[dict[str, Any]], tools: list[Any] | None, text: str) -> list[Span]:
    """Spans of a template without generation blocks."""
    spans, at = [], 0
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            before = _render(template, messages[:number], tools, prompt=True)
            after = _render(template, messages[: number + 1], tools)
            if not (text.startswith(after) and after.startswith(before) and at <= len(before)):
                raise ChatError(
                    "the chat template writes a turn otherwise once more messages follow, so what the assistant said can't be "
                    "told: mark it with {% generation %} in the template"
                )
            said = after[len(before) :]
            if (bare := said.rstrip()).endswith(template.special):  # nothing has to be said behind an end of turn
                said = bare
            spans += [(text[at : len(before)], False), (said, True)]
            at = len(before) + len(said)
    return [*spans, (text[at:], False)]
