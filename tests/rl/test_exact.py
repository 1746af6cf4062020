"""Determinism: with determinism=full, the sampler's log-probabilities are those of training bit for
bit, and its tokens those that training draws."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import create_autospec

import jax
import numpy as np
import pytest

from benchmarks.additions import task
from benchmarks.families import PARITY
from data_pipeline.config import DataConfig
from data_pipeline.loader.loader import TrainingData
from data_pipeline.prepare import command as prepare
from maxtrain.config import load_config
from maxtrain.config.rollouts import require_settings
from maxtrain.config.schema import (
    GrpoConfig,
    MeshConfig,
    OptimizerConfig,
    PrecisionConfig,
    RoutingConfig,
    RunConfig,
)
from maxtrain.inference.generation import Generation
from maxtrain.models.families.directory import read_config
from maxtrain.objectives.objective import Batch
from maxtrain.observe.metrics import Stopwatch, read_metrics
from maxtrain.parallel.hardware import compiler_options
from maxtrain.rl.batches import RolloutBatches
from maxtrain.rl.completions import complete
from maxtrain.rl.prompts import Prompt
from maxtrain.rl.rollout import Rollout
from maxtrain.rl.sampler import Sampler
from maxtrain.train_step.state import TrainState
from maxtrain.train_step.step import gradients
from maxtrain.train_step.trainable import models_from
from maxtrain.trainer.job import make_parts
from maxtrain.trainer.loop import main

STEPS = 4


@pytest.fixture(scope="module")
def config(tmp_path_factory, tiny_run) -> Path:
    """A config file of runs whose sampler is exact."""
    folder = tmp_path_factory.mktemp("exact")
    task.write_prompts(folder / "prompts.jsonl")
    prompts = ["--prompts", str(folder / "prompts.jsonl"), "--workers", "1"]
    assert prepare.main([str(folder / "prompts"), *prompts]) == 0
    return tiny_run(
        folder,
        texts=1,
        steps=STEPS,
        determinism="full",
        objective="grpo",
        precision={"compute": "float32"},
        optimizer={"learning_rate": 1e-2, "accumulation": 2},
        schedule={"warmup_steps": 0},
        data={
            "sources": {"text": {"path": str(folder / "prompts"), "epochs": None}},
            "seq_length": 32,
            "batch_size": 16,
            "packing": "pad",
        },
        grpo={
            "rewards": ["length(max_tokens=6)"],
            "num_generations": 2,
            "max_completion_length": 6,
            "num_iterations": 2,
        },
    )


@pytest.mark.parametrize(
    "objective",
    [pytest.param("grpo", marks=pytest.mark.long), pytest.param("ppo", marks=pytest.mark.slow)],
)
@pytest.mark.usefixtures("this_process")
def test_there_is_no_gap_between_sampler_and_training(config, objective):
    overrides = [f"run_name={objective}", f"objective={objective}"]
    if objective == "ppo":
        overrides += ["model.value=true", "ppo.kl_coef=0"]
    assert main(load_config([f"config={config}", *overrides])) == 0
    lines = [
        record
        for record in read_metrics(config.parent / "runs" / objective)
        if record["kind"] == "train"
    ]
    assert [line["sampler_gap"] for line in lines] == [0.0] * STEPS
    assert [line["ratio"] == 1.0 for line in lines] == [True, False] * (STEPS // 2)
    for line in lines[::2]:
        assert line["clipped_low"] == line["clipped_high"] == 0.0
        assert line["sampling_passes"] >= 1 and line["tokens_replaced"] >= 0


PROMPTS = [Prompt(ids, "", {}) for ids in ((1, 2, 3), (4,), (5, 6), (7, 8, 9, 10))]
LONGEST = 6
GROUP = 2
# Enough of the vocabulary for some completions to end.
STOP_IDS = tuple(range(100, 130))


class Small(NamedTuple):
    """A sampler and a trainer, without a run."""

    state: TrainState
    batches: RolloutBatches
    sampler: Sampler
    step: Callable[..., Any]

    def sampled(self) -> Rollout:
        rollout = self.sampler.sampled(PROMPTS, 0, 0, self.state, len(PROMPTS) * GROUP)
        return self.sampler.with_scores(rollout, self.state)


@pytest.fixture(scope="module")
def sampling(case: str, compute: str, axes: dict[str, int]) -> Iterator[Small]:
    """A model of a family, inside its mesh."""
    model = dataclasses.replace(read_config(PARITY / case), routing=RoutingConfig(kernel="eager"))
    config = RunConfig(
        determinism="full",
        objective="grpo",
        model=model,
        mesh=MeshConfig(**({"fsdp": 1} | axes)),
        data=DataConfig(seq_length=32, batch_size=2 * len(PROMPTS), packing="pad"),
        optimizer=OptimizerConfig(accumulation=2),
        precision=PrecisionConfig(compute=compute),
        grpo=GrpoConfig(num_generations=GROUP, max_completion_length=LONGEST),
    )
    devices = jax.devices()[: math.prod(axes.values())]
    parts = make_parts(config, devices, 1, 0)
    data = create_autospec(TrainingData, instance=True)
    data.shapes.return_value = [(2 * len(PROMPTS), 32)]
    data.plan = SimpleNamespace(num_steps=1, spans=[SimpleNamespace(step=0)])
    with jax.set_mesh(parts.mesh):
        state = parts.initial_state()
        batches = RolloutBatches(config, data, parts.mesh)
        settings = require_settings(config)
        arguments = (settings, 7, STOP_IDS, batches, parts.mesh, parts.graphdefs, Stopwatch())

        def step(state: TrainState, batch: Batch) -> Any:
            models = models_from(parts.graphdefs, state.frozen, state.buffers)
            scales = parts.objective.scales(batch)
            return gradients(models, state.trainable, batch, parts.objective, scales, 2)

        compiled = jax.jit(step, compiler_options=compiler_options("cpu"))
        yield Small(state, batches, Sampler(*arguments), compiled)


def all_wrong(*arguments, **options) -> list[Generation]:
    """Return the completions of the engine with every id replaced by another."""
    made = complete(*arguments, **options)
    for generation in made:
        generation.ids = [(token + 1) % 160 for token in generation.ids_with_end()]
        generation.ended_by = None
    return made


CASES = [
    pytest.param("llama3", "float32", {}, marks=pytest.mark.long),
    *(
        pytest.param(case, compute, axes, marks=pytest.mark.slow)
        for case, compute, axes in (
            ("llama3", "bfloat16", {}),
            ("llama3", "float32", {"data": 2, "tensor": 2}),
            ("mistral", "float32", {}),
            ("mixtral", "float32", {}),
            ("deepseek_v3", "float32", {}),
        )
    ),
]


@pytest.mark.parametrize(("case", "compute", "axes"), CASES, scope="module")
def test_the_step_computes_what_was_sampled(sampling):
    """Bit for bit, in two micro-batches, and whatever the engine had proposed: where all of it is
    wrong, each token is drawn by a pass of its own."""
    rollout = sampling.sampled()
    assert rollout.truncated.any() and not rollout.truncated.all()
    np.testing.assert_array_equal(rollout.sampled, rollout.old)
    batch, _ = sampling.batches.batch(0, rollout._replace(about={"numbers": {}}), False)
    result, _ = sampling.step(sampling.state, batch)
    for name, expected in (("sampler_gap", 0.0), ("ratio", 1.0), ("clipped_high", 0.0)):
        assert float(result.sums[name].mean()) == expected
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("maxtrain.rl.sampler.complete", all_wrong)
        again = sampling.sampled()
    assert again.content() == rollout.content()
    assert again.about["sampling_passes"] == rollout.lengths.max() + 1
    assert again.about["tokens_replaced"] == rollout.lengths.sum()
