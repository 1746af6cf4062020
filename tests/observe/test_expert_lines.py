"""The lines of a launch about experts."""

import dataclasses

import pytest

from maxtrain.config.schema import ModelConfig, MoeConfig, RoutingConfig
from maxtrain.observe.expert_lines import counting_note, expert_summary, expert_warning

MIXTRAL = ModelConfig(family="mixtral", moe=MoeConfig(16, 2))


def routed(**changes):
    return dataclasses.replace(MIXTRAL, routing=RoutingConfig(**changes))


def test_a_launch_says_how_the_products_of_experts_are_made():
    assert expert_summary(MIXTRAL) == (
        "experts: 16 in a layer, 2 for each token, none is dropped; model.routing.kernel=blocks"
    )
    line = expert_summary(routed(capacity_factor=1.25))
    assert "an expert takes 1.25 equal shares of a row, and the rest is dropped" in line
    assert line.endswith("model.routing.kernel=blocks, whose products are of one size then")
    assert expert_summary(ModelConfig()) == ""


@pytest.mark.parametrize(
    ("kernel", "platform", "is_slow"),
    [
        ("blocks", "cpu", False),
        ("ragged", "cpu", True),
        ("ragged", "gpu", True),
        ("ragged", "tpu", False),
        ("tokamax", "tpu", False),
        ("tokamax", "gpu", False),
        ("eager", "tpu", True),
    ],
)
def test_a_launch_warns_of_products_with_every_expert(kernel, platform, is_slow):
    line = expert_warning(routed(kernel=kernel), platform)
    assert bool(line) == is_slow
    if is_slow:
        assert f"model.routing.kernel={kernel} multiplies every token with every expert" in line
        assert f"platform {platform}, 16 products in the place of 2" in line
        assert "Set model.routing.kernel=blocks" in line


def test_a_launch_says_that_a_step_has_one_pass_more():
    routed_globally = routed(balance_scope="global")
    line = counting_note(routed_globally, 4)
    assert "balance_scope=global with optimizer.accumulation=4: each step first counts" in line
    assert counting_note(routed_globally, 1) == counting_note(MIXTRAL, 4) == ""
    assert counting_note(routed(balance_scope="global", balance=0.0), 4) == ""


def test_no_warning_where_the_kernel_makes_no_products():
    assert expert_warning(routed(kernel="ragged", capacity_factor=1.0), "cpu") == ""
    assert expert_warning(ModelConfig(routing=RoutingConfig(kernel="ragged")), "cpu") == ""
