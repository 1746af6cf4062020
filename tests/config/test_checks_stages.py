"""Layers in stages: what is refused says which numbers are not."""

import dataclasses
import functools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.base.errors import ConfigError
from maxtrain.config import RunConfig, fit_to_devices
from maxtrain.config.across.pipeline import alike_layers, pipeline_problems
from maxtrain.config.schema import PipelineConfig
from maxtrain.models.families import FAMILIES
from maxtrain.objectives.objective import POLICY
from maxtrain.trainer.job import objective_of
from tests.config.checking import check_problem, load

# Layers that are all alike, that follow others, and that take turns.
KINDS = ("llama", "deepseek_v3", "gemma2", "gemma3")
DENSE = 1
PAIRS = ("data.packing=bins",)
UNPAIRED = ("objective=dpo", *PAIRS, "dpo.loss_type=apo_zero_unpaired")
# 2 to 8 stages in up to three slices divide it.
VOCABULARY = 5040


@functools.cache
def base() -> RunConfig:
    return load("mesh.fsdp=1")


def staged(
    family, layers, stage, rounds=1, vocabulary=VOCABULARY, init_from=None, slow=1
) -> RunConfig:
    """Return a config with this number of layers and stages; not checked."""
    config = base()
    model = dataclasses.replace(
        config.model,
        family=family,
        num_layers=layers,
        vocab_size=vocabulary,
        moe=dataclasses.replace(config.model.moe, dense_layers=DENSE),
        pipeline=PipelineConfig(rounds=rounds),
    )
    return dataclasses.replace(
        config,
        model=model,
        mesh=dataclasses.replace(config.mesh, stage=stage, dcn_stage=slow),
        checkpoint=dataclasses.replace(config.checkpoint, init_from=init_from),
    )


def found_in(config) -> list[str]:
    return list(pipeline_problems(config, {}, 0))


@pytest.mark.parametrize(
    ("config", "rule", "advice"),
    [
        (
            staged("llama", 4, 3),
            "mesh.stage=3 must divide model.num_layers=4.",
            "Set mesh.stage to 1, 2 or 4, or model.num_layers to 3 or 6.",
        ),
        (
            staged("llama", 4, 8),
            "mesh.stage=8 must divide model.num_layers=4.",
            "Set mesh.stage to 1, 2 or 4, or model.num_layers to 8.",
        ),
        (
            staged("llama", 4, 2, 3),
            "mesh.stage=2 times model.pipeline.rounds=3 must divide model.num_layers=4.",
            "Set model.pipeline.rounds=1 and mesh.stage to 1, 2 or 4, or model.pipeline.rounds "
            "to 1 or 2, or model.num_layers to 6.",
        ),
        (
            staged("llama", 8, 8, 2),
            "mesh.stage=8 times model.pipeline.rounds=2 must divide model.num_layers=8.",
            "Set mesh.stage to 2 or 4, or model.pipeline.rounds to 1, or model.num_layers to 16.",
        ),
        (
            staged("deepseek_v3", 8, 2),
            "mesh.stage=2 must divide 7, the layers of model.num_layers=8 that come after "
            "model.moe.dense_layers=1.",
            "Set mesh.stage to 1 or 7, or model.num_layers to 7 or 9.",
        ),
        (
            staged("gemma2", 26, 2),
            "mesh.stage=2 must divide 13, the groups of 2 layers of model.family=gemma2 in "
            "model.num_layers=26.",
            "Set mesh.stage to 1, or model.num_layers to 24 or 28.",
        ),
        (
            staged("gemma3", 20, 2),
            "mesh.stage=2 must divide 3, the groups of 6 layers of model.family=gemma3 in "
            "model.num_layers=20.",
            "Set mesh.stage to 1 or 3, or model.num_layers to 14 or 26.",
        ),
        # Stages in several slices.
        (
            staged("llama", 6, 2, slow=2),
            "mesh.dcn_stage=2 times mesh.stage=2 must divide model.num_layers=6.",
            "Set mesh.stage to 1 or 3, or mesh.dcn_stage to 1 or 3, or model.num_layers to 4 or 8.",
        ),
        (
            staged("llama", 3, 2, slow=2),
            "mesh.dcn_stage=2 times mesh.stage=2 must divide model.num_layers=3.",
            "Set mesh.dcn_stage=1 and mesh.stage to 1 or 3, or model.num_layers to 4.",
        ),
        (
            staged("llama", 8, 1, rounds=3, slow=2),
            "mesh.dcn_stage=2 times model.pipeline.rounds=3 must divide model.num_layers=8.",
            "Set model.pipeline.rounds=1 and mesh.stage to 1, 2 or 4, or model.pipeline.rounds=1 "
            "and mesh.dcn_stage to 1, 2, 4 or 8, or model.pipeline.rounds to 1, 2 or 4, or "
            "model.num_layers to 6 or 12.",
        ),
        # What divides the vocabulary, too.
        (
            staged("llama", 12, 8, vocabulary=16),
            "mesh.stage=8 must divide model.num_layers=12.",
            "Set mesh.stage to 1, 2 or 4, or model.num_layers to 8 or 16.",
        ),
        (
            staged("llama", 12, 3, vocabulary=16),
            "mesh.stage=3 must divide model.vocab_size=16",
            "Set mesh.stage to 1, 2 or 4.",
        ),
        # Weights have the layers that they have.
        (
            staged("llama", 4, 3, init_from="somewhere"),
            "mesh.stage=3 must divide model.num_layers=4.",
            "Set mesh.stage to 1, 2 or 4.",
        ),
        # No model has this number of layers.
        (
            staged("llama", 4, 1 << 14, vocabulary=1 << 15),
            f"mesh.stage={1 << 14} must divide model.num_layers=4.",
            "Set mesh.stage to 1, 2 or 4.",
        ),
    ],
)
def test_layers_that_stages_can_not_share(config, rule, advice):
    (problem,) = found_in(config)
    assert problem.startswith(rule)
    assert problem.endswith(f". {advice}")


def test_the_command_line_is_refused():
    check_problem(
        ["mesh.stage=3", "model.num_layers=4"],
        "mesh.stage=3 must divide model.num_layers=4",
        "Set mesh.stage to 1, 2 or 4, or model.num_layers to 3 or 6.",
    )


def test_stages_that_devices_decide_are_held_to_the_layers_too():
    config = staged("llama", 4, -1)
    assert fit_to_devices(config, 4).mesh.stage == 4
    with pytest.raises(ConfigError, match=r"mesh.stage=3 must divide model.num_layers=4\. Set"):
        fit_to_devices(config, 3)


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_that_are_alike_are_counted_as_models_have_them(family):
    for layers in range(1, 15):
        model = staged(family, layers, 1).model
        # Of those with latent attention, the size of a head has no default.
        model = dataclasses.replace(model, head_dim=model.latent.rope_dim + 64)
        stack = FAMILIES[family].spec(model).stack
        found = alike_layers(model)
        assert found.count == stack.repeats
        assert found.others == len(stack.prefix) + len(stack.rest)


@given(
    family=st.sampled_from(KINDS),
    layers=st.integers(1, 40),
    stage=st.integers(2, 8),
    rounds=st.integers(1, 4),
    slow=st.integers(1, 3),
)
def test_each_mend_is_one(family, layers, stage, rounds, slow):
    """Every value that a message gives is accepted, and there is one."""
    given = {"layers": layers, "stage": stage, "rounds": rounds, "slow": slow}
    names = {
        "model.num_layers": "layers",
        "mesh.stage": "stage",
        "mesh.dcn_stage": "slow",
        "model.pipeline.rounds": "rounds",
    }
    found = found_in(staged(family, **given))
    for problem in found:
        for advice in problem.partition(". Set ")[2].split(", or "):
            key, _, values = advice.rpartition(" to ")
            changed = dict(given)
            *others, key = key.split(" and ")
            for other in others:
                name, _, number = other.partition("=")
                changed[names[name]] = int(number)
            for number in re.findall(r"\d+", values):
                changed[names[key]] = int(number)
                assert found_in(staged(family, **changed)) == [], advice
    assert len(found) <= 1


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["objective=distill", "distill.teacher=DIR"],
        ["objective=distill", "distill.stored=NAME", "data.packing=pad"],
        ["objective=dpo", *PAIRS],
        ["objective=dpo", *PAIRS, "dpo.loss_type=simpo"],
        ["objective=dpo", *PAIRS, "dpo.loss_type=kto"],
        ["objective=dpo", *PAIRS, "dpo.reference_logprobs=stored"],
        [*UNPAIRED, "dpo.reference_logprobs=stored"],
        ["objective=reward", *PAIRS, "model.score=true", "observe.prompts=[]"],
    ],
    ids=" ".join,
)
def test_1f1b_refuses_objectives_of_several_models(words):
    """It accepts all others."""
    config = load("mesh.fsdp=1", "mesh.stage=2", *words)
    pipeline = PipelineConfig(schedule="1f1b")
    model = dataclasses.replace(config.model, pipeline=pipeline)
    found = found_in(dataclasses.replace(config, model=model))
    assert bool(found) == (objective_of(config).models != (POLICY,)), found
