"""The text of `--help` and `--help SECTION`: default, meaning and type of each key, and what reads
it."""

import dataclasses
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from data_pipeline.base.errors import UsageError
from maxtrain.config.keys import Key, all_keys, describe, element, unknown
from maxtrain.config.schema import RunConfig
from maxtrain.config.unused_keys import readers_in_words
from maxtrain.config.words import show

# Columns where the output is no terminal, and the fewest for what a key means.
_USUAL_COLUMNS = 120
_LEAST_COLUMNS = 24


def help_text(prog: str, section: str | None, configs: Iterable[str]) -> str:
    """Return the text of `--help [section]` of the command `prog` with these config files. A
    section may be inside another, as `model.lora` is, and may be a key. UsageError: there is no
    such section or key.
    """
    sections = {
        field.name: field.metadata["help"]
        for field in dataclasses.fields(RunConfig)
        if dataclasses.is_dataclass(field.type)
    }
    if section is not None:
        below = (f"{section}.", f"{section}[")
        rows = [key for key in all_keys() if key.path == section or key.path.startswith(below)]
        if len(rows) == 1 and rows[0].path == section:
            return _table(rows)
        if rows:
            return f"{section}: {_help_of(section)}\n{_table(rows)}"
        raise UsageError(f"--help {section}: {unknown(section)} Sections: {', '.join(sections)}.")
    width = max(map(len, sections)) + 2
    listed = "\n".join(f"  {name:{width}}{text}" for name, text in sections.items())
    return f"""usage
  {prog} config=NAME|FILE [KEY=VALUE ...]
  {prog} config=NAME --print-config       the resolved config as YAML, which config= takes too
  {prog} config=NAME model=MODEL          the shape of a released model, by its name; or of a
                 directory of Hugging Face, or of a run, with its weights
  {prog} --help [SECTION]

configs
  {"  ".join(configs)}

keys    values: 1e-3  1e6  10_000  true  null  a,b;  NAME in a key is a name of your own
        data.sources.NAME=null leaves out one that the config has
{_table([key for key in all_keys() if "." not in key.path])}

sections
{listed}"""


def _help_of(path: str) -> str:
    """The line of help of a section, or of the list or dict that it is in."""
    text = ""
    kind: Any = RunConfig
    for part in path.split("."):
        if not dataclasses.is_dataclass(kind):
            # A name of the user's.
            kind = element(kind)
            continue
        name = part.partition("[")[0]
        field = next(field for field in dataclasses.fields(kind) if field.name == name)
        text = field.metadata["help"]
        kind = field.type
    return text


def _table(rows: Sequence[Key]) -> str:
    """`key=default  meaning (type)`, the second column wrapped to the terminal's width."""
    heads = [_head(key) for key in rows]
    indent = max(map(len, heads)) + 2
    columns = shutil.get_terminal_size((_USUAL_COLUMNS, 24)).columns
    lines = []
    for key, head in zip(rows, heads):
        line = textwrap.fill(
            _meaning(key),
            max(columns, indent + _LEAST_COLUMNS),
            initial_indent=f"{head:{indent}}",
            subsequent_indent=" " * indent,
        )
        lines.append(line)
    return "\n".join(lines)


def _head(key: Key) -> str:
    if "NAME" in key.path and key.default is None:
        return f"  {key.path}="
    return f"  {key.path}={show(key.default)}"


def _meaning(key: Key) -> str:
    """Describe a key: its help, its type, and the settings with which it is used."""
    details = describe(key.kind)
    if key.used_by:
        details = f"{details}; only with {readers_in_words(key.used_by)}"
    return f"{key.help} ({details})"
