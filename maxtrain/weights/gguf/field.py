"""What a GGUF file says beside its tensors."""

from typing import Any, Literal, NamedTuple

Kind = Literal["uint32", "float32", "bool", "string", "strings", "int32s", "float32s"]


class GgufField(NamedTuple):
    """A key with its value; the format wants to know of which type a value is."""

    key: str
    kind: Kind
    value: Any
