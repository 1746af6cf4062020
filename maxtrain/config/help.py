"""The text of `--help` and `--help SECTION`: default, meaning and type of each key."""

import dataclasses
import shutil
import textwrap
from collections.abc import Iterable, Sequence

from data_pipeline.errors import UsageError
from maxtrain.config.keys import Key, all_keys, describe, show, unknown
from maxtrain.config.schema import RunConfig


def help_text(prog: str, section: str | None, configs: Iterable[str]) -> str:
    """What to print for `--help [section]` of the command `prog` with these config files;
    UsageError: no such section."""
    sections = {
        f.name: f.metadata["help"]
        for f in dataclasses.fields(RunConfig)
        if dataclasses.is_dataclass(f.type)
    }
    if section in sections:
        rows = [key for key in all_keys() if key.path.startswith(f"{section}.")]
        return f"{section}: {sections[section]}\n{_table(rows)}"
    if section is not None:
        raise UsageError(f"--help {section}: {unknown(section)} Sections: {', '.join(sections)}.")
    width = max(map(len, sections)) + 2
    listed = "\n".join(f"  {name:{width}}{text}" for name, text in sections.items())
    return f"""usage
  {prog} config=NAME|FILE [KEY=VALUE ...]
  {prog} config=NAME --print-config       the resolved config as YAML, which config= takes too
  {prog} --help [SECTION]

configs
  {"  ".join(configs)}

keys    values: 1e-3  1e6  10_000  true  null  a,b;  NAME in a key is a name of your own
        data.sources.NAME=null leaves out one that the config has
{_table([key for key in all_keys() if "." not in key.path])}

sections
{listed}"""


def _table(rows: Sequence[Key]) -> str:
    """`key=default  meaning (type)`, the second column wrapped to the terminal's width."""
    heads = [
        f"  {key.path}={'' if 'NAME' in key.path and key.default is None else show(key.default)}"
        for key in rows
    ]
    indent = max(map(len, heads)) + 2
    width = max(shutil.get_terminal_size((120, 24)).columns, indent + 24)
    return "\n".join(
        textwrap.fill(
            f"{key.help} ({describe(key.kind)})",
            width,
            initial_indent=f"{head:{indent}}",
            subsequent_indent=" " * indent,
        )
        for key, head in zip(rows, heads)
    )
