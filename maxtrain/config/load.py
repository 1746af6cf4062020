"""From a config file and `a.b=value` overrides to a checked RunConfig, with every problem reported
at once.

A config file is Python with `get_config()`, which returns `default_config()` with some values set,
or YAML, for example the resolved config in a run directory. Types are checked here, alike for all
of them.

A key that nothing reads is an error if it was typed for this run, or if the file has it so by
itself. If it is an override that made a key of the file idle, that is said in one line, and the key
goes back to its default.

Warm-up that does not fit into `steps` is an error if both were set in the same place. If only the
steps were set for this run, it is made to fit, and that is said in one line.
"""

import copy
import dataclasses
import difflib
import math
import os
import re
import sys
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml
from ml_collections import ConfigDict

from data_pipeline.config import Epochs, as_epochs
from data_pipeline.errors import ConfigError, UsageError, UserError
from maxtrain.config.across.steps import fit_warmup
from maxtrain.config.environment import check_environment
from maxtrain.config.files import SUFFIXES, parse_yaml, read_config
from maxtrain.config.help import help_text
from maxtrain.config.idle import Idle
from maxtrain.config.keys import describe, find, unknown
from maxtrain.config.limits import out_of_range
from maxtrain.config.paths import expand_paths, with_default_paths
from maxtrain.config.problems import problems_of
from maxtrain.config.schema import ModelConfig, RunConfig
from maxtrain.config.words import choices, show

_MAX_LISTED = 40  # problems that one message lists
_NULLS = ("null", "none", "None")
_Problems = list[tuple[str, str]]  # key and message
ModelOf = Callable[
    [str], dict[str, Any]
]  # of a directory with weights: the keys of `model` that they decide


class Loaded(NamedTuple):
    """A checked config, and what to tell the user about it, a line each."""

    config: RunConfig
    notes: list[str]


def default_config() -> ConfigDict:
    """The whole schema with its defaults, to be changed and returned by a config file's
    `get_config()`.

    Locked: a key that does not exist can't be set. Only `data.sources`, `eval.sets` and
        `optimizer.groups` take new names.
    """
    config: Any = ConfigDict(dataclasses.asdict(RunConfig()), type_safe=False).lock()
    config.data.sources.unlock()
    config.eval.sets.unlock()
    config.optimizer.groups.unlock()
    return config


def resolve(config: ConfigDict) -> RunConfig:
    """The checked RunConfig of a ConfigDict; raises ConfigError with every problem."""
    return _checked(config.to_dict(), []).config


def to_yaml(config: RunConfig) -> str:
    """Every key of a config as plain YAML, which `config=` reads back to an equal config."""
    plain = dataclasses.asdict(with_default_paths(config))
    return yaml.safe_dump(
        plain, sort_keys=False, width=1000
    )  # escapes é, since U+0085 would not come back as it is


def leaves(config: RunConfig) -> dict[str, str]:
    """Every key of a config by its dotted path, as text."""

    def walk(path: str, value: Any) -> dict[str, str]:
        if not isinstance(value, dict) or not value:
            return {path: str(value)}
        return {
            k: v
            for name, inner in value.items()
            for k, v in walk(f"{path}.{name}" if path else name, inner).items()
        }

    return walk("", dataclasses.asdict(config))


def load_config(argv: Sequence[str]) -> RunConfig:
    """The config of a command line.

    Args:
        argv: `config=NAME|FILE` and any number of `a.b=value`, without the program's name.

    Raises:
        UsageError: something is not `key=value`, or `config=` is missing.
        ConfigError: with every problem of the file, of the overrides and across both.
    """
    return load_with_notes(argv).config


def load_with_notes(argv: Sequence[str], model_of: ModelOf | None = None) -> Loaded:
    """As `load_config`; with what a user should be told once, when the run is launched.

    With `model_of`, keys of `model` that are not typed are those of the weights that the run starts
    from.
    """
    problems: _Problems = []
    given = _parse(argv, problems)
    if not (reference := given.pop("config", None)):
        raise UsageError(
            f"no config is given. Add config=NAME, for example config=quickstart. {_available()}."
        )
    try:
        tree = read_config(_find_file(reference))
    except ConfigError as error:
        tree = {}
        problems.append(("", error.problems[0]))
    alone = copy.deepcopy(tree)
    problems += _overlaps(given)
    for path, text in given.items():
        _override(tree, path, text, problems)
    filled = _fill_model(tree, given, model_of, problems) if model_of else ""
    config, notes = _checked(tree, problems, given, alone)
    return Loaded(config, [*notes, filled] if filled else notes)


def _fill_model(
    tree: dict, typed: Mapping[str, str], model_of: ModelOf, problems: _Problems
) -> str:
    """Puts what the weights of checkpoint.init_from decide into `tree`, but for what is typed; a
    line about it.

    Not where checkpoint.init_partial says that parts may be of another shape.
    """
    checkpoint = tree.get("checkpoint") or {}
    directory = checkpoint.get("init_from") if isinstance(checkpoint, dict) else None
    model = tree.get("model") or {}
    if (
        not isinstance(directory, str)
        or checkpoint.get("init_partial")
        or not isinstance(model, dict)
    ):
        return ""
    try:
        theirs = model_of(directory)
    except UserError as error:
        problems.append(
            ("checkpoint.init_from", f"checkpoint.init_from={show(directory)}: {error}")
        )
        return ""
    defaults = dataclasses.asdict(ModelConfig())
    changed = {
        k: v
        for k, v in theirs.items()
        if f"model.{k}" not in typed and v != model.get(k, defaults[k])
    }
    if not changed:
        return ""
    tree["model"] = model | changed
    return f"model: as in {directory}: {', '.join(f'{key}={show(value)}' for key, value in changed.items())}"


def from_command_line(argv: Sequence[str], prog: str, model_of: ModelOf | None = None) -> RunConfig:
    """The config of a command line; problems are printed without a traceback and end the process.

    Args:
        argv: as `load_config`, or with `--help [SECTION]` or `--print-config`, which print and exit
            0.
        prog: how the command is called, for the messages.
        model_of: the keys of `model` that the weights in a directory decide.
    """
    arguments = [a for a in argv if a != "--print-config"]
    try:
        if asked := [i for i, a in enumerate(arguments) if a in ("--help", "-h")]:
            section = arguments[asked[0] + 1] if len(arguments) > asked[0] + 1 else None
            print(help_text(prog, section, sorted(_shipped())))
            raise SystemExit(0)
        config, notes = load_with_notes(arguments, model_of)
        check_environment(os.environ)
    except UserError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    for note in notes:
        print(f"{prog}: {note}", file=sys.stderr)
    if len(arguments) < len(argv):
        print(to_yaml(config), end="")
        raise SystemExit(0)
    return config


def _parse(argv: Sequence[str], problems: _Problems) -> dict[str, str]:
    """The words of a command line by their keys; UsageError: one is no `key=value`."""
    given: dict[str, str] = {}
    for argument in argv:
        name, equals, value = argument.partition("=")
        if not equals and not name.startswith("-"):
            if "config" not in given and _names_a_config(argument):
                given["config"] = argument
                continue
            _require_no_config(argument, given.get("config"))
        if not equals or name.startswith("-") or not name:
            mend = f"Write {name.lstrip('-') or 'key'}={value or 'value'}, without dashes or spaces; `--help` lists the keys"
            raise UsageError(f"{argument!r} can't be understood; arguments are key=value. {mend}.")
        if name in given:
            problems.append(
                (
                    name,
                    f"{name} is given twice, {show(given[name])} and {show(value)}. Keep one of them.",
                )
            )
        given[name] = value
    return given


def _names_a_config(word: str) -> bool:
    """Whether a word without `config=` is the name of a shipped config, or a config file."""
    return word in _shipped() or (
        Path(word).suffix in SUFFIXES and os.path.isfile(os.path.expanduser(word))
    )


def _require_no_config(word: str, given: str | None) -> None:
    """UsageError: the word looks like one, but there is one already, or it is misspelt."""
    rule = f"{word!r} can't be understood; arguments are key=value"
    if given is not None and _names_a_config(word):
        raise UsageError(
            f"{rule}, and config={show(given)} is given already. Leave one of them out."
        )
    if given is None and (close := difflib.get_close_matches(word, _shipped(), 1)):
        raise UsageError(f"{rule}. Did you mean config={close[0]}? {_available()}.")


def _overlaps(given: Mapping[str, str]) -> _Problems:
    """Overrides of which one sets what the other is a part of: which one counts would depend on
    their order."""
    problems = []
    for whole in given:
        for part in given:
            if part.startswith(f"{whole}.") and find(part) is not None:
                rule = f"{whole}={show(given[whole])} and {part}={show(given[part])} set the same twice"
                problems.append(
                    (
                        part,
                        f"{rule}. Put {part.removeprefix(whole + '.')} into the value of {whole}, or leave one out.",
                    )
                )
    return problems


def _override(tree: dict, path: str, text: str, problems: _Problems) -> None:
    """Puts the value of an override where the file would have it."""
    if (kind := find(path)) is None:
        problems.append((path, unknown(path)))
        return
    *parents, leaf = path.split(".")
    node = tree
    for part in parents:
        node[part] = node.get(part) or {}  # a section left empty in YAML is null
        node = (
            node[part] if isinstance(node[part], dict) else {}
        )  # if not, it is complained about below
    if (
        dataclasses.is_dataclass(kind)
        and text in _NULLS
        and typing.get_origin(find(".".join(parents))) is dict
    ):
        _remove_named(node, path, problems)
    else:
        node[leaf] = _from_text(kind, text)


def _remove_named(named: dict, path: str, problems: _Problems) -> None:
    """Takes a source, an evaluation set or the like out of those of the file."""
    section, _, name = path.rpartition(".")
    if name in named:
        del named[name]
        return
    rule = f"{path}=null leaves out what the config does not have"
    mend = (
        f"It has {', '.join(map(show, named))}. Name one of them"
        if named
        else f"It has no {section} at all. Drop it"
    )
    problems.append((path, f"{rule}. {mend}."))


def _shipped() -> dict[str, Path]:
    """Config files by name: those that come with the package (installed, or in its repository),
    then those of ./configs."""
    package = Path(__file__).parents[1]
    folder = package / "configs" if (package / "configs").is_dir() else package.parent / "configs"
    return {
        p.stem: p
        for place in (folder, Path("configs"))
        for p in sorted(place.glob("*"))
        if p.suffix in SUFFIXES
    }


def _available() -> str:
    return (
        f"Available: {', '.join(sorted(_shipped())) or 'none'}; or the path of a .py or .yaml file"
    )


def _find_file(reference: str) -> Path:
    """The config file of `config=reference`; raises ConfigError."""
    shipped = _shipped()
    path = shipped.get(reference) or Path(os.path.expanduser(reference))
    if path.suffix not in SUFFIXES or not os.path.isfile(path):
        close = difflib.get_close_matches(reference, shipped, 1)
        mend = f"Did you mean config={close[0]}? {_available()}" if close else _available()
        raise ConfigError(
            f"config={show(reference)} is neither a known name nor a .py or .yaml file. {mend}."
        )
    return path


def _from_text(kind: Any, text: str) -> Any:
    """What is typed on the command line as a YAML file would give it, where that is not the text
    itself."""
    if type(None) in typing.get_args(kind) and text in _NULLS:
        return None
    if (origin := typing.get_origin(kind)) not in (tuple, dict):
        return text
    listed = f"[{text.strip('()')}]" if origin is tuple and not text.startswith("[") else text
    try:
        return parse_yaml(listed)
    except yaml.YAMLError:
        return text


def _checked(
    tree: dict, problems: _Problems, typed: Iterable[str] = (), alone: dict | None = None
) -> Loaded:
    """Plain values to a RunConfig.

    Args:
        tree: of the file, with the overrides in it.
        problems: those found before, with the key "" for a file that could not be read.
        typed: the keys of the overrides.
        alone: the file without the overrides; None: there are none.
    """
    config = expand_paths(_section(RunConfig, tree, "", problems))
    notes = []
    if alone is not None:
        fitted = _with_fitting_warmup(config, list(typed))
        if fitted is not config:
            notes.append(_about_warmup(config, fitted))
            config = fitted
    made_idle = [] if alone is None else _made_idle(config, list(typed), alone)
    for idle in made_idle:
        config = _with_default(config, idle.key)
    texts = [text for _, text in problems]
    if all(
        path for path, _ in problems
    ):  # a value refused above is not the user's: no judgement on it
        bad = re.compile(
            "|".join(rf"(?<![\w.]){re.escape(path)}(?!\w)" for path, _ in problems) or "(?!)"
        )
        texts += [text for text in map(str, problems_of(config)) if not bad.search(text)]
    if len(texts) > _MAX_LISTED:
        texts[_MAX_LISTED:] = [f"And {len(texts) - _MAX_LISTED:,} problems more. Mend these first."]
    if texts:
        raise ConfigError(texts)
    words = ", ".join(
        f"{idle.key}={show(idle.value)} (not read with {idle.cause})" for idle in made_idle
    )
    if words:
        notes.append(f"idle: {words}")
    return Loaded(config, notes)


def _with_fitting_warmup(config: RunConfig, typed: list[str]) -> RunConfig:
    """The config with a shorter warm-up, if nobody set it for this number of steps and it does not
    fit into them."""
    if config.steps == "auto" or "schedule.warmup_steps" in typed:
        return config
    is_default = config.schedule.warmup_steps == type(config.schedule)().warmup_steps
    if is_default or "steps" in typed:
        return fit_warmup(config, config.steps)
    return config


def _about_warmup(before: RunConfig, after: RunConfig) -> str:
    was = f"schedule.warmup_steps={before.schedule.warmup_steps}"
    return (
        f"warm-up: {was}, which was not set for steps={before.steps}, does not fit and is {after.schedule.warmup_steps}. "
        "Set schedule.warmup_steps for another."
    )


def _made_idle(config: RunConfig, typed: list[str], alone: dict) -> list[Idle]:
    """Keys of the file that nothing reads any more because of an override, which did not set them
    itself."""
    now = [found for found in problems_of(config) if isinstance(found, Idle)]
    own = [idle for idle in now if not any(_covers(key, idle.key) for key in typed)]
    if not own:
        return []
    file_alone = expand_paths(_section(RunConfig, alone, "", []))
    before = {found.key for found in problems_of(file_alone) if isinstance(found, Idle)}
    return [idle for idle in own if idle.key not in before]


def _covers(path: str, key: str) -> bool:
    """Whether setting `path` sets `key`."""
    return key == path or key.startswith((f"{path}.", f"{path}["))


def _with_default(section: Any, path: str) -> Any:
    """A section with one of its keys as if it had not been set."""
    name, _, rest = path.partition(".")
    value = _with_default(getattr(section, name), rest) if rest else getattr(type(section)(), name)
    return dataclasses.replace(section, **{name: value})


def _section(cls: Any, raw: Any, path: str, problems: _Problems) -> Any:
    """A dataclass from a mapping of some of its fields. What does not fit is noted and left at its
    default."""
    fields = {field.name: field for field in dataclasses.fields(cls)}
    raw = {} if raw is None else raw
    if not isinstance(raw, dict):
        names = choices(f"{path}.{name}" for name in list(fields)[:3])
        problems.append(
            (
                path,
                f"{path}={show(raw)} is a section, not a value. Set one of its keys, such as {names}.",
            )
        )
        return cls()
    default, values = cls(), {}
    for name, value in raw.items():
        key = f"{path}.{name}" if path else str(name)
        if name not in fields:
            guess = len(problems) < _MAX_LISTED  # each takes a while
            problems.append(
                (
                    key,
                    unknown(key)
                    if guess
                    else f"{show(key)} is not a key. `--help` lists those there are.",
                )
            )
            continue
        try:
            values[name] = _convert(fields[name].type, value, key, problems)
            problem = out_of_range(key, values[name], fields[name].metadata)
        except ValueError as error:
            words = describe(fields[name].type)
            close = difflib.get_close_matches(show(value).lower(), words.split(" | "), 1)
            mend = (
                f"Did you mean {key}={close[0]}?"
                if close
                else f"Write for example {key}={show(getattr(default, name))}."
            )
            problem = (
                f"{key}={show(value)} must be: {words}{f' ({error})' if str(error) else ''}. {mend}"
            )
        if problem:
            problems.append((key, problem))
            values[name] = getattr(default, name)
    return cls(**values)


def _convert(kind: Any, raw: Any, path: str, problems: _Problems) -> Any:
    """A value of an annotation; raises ValueError with a detail, or without one. Sections note
    their problems themselves."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _section(kind, raw, path, problems)
    if origin is tuple and isinstance(raw, list | tuple):
        return tuple(
            _convert(inner[0], item, f"{path}[{i}]", problems) for i, item in enumerate(raw)
        )
    if origin is dict and isinstance(raw, dict):
        if wrong := [
            name
            for name in raw
            if not (isinstance(name, str) and re.fullmatch(r"[\w-]{1,100}", name))
        ]:
            raise ValueError(
                f"the name {show(repr(wrong[0]))} is not letters, digits, _ and -, at most 100"
            )
        return {
            name: _convert(inner[1], value, f"{path}.{name}", problems)
            for name, value in raw.items()
        }
    if origin is Literal:
        text = "off" if raw is False else raw  # what YAML makes of a bare off
        if isinstance(text, str) and text in inner:
            return text
    elif inner and origin not in (tuple, dict):  # a union
        return _convert_to_one_of(inner, raw, path, problems)
    elif kind is Epochs and isinstance(raw, str):
        return as_epochs(raw)
    elif kind is str and type(raw) is str:
        return _utf8(raw)
    elif kind is type(raw) and kind in (bool, type(None)):
        return raw
    elif kind is bool and isinstance(raw, str) and raw.lower() in ("true", "false"):
        return raw.lower() == "true"
    elif kind in (int, float) and isinstance(raw, int | float | str) and not isinstance(raw, bool):
        return _number(kind, raw)
    raise ValueError


def _convert_to_one_of(options: Iterable[Any], raw: Any, path: str, problems: _Problems) -> Any:
    """A value of the first of these annotations that it is one of; raises ValueError with the first
    detail there is."""
    details = []
    for option in options:
        try:
            return _convert(option, raw, path, problems)
        except ValueError as error:
            details.append(str(error))
    raise ValueError(next(filter(None, details), ""))


def _utf8(text: str) -> str:
    """A text that can be written down; raises ValueError. Bytes of a command line that are no UTF-8
    come as surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("not UTF-8") from None
    return text


def _number(kind: type, raw: int | float | str) -> int | float:
    """A finite number; raises ValueError. Whole numbers stay exact, and 1e6 and 10_000 are such."""
    if isinstance(raw, int) and raw.bit_length() > 1024:
        raise ValueError("too many digits")
    if isinstance(raw, str) and len(raw) > 400:
        raise ValueError("too many digits")
    try:
        number = Decimal(raw)
    except ArithmeticError:
        raise ValueError from None
    if not number.is_finite() or (kind is float and math.isinf(float(number))):
        raise ValueError("nan and inf are not allowed")
    if kind is float and number and not float(number):
        raise ValueError("0, or not that small")
    if kind is int and not -(2**63) < number < 2**63:
        raise ValueError("less than 2^63")
    if kind is int and number != int(number):
        raise ValueError("without a fraction")
    return kind(number)
