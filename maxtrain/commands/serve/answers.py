"""Answers of OpenAI's API: texts of the engine as JSON objects, whole or in parts of a stream."""

import json
import secrets
import string
import time
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

from maxtrain.commands.serve.protocol import EncodedRequest, ServedModel
from maxtrain.commands.serve.tool_formats import CompletionReader, TextPart, ToolCall
from maxtrain.commands.serve.worker import TextChunk
from maxtrain.inference.generation import Reason
from maxtrain.inference.text import OutputToken, TextStream

# Mistral's templates ask for this length.
_ID_CHARACTERS = 9


class _PromptToken(NamedTuple):
    """A token of a prompt: as `OutputToken`, but the first of all has no log-probability."""

    id: int
    logprob: float | None
    offset: int
    top: Sequence[tuple[int, float]]


class ResponseBuilder:
    """Responses of one request. Parts of each text come in their order.

    Args:
        request: the request.
        served: what is served.
        is_chat: of /v1/chat/completions.
    """

    def __init__(self, request: EncodedRequest, served: ServedModel, is_chat: bool):
        self._request = request
        self._served = served
        self._is_chat = is_chat
        prefix = "cmpl"
        if is_chat:
            prefix = "chatcmpl"
        self._id = f"{prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._readers: list[CompletionReader] = []
        if request.reader is not None:
            self._readers = [request.reader() for _ in request.prompts]
        self._has_begun = [False] * len(request.prompts)
        self._num_calls = [0] * len(request.prompts)
        # Characters of the echo of each prompt.
        self._echoed = [0] * len(request.prompts)

    def whole(self, parts: Sequence[Sequence[TextChunk]]) -> dict[str, Any]:
        """All texts at once, each of its parts."""
        listed = []
        counted = 0
        for index, of_text in enumerate(parts):
            joined = TextChunk(
                "".join(part.text for part in of_text),
                [token for part in of_text for token in part.tokens],
                of_text[-1].reason if of_text else None,
                of_text[0].prompt if of_text else (),
            )
            counted += self.num_tokens(joined)
            choice = self._choice(index, joined)
            if self._is_chat:
                choice["message"] = _message(choice.pop("delta"))
            listed.append(choice)
        return self._frame("", listed) | {"usage": self.usage(counted)}

    def part(self, index: int, part: TextChunk) -> dict[str, Any] | None:
        """Return a part of a text in a stream; None if there is nothing to send yet."""
        is_first = not self._has_begun[index]
        choice = self._choice(index, part)
        if self._is_chat:
            if is_first:
                choice["delta"] = {"role": "assistant", "content": "", **choice["delta"]}
            if not choice["delta"] and part.reason is None and choice["logprobs"] is None:
                return None
            if not choice["delta"] and part.reason is None:
                choice["delta"] = {"content": ""}
        return self._frame(".chunk", [choice])

    def last_part(self, num_tokens: int) -> dict[str, Any]:
        """Return the end of a stream, with the number of tokens."""
        return self._frame(".chunk", []) | {"usage": self.usage(num_tokens)}

    def num_tokens(self, part: TextChunk) -> int:
        """New tokens of a part, as they are counted."""
        return 0 if self._request.ignores_new else len(part.tokens)

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

    def _choice(self, index: int, part: TextChunk) -> dict[str, Any]:
        """Return a choice with the text, the tokens and the end of a part."""
        is_first = not self._has_begun[index]
        self._has_begun[index] = True
        choice: dict[str, Any] = {"index": index}
        if self._is_chat:
            choice["delta"] = self._delta(index, part)
            choice["logprobs"] = None
            if self._request.options.logprobs is not None:
                choice["logprobs"] = self._chat_logprobs(part.tokens)
        else:
            text = "" if self._request.ignores_new else part.text
            tokens: list[OutputToken | _PromptToken] = []
            if self._request.options.echo and is_first:
                echoed, prompt_tokens = self._echo(index, part)
                self._echoed[index] = len(echoed)
                text = echoed + text
                tokens += prompt_tokens
            if not self._request.ignores_new:
                before = self._echoed[index]
                tokens += [token._replace(offset=before + token.offset) for token in part.tokens]
            choice["text"] = text
            choice["logprobs"] = None
            if self._request.options.logprobs is not None:
                choice["logprobs"] = self._logprobs(tokens)
        choice["finish_reason"] = self._finish(index, part.reason)
        return choice

    def _finish(self, index: int, reason: Reason | None) -> str | None:
        """Return why a text has ended, as the API names it; None if it has not."""
        if reason == "stop" and self._num_calls[index]:
            return "tool_calls"
        if reason == "window" or self._request.ignores_new:
            return "length" if reason is not None else None
        return reason

    # Chats.

    def _delta(self, index: int, part: TextChunk) -> dict[str, Any]:
        """Return what is new of a message."""
        delta: dict[str, Any] = {}
        reader = self._readers[index]
        for found in reader.feed(part.text, is_last=part.reason is not None):
            if isinstance(found, TextPart):
                key = "content"
                if found.kind == "reasoning":
                    key = "reasoning_content"
                delta[key] = delta.get(key, "") + found.text
            else:
                delta.setdefault("tool_calls", []).append(self._call(index, found))
        return delta

    def _call(self, index: int, call: ToolCall) -> dict[str, Any]:
        number = self._num_calls[index]
        self._num_calls[index] += 1
        characters = string.ascii_letters + string.digits
        return {
            "index": number,
            "id": "".join(secrets.choice(characters) for _ in range(_ID_CHARACTERS)),
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }

    def _chat_logprobs(self, tokens: Sequence[OutputToken]) -> dict[str, Any]:
        content = []
        for token in tokens:
            entry = self._entry(token.id, token.logprob)
            entry["top_logprobs"] = [self._entry(i, logprob) for i, logprob in token.top]
            content.append(entry)
        return {"content": content, "refusal": None}

    def _entry(self, i: int, logprob: float) -> dict[str, Any]:
        found = self._request.tokenizer.token_bytes(i)
        numbers = None
        if found is not None:
            numbers = list(found)
        return {"token": self._written(i), "logprob": logprob, "bytes": numbers}

    # Completions.

    def _logprobs(self, tokens: Sequence[OutputToken | _PromptToken]) -> dict[str, Any]:
        """Each token with its log-probability."""
        top = None
        if self._request.options.logprobs:
            top = [self._named(token) for token in tokens]
        return {
            "tokens": [self._written(token.id) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": top,
            "text_offset": [token.offset for token in tokens],
        }

    def _named(self, token: OutputToken | _PromptToken) -> dict[str, float] | None:
        """Return the likeliest tokens in the place of one, and that one, by their texts."""
        if token.logprob is None:
            return None
        listed = dict(token.top)
        listed.setdefault(token.id, token.logprob)
        named: dict[str, float] = {}
        for i, logprob in listed.items():
            text = self._written(i)
            found = self._request.tokenizer.token_bytes(i)
            if "\ufffd" in text and found:
                # As OpenAI names parts of characters.
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)
            if text in named:
                # Several tokens may have the same text.
                text = f"token:{i}"
            named[text] = logprob
        return named

    def _echo(self, index: int, part: TextChunk) -> tuple[str, list[OutputToken | _PromptToken]]:
        """Return the text of a prompt, and its tokens if they are scored."""
        ids = self._request.prompts[index]
        hidden = self._request.num_hidden[index]
        stream = TextStream(self._request.tokenizer, ids[:hidden])
        text = stream.add(ids[hidden:]) + stream.finish()
        if self._request.options.logprobs is None:
            return text, []
        # The first token of all has none before it.
        scores = [(None, ()), *part.prompt]
        tokens: list[OutputToken | _PromptToken] = []
        for number, (i, (logprob, top)) in enumerate(zip(ids[hidden:], scores[hidden:])):
            tokens.append(_PromptToken(i, logprob, stream.offset(number), top))
        return text, tokens

    def _written(self, i: int) -> str:
        """Return what a token stands for, with U+FFFD for a part of a character."""
        tokenizer = self._request.tokenizer
        found = tokenizer.token_bytes(i)
        if found is None:
            return tokenizer.decode([i])
        return found.decode(errors="replace")


def _message(delta: dict[str, Any]) -> dict[str, Any]:
    """Return the whole message that a delta is."""
    message = {"role": "assistant", "content": delta.get("content", ""), "refusal": None}
    if "reasoning_content" in delta:
        message["reasoning_content"] = delta["reasoning_content"]
    if "tool_calls" in delta:
        message["content"] = delta.get("content") or None
        message["tool_calls"] = [
            {key: value for key, value in call.items() if key != "index"}
            for call in delta["tool_calls"]
        ]
    return message


def event(values: dict[str, Any]) -> str:
    """Return a server-sent event."""
    return f"data: {json.dumps(values, ensure_ascii=False)}\n\n"
