"""Processes on this machine, which here only pretend to train: what they print, how they end."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from data_pipeline.base.errors import ConfigError
from maxtrain.commands.launch import local
from maxtrain.commands.launch.plan import LaunchPlan
from maxtrain.config.schema import RunConfig

# Each process does what its word says.
PRETEND = """
import os, pathlib, signal, sys, time
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
index = int(os.environ.get("JAX_PROCESS_ID", "0"))
word = sys.argv[2].split(",")[index]
print("one of", os.environ.get("JAX_NUM_PROCESSES"), os.environ.get("A"), flush=True)
print("to stderr", end="", file=sys.stderr, flush=True)
pathlib.Path(os.environ["READY"], str(index)).touch()
if word == "asked":
    signal.sigwait([signal.SIGINT, signal.SIGTERM])
    word = "75"
if word == "hang":
    time.sleep(600)
if word == "slow":
    time.sleep(3)
    word = "0"
if word == "late":
    time.sleep(0.6)
    word = "75"
if word.startswith("s"):
    os.kill(os.getpid(), int(word[1:]))
sys.exit(int(word))
"""


def run(does: str, folder: Path, grace: float = 60.0) -> int:
    """The exit code of processes that do this; each leaves a file in the folder when it is up."""
    program = (sys.executable, "-c", PRETEND)
    plan = LaunchPlan(RunConfig(), "train", [does], program)
    return local.run_local(plan, len(does.split(",")), {"A": "b", "READY": str(folder)}, grace)


def test_each_line_says_which_process_it_is_of(capsys, tmp_path):
    assert run("0,0", tmp_path) == 0
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == ["[0] one of 2 b", "[1] one of 2 b"]
    assert sorted(err.splitlines()) == ["[0] to stderr", "[1] to stderr"]


@pytest.mark.every_dose
@pytest.mark.long
@pytest.mark.parametrize(
    ("does", "code"),
    [("0,65", 65), ("hang,78", 78), ("75,s9", 137), ("late,70", 70), ("75,75", 75)],
)
def test_one_that_fails_ends_the_others_and_its_code_counts(
    does, code, capsys, monkeypatch, tmp_path
):
    """75 alone may only say that another one is lost."""
    monkeypatch.setattr(local, "SETTLE", 1.0)
    begin = time.monotonic()
    assert run(does, tmp_path) == code
    assert time.monotonic() - begin < 60
    assert "launch: process 1 ended with" in capsys.readouterr().err


@pytest.mark.every_dose
@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize(
    ("grace", "does", "code"), [(60, "asked,asked", 75), (1, "asked,hang", 75)]
)
def test_ctrl_c_is_handed_on(number, grace, does, code, monkeypatch, tmp_path):
    """Each process gets the signal once, as it does at the end of a terminal; one that does not end
    in time is killed."""

    def press() -> None:
        end = time.monotonic() + 60
        while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < end:
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    monkeypatch.setattr(local, "SETTLE", 2.0)
    # Tests that nohup started ignore the end of their terminal, and so would the job.
    before = signal.signal(number, signal.default_int_handler)
    try:
        threading.Thread(target=press).start()
        begin = time.monotonic()
        assert run(does, tmp_path, grace) == code
        assert time.monotonic() - begin < 60
        assert signal.getsignal(number) == signal.default_int_handler
    finally:
        signal.signal(number, before)


@pytest.mark.long
@pytest.mark.processes
def test_a_closed_terminal_ends_a_job_unless_nohup_started_it(tmp_path):
    """The processes save in either case, and none of them lives on."""
    root = Path(__file__).parents[3]
    text = (
        "import sys; from pathlib import Path; from tests.commands.launch.test_local import run; "
        "sys.exit(run(sys.argv[1], Path(sys.argv[2])))"
    )
    for words, does, code in (([], "asked,asked", 75), (["nohup"], "slow,slow", 0)):
        folder = tmp_path / does
        folder.mkdir()
        controller, terminal = os.openpty()
        job = subprocess.Popen(
            ["setsid", "--ctty", "--wait", *words, sys.executable, "-c", text, does, str(folder)],
            cwd=root,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
        )
        os.close(terminal)
        end = time.monotonic() + 60
        while len(list(folder.iterdir())) < 2 and time.monotonic() < end:
            time.sleep(0.05)
        os.close(controller)
        assert job.wait(60) == code


def test_gpus_are_shared_and_a_tpu_is_not(tmp_path):
    for number in range(4):
        (tmp_path / f"nvidia{number}").touch()

    def shares(count: int, environment: dict[str, str], platform: str = "auto") -> list[str | None]:
        found = local.device_shares(count, environment, platform, str(tmp_path))
        return [share.get("CUDA_VISIBLE_DEVICES") for share in found]

    assert shares(2, {}) == ["0,1", "2,3"]
    assert shares(2, {"CUDA_VISIBLE_DEVICES": "5,7"}) == ["5", "7"]
    assert shares(1, {}) == [None]
    assert shares(2, {}, "cpu") == [None, None]
    with pytest.raises(ConfigError, match="Start one process for each GPU"):
        shares(3, {})
    (Path(tmp_path) / "accel0").touch()
    with pytest.raises(ConfigError, match="Use --processes 1"):
        shares(2, {})
