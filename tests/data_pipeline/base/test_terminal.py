"""Text from outside does not command a terminal."""

import os
import pty
import subprocess
import sys

import pytest

from data_pipeline.base.errors import DataError, run_command
from data_pipeline.base.terminal import visible

HOSTILE = "a\x1b]0;title\x07\x1b[2J\x9b31m\x7f\r\u202e\u2066\u200b\u00ad\ufeff\U000e0041b"
SHOWN = (
    r"a\x1b]0;title\x07\x1b[2J\x9b31m\x7f\x0d\u202e\u2066\u200b\xad\ufeff\U000e0041b"  # no control
)


def test_what_commands_a_terminal_or_hides_is_shown_escaped():
    assert visible(HOSTILE) == SHOWN
    assert visible("\ud800") == r"\ud800"


@pytest.mark.parametrize("text", ["", "line\n\tindented", "é 東 🙂 עברית ก็", "[red]markup[/]"])
def test_other_text_stays(text):
    assert visible(text) == text


def test_messages_of_errors_are_escaped_wherever_they_go(capsys):
    def fail():
        raise DataError(f"{HOSTILE}: is damaged.\nRestore it.")

    assert run_command(fail) == DataError.exit_code
    assert capsys.readouterr().err == f"error: {SHOWN}: is damaged.\nRestore it.\n"


def test_a_message_whose_line_can_not_be_encoded_is_no_traceback(capsys):
    def fail():
        raise DataError("name \udcff")

    assert run_command(fail) == DataError.exit_code
    assert capsys.readouterr().err == "error: name \\udcff\n"


PROGRAM = f"""
import sys
from data_pipeline.base.errors import run_command
job = lambda: (print({HOSTILE!r}), sys.stdout.writelines([{HOSTILE!r}]))
run_command(job)
"""


def test_a_pipe_gets_every_byte():
    out = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=True).stdout
    assert out.decode() == f"{HOSTILE}\n{HOSTILE}"


def test_a_terminal_gets_what_is_visible():
    ours, theirs = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=theirs, stdin=theirs) as child:
        os.close(theirs)
        found = b""
        # Linux ends the reading of a terminal that nobody has open with an error.
        try:
            while part := os.read(ours, 4096):
                found += part
        except OSError:
            pass
        assert child.wait(60) == 0
    os.close(ours)
    assert found.decode() == f"{SHOWN}\r\n{SHOWN}"
