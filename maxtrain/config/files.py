"""Config files as plain values. Whatever a file has in it, only a ConfigError comes out of here."""

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

from ml_collections import ConfigDict

from data_pipeline.base import strict_yaml
from data_pipeline.base.errors import ConfigError, end_by_signal
from data_pipeline.base.strict_yaml import MAX_DEPTH, MAX_VALUES
from maxtrain.config.keys import unknown

SUFFIXES = (".py", ".yaml", ".yml")


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
        raw = strict_yaml.read(path)
    except OSError as error:
        raise ConfigError(
            f"config={path} can't be read: {error.strerror}. Make it readable, or name another "
            "file."
        ) from None
    except ValueError as error:
        raise ConfigError(f"config={path} is not valid YAML: {error}. Correct it there.") from None
    if not isinstance(raw, dict):
        raise ConfigError(
            f"config={path} must be a mapping of keys to values. `--print-config` shows one."
        )
    return raw


def _read_python(path: Path) -> dict:
    """Return the result of a file's `get_config()`.

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
    message = _text(error)[:500].rstrip(".")
    if message:
        return f"{where}: {kind}: {message}. Correct it there."
    return f"{where}: {kind}. Correct it there."


@contextlib.contextmanager
def _ending_at_ctrl_c() -> Iterator[None]:
    """Let ctrl-C end the process with exit code 75 while a config file runs, so that any
    KeyboardInterrupt is one that the file raised.
    """
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
    """Return the message of an error, or nothing if the error's own code fails."""
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
        if count > MAX_VALUES:
            raise ConfigError(
                f"config={path} has more than {MAX_VALUES:,} values. "
                "Leave out what is not a key's value."
            )
        if depth > MAX_DEPTH:
            raise ConfigError(
                f"config={path} has values nested more than {MAX_DEPTH} deep. Correct it there."
            )
        if isinstance(value, dict):
            left += [(inner, depth + 1) for inner in value.values()]
        elif isinstance(value, list | tuple | set | frozenset):
            left += [(inner, depth + 1) for inner in value]
