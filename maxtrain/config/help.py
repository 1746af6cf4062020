"""The text of `--help` and `--help SECTION`: key, type, default and one line for each key."""

import dataclasses
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence

from data_pipeline.errors import UsageError
from maxtrain.config.keys import Key, all_keys, describe, show, unknown
from maxtrain.config.schema import RunConfig


def help_text(prog: str, about: Sequence[str], configs: Iterable[str]) -> str:
    """What to print for `--help`.

    Args:
        prog: how the command is called.
        about: empty for the overview, or one section, key or `all`.
        configs: names of the config files there are.

    Raises:
        UsageError: no such section.
    """
    sections = {f.name: f.metadata["help"] for f in dataclasses.fields(RunConfig) if dataclasses.is_dataclass(f.type)}
    if about and about[0] != "all":
        rows = [k for k in all_keys() if k.path == about[0] or k.path.startswith((f"{about[0]}.", f"{about[0]}["))]
        if not rows:
            raise UsageError(f"--help {about[0]}: {unknown(about[0])} Sections: {', '.join(sections)}.")
        return f"{_bold(about[0])}  {sections.get(about[0], '')}\n{_table(rows)}"
    width = max(map(len, sections))
    listed = "\n".join(f"  {name:{width}}  {text}" for name, text in sections.items())
    return f"""{_bold("usage")}
  {prog} config=NAME|FILE [KEY=VALUE ...]
  {prog} config=NAME --print-config       the resolved config as YAML, which config= takes too
  {prog} --help [SECTION|KEY|all]

{_bold("configs")}
  {"  ".join(configs)}

{_bold("keys")}    values: 1e-3  1e6  10_000  true  null  10,12;  NAME in a key is a name of your own
{_table([k for k in all_keys() if about or "." not in k.path])}

{_bold("sections")}
{listed}"""


def _table(rows: Sequence[Key]) -> str:
    """Aligned columns; the help wraps in its own column, or stands below where that would be too narrow."""
    defaults = {(): "[]", "": '""', None: "" if all("NAME" in k.path for k in rows) else "null"}
    texts = [(k.path, describe(k.kind), defaults.get(k.default) or show(k.default), k.help) for k in rows]
    widths = [max(len(text) for text in column) for column in zip(*texts)]
    indent, columns = sum(widths[:3]) + 8, shutil.get_terminal_size((120, 24)).columns
    lines = []
    for path, kind, default, note in texts:
        wide = columns - indent >= 36
        first, *rest = textwrap.wrap(note, columns - indent if wide else max(columns - 6, 40))
        head = f"  {_bold(path)}{path[0:0]:{widths[0] - len(path) + 2}}{kind:{widths[1]}}  {default:{widths[2]}}"
        lines += [
            f"{head}  {first}" if wide else f"{head.rstrip()}\n      {first}",
            *(" " * (indent if wide else 6) + r for r in rest),
        ]
    return "\n".join(lines)


def _bold(text: str) -> str:
    return f"\033[1m{text}\033[0m" if sys.stdout.isatty() and "NO_COLOR" not in os.environ else text
