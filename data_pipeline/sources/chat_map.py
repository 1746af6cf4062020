"""Columns of a record to messages, by templates: what `--map` says. Knows neither files of records
nor chat templates.

A map is a JSON object:

* `messages`: a list of messages in their order, each with `role` and `content`, a template in which
  `{column}` stands for the text of a column, `{column.key}` for what is in an object or a list, and
  `{{` and `}}` for braces. `tool_calls` names a column with a list, or with a list in JSON. With
  `if`, a message is there only if that column is there and not empty; with `unless`, only if it is
  not.
* Instead of a message, `each` names a column with a list, and `messages` those that each of its
  items
  becomes: its `{key}` if it is an object, `{0}` and so on if it is a list, and the column's name if
  it is text. Of several columns, items are taken side by side, by the names of their columns.
* `chosen` and `rejected`, or `completion`: templates of answers, for preferences; the messages are
  then their prompt.
* `tools`: the column with the tools of a conversation.
* `system`: the system message of conversations that have none.
* `derive`: a name of `DERIVED`, which adds columns to a record.
"""

import json
import os
import shlex
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from data_pipeline.base.errors import UsageError
from data_pipeline.base.strict_json import loads
from data_pipeline.chat.chat import ChatError
from data_pipeline.sources import gsm8k

SYSTEM_ROLES = ("system", "developer")
ROLES = (*SYSTEM_ROLES, "user", "assistant", "tool")
# Functions that make columns of those that a data set has, by its name.
DERIVED: dict[str, Callable[[Mapping[str, Any]], dict[str, str]]] = {"gsm8k": gsm8k.derive}
# Instructions, of which some are about an input.
# Source: Taori et al. 2023, https://github.com/tatsu-lab/stanford_alpaca
_ALPACA = {
    "messages": [
        {"role": "user", "content": "{instruction}\n\n{input}", "if": "input"},
        {"role": "user", "content": "{instruction}", "unless": "input"},
        {"role": "assistant", "content": "{output}"},
    ]
}
# Maps by name.
NAMED: dict[str, dict[str, Any]] = {"gsm8k": gsm8k.MAP, "alpaca": _ALPACA}
_EXAMPLE = "--map user='{question}' assistant='{answer}'"
_IN_MESSAGE = frozenset({"role", "content", "tool_calls", "if", "unless"})
_IN_EACH = frozenset({"each", "messages"})
# The answers of a preference.
ANSWERS = ("chosen", "rejected", "completion")
_IN_MAP = frozenset({"messages", "tools", "system", "derive", *ANSWERS})
_TOOLS = "tools"


class MissingColumn(ChatError):
    """A record lacks a column that a map names."""


# The parts of a template: each literal text, and the column behind it, if there is one.
type _Template = tuple[tuple[str, str | None], ...]


class _Message(NamedTuple):
    """A message: its template, and the columns that its fields name."""

    role: str
    parts: _Template
    tool_calls: str
    present: str
    absent: str


class _MessageLoop(NamedTuple):
    """Messages for each item of a column, or for the items of several columns side by side."""

    columns: tuple[str, ...]
    messages: tuple[_Message, ...]


class ChatMap(NamedTuple):
    """Mapping of a record's columns to messages.

    Attributes:
        entries: its messages, in their order.
        answers: by names of `ANSWERS`; empty: it is not of preferences.
        tools: the column that holds tools; empty: none does.
        system: the system message of conversations that have none, unless --system gives another;
            empty: no message.
        derive: a name of `DERIVED`, or empty.
        text: all of it, in JSON: its identity.
    """

    entries: tuple[_Message | _MessageLoop, ...]
    answers: tuple[tuple[str, _Template], ...]
    tools: str
    system: str
    derive: str
    text: str


def read_map(words: Sequence[str]) -> ChatMap:
    """Return the map that the words of `--map` describe: one name or file, or ROLE=TEMPLATE,
    ANSWER=TEMPLATE and tools=COLUMN.

    UsageError: they give none.
    """
    first = words[0]
    if _role_of(first) in (*ROLES, *ANSWERS, _TOOLS):
        return _of_words(words)
    if len(words) > 1 or (first not in NAMED and not first.endswith(".json")):
        rule = f"is not ROLE=TEMPLATE with a role of {', '.join(ROLES)} (or for preferences of "
        rule += f"{', '.join(ANSWERS)}), nor tools=COLUMN"
        other = f"a name ({', '.join(NAMED)}) or the path of a .json file, alone"
        raise UsageError(f"--map {first}: {rule}. Give such, as in {_EXAMPLE}, or {other}.")
    if first in NAMED:
        return _of_values(NAMED[first], first)
    try:
        values = loads(Path(os.path.expanduser(first)).read_bytes())
    except OSError as error:
        raise UsageError(
            f"--map {first}: can't be read ({error.strerror}). Name a file, or one of "
            f"{', '.join(NAMED)}."
        ) from error
    except ValueError as error:
        raise UsageError(f"--map {first}: is not JSON ({error}). Correct the file.") from error
    return _of_values(values, first)


def _role_of(word: str) -> str:
    """Return the part of a word before the first =; empty if there is none."""
    role, equals, _ = word.partition("=")
    return role if equals else ""


def _of_words(words: Sequence[str]) -> ChatMap:
    """The map of words such as user={question} and tools=functions."""
    values: dict[str, Any] = {"messages": []}
    for word in words:
        role, _, text = word.partition("=")
        if role not in (*ANSWERS, _TOOLS):
            values["messages"].append({"role": role, "content": text})
        elif role in values:
            raise UsageError(f"--map {word}: {role} is given twice. Keep one of them.")
        else:
            values[role] = text
    return _of_values(values, " ".join(words))


def _of_values(values: Any, name: str) -> ChatMap:
    """The map of a JSON value. UsageError: it is none."""
    _require_keys(values, _IN_MAP, {"messages"}, name)
    entries = []
    for entry in _require_list(values["messages"], name):
        if isinstance(entry, dict) and "each" in entry:
            _require_keys(entry, _IN_EACH, _IN_EACH, name)
            columns = entry["each"]
            if isinstance(columns, str):
                columns = [columns]
            columns = [_require_text(c, "each", name) for c in _require_list(columns, name)]
            inner = _require_list(entry["messages"], name)
            messages = tuple(_read_message(message, name) for message in inner)
            entries.append(_MessageLoop(tuple(columns), messages))
        else:
            entries.append(_read_message(entry, name))
    answers = []
    for answer in ANSWERS:
        if answer in values:
            template = _require_text(values[answer], answer, name)
            answers.append((answer, tuple(_parts(template, name))))
    system = values.get("system", "")
    if system != "":
        _require_text(system, "system", name)
    tools = values.get(_TOOLS, "")
    if tools != "":
        _require_text(tools, _TOOLS, name)
    derive = values.get("derive", "")
    if derive != "" and derive not in DERIVED:
        fix = f"Give {' or '.join(DERIVED)}, or leave it out"
        raise UsageError(f"--map {name}: there is no derive={derive!r}. {fix}.")
    text = json.dumps(values, sort_keys=True)
    return ChatMap(tuple(entries), tuple(answers), tools, system, derive, text)


def _read_message(value: Any, name: str) -> _Message:
    """A message of a map. UsageError: it is none."""
    _require_keys(value, _IN_MESSAGE, {"role"}, name)
    role = value["role"]
    if role not in ROLES:
        raise UsageError(
            f"--map {name}: role {role!r} must be one of {', '.join(ROLES)}. Correct it."
        )
    columns = {}
    for key in ("tool_calls", "if", "unless"):
        columns[key] = ""
        if key in value:
            columns[key] = _require_text(value[key], key, name)
    content = value.get("content", "")
    if not isinstance(content, str):
        raise UsageError(f"--map {name}: content={content!r} must be a text. Correct it.")
    if not content.strip() and not columns["tool_calls"]:
        raise UsageError(
            f"--map {name}: the message of {role} has no text. Give it a template, such as "
            f"{{question}}, or leave it out."
        )
    parts = tuple(_parts(content, name))
    return _Message(role, parts, columns["tool_calls"], columns["if"], columns["unless"])


def _parts(template: str, name: str) -> Iterator[tuple[str, str | None]]:
    """Literal text of a template, each with the column behind it. UsageError: it is none."""
    try:
        for literal, column, form, conversion in string.Formatter().parse(template):
            if column == "" or form or conversion:
                raise ValueError("between { and } stands the name of a column, alone")
            yield literal, column
    except ValueError as error:
        fix = "Write {column} for its text, and {{ and }} for braces"
        raise UsageError(f"--map {name}: {template!r} is no template ({error}). {fix}.") from error


def _require_keys(
    value: Any, known: frozenset[str], needed: frozenset[str] | set[str], name: str
) -> None:
    """UsageError: a value is no object, or has other keys."""
    if not isinstance(value, dict):
        rule = f"must be an object with {', '.join(sorted(needed))}"
        raise UsageError(f"--map {name}: {str(value)[:80]!r} {rule}. Correct it.")
    for key in sorted(value.keys() - known):
        fix = f"Known are {', '.join(sorted(known))}"
        raise UsageError(f"--map {name}: there is no key {key!r} here. {fix}.")
    for key in sorted(needed - value.keys()):
        raise UsageError(f"--map {name}: {str(value)[:80]} has no {key!r}. Give it.")


def _require_list(value: Any, name: str) -> list[Any]:
    """UsageError: a value is no list, or an empty one."""
    if not isinstance(value, list) or not value:
        raise UsageError(f"--map {name}: {str(value)[:80]!r} must be a list that has items.")
    return value


def _require_text(value: Any, key: str, name: str) -> str:
    """UsageError: a value is no text, or an empty one."""
    if not isinstance(value, str) or not value.strip():
        raise UsageError(
            f"--map {name}: {key}={value!r} must be a text. Correct it, or leave it out."
        )
    return value


def require_no_other_system(chat_map: ChatMap, system: str) -> None:
    """UsageError: a map has a system message in any case, so that this one would never be used."""
    for entry in chat_map.entries:
        if not isinstance(entry, _Message) or entry.role not in SYSTEM_ROLES:
            continue
        if system and not entry.present and not entry.absent:
            rule = f"the map has a message of {entry.role} in every conversation"
            raise UsageError(f"--system {system!r}: {rule}. Keep one of them.")


def require_answer(chat_map: ChatMap) -> None:
    """UsageError: nothing of a map is the assistant's, so that there would be nothing to learn."""
    messages: list[_Message] = []
    for entry in chat_map.entries:
        if isinstance(entry, _MessageLoop):
            messages += entry.messages
        else:
            messages.append(entry)
    if any(message.role == "assistant" for message in messages):
        return
    raise UsageError(
        "--map: no message is of assistant, so that there is nothing to learn. Give one, such as "
        "assistant='{answer}'; for prompts without answers there is --prompts."
    )


def refuse_answers(chat_map: ChatMap, option: str) -> None:
    """UsageError: a map of preferences is used for something else."""
    for name, _ in chat_map.answers:
        raise UsageError(
            f"--map: {name} is an answer of a preference, and {option} has none. Write it as "
            f"assistant='{{answer}}', or give --preferences in place of {option}."
        )


def require_preference(chat_map: ChatMap) -> None:
    """UsageError: the answers of a map are neither a pair nor a single one."""
    names = [name for name, _ in chat_map.answers]
    if names not in (["chosen", "rejected"], ["completion"]):
        found = ", ".join(names) or "none"
        raise UsageError(
            "--map: preferences need the answers chosen and rejected, or completion, beside "
            f"messages, and these are {found}. Give them, such as --map user='{{question}}' "
            "chosen='{better}' rejected='{worse}'."
        )


def map_answers(chat_map: ChatMap, record: Mapping[str, Any]) -> list[str]:
    """The texts of the answers of a record. ChatError: a column is missing or of another type."""
    columns = _with_derived(chat_map, record)
    return [_fill_template(template, columns) for _, template in chat_map.answers]


def map_messages(chat_map: ChatMap, record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages of a record, each with `role` and `content`; the map's `system` is not among
    them.

    ChatError: a column is missing or of another type, or a message would be empty.
    """
    return list(_fill(chat_map.entries, _with_derived(chat_map, record)))


def _with_derived(chat_map: ChatMap, record: Mapping[str, Any]) -> Mapping[str, Any]:
    """The columns of a record, and those that the map derives from them."""
    if not chat_map.derive:
        return record
    return {**record, **DERIVED[chat_map.derive](record)}


def map_prompt(chat_map: ChatMap, record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Map a record to messages as `map_messages` does, without the answer that ends a conversation.
    The columns of the answer may be missing, unless the map derives others from them.
    """
    entries = list(chat_map.entries)
    while entries and isinstance(entries[-1], _Message) and entries[-1].role == "assistant":
        entries.pop()
    messages = map_messages(chat_map._replace(entries=tuple(entries)), record)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    return messages


def advise_map(record: Mapping[str, Any], roles: Sequence[str]) -> str:
    """Return how to make messages of these roles of the columns of a record, as the rest of an
    error's sentence; empty: the record has too few columns of text."""
    texts = [name for name, value in record.items() if isinstance(value, str) and value.strip()]
    option = ""
    if {"question", "answer"} <= set(texts) and "####" in str(record["answer"]):
        option = "gsm8k"
    elif {"instruction", "output"} <= set(texts):
        option = "alpaca"
    elif len(texts) >= len(roles):
        words = []
        for role, name in zip(roles, texts):
            braces = name.replace("{", "{{").replace("}", "}}")
            words.append(shlex.quote(f"{role}={{{braces}}}"))
        option = " ".join(words)
    if not option:
        return ""
    return f". Make messages of its columns, such as with --map {option}"


def read_list(value: Any, name: str) -> list[Any] | None:
    """A list, or a list in JSON; None: nothing, or an empty one. ChatError: something else."""
    if isinstance(value, str) and value:
        try:
            value = loads(value)
        except ValueError as error:
            raise ChatError(f"{name} is not JSON") from error
    if not value:
        return None
    if not isinstance(value, list):
        raise ChatError(f"{name} is not a list")
    return value


def _fill(
    entries: Sequence[_Message | _MessageLoop], columns: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """The messages that entries become."""
    for entry in entries:
        if isinstance(entry, _MessageLoop):
            for item in _items(entry, columns):
                yield from _fill(entry.messages, item)
        elif _is_there(entry, columns):
            yield _fill_message(entry, columns)


def _is_there(message: _Message, columns: Mapping[str, Any]) -> bool:
    """Return whether a record has a message."""
    if message.present and not _has(columns, message.present):
        return False
    return not (message.absent and _has(columns, message.absent))


def _has(columns: Mapping[str, Any], name: str) -> bool:
    """Return whether a column exists and is not empty."""
    try:
        value = _look_up(columns, name)
    except MissingColumn:
        return False
    if isinstance(value, str):
        return bool(value.strip())
    return value not in (None, [], {})


def _items(entry: _MessageLoop, columns: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The columns that the messages of `each` see, for each item."""
    lists = []
    for name in entry.columns:
        value = _look_up(columns, name)
        if not isinstance(value, list):
            raise ChatError(f"column {name!r} holds {_kind(value)}, not a list")
        lists.append(value)
    if len({len(value) for value in lists}) > 1:
        raise ChatError(f"columns {', '.join(map(repr, entry.columns))} have not as many items")
    for items in zip(*lists, strict=True):
        item = items[0]
        if len(items) > 1 or not isinstance(item, dict | list):
            yield dict(zip(entry.columns, items, strict=True))
        elif isinstance(item, dict):
            yield item
        else:
            yield {str(number): value for number, value in enumerate(item)}


def _fill_message(message: _Message, columns: Mapping[str, Any]) -> dict[str, Any]:
    """A message with the texts of its columns."""
    content = _fill_template(message.parts, columns)
    filled: dict[str, Any] = {"role": message.role, "content": content}
    if message.tool_calls:
        calls = read_list(_look_up(columns, message.tool_calls), f"column {message.tool_calls!r}")
        if calls:
            filled["tool_calls"] = calls
    if content.strip() or filled.get("tool_calls"):
        return filled
    raise ChatError(f"an empty message of {message.role}")


def _fill_template(template: _Template, columns: Mapping[str, Any]) -> str:
    """A template with the texts of its columns."""
    text = ""
    for literal, column in template:
        text += literal
        if column is not None:
            text += _text(columns, column)
    return text


def _text(columns: Mapping[str, Any], name: str) -> str:
    """The text of a column, or its number as JSON writes it. ChatError: it is something else."""
    value = _look_up(columns, name)
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return json.dumps(value)
    raise ChatError(f"column {name!r} holds {_kind(value)}, not text or a number")


def _look_up(columns: Mapping[str, Any], name: str) -> Any:
    """Return the value of a column; a name with points looks inside the column. MissingColumn:
    there is no such column.
    """
    if name in columns:
        return columns[name]
    value: Any = columns
    for key in name.split("."):
        if isinstance(value, Mapping) and key in value:
            value = value[key]
        elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            raise MissingColumn(f"no column {name!r}")
    return value


def _kind(value: Any) -> str:
    """Name the type of a JSON value."""
    if value is None:
        return "null"
    kinds = {bool: "true or false", str: "text", list: "a list", dict: "an object"}
    return kinds.get(type(value), "a number")
