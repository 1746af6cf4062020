"""What `maxtrain plan` is asked for: the config, the run's folder if one is named, and a step to
look at. Without jax.

maxtrain plan config=NAME key=value ...
maxtrain plan RUN --step 37 key=value ...
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from data_pipeline.errors import UsageError, UserError
from maxtrain.config import RunConfig, from_command_line
from maxtrain.models.families.directory import model_of

_ROWS = 8
_USAGE = """also
  {prog} RUN [KEY=VALUE ...]              the plan of a run, by its folder
  {prog} RUN|config=NAME --step N         what step N reads or read: rows, documents, targets, the beginning of the text
  {prog} ... --step N --rows 64           of so many rows (default: {rows})
"""


class PlanOptions(NamedTuple):
    """A command line of `maxtrain plan`."""

    config: RunConfig  # that of RUN is its last launch's
    overrides: tuple[str, ...]  # of it
    run: Path | None  # None: the folder that the config names, if it is there
    step: int | None  # counted from 1; None: the whole plan
    rows: int


def read_options(argv: Sequence[str], prog: str) -> PlanOptions:
    """The options of a command line; problems are printed without a traceback and end the process,
    as does --help."""
    try:
        given, words = _take_options(argv)
        run = _take_run(words)
    except UserError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    if "--help" in words or "-h" in words:
        print(_USAGE.format(prog=prog, rows=_ROWS))
    config = from_command_line(
        [f"config={run / 'config.yaml'}", *words] if run else words, prog, model_of
    )
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
            what = (
                "the number of a step, counted from 1" if name == "--step" else "a number of rows"
            )
            raise UsageError(f"{name}={text} must be {what}. Use for example {name} 100.")
        given[name] = int(text)
    if "--rows" in given and "--step" not in given:
        raise UsageError(
            "--rows belongs to --step: it says how many rows of that step are shown. Give --step N, too."
        )
    return given, words


def _take_run(words: list[str]) -> Path | None:
    """Takes the folder of a run out of the words. UsageError: there are two, or it is none."""
    if "--help" in words or "-h" in words:  # the word after it is a section
        return None
    folders = [word for word in words if "=" not in word and not word.startswith("-")]
    if not folders:
        return None
    first = folders[0]
    configs = [word for word in words if word.startswith("config=")]
    if len(folders) > 1 or configs:
        both = f"{first!r} and {(folders[1:] + configs)[0]!r}"
        raise UsageError(
            f"{both}: a plan is of one run. Name its folder, or give config=NAME; settings are key=value."
        )
    run = Path(first).expanduser()
    if not (run / "config.yaml").is_file():
        mend = f"Name the folder of a run, such as runs/quickstart, or write config={first}"
        raise UsageError(f"RUN={first}: there is no {run / 'config.yaml'}. {mend}.")
    words.remove(first)
    return run
