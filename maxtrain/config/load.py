"""Build a checked RunConfig from a config file and `a.b=value` overrides, and report every problem
at once.

A config file is Python with `get_config()`, which returns `default_config()` with some values set,
or YAML, for example the resolved config in a run directory. Types are checked here, the same way
for both.

An unused key is an error if it was typed for this run, or if the config file sets it without a use
of its own. If an override made a key of the file unused, the key goes back to its default, and a
note reports that.

A warmup that does not fit into `steps` is an error if both were set in the same place. If only the
steps were set for this run, the warmup is shortened, and a note reports that.
"""

import copy
import dataclasses
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import yaml
from ml_collections import ConfigDict

from data_pipeline.base import strict_yaml
from data_pipeline.base.errors import (
    ConfigError,
    StorageError,
    UsageError,
    UserError,
    ending_with_reader,
)
from data_pipeline.base.masking import masked_values
from maxtrain.config.environment import check_environment
from maxtrain.config.files import read_config
from maxtrain.config.help import help_text
from maxtrain.config.overridden import made_idle, with_defaults, with_fitting_warmup
from maxtrain.config.overrides import overlaps, override, parse
from maxtrain.config.paths import expand_paths, with_default_paths
from maxtrain.config.problems import problems_of
from maxtrain.config.schema import ModelConfig, RunConfig
from maxtrain.config.shipped import available, find_file, shipped_configs
from maxtrain.config.started import read_header, with_inputs_of
from maxtrain.config.values import MAX_LISTED, ValueProblem, section_from, section_leaves
from maxtrain.config.words import show


class NamedModel(NamedTuple):
    """The result of `model=PLACE`: keys of `model`, and the directory of the weights, if there is
    one.
    """

    keys: dict[str, Any]
    weights: str | None


class ModelLookup(NamedTuple):
    """Functions that read models outside the config.

    Attributes:
        of_weights: returns the keys of `model` that a directory of weights decides.
        named: returns what `model=` names. UserError: the name is not usable.
    """

    of_weights: Callable[[str], dict[str, Any]]
    named: Callable[[str], NamedModel]


class LoadedConfig(NamedTuple):
    """A checked config, and notes for the user about it, one line each."""

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
    problems: list[ValueProblem] = []
    resolved = _from_tree(config.to_dict(), problems)
    _require_no_problems(resolved, problems)
    return resolved


def to_yaml(config: RunConfig) -> str:
    """Every key of a config as plain YAML, which `config=` reads back to an equal config, but for
    secrets in URLs: these are masked."""
    plain = masked_values(dataclasses.asdict(with_default_paths(config)))
    # Letters beyond ASCII are escaped, since U+0085 would not come back as it is.
    return yaml.safe_dump(plain, sort_keys=False, width=1000)


def leaves(config: RunConfig) -> dict[str, str]:
    """Every key of a config by its dotted path, as text."""
    found = _leaves_below("", dataclasses.asdict(config))
    return {path: str(value) for path, value in found.items()}


def plain_leaves(config: RunConfig) -> dict[str, Any]:
    """Every key of a config by its dotted path, as a plain value: what `to_yaml` writes of it."""
    return _leaves_below("", strict_yaml.loads(to_yaml(config)))


def _leaves_below(path: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {path: value}
    found: dict[str, Any] = {}
    for name, inner in value.items():
        key = name
        if path:
            key = f"{path}.{name}"
        found |= _leaves_below(key, inner)
    return found


def load_config(argv: Sequence[str]) -> RunConfig:
    """The config of a command line.

    Args:
        argv: `config=NAME|FILE` and any number of `a.b=value`, without the program's name.

    Raises:
        UsageError: something is not `key=value`, or `config=` is missing.
        ConfigError: with every problem of the file, of the overrides and across both.
    """
    return load_with_notes(argv).config


def load_with_notes(argv: Sequence[str], models: ModelLookup | None = None) -> LoadedConfig:
    """Load a config as `load_config` does, with notes that a user should see once, when the run is
    launched.

    With `models`, keys of `model` that are not typed are those of the weights that the run starts
    from, and `model=PLACE` names a model with all of its keys; then `config=` may be missing: all
    other keys have their defaults.
    """
    problems: list[ValueProblem] = []
    about_words: list[str] = []
    given = parse(argv, about_words)
    reference = given.pop("config", "")
    if not reference and (models is None or "model" not in given):
        raise UsageError(
            f"no config is given. Add config=NAME, for example config=quickstart. {available()}."
        )
    tree = {}
    if reference:
        try:
            file = find_file(reference)
            tree = read_config(file)
            if file.suffix != ".py":
                _, started_in = read_header(file)
                tree = with_inputs_of(tree, started_in)
        except ConfigError as error:
            problems.append(ValueProblem("", error.problems[0]))
    file_tree = copy.deepcopy(tree)
    about_model = _name_model(tree, given, models, problems)
    problems += overlaps(given)
    for path, text in given.items():
        override(tree, path, text, problems)
    if models is not None:
        about_model += _fill_model(tree, given, models, problems)
    config, about_warmup = with_fitting_warmup(_from_tree(tree, problems), given)
    config, about_idle = with_defaults(config, made_idle(config, file_tree, given))
    _require_no_problems(config, problems)
    return LoadedConfig(config, [*about_words, *about_warmup, *about_idle, *about_model])


def _name_model(
    tree: dict, typed: dict[str, str], models: ModelLookup | None, problems: list[ValueProblem]
) -> list[str]:
    """Puts the model that `model=PLACE` names into `tree`, and begins with its weights, if PLACE is
    a directory; a line about it. Takes the key out of what is typed."""
    place = typed.pop("model", None)
    if place is None:
        return []
    if models is None:
        problems.append(ValueProblem("model", f"model={show(place)} can't be looked up here."))
        return []
    try:
        found = models.named(place)
    except StorageError as error:
        # No problem of the config: it may pass, and who starts runs again tries it again.
        raise StorageError(f"model={show(place)}: {error}") from error
    except UserError as error:
        problems.append(ValueProblem("model", f"model={show(place)}: {error}"))
        return []
    model = tree.get("model")
    if not isinstance(model, dict):
        model = {}
    tree["model"] = model | found.keys
    if found.weights is None or "checkpoint.init_from" in typed:
        return [f"model: {place}"]
    checkpoint = tree.get("checkpoint")
    if not isinstance(checkpoint, dict):
        checkpoint = {}
    tree["checkpoint"] = checkpoint | {"init_from": found.weights}
    if typed.get("checkpoint.fork_from"):
        return [f"model: as in {place}"]
    return [f"model: as in {place}, and begins with its weights (checkpoint.init_from)"]


def _fill_model(
    tree: dict, typed: Mapping[str, str], models: ModelLookup, problems: list[ValueProblem]
) -> list[str]:
    """Puts what the weights of checkpoint.init_from decide into `tree`, but for what is typed; a
    line about it.

    Not where checkpoint.init_partial says that parts may be of another shape.
    """
    checkpoint = tree.get("checkpoint") or {}
    model = tree.get("model") or {}
    if not isinstance(checkpoint, dict) or not isinstance(model, dict):
        return []
    directory = checkpoint.get("init_from")
    if not isinstance(directory, str) or checkpoint.get("init_partial"):
        return []
    key = "checkpoint.init_from"
    try:
        theirs = models.of_weights(directory)
    except StorageError as error:
        raise StorageError(f"{key}={show(directory)}: {error}") from error
    except UserError as error:
        problems.append(ValueProblem(key, f"{key}={show(directory)}: {error}"))
        return []
    ours = section_leaves(dataclasses.asdict(ModelConfig())) | section_leaves(model)
    changed = {}
    for path, value in section_leaves(theirs).items():
        if f"model.{path}" not in typed and value != ours.get(path):
            changed[path] = value
    if not changed:
        return []
    tree["model"] = _with_leaves(model, changed)
    words = ", ".join(f"{name}={show(value)}" for name, value in changed.items())
    return [f"model: as in {directory}: {words}"]


def _with_leaves(section: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """A section of a file with other values for some keys, by their dotted paths."""
    result = dict(section)
    for path, value in changed.items():
        name, _, below = path.partition(".")
        if not below:
            result[name] = value
            continue
        inner = result.get(name) or {}
        # A value in place of a section stays, and is refused when the tree is read.
        if isinstance(inner, dict):
            result[name] = _with_leaves(inner, {below: value})
    return result


def from_command_line(
    argv: Sequence[str], prog: str, models: ModelLookup | None = None
) -> RunConfig:
    """The config of a command line; problems are printed without a traceback and end the process.

    Args:
        argv: as `load_config`, or with `--help [SECTION]` or `--print-config`, which print and exit
            0.
        prog: how the command is called, for the messages.
        models: what is known of models elsewhere.
    """
    with ending_with_reader():
        return _from_command_line(argv, prog, models)


def _from_command_line(argv: Sequence[str], prog: str, models: ModelLookup | None) -> RunConfig:
    arguments = [word for word in argv if word != "--print-config"]
    try:
        _print_help_if_asked(arguments, prog)
        config, notes = load_with_notes(arguments, models)
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


def _print_help_if_asked(arguments: Sequence[str], prog: str) -> None:
    """Prints the help and ends the process, if the words ask for it."""
    for index, word in enumerate(arguments):
        if word in ("--help", "-h"):
            section = next(iter(arguments[index + 1 :]), None)
            print(help_text(prog, section, sorted(shipped_configs())))
            raise SystemExit(0)


def _from_tree(tree: dict, problems: list[ValueProblem]) -> RunConfig:
    """The config of plain values, with what does not fit noted and left at its default."""
    return expand_paths(section_from(RunConfig, tree, "", problems))


def _require_no_problems(config: RunConfig, problems: list[ValueProblem]) -> None:
    """Raises ConfigError with the problems that were found before, and with those of the config.

    A value that was refused is not the user's, but a default in its place: no judgement on it.
    """
    texts = [problem.message for problem in problems]
    refused = [problem.key for problem in problems]
    # Without a file nothing is the user's.
    if "" not in refused:
        found = [str(problem) for problem in problems_of(config)]
        texts += _without_keys(found, refused)
    if len(texts) > MAX_LISTED:
        more = len(texts) - MAX_LISTED
        texts = [*texts[:MAX_LISTED], f"And {more:,} more problems. Fix these first."]
    if texts:
        raise ConfigError(texts)


def _without_keys(texts: list[str], keys: Sequence[str]) -> list[str]:
    """The texts that have none of these keys in them."""
    if not keys:
        return texts
    any_key = re.compile("|".join(rf"(?<![\w.]){re.escape(key)}(?!\w)" for key in keys))
    return [text for text in texts if not any_key.search(text)]
