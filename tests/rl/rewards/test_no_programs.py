"""Operations that the interpreter refuses while formulas are read."""

import collections
import importlib
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from maxtrain.rl.rewards.no_programs import ForbiddenOperationError, no_programs

ATTEMPTS = {
    "eval": lambda file: eval("1 + 1"),
    "exec": lambda file: exec("x = 1"),
    "compile": lambda file: compile("1", "<string>", "eval"),
    "compiled as a file": lambda file: exec(compile("x = 1", "<x>", "exec")),
    "system": lambda file: os.system(f"touch {file}"),
    "popen": lambda file: os.popen(f"touch {file}"),
    "subprocess": lambda file: subprocess.run(["touch", str(file)], check=True),
    "fork": lambda file: os.fork() or os._exit(0),
    "exec program": lambda file: os.execv("/bin/true", ["true"]),
    "spawn": lambda file: os.posix_spawn("/bin/true", ["true"], {}),
    "write": lambda file: file.write_text("x"),
    "append": lambda file: file.open("a").close(),
    "update": lambda file: file.open("r+").close(),
    "os.open": lambda file: os.open(file, os.O_WRONLY | os.O_CREAT),
    "temporary": lambda file: tempfile.TemporaryFile().close(),
    "remove": lambda file: os.remove(__file__ + ".not"),
    "socket": lambda file: socket.socket(),
}


@pytest.mark.parametrize("name", ATTEMPTS)
def test_programs_are_refused_only_within(tmp_path, name):
    file = tmp_path / "canary"
    with pytest.raises(ForbiddenOperationError), no_programs():
        ATTEMPTS[name](file)
    assert not file.exists()
    assert eval("1 + 1") == 2
    file.write_text("x")


def test_modules_are_still_imported_and_classes_made(tmp_path, monkeypatch):
    (tmp_path / "late_module.py").write_text(
        "import collections, dataclasses\n@dataclasses.dataclass\nclass Late:\n    value: int = 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with no_programs():
        late = importlib.import_module("late_module")
        assert late.Late().value == 3
        assert collections.namedtuple("Pair", "a b")(1, 2).b == 2
        assert Path(__file__).read_text()
    sys.modules.pop("late_module")


def test_it_may_be_nested_and_ends_with_the_outer_one():
    with no_programs():
        with no_programs():
            pass
        with pytest.raises(ForbiddenOperationError):
            eval("1")
    assert eval("1") == 1
