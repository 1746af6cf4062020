"""Commands of documents, run as a person would run them: each in a process of its own.

Starting Python and importing jax is most of what a short command costs. So a server imports all of
it once, and a command is a fork of it; see `multiprocessing`'s forkserver. What a command does with
its arguments, its files, its exit code and its output is the same.
"""

import multiprocessing
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SECONDS = 300
# Programs of documents, and the module that each of them is.
_PROGRAMS = {"maxtrain": "maxtrain.cli"}
_PRELOADED = [
    "data_pipeline.prepare",
    "maxtrain.commands.checkpoint",
    "maxtrain.commands.compare",
    "maxtrain.commands.evaluate.command",
    "maxtrain.commands.export.command",
    "maxtrain.commands.generate",
    "maxtrain.commands.probe.command",
    "maxtrain.commands.replay",
    "maxtrain.commands.plan.command",
    "maxtrain.commands.status",
    "maxtrain.commands.supervise",
    "maxtrain.trainer.loop",
]


class Output(NamedTuple):
    """The output of a command, and its exit."""

    stdout: str
    stderr: str
    code: int

    @property
    def all(self) -> str:
        return self.stdout + self.stderr


def blocks(text: str, language: str) -> list[str]:
    """The blocks of code of a document, without their fences; they may be indented."""
    return re.findall(rf"^[ ]*```{language}\n(.*?)^[ ]*```", text, re.DOTALL | re.MULTILINE)


def commands(text: str) -> list[str]:
    """The commands of all blocks of bash, a line each, with the comments that follow them."""
    lines = []
    for block in blocks(text, "bash"):
        joined = re.sub(r"\s*\\\n\s*", " ", block)
        lines += [line.strip() for line in joined.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def run(command: str, folder: Path, columns: int = 200, code: int = 0) -> Output:
    """Runs a command in a folder; it has to end with this exit code."""
    environment = os.environ | {
        "PATH": _path_with_programs(folder),
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "COLUMNS": str(columns),
        # Models of documents are tiny: compiling them is most of what is left.
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
    }
    words = shlex.split(command, comments=True)
    module = _module_of(words)
    if module is None:
        done = _run_by_shell(command, folder, environment)
    else:
        name, arguments = module
        done = _run_forked(name, arguments, folder, environment)
    assert done.code == code, f"{command}\nended with {done.code}\n{done.stdout}\n{done.stderr}"
    return done


def _module_of(words: list[str]) -> tuple[str, list[str]] | None:
    """The module that these words run, and its arguments; None: it is a matter of the shell."""
    if words[0] in _PROGRAMS:
        return _PROGRAMS[words[0]], words[1:]
    if words[:2] == ["python", "-m"]:
        return words[2], words[3:]
    return None


def _path_with_programs(folder: Path) -> str:
    """Return a PATH with `maxtrain` and `python` of this interpreter, also for programs that
    commands start."""
    programs = folder / ".programs"
    programs.mkdir(exist_ok=True)
    for name, words in {"maxtrain": "-m maxtrain.cli ", "python": ""}.items():
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {words}"$@"\n')
        program.chmod(0o755)
    return f"{programs}{os.pathsep}{os.environ['PATH']}"


def _run_by_shell(command: str, folder: Path, environment: Mapping[str, str]) -> Output:
    result = subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    return Output(result.stdout, result.stderr, result.returncode)


def _run_forked(
    module: str, arguments: list[str], folder: Path, environment: Mapping[str, str]
) -> Output:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    stdout = folder / ".stdout"
    stderr = folder / ".stderr"
    process = context.Process(
        target=_run_module,
        args=(module, arguments, folder, environment, stdout, stderr),
    )
    process.start()
    process.join(SECONDS)
    assert process.exitcode is not None, f"{module} {arguments} hangs"
    return Output(stdout.read_text(), stderr.read_text(), process.exitcode)


def _run_module(
    module: str,
    arguments: list[str],
    folder: Path,
    environment: Mapping[str, str],
    stdout: Path,
    stderr: Path,
) -> None:
    """Run `python -m module arguments` in the fork."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for stream, path in ((1, stdout), (2, stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    sys.argv = [module, *arguments]
    # It was imported already, and is run once more as the main module.
    sys.modules.pop(module, None)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
