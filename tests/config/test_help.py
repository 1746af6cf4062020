"""`--help`: complete, aligned, coloured for terminals only."""

import re
import sys

import pytest

from data_pipeline.errors import UsageError
from maxtrain.config import keys
from maxtrain.config.help import help_text


def test_overview_has_usage_configs_root_keys_and_sections():
    text = help_text("python -m maxtrain.train", [], ["quickstart", "llama3_8b"])
    assert "python -m maxtrain.train config=NAME" in text and "quickstart  llama3_8b" in text
    for word in ("steps", "whole number | auto", "checkpoint_interval", "optimizer", "AdamW and its schedule"):
        assert word in text
    assert "optimizer.beta1" not in text


def test_all_has_every_key_once():
    text = help_text("maxtrain", ["all"], [])
    for key in keys.all_keys():
        assert len(re.findall(rf"^  {re.escape(key.path)} ", text, re.MULTILINE)) == 1


def test_a_section_is_aligned(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    lines = help_text("maxtrain", ["optimizer"], []).splitlines()
    rows = {line.split()[0]: line for line in lines[1:]}
    assert set(rows) == {k.path for k in keys.all_keys() if k.path.startswith("optimizer.")}
    assert rows["optimizer.clip_norm"].index("number | null") == rows["optimizer.schedule"].index("cosine | wsd")
    assert re.search(r"number +0\.95 +decay of the mean of squared gradients", rows["optimizer.beta2"])


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_lines_fit_the_terminal(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    helps = [line for line in help_text("maxtrain", ["mesh"], []).splitlines() if line.startswith(" " * 6)]
    assert helps and all(len(line) <= max(columns, 46) for line in helps)


def test_one_key_and_one_named_entry():
    assert "whole number" in help_text("maxtrain", ["data.batch_size"], [])
    assert "data.sources.NAME.epochs" in help_text("maxtrain", ["data.sources"], [])
    assert "data.stages[0].until" in help_text("maxtrain", ["data.stages"], [])


def test_unknown_section_names_the_sections():
    with pytest.raises(UsageError, match=r"mesch.*Sections: model, data, eval, optimizer, precision, mesh"):
        help_text("maxtrain", ["mesch"], [])
    with pytest.raises(UsageError, match=r"per_device_batch_size is a key of MaxText. Here it is data.batch_size"):
        help_text("maxtrain", ["per_device_batch_size"], [])


def test_colour_on_a_terminal_only(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\033" not in help_text("maxtrain", [], [])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    coloured = help_text("maxtrain", ["mesh"], [])
    assert "\033[1m" in coloured
    monkeypatch.setenv("NO_COLOR", "1")
    assert help_text("maxtrain", ["mesh"], []) == re.sub(r"\033\[\d*m", "", coloured)
