"""Directories that are read and directories that are written, the name of the run among them."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from data_pipeline.base.remote import is_url
from maxtrain.config.schema import RunConfig
from maxtrain.config.words import show

_MAX_NAME_BYTES = 200


def run_name_problems(run_name: str) -> Iterator[str]:
    """A name that no folder can have."""
    if run_name in ("", ".", "..") or re.search(r"[/\\\x00-\x1f]", run_name):
        yield (
            f"run_name={run_name!r} must be the name of one folder. "
            "Set run_name=NAME, and output_dir to the folder that it is in."
        )
    if len(run_name.encode()) > _MAX_NAME_BYTES:
        yield (
            f"run_name={show(run_name)} must be the name of a folder, at most "
            f"{_MAX_NAME_BYTES} bytes. Set run_name to a shorter one."
        )


def source_problems(config: RunConfig) -> Iterator[str]:
    """A run that reads nothing, and one that would be written into its data."""
    if not config.data.sources:
        yield (
            "data.sources is empty, but a run reads at least one. "
            "Add data.sources.NAME.path=DIR, made by `prepare`."
        )
    read = _source_paths(config)
    for name, held_out in config.eval.sets.items():
        read[f"eval.sets.{name}.path"] = held_out.path
    runs = _place(config.output_dir)
    written = (runs, os.path.join(runs, config.run_name))
    for key, path in read.items():
        if path and _place(path) in written:
            yield (
                f"output_dir={config.output_dir} with run_name={config.run_name} "
                f"is the data directory {key}={path}. Set output_dir to another one."
            )


def repeated_source_problems(config: RunConfig) -> Iterator[str]:
    """Sources that are another one once more."""
    first_keys: dict[str, str] = {}
    for key, path in _source_paths(config).items():
        first = first_keys.setdefault(_place(path), key)
        if path and first != key:
            yield (
                f"{key}={path} is the directory of {first} too, and would be read twice in the "
                "same order. Keep one of them, with the sum of both weights, "
                f"or set {key} to other data."
            )


def _source_paths(config: RunConfig) -> dict[str, str]:
    return {f"data.sources.{name}.path": each.path for name, each in config.data.sources.items()}


def _place(path: str) -> str:
    """Return a form of a path that is equal for two paths of the same directory."""
    if is_url(path):
        return path.rstrip("/")
    if "\0" in path:
        return path
    return os.path.realpath(path)


def copy_problems(config: RunConfig) -> Iterator[str]:
    """Copies of checkpoints that would be put where the checkpoints are."""
    copy_to = config.checkpoint.copy_to
    if copy_to is None or is_url(copy_to) or is_url(config.output_dir):
        return
    if "\0" in copy_to + config.output_dir:
        return
    if Path(copy_to).resolve() == Path(config.output_dir).resolve():
        yield (
            f"checkpoint.copy_to={copy_to} is output_dir itself. "
            "Set checkpoint.copy_to to a directory on another disk."
        )
