"""The content of `pip install` of the built package: the packages, the configs, descriptions of
GPUs, and everything that the documents tell people to run; no tests, benchmarks or caches."""

import os
import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from maxtrain.config.shipped import PREPARED_BY
from tests.support.commands import commands

ROOT = Path(__file__).parents[1]
# CONTRIBUTING.md is for people who have the repository.
DOCUMENTS = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel"]
    result = subprocess.run(
        [*command, "--directory", folder], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    [wheel] = folder.glob("maxtrain-*.whl")
    return wheel


@pytest.fixture(scope="module")
def names(wheel) -> set[str]:
    """The files of the wheel, without those that describe it."""
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def test_the_wheel_holds_the_packages_and_the_configs(names):
    sources = [
        path.relative_to(ROOT).as_posix()
        for top in ["maxtrain", "data_pipeline"]
        for path in ROOT.glob(f"{top}/**/*.py")
    ]
    configs = [f"maxtrain/configs/{path.name}" for path in ROOT.glob("configs/*.py")]
    cards = [f"maxtrain/parallel/gpu_targets/{card}.txtpb" for card in ("h100", "h200", "b200")]
    assert names == {*sources, *configs, *cards}


def files_of_command(command: str) -> list[list[str]]:
    """Return the needs of a command from the package: for each need, the files of which one
    suffices."""
    needed = []
    for module in re.findall(r"\bpython3? -m ([\w.]+)", command):
        path = module.replace(".", "/")
        needed.append([f"{path}.py", f"{path}/__main__.py"])
    for config in re.findall(r"\bconfig=([\w.-]+)", command):
        # One with a suffix is a file of the reader's own, which a block of the document shows.
        if Path(config).suffix not in (".py", ".yaml"):
            needed.append([f"maxtrain/configs/{config}.py"])
    return needed


def missing_files(command: str, names: set[str]) -> list[str]:
    """The first of the files of each need that the wheel does not meet."""
    return [files[0] for files in files_of_command(command) if not names.intersection(files)]


def test_what_documents_tell_people_to_run_is_in_the_wheel(names):
    told = {
        (document.name, command)
        for document in DOCUMENTS
        for command in commands(document.read_text())
    }
    told |= {("shipped.py", command) for command in PREPARED_BY.values()}
    assert sum(bool(files_of_command(command)) for _, command in told) > 50
    missing = {}
    for name, command in told:
        found = missing_files(command, names)
        if found:
            missing[name, command] = found
    assert not missing
    text = "".join(document.read_text() for document in DOCUMENTS)
    named = set(re.findall(r"\bconfigs/(\w+\.py)\b", text))
    assert named and {f"maxtrain/configs/{name}" for name in named} <= names


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        ("python -m benchmarks.chaos --kills 5", ["benchmarks/chaos.py"]),
        ("maxtrain train config=nothing steps=3", ["maxtrain/configs/nothing.py"]),
        ("python -m data_pipeline.prepare data/x", []),
        ("maxtrain train config=small.py", []),
    ],
)
def test_a_command_that_needs_more_than_the_wheel_is_seen(names, command, missing):
    assert missing_files(command, names) == missing


@pytest.mark.long
@pytest.mark.processes
def test_the_worked_example_runs_from_the_installed_wheel_alone(wheel, tmp_path):
    """The commands of the document, with smaller numbers, in a folder that is not the repository."""
    site = tmp_path / "site"
    install = [
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        site,
        wheel,
    ]
    subprocess.run([sys.executable, *install], check=True)
    (tmp_path / "work").mkdir()

    def run(command: str) -> str:
        words = shlex.split(command)
        program = [sys.executable]
        if words[0] == "maxtrain":
            program += ["-m", "maxtrain.cli"]
        # Without the folder of the command: the installed package is all that there is to import.
        environment = os.environ | {"PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}
        result = subprocess.run(
            [*program, *words[1:]],
            cwd=tmp_path / "work",
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
        return result.stdout

    where = run("python -c 'import maxtrain; print(maxtrain.__file__)'")
    assert Path(where.strip()).is_relative_to(site)
    text = (ROOT / "docs" / "posttraining.md").read_text()
    section = text.split("## A run from end to end")[1].split("\n## ")[0]
    for command in commands(section)[:4]:
        if command.startswith("python"):
            command += " --worked 60 --results 60"
        elif command.startswith("maxtrain train"):
            command += " steps=2 schedule.warmup_steps=1 eval_interval=0 checkpoint_interval=2"
            command += " model.num_layers=1 model.embed_dim=32 model.mlp_dim=64"
        run(command)
    assert (tmp_path / "work/runs/sft_word_problems/checkpoints/00000002/commit.json").exists()
