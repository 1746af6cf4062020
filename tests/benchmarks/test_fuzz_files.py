"""The fuzzer of files: hostile ones are read or refused, and what is wrong is found. It forks, so
it runs in a process that has no threads."""

import subprocess
import sys

import pytest

BROKEN = """
import sys
from benchmarks import fuzz_files

def fail(trial):
    raise KeyError(trial.kind)

fuzz_files.read = fail
sys.exit(fuzz_files.main(["--trials", "1", "--kinds", "config"]))
"""


def run(*arguments):
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, timeout=900
    )


@pytest.mark.long
@pytest.mark.parametrize("kinds", [["config", "tokenizer"], ["template", "chat", "preferences"]])
def test_mutated_files_are_read_or_refused(kinds):
    done = run("-m", "benchmarks.fuzz_files", "--trials", "12", "--kinds", *kinds)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "refused" in done.stdout and "found" not in done.stdout


@pytest.mark.long
def test_files_with_other_meanings_are_mostly_read():
    """transformers is an oracle where it is installed; here they must be read or refused."""
    kinds = ("tokenizer meaning", "config meaning", "template meaning")
    done = run("-m", "benchmarks.fuzz_files", "--trials", "30", "--seed", "5", "--kinds", *kinds)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = {line.split(maxsplit=1)[1]: int(line.split()[0]) for line in done.stdout.splitlines()}
    assert sum(counts.get(f"{kind} read", 0) for kind in kinds) >= 20
    assert not any("found" in name for name in counts)


@pytest.mark.long
def test_what_is_no_error_of_ours_is_found():
    done = run("-c", BROKEN)
    assert done.returncode == 1
    assert "KeyError" in done.stdout and "--seed 1 --first 0" in done.stdout
