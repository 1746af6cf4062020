"""The tests themselves: one that takes its process with it, or that stands still, ends them with a
message."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import pytest

from benchmarks import gpu_environment
from tests.conftest import SHARE, beyond_the_dose

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


@pytest.mark.long
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
    """The worker ends in the last file, with this project's own options, when the other worker
    knows that there is no more to do."""
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


class Item(NamedTuple):
    """The properties of a test by which a dose is drawn."""

    nodeid: str
    marks: tuple[str, ...] = ("long",)

    def get_closest_marker(self, name):
        return name in self.marks or None


def test_a_dose_is_a_share_of_long_tests_and_their_parameters_and_changes_with_the_commit():
    many = [Item(f"a.py::many[{number}]") for number in range(7)]
    two = [Item("a.py::two[x]"), Item("a.py::two[y]")]
    plain = [
        Item(f"{file}.py::plain_{number}") for file in "abc" for number in range(2 * SHARE - 2)
    ]
    plain += [Item(f"c.py::more_{number}") for number in range(4)]
    long = [*many, *two, *plain]
    short = [Item(f"a.py::short[{number}]", ()) for number in range(9)]
    # -m leaves them out or not.
    slow = [Item(f"b.py::slow_{number}", ("long", "slow")) for number in range(5)]
    always = [Item(f"b.py::always_{number}", ("long", "every_dose")) for number in range(5)]
    items = [*long, *short, *slow, *always]
    drawn = []
    for commit in range(20 * SHARE):
        left_out = beyond_the_dose(items, 3, b"%d" % commit)
        assert set(left_out) == set(beyond_the_dose(items[::-1], 3, b"%d" % commit))
        taken = [item for item in items if item not in left_out]
        assert {*short, *slow, *always} <= set(taken)
        names = {item.nodeid.split("[")[0] for item in taken if item in long}
        # Of the tests of each file two, but for those at its ends.
        for file in "abc":
            assert 1 <= sum(name.startswith(file) for name in names) <= 3
        assert len(names) == 6
        assert len(set(many) & set(taken)) in (0, 3) and len(set(two) & set(taken)) in (0, 1)
        drawn += taken
    assert set(drawn) == set(items), "each is in some dose"


def test_files_that_come_first_exist():
    text = (ROOT / "tests" / "conftest.py").read_text()
    (listed,) = re.findall(r"^LONGEST = \((.*?)^\)", text, re.DOTALL | re.MULTILINE)
    names = re.findall(r'"([^"]+)"', listed)
    assert len(names) == len(set(names)) > 20
    assert [name for name in names if not (ROOT / "tests" / name).exists()] == []


def test_what_is_checked_on_a_gpu_goes_on_after_a_failure_and_ends_with_it(tmp_path):
    """The Python of the test fails in one module, and prints its arguments."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "given $*"\ncase "$*" in *attention*) exit 3;; esac\n')
    python.chmod(0o755)
    script = ROOT / "benchmarks" / "on_gpu.sh"

    def checked(*parts: str) -> subprocess.CompletedProcess:
        command = [script, python, tmp_path / "said", *parts]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)

    ended = checked("attention", "repeats", "train_step")
    assert ended.returncode == 1
    assert ended.stderr.startswith("failed: attention; ")
    assert "=== attention: exit code 3 " in ended.stdout
    assert "=== train_step: exit code 0 " in ended.stdout
    said = (tmp_path / "said" / "repeats.log").read_text().splitlines()
    assert [line.split()[2] for line in said] == [
        "data_pipeline.prepare",
        "maxtrain.train",
        "maxtrain.cli",
    ]
    assert checked("train_step").returncode == 0
    assert checked("train_step", "nothing").returncode == 64
    assert checked().stdout.count("=== ") == 7


def test_the_environment_of_a_gpu_has_the_packages_of_the_machine(tmp_path):
    packages = tmp_path / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    packages.mkdir(parents=True)
    assert gpu_environment.main([str(tmp_path)]) == 0
    needed = (tmp_path / "needed.txt").read_text().splitlines()
    names = {re.split("[>=]", line)[0] for line in needed}
    assert {"jax", "grain", "ml-collections", "pytest", "pytest-xdist", "beartype"} <= names
    assert not {"ray", "ruff", "moto[s3]"} & names
    present = (tmp_path / "present.txt").read_text().splitlines()
    assert f"jax=={jax.__version__}" in present
    (listed,) = packages.glob("*.pth")
    assert Path(jax.__file__).parents[1] == Path(listed.read_text().strip())


def test_every_file_that_needs_a_gpu_is_below_what_make_test_gpu_collects():
    folders = re.findall(r"^GPU_TESTS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    folders = folders[0].split()
    assert all((ROOT / folder).is_dir() for folder in folders)
    assert " ".join(folders) in (ROOT / "benchmarks" / "on_gpu.sh").read_text()
    found = []
    for path in (ROOT / "tests").rglob("test_*.py"):
        if re.search(r"^@pytest\.mark\.gpu$", path.read_text(), re.MULTILINE):
            found.append(path.relative_to(ROOT).as_posix())
    assert found
    assert all(path.startswith(tuple(folders)) for path in found)
