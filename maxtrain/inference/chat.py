"""Chat prompts: conversations rendered as token ids that a model continues."""

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data_pipeline.base.errors import DataError, UsageError
from data_pipeline.base.limited_files import read_limited
from data_pipeline.base.strict_json import MAX_FILE_BYTES, loads
from data_pipeline.chat.chat import ChatError, Template, load_template, render
from data_pipeline.sources.chat import with_system
from data_pipeline.sources.chat_map import ROLES
from data_pipeline.sources.messages import read_messages, split_untaught
from data_pipeline.tokenizer import (
    GENERATION,
    Tokenizer,
    named_token,
    read_settings,
    tokenizer_path,
)

Message = Mapping[str, Any]

# A placeholder answer that no template contains.
_ANSWER = "maxtrain-answer"
# Variables of templates that requests cannot set.
_OWN_VARIABLES = (
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "raise_exception",
    "strftime_now",
)


class Chat:
    """The chat template of a model, and the tokens that end an answer.

    Args:
        tokenizer: the model's tokenizer.
        place: where the tokenizer was loaded from, as for `load_tokenizer`; chat_template.jinja and
            tokenizer_config.json are beside it.
        template: a file, "chatml", or empty for the template beside the tokenizer.
        date: YYYY-MM-DD, for templates that write the date; empty: today.
        system: the system message for conversations without one; empty: none.

    Attributes:
        stop_ids: tokens that end an answer: the end-of-document token, the tokenizer's eos_token,
            those of generation_config.json, and the token that the template writes after an answer.

    Raises:
        DataError: there is no template, or it cannot be used.
        UsageError: the system message has a special token, or cannot be written in UTF-8.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        place: str | Path,
        template: str = "",
        date: str = "",
        system: str = "",
    ):
        _check_texts("system", system, tokenizer.special)
        self._tokenizer = tokenizer
        self._date = date
        self._system = system
        self._template, _ = load_template(template, place, tokenizer.special, date or _today())
        found = {self.end_of_turn(), tokenizer.eod_id}
        if place != "bytes":
            path = tokenizer_path(place)
            eos = named_token(read_settings(path), "eos_token")
            found.add(tokenizer.special.get(eos or ""))
            found.update(ends_of_generation(path.with_name(GENERATION)))
        self.stop_ids = tuple(sorted(i for i in found if i is not None))

    def ids(self, messages: Sequence[Message], tools: list[Any] | None = None) -> list[int]:
        """Return the token ids of a conversation, up to where the assistant's next turn begins.

        Raises:
            UsageError: as for `text`.
        """
        return self.encode(self.text(messages, tools))

    def text(
        self,
        messages: Sequence[Message],
        tools: list[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of a conversation, up to where the assistant's next turn begins, with
        special tokens.

        Args:
            messages: the conversation. Arguments of tool calls may be JSON texts, as in OpenAI's
                API; templates get the values.
            tools: definitions of functions, as in OpenAI's API.
            variables: more variables of the template, such as `enable_thinking`.

        Raises:
            UsageError: the messages are no conversation, an argument contains special tokens, or
                the template refuses the messages.
        """
        _check(messages)
        _check_texts("messages", list(messages), self._tokenizer.special)
        _check_texts("tools", tools, self._tokenizer.special)
        template = self._dated()
        if variables:
            _check_texts("chat_template_kwargs", variables, self._tokenizer.special)
            template = _with_variables(template, variables)
        try:
            # Messages are read as `prepare` reads them, so that prompts have the form of the
            # training data.
            read, _ = split_untaught(read_messages(messages))
            # A second check, because JSON inside a text can spell a special token in another way.
            _check_texts("messages", read, self._tokenizer.special)
            return render(template, with_system(read, self._system), tools, prompt=True)
        except ChatError as error:
            raise UsageError(
                f"messages: the chat template refuses them: {error}. Change them."
            ) from error

    def encode(self, text: str) -> list[int]:
        """Return the ids of a rendered template, in which special tokens become their ids."""
        ids, _, _ = self._tokenizer.locate(text)
        return ids.tolist()

    @property
    def source(self) -> str:
        """Return the text of the template, with that of a separate template for tools if there is
        one."""
        return "\n".join(self._template.sources)

    def _dated(self) -> Template:
        """Return the template with its date, computed anew because today's date changes."""
        return self._template._replace(date=self._date or _today())

    def end_of_turn(self) -> int | None:
        """Return the special token that the template writes directly after an answer; None: it
        writes none."""
        messages = [
            {"role": "user", "content": "question"},
            {"role": "assistant", "content": _ANSWER},
        ]
        try:
            text = render(self._template, messages)
        except (ChatError, DataError):
            return None
        _, found, behind = text.partition(_ANSWER)
        if not found:
            return None
        behind = behind.lstrip()
        tokens = [token for token in self._tokenizer.special if behind.startswith(token)]
        if not tokens:
            return None
        return self._tokenizer.special[max(tokens, key=len)]


def _today() -> str:
    """Return today's date as YYYY-MM-DD."""
    return datetime.date.today().isoformat()


def ends_of_generation(path: Any) -> list[int]:
    """Return the ids of `eos_token_id` in a generation_config.json; empty if there is no such file.

    Raises a DataError if they are no ids.
    """
    if not path.exists():
        return []
    try:
        ids = loads(read_limited(path, MAX_FILE_BYTES)).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise DataError(f"{path}: is not a JSON object ({error}). Write the file again.") from error
    if ids is None:
        return []
    if isinstance(ids, int):
        ids = [ids]
    if not isinstance(ids, list) or not all(isinstance(i, int) and i >= 0 for i in ids):
        raise DataError(
            f"{path}: eos_token_id={ids!r} must be an id or a list of ids. Correct the file."
        )
    return ids


def _check(messages: Sequence[Message]) -> None:
    """Raise a UsageError if the messages are no conversation that can be answered."""
    if not messages:
        raise UsageError("messages: is empty, but there must be something to answer. Add one.")
    for number, message in enumerate(messages):
        role = message.get("role")
        if role not in ROLES:
            raise UsageError(
                f"messages[{number}].role={role!r} must be one of {', '.join(ROLES)}. "
                "Use one of these roles."
            )
        content = message.get("content")
        # A turn with tool calls may have no content.
        if content is None and message.get("tool_calls"):
            continue
        # `read_messages` joins the parts of a list.
        if not isinstance(content, str | list):
            raise UsageError(
                f"messages[{number}].content={content!r} must be a text. Set it to one."
            )


def _with_variables(template: Template, variables: Mapping[str, Any]) -> Template:
    """Return a template that gets more variables.

    Raises:
        UsageError: a name is reserved for another variable of the template.
    """
    taken = {*_OWN_VARIABLES, *dict(template.tokens)}
    for name in variables:
        if name in taken or not name.isidentifier():
            raise UsageError(
                f"chat_template_kwargs: the variable {name[:40]!r} cannot be set. Leave it out."
            )
    tokens = [*template.tokens, *variables.items()]
    return template._replace(tokens=tuple(tokens))


def _check_texts(where: str, value: Any, special: Mapping[str, int]) -> None:
    """Check every text in a template's variable, keys included.

    Raises:
        UsageError: a text has a special token or a lone surrogate.
    """
    # Most texts have none of these characters, and are not searched for each token.
    first_characters = {token[0] for token in special if token}
    left = [(where, value)]
    while left:
        name, inner = left.pop()
        if isinstance(inner, Mapping):
            for key, item in inner.items():
                left += [(f"{name}.{key}", item), (name, key)]
        elif isinstance(inner, list | tuple):
            left += [(f"{name}[{number}]", item) for number, item in enumerate(inner)]
        elif isinstance(inner, str):
            check_characters(name, inner)
            if any(character in inner for character in first_characters):
                _check_special(name, inner, special)


def _check_special(where: str, text: str, special: Mapping[str, int]) -> None:
    """Raise a UsageError if a text contains a special token."""
    for token in special:
        if token in text:
            raise UsageError(
                f"{where} has the special token {token}, which only the chat template may "
                "write. Take it out."
            )


def check_characters(where: str, text: str) -> None:
    """Raise a UsageError if a text cannot be written in UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise UsageError(
            f"{where} has the lone surrogate U+{code:04X} at character {error.start}, which is no "
            "character of its own. Take it out."
        ) from error
