"""Messages of records in the forms in which people have them: those of OpenAI's API, of ShareGPT,
of LLaMA-Factory and of TRL become messages as chat templates expect them.

A message has `role` and `content`, text or null. Arguments of tool calls are objects. Reasoning has
all the names that templates read it by. A message of the assistant that is not to be learnt has
`train` false, which `split_untaught` takes out again before a template sees the messages.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from data_pipeline.base.strict_json import loads
from data_pipeline.chat.chat import ChatError
from data_pipeline.sources.chat_map import ROLES, SYSTEM_ROLES, read_list

# The columns that hold messages, and those that hold a system message.
COLUMNS = ("messages", "conversations", "conversation")
SYSTEM_COLUMNS = ("system", "system_prompt")
_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "observation": "tool",
    "function": "tool",
    "tool_response": "tool",
}
# Messages of the assistant whose text is a tool call in JSON, or a list of them.
_CALLS = ("function_call", "tool_call")
# Templates read reasoning by different names.
_REASONING = ("reasoning_content", "reasoning", "thinking")
_TEXT_PARTS = ("text", "input_text", "output_text")
# Marks a message of the assistant that is no target.
_TRAIN = "train"
_WEIGHT = "weight"
# Other forms of what this reads, which would be lost without a word.
_REFUSED = {
    "function_call": "Write it as tool_calls",
    "train_detail": "Write the part that is learnt as a message of its own",
}


def read_conversation(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a record that has a column with messages, or `prompt` and
    `completion`, with the system message of a column of its own.

    Only the completion of a prompt is learnt.

    Raises:
        ChatError: there are no messages, or two columns contradict each other, or a message can't
            be used.
    """
    found = find_messages(record)
    if found is None and is_filled(record.get("prompt")) and is_filled(record.get("completion")):
        prompt = _as_messages(record["prompt"], "prompt", "user")
        for message in prompt:
            if message["role"] == "assistant":
                message[_TRAIN] = False
        found = [*prompt, *_as_messages(record["completion"], "completion", "assistant")]
    if found is None:
        raise ChatError(
            "no messages: neither a list `messages` nor a list `conversations`, nor `prompt` and "
            "`completion`"
        )
    return with_system_column(found, record)


def find_messages(record: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the messages of the column that has some; None: no column has.

    Raises:
        ChatError: two columns have different messages, or a message can't be used.
    """
    filled = [name for name in COLUMNS if is_filled(record.get(name))]
    found = None
    for name in filled:
        rows = read_list(record[name], name)
        messages = read_messages(rows or [])
        if found is not None and messages != found:
            raise ChatError(
                f"columns {filled[0]!r} and {name!r} have different messages, of which one must go"
            )
        found = messages
    return found


def is_filled(value: Any) -> bool:
    """Return whether a column has a value: not null, nor an empty text or list."""
    if isinstance(value, str):
        return bool(value.strip())
    return value is not None and value != []


def _as_messages(value: Any, name: str, role: str) -> list[dict[str, Any]]:
    """Messages, or text that one of this role says. ChatError: it is neither."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        raise ChatError(f"column {name!r} is neither text nor a list of messages")
    return read_messages(value)


def with_system_column(
    messages: list[dict[str, Any]], record: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return messages behind the system message that a column of the record holds, if one does.

    Raises:
        ChatError: the column is no text, or the messages have another system message.
    """
    system = ""
    column = ""
    for name in SYSTEM_COLUMNS:
        value = record.get(name)
        if not is_filled(value):
            continue
        if not isinstance(value, str):
            raise ChatError(f"column {name!r} is not text")
        if system and value != system:
            raise ChatError(f"columns {column!r} and {name!r} have different system messages")
        system = value
        column = name
    if not system:
        return messages
    own = [message for message in messages if message["role"] in SYSTEM_ROLES]
    if not own:
        return [{"role": "system", "content": system}, *messages]
    if any((message["content"] or "").strip() != system.strip() for message in own):
        raise ChatError(
            f"column {column!r} has another system message than the messages, of which one must go"
        )
    return messages


def read_messages(rows: Sequence[Any]) -> list[dict[str, Any]]:
    """Return messages as chat templates expect them.

    Raises:
        ChatError: a message can't be used.
    """
    return [_read_message(row) for row in rows]


def _read_message(row: Any) -> dict[str, Any]:
    """A message. ChatError: it can't be used."""
    if not isinstance(row, Mapping):
        raise ChatError("a message is not a JSON object")
    # A key that is null is as one that is not there: Arrow gives every message the keys of all.
    row = {key: value for key, value in row.items() if value is not None}
    for key, fix in _REFUSED.items():
        if is_filled(row.get(key)):
            raise ChatError(f"key {key!r} of a message is not read. {fix}")
    role = _one_of(row, "role", "from")
    content = _text(_one_of(row, "content", "value"))
    message = {key: value for key, value in row.items() if key not in ("from", "value")}
    if role in _CALLS:
        role = "assistant"
        message["tool_calls"] = _calls_of_text(content)
        content = None
    if isinstance(role, str):
        role = _ROLES.get(role, role)
    if role not in ROLES:
        known = ", ".join((*ROLES, *_ROLES, *_CALLS))
        raise ChatError(f"unknown role {str(role)[:40]!r}, not one of {known}")
    message |= {"role": role, "content": content}
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(message["tool_calls"])
        if not message["tool_calls"]:
            del message["tool_calls"]
    if content is None and "tool_calls" not in message:
        raise ChatError("content of a message is null or missing")
    _name_reasoning(message)
    _mark_untaught(message)
    return message


def _one_of(row: Mapping[str, Any], name: str, other: str) -> Any:
    """Return the value of a key, or of the other key in its place. ChatError: the two values
    differ.
    """
    if name in row and other in row and row[name] != row[other]:
        raise ChatError(f"keys {name!r} and {other!r} of a message are different")
    return row.get(name, row.get(other))


def _text(content: Any) -> str | None:
    """The text of a message's content, which may be in parts; None: there is none. ChatError: it is
    no text."""
    if not isinstance(content, list):
        if not isinstance(content, str | None):
            raise ChatError("content of a message is not a string")
        return content
    texts = []
    for part in content:
        text = part
        if isinstance(part, Mapping):
            kind = part.get("type")
            if kind not in _TEXT_PARTS:
                raise ChatError(
                    f"content of a message has a part of type {str(kind)[:40]!r}, and only text is "
                    "read"
                )
            text = part.get("text")
        if not isinstance(text, str):
            raise ChatError("a part of the content of a message is not text")
        texts.append(text)
    return "".join(texts) if texts else None


def _name_reasoning(message: dict[str, Any]) -> None:
    """Give a message's reasoning all names that templates read it by, as transformers does.
    ChatError: names have different texts."""
    found = {name: message[name] for name in _REASONING if name in message}
    for name, value in found.items():
        if not isinstance(value, str):
            raise ChatError(f"{name} of a message is not a string")
    filled = {text for text in found.values() if is_filled(text)}
    if len(filled) > 1:
        raise ChatError(f"{' and '.join(found)} of a message are different")
    if found:
        text = next(iter(filled or found.values()))
        message |= dict.fromkeys(_REASONING, text)


def _mark_untaught(message: dict[str, Any]) -> None:
    """Put what `weight` and `train` say about a message into `train`, which is false where it is
    the assistant's and not learnt. ChatError: they ask for something else than can be done."""
    given = {}
    if _WEIGHT in message:
        weight = message.pop(_WEIGHT)
        if not isinstance(weight, int | float) or weight not in (0, 1):
            raise ChatError(f"weight {str(weight)[:40]} of a message is neither 0 nor 1")
        given[_WEIGHT] = bool(weight)
    if _TRAIN in message:
        train = message.pop(_TRAIN)
        if not isinstance(train, bool):
            raise ChatError(f"train {str(train)[:40]} of a message is neither true nor false")
        given[_TRAIN] = train
    if len(set(given.values())) > 1:
        raise ChatError("weight and train of a message contradict each other")
    for name, is_learnt in given.items():
        if message["role"] != "assistant" and is_learnt:
            raise ChatError(
                f"{name} of a message of {message['role']} asks to learn it, and only what the "
                "assistant says is learnt"
            )
        if message["role"] == "assistant" and not is_learnt:
            message[_TRAIN] = False


def split_untaught(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[int]]:
    """Return messages as a template gets them, and the numbers of those that are not learnt."""
    untaught = [number for number, message in enumerate(messages) if _TRAIN in message]
    bare = [{key: m[key] for key in m if key != _TRAIN} for m in messages]
    return bare, untaught


def _calls_of_text(text: str | None) -> list[Any]:
    """The tool calls that a message has as text: an object in JSON, or a list of them. ChatError:
    it has none."""
    try:
        calls = loads(text or "")
    except ValueError as error:
        raise ChatError("a tool call is not JSON") from error
    if not isinstance(calls, list):
        calls = [calls]
    return [{"type": "function", "function": call} for call in calls]


def _tool_calls(calls: Any) -> list[Any]:
    """Tool calls with arguments that are objects. ChatError: they can't be used."""
    calls = read_list(calls, "tool_calls") or []
    return [_tool_call(call) for call in calls]


def _tool_call(call: Any) -> dict[str, Any]:
    """A tool call with arguments that are an object. ChatError: it can't be used."""
    if not isinstance(call, Mapping):
        raise ChatError("a tool call is not a JSON object")
    call = {key: value for key, value in call.items() if value is not None}
    if "function" in call:
        inner = call["function"]
        if not isinstance(inner, Mapping):
            raise ChatError("function of a tool call is not a JSON object")
        return call | {"function": _with_arguments(inner)}
    return _with_arguments(call)


def _with_arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    """A function that is called, with arguments that are an object. ChatError: it can't be used."""
    function = {key: value for key, value in function.items() if value is not None}
    if not isinstance(function.get("name"), str):
        raise ChatError("a tool call has no name of a function")
    if "arguments" in function:
        arguments = function["arguments"]
        if isinstance(arguments, str):
            try:
                arguments = loads(arguments) if arguments.strip() else {}
            except ValueError as error:
                raise ChatError("arguments of a tool call are not JSON") from error
        if not isinstance(arguments, Mapping):
            shown = json.dumps(arguments)[:40]
            raise ChatError(f"arguments of a tool call are {shown}, not a JSON object")
        function["arguments"] = arguments
    return function
