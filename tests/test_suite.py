"""The tests themselves: one that takes its process with it, or that stands still, ends them with a
message."""

import ast
import os
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


ALWAYS = [
    "tests/runs/test_train.py::test_two_processes_are_as_one",
    "tests/runs/test_train.py::test_a_run_leaves_records_curves_checkpoints_and_its_config",
]


class Item(NamedTuple):
    """What a dose is drawn by."""

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


def dry_run(target, *variables):
    """The commands of a target, which are not run."""
    command = ["make", "--dry-run", "-o", ".venv/.ready-dev", target, *variables]
    # A make around this one passes on what was set on its command line.
    around = ("MAKEFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "MFLAGS", "HYPOTHESIS", "DOSE")
    environment = {name: value for name, value in os.environ.items() if name not in around}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.replace("\\\n", " ")


def marked_long(node):
    """Whether a test, or what is assigned to `pytestmark`, says that it is left out by `make test`."""
    return re.search(r"pytest\.mark\.(long|slow|gpu)\b", ast.unparse(node)) is not None


def short_tests():
    """The tests that `make test` runs, read from the files: collecting them takes half a minute."""
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        tree = ast.parse(path.read_text())
        assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
        whole = [node for node in assigned if ast.unparse(node.targets[0]) == "pytestmark"]
        if any(marked_long(node) for node in whole):
            continue
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
                continue
            if not any(marked_long(decorator) for decorator in node.decorator_list):
                found.append(f"{path.relative_to(ROOT).as_posix()}::{node.name}")
    return found


def test_make_test_leaves_out_the_long_tests_and_nothing_else():
    assert (
        "-n 2 -m 'not long and not slow and not gpu' --quickly --hypothesis-profile quick"
        in dry_run("test")
    )
    assert "-n 2 -m 'not slow and not gpu' --hypothesis-profile thorough" in dry_run("test-all")
    assert "--hypothesis-profile quick" in dry_run("test-all", "HYPOTHESIS=quick")
    assert "--dose 1 " in dry_run("test-all")
    assert "--dose 3 " in dry_run("test-all", "DOSE=3")
    assert "--quickly" not in dry_run("test-all")
    run = (ROOT / ".ci" / "run").read_text()
    assert "make --keep-going lint test-all HYPOTHESIS=quick DOSE=12\n" in run


def test_make_test_visits_every_room():
    """And trains a run, and a job of two processes."""
    packages = set()
    for core in ("data_pipeline", "maxtrain"):
        for path in (ROOT / core).rglob("*.py"):
            packages.add("/".join(path.relative_to(ROOT).parts[:-1][:2]))
    assert len(packages) > 10
    tests = short_tests()
    for package in sorted(packages):
        if package in ("data_pipeline", "maxtrain"):
            beginning = f"tests/{package}/test_".replace("/maxtrain/", "/")
        else:
            beginning = f"tests/{package}/".replace("/maxtrain/", "/")
        assert any(test.startswith(beginning) for test in tests), (
            f"{package} has no test in {beginning}* that is not marked long: `make test` skips it"
        )
    assert [test for test in ALWAYS if test not in tests] == []


def test_files_that_come_first_exist():
    text = (ROOT / "tests" / "conftest.py").read_text()
    (listed,) = re.findall(r"^LONGEST = \((.*?)^\)", text, re.DOTALL | re.MULTILINE)
    names = re.findall(r'"([^"]+)"', listed)
    assert len(names) == len(set(names)) > 20
    assert [name for name in names if not (ROOT / "tests" / name).exists()] == []


COUNTED = """
from hypothesis import given, settings, strategies
calls = []
@settings(max_examples=200)
@given(strategies.integers())
def test_many(number): calls.append(number)
@settings(max_examples=5)
@given(strategies.integers())
def test_few(number): calls.append(number)
@given(strategies.integers())
def test_as_many_as_there_are(number): calls.append(number)
def test_count():
    with open("count", "w") as file: file.write(str(len(calls)))
"""


@pytest.mark.parametrize(("profile", "count"), [("quick", 55), ("thorough", 305)])
def test_make_test_takes_fewer_examples(tmp_path, profile, count):
    (tmp_path / "tests").mkdir()
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path / "tests")
    shutil.copytree(ROOT / "tests" / "support", tmp_path / "tests" / "support")
    (tmp_path / "tests" / "config").mkdir()
    (tmp_path / "tests" / "config" / "test_counted.py").write_text(COUNTED)
    options = ["-n", "0", "-p", "no:cacheprovider", "--hypothesis-profile", profile]
    command = [sys.executable, "-m", "pytest", *options]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    assert int((tmp_path / "count").read_text()) == count


@pytest.mark.parametrize(
    ("target", "program"),
    [
        ("test-gpu", "MAXTRAIN_TEST_PLATFORM=cuda timeout 1200 .venv-gpu/bin/python -m pytest"),
        ("bench-gpu", "timeout 1200 .venv-gpu/bin/python -m benchmarks.train_step"),
        ("check-gpu", "benchmarks/on_gpu.sh .venv-gpu/bin/python runs/gpu"),
    ],
)
def test_a_machine_with_a_gpu_gets_what_it_lacks_and_keeps_what_it_has(target, program):
    from_registry = dry_run(target, "GPU_PYTHON=/there/python")
    assert "/there/python -m venv --clear --system-site-packages .venv-gpu\n" in from_registry
    assert "--constraint .venv-gpu/present.txt --requirement .venv-gpu/needed.txt" in from_registry
    assert program in from_registry
    assert "--no-index" not in from_registry
    assert "--no-index --find-links /wheels " in dry_run(target, "WHEELS=/wheels")
    if target == "test-gpu":
        assert "-m gpu tests/ops " in from_registry


def test_what_is_checked_on_a_gpu_goes_on_after_a_failure_and_ends_with_it(tmp_path):
    """With a Python that fails in one module, and says what it is given."""
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
    found = []
    for path in (ROOT / "tests").rglob("test_*.py"):
        if re.search(r"^@pytest\.mark\.gpu$", path.read_text(), re.MULTILINE):
            found.append(path.relative_to(ROOT).as_posix())
    assert found
    assert all(path.startswith(tuple(folders)) for path in found)
