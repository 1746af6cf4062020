"""JSON from outside, read strictly: a text has one meaning, or it is a ValueError. The only place
of this package that parses JSON.

Python's own parser takes more than JSON is. Of a key that is there twice it keeps the last value.
It reads NaN, Infinity and 1e400 as numbers. Deeply nested brackets end in a RecursionError, here or
in code that walks through the value later.
"""

import json
import math
from pathlib import Path
from typing import Any, NoReturn

# Most lists and objects inside each other, since code that walks through a value may recurse.
MAX_DEPTH = 200
# Bytes of a file that is read whole. An index of 100,000 tensors has about 10 MB.
MAX_FILE_BYTES = 1 << 26
_BOM = b"\xef\xbb\xbf"
_CONTAINERS = frozenset((dict, list))


class StrictJsonError(ValueError):
    """Text that Python's parser would accept or fail on with a RecursionError, and that is refused
    here. `kind` is the rule that it breaks; the message also has the place.

    Text that is not JSON at all raises json.JSONDecodeError, and bytes that are not UTF-8 a
    UnicodeDecodeError: both are ValueErrors as well.
    """

    def __init__(self, kind: str, found: str = ""):
        super().__init__(f"{kind}: {found}" if found else kind)
        self.kind = kind


def loads(text: str | bytes) -> Any:
    """The value of a JSON text.

    Args:
        text: all of it; bytes are UTF-8, with or without a byte order mark.

    Returns:
        None, bool, int, float, str, list or dict. Strings may hold lone surrogates, which JSON can
        spell. All floats are finite. Lists and objects are at most MAX_DEPTH inside each other.

    Raises:
        ValueError: it is not JSON, or not strictly so; see `StrictJsonError`.
    """
    if isinstance(text, bytes):
        text = text.removeprefix(_BOM).decode()
    try:
        value = _DECODER.decode(text)
    except (json.JSONDecodeError, StrictJsonError):
        raise
    except RecursionError:
        raise StrictJsonError(_TOO_DEEP) from None
    except ValueError as error:
        # From int(), which refuses long numbers: a million digits would take minutes.
        raise StrictJsonError("a number has too many digits") from error
    if _is_deep(value):
        raise StrictJsonError(_TOO_DEEP)
    return value


def read(path: Path, most: int = MAX_FILE_BYTES) -> Any:
    """Return the value of a JSON file of at most `most` bytes.

    Raises:
        OSError: it can't be read.
        ValueError: it is longer, or as `loads`.
    """
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise StrictJsonError(f"longer than {most:,} bytes")
    return loads(content)


_TOO_DEEP = f"lists or objects are more than {MAX_DEPTH} deep"


def _is_deep(value: Any) -> bool:
    """Return whether lists and objects are nested deeper than MAX_DEPTH."""
    depth = 0
    level = []
    if type(value) in _CONTAINERS:
        level = [value]
    while level and depth <= MAX_DEPTH:
        inner = []
        for container in level:
            items = container
            if type(container) is dict:
                items = container.values()
            # Four times as fast as a loop over the items.
            if not _CONTAINERS.isdisjoint(map(type, items)):
                inner += [item for item in items if type(item) in _CONTAINERS]
        level = inner
        depth += 1
    return depth > MAX_DEPTH


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) == len(pairs):
        return made
    seen = set[str]()
    for key, _ in pairs:
        if key in seen:
            raise StrictJsonError("a key occurs twice", repr(key[:80]))
        seen.add(key)
    raise AssertionError("a dict is shorter than its pairs, which have different keys")


def _make_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise StrictJsonError("a number does not fit into a 64-bit float", text[:80])
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise StrictJsonError("NaN or Infinity, which JSON does not have", name)


_DECODER = json.JSONDecoder(
    object_pairs_hook=_make_object, parse_float=_make_float, parse_constant=_refuse_constant
)
