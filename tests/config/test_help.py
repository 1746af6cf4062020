"""`--help`: complete, aligned, as wide as the terminal."""

import dataclasses
import re

import pytest

from data_pipeline.base.errors import UsageError
from maxtrain.config import keys
from maxtrain.config.help import help_text
from maxtrain.config.schema import RunConfig


def test_overview_has_usage_configs_root_keys_and_sections(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")  # narrower ones break lines elsewhere
    text = help_text("python -m maxtrain.train", None, ["quickstart", "llama3_8b"])
    assert "python -m maxtrain.train config=NAME" in text and "quickstart  llama3_8b" in text
    for word in (
        "steps=auto",
        "whole number | auto",
        "checkpoint_interval=1000",
        "optimizer",
        "how gradients become updates",
    ):
        assert word in text
    assert "optimizer.beta1" not in text


def test_overview_and_sections_have_every_key_once():
    sections = dict.fromkeys(
        key.path.partition(".")[0] if "." in key.path else None for key in keys.all_keys()
    )
    text = "\n".join(help_text("maxtrain", section, []) for section in sections)
    for key in keys.all_keys():
        assert len(re.findall(rf"^  {re.escape(key.path)}=", text, re.MULTILINE)) == 1


def test_a_section_is_aligned(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    first, *lines = help_text("maxtrain", "optimizer", []).splitlines()
    begins = [line for line in lines if line.strip().startswith("optimizer.")]
    rows = {line.split("=")[0].strip(): line for line in begins}
    assert first == "optimizer: how gradients become updates"
    assert set(rows) == {k.path for k in keys.all_keys() if k.path.startswith("optimizer.")}
    assert rows["optimizer.clip_norm"].index("clip the") == rows["optimizer.eps"].index("added to")
    assert re.fullmatch(
        r"  optimizer.beta2=0.95 +decay of the mean of squared gradients "
        r"\(number; only with optimizer.name=adamw, adam, lion or muon\)",
        rows["optimizer.beta2"],
    )


def test_a_section_in_a_section_and_a_key_have_help(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # narrower ones break lines elsewhere
    first, *lines = help_text("maxtrain", "model.lora", []).splitlines()
    assert first == "model.lora: low-rank adapters, which train in the place of weights"
    names = set(re.findall(r"^  (\S+?)=", "\n".join(lines), re.MULTILINE))
    assert names == {k.path for k in keys.all_keys() if k.path.startswith("model.lora.")}
    (line,) = help_text("maxtrain", "model.rope_theta", []).splitlines()
    assert line.endswith("(number; only with model.family other than gpt2)")
    for section in ("data.sources", "data.sources.NAME"):
        assert "data.sources.NAME.path=" in help_text("maxtrain", section, [])
    first, *lines = help_text("maxtrain", "schedule.pieces", []).splitlines()
    assert "  schedule.pieces[0].name=" in "\n".join(lines)
    assert help_text("maxtrain", "schedule.pieces[0]", []).splitlines()[0] == (
        first.replace("pieces:", "pieces[0]:")
    )


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_lines_fit_the_terminal(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = help_text("maxtrain", "mesh", []).splitlines()
    assert all(len(line) <= max(columns, 60) for line in lines)


def test_unknown_section_names_the_sections():
    with pytest.raises(
        UsageError,
        match=r"mesch is not a key. Did you mean mesh.*Sections: model, data, eval, .*optimizer, schedule, prec",
    ):
        help_text("maxtrain", "mesch", [])
    with pytest.raises(
        UsageError, match=r"per_device_batch_size is a key of MaxText. Here it is data.batch_size"
    ):
        help_text("maxtrain", "per_device_batch_size", [])


def test_names_of_sections_and_what_they_are_do_not_touch():
    for field in dataclasses.fields(RunConfig):
        if dataclasses.is_dataclass(field.type):
            line = rf"^  {field.name} +{re.escape(field.metadata['help'])}$"
            assert len(re.findall(line, help_text("maxtrain", None, []), re.MULTILINE)) == 1
