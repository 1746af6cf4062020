"""Ctrl-C of commands that begin anew."""

import signal
import subprocess
import sys
import time

import pytest

JOBS = {
    # Between steps of Python: the command cleans up itself.
    "python": "print('ready', flush=True); time.sleep(600)",
    # One step of a library that lasts for minutes.
    "library": """
    threading.Timer(0.5, lambda: print('ready', flush=True)).start()
    hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)""",
    # The same, and another thread of it goes on writing until it is almost over.
    "writer": """
    def write(end=time.monotonic() + 2.7):
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                directory.mkdir(exist_ok=True)
                (directory / "more").touch()
    threading.Thread(target=write, daemon=True).start()
    threading.Timer(0.5, lambda: print('ready', flush=True)).start()
    hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)""",
    # A program of its own takes it, as a server does: that decides.
    "handler": """
    signal.signal(signal.SIGINT, lambda *_: None)
    print('ready', flush=True)
    time.sleep(3)
    raise SystemExit(0)""",
}
SCRIPT = """
import contextlib, hashlib, pathlib, signal, sys, threading, time
from data_pipeline.base.errors import run_command
from data_pipeline.base.interrupts import unfinished

directory = pathlib.Path(sys.argv[1])
signal.signal(signal.SIGINT, signal.default_int_handler)

def job():
    directory.mkdir()
    (directory / "part").touch()
    with unfinished(directory):
        try:
            {job}
        finally:
            (directory / "part").unlink(missing_ok=True)
            directory.rmdir()

sys.exit(run_command(job, resumes=False))
"""


@pytest.mark.every_dose
@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("kind", JOBS)
def test_it_ends_in_time_and_leaves_nothing(kind, tmp_path):
    script = SCRIPT.replace("{job}", JOBS[kind].replace("\n", "\n        "))
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "hidden")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout and child.stdout.readline() == "ready\n"
        begin = time.monotonic()
        child.send_signal(signal.SIGINT)
        _, told = child.communicate(timeout=60)
        seconds = time.monotonic() - begin
    finally:
        child.kill()
    assert list(tmp_path.iterdir()) == []
    if kind == "handler":
        assert (child.returncode, told) == (0, "")
        return
    assert (child.returncode, told) == (130, "interrupted. Run the same command again.\n")
    if kind in ("library", "writer"):
        assert seconds > 1, "the command has time for its own end"


@pytest.mark.processes
def test_a_command_that_is_still_imported_ends_at_once(tmp_path):
    (tmp_path / "slow_job.py").write_text(
        "import time\nprint('ready', flush=True)\ntime.sleep(600)\n"
    )
    code = (
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"sys.path.append({str(tmp_path)!r})\n"
        "sys.argv = ['maxtrain', 'status', 'runs/one']\n"
        "from maxtrain import cli\n"
        "cli.JOBS['status'] = 'slow_job'\n"
        "cli.main()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout and child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGINT)
        _, told = child.communicate(timeout=60)
    finally:
        child.kill()
    assert (child.returncode, told) == (130, "interrupted. Run the same command again.\n")
