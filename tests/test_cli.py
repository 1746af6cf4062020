"""The console script: verbs reach their jobs, help is fast, mistakes are named."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import maxtrain
from maxtrain.cli import VERBS, main

RUN = """
import sys
from pathlib import Path
from maxtrain.cli import main
try:
    code = main()
except SystemExit as stop:
    code = stop.code
assert "jax" not in sys.modules
sys.exit(code)
"""


def run(*argv):
    return subprocess.run([sys.executable, "-c", RUN, *argv], capture_output=True, text=True)


@pytest.mark.parametrize("argv", [(), ("--help",), ("-h",), ("help",)])
def test_help_lists_the_verbs(argv, capsys):
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert all(f"  {verb}" in out for verb in VERBS) and "`maxtrain VERB --help`" in out


@pytest.mark.every_dose
@pytest.mark.long
@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--help"], "maxtrain VERB"),
        (["help", "train"], "config=NAME"),
        (["prepare", "--help"], "--tokenizer"),
        (["train", "--help", "model"], "model.num_layers"),
        (["launch", "--help"], "gke-tpu"),
        (["launch", "slurm", "--help"], "--spare-nodes"),
    ],
)
def test_help_needs_no_jax(argv, part):
    result = run(*argv)
    assert (result.returncode, result.stderr) == (0, "") and part in result.stdout


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (
            ["trian", "config=quickstart"],
            64,
            "maxtrain: 'trian' is not a verb. Did you mean train?",
        ),
        (["brew"], 64, "Use one of prepare, plan, train, "),
        (["prepare"], 64, "--help"),
        (["train"], 64, "Add config=NAME"),
        (["train", "config=quickstart", "stepz=3"], 78, "steps"),
        (["generate"], 64, "name what generates: either RUN or DIR"),
        (["export"], 64, "required: RUN, OUT"),
        (["exprot", "RUN"], 64, "Did you mean export?"),
    ],
)
def test_mistakes_are_named_with_their_exit_code(argv, code, message, capsys):
    try:
        found = main(argv)
    except SystemExit as stop:
        found = stop.code
    assert found == code and message in capsys.readouterr().err


def test_version(capsys):
    assert main(["--version"]) == 0 and capsys.readouterr().out == f"{maxtrain.__version__}\n"


@pytest.mark.parametrize(
    "argv",
    [["--help"], ["prepare", "--help"], ["train", "--help"], ["status", "--help"]],
)
def test_output_that_nobody_reads_ends_without_a_word(argv, monkeypatch, capfd):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as nobody:
        monkeypatch.setattr(sys, "stdout", nobody)
        try:
            code = main(argv)
        except SystemExit as stop:
            code = stop.code
    assert code == 141
    assert capfd.readouterr().err == ""


def test_the_package_is_the_command(tmp_path):
    command = [sys.executable, "-m", "maxtrain"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
    version = subprocess.run([*command, "--version"], check=True, **options)
    assert version.stdout.strip() == maxtrain.__version__
    unknown = subprocess.run([*command, "trian"], check=False, **options)
    assert unknown.returncode == 64 and "Did you mean train?" in unknown.stderr


HUB = "Nobody/No-Model-0.5B"


@pytest.mark.every_dose
@pytest.mark.long
@pytest.mark.parametrize(
    "argv",
    [
        ["generate", HUB, "--prompt", "a"],
        ["generate", "--hf", HUB, "--prompt", "a"],
        ["score", HUB, "--text", "a"],
        ["evaluate", HUB],
        ["serve", HUB],
        ["export", HUB, "out"],
        ["import", HUB, "runs/a"],
        ["teach", HUB, "data"],
        ["plan", "config=quickstart", f"model={HUB}"],
    ],
    ids=lambda argv: "-".join(argv[:2]),
)
def test_a_name_of_the_hub_in_place_of_a_directory(argv, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    try:
        code = main(argv)
    except SystemExit as stop:
        code = stop.code
    said = capsys.readouterr().err
    assert code not in (0, 70) and f"hf download {HUB} --local-dir " in said
