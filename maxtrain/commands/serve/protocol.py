"""Requests of OpenAI's API: checked, then encoded for the engine.

Of the API there are completions and chat completions. A key that would change the answer and is not
known here is refused, so that no client gets another answer than it requested. Checks are cheap and
come first; `encode` does the work that grows with the prompt.

Source: https://platform.openai.com/docs/api-reference, completions and chat.
"""

import dataclasses
import json
import math
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from data_pipeline.base.errors import UsageError, UserError
from data_pipeline.base.strict_json import loads
from data_pipeline.tokenizer import Tokenizer
from maxtrain.commands.serve.constraints import Grammars, check_schema, quoted
from maxtrain.commands.serve.request_error import RequestError
from maxtrain.commands.serve.tool_formats import (
    END_THINK,
    THINK,
    CompletionReader,
    FirstCallEnd,
    ToolFormat,
    detect_format,
    has_reasoning,
)
from maxtrain.config.words import choices
from maxtrain.inference.chat import Chat, check_characters
from maxtrain.inference.generation import Constraint, check_ids
from maxtrain.inference.sampling import MOST_TOP_LOGPROBS, Sampling
from maxtrain.inference.text import VisibleTokens

# Of a completion, unless the request says so; as OpenAI has it.
_DEFAULT_TOKENS = 16
_MOST_CHOICES = 128
_MOST_STOPS = 16
# Each new part of a text is compared with all beginnings of a stop text.
_LONGEST_STOP = 256
_MOST_STOP_IDS = 64
_MOST_BIASES = 1024
_MOST_TOOLS = 128
_FUNCTION_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_OF_BOTH = (
    "model",
    "max_tokens",
    "n",
    "stream",
    "stream_options",
    "stop",
    "stop_token_ids",
    "seed",
    "logprobs",
    "logit_bias",
)
_OF_COMPLETIONS = ("prompt", "echo", "best_of")
_OF_CHAT = (
    "messages",
    "max_completion_tokens",
    "top_logprobs",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "chat_template_kwargs",
)
# These keys name the client or steer caches and logs. They change no answer.
_WITHOUT_EFFECT = (
    "user",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_cache_options",
)
# With these values, which some clients send, the keys change nothing.
_NEUTRAL: Mapping[str, Sequence[Any]] = {
    "best_of": (None,),
    "echo": (False, None),
    "suffix": (None, ""),
    "store": (False, None),
    "top_logprobs": (None,),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "parallel_tool_calls": (None, True),
    "response_format": (None, {"type": "text"}),
    "service_tier": (None, "auto", "default"),
    "modalities": (None, ["text"]),
    "chat_template_kwargs": (None, {}),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "audio": (None,),
    "moderation": (None,),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
}
# What to send in the place of a key that is refused.
_INSTEAD = {
    "functions": "Send tools, which took its place",
    "function_call": "Send tool_choice, which took its place",
    "max_completion_tokens": "Send max_tokens",
    "reasoning_effort": (
        "Leave it out, or set the variable that the chat template has for it in "
        "chat_template_kwargs"
    ),
}
# Keys of messages that have no meaning here, with what to send in their place.
_UNREAD_IN_MESSAGES = {
    "audio": "Send the transcribed text as content",
    "refusal": "Send the text of the refusal as content",
}
_IN_SCHEMA_FORM = frozenset({"name", "description", "schema", "strict"})


@dataclasses.dataclass(frozen=True)
class RequestOptions:
    """Options of a request beside its prompts.

    Args:
        model: one of `ServedModel.names`.
        count: texts after each prompt.
        max_tokens: new tokens of each text; None: the API's default.
        length_key: the request's name for `max_tokens`.
        sampling: how tokens are chosen.
        seed: of the random choices.
        stop: texts that each completion ends before.
        stream: parts are sent as they come.
        counts_stream: a stream ends with the number of tokens.
        logprobs: the log-probability of each token is wanted, and those of this many of the
            likeliest tokens in its place; None: none are.
        stop_ids: tokens that each completion ends before, beside the model's own.
        echo: each text begins with its prompt.
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
    logprobs: int | None
    stop_ids: tuple[int, ...]
    echo: bool = False


@dataclasses.dataclass(frozen=True)
class CompletionRequest:
    """A checked request of /v1/completions, whose prompts are not encoded yet.

    Args:
        options: what it asks for.
        prompts: texts, or ids.
    """

    options: RequestOptions
    prompts: Sequence[Any]

    @property
    def num_texts(self) -> int:
        """Return the number of texts to generate."""
        return len(self.prompts) * self.options.count


@dataclasses.dataclass(frozen=True)
class ChatRequest:
    """A checked request of /v1/chat/completions, whose messages are not rendered yet.

    Args:
        options: what it asks for.
        messages: with texts as contents.
        tools: definitions, as the request has them; empty: none are shown to the model.
        functions: those that may be called, by name.
        must_call: the completion is a call, or several.
        parallel: there may be several calls.
        schema: that the completion is JSON of; None: it may be any text.
        variables: more variables of the chat template.
    """

    options: RequestOptions
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Any]
    functions: Mapping[str, Any]
    must_call: bool
    parallel: bool
    schema: Mapping[str, Any] | None
    variables: Mapping[str, Any]

    @property
    def num_texts(self) -> int:
        """Return the number of texts to generate."""
        return self.options.count


@dataclasses.dataclass(frozen=True)
class EncodedRequest:
    """A request that the engine can work on.

    Args:
        options: what it asks for.
        prompts: ids, one list for each text that is to be generated.
        max_tokens: new tokens of each text; after the longest prompt there is room for them.
        prompt_tokens: tokens of all different prompts.
        num_hidden: tokens at the beginning of each prompt that the request does not have.
        constraints: what each text must be; empty: anything.
        reader: makes what takes a completion of a chat apart; None: no chat.
        has_one_call: a completion ends with its first tool call.
        tokenizer: that decodes the texts.
        ignores_new: only the prompt is wanted, not the one token after it.
    """

    options: RequestOptions
    prompts: list[list[int]]
    max_tokens: int
    prompt_tokens: int
    tokenizer: Tokenizer
    num_hidden: Sequence[int] = ()
    constraints: Sequence[Constraint] = ()
    reader: Callable[[], CompletionReader] | None = None
    ignores_new: bool = False
    has_one_call: bool = False

    def find_end(self) -> FirstCallEnd | None:
        """Return what finds the end of one completion; None: only stop texts and tokens end it."""
        if not self.has_one_call or self.reader is None:
            return None
        return FirstCallEnd(self.reader())


class ServedModel(NamedTuple):
    """The served model and its settings.

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
        grammars: make constraints of schemas; None: there are none.
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
    grammars: Grammars | None = None

    @property
    def max_characters(self) -> int:
        """The longest text that may fit into `max_length` tokens."""
        return self.max_length * self.longest_token

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all models that can be requested; the place of a name is the number of its
        adapters.
        """
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


def tokenize(values: Mapping[str, Any], served: ServedModel) -> dict[str, Any]:
    """Answer /tokenize, as vLLM's server has it, which lm-evaluation-harness uses.

    Raises:
        RequestError: there is no text, or it cannot be encoded.
    """
    text = values.get("prompt")
    if not isinstance(text, str):
        raise RequestError("prompt must be a text.", param="prompt")
    _check_size(len(text), "prompt", served)
    try:
        text.encode()
        ids = served.tokenizer.locate(text)[0].tolist()
    except (UnicodeEncodeError, UserError) as error:
        raise RequestError(f"prompt can't be encoded: {error}.", param="prompt") from error
    if values.get("add_special_tokens", True):
        ids = [*served.beginning, *ids]
    return {"tokens": ids, "count": len(ids), "max_model_len": served.max_length}


def detokenize(values: Mapping[str, Any], served: ServedModel) -> dict[str, Any]:
    """Answer /detokenize.

    Raises:
        RequestError: there are no ids.
    """
    ids = values.get("tokens")
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise RequestError("tokens must be a list of ids.", param="tokens")
    if len(ids) > served.max_length:
        raise RequestError(
            f"tokens has {len(ids):,} ids, at most {served.max_length:,} are possible. Send fewer.",
            param="tokens",
        )
    return {"prompt": served.tokenizer.decode(ids)}


def read_completion(values: Mapping[str, Any], served: ServedModel) -> CompletionRequest:
    """Check a request of /v1/completions, without work that grows faster than its size.

    Raises:
        RequestError: it cannot be answered.
    """
    _check_keys(values, (*_OF_BOTH, *_SAMPLING, *_OF_COMPLETIONS), served)
    prompts = _prompts(values.get("prompt"), served)
    options = _options(
        values,
        served,
        num_prompts=len(prompts),
        logprobs=_number_of_logprobs("logprobs", values.get("logprobs")),
        length_key="max_tokens",
        echo=_boolean("echo", values.get("echo"), "echo"),
    )
    best_of = values.get("best_of")
    if best_of is not None and _integer("best_of", best_of, 1) != options.count:
        raise RequestError(
            f"best_of={best_of} must be n={options.count}: the server does not choose among texts. "
            "Leave it out.",
            param="best_of",
        )
    return CompletionRequest(options, prompts)


def read_chat(values: Mapping[str, Any], served: ServedModel) -> ChatRequest:
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
    wanted = _boolean("logprobs", values.get("logprobs"), "logprobs")
    logprobs = _number_of_logprobs("top_logprobs", values.get("top_logprobs"))
    if logprobs and not wanted:
        raise RequestError(
            "top_logprobs is for logprobs=true alone. Leave it out, or set that.",
            param="top_logprobs",
        )
    name = "max_tokens"
    if values.get("max_completion_tokens") is not None:
        name = "max_completion_tokens"
        if values.get("max_tokens") is not None:
            raise RequestError("max_tokens and max_completion_tokens say the same. Leave one out.")
    options = _options(
        values,
        served,
        num_prompts=1,
        logprobs=(logprobs or 0) if wanted else None,
        length_key=name,
    )
    tools, functions, must_call = _tools(values, served)
    schema = _schema(values.get("response_format"))
    if schema is not None and functions:
        raise RequestError(
            "response_format and tools cannot be combined here. Leave one out, or set "
            "tool_choice=none.",
            param="response_format",
        )
    variables = values.get("chat_template_kwargs")
    if variables is None:
        variables = {}
    if not isinstance(variables, dict):
        raise RequestError("chat_template_kwargs must be an object.", param="chat_template_kwargs")
    _check_size(num_characters([messages, tools, variables]), "messages", served)
    return ChatRequest(
        options=options,
        messages=messages,
        tools=tools,
        functions=functions,
        must_call=must_call,
        parallel=values.get("parallel_tool_calls") is None
        or _boolean("parallel_tool_calls", values["parallel_tool_calls"], "parallel_tool_calls"),
        schema=schema,
        variables=variables,
    )


def _number_of_logprobs(key: str, value: Any) -> int | None:
    if value is None:
        return None
    if _integer(key, value, 0) > MOST_TOP_LOGPROBS:
        raise RequestError(
            f"{key}={str(value)[:40]} must be at most {MOST_TOP_LOGPROBS}. Ask for fewer.",
            param=key,
        )
    return value


def _tools(
    values: Mapping[str, Any], served: ServedModel
) -> tuple[list[Any], dict[str, Any], bool]:
    """Return the tools that are shown to the model, the functions that it may call by name, and
    whether it must call one.

    Raises:
        RequestError: a tool is not as the API has it, or the model's form of calls is not known.
    """
    tools = values.get("tools")
    if tools is None:
        tools = []
    choice = values.get("tool_choice")
    if not isinstance(tools, list) or len(tools) > _MOST_TOOLS:
        raise RequestError(
            f"tools must be a list of at most {_MOST_TOOLS} definitions of functions.",
            param="tools",
        )
    functions = _functions(tools, may_be_free=choice in (None, "auto"))
    if choice in (None, "auto", "none") and not functions:
        return [], {}, False
    if choice == "none":
        return [], {}, False
    if not functions:
        raise RequestError("tool_choice needs tools. Give some.", param="tool_choice")
    assert served.chat is not None
    if detect_format(served.chat.source) is None:
        raise RequestError(
            f"the chat template of {served.name} has no form of tool calls that is known here "
            "(Hermes, Qwen3-Coder, Llama 3, Mistral). Leave tools out, or start the server with "
            "--chat-template FILE.",
            param="tools",
            code="unsupported_parameter",
        )
    if choice in (None, "auto"):
        return tools, functions, False
    if choice == "required":
        return tools, functions, True
    named = choice.get("function") if isinstance(choice, dict) else None
    name = named.get("name") if isinstance(named, dict) else None
    is_function = isinstance(choice, dict) and choice.get("type") == "function"
    if not is_function or not isinstance(name, str) or name not in functions:
        raise RequestError(
            'tool_choice must be "none", "auto", "required" or {"type": "function", "function": '
            '{"name": ...}} with the name of one of the tools.',
            param="tool_choice",
        )
    return tools, {name: functions[name]}, True


def _functions(tools: list[Any], may_be_free: bool) -> dict[str, Any]:
    """Return the functions of tools by name.

    Args:
        tools: definitions, as the request has them.
        may_be_free: whether the model may write a call without a grammar.

    Raises:
        RequestError: a tool is not as the API has it, or asks for what cannot be kept.
    """
    functions = {}
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type") != "function":
            raise RequestError(
                f'tools[{number}] must be {{"type": "function", "function": {{...}}}}.',
                param="tools",
            )
        name = function.get("name")
        if not isinstance(name, str) or not _FUNCTION_NAME.fullmatch(name) or name in functions:
            raise RequestError(
                f"tools[{number}].function.name must be a name of its own, of at most 64 letters, "
                "digits, dots, dashes and underscores.",
                param="tools",
            )
        try:
            check_schema(f"tools[{number}].function.parameters", function.get("parameters") or {})
        except UsageError as error:
            raise RequestError(str(error), param="tools") from error
        strict = _boolean(f"tools[{number}].function.strict", function.get("strict"), "tools")
        if strict and may_be_free:
            raise RequestError(
                f"tools[{number}].function.strict=true is kept where tool_choice names a function "
                "or is required: with tool_choice=auto, the model writes arguments freely. Leave "
                "strict out, or set another tool_choice.",
                param="tools",
                code="unsupported_value",
            )
        functions[name] = function
    return functions


def _schema(form: Any) -> Mapping[str, Any] | None:
    """Return the JSON schema of a response_format; None: any text is an answer.

    Raises:
        RequestError: there is no such form, or the schema cannot be used.
    """
    if form is None:
        return None
    kind = form.get("type") if isinstance(form, dict) else None
    keys = {"type", "json_schema"} if kind == "json_schema" else {"type"}
    is_right = isinstance(form, dict) and not form.keys() - keys
    if is_right and kind == "text":
        return None
    if is_right and kind == "json_object":
        return {"type": "object"}
    named = form.get("json_schema") if is_right and kind == "json_schema" else None
    if (
        not isinstance(named, dict)
        or "schema" not in named
        # Another key, such as a second schema, would be ignored without a word.
        or named.keys() - _IN_SCHEMA_FORM
    ):
        raise RequestError(
            'response_format must be {"type": "text"}, {"type": "json_object"} or {"type": '
            '"json_schema", "json_schema": {"name": ..., "schema": {...}}}.',
            param="response_format",
        )
    try:
        check_schema("response_format.json_schema.schema", named["schema"])
    except UsageError as error:
        raise RequestError(str(error), param="response_format") from error
    return named["schema"]


def encode(request: CompletionRequest | ChatRequest, served: ServedModel) -> EncodedRequest:
    """Encode the prompts of a request, which takes time that grows with their length.

    Raises:
        RequestError: a prompt cannot be encoded, or is too long.
    """
    if isinstance(request, ChatRequest):
        return _encode_chat(request, served)
    options = request.options
    prompts = []
    hidden = []
    for prompt in request.prompts:
        ids = _prompt_ids(prompt, served)
        # With no first token there is nothing that the first one of the text could follow.
        has_beginning = isinstance(prompt, str) and len(ids) > len(served.beginning)
        prompts.append(ids)
        hidden.append(len(served.beginning) if has_beginning else 0)
    max_tokens = _max_tokens(options, prompts, _DEFAULT_TOKENS, served)
    return EncodedRequest(
        options=options,
        prompts=[prompt for prompt in prompts for _ in range(options.count)],
        max_tokens=max(1, max_tokens),
        prompt_tokens=sum(map(len, prompts)),
        tokenizer=served.tokenizer,
        num_hidden=[number for number in hidden for _ in range(options.count)],
        ignores_new=max_tokens == 0,
    )


def _encode_chat(request: ChatRequest, served: ServedModel) -> EncodedRequest:
    options = request.options
    chat = served.chat
    assert chat is not None
    try:
        text = chat.text(request.messages, list(request.tools) or None, request.variables)
        prompt = chat.encode(text)
    except UserError as error:
        raise RequestError(str(error), param="messages") from error
    _known_ids(prompt, "messages", served)
    max_tokens = _max_tokens(options, [prompt], None, served)
    tool_format = detect_format(chat.source) if request.functions else None
    reasons = has_reasoning(chat.source)
    is_in_reasoning = reasons and text.rstrip().endswith(THINK)
    special = served.tokenizer.special
    marks = tool_format.marks if tool_format is not None else ()
    if reasons:
        marks = (*marks, THINK, END_THINK)
    visible = {special[mark]: mark for mark in marks if mark in special}
    tokenizer = served.tokenizer
    if visible:
        tokenizer = VisibleTokens(tokenizer, visible)

    def reader() -> CompletionReader:
        return CompletionReader(
            tool_format, request.functions, reasons, is_in_reasoning, request.parallel
        )

    return EncodedRequest(
        options=options,
        prompts=[prompt for _ in range(options.count)],
        max_tokens=max_tokens,
        prompt_tokens=len(prompt),
        tokenizer=tokenizer,
        constraints=_constraints(request, served, tool_format, is_in_reasoning),
        reader=reader,
        has_one_call=tool_format is not None and not request.parallel,
    )


def _constraints(
    request: ChatRequest, served: ServedModel, tool_format: ToolFormat | None, is_in_reasoning: bool
) -> list[Constraint]:
    """Return the constraints of all texts of a request; empty: there are none.

    Raises:
        RequestError: they cannot be made.
    """
    special = served.tokenizer.special
    if request.must_call:
        assert tool_format is not None
        rules = tool_format.grammar(request.functions, request.parallel, special)
        param = "tool_choice"
    elif request.schema is not None:
        rules = f"calls: {quoted(request.schema)}\n"
        param = "response_format"
    else:
        return []
    start = "start: calls\n"
    if is_in_reasoning:
        start = "start: reasoning (calls | space calls)\nspace: /\\s+/\n"
        if END_THINK in special:
            start += f"reasoning: text <[{special[END_THINK]}]>\ntext: /(.|\\n)*/\n"
        else:
            start += "reasoning[lazy]: /(.|\\n)*<\\/think>/\n"
    grammars = served.grammars
    if grammars is None:
        raise RequestError("structured output is not possible here.", param=param)
    try:
        return [grammars.constraint(start + rules) for _ in range(request.options.count)]
    except UsageError as error:
        raise RequestError(str(error), param=param) from error


def _max_tokens(
    options: RequestOptions, prompts: list[list[int]], default: int | None, served: ServedModel
) -> int:
    """Return how many new tokens each text may have; `default`: None for as many as there is room
    for.

    Raises:
        RequestError: there is no room for that many.
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


def _check_keys(values: Mapping[str, Any], known: Sequence[str], served: ServedModel) -> None:
    """RequestError: a key that is not known, or another model."""
    for key, value in values.items():
        if key in known or key in _WITHOUT_EFFECT:
            continue
        if value is None and key in (*_OF_COMPLETIONS, *_OF_CHAT):
            continue
        if key not in _NEUTRAL:
            instead = _INSTEAD.get(key, "Leave it out")
            raise RequestError(
                f"{key} is not supported here. {instead}; known are "
                f"{choices(sorted([*known, *_WITHOUT_EFFECT]))}.",
                param=key,
                code="unsupported_parameter",
            )
        if not any(_is_same(value, neutral) for neutral in _NEUTRAL[key]):
            instead = _INSTEAD.get(key, "Leave it out")
            raise RequestError(
                f"{key}={json.dumps(value)[:80]} is not supported here. {instead}.",
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
    """Return whether they are equal as JSON; Python's False is 0, too."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _count(values: Mapping[str, Any], num_prompts: int) -> int:
    """Return how many texts are requested after each prompt; RequestError: too many with all
    prompts.
    """
    count = values.get("n")
    if count is None:
        count = 1
    count = _integer("n", count, 1)
    if count * num_prompts > _MOST_CHOICES:
        raise RequestError(
            f"{str(count * num_prompts)[:40]} texts were requested at once; at most "
            f"{_MOST_CHOICES} are allowed. Send several requests.",
            param="n",
        )
    return count


def _prompts(prompt: Any, served: ServedModel) -> list[Any]:
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


def _check_size(characters: int, param: str, served: ServedModel) -> None:
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


def _messages(messages: Any, served: ServedModel) -> list[dict[str, Any]]:
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
    return [_plain(message) for message in messages]


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


def _prompt_ids(prompt: Any, served: ServedModel) -> list[int]:
    """The ids of a prompt; those that are given stay as they are."""
    if isinstance(prompt, str):
        ids = [*served.beginning, *_encoded(prompt, served.tokenizer)]
        if not ids:
            raise RequestError("prompt is empty. Write what is to be continued.", param="prompt")
        return _known_ids(ids, "prompt", served)
    if not isinstance(prompt, list) or not all(type(i) is int for i in prompt):
        raise RequestError("each prompt must be a text or a list of ids.", param="prompt")
    return _known_ids(prompt, "prompt", served)


def _known_ids(ids: list[int], param: str, served: ServedModel) -> list[int]:
    """Return ids that the model has. RequestError: it lacks one of them.

    Special tokens of a tokenizer, which chat templates write, may be beyond the model's embedding.
    """
    try:
        check_ids(ids, served.vocab_size)
    except UsageError as error:
        raise RequestError(str(error), param=param) from error
    return ids


def _encoded(text: str, tokenizer: Tokenizer) -> list[int]:
    try:
        text.encode()
        return tokenizer.encode(text).tolist()
    except (UnicodeEncodeError, UserError) as error:
        raise RequestError(f"prompt can't be encoded: {error}.", param="prompt") from error


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose content is one text, where it was given in parts."""
    for key, instead in _UNREAD_IN_MESSAGES.items():
        if message.get(key) is not None:
            raise RequestError(
                f"the key {key} of a message is not supported here. {instead}.",
                param="messages",
                code="unsupported_content",
            )
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise RequestError(
                f"content: a part of type {str(kind)[:40]!r} is not supported, only content of "
                "text. Leave it out.",
                param="messages",
                code="unsupported_content",
            )
        texts.append(part.get("text"))
    if not all(isinstance(text, str) for text in texts):
        raise RequestError("a part of type text must have a text.", param="messages")
    return {**message, "content": "".join(texts)}


def _options(
    values: Mapping[str, Any],
    served: ServedModel,
    *,
    num_prompts: int,
    logprobs: int | None,
    length_key: str,
    echo: bool = False,
) -> RequestOptions:
    """Return what both kinds of requests ask for.

    Raises:
        RequestError: a value that there cannot be.
    """
    max_tokens = values.get(length_key)
    if max_tokens is not None:
        # With the prompt as a part of the answer, that may be all of it.
        max_tokens = _integer(length_key, max_tokens, 0 if echo else 1)
    seed = values.get("seed")
    if seed is None:
        seed = secrets.randbits(32)
    # Any integer is a seed; the engine has 32 bits.
    seed = _integer("seed", seed, None) % (1 << 32)
    stream, counts = _stream(values)
    return RequestOptions(
        model=values.get("model", served.name),
        count=_count(values, num_prompts),
        max_tokens=max_tokens,
        length_key=length_key,
        sampling=_sampling(values, served, logprobs or 0),
        seed=seed,
        stop=_stop(values.get("stop")),
        stream=stream,
        counts_stream=counts,
        logprobs=logprobs,
        stop_ids=_stop_ids(values.get("stop_token_ids"), served),
        echo=echo,
    )


def _integer(key: str, value: Any, least: int | None) -> int:
    if type(value) is not int or (least is not None and value < least):
        what = "an integer"
        if least is not None:
            what += f" of at least {least}"
        raise RequestError(f"{key}={str(value)[:40]} must be {what}.", param=key)
    return value


def _stop_ids(value: Any, served: ServedModel) -> tuple[int, ...]:
    """Return the tokens of stop_token_ids.

    Raises:
        RequestError: they are none of the model's.
    """
    if value is None:
        return ()
    is_right = isinstance(value, list) and all(
        type(i) is int and 0 <= i < served.vocab_size for i in value
    )
    if not is_right or len(value) > _MOST_STOP_IDS:
        raise RequestError(
            f"stop_token_ids must be a list of at most {_MOST_STOP_IDS} ids below "
            f"{served.vocab_size}.",
            param="stop_token_ids",
        )
    return tuple(value)


def _logit_bias(value: Any, served: ServedModel) -> tuple[tuple[int, float], ...]:
    """Return the pairs of logit_bias, whose keys are ids as texts.

    Raises:
        RequestError: they are none, or too many.
    """
    if value is None:
        return ()
    if not isinstance(value, dict) or len(value) > _MOST_BIASES:
        raise RequestError(
            f"logit_bias must be an object of at most {_MOST_BIASES} ids with numbers.",
            param="logit_bias",
        )
    pairs = {}
    for key, bias in value.items():
        is_id = len(key) <= 10 and key.isascii() and key.isdigit()
        if not is_id or int(key) >= served.vocab_size or not _is_number(bias):
            raise RequestError(
                f"logit_bias: {key[:40]!r} must be an id below {served.vocab_size}, with a number "
                "from -100 to 100.",
                param="logit_bias",
            )
        pairs[int(key)] = float(bias)
    return tuple(sorted(pairs.items()))


def _sampling(values: Mapping[str, Any], served: ServedModel, top_logprobs: int) -> Sampling:
    """Return how tokens are chosen: by default with the model's own probabilities, as OpenAI
    does.
    """
    given: dict[str, Any] = {
        "temperature": 1.0,
        "logit_bias": _logit_bias(values.get("logit_bias"), served),
        "top_logprobs": top_logprobs,
    }
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
    """Return whether it is a number that a float has room for."""
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
    """Return whether parts are sent, and whether a stream ends with the number of tokens."""
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
    """Check the value of a key that is false unless it is given."""
    if value is None:
        return False
    if not isinstance(value, bool):
        raise RequestError(f"{key}={str(value)[:40]} must be true or false.", param=param)
    return value
