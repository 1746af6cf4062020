"""Conversations: records with messages in one of the forms of sources/messages.py, or with columns
that a map makes messages of; written out by a chat template."""

import functools
from collections.abc import Iterator
from typing import Any

from data_pipeline.base.errors import UsageError
from data_pipeline.base.remote import address
from data_pipeline.chat.chat import (
    MARKS,
    ChatError,
    Conversation,
    Template,
    load_template,
    render_all,
)
from data_pipeline.sources import jsonl, records
from data_pipeline.sources.chat_map import (
    SYSTEM_ROLES,
    ChatMap,
    MissingColumn,
    advise_map,
    map_messages,
    read_list,
    refuse_answers,
    require_answer,
)
from data_pipeline.sources.document import (
    EMPTY,
    NO_WORDS,
    Document,
    Format,
    InputOptions,
    InputRange,
    checked_document,
)
from data_pipeline.sources.messages import (
    COLUMNS,
    is_filled,
    read_conversation,
    read_messages,
    split_untaught,
)


def find(pattern: str, options: InputOptions) -> list[InputRange]:
    """The files of a glob, each with the template. UsageError: no tokenizer is given. DataError: no
    template is usable."""
    if options.vocab_size is None:
        raise UsageError(
            "--chat: needs a tokenizer that has the tokens of its template, not one to be trained. "
            "Give --tokenizer path/to/tokenizer.json (or bytes, with a --chat-template of plain "
            "text)."
        )
    if options.chat_map:
        refuse_answers(options.chat_map, "--chat")
        require_answer(options.chat_map)
    options, beside = with_template(options, "--chat")
    pieces = records.find(pattern, options, "chat")
    return [piece._replace(beside=beside) for piece in pieces]


def with_template(options: InputOptions, option: str) -> tuple[InputOptions, tuple[str, ...]]:
    """Options with their chat template, which `option` needs, and the files that it is made of.

    DataError: no template is usable.
    """
    template, files = load_template(
        options.chat_template, options.tokenizer, options.special, options.chat_date, option
    )
    return options._replace(template=template), tuple(map(address, files))


def documents(piece: InputRange) -> Iterator[Document]:
    """Conversations of the records of the piece that belong to its part."""
    return records.read(piece, functools.partial(_parse, options=piece.options))


def _parse(lines: list[bytes], options: InputOptions) -> list[Document]:
    """The documents of lines."""
    template = options.template
    assert template is not None, "find gives every piece one"
    documents: list[Document] = []
    conversations: list[Conversation] = []
    rendered: list[int] = []  # which documents the conversations are
    for number, raw in enumerate(lines):
        document = Document(None, "")
        record = jsonl.parse_object(raw)
        try:
            if isinstance(record, str):
                raise ChatError(record)
            problems: list[str] = []
            messages, untaught = _messages(record, options)
            messages = clean(messages, template, problems)
            tools = clean(find_tools(record, options.chat_map), template, problems)
            if not problems and not jsonl.is_utf8(raw):
                problems.append("not UTF-8")
            if _has_empty_answer(messages, untaught):
                problems.append(NO_WORDS)
            if problems:
                document = document._replace(problem=problems[0])
            conversations.append((messages, tools, untaught))
            rendered.append(number)
        except ChatError as error:
            detail = ""
            if isinstance(record, dict) and _lacks_columns(record, error, options.chat_map):
                detail = jsonl.list_keys(record)
                if not options.chat_map:
                    detail += advise_map(record, ("user", "assistant"))
            document = document._replace(problem=str(error), detail=detail)
        documents.append(document)
    for number, spans in zip(rendered, render_all(template, conversations), strict=True):
        if isinstance(spans, ChatError):
            documents[number] = Document(None, "", str(spans))
        else:
            documents[number] = documents[number]._replace(spans=spans)
    return documents


def _has_empty_answer(messages: list[dict[str, Any]], untaught: list[int]) -> bool:
    """Return whether a message of the assistant that trains is empty."""
    for number, message in enumerate(messages):
        is_learnt = message["role"] == "assistant" and number not in untaught
        says = (message["content"] or "").strip() or message.get("tool_calls")
        if is_learnt and not says and not message.get("reasoning"):
            return True
    return False


def _lacks_columns(record: dict[str, Any], error: ChatError, chat_map: ChatMap | None) -> bool:
    """Return whether the problem of a record is that it has other columns."""
    if chat_map:
        return isinstance(error, MissingColumn)
    has_pair = is_filled(record.get("prompt")) and is_filled(record.get("completion"))
    return not has_pair and not any(is_filled(record.get(name)) for name in COLUMNS)


def _messages(
    record: dict[str, Any], options: InputOptions
) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the messages of a row, each with `role` and `content`, and the numbers of those that
    are not learnt. ChatError: there are none, or they can't be used."""
    if options.chat_map:
        messages = read_messages(map_messages(options.chat_map, record))
    else:
        messages = read_conversation(record)
    messages, untaught = split_untaught(with_system(messages, options.system))
    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise ChatError("no assistant turn")
    if set(turns) <= set(untaught):
        raise ChatError("nothing is learnt: every message of the assistant has weight 0")
    return messages, untaught


def with_system(messages: list[dict[str, Any]], system: str) -> list[dict[str, Any]]:
    """Messages with a system message (empty: none) before them, if they have none of their own."""
    has_own = any(message["role"] in SYSTEM_ROLES for message in messages)
    if not system or has_own:
        return messages
    return [{"role": "system", "content": system}, *messages]


def find_tools(record: dict[str, Any], chat_map: ChatMap | None = None) -> list[Any] | None:
    """The tools of a row, in `tools` or the column that a map names; None: none. ChatError: they
    are no list, nor one in JSON."""
    column = "tools"
    if chat_map:
        column = chat_map.tools
    if not column:
        return None
    if chat_map and column not in record:
        raise MissingColumn(f"no column {column!r}")
    return read_list(record.get(column), column)


def mended_text(text: str, problems: list[str]) -> str:
    """Return text repaired as a document of its own would be; adds the problems found."""
    checked = checked_document(text, "", 0)
    if checked.problem and checked.problem != EMPTY:
        problems.append(checked.problem)
        return checked.text or ""
    return text


def clean(value: Any, template: Template, problems: list[str]) -> Any:
    """Return a value with all its text repaired; adds the problems found. Only the template may
    write special tokens.

    Not seen is one that a template would put together from the ends of two texts without anything
    between them.
    """
    if isinstance(value, dict):
        return {
            clean(key, template, problems): clean(item, template, problems)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [clean(item, template, problems) for item in value]
    if not isinstance(value, str):
        return value
    value = mended_text(value, problems)
    if MARKS.search(value):
        problems.append("a noncharacter, U+FDD0 or U+FDD1")
        value = MARKS.sub("\ufffd", value)
    for token in template.special:
        if token in value:
            problems.append(f"text spells the special token {token}")
            value = value.replace(token, "\ufffd" + token[1:])
    return value


FORMAT = Format(
    "chat", "GLOB", "conversations in JSON lines, plain, .gz or .zst, or in .parquet, each with "
    "messages; needs maxtrain[chat]",
    "--chat 'chat/*.jsonl' --tokenizer path/to/tokenizer.json", find, documents, records.cut,
)  # fmt: skip
