"""External text printed by rich is neither markup nor a command."""

import io

from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from data_pipeline.base.console import SafeConsole

HOSTILE = "[red]x[/] [link=http://a]y[/link] :boom: \x1b[2J\u202e"
SHOWN = r"[red]x[/] [link=http://a]y[/link] :boom: \x1b[2J\u202e"


def rendered(*things, terminal=False):
    file = io.StringIO()
    console = SafeConsole(file=file, width=200, force_terminal=terminal, color_system="standard")
    console.print(*things)
    return file.getvalue()


def test_text_is_neither_markup_nor_a_command():
    table = Table(HOSTILE)
    table.add_row(HOSTILE)
    for thing in (HOSTILE, Text(HOSTILE), Panel(HOSTILE), table):
        found = rendered(thing)
        assert SHOWN in found and "\x1b[2J" not in found and "\u202e" not in found


def test_styles_of_ours_stay():
    found = rendered(Text("bad \x1b[2J", style="red"), terminal=True)
    assert found == "\x1b[31mbad \\x1b[2J\x1b[0m\n"


def test_text_goes_byte_for_byte_into_files_and_escaped_onto_terminals():
    file = io.StringIO()
    SafeConsole(file=file).write_text(f"{HOSTILE}\x07\r\n", "bold")
    assert file.getvalue() == f"{HOSTILE}\x07\r\n"
    file = io.StringIO()
    SafeConsole(file=file, force_terminal=True, color_system=None).write_text(f"{HOSTILE}\x07\r\n")
    assert file.getvalue() == SHOWN + r"\x07\x0d" + "\n"


def test_joiners_of_scripts_and_emoji_stay():
    text = "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645 \U0001f469\u200d\U0001f680"
    assert rendered(text) == f"{text}\n"
