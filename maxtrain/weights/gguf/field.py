"""Metadata fields of a GGUF file."""

from typing import Any, Literal, NamedTuple

Kind = Literal["uint32", "float32", "bool", "string", "strings", "int32s", "float32s"]


class GgufField(NamedTuple):
    """A key with its value and the type that the format needs for the value."""

    key: str
    kind: Kind
    value: Any
