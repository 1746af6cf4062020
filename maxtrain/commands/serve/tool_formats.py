"""Formats of tool calls in completions, and how completions are divided into their parts.

A model writes calls in the form of its chat template, which is recognised by its text. While a
completion grows, `CompletionReader` splits it into reasoning, content and calls.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from data_pipeline.base.strict_json import loads
from maxtrain.commands.serve.constraints import quoted

THINK = "<think>"
END_THINK = "</think>"
_HERMES = "<tool_call>"
_END_HERMES = "</tool_call>"
_FUNCTION = "<function="
_MISTRAL = "[TOOL_CALLS]"
_ARGS = "[ARGS]"
_PYTHON = "<|python_tag|>"
# Where a JSON text can change its depth, or a string begins or ends.
_STRUCTURE = re.compile(r'["\\{}\[\]]')


class ToolCall(NamedTuple):
    """A call of a tool.

    Args:
        name: of the function.
        arguments: a JSON object, as text.
    """

    name: str
    arguments: str


class TextPart(NamedTuple):
    """New text of a completion that is no call."""

    kind: Literal["content", "reasoning"]
    text: str


# What a reader finds: calls with the number of characters that they take, or None where more text
# is needed. No calls: these characters are content.
_Found = tuple[list[ToolCall], int] | None


class ToolFormat(NamedTuple):
    """The form in which a model writes calls.

    Args:
        name: for people.
        openings: texts that calls begin with.
        at_start: a text that calls may also begin with, if nothing comes before.
        marks: texts that may be special tokens, which decoding would leave out.
        read: finds calls at the beginning of a text; the second argument says whether no more text
            comes, the third has the tools by name. The fourth says whether several calls may come:
            if not, the first one is returned as soon as it is whole.
        grammar: of one or more calls, as Lark rules with the rule `calls`.
    """

    name: str
    openings: tuple[str, ...]
    at_start: str
    marks: tuple[str, ...]
    read: Callable[[str, bool, Mapping[str, Any], bool], _Found]
    grammar: Callable[[Mapping[str, Any], bool, Mapping[str, int]], str]


def detect_format(template: str) -> ToolFormat | None:
    """Return the form of calls in a chat template; None: it is not known."""
    if "tools" not in template:
        return None
    if _FUNCTION in template and "<parameter=" in template:
        return _XML_FORMAT
    if _HERMES in template:
        return _HERMES_FORMAT
    if _MISTRAL in template:
        return _MISTRAL_ARGS_FORMAT if _ARGS in template else _MISTRAL_FORMAT
    if _PYTHON in template or ("<|start_header_id|>" in template and '"parameters"' in template):
        return _LLAMA_FORMAT
    return None


def has_reasoning(template: str) -> bool:
    """Return whether a chat template is one of models that reason before they answer."""
    return THINK in template and END_THINK in template


class CompletionReader:
    """Splits the completion of a chat while it grows. All texts that it returns are the completion,
    but for the marks around reasoning and calls, and for white space beside these.

    Args:
        tool_format: the form of calls; None: there are no tools.
        tools: the definitions of functions by name.
        reasons: whether the model may write reasoning.
        is_in_reasoning: whether the prompt has begun the reasoning.
        parallel: whether there may be several calls. If not, what follows the first one is dropped.
    """

    def __init__(
        self,
        tool_format: ToolFormat | None,
        tools: Mapping[str, Any],
        reasons: bool = False,
        is_in_reasoning: bool = False,
        parallel: bool = True,
    ):
        self._format = tool_format
        self._tools = tools
        self._text = ""
        self._state = "content"
        if is_in_reasoning:
            self._state = "reasoning"
        elif reasons:
            self._state = "start"
        self._has_content = False
        self._skips_lines = is_in_reasoning
        # A call that is not whole is looked at again when the text has grown by a part, so that
        # the work stays linear.
        self._next_look = 0
        self._parallel = parallel
        self.num_calls = 0

    @property
    def is_over(self) -> bool:
        """Return whether the completion has its only call, so that nothing may follow."""
        return self.num_calls > 0 and not self._parallel

    @property
    def num_unread(self) -> int:
        """Return how many characters at the end of the text so far are not read yet."""
        return len(self._text)

    def feed(self, text: str, is_last: bool = False) -> list[TextPart | ToolCall]:
        """Return what is certain with more text of the completion."""
        self._text += text
        found: list[TextPart | ToolCall] = []
        if self._state == "start":
            self._begin(is_last)
        if self._state == "reasoning":
            found += self._reason(is_last)
        if self._state == "content":
            self._skip_lines()
            found += self._read(is_last)
        return [part for part in found if not isinstance(part, TextPart) or part.text]

    def _skip_lines(self) -> None:
        """Leave out the ends of lines that are behind a mark of reasoning."""
        if self._skips_lines:
            self._text = self._text.lstrip("\n")
            self._skips_lines = not self._text

    def _begin(self, is_last: bool) -> None:
        text = self._text.lstrip()
        if text.startswith(THINK):
            self._text = text[len(THINK) :]
            self._state = "reasoning"
            self._skips_lines = True
        elif is_last or not THINK.startswith(text):
            self._state = "content"

    def _reason(self, is_last: bool) -> list[TextPart | ToolCall]:
        self._skip_lines()
        before, mark, after = self._text.partition(END_THINK)
        if mark:
            self._state = "content"
            self._text = after
            self._skips_lines = True
            return [TextPart("reasoning", before.rstrip("\n"))]
        certain = len(before)
        if not is_last:
            certain -= _overlap(before, (END_THINK,))
            # The ends of lines before the mark are left out.
            certain = len(before[:certain].rstrip("\n"))
        self._text = before[certain:]
        return [TextPart("reasoning", before[:certain])]

    def _read(self, is_last: bool) -> list[TextPart | ToolCall]:
        found: list[TextPart | ToolCall] = []
        while self._text and not self.is_over:
            at = self._opening()
            if at < 0:
                found.append(self._content(self._certain(is_last)))
                break
            # White space before a call is no content.
            certain = len(self._text[:at].rstrip())
            if certain > 0:
                found.append(self._content(certain))
                continue
            if len(self._text) < self._next_look and not is_last:
                break
            assert self._format is not None
            calls = self._format.read(self._text[at:], is_last, self._tools, self._parallel)
            if calls is None and is_last:
                # It never became a call.
                calls = [], len(self._text) - at
            if calls is None:
                self._next_look = len(self._text) + len(self._text) // 8 + 8
                break
            self._next_look = 0
            listed, length = calls
            if listed:
                self._text = self._text[at + length :]
                self.num_calls += len(listed)
                self._has_content = True
                found += listed
            else:
                found.append(self._content(at + length))
        return found

    def _opening(self) -> int:
        """Return where a call may begin; -1: nowhere yet."""
        if self._format is None:
            return -1
        places = [self._text.find(opening) for opening in self._format.openings]
        start = self._format.at_start
        if start and not self._has_content and self._text.lstrip().startswith(start):
            self._text = self._text.lstrip()
            return 0
        return min((place for place in places if place >= 0), default=-1)

    def _certain(self, is_last: bool) -> int:
        """Return how many characters are content, whatever follows."""
        if self._format is None:
            return len(self._text)
        if is_last:
            # White space behind calls is no content.
            return len(self._text) if self._text.strip() or not self.num_calls else 0
        text = self._text[: len(self._text) - _overlap(self._text, self._format.openings)]
        return len(text.rstrip())

    def _content(self, length: int) -> TextPart:
        text = self._text[:length]
        self._text = self._text[length:]
        self._has_content = self._has_content or bool(text.strip())
        return TextPart("content", text)


class FirstCallEnd:
    """Finds where the first call of a completion ends.

    Args:
        reader: a reader of its own, which allows one call.
    """

    def __init__(self, reader: CompletionReader):
        self._reader = reader

    def __call__(self, text: str) -> int | None:
        """Take the next part of the completion. Return how many of its characters belong to the
        completion up to the end of the first call; None: that call has not ended."""
        self._reader.feed(text)
        if not self._reader.is_over:
            return None
        # The reader looks at long calls now and then, so the end may lie in an earlier part.
        return max(0, len(text) - self._reader.num_unread)


def _overlap(text: str, marks: Sequence[str]) -> int:
    """Return how many characters at the end of a text may be the beginning of a mark."""
    most = 0
    for mark in marks:
        for length in range(min(len(mark) - 1, len(text)), most, -1):
            if text.endswith(mark[:length]):
                most = length
                break
    return most


def _json_end(text: str, start: int) -> int:
    """Return where the JSON object or list that begins at `start` ends; -1: it has no end yet."""
    depth = 0
    is_text = False
    at = start
    while match := _STRUCTURE.search(text, at):
        at = match.end()
        character = match[0]
        if character == "\\":
            at += 1
        elif character == '"':
            is_text = not is_text
        elif not is_text:
            depth += 1 if character in "{[" else -1
            if depth == 0:
                return at
    return -1


def _skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _call(value: Any, key: str) -> ToolCall | None:
    """Return the call that an object with a name and arguments is; None: it is none."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get(key, value.get("arguments", {}))
    if isinstance(arguments, str):
        return ToolCall(value["name"], arguments)
    return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False))


def _loads(text: str) -> Any:
    try:
        return loads(text)
    except ValueError:
        return None


def _read_hermes(text: str, is_last: bool, tools: Mapping[str, Any], parallel: bool) -> _Found:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, of Hermes, Qwen2.5 and Qwen3."""
    del tools, parallel
    start = _skip_space(text, len(_HERMES))
    if start == len(text):
        return None
    if text[start] != "{":
        return [], len(_HERMES)
    end = _json_end(text, start)
    if end < 0:
        return None
    behind = _skip_space(text, end)
    if not text.startswith(_END_HERMES, behind):
        if not is_last and _END_HERMES.startswith(text[behind:]):
            return None
        behind = end
    else:
        behind += len(_END_HERMES)
    call = _call(_loads(text[start:end]), "arguments")
    return ([call] if call else []), behind


_XML_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)</function>", re.S)
_XML_PARAMETER = re.compile(r"<parameter=([^>\n]+)>(.*?)(?:</parameter>|(?=<parameter=)|$)", re.S)


def _read_xml(text: str, is_last: bool, tools: Mapping[str, Any], parallel: bool) -> _Found:
    """<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>, of
    Qwen3-Coder."""
    del parallel
    match = _XML_FUNCTION.search(text)
    if match is None:
        if text.startswith(_HERMES) and len(text) > len(_HERMES):
            rest = text[len(_HERMES) :].lstrip()
            if not _FUNCTION.startswith(rest[: len(_FUNCTION)]):
                return [], len(_HERMES)
        return None
    end = match.end()
    if text.startswith(_HERMES):
        behind = _skip_space(text, end)
        if text.startswith(_END_HERMES, behind):
            end = behind + len(_END_HERMES)
        elif not is_last and _END_HERMES.startswith(text[behind:]):
            return None
    name = match[1].strip()
    parameters = tools.get(name, {}).get("parameters") or {}
    properties = parameters.get("properties") or {}
    arguments = {}
    for key, value in _XML_PARAMETER.findall(match[2]):
        value = value.removeprefix("\n").removesuffix("\n")
        arguments[key.strip()] = _xml_value(value, properties.get(key.strip()))
    return [ToolCall(name, json.dumps(arguments, ensure_ascii=False))], end


def _is_text_schema(schema: Any) -> bool:
    """Return whether a parameter is a text, by its schema."""
    return not isinstance(schema, Mapping) or schema.get("type", "string") == "string"


def _xml_value(text: str, schema: Any) -> Any:
    """Return the value of a parameter, which is JSON unless the schema says that it is a text."""
    if _is_text_schema(schema):
        return text
    value = _loads(text)
    if value is None and text.strip() != "null":
        return text
    return value


def _read_mistral(text: str, is_last: bool, tools: Mapping[str, Any], parallel: bool) -> _Found:
    """[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], and of newer models
    [TOOL_CALLS]NAME[ARGS]{...}."""
    del is_last, tools
    start = _skip_space(text, len(_MISTRAL))
    if start == len(text):
        return None
    if text[start] == "[" and not parallel:
        first = _skip_space(text, start + 1)
        if first == len(text):
            return None
        end = _json_end(text, first) if text[first] == "{" else -1
        if end >= 0:
            call = _call(_loads(text[first:end]), "arguments")
            if call is not None:
                return [call], end
    if text[start] == "[":
        end = _json_end(text, start)
        if end < 0:
            return None
        values = _loads(text[start:end])
        calls = [call for value in values or [] if (call := _call(value, "arguments"))]
        return (calls if parallel else calls[:1]), end
    brace = text.find("{", start)
    if brace < 0:
        return None
    end = _json_end(text, brace)
    if end < 0:
        return None
    name = text[start:brace].partition(_ARGS)[0].partition("[CALL_ID]")[0].strip()
    arguments = _loads(text[brace:end])
    if not name or not isinstance(arguments, dict):
        return [], end
    return [ToolCall(name, json.dumps(arguments, ensure_ascii=False))], end


def _read_llama(text: str, is_last: bool, tools: Mapping[str, Any], parallel: bool) -> _Found:
    """{"name": ..., "parameters": {...}}, perhaps behind <|python_tag|>, and several with ; between
    them, of Llama 3.x."""
    has_tag = text.startswith(_PYTHON)
    at = _skip_space(text, len(_PYTHON) if has_tag else 0)
    calls = []
    while True:
        if at < len(text) and text[at] != "{":
            return calls, at
        end = _json_end(text, at) if at < len(text) else -1
        if end < 0:
            # What comes behind a separator may be no call.
            return (calls, at) if calls and is_last else None
        call = _call(_loads(text[at:end]), "parameters")
        if call is None or (not has_tag and call.name not in tools):
            return calls, (end if not calls else at)
        calls.append(call)
        if not parallel:
            return calls, end
        behind = _skip_space(text, end)
        if behind == len(text) and not is_last:
            return None
        if behind == len(text) or text[behind] not in ";,":
            return calls, end
        at = _skip_space(text, behind + 1)


def _arguments_schema(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of a function's arguments, which are an object."""
    parameters = tool.get("parameters")
    if not parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **parameters}


def _call_schema(tools: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the schema of an object with the name of a function and its arguments."""
    choices = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, key: _arguments_schema(tool)},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for name, tool in tools.items()
    ]
    return choices[0] if len(choices) == 1 else {"anyOf": choices}


def _several(rule: str, separator: str, parallel: bool) -> str:
    """Return the rule `calls`: one, or several if `parallel`."""
    more = f" ({separator} {rule})*" if parallel else ""
    return f"calls: {rule}{more}\n"


def _hermes_grammar(tools: Mapping[str, Any], parallel: bool, special: Mapping[str, int]) -> str:
    begin, end = _mark(_HERMES, special), _mark(_END_HERMES, special)
    return (
        _several("call", r'"\n"', parallel)
        + f'call: {begin} "\\n" body "\\n" {end}\n'
        + f"body: {quoted(_call_schema(tools, 'arguments'))}\n"
    )


def _xml_grammar(tools: Mapping[str, Any], parallel: bool, special: Mapping[str, int]) -> str:
    begin, end = _mark(_HERMES, special), _mark(_END_HERMES, special)
    lines = [
        _several("call", r'"\n"', parallel),
        f'call: {begin} "\\n" function "\\n" {end}\n',
        "function: " + " | ".join(f"f{number}" for number in range(len(tools))) + "\n",
        "text[lazy]: /(.|\\n)*\\n<\\/parameter>\\n/\n",
    ]
    for number, (name, tool) in enumerate(tools.items()):
        schema = _arguments_schema(tool)
        required = schema.get("required") or []
        rules = []
        for place, (key, value) in enumerate((schema.get("properties") or {}).items()):
            rule = f"f{number}p{place}"
            rules.append(rule if key in required else f"{rule}?")
            head = json.dumps(f"<parameter={key}>\n", ensure_ascii=False)
            if _is_text_schema(value):
                lines.append(f"{rule}: {head} text\n")
            else:
                lines.append(f'{rule}: {head} {rule}v "\\n</parameter>\\n"\n')
                lines.append(f"{rule}v: {quoted(value)}\n")
        head = json.dumps(f"<function={name}>\n")
        lines.append(f'f{number}: {head} {" ".join(rules)} "</function>"\n')
    return "".join(lines)


def _mistral_grammar(tools: Mapping[str, Any], parallel: bool, special: Mapping[str, int]) -> str:
    schema: dict[str, Any] = {
        "type": "array",
        "items": _call_schema(tools, "arguments"),
        "minItems": 1,
    }
    if not parallel:
        schema["maxItems"] = 1
    return f"calls: {_mark(_MISTRAL, special)} body\nbody: {quoted(schema)}\n"


def _mistral_args_grammar(
    tools: Mapping[str, Any], parallel: bool, special: Mapping[str, int]
) -> str:
    more = "calls: call+\n" if parallel else "calls: call\n"
    lines = [more, "call: " + " | ".join(f"f{number}" for number in range(len(tools))) + "\n"]
    for number, (name, tool) in enumerate(tools.items()):
        head = f"{_mark(_MISTRAL, special)} {json.dumps(name)} {_mark(_ARGS, special)}"
        lines.append(f"f{number}: {head} f{number}v\n")
        lines.append(f"f{number}v: {quoted(_arguments_schema(tool))}\n")
    return "".join(lines)


def _llama_grammar(tools: Mapping[str, Any], parallel: bool, special: Mapping[str, int]) -> str:
    del special
    body = quoted(_call_schema(tools, "parameters"))
    return _several("body", '"; "', parallel) + f"body: {body}\n"


def _mark(text: str, special: Mapping[str, int]) -> str:
    """Return a mark as a part of a rule: the special token that it is, or its text."""
    if text in special:
        return f"<[{special[text]}]>"
    return json.dumps(text)


_HERMES_FORMAT = ToolFormat(
    "hermes", (_HERMES,), "", (_HERMES, _END_HERMES), _read_hermes, _hermes_grammar
)
_XML_FORMAT = ToolFormat(
    "qwen3_coder", (_HERMES, _FUNCTION), "", (_HERMES, _END_HERMES), _read_xml, _xml_grammar
)
_MISTRAL_FORMAT = ToolFormat(
    "mistral", (_MISTRAL,), "", (_MISTRAL, _ARGS), _read_mistral, _mistral_grammar
)
_MISTRAL_ARGS_FORMAT = _MISTRAL_FORMAT._replace(name="mistral_args", grammar=_mistral_args_grammar)
_LLAMA_FORMAT = ToolFormat("llama3_json", (_PYTHON,), "{", (_PYTHON,), _read_llama, _llama_grammar)
