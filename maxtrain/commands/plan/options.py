"""Options of `maxtrain plan`: a config or a run's folder, and a step to look at; no jax.

maxtrain plan config=NAME key=value ...
maxtrain plan RUN --step 37 key=value ...
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from data_pipeline.base.errors import UsageError, UserError
from maxtrain.config import RunConfig, from_command_line
from maxtrain.models.known import MODELS
from maxtrain.storage.reading import readable
from maxtrain.trainer.run_dir import runs_beside, why_no_run

_ROWS = 8
_USAGE = """also
  {prog} RUN [KEY=VALUE ...]              the plan of a run, by its folder
  {prog} RUN|config=NAME --step N         what step N reads or read: rows, documents, targets, \
the beginning of the text
  {prog} ... --step N --rows 64           its first 64 rows (default: {rows})
"""


class PlanOptions(NamedTuple):
    """A command line of `maxtrain plan`."""

    # Of RUN, that of its last launch.
    config: RunConfig
    # The settings that change it.
    overrides: tuple[str, ...]
    # None: the folder that the config names, if it is there.
    run: Path | None
    # Counted from 1; None: the whole plan.
    step: int | None
    rows: int


def read_options(argv: Sequence[str], prog: str) -> PlanOptions:
    """The options of a command line.

    Problems are printed without a traceback and end the process, as does --help.
    """
    try:
        given, words = _take_options(argv)
        run = _take_run(words)
    except UserError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    if "--help" in words or "-h" in words:
        print(_USAGE.format(prog=prog, rows=_ROWS))
    settings = words
    if run:
        settings = [f"config={run / 'config.yaml'}", *words]
    config = from_command_line(settings, prog, MODELS)
    overrides = tuple(word for word in words if not word.startswith("config="))
    return PlanOptions(config, overrides, run, given.get("--step"), given.get("--rows", _ROWS))


def _take_options(argv: Sequence[str]) -> tuple[dict[str, int], list[str]]:
    """The values of --step and --rows, and the other words. UsageError: one is no number."""
    given: dict[str, int] = {}
    words: list[str] = []
    left = list(argv)
    while left:
        name, equals, text = left.pop(0).partition("=")
        if name not in ("--step", "--rows"):
            words.append(name + equals + text)
            continue
        if not equals and left:
            text = left.pop(0)
        if name in given:
            raise UsageError(f"{name} is given twice. Keep one of them.")
        if not re.fullmatch(r"[1-9]\d{0,17}", text):
            what = "a number of rows"
            if name == "--step":
                what = "the number of a step, counted from 1"
            raise UsageError(f"{name}={text} must be {what}. Use for example {name} 100.")
        given[name] = int(text)
    if "--rows" in given and "--step" not in given:
        raise UsageError(
            "--rows belongs to --step: it says how many rows of that step are shown. "
            "Give --step N, too."
        )
    return given, words


def _take_run(words: list[str]) -> Path | None:
    """Takes the folder of a run out of the words. UsageError: there are two, or it is none."""
    # The word after --help is a section of the config.
    if "--help" in words or "-h" in words:
        return None
    folders = [word for word in words if "=" not in word and not word.startswith("-")]
    if not folders:
        return None
    first = folders[0]
    configs = [word for word in words if word.startswith("config=")]
    if len(folders) > 1 or configs:
        other = (folders[1:] + configs)[0]
        fix = "Name its folder, or give config=NAME; settings are key=value"
        raise UsageError(f"{first!r} and {other!r}: a plan shows one run. {fix}.")
    run = readable(first)
    if not (run / "config.yaml").is_file():
        raise UsageError(
            f"RUN={first}: {why_no_run(run)}. Name the folder of a run, such as "
            f"{runs_beside(run)}, or write config={first}."
        )
    words.remove(first)
    return run
