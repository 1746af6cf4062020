"""Every way in which a command can end, as its exit code and what it says."""

import io
import subprocess
import sys

import pytest

from data_pipeline.base.errors import ConfigError, TryAgainError, run_command


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (None, 0, ""),
        (SystemExit(0), 0, ""),
        (SystemExit(2), 64, ""),  # of argparse, which has printed the reason
        (
            ConfigError("a=1 must be 2. Set a=2."),
            78,
            "error: 1 problem in the config:\n  * a=1 must be 2. Set a=2.\n",
        ),
        (
            TryAgainError("stopped and saved. Run it again."),
            75,
            "stopped and saved. Run it again.\n",
        ),
        (
            KeyboardInterrupt(),
            75,
            "interrupted. Run the same command again: it goes on where it was.\n",
        ),
        (
            OSError("odd"),
            74,
            "error: odd. Free space or restore access, then run the same command again: it goes on where it was.\n",
        ),
        (
            PermissionError(13, "Permission denied", "a/b"),
            74,
            "error: a/b: Permission denied. Free space or restore access, then",
        ),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, BaseException) else "-",
)
def test_how_a_command_ends(error, code, message, capsys):
    def job():
        if error:
            raise error

    assert run_command(job) == code
    said = capsys.readouterr().err
    assert said.startswith(message) and bool(said) == bool(message)


def test_a_command_that_starts_anew_does_not_promise_to_go_on(capsys):
    def job():
        raise KeyboardInterrupt

    assert run_command(job, resumes=False) == 130
    assert capsys.readouterr().err == "interrupted. Run the same command again.\n"


INTERRUPTED = """
import sys
from data_pipeline.base.errors import run_command

begun = []

async def write():
    pass

def job():
    begun.append(write())
    raise KeyboardInterrupt

sys.exit(run_command(job, resumes=False))
"""


@pytest.mark.processes
def test_nothing_is_said_of_what_a_library_had_begun():
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True)
    assert done.returncode == 130
    assert done.stderr == "interrupted. Run the same command again.\n"


def test_a_bug_shows_where_it_is(capsys):
    assert run_command(lambda: 1 // 0) == 70
    assert (
        "ZeroDivisionError" in (text := capsys.readouterr().err)
        and "Traceback" in text
        and "error: " not in text
    )


def test_a_name_that_is_no_text_is_printed_all_the_same(monkeypatch):
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, "ascii"))
    assert run_command(lambda: print("out\udcff é", flush=True)) == 0
    assert printed.getvalue() == b"out\\udcff \\xe9\n"
