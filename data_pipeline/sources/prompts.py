"""Prompts: records with `prompt`, text or messages, or with `messages`, or with columns that a map
makes messages of. What else a record has is kept beside its tokens, for those who judge what is
made of the prompt."""

import functools
import json
from collections.abc import Iterator
from typing import Any

from data_pipeline.base.errors import UsageError
from data_pipeline.chat.chat import ChatError, render
from data_pipeline.sources import jsonl, records
from data_pipeline.sources.chat import (
    clean,
    find_tools,
    with_system,
    with_template,
)
from data_pipeline.sources.chat_map import (
    MissingColumn,
    advise_map,
    map_prompt,
    refuse_answers,
)
from data_pipeline.sources.document import (
    Document,
    Format,
    InputOptions,
    InputRange,
    checked_document,
)
from data_pipeline.sources.messages import (
    COLUMNS,
    SYSTEM_COLUMNS,
    find_messages,
    is_filled,
    read_messages,
    split_untaught,
    with_system_column,
)

# In the columns of a document: the prompt as it came, text or messages.
PROMPT = "prompt"


def find(pattern: str, options: InputOptions) -> list[InputRange]:
    """The files of a glob, with the template if the prompts are messages, or one is named.

    UsageError: no tokenizer is given for a template. DataError: no template is usable.
    """
    if options.chat_map:
        refuse_answers(options.chat_map, "--prompts")
    pieces = records.find(pattern, options, "prompts")
    makes_messages = options.chat_template or options.chat_map or options.system
    if not makes_messages and not _has_messages(pieces):
        return pieces
    if options.vocab_size is None:
        raise UsageError(
            "--prompts: needs a tokenizer that has the tokens of its chat template, not one to be "
            "trained. Give --tokenizer path/to/tokenizer.json (or bytes, with a --chat-template of "
            "plain text)."
        )
    options, beside = with_template(options, "--prompts")
    return [piece._replace(options=options, beside=beside) for piece in pieces]


def _has_messages(pieces: list[InputRange]) -> bool:
    """Return whether the first record is a conversation, or has a system message."""
    for piece in pieces:
        for record in records.first_records(piece):
            has_system = any(is_filled(record.get(name)) for name in SYSTEM_COLUMNS)
            has_rows = any(isinstance(record.get(name), list) for name in COLUMNS)
            is_text = isinstance(record.get(PROMPT), str)
            return has_system or (not is_text and (has_rows or is_filled(record.get(PROMPT))))
    return False


def documents(piece: InputRange) -> Iterator[Document]:
    """Prompts of the records of the piece that belong to its part."""
    return records.read(piece, functools.partial(_parse, options=piece.options))


def _parse(lines: list[bytes], options: InputOptions) -> list[Document]:
    """The documents of lines."""
    found = []
    for raw in lines:
        record = jsonl.parse_object(raw)
        if isinstance(record, str):
            found.append(Document(None, "", record))
            continue
        try:
            found.append(_document(record, raw, options))
        except ChatError as error:
            detail = ""
            if options.chat_map:
                if isinstance(error, MissingColumn):
                    detail = jsonl.list_keys(record)
            elif not any(is_filled(record.get(name)) for name in (PROMPT, *COLUMNS)):
                detail = jsonl.list_keys(record) + advise_map(record, ("user",))
            found.append(Document(None, "", str(error), detail=detail))
    return found


def _document(record: dict[str, Any], raw: bytes, options: InputOptions) -> Document:
    """The prompt of a record. ChatError: it has none."""
    chat_map = options.chat_map
    if chat_map:
        prompt = map_prompt(chat_map, record)
    elif is_filled(record.get(PROMPT)) or isinstance(record.get(PROMPT), str):
        prompt = record[PROMPT]
    else:
        prompt = find_messages(record)
    if prompt is None:
        raise ChatError("no prompt: neither `prompt` nor `messages`")
    template = options.template
    problems: list[str] = []
    if template is None:
        if not isinstance(prompt, str):
            raise ChatError("messages, and no --chat-template, for the first record is text")
        if any(is_filled(record.get(name)) for name in SYSTEM_COLUMNS):
            raise ChatError(
                "a system message, and no --chat-template, for the first record is text"
            )
        document = checked_document(prompt, "", 0)
        prompt = document.text
        if document.problem:
            problems.append(document.problem)
    else:
        messages = _messages(prompt)
        if not chat_map:
            messages = with_system_column(messages, record)
        messages, _ = split_untaught(with_system(messages, options.system))
        prompt = clean(messages, template, problems)
        tools = clean(find_tools(record, chat_map), template, problems)
        text = render(template, prompt, tools, prompt=True)
        document = Document(None, "", spans=[(text, True)])
    if not problems and not jsonl.is_utf8(raw):
        problems.append("not UTF-8")
    others = {name: value for name, value in record.items() if name not in (PROMPT, *COLUMNS)}
    columns = json.dumps({PROMPT: prompt, **others})
    return document._replace(problem="".join(problems[:1]), columns=columns)


def _messages(prompt: Any) -> list[dict[str, Any]]:
    """The messages of a prompt; text is what the user says. ChatError: they can't be used."""
    if isinstance(prompt, str):
        if not prompt.strip():
            raise ChatError("an empty prompt")
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise ChatError("a prompt is neither text nor a list of messages")
    messages = read_messages(prompt)
    if messages[-1]["role"] == "assistant":
        raise ChatError("the last message is the assistant's, whose turn is to be written")
    return messages


FORMAT = Format(
    "prompts", "GLOB",
    "prompts to be completed, in JSON lines, plain, .gz or .zst, or in .parquet, each with prompt "
    "or messages; other columns are kept for rewards",
    "--prompts 'questions/*.jsonl' --tokenizer path/to/tokenizer.json --chat-template chatml",
    find, documents, records.cut,
)  # fmt: skip
