"""Chat templates: rendering of messages to text, with the spans that the assistant wrote. Rendering
matches transformers' `apply_chat_template`.

The same messages always give the same text: a template that writes today's date needs a fixed one.
Templates are other people's programs and run in jinja2's sandbox. This module knows neither files
of conversations nor token ids.
"""

import datetime
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from data_pipeline.base.errors import DataError, UserError
from data_pipeline.base.extras import load_package
from data_pipeline.base.limited_files import read_limited
from data_pipeline.base.strict_json import MAX_FILE_BYTES
from data_pipeline.chat.template import (
    MARKS,
    RANDOM_FILTERS,
    RANDOM_NAMES,
    ChatError,
    Conversation,
    Span,
    Template,
    TemplateNames,
)
from data_pipeline.chat.template_process import ask
from data_pipeline.tokenizer import (
    CHAT_TEMPLATE,
    PROCESSOR_TEMPLATE,
    SETTINGS,
    SPECIAL_TOKENS,
    more_templates,
    named_tokens,
    read_beside,
    read_settings,
    tokenizer_path,
)

__all__ = [
    "MARKS",
    "ChatError",
    "Conversation",
    "Span",
    "Template",
    "load_template",
    "own_sources",
    "render",
    "render_all",
    "render_spans",
]
CHATML = """
{%- if tools %}{{ raise_exception('chatml has no form for tools') }}{% endif %}
{%- for message in messages %}
{%- if message.tool_calls %}{{ raise_exception('chatml has no form for tool_calls') }}{% endif %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ message.content + '<|im_end|>' }}{% endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
# Names of templates; of several, transformers takes these by itself.
_DEFAULT = "default"
_TOOL_USE = "tool_use"
_CHATML_TOKENS = {"<|im_start|>", "<|im_end|>"}


def load_template(
    spec: str,
    tokenizer: str | Path,
    special: Iterable[str],
    date: str = "",
    option: str = "--chat",
) -> tuple[Template, list[Path]]:
    """The template that --chat-template names, and the files it is made of.

    Args:
        spec: a file, "chatml", the name of one of several templates of the tokenizer, or empty:
            chat_template.jinja or tokenizer_config.json beside the tokenizer.
        tokenizer: as for `load_tokenizer`; the tokenizer_config.json beside it has bos_token,
            eos_token and the like.
        special: its special tokens.
        date: YYYY-MM-DD, for templates that write the date.
        option: the option of `prepare` that uses the template.
    Raises:
        DataError: there is none, it is not jinja, is random, or needs something that was not given.
    """
    beside = None
    settings = {}
    try:
        if tokenizer != "bytes":
            beside = tokenizer_path(tokenizer)
            settings = read_settings(beside)
        by_name, files = _find_sources(spec, beside, settings, option)
        named = named_tokens(settings)
    except UserError:
        raise
    except ValueError as error:
        raise DataError(f"--tokenizer {tokenizer}: {error}. Correct the file.") from error
    found_in = SETTINGS
    if files:
        found_in = str(files[0])
    name = f"--chat-template {spec or found_in}"
    if beside:
        names = (beside.with_name(SETTINGS), beside.with_name(SPECIAL_TOKENS))
        files += [file for file in names if file.exists()]
    if spec == "chatml":
        _require_chatml_tokens(name, special)
    for source in by_name.values():
        used = _examine(source, name)
        for variable in used.variables:
            if variable.endswith("_token") and variable not in named:
                raise DataError(
                    f"{name}: writes {variable}, which no {SETTINGS} beside the tokenizer names. "
                    f'Add "{variable}" there, with null if there is no such token.'
                )
        if "strftime_now" in used.names and not date:
            fix = "Give --chat-date YYYY-MM-DD, so that the same command gives the same bytes"
            raise DataError(f"{name}: writes the date. {fix}.")
    try:
        datetime.date.fromisoformat(date or "2000-01-01")
    except ValueError as error:
        raise DataError(f"--chat-date {date}: is not a date. Give YYYY-MM-DD.") from error
    tokens = tuple((key, token) for key, token in sorted(named.items()) if token is not None)
    template = Template(
        source=by_name.get(_DEFAULT, ""),
        tokens=tokens,
        special=tuple(sorted(special)),
        date=date,
        tool_use=by_name.get(_TOOL_USE, ""),
    )
    return template, files


def _require_chatml_tokens(name: str, special: Iterable[str]) -> None:
    """DataError: chatml writes a special token that the tokenizer does not have."""
    for token in sorted(_CHATML_TOKENS.difference(special)):
        raise DataError(
            f"{name}: the tokenizer has no special token {token}, so that any text could end a "
            "turn. Give a tokenizer that has it, or --chat-template FILE with a template of the "
            "tokenizer's own."
        )


def _find_sources(
    spec: str, tokenizer: Path | None, settings: dict[str, Any], option: str
) -> tuple[dict[str, str], list[Path]]:
    """Return the templates to use by name, "default" and perhaps "tool_use" for conversations with
    tools, and the file that holds them, unless `settings` do.

    `spec` may also be the name of one of the tokenizer's own templates.

    Raises:
        DataError: there is no template, or a file can't be read.
    """
    if spec == "chatml":
        return {_DEFAULT: CHATML}, []
    own, files = own_sources(tokenizer, settings)
    if spec in own:
        return {_DEFAULT: own[spec]}, files
    if spec:
        return {_DEFAULT: _read_source(Path(spec))}, [Path(spec)]
    used = {name: own[name] for name in (_DEFAULT, _TOOL_USE) if name in own}
    if not used and own:
        raise DataError(
            f"{option}: the tokenizer has chat templates by the names {', '.join(sorted(own))}, "
            f"and none is {_DEFAULT}. Choose one with --chat-template NAME."
        )
    if not used:
        raise DataError(
            f"{option}: there is no chat template beside the tokenizer: neither {CHAT_TEMPLATE} "
            f"nor chat_template in {SETTINGS}. Give --chat-template FILE, or --chat-template "
            "chatml if the tokenizer has its tokens."
        )
    return used, files


def own_sources(
    tokenizer: Path | None, settings: Mapping[str, Any]
) -> tuple[dict[str, str], list[Path]]:
    """Return all templates beside a tokenizer by their names, and the files that hold them, unless
    `settings` do. An unnamed template is "default".

    As in transformers, files of templates replace those in `settings`. A chat_template.json, which
    only processors read, counts where there is no other template.

    Args:
        tokenizer: its file; None: it has none.
        settings: of `read_settings`.

    Raises:
        DataError: a file of a template can't be read.
        ValueError: chat_template.json is not a JSON object.
    """
    files = []
    by_name = {}
    if tokenizer:
        file = tokenizer.with_name(CHAT_TEMPLATE)
        if file.exists():
            by_name[_DEFAULT] = _read_source(file)
            files.append(file)
        for file in more_templates(tokenizer):
            by_name[file.name.removesuffix(".jinja")] = _read_source(file)
            files.append(file)
    by_name = by_name or _named_sources(settings.get("chat_template"))
    if tokenizer and not by_name:
        found = read_beside(tokenizer, PROCESSOR_TEMPLATE)
        by_name = _named_sources(found.get("chat_template"))
        if by_name:
            files.append(tokenizer.with_name(PROCESSOR_TEMPLATE))
    return by_name, files


def _named_sources(found: Any) -> dict[str, str]:
    """Templates by their names, from `chat_template` of a file of settings: a text, an object of
    texts by names, or a list of objects with `name` and `template`."""
    if isinstance(found, str):
        return {_DEFAULT: found}
    if isinstance(found, list):
        entries = [entry for entry in found if isinstance(entry, dict)]
        found = {str(entry.get("name")): entry.get("template") for entry in entries}
    if not isinstance(found, dict):
        return {}
    return {name: source for name, source in found.items() if isinstance(source, str)}


def _read_source(file: Path) -> str:
    """The text of a template's file. DataError: it can't be read."""
    try:
        source = read_limited(file, MAX_FILE_BYTES).decode()
        return source.replace("\r\n", "\n").replace("\r", "\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(
            f"--chat-template {file}: can't be read ({reason}). Name a file, or chatml."
        ) from error


def _examine(source: str, name: str) -> TemplateNames:
    """The names that a template uses. DataError: it is not jinja, or would write something else
    each time."""
    # Where it is missing, the error names the extra that brings it.
    load_package("jinja2", "chat", "--chat")
    found = ask("examine", source, what=name)
    if isinstance(found, str):
        raise DataError(f"{name}: {found}. Correct the template.")
    used = TemplateNames(*found)
    random = [f"the filter {filter}" for filter in used.filters if filter in RANDOM_FILTERS]
    random += [variable for variable in used.variables if variable in RANDOM_NAMES]
    if random:
        rule = "which gives another text each time"
        raise DataError(f"{name}: uses {random[0]}, {rule}. Take it out of the template.")
    return used


def render(
    template: Template,
    messages: list[dict[str, Any]],
    tools: list[Any] | None = None,
    prompt: bool = False,
) -> str:
    """The text of messages, each with at least `role`; `prompt`: begin the assistant's next turn.

    ChatError: refused. DataError: the template does not end, or takes all memory.
    """
    return ask("render", tuple(template), messages, tools, prompt)


def render_all(
    template: Template, conversations: list[Conversation]
) -> list[list[Span] | ChatError]:
    """Return what `render_spans` gives or raises for each conversation; several at a time, since
    switching between processes takes time.

    DataError: the template does not end for one of them, or takes all memory.
    """
    outcomes = ask("render_all", tuple(template), conversations)
    found: list[list[Span] | ChatError] = []
    for outcome in outcomes:
        if isinstance(outcome, str):
            found.append(ChatError(outcome))
        else:
            found.append([(text, bool(is_target)) for text, is_target in outcome])
    return found


def render_spans(
    template: Template,
    messages: list[dict[str, Any]],
    tools: list[Any] | None = None,
) -> list[Span]:
    """Return the text of a conversation in spans; the targets are the spans that the assistant
    wrote, including ends of turns.

    By the template's generation blocks. Without them an answer is what the template writes behind
    the messages before it and add_generation_prompt; a template without that prompt also
    renders another answer, and the text before both is the header of the turn, no target.

    ChatError: the template refuses, changes what it wrote once more messages follow, or there is
        nothing of the assistant's.
    DataError: the template does not end, or takes all memory.
    """
    (spans,) = render_all(template, [(messages, tools, [])])
    if isinstance(spans, ChatError):
        raise spans
    return spans
