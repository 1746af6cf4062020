"""Shared helpers of the tests of checks across keys: a config with overrides, and its problems."""

import re

import pytest

from data_pipeline.base.errors import ConfigError
from maxtrain.config import load_config

FIXED = {
    "steps": "300",
    "eval_interval": "100",
    "data.batch_size": "16",
    "schedule.warmup_steps": "30",
}


def load(*overrides: str):
    """The quickstart with the numbers above, which may be tuned there, and these overrides."""
    given = dict(override.split("=", 1) for override in overrides)
    return load_config(
        ["config=quickstart", *(f"{key}={value}" for key, value in (FIXED | given).items())]
    )


def problems(*overrides: str) -> list[str]:
    """The problems of `load`."""
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    assert caught.value.exit_code == 78
    return caught.value.problems


def pieces(text: str) -> list[str]:
    """The overrides that choose these pieces."""
    return ["schedule.name=pieces", f"schedule.pieces=[{text}]"]


def check_problem(overrides: list[str], value: str, advice: str) -> None:
    """Check that these overrides have one problem, whose text has the value and the advice."""
    (problem,) = problems(*overrides)
    assert value in problem, problem
    assert re.search(r"\. (Set|Add|Give) ", problem), f"no advice: {problem}"
    assert advice in problem.partition(". ")[2] or advice in problem, problem


def check_accepted(overrides: list[str]) -> None:
    """These overrides have no problem."""
    assert load(*overrides).run_name == "quickstart"
