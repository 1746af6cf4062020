"""The fuzzer of files: hostile ones are read or refused, and what is wrong is found."""

import pytest

from benchmarks import fuzz_files


def test_mutated_files_are_read_or_refused(capsys):
    assert fuzz_files.main(["--trials", "12", "--kinds", "config", "tokenizer"]) == 0
    out = capsys.readouterr().out
    assert "config" in out and "found" not in out


@pytest.mark.long
def test_mutated_templates_and_records_are_read_or_refused(capsys):
    kinds = ["template", "chat", "preferences"]
    assert fuzz_files.main(["--trials", "6", "--kinds", *kinds]) == 0
    assert "found" not in capsys.readouterr().out


def test_what_is_no_error_of_ours_is_found(monkeypatch, capsys):
    def fail(trial):
        raise KeyError(trial.kind)

    monkeypatch.setattr(fuzz_files, "read", fail)
    assert fuzz_files.main(["--trials", "1", "--kinds", "config"]) == 1
    out = capsys.readouterr().out
    assert "KeyError" in out and "--seed 1 --first 0" in out
