"""What clients of OpenAI's API ask, checked, and how they are answered.

Of the API there are completions and chat completions. A key that would change the answer and is not
known here is refused, so that nobody gets another answer than was asked for.

Source: https://platform.openai.com/docs/api-reference, completions and chat.
"""

import dataclasses
import json
import math
import secrets
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from data_pipeline.errors import UsageError, UserError
from data_pipeline.strict_json import loads
from data_pipeline.tokenizer import Tokenizer
from maxtrain.config.words import choices
from maxtrain.serve.chat import Chat, check_characters
from maxtrain.serve.generation import Reason, check_ids
from maxtrain.serve.request_error import RequestError
from maxtrain.serve.sampling import Sampling
from maxtrain.serve.text import Token

# Of a completion, unless the request says so; as OpenAI has it.
_DEFAULT_TOKENS = 16
_MOST_CHOICES = 128
_MOST_STOPS = 16
# Each new part of a text is compared with all beginnings of a stop text.
_LONGEST_STOP = 256
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_OF_BOTH = ("model", "max_tokens", "n", "stream", "stream_options", "stop", "seed", "logprobs")
_OF_COMPLETIONS = ("prompt",)
_OF_CHAT = ("messages", "max_completion_tokens")
# These say who asks, and change no answer.
_WITHOUT_EFFECT = ("user", "metadata", "safety_identifier", "prompt_cache_key")
# These change nothing with these values, which some clients send.
_NEUTRAL: Mapping[str, Sequence[Any]] = {
    "frequency_penalty": (0, None),
    "presence_penalty": (0, None),
    "logit_bias": (None, {}),
    "top_logprobs": (0, None),
    "best_of": (1, None),
    "echo": (False, None),
    "suffix": (None, ""),
    "store": (False, None),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "service_tier": (None, "auto", "default"),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """What a request asks for beside its prompts.

    Args:
        model: one of `Served.names`.
        count: texts after each prompt.
        max_tokens: new tokens of each text; None: the API's default.
        length_key: the request's name for `max_tokens`.
        sampling: how tokens are chosen.
        seed: of the random choices.
        stop: texts that each completion ends before.
        stream: parts are sent as they come.
        counts_stream: a stream ends with the number of tokens.
        logprobs: the log-probability of each token is wanted.
    """

    model: str
    count: int
    max_tokens: int | None
    length_key: str
    sampling: Sampling
    seed: int
    stop: tuple[str, ...]
    stream: bool
    counts_stream: bool
    logprobs: bool


@dataclasses.dataclass(frozen=True)
class CompletionRequest:
    """A checked request of /v1/completions, whose prompts are not encoded yet.

    Args:
        options: what it asks for.
        prompts: texts, or ids.
    """

    options: Options
    prompts: Sequence[Any]

    @property
    def num_texts(self) -> int:
        """How many texts are to be generated."""
        return len(self.prompts) * self.options.count


@dataclasses.dataclass(frozen=True)
class ChatRequest:
    """A checked request of /v1/chat/completions, whose messages are not rendered yet.

    Args:
        options: what it asks for.
        messages: with texts as contents.
    """

    options: Options
    messages: Sequence[Mapping[str, Any]]

    @property
    def num_texts(self) -> int:
        """How many texts are to be generated."""
        return self.options.count


@dataclasses.dataclass(frozen=True)
class EncodedRequest:
    """A request that the engine can work on.

    Args:
        options: what it asks for.
        prompts: ids, one list for each text that is to be generated.
        max_tokens: new tokens of each text; after the longest prompt there is room for them.
        prompt_tokens: tokens of all different prompts.
    """

    options: Options
    prompts: list[list[int]]
    max_tokens: int
    prompt_tokens: int


class Served(NamedTuple):
    """What is served.

    Args:
        name: of the model, in requests and answers.
        adapters: names of the model with adapters, in the order of their numbers from 1 on.
        tokenizer: of the model.
        beginning: ids before every text that is no conversation.
        chat: how conversations are written; None: the model has no chat template.
        max_length: tokens of a text.
        vocab_size: of the model.
        created: when serving began, seconds since 1970.
        longest_token: characters of the longest token, by which long texts are refused before they
            are encoded.
    """

    name: str
    adapters: tuple[str, ...]
    tokenizer: Tokenizer
    beginning: tuple[int, ...]
    chat: Chat | None
    max_length: int
    vocab_size: int
    created: int
    longest_token: int = 1 << 10

    @property
    def max_characters(self) -> int:
        """The longest text that may fit into `max_length` tokens."""
        return self.max_length * self.longest_token

    @property
    def names(self) -> tuple[str, ...]:
        """Of all that can be asked for; the place of one is the number of its adapters."""
        return (self.name, *self.adapters)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a text."""
        found = set[int]()
        if self.tokenizer.eod_id is not None:
            found.add(self.tokenizer.eod_id)
        if self.chat is not None:
            found.update(self.chat.stop_ids)
        return tuple(sorted(found))


def read_body(content: bytes) -> dict[str, Any]:
    """Return a request's JSON object.

    Raises:
        RequestError: the body is not a JSON object.
    """
    try:
        values = loads(content)
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}. Send a JSON object.") from error
    if not isinstance(values, dict):
        raise RequestError("the body must be a JSON object.")
    return values


def read_completion(values: Mapping[str, Any], served: Served) -> CompletionRequest:
    """Check a request of /v1/completions, without work that grows faster than its size.

    Raises:
        RequestError: it cannot be answered.
    """
    _check_keys(values, (*_OF_BOTH, *_SAMPLING, *_OF_COMPLETIONS), served)
    logprobs = values.get("logprobs")
    if logprobs is not None and (isinstance(logprobs, bool) or logprobs != 0):
        raise RequestError(
            "logprobs must be 0, which tells the log-probability of each token that was chosen; "
            "those of others are not told.",
            param="logprobs",
        )
    prompts = _prompts(values.get("prompt"), served)
    options = _options(values, served, len(prompts), logprobs is not None, "max_tokens")
    return CompletionRequest(options, prompts)


def read_chat(values: Mapping[str, Any], served: Served) -> ChatRequest:
    """Check a request of /v1/chat/completions, without work that grows faster than its size.

    Raises:
        RequestError: it cannot be answered.
    """
    _check_keys(values, (*_OF_BOTH, *_SAMPLING, *_OF_CHAT), served)
    if served.chat is None:
        raise RequestError(
            f"{served.name} has no chat template, so that it can't answer messages. Use "
            "/v1/completions, or start the server with --chat-template.",
            param="messages",
        )
    messages = _messages(values.get("messages"), served)
    logprobs = values.get("logprobs")
    if logprobs is not None and not isinstance(logprobs, bool):
        raise RequestError("logprobs must be true or false.", param="logprobs")
    name = "max_tokens"
    if values.get("max_completion_tokens") is not None:
        name = "max_completion_tokens"
        if values.get("max_tokens") is not None:
            raise RequestError("max_tokens and max_completion_tokens say the same. Leave one out.")
    options = _options(values, served, 1, bool(logprobs), name)
    return ChatRequest(options, messages)


def encode(request: CompletionRequest | ChatRequest, served: Served) -> EncodedRequest:
    """Encode the prompts of a request, which takes time that grows with their length.

    Raises:
        RequestError: a prompt cannot be encoded, or is too long.
    """
    options = request.options
    if isinstance(request, ChatRequest):
        assert served.chat is not None
        try:
            prompts = [served.chat.ids(request.messages)]
        except UserError as error:
            raise RequestError(str(error), param="messages") from error
        default = None
    else:
        prompts = [_prompt_ids(prompt, served) for prompt in request.prompts]
        default = _DEFAULT_TOKENS
    return EncodedRequest(
        options=options,
        prompts=[prompt for prompt in prompts for _ in range(options.count)],
        max_tokens=_max_tokens(options, prompts, default, served),
        prompt_tokens=sum(map(len, prompts)),
    )


def _max_tokens(
    options: Options, prompts: list[list[int]], default: int | None, served: Served
) -> int:
    """Return how many new tokens each text may have; `default`: None for as many as there is room
    for.

    Raises:
        RequestError: there is no room for so many.
    """
    longest = max(map(len, prompts))
    if longest > served.max_length:
        raise RequestError(
            f"the prompt has {longest:,} tokens, and {served.name} reads at most "
            f"{served.max_length:,}. Shorten it.",
            code="context_length_exceeded",
        )
    # The last token needs no place of its own.
    most = served.max_length - longest + 1
    max_tokens = options.max_tokens
    if max_tokens is None:
        return min(default or most, most)
    if max_tokens > most:
        raise RequestError(
            f"{options.length_key}={max_tokens:,} is too much: after a prompt of {longest:,} "
            f"tokens there is room for {most:,}. Ask for fewer.",
            param=options.length_key,
            code="context_length_exceeded",
        )
    return max_tokens


def _check_keys(values: Mapping[str, Any], known: Sequence[str], served: Served) -> None:
    """RequestError: a key that is not known, or another model."""
    for key, value in values.items():
        if key in known or key in _WITHOUT_EFFECT:
            continue
        if key not in _NEUTRAL:
            raise RequestError(
                f"{key} is not supported here. Leave it out; known are "
                f"{choices(sorted([*known, *_WITHOUT_EFFECT]))}.",
                param=key,
                code="unsupported_parameter",
            )
        if not any(_is_same(value, neutral) for neutral in _NEUTRAL[key]):
            raise RequestError(
                f"{key}={json.dumps(value)[:80]} is not supported here. Leave it out.",
                param=key,
                code="unsupported_value",
            )
    name = values.get("model", served.name)
    if name not in served.names:
        known = ", ".join(map(repr, served.names))
        raise RequestError(
            f"model={str(name)[:80]!r} is not served here, but {known}.",
            404,
            "model",
            "model_not_found",
        )


def _is_same(value: Any, neutral: Any) -> bool:
    """Whether they are equal as JSON; Python's False is 0, too."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _count(values: Mapping[str, Any], num_prompts: int) -> int:
    """How many texts are asked for after each prompt; RequestError: too many with all prompts."""
    count = values.get("n")
    if count is None:
        count = 1
    count = _integer("n", count, 1)
    if count * num_prompts > _MOST_CHOICES:
        raise RequestError(
            f"{str(count * num_prompts)[:40]} texts are asked for at once, at most {_MOST_CHOICES} "
            "can be. Ask several times.",
            param="n",
        )
    return count


def _prompts(prompt: Any, served: Served) -> list[Any]:
    """Return each prompt of a request: one text, several, ids of one, or ids of several.

    Raises:
        RequestError: there is none, or one can never fit into the context.
    """
    prompts = None
    if isinstance(prompt, str):
        prompts = [prompt]
    elif isinstance(prompt, list) and prompt:
        prompts = prompt
        if all(isinstance(entry, int) for entry in prompt):
            prompts = [prompt]
    if prompts is None:
        raise RequestError(
            "prompt must be a text, a list of ids, or a list of such. Write what is to be "
            "continued.",
            param="prompt",
        )
    for one in prompts:
        if isinstance(one, str):
            _check_size(len(one), "prompt", served)
        elif isinstance(one, list) and len(one) > served.max_length:
            raise RequestError(
                f"the prompt has {len(one):,} tokens, and {served.name} reads at most "
                f"{served.max_length:,}. Shorten it.",
                param="prompt",
                code="context_length_exceeded",
            )
    return prompts


def _check_size(characters: int, param: str, served: Served) -> None:
    """Refuse a text that is too long for the context, whatever its tokens are.

    Raises:
        RequestError: it is too long.
    """
    if characters > served.max_characters:
        raise RequestError(
            f"{param} has {characters:,} characters, and {served.name} reads at most "
            f"{served.max_length:,} tokens of at most {served.longest_token:,} characters. "
            "Shorten it.",
            param=param,
            code="context_length_exceeded",
        )


def _messages(messages: Any, served: Served) -> list[dict[str, Any]]:
    """Return the messages of a request, each with one text as its content.

    Raises:
        RequestError: there are none, or they can never fit into the context.
    """
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise RequestError("messages must be a list of objects.", param="messages")
    if len(messages) > served.max_length:
        raise RequestError(
            f"messages has {len(messages):,} messages, and {served.name} reads at most "
            f"{served.max_length:,} tokens. Send fewer.",
            param="messages",
            code="context_length_exceeded",
        )
    plain = [_plain(message) for message in messages]
    _check_size(num_characters(plain), "messages", served)
    return plain


def num_characters(value: Any) -> int:
    """Return how many characters all texts within a JSON value have, keys included."""
    count = 0
    left = [value]
    while left:
        inner = left.pop()
        if isinstance(inner, str):
            count += len(inner)
        elif isinstance(inner, Mapping):
            left += inner.keys()
            left += inner.values()
        elif isinstance(inner, list | tuple):
            left += inner
    return count


def _prompt_ids(prompt: Any, served: Served) -> list[int]:
    """The ids of a prompt; those that are given stay as they are."""
    if isinstance(prompt, str):
        ids = [*served.beginning, *_encoded(prompt, served.tokenizer)]
        if not ids:
            raise RequestError("prompt is empty. Write what is to be continued.", param="prompt")
        return ids
    if not isinstance(prompt, list) or not all(type(i) is int for i in prompt):
        raise RequestError("each prompt must be a text or a list of ids.", param="prompt")
    try:
        check_ids(prompt, served.vocab_size)
    except UsageError as error:
        raise RequestError(str(error), param="prompt") from error
    return prompt


def _encoded(text: str, tokenizer: Tokenizer) -> list[int]:
    try:
        text.encode()
        return tokenizer.encode(text).tolist()
    except (UnicodeEncodeError, UserError) as error:
        raise RequestError(f"prompt can't be encoded: {error}.", param="prompt") from error


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose content is one text, where it was given in parts."""
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise RequestError(
                "content must be text; other parts are not supported.", param="messages"
            )
        texts.append(part.get("text"))
    if not all(isinstance(text, str) for text in texts):
        raise RequestError("a part of type text must have a text.", param="messages")
    return {**message, "content": "".join(texts)}


def _options(
    values: Mapping[str, Any], served: Served, num_prompts: int, logprobs: bool, length_key: str
) -> Options:
    """Return what both kinds of requests ask for.

    Raises:
        RequestError: a value that there cannot be.
    """
    max_tokens = values.get(length_key)
    if max_tokens is not None:
        max_tokens = _integer(length_key, max_tokens, 1)
    seed = values.get("seed")
    if seed is None:
        seed = secrets.randbits(32)
    # Any integer is a seed; the engine has 32 bits.
    seed = _integer("seed", seed, None) % (1 << 32)
    stream, counts = _stream(values)
    return Options(
        model=values.get("model", served.name),
        count=_count(values, num_prompts),
        max_tokens=max_tokens,
        length_key=length_key,
        sampling=_sampling(values),
        seed=seed,
        stop=_stop(values.get("stop")),
        stream=stream,
        counts_stream=counts,
        logprobs=logprobs,
    )


def _integer(key: str, value: Any, least: int | None) -> int:
    if type(value) is not int or (least is not None and value < least):
        what = "an integer"
        if least is not None:
            what += f" of at least {least}"
        raise RequestError(f"{key}={str(value)[:40]} must be {what}.", param=key)
    return value


def _sampling(values: Mapping[str, Any]) -> Sampling:
    """How tokens are chosen: by default with the model's own probabilities, as OpenAI does."""
    given: dict[str, Any] = {"temperature": 1.0}
    for key in _SAMPLING:
        value = values.get(key)
        if value is None:
            continue
        if key == "top_k":
            given[key] = _integer(key, value, 1)
            continue
        if not _is_number(value):
            raise RequestError(f"{key}={str(value)[:40]} must be a number.", param=key)
        given[key] = value
    try:
        return Sampling(**given)
    except UsageError as error:
        raise RequestError(str(error), param=str(error).partition("=")[0]) from error


def _is_number(value: Any) -> bool:
    """Whether it is a number that a float has room for."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _stop(stop: Any) -> tuple[str, ...]:
    if stop is None:
        return ()
    if isinstance(stop, str):
        stop = [stop]
    is_right = isinstance(stop, list) and all(isinstance(text, str) and text for text in stop)
    if not is_right or len(stop) > _MOST_STOPS:
        raise RequestError(
            f"stop must be a text or a list of at most {_MOST_STOPS} texts, none of them empty.",
            param="stop",
        )
    for text in stop:
        if len(text) > _LONGEST_STOP:
            raise RequestError(
                f"a text of stop has {len(text):,} characters, at most {_LONGEST_STOP} are "
                "possible. Shorten it.",
                param="stop",
            )
        try:
            check_characters("stop", text)
        except UsageError as error:
            raise RequestError(str(error), param="stop") from error
    return tuple(stop)


def _stream(values: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether parts are sent, and whether a stream ends with the number of tokens."""
    stream = _boolean("stream", values.get("stream"), "stream")
    options = values.get("stream_options")
    if options is None:
        return stream, False
    if not isinstance(options, dict) or options.keys() - {"include_usage", "include_obfuscation"}:
        raise RequestError(
            "stream_options may have include_usage, true or false, and nothing else.",
            param="stream_options",
        )
    counts = _boolean("include_usage", options.get("include_usage"), "stream_options")
    # Some clients say that they do not want it.
    if _boolean("include_obfuscation", options.get("include_obfuscation"), "stream_options"):
        raise RequestError(
            "include_obfuscation=true is not supported here. Leave it out.",
            param="stream_options",
        )
    if not stream:
        raise RequestError(
            "stream_options is for streams alone. Leave it out, or ask for stream=true.",
            param="stream_options",
        )
    return stream, counts


def _boolean(key: str, value: Any, param: str) -> bool:
    """Of a key that is false unless it is given."""
    if value is None:
        return False
    if not isinstance(value, bool):
        raise RequestError(f"{key}={str(value)[:40]} must be true or false.", param=param)
    return value


# Answers.


class Answers:
    """How the texts of one request are told.

    Args:
        request: the request.
        served: what is served.
        is_chat: of /v1/chat/completions.
    """

    def __init__(self, request: EncodedRequest, served: Served, is_chat: bool):
        self._request = request
        self._served = served
        self._is_chat = is_chat
        prefix = "cmpl"
        if is_chat:
            prefix = "chatcmpl"
        self._id = f"{prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())

    def whole(
        self, texts: Sequence[str], tokens: Sequence[Sequence[Token]], reasons: Sequence[Reason]
    ) -> dict[str, Any]:
        """All texts at once."""
        listed = []
        for index, (text, of_text, reason) in enumerate(zip(texts, tokens, reasons, strict=True)):
            choice = self._choice(index, text, of_text, reason)
            if self._is_chat:
                choice["message"] = {"role": "assistant", "content": text, "refusal": None}
            else:
                choice["text"] = text
            listed.append(choice)
        counted = sum(map(len, tokens))
        return self._frame("", listed) | {"usage": self.usage(counted)}

    def part(
        self,
        index: int,
        text: str,
        tokens: Sequence[Token],
        reason: Reason | None,
        is_first: bool,
    ) -> dict[str, Any]:
        """A part of a text in a stream."""
        choice = self._choice(index, text, tokens, reason)
        if self._is_chat:
            delta: dict[str, Any] = {"content": text}
            if is_first:
                delta = {"role": "assistant", "content": text}
            choice["delta"] = delta
        else:
            choice["text"] = text
        return self._frame(".chunk", [choice])

    def last_part(self, num_tokens: int) -> dict[str, Any]:
        """The end of a stream that tells the number of tokens."""
        return self._frame(".chunk", []) | {"usage": self.usage(num_tokens)}

    def usage(self, num_tokens: int) -> dict[str, int]:
        """Numbers of tokens."""
        before = self._request.prompt_tokens
        return {
            "prompt_tokens": before,
            "completion_tokens": num_tokens,
            "total_tokens": before + num_tokens,
        }

    def _frame(self, part: str, listed: list[dict[str, Any]]) -> dict[str, Any]:
        name = "text_completion"
        if self._is_chat:
            name = f"chat.completion{part}"
        return {
            "id": self._id,
            "object": name,
            "created": self._created,
            "model": self._request.options.model,
            "choices": listed,
        }

    def _choice(
        self, index: int, text: str, tokens: Sequence[Token], reason: Reason | None
    ) -> dict[str, Any]:
        told = None
        if self._request.options.logprobs:
            told = self._logprobs(tokens)
        return {"index": index, "finish_reason": _finish(reason), "logprobs": told}

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """Each token with its log-probability."""
        if not self._is_chat:
            return {
                "tokens": [self._written(token) for token in tokens],
                "token_logprobs": [token.logprob for token in tokens],
                "top_logprobs": None,
                "text_offset": [token.offset for token in tokens],
            }
        content = []
        for token in tokens:
            found = self._served.tokenizer.token_bytes(token.id)
            told = None
            if found is not None:
                told = list(found)
            content.append(
                {
                    "token": self._written(token),
                    "logprob": token.logprob,
                    "bytes": told,
                    "top_logprobs": [],
                }
            )
        return {"content": content, "refusal": None}

    def _written(self, token: Token) -> str:
        """What a token stands for, with U+FFFD for a part of a character."""
        found = self._served.tokenizer.token_bytes(token.id)
        if found is None:
            return self._served.tokenizer.decode([token.id])
        return found.decode(errors="replace")


def _finish(reason: Reason | None) -> str | None:
    """Why a text has ended, in the words of the API; None: it has not."""
    if reason == "window":
        return "length"
    return reason
