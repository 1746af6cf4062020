"""Preferences: records of pairs, an answer that was chosen and one that was rejected, or of single
answers with a label, in the usual forms, or in columns that a map turns into messages.

A record's form is recognised by its columns and their types:

* `prompt`, `chosen`, `rejected`: text, or lists of messages. An answer that begins with the
  assistant continues the prompt; one that does not is the whole conversation.
* `chosen`, `rejected`: whole conversations, lists of messages or text with turns of `Human:` and
  `Assistant:`. The turns or messages that both begin with are the prompt.
* `prompt`, `completion`, `label`: one answer, good (true) or bad (false).

Messages are written by a chat template. Text is, too, if one was named; else it stays as it is, and
prompt and answer are encoded one by one, so that no token has parts of both.
"""

import functools
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from data_pipeline.base.errors import DataError, UsageError
from data_pipeline.chat.chat import ChatError, Conversation, Span, render_all
from data_pipeline.sources import jsonl, records
from data_pipeline.sources.chat import (
    clean,
    find_tools,
    mended_text,
    with_system,
    with_template,
)
from data_pipeline.sources.chat_map import (
    MissingColumn,
    map_answers,
    map_messages,
    require_preference,
)
from data_pipeline.sources.document import (
    SAME,
    Document,
    Format,
    InputOptions,
    InputRange,
    PreferenceForm,
)
from data_pipeline.sources.messages import (
    SYSTEM_COLUMNS,
    is_filled,
    read_messages,
    split_untaught,
    with_system_column,
)

NAMES = (
    "prompt",
    "chosen",
    "rejected",
    "completion",
    "label",
    "margin",
    "score_chosen",
    "score_rejected",
)
_OPTION = "--preferences"
_MEND = "Name them, such as --columns chosen=win,rejected=lose, or make them with --map"
_MESSAGES = "messages"
_TURNS = "Human/Assistant text"
_TEXT = "text"
# Where a turn begins, in text such as that of Anthropic's HH-RLHF.
_TURN = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}
_NO_ANSWER = "no answer of the assistant's after the prompt"
_EMPTY_ANSWER = "an empty answer"
_MOST = float(np.finfo(np.float32).max)


class _Missing(ChatError):
    """A record lacks a column."""


class _Turn(NamedTuple):
    """A turn of text: the speaker, the header in the text, and the body."""

    role: str
    header: str
    body: str


class _Example(NamedTuple):
    """Contents of a record: its prompt, if it has one, and one answer or, the chosen one first,
    two; each text or a list of messages.
    """

    prompt: str | list[Any] | None
    answers: list[Any]


def find(pattern: str, options: InputOptions) -> list[InputRange]:
    """The files of a glob, each with the form of the first record and with the template, if one is
    needed.

    UsageError: no tokenizer is given, or --columns is not understood. DataError: no record is of a
    known form, or no template is usable.
    """
    columns = parse_columns(options.columns)
    if options.vocab_size is None:
        raise UsageError(
            f"{_OPTION}: needs a tokenizer that is there, not one to be trained. "
            "Give --tokenizer path/to/tokenizer.json, or bytes."
        )
    pieces = records.find(pattern, options, "preferences")
    if options.chat_map:
        require_preference(options.chat_map)
        kind = "explicit" if len(options.chat_map.answers) == 2 else "unpaired"
        form = PreferenceForm(kind, _MESSAGES)
    else:
        form = _first_form(pattern, pieces, columns)
    beside: tuple[str, ...] = ()
    makes_messages = options.chat_template or options.system or form.content == _MESSAGES
    if makes_messages or (not options.chat_map and _has_system(pieces)):
        options, beside = with_template(options, _OPTION)
    options = options._replace(preferences=form)
    return [piece._replace(options=options, beside=beside) for piece in pieces]


def parse_columns(text: str) -> dict[str, str]:
    """The column that holds each of `NAMES`, from a text such as "chosen=win,rejected=lose".
    UsageError: it is none."""
    columns = {name: name for name in NAMES}
    for part in filter(None, text.split(",")):
        name, found, column = part.partition("=")
        if name not in columns or not found or not column:
            rule = f"must be NAME=COLUMN, and NAME one of {', '.join(NAMES)}"
            raise UsageError(f"--columns {part}: {rule}. {_MEND}.")
        columns[name] = column
    return columns


def _first_form(pattern: str, pieces: list[InputRange], columns: dict[str, str]) -> PreferenceForm:
    """The form of the first record that has one. DataError: none has."""
    keys = ""
    for piece in pieces:
        for record in records.first_records(piece):
            form = _form(record, columns)
            if form:
                return form
            keys = keys or jsonl.list_keys(record)
    what = "the first records have neither chosen and rejected nor completion and label"
    raise DataError(f"{_OPTION} {pattern}: {what}{keys}. {_MEND}.")


def _has_system(pieces: list[InputRange]) -> bool:
    """Return whether the first record has a system message in a column of its own."""
    for piece in pieces:
        for record in records.first_records(piece):
            return any(is_filled(record.get(name)) for name in SYSTEM_COLUMNS)
    return False


def _form(record: dict[str, Any], columns: dict[str, str]) -> PreferenceForm | None:
    """The form of a record; None: it lacks columns."""
    prompt = record.get(columns["prompt"])
    is_pair = columns["chosen"] in record and columns["rejected"] in record
    if is_pair:
        answer = record[columns["chosen"]]
    elif columns["completion"] in record and columns["label"] in record:
        answer = record[columns["completion"]]
    else:
        return None
    content = _TEXT
    if isinstance(answer, list) or isinstance(prompt, list):
        content = _MESSAGES
    elif _turns(prompt or answer):
        content = _TURNS
    if not is_pair:
        return PreferenceForm("unpaired", content)
    is_whole = isinstance(answer, list) and not _continues(answer)
    if prompt is None or (is_whole and isinstance(prompt, str)):
        return PreferenceForm("implicit", content)
    return PreferenceForm("explicit", content)


def _continues(rows: list[Any]) -> bool:
    """Return whether messages begin with the assistant, so that a prompt comes before them."""
    if not rows or not isinstance(rows[0], dict):
        return False
    role = rows[0].get("role")
    if role is None:
        role = rows[0].get("from")
    return role in ("assistant", "gpt")


def documents(piece: InputRange) -> Iterator[Document]:
    """Pairs, or answers with a label, of the records of the piece that belong to its part."""
    return records.read(piece, functools.partial(_parse, options=piece.options))


def _parse(lines: list[bytes], options: InputOptions) -> list[Document]:
    """The documents of lines."""
    columns = parse_columns(options.columns)
    template = options.template
    documents: list[Document] = []
    conversations: list[Conversation] = []
    # Which documents the conversations are of.
    rendered: list[int] = []
    for number, raw in enumerate(lines):
        record = jsonl.parse_object(raw)
        document = Document(None, "")
        problems: list[str] = []
        try:
            if isinstance(record, str):
                raise ChatError(record)
            example = _example(record, columns, options)
            document = document._replace(value=_value(record, columns, options))
            if template:
                tools = clean(find_tools(record, options.chat_map), template, problems)
                # The columns of a map are those that it names.
                others = record if options.chat_map is None else {}
                for messages, untaught in _conversations(example, options.system, others):
                    conversations.append((clean(messages, template, problems), tools, untaught))
                    rendered.append(number)
            else:
                if any(is_filled(record.get(name)) for name in SYSTEM_COLUMNS):
                    what = "a system message, and no --chat-template"
                    raise ChatError(f"{what}, for the first record is text")
                members = [_mended(spans, problems) for spans in _plain(example)]
                document = _with_members(document, members)._replace(apart=True)
            if not problems and not jsonl.is_utf8(raw):
                problems.append("not UTF-8")
            if problems:
                document = document._replace(problem=problems[0])
        except ChatError as error:
            document = Document(None, "", str(error), detail=_keys_of(record, error))
        documents.append(document)
    if template:
        members_of: dict[int, list[list[Span] | ChatError]] = {}
        outcomes = render_all(template, conversations)
        for number, spans in zip(rendered, outcomes, strict=True):
            members_of.setdefault(number, []).append(spans)
        for number, members in members_of.items():
            refused = [str(spans) for spans in members if isinstance(spans, ChatError)]
            if refused:
                documents[number] = Document(None, "", refused[0])
            else:
                whole = [spans for spans in members if not isinstance(spans, ChatError)]
                documents[number] = _with_members(documents[number], whole)
    return documents


def _keys_of(record: dict[str, Any] | str, error: ChatError) -> str:
    """List the keys of a record if its problem is that it has other keys; else return nothing."""
    if isinstance(record, str):
        return ""
    if isinstance(error, MissingColumn):
        return jsonl.list_keys(record)
    if isinstance(error, _Missing):
        return f"{jsonl.list_keys(record)}. {_MEND}"
    return ""


def _with_members(document: Document, members: list[list[Span]]) -> Document:
    """A document, or a pair, of these spans."""
    if len(members) == 1:
        return document._replace(spans=members[0])
    chosen, rejected = members
    if chosen == rejected:
        return Document(None, "", SAME)
    return document._replace(spans=chosen, rejected=rejected)


def _example(record: dict[str, Any], columns: dict[str, str], options: InputOptions) -> _Example:
    """Prompt and answers of a record. ChatError: a column is missing, or of another type."""
    form = options.preferences
    assert form is not None, "find gives every piece one"
    if options.chat_map:
        messages = map_messages(options.chat_map, record)
        texts = map_answers(options.chat_map, record)
        if len(texts) == 2 and texts[0] == texts[1]:
            raise ChatError(SAME)
        return _Example(messages, texts)
    names = ("chosen", "rejected")
    if form.kind == "unpaired":
        names = ("completion",)
    found = {}
    for name in names:
        if record.get(columns[name]) is None:
            raise _Missing(f"no column {columns[name]!r}")
        found[name] = record[columns[name]]
    prompt = record.get(columns["prompt"])
    if prompt is None and form.kind == "unpaired":
        raise _Missing(f"no column {columns['prompt']!r}")
    for name, value in (("prompt", prompt), *found.items()):
        if not isinstance(value, str | list | None):
            raise ChatError(f"column {columns[name]!r} is neither text nor a list of messages")
    answers = list(found.values())
    if type(answers[0]) is not type(answers[-1]):
        raise ChatError("of chosen and rejected, one is text and the other a list of messages")
    if len(answers) == 2 and answers[0] == answers[1]:
        raise ChatError(SAME)
    return _Example(prompt, answers)


def _value(record: dict[str, Any], columns: dict[str, str], options: InputOptions) -> float | None:
    """Return the number of a record: 1 or -1 for its label, or the margin of the chosen answer if
    that is requested. ChatError: the record has none.
    """
    form = options.preferences
    if form and form.kind == "unpaired":
        label = record.get(columns["label"])
        if label is None:
            raise _Missing(f"no column {columns['label']!r}")
        if not isinstance(label, bool):
            raise ChatError(f"column {columns['label']!r} is neither true nor false")
        return 1.0 if label else -1.0
    if not options.margin:
        return None
    if record.get(columns["margin"]) is not None:
        return _number(record, columns["margin"])
    scores = [columns["score_chosen"], columns["score_rejected"]]
    if any(record.get(column) is None for column in scores):
        listed = " and ".join(map(repr, scores))
        raise _Missing(f"no margin: neither column {columns['margin']!r} nor {listed}")
    chosen, rejected = (_number(record, column) for column in scores)
    return _number({"margin": chosen - rejected}, "margin")


def _number(record: dict[str, Any], column: str) -> float:
    """A number of a record. ChatError: it is none that a float32 can be."""
    value = record[column]
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > _MOST:
        raise ChatError(f"column {column!r} is not a number, or too large for 32 bits")
    return float(value)


def _conversations(
    example: _Example, system: str, record: dict[str, Any]
) -> list[tuple[list[dict[str, Any]], list[int]]]:
    """Return the messages of each answer with those of its prompt, and the numbers of those that
    are not learnt.

    Args:
        example: prompt and answers.
        system: the system message of those that have none; empty: none.
        record: whose columns may have a system message.

    Raises:
        ChatError: they are not messages, or an answer is missing.
    """
    found = [_messages(example.prompt, answer) for answer in example.answers]
    if len(found) == 2 and found[0][0] == found[1][0]:
        raise ChatError(SAME)
    if any(untaught is None for _, untaught in found):
        common = _num_common([messages for messages, _ in found])
        found = [(messages, common) for messages, _ in found]
    result = []
    for messages, untaught in found:
        assert untaught is not None, "of both answers, or of none, the prompt is known"
        _check_answers(messages, untaught)
        whole = with_system(with_system_column(messages, record), system)
        whole, marked = split_untaught(whole)
        of_prompt = range(untaught + len(whole) - len(messages))
        numbers = sorted({*of_prompt, *marked})
        turns = [number for number, item in enumerate(whole) if _role(item) == "assistant"]
        if set(turns) <= set(numbers):
            raise ChatError("nothing is learnt: every message of an answer has weight 0")
        result.append((whole, numbers))
    return result


def _messages(prompt: Any, answer: Any) -> tuple[list[dict[str, Any]], int | None]:
    """Return the messages of prompt and answer, and the number that belongs to the prompt; None if
    the prompt has no border.
    """
    if isinstance(answer, str):
        if prompt is None:
            return _messages_of_turns(answer), None
        before = _messages_of_prompt(prompt)
        if _turns(prompt):
            # The space is between the header of the turn and the answer.
            answer = answer.strip()
        return [*before, {"role": "assistant", "content": answer}], len(before)
    rows = read_messages(answer)
    if prompt is None or (isinstance(prompt, str) and not _continues(rows)):
        return rows, None
    before = _messages_of_prompt(prompt)
    if rows[: len(before)] == before:
        return rows, len(before)
    return [*before, *rows], len(before)


def _messages_of_prompt(prompt: str | list[Any]) -> list[dict[str, Any]]:
    """The messages of a prompt; plain text is what the user says."""
    if isinstance(prompt, list):
        return read_messages(prompt)
    turns = _turns(prompt)
    if not turns:
        return [{"role": "user", "content": prompt}]
    if turns[-1].role == "assistant" and not turns[-1].body.strip():
        # It begins the answer.
        turns.pop()
    return [{"role": turn.role, "content": turn.body.strip()} for turn in turns]


def _messages_of_turns(text: str) -> list[dict[str, Any]]:
    """The messages of text with turns. ChatError: it has none."""
    return [{"role": turn.role, "content": turn.body.strip()} for turn in _require_turns(text)]


def _num_common(lists: list[list[Any]]) -> int:
    """Return how many items, messages or turns, are the prompt: the ones that both lists begin
    with; of one list, those before the last item of the assistant.
    """
    if len(lists) == 1:
        (items,) = lists
        turns = [number for number, item in enumerate(items) if _role(item) == "assistant"]
        if not turns:
            raise ChatError(_NO_ANSWER)
        return turns[-1]
    count = 0
    for ours, theirs in zip(*lists):
        if ours != theirs:
            break
        count += 1
    return count


def _role(item: Any) -> str:
    if isinstance(item, _Turn):
        return item.role
    return item["role"]


def _check_answers(messages: list[dict[str, Any]], untaught: int) -> None:
    """ChatError: there is no prompt, or no answer, or an empty one."""
    if not untaught:
        raise ChatError("no prompt: chosen and rejected begin with different messages")
    answers = [message for message in messages[untaught:] if message["role"] == "assistant"]
    if not answers:
        raise ChatError(_NO_ANSWER)
    for answer in answers:
        if not (answer["content"] or "").strip() and not answer.get("tool_calls"):
            raise ChatError(_EMPTY_ANSWER)


def _plain(example: _Example) -> list[list[Span]]:
    """The spans of each answer with its prompt, as they are. ChatError: they are messages, or
    something is missing."""
    prompt = example.prompt
    for value in (prompt, *example.answers):
        if isinstance(value, list):
            raise ChatError("messages, and no --chat-template, for the first record is text")
    if prompt is not None:
        assert isinstance(prompt, str)
        if not prompt.strip():
            raise ChatError("an empty prompt")
        if not all(answer.strip() for answer in example.answers):
            raise ChatError(_EMPTY_ANSWER)
        return [[(prompt, False), (answer, True)] for answer in example.answers]
    turns = [_require_turns(answer) for answer in example.answers]
    common = _num_common(turns)
    if not common:
        raise ChatError("no prompt: chosen and rejected begin with different turns")
    return [_spans_of_turns(each, common) for each in turns]


def _spans_of_turns(turns: list[_Turn], common: int) -> list[Span]:
    """The spans of text with turns, of which the first are the prompt. ChatError: there is no
    answer, or an empty one."""
    spans: list[Span] = []
    before = ""
    for number, turn in enumerate(turns):
        before += turn.header
        if number < common or turn.role != "assistant":
            before += turn.body
            continue
        if not turn.body.strip():
            raise ChatError(_EMPTY_ANSWER)
        spans += [(before, False), (turn.body, True)]
        before = ""
    if not spans:
        raise ChatError(_NO_ANSWER)
    if before:
        spans.append((before, False))
    return spans


def _turns(text: Any) -> list[_Turn]:
    """The turns of text, which together are all of it; empty: it has none."""
    if not isinstance(text, str):
        return []
    found = list(_TURN.finditer(text))
    if not found or found[0].start():
        return []
    ends = [*(turn.start() for turn in found[1:]), len(text)]
    turns = []
    for turn, end in zip(found, ends):
        turns.append(_Turn(_ROLES[turn[1]], turn[0], text[turn.end() : end]))
    return turns


def _require_turns(text: str) -> list[_Turn]:
    """The turns of text. ChatError: it has none."""
    turns = _turns(text)
    if not turns:
        raise _Missing("no prompt: neither a column for it nor turns of Human: and Assistant:")
    return turns


def _mended(spans: list[Span], problems: list[str]) -> list[Span]:
    """Return spans with their text repaired; adds the problems found."""
    return [(mended_text(text, problems), is_target) for text, is_target in spans]


FORMAT = Format(
    "preferences", "GLOB",
    "pairs of a chosen and a rejected answer, or answers with a label, in JSON lines, plain, .gz "
    "or .zst, or in .parquet",
    "--preferences 'pairs/*.jsonl' --tokenizer path/to/tokenizer.json --chat-template chatml",
    find, documents, records.cut,
)  # fmt: skip
