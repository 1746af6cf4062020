"""Properties of the whole models of every family: documents of one row do not see each other,
layers are the same as a loop and unrolled, and steps resume from a checkpoint as if never
stopped."""

import dataclasses

import pytest

from benchmarks.families import (
    PARITY,
    packed_against_separate,
    scan_against_unrolled,
    unlike_after_resuming,
)
from maxtrain.config.schema import RoutingConfig
from maxtrain.config.sections.model import FULL_ATTENTION, SLIDING_ATTENTION
from maxtrain.models.families.directory import read_config
from tests.support.shared import PARITY_CASES

# One of each kind whose programs compile in two or three seconds: rotary, windows, learned positions.
ATTENTIONS = ("llama3", "mistral", "gpt2")
# Layers that take turns.
STACKS = ("gemma2",)
# Runs of models with experts are resumed in tests/runs/test_expert_runs.py.
RESUMED = ("llama3", "gemma3")
# Cases that differ from others in what matters elsewhere.
ALIKE = ("llama_tied_mha", "qwen3_moe_unnormalised")


@pytest.fixture
def config(case):
    """The config of a case, for programs that compile in a few seconds."""
    found = read_config(PARITY / case)
    # The plain products of experts compile twice as fast; test_moe.py holds the others to them.
    found = dataclasses.replace(found, routing=RoutingConfig(kernel="eager"))
    # Two kinds of layers that take turns, where six layers would take three times as long.
    if found.family == "gemma3":
        found = dataclasses.replace(found, layer_types=(SLIDING_ATTENTION, FULL_ATTENTION))
    return found


def every(first, others):
    """All cases; those not among the first are marked, those that are like another as slow."""
    found = []
    for case in PARITY_CASES:
        marks = others
        if case in first:
            marks = ()
        elif case in ALIKE:
            marks = pytest.mark.slow
        found.append(pytest.param(case, marks=marks))
    return found


@pytest.mark.every_dose
@pytest.mark.long
@pytest.mark.parametrize("case", every(ATTENTIONS, pytest.mark.long))
def test_packed_documents_are_as_if_each_were_alone(config):
    found = packed_against_separate(config)
    assert found.logits <= 1e-5
    assert found.gradients <= 1e-5, found.where


@pytest.mark.long
@pytest.mark.parametrize("case", every(STACKS, pytest.mark.long))
def test_layers_in_a_loop_are_as_layers_one_after_another(config):
    found = scan_against_unrolled(config)
    assert found.logits <= 1e-5
    assert found.gradients <= 1e-5, found.where


@pytest.mark.long
@pytest.mark.usefixtures("this_process")
@pytest.mark.parametrize("case", every(RESUMED, pytest.mark.slow))
def test_steps_after_a_checkpoint_are_as_if_never_stopped(config, tmp_path):
    assert unlike_after_resuming(config, tmp_path) == []
