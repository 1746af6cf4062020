"""Config files as plain values. Whatever a file has in it, only a ConfigError comes out of here.

YAML is read without what no config needs and what would take the reader down: tags of other types,
dates, numbers in other bases, keys that are no text, nesting without end, and aliases that grow
into more than the file says.
"""

import contextlib
import re
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from ml_collections import ConfigDict
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError

from data_pipeline.errors import ConfigError, end_by_signal
from maxtrain.config.keys import unknown

SUFFIXES = (".py", ".yaml", ".yml")
_MAX_DEPTH = 24
_MAX_VALUES = 20_000
_MAX_BYTES = 1 << 20
_STR = "tag:yaml.org,2002:str"
_MERGE = "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    """YAML whose keys are texts, each given once, and whose size is what is read, aliases counted
    in full."""

    def __init__(self, stream: str):
        super().__init__(stream)
        self._depth = 0
        # Values in each node, by its id; the nodes live as long as the document.
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: Any, index: Any) -> yaml.Node:
        event = self.peek_event()
        mark = event.start_mark
        if self._depth >= _MAX_DEPTH:
            raise ComposerError(None, None, f"nested more than {_MAX_DEPTH} deep", mark)
        self._depth += 1
        node: Any = super().compose_node(parent, index)
        self._depth -= 1
        if not isinstance(event, yaml.AliasEvent):
            self._sizes[id(node)] = 1 + sum(self._sizes[id(child)] for child in _children(node))
        elif id(node) not in self._sizes:
            raise ComposerError(None, None, "an alias of what it is part of", mark)
        if self._sizes[id(node)] > _MAX_VALUES:
            rule = f"more than {_MAX_VALUES:,} values, aliases included"
            raise ComposerError(None, None, rule, mark)
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
        # What << brings in comes first, so that the mapping's own values count.
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
# No key takes a date: 2024-01-01 is text, as it is on the command line.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def parse_yaml(text: str) -> Any:
    """The plain values of a YAML text; raises yaml.YAMLError."""
    if len(text) > _MAX_BYTES:
        raise yaml.YAMLError(f"longer than {_MAX_BYTES:,} characters")
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    except yaml.YAMLError:
        raise
    except Exception as error:
        # A tag on what it is not for, such as !!map on a number.
        raise yaml.YAMLError(f"a value is not of the type that its tag says ({error})") from error
    finally:
        loader.dispose()


def read_config(path: Path) -> dict:
    """The plain values of a config file; raises ConfigError."""
    if path.suffix == ".py":
        tree = _read_python(path)
    else:
        tree = _read_yaml(path)
    _require_small(path, tree)
    return tree


def _read_yaml(path: Path) -> dict:
    try:
        with path.open(encoding="utf-8") as file:
            raw = parse_yaml(file.read(_MAX_BYTES + 1))
    except OSError as error:
        raise ConfigError(
            f"config={path} can't be read: {error.strerror}. Mend access, or name another file."
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        said = " ".join(str(error).split())[:500]
        raise ConfigError(f"config={path} is not valid YAML: {said}. Correct it there.") from None
    if not isinstance(raw, dict):
        raise ConfigError(
            f"config={path} must be a mapping of keys to values. `--print-config` shows one."
        )
    return raw


def _read_python(path: Path) -> dict:
    """What `get_config()` of the file returns.

    A config file runs as part of this process. So all that it raises is the file's mistake,
    SystemExit with code 0 too: a launch that did not train must not look as if it had.
    """
    # Standard output is for what --print-config prints.
    try:
        with _ending_at_ctrl_c(), contextlib.redirect_stdout(sys.stderr):
            tree = _tree_of(path)
    except BaseException as error:
        raise ConfigError(_what_it_raised(path, error)) from None
    if tree is None:
        raise ConfigError(
            f"config={path} has no get_config() that returns a ConfigDict. "
            "Return default_config() with changes."
        )
    return tree


def _tree_of(path: Path) -> dict | None:
    """The plain values of the file's `get_config()`; None if it has none, or one that returns
    something else."""
    get_config = runpy.run_path(str(path)).get("get_config")
    if get_config is None:
        return None
    config = get_config()
    if not isinstance(config, ConfigDict):
        return None
    return config.to_dict()


def _what_it_raised(path: Path, error: BaseException) -> str:
    """The mistake of a config file, with its line, if that is known."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    if lines:
        line = lines[-1]
    else:
        line = getattr(error, "lineno", None)
    where = f"config={path}"
    if line:
        where = f"{where} line {line}"
    if "ml_collections" in frames[-1].filename:
        # Not a key of the locked ConfigDict.
        name = re.search(r"\w+(?=\\?['\"])", _text(error))
        if name:
            return f"{where}: {unknown(name[0])}"
    kind = type(error).__name__
    said = _text(error)[:500].rstrip(".")
    if said:
        return f"{where}: {kind}: {said}. Correct it there."
    return f"{where}: {kind}. Correct it there."


@contextlib.contextmanager
def _ending_at_ctrl_c() -> Iterator[None]:
    """While a config file runs, ctrl-C ends the process with 75: a KeyboardInterrupt then is one
    that the file raised."""
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, end_by_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _text(error: BaseException) -> str:
    """What an error says, if it can."""
    try:
        return " ".join(str(error).split())
    except Exception:
        # Of a class of the file's own.
        return ""


def _require_small(path: Path, tree: dict) -> None:
    """Refuses values nested too deeply, or in themselves, or too many: nothing after this has to
    look out for them.

    Raises:
        ConfigError: in that case.
    """
    count = 0
    left: list[tuple[Any, int]] = [(tree, 0)]
    while left:
        value, depth = left.pop()
        count += 1
        if count > _MAX_VALUES:
            raise ConfigError(
                f"config={path} has more than {_MAX_VALUES:,} values. "
                "Leave out what is not a key's value."
            )
        if depth > _MAX_DEPTH:
            raise ConfigError(
                f"config={path} has values nested more than {_MAX_DEPTH} deep. Correct it there."
            )
        if isinstance(value, dict):
            left += [(inner, depth + 1) for inner in value.values()]
        elif isinstance(value, list | tuple | set | frozenset):
            left += [(inner, depth + 1) for inner in value]


def _children(node: Any) -> list[yaml.Node]:
    """The nodes directly inside a node."""
    if isinstance(node, yaml.MappingNode):
        return [child for pair in node.value for child in pair]
    if isinstance(node, yaml.SequenceNode):
        return list(node.value)
    return []
