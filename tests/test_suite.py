"""The tests themselves: one that takes its process with it, or that stands still, ends them with a
message."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FINE = "def test_one(): pass\ndef test_two(): pass\n"
DIES = """
import os, signal
def test_before(): pass
def test_dies(): os.kill(os.getpid(), signal.SIGKILL)
def test_after(): pass
"""
STANDS_STILL = """
import threading
def test_stands_still(): threading.Event().wait()
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("last", "said"),
    [
        (DIES, ["crashed while running 'tests/test_3.py::test_dies'"]),
        (
            STANDS_STILL,
            [
                "crashed while running 'tests/test_3.py::test_stands_still'",
                "line 3 in test_stands_still",
            ],
        ),
    ],
    ids=["dies", "stands still"],
)
def test_a_worker_that_ends_early_ends_the_tests_with_a_message(tmp_path, last, said):
    """With this project's own options, in the last file, when the other worker has been told that
    there is no more to do."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "tests").mkdir()
    for number, content in enumerate([FINE, FINE, FINE, last]):
        (tmp_path / "tests" / f"test_{number}.py").write_text(content)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "2",
        "-p",
        "no:cacheprovider",
        "-o",
        "faulthandler_timeout=2",
    ]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=700)
    assert result.returncode == 1, result.stdout + result.stderr
    assert all(text in result.stdout + result.stderr for text in said), (
        result.stdout + result.stderr
    )
    assert "1 failed" in result.stdout
