"""YAML from outside, read strictly and with limits. This is the only module that parses YAML.

PyYAML's own `safe_load` builds plain values only, but a small text can still exhaust memory or
time: aliases of aliases grow without end, and nested brackets end in a RecursionError. It also
keeps the last value of a key that occurs twice, and reads 010 as 8 and 1:30 as 90. No file that we
read needs any of these, so all of them are refused.
"""

import re
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError

# Mappings and lists inside each other.
MAX_DEPTH = 24
# Values of a whole text, where each alias counts as much as what it stands for.
MAX_VALUES = 20_000
MAX_BYTES = 1 << 20


class StrictYamlError(ValueError):
    """A text that is not YAML, or that breaks one of the limits. The message is one line."""


_TOO_MANY = f"more than {MAX_VALUES:,} values, aliases included"


class _Loader(yaml.SafeLoader):
    """A loader for YAML whose keys are texts that occur once, with limits of depth and size."""

    def __init__(self, stream: str):
        super().__init__(stream)
        self._depth = 0
        self._num_nodes = 0
        # Values in each node, by its id; the nodes live as long as the document.
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: Any, index: Any) -> yaml.Node:
        event = self.peek_event()
        mark = event.start_mark
        if self._depth >= MAX_DEPTH:
            raise ComposerError(None, None, f"nested more than {MAX_DEPTH} deep", mark)
        self._num_nodes += 1
        if self._num_nodes > MAX_VALUES:
            raise ComposerError(None, None, _TOO_MANY, mark)
        self._depth += 1
        node: Any = super().compose_node(parent, index)
        self._depth -= 1
        if not isinstance(event, yaml.AliasEvent):
            self._sizes[id(node)] = 1 + sum(self._sizes[id(child)] for child in _children(node))
        elif id(node) not in self._sizes:
            raise ComposerError(None, None, "an alias of what it is part of", mark)
        if self._sizes[id(node)] > MAX_VALUES:
            raise ComposerError(None, None, _TOO_MANY, mark)
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: Any = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ComposerError(None, None, "a key must be text", key.start_mark)
            if key.value in seen:
                raise ComposerError(None, None, f"{key.value} is given twice", key.start_mark)
            seen.add(key.value)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        # Keys that << merges in come first, so that the mapping's own values override them.
        self.flatten_mapping(node)
        return {key.value: self.construct_object(value, deep) for key, value in node.value}

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except yaml.YAMLError:
            raise
        except Exception as error:
            # PyYAML lets through whatever int(), datetime() and their like raise.
            kind = node.tag.rpartition(":")[2]
            rule = f"not a value of type {kind}"
            raise ConstructorError(None, None, rule, node.start_mark) from error

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        if not re.fullmatch(r"[-+]?(0|[1-9][0-9_]*)", node.value):
            rule = f"{node.value} must be a whole number in decimal digits, without leading zeros"
            raise ConstructorError(None, None, rule, node.start_mark)
        return int(node.value)

    def construct_yaml_float(self, node: yaml.ScalarNode) -> float:
        # 1:30.5 is 90.5 in YAML 1.1.
        if ":" in node.value:
            rule = f"{node.value} must be a number or text in quotes"
            raise ConstructorError(None, None, rule, node.start_mark)
        return super().construct_yaml_float(node)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_yaml_float)
# No key takes a date, so 2024-01-01 is text.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def loads(text: str) -> Any:
    """Return the plain values of a YAML text.

    Returns:
        None, bool, int, float, str, list or dict, at most MAX_DEPTH deep. All keys are texts.

    Raises:
        StrictYamlError: it is not YAML, or breaks one of the limits above.
    """
    if len(text) > MAX_BYTES:
        raise StrictYamlError(f"longer than {MAX_BYTES:,} characters")
    try:
        # The reader checks the characters when it is made.
        loader = _Loader(text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise StrictYamlError(" ".join(str(error).split())[:500]) from error
    except Exception as error:
        # A tag on what it is not for, such as !!map on a number, raises anything.
        raise StrictYamlError(f"a value is not of the type that its tag says ({error})") from error


def read(path: Path) -> Any:
    """Return the plain values of a YAML file; raises what `read_text` and `loads` raise."""
    return loads(read_text(path))


def read_text(path: Path) -> str:
    """Return the text of a YAML file in UTF-8, of which at most MAX_BYTES are read.

    Raises:
        OSError: the file can't be read.
        ValueError: it is longer, or not UTF-8 (UnicodeDecodeError).
    """
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise StrictYamlError(f"longer than {MAX_BYTES:,} bytes")
    return content.decode()


def _children(node: Any) -> list[yaml.Node]:
    """The nodes directly inside a node."""
    if isinstance(node, yaml.MappingNode):
        return [child for pair in node.value for child in pair]
    if isinstance(node, yaml.SequenceNode):
        return list(node.value)
    return []
