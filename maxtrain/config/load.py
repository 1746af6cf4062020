"""From a config file and `a.b=value` overrides to a checked RunConfig, with every problem reported at once.

A config file is Python with `get_config()`, which returns `default_config()` with some values set, or YAML, for example the
resolved config in a run directory. Types are checked here, alike for all of them.
"""

import dataclasses
import difflib
import re
import runpy
import sys
import traceback
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import yaml
from ml_collections import ConfigDict

from data_pipeline.errors import ConfigError, UsageError, UserError
from maxtrain.config.checks import out_of_range, problems_across
from maxtrain.config.help import help_text
from maxtrain.config.keys import choices, default_of, describe, element, find, kinds, show, unknown
from maxtrain.config.schema import RunConfig

_SUFFIXES = (".py", ".yaml", ".yml")


class _Typed(str):
    """A value as typed on the command line, where `null` means none."""


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

    Locked: a key that does not exist can't be set. Only `data.sources` and `eval.sets` take new names.
    """
    config: Any = ConfigDict(dataclasses.asdict(RunConfig()), type_safe=False).lock()
    config.data.sources.unlock()
    config.eval.sets.unlock()
    return config


def resolve(config: ConfigDict) -> RunConfig:
    """The checked RunConfig of a ConfigDict; raises ConfigError with every problem."""
    return _assemble(config.to_dict(), {}, [])


def to_yaml(config: RunConfig) -> str:
    """Every key of a config as plain YAML, which `config=` reads back to an equal config."""
    plain = _plain(dataclasses.asdict(config))
    return yaml.safe_dump(plain, sort_keys=False, width=1000)  # escapes é, since U+0085 would not come back as it is


def load_config(argv: Sequence[str]) -> RunConfig:
    """The config of a command line.

    Args:
        argv: `config=NAME|FILE` and any number of `a.b=value`, without the program's name.

    Raises:
        UsageError: something is not `key=value`, or `config=` is missing.
        ConfigError: with every problem of the file, of the overrides and across both.
    """
    given: dict[str, _Typed] = {}
    problems: list[str] = []
    for argument in argv:
        name, equals, value = argument.partition("=")
        if not equals or name.startswith("-") or not name:
            mend = f"Write {name.lstrip('-') or 'key'}={value or 'value'}, without dashes or spaces; `--help` lists the keys"
            raise UsageError(f"{argument!r} can't be understood; arguments are key=value. {mend}.")
        if name in given:
            problems.append(f"{name} is given twice, {show(given[name])} and {show(value)}. Keep one of them.")
        given[name] = _Typed(value)
    reference = given.pop("config", None)
    if not reference:
        raise UsageError(f"no config is given. Add config=NAME, for example config=quickstart. {_available()}.")
    try:
        raw = _read(reference)
    except ConfigError as error:
        return _assemble(None, given, problems + error.problems)
    return _assemble(raw, given, problems)


def from_command_line(argv: Sequence[str], prog: str) -> RunConfig:
    """The config of a command line; problems are printed without a traceback and end the process.

    Args:
        argv: as `load_config`, or with `--help [SECTION]` or `--print-config`, which print and exit 0.
        prog: how the command is called, for the messages.
    """
    arguments = [a for a in argv if a != "--print-config"]
    try:
        if asked := [i for i, a in enumerate(arguments) if a in ("--help", "-h")]:
            print(help_text(prog, arguments[asked[0] + 1 : asked[0] + 2], sorted(_shipped())))
            raise SystemExit(0)
        config = load_config(arguments)
    except UserError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    if len(arguments) < len(argv):
        print(to_yaml(config), end="")
        raise SystemExit(0)
    return config


def _plain(value: Any) -> Any:
    """Tuples as lists, for YAML."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, tuple) else value


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
    return _read_python(path) if path.suffix == ".py" else _read_yaml(path)


def _read_yaml(path: Path) -> dict:
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
        _explain(error, path)
    if not isinstance(config, ConfigDict):
        raise ConfigError(f"config={path} has no get_config() that returns a ConfigDict. Return default_config() with changes.")
    return config.to_dict()


def _explain(error: Exception, path: Path) -> NoReturn:
    """Say where in the config file it went wrong, and which key was meant."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename == str(path)]
    line, code = (own[-1].lineno, own[-1].line or "") if own else (getattr(error, "lineno", "?"), "")
    name = re.search(r"\w+(?=\\?['\"])", str(error))
    if name and "ml_collections" in frames[-1].filename and isinstance(error, AttributeError | KeyError):  # a locked ConfigDict
        match = re.search(rf"\.((?:\w+\.)*{name[0]}(?:\.\w+)*)", code)
        section, _, leaf = (match[1] if match else name[0]).rpartition(".")
        missing = f'{section} does not exist yet. Write config.{section} = {{"{leaf}": ...}}.'
        text = missing if match and find(match[1]) else unknown(match[1] if match else name[0])
        raise ConfigError(f"config={path} line {line}: {text}") from None
    raise ConfigError(f"config={path} line {line}: {type(error).__name__}: {error}. Correct it there.") from error


def _assemble(raw: dict | None, overrides: dict[str, _Typed], problems: list[str]) -> RunConfig:
    """Plain values (None: the file could not be read) and overrides to a RunConfig; `problems` are those found before."""
    reader, tree = _Reader(list(problems)), raw or {}
    for path, value in overrides.items():
        if find(path) is None:
            reader.complain(path, unknown(path))
            continue
        *parents, leaf = path.split(".")
        node: Any = tree
        for part in parents:
            node = node.setdefault(part, {}) if isinstance(node, dict) else None
        if isinstance(node, dict):  # otherwise the file has something else there, of which the reader complains
            node[leaf] = value
    config = reader.section(RunConfig, tree, "")
    problems = reader.problems + (problems_across(config, reader.bad) if raw is not None else [])
    if problems:
        raise ConfigError(problems)
    return config


class _Reader:
    """Turns plain values into the schema's types. What does not fit is noted and left at its default."""

    def __init__(self, problems: list[str]):
        self.problems, self.bad = problems, list[str]()

    def complain(self, path: str, problem: str) -> None:
        self.bad.append(path)
        self.problems.append(problem)

    def section(self, cls: Any, raw: Any, path: str) -> Any:
        """A dataclass from a mapping of some of its fields."""
        fields = {field.name: field for field in dataclasses.fields(cls)}
        raw = dataclasses.asdict(raw) if isinstance(raw, cls) else {} if raw is None else raw
        if not isinstance(raw, dict):
            keys = choices(f"{path}.{name}" for name in list(fields)[:3])
            self.complain(path, f"{path}={show(raw)} is a section, not a value. Set one of its keys, such as {keys}.")
            return cls()
        values, prefix = {}, f"{path}." if path else ""
        for name, value in raw.items():
            if name in fields:
                values[name] = self.value(kinds(cls)[name], value, prefix + name, fields[name])
            else:
                self.complain(f"{prefix}{name}", unknown(f"{prefix}{name}"))
        return cls(**values)

    def value(self, kind: Any, raw: Any, path: str, field: dataclasses.Field | None = None) -> Any:
        """A value of an annotation; `field`, if it is one, has default and limits."""
        if dataclasses.is_dataclass(kind):
            return self.section(kind, raw, path)
        default, count = default_of(field) if field else None, len(self.problems)
        value = default
        try:
            value = self.convert(kind, raw, path)
            problem = out_of_range(path, value, field.metadata) if field else None
        except ValueError as error:
            why = f" ({error})" if str(error) else ""
            close = difflib.get_close_matches(str(raw).lower(), describe(kind).split(" | "), 1)
            usual = {int: 1, float: 1, str: "DIR"}.get(kind, default) if default in (None, "") else _plain(default)
            mend = f"Did you mean {path}={close[0]}?" if close else f"Write for example {path}={show(usual)}."
            problem = f"{path}={show(raw)} must be: {describe(kind)}{why}. {mend}"
        if problem:
            self.complain(path, problem)
        if len(self.problems) == count or dataclasses.is_dataclass(element(kind)):
            return value
        self.bad.append(path)  # for a list or dict, of which some elements were wrong
        return default

    def convert(self, kind: Any, raw: Any, path: str) -> Any:
        """A value that is not a section; raises ValueError with a detail, or without one."""
        origin = typing.get_origin(kind)
        if origin is dict:
            raw = _structure(raw, "{}", dict)
            if wrong := [name for name in raw if not re.fullmatch(r"[\w-]+", str(name))]:
                raise ValueError(f"the name {wrong[0]!r} is not letters, digits, _ and -")
            return {str(name): self.value(element(kind), value, f"{path}.{name}") for name, value in raw.items()}
        if origin is tuple:
            items = _structure(raw, "[]", list | tuple)
            return tuple(self.value(element(kind), item, f"{path}[{i}]") for i, item in enumerate(items))
        return _scalar(kind, raw)


def _structure(raw: Any, brackets: str, expected: Any) -> Any:
    """A list or mapping, or one typed on the command line: `10,12` or `[{until: 100}]`."""
    if isinstance(raw, _Typed):
        text = raw.strip()
        if brackets == "[]" and not text.startswith("["):
            text = f"[{text[1:-1] if text.startswith('(') and text.endswith(')') else text}]"
        try:
            raw = yaml.load(text, _Loader)
        except yaml.YAMLError:
            raw = None
    if not isinstance(raw, expected):
        raise ValueError(f"in brackets, {brackets}")
    return raw


def _scalar(kind: Any, raw: Any) -> Any:
    """A number, text, truth value, choice, null, or a union of them; raises ValueError."""
    options, why = typing.get_args(kind), ""
    if typing.get_origin(kind) is Literal:
        text = "off" if raw is False else raw  # what YAML makes of a bare off
        if isinstance(text, str) and text in options:
            return str(text)
    elif options:
        for option in reversed(options):  # null first, since as text it is anything
            try:
                return _scalar(option, raw)
            except ValueError as error:
                why = str(error) or why
    elif kind is type(None) and (raw is None or (isinstance(raw, _Typed) and raw in ("null", "none", "None"))):
        return None
    elif kind is bool and (isinstance(raw, bool) or (isinstance(raw, str) and raw.lower() in ("true", "false"))):
        return str(raw).lower() == "true"
    elif kind is str and isinstance(raw, str):
        return str(raw)
    elif kind in (int, float) and isinstance(raw, int | float | str) and not isinstance(raw, bool):
        return _number(kind, raw)
    raise ValueError(why)


def _number(kind: type, raw: int | float | str) -> int | float:
    """A finite number; raises ValueError. Whole numbers stay exact, though 1e6 is one too."""
    if kind is int and isinstance(raw, str) and re.fullmatch(r"\s*[+-]?\d[\d_]*\s*", raw) and len(raw) < 40:
        raw = int(raw)
    try:
        number = raw if kind is int and isinstance(raw, int) else float(raw)
    except (ValueError, OverflowError):
        raise ValueError from None
    if not abs(number) < float("inf"):
        raise ValueError("nan and inf are not allowed")
    if kind is int and (number % 1 or abs(number) >= 2**63):
        raise ValueError("without a fraction" if number % 1 else "less than 2^63")
    return kind(number)
