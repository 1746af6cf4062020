"""From a config file and `a.b=value` overrides to a checked RunConfig, with every problem reported at once.

A config file is Python with `get_config()`, which returns `default_config()` with some values set, or YAML, for example the
resolved config in a run directory. Types are checked here, alike for all of them.
"""

import contextlib
import dataclasses
import difflib
import math
import re
import runpy
import sys
import traceback
import typing
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import yaml
from ml_collections import ConfigDict

from data_pipeline.errors import ConfigError, UsageError, UserError
from maxtrain.config.checks import out_of_range, problems_across
from maxtrain.config.help import help_text
from maxtrain.config.keys import choices, describe, find, show, unknown
from maxtrain.config.schema import RunConfig

_SUFFIXES = (".py", ".yaml", ".yml")
_Problems = list[tuple[str, str]]  # key and message


class _Loader(yaml.SafeLoader):
    """YAML that refuses a key given twice; the parser alone would keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        names = [name.value for name, _ in node.value]
        for name, _ in node.value:
            if names.count(name.value) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{name.value} is given twice", name.start_mark)
        return super().construct_mapping(node, deep)


def default_config() -> ConfigDict:
    """The whole schema with its defaults, to be changed and returned by a config file's `get_config()`.

    Locked: a key that does not exist can't be set. Only `data.sources`, `eval.sets` and `optimizer.groups` take new names.
    """
    config: Any = ConfigDict(dataclasses.asdict(RunConfig()), type_safe=False).lock()
    config.data.sources.unlock()
    config.eval.sets.unlock()
    config.optimizer.groups.unlock()
    return config


def resolve(config: ConfigDict) -> RunConfig:
    """The checked RunConfig of a ConfigDict; raises ConfigError with every problem."""
    return _checked(config.to_dict(), [])


def to_yaml(config: RunConfig) -> str:
    """Every key of a config as plain YAML, which `config=` reads back to an equal config."""
    plain = dataclasses.asdict(config)
    return yaml.safe_dump(plain, sort_keys=False, width=1000)  # escapes é, since U+0085 would not come back as it is


def leaves(config: RunConfig) -> dict[str, str]:
    """Every key of a config by its dotted path, as text."""

    def walk(path: str, value: Any) -> dict[str, str]:
        if not isinstance(value, dict) or not value:
            return {path: str(value)}
        return {k: v for name, inner in value.items() for k, v in walk(f"{path}.{name}" if path else name, inner).items()}

    return walk("", dataclasses.asdict(config))


def load_config(argv: Sequence[str]) -> RunConfig:
    """The config of a command line.

    Args:
        argv: `config=NAME|FILE` and any number of `a.b=value`, without the program's name.

    Raises:
        UsageError: something is not `key=value`, or `config=` is missing.
        ConfigError: with every problem of the file, of the overrides and across both.
    """
    given: dict[str, str] = {}
    problems: _Problems = []
    for argument in argv:
        name, equals, value = argument.partition("=")
        if not equals or name.startswith("-") or not name:
            mend = f"Write {name.lstrip('-') or 'key'}={value or 'value'}, without dashes or spaces; `--help` lists the keys"
            raise UsageError(f"{argument!r} can't be understood; arguments are key=value. {mend}.")
        if name in given:
            problems.append((name, f"{name} is given twice, {show(given[name])} and {show(value)}. Keep one of them."))
        given[name] = value
    if not (reference := given.pop("config", None)):
        raise UsageError(f"no config is given. Add config=NAME, for example config=quickstart. {_available()}.")
    try:
        tree = _read(reference)
    except ConfigError as error:
        tree = {}
        problems.append(("", error.problems[0]))
    for path, text in given.items():
        if (kind := find(path)) is None:
            problems.append((path, unknown(path)))
            continue
        *parents, leaf = path.split(".")
        node = tree
        for part in parents:
            node[part] = node.get(part) or {}  # a section left empty in YAML is null
            node = node[part] if isinstance(node[part], dict) else {}  # if not, it is complained about below
        node[leaf] = _from_text(kind, text)
    return _checked(tree, problems)


def from_command_line(argv: Sequence[str], prog: str) -> RunConfig:
    """The config of a command line; problems are printed without a traceback and end the process.

    Args:
        argv: as `load_config`, or with `--help [SECTION]` or `--print-config`, which print and exit 0.
        prog: how the command is called, for the messages.
    """
    arguments = [a for a in argv if a != "--print-config"]
    try:
        if asked := [i for i, a in enumerate(arguments) if a in ("--help", "-h")]:
            section = arguments[asked[0] + 1] if len(arguments) > asked[0] + 1 else None
            print(help_text(prog, section, sorted(_shipped())))
            raise SystemExit(0)
        config = load_config(arguments)
    except UserError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    if len(arguments) < len(argv):
        print(to_yaml(config), end="")
        raise SystemExit(0)
    return config


def _shipped() -> dict[str, Path]:
    """Config files by name: those that come with the package (installed, or in its repository), then those of ./configs."""
    package = Path(__file__).parents[1]
    folder = package / "configs" if (package / "configs").is_dir() else package.parent / "configs"
    return {p.stem: p for place in (folder, Path("configs")) for p in sorted(place.glob("*")) if p.suffix in _SUFFIXES}


def _available() -> str:
    return f"Available: {', '.join(sorted(_shipped())) or 'none'}; or the path of a .py or .yaml file"


def _read(reference: str) -> dict:
    """The plain values of a config file; raises ConfigError."""
    shipped = _shipped()
    path = shipped.get(reference) or Path(reference).expanduser()
    if path.suffix not in _SUFFIXES or not path.is_file():
        close = difflib.get_close_matches(reference, shipped, 1)
        mend = f"Did you mean config={close[0]}? {_available()}" if close else _available()
        raise ConfigError(f"config={reference} is neither a known name nor a .py or .yaml file. {mend}.")
    if path.suffix == ".py":
        return _read_python(path)
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"config={path} is not valid YAML: {' '.join(str(error).split())}. Correct it there.") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"config={path} must be a mapping of keys to values. `--print-config` shows one.")
    return raw


def _read_python(path: Path) -> dict:
    try:
        config = runpy.run_path(str(path)).get("get_config", dict)()
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        where = f"config={path} line {lines[-1] if lines else getattr(error, 'lineno', '?')}"
        if "ml_collections" in frames[-1].filename and (name := re.search(r"\w+(?=\\?['\"])", str(error))):
            raise ConfigError(f"{where}: {unknown(name[0])}") from None  # not a key of the locked ConfigDict
        raise ConfigError(f"{where}: {type(error).__name__}: {error}. Correct it there.") from error
    if not isinstance(config, ConfigDict):
        raise ConfigError(f"config={path} has no get_config() that returns a ConfigDict. Return default_config() with changes.")
    return config.to_dict()


def _from_text(kind: Any, text: str) -> Any:
    """What is typed on the command line as a YAML file would give it, where that is not the text itself."""
    if type(None) in typing.get_args(kind) and text in ("null", "none", "None"):
        return None
    if (origin := typing.get_origin(kind)) not in (tuple, dict):
        return text
    listed = f"[{text.strip('()')}]" if origin is tuple and not text.startswith("[") else text
    try:
        return yaml.load(listed, _Loader)
    except yaml.YAMLError:
        return text


def _checked(tree: dict, problems: _Problems) -> RunConfig:
    """Plain values to a RunConfig; `problems` are those found before, "" for a file that could not be read."""
    config = _section(RunConfig, tree, "", problems)
    texts = [text for _, text in problems]
    if all(path for path, _ in problems):  # a value refused above is not the user's: no judgement on it
        bad = re.compile("|".join(rf"(?<![\w.]){re.escape(path)}(?!\w)" for path, _ in problems) or "(?!)")
        texts += [text for text in problems_across(config) if not bad.search(text)]
    if texts:
        raise ConfigError(texts)
    return config


def _section(cls: Any, raw: Any, path: str, problems: _Problems) -> Any:
    """A dataclass from a mapping of some of its fields. What does not fit is noted and left at its default."""
    fields = {field.name: field for field in dataclasses.fields(cls)}
    raw = {} if raw is None else raw
    if not isinstance(raw, dict):
        names = choices(f"{path}.{name}" for name in list(fields)[:3])
        problems.append((path, f"{path}={show(raw)} is a section, not a value. Set one of its keys, such as {names}."))
        return cls()
    default, values = cls(), {}
    for name, value in raw.items():
        key = f"{path}.{name}" if path else str(name)
        if name not in fields:
            problems.append((key, unknown(key)))
            continue
        try:
            values[name] = _convert(fields[name].type, value, key, problems)
            problem = out_of_range(key, values[name], fields[name].metadata)
        except ValueError as error:
            words = describe(fields[name].type)
            close = difflib.get_close_matches(str(value).lower(), words.split(" | "), 1)
            mend = f"Did you mean {key}={close[0]}?" if close else f"Write for example {key}={show(getattr(default, name))}."
            problem = f"{key}={show(value)} must be: {words}{f' ({error})' if str(error) else ''}. {mend}"
        if problem:
            problems.append((key, problem))
            values[name] = getattr(default, name)
    return cls(**values)


def _convert(kind: Any, raw: Any, path: str, problems: _Problems) -> Any:
    """A value of an annotation; raises ValueError with a detail, or without one. Sections note their problems themselves."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _section(kind, raw, path, problems)
    if origin is tuple and isinstance(raw, list | tuple):
        return tuple(_convert(inner[0], item, f"{path}[{i}]", problems) for i, item in enumerate(raw))
    if origin is dict and isinstance(raw, dict):
        if wrong := [name for name in raw if not re.fullmatch(r"[\w-]+", str(name))]:
            raise ValueError(f"the name {wrong[0]!r} is not letters, digits, _ and -")
        return {str(name): _convert(inner[1], value, f"{path}.{name}", problems) for name, value in raw.items()}
    if origin is Literal:
        text = "off" if raw is False else raw  # what YAML makes of a bare off
        if isinstance(text, str) and text in inner:
            return text
    elif inner and origin not in (tuple, dict):  # a union
        for option in inner:
            with contextlib.suppress(ValueError):
                return _convert(option, raw, path, problems)
    elif kind is type(raw) and kind in (bool, str, type(None)):
        return raw
    elif kind is bool and isinstance(raw, str) and raw.lower() in ("true", "false"):
        return raw.lower() == "true"
    elif kind in (int, float) and isinstance(raw, int | float | str) and not isinstance(raw, bool):
        return _number(kind, raw)
    raise ValueError


def _number(kind: type, raw: int | float | str) -> int | float:
    """A finite number; raises ValueError. Whole numbers stay exact, and 1e6 and 10_000 are such."""
    try:
        number = Decimal(raw)
    except ArithmeticError:
        raise ValueError from None
    if not number.is_finite() or (kind is float and math.isinf(float(number))):
        raise ValueError("nan and inf are not allowed")
    if kind is int and not -(2**63) < number < 2**63:
        raise ValueError("less than 2^63")
    if kind is int and number != int(number):
        raise ValueError("without a fraction")
    return kind(number)
