"""Layers in stages: the same loss, gradient and records as on one device, however rows go
around."""

import dataclasses
import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.families import PARITY, repeated
from data_pipeline.base.errors import ConfigError
from data_pipeline.loader.packing import VALUE
from maxtrain.config import RunConfig, load_config
from maxtrain.config.across.pipeline import pipeline_problems
from maxtrain.config.schema import (
    DpoConfig,
    LatentConfig,
    MeshConfig,
    ModelConfig,
    MoeConfig,
    PipelineConfig,
    PrecisionConfig,
    RegularizationConfig,
    RoutingConfig,
)
from maxtrain.config.sections.mesh import axes_of
from maxtrain.models.families.directory import read_config
from maxtrain.models.pipeline import PipelineLayout, micro_batches_of
from maxtrain.objectives.dpo import dpo
from maxtrain.objectives.kto import kto
from maxtrain.objectives.next_token import next_token
from maxtrain.objectives.objective import POLICY, REFERENCE_SUM
from maxtrain.ops.micro_batches import micro_batches, whole_batch
from maxtrain.parallel.hardware import hardware_of
from maxtrain.parallel.mesh import make_mesh
from maxtrain.parallel.topologies import compiler_warnings
from maxtrain.train_step.optimizer import paths
from maxtrain.train_step.state import abstract_model, split_buffers
from maxtrain.train_step.step import gradients, row_keys
from maxtrain.train_step.trainable import models_from, split
from maxtrain.trainer.abstract_step import StepPrograms
from maxtrain.trainer.reference_model import FrozenModel

B = 8
T = 16


def config_of(case, **changes):
    """The config of a case with four repeats of its layers."""
    found = dataclasses.replace(read_config(PARITY / case), routing=RoutingConfig(kernel="eager"))
    return dataclasses.replace(found, **changes)


@functools.cache
def model_of(case, routing=None):
    changes = {}
    if routing is not None:
        changes["routing"] = routing
    return repeated(config_of(case, **changes), repeats=4)


def batch_of(vocab_size):
    """Rows of two documents and some padding."""
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, vocab_size, (B, T + 1), np.int32)
    lengths = rng.integers(3, T, B)
    columns = np.arange(T)
    segments = 1 + (columns >= lengths[:, None])
    segments[::3, -2:] = 0
    positions = np.where(segments == 2, columns - lengths[:, None], columns)
    return {
        "inputs": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segment_ids": segments.astype(np.int32),
        "positions": positions.astype(np.int32),
        "loss_mask": (segments > 0).astype(np.float32),
        "keys": row_keys(5, jnp.int32(2), B),
        "steps": np.full(B, 2, np.int32),
    }


def run(model, axes, objective, accumulation=1, trained="", arrays=None, **changes):
    """Loss, gradients by name, and all sums of one batch on a mesh.

    Args:
        trained: found in the paths of the parameters that train.
        arrays: of the batch, beside the usual ones.
    """
    config = dataclasses.replace(model.config, **changes)
    mesh_config = MeshConfig(**{"fsdp": 1} | axes)
    count = int(np.prod(list(axes_of(mesh_config).values())))
    mesh = make_mesh(mesh_config, jax.devices()[:count])
    graphdef, abstract = abstract_model(config, model.precision, mesh)
    values = dict(nnx.to_flat_state(nnx.state(model)))
    placed = {}
    for path, variable in nnx.to_flat_state(abstract):
        value = np.asarray(values[path].get_value())
        placed[path] = variable.replace(jax.device_put(value, variable.get_value().sharding))
    params, buffers = split_buffers(nnx.from_flat_state(placed))
    names = {path for path in paths(params) if not re.search(trained, path)}
    params, frozen = split(params, names)
    models = models_from({POLICY: graphdef}, {POLICY: frozen}, buffers)

    @jax.jit
    def compute(params, batch):
        scales = objective.scales(batch)
        return gradients(models, params, batch, objective, scales, accumulation)

    with jax.set_mesh(mesh):
        result, grads = compute(params, batch_of(config.vocab_size) | (arrays or {}))
    return jax.tree.map(np.asarray, (result, dict(nnx.to_flat_state(grads))))


def assert_same(found, expected):
    found_result, found_grads = found
    result, grads = expected
    np.testing.assert_allclose(found_result.loss, result.loss, rtol=1e-5)
    for name in ("sums", "of_layers", "observed"):
        ours = getattr(found_result, name)
        theirs = getattr(result, name)
        assert ours.keys() == theirs.keys()
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5), ours, theirs)
    for path, variable in grads.items():
        theirs = variable.get_value()
        ours = found_grads[path].get_value()
        scale = np.abs(theirs).max()
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * scale, err_msg=str(path))


PLAIN = next_token()
NOISY = next_token(
    regularization=RegularizationConfig(
        residual_dropout=0.1, stochastic_depth=0.2, embedding_dropout=0.1
    )
)
BALANCED = {
    scope: RoutingConfig(kernel="eager", balance=0.1, z_loss=0.01, balance_scope=scope)
    for scope in ("sequence", "global")
}
ROUNDS = PipelineConfig(rounds=2, micro_batches=4)
TURNS = PipelineConfig(schedule="1f1b")
# As many micro-batches as stages, fewer than these, and a single one.
FEW_TURNS = {count: PipelineConfig(micro_batches=count, schedule="1f1b") for count in (1, 2, 4)}


def by_name(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "axes", "options"),
    [
        ("llama3", {"stage": 4}, {}),
        ("llama3", {"stage": 2, "fsdp": 2, "tensor": 2}, {"accumulation": 2, "remat": "full"}),
        by_name("llama3", {"stage": 2}, {"pipeline": ROUNDS, "scan_layers": False}),
        by_name("llama3", {"stage": 2, "fsdp": 2, "context": 2}, {"attention": "ring"}),
        by_name("qwen3", {"stage": 2, "context": 2}, {"pipeline": PipelineConfig(2)}),
        by_name("gemma2", {"stage": 2, "data": 2}, {"pipeline": PipelineConfig(2)}),
        by_name("gpt_oss", {"stage": 2, "fsdp": 2}, {"remat": "dots"}),
        by_name("deepseek_v3", {"stage": 4}, {}),
        ("llama3", {"stage": 4}, {"pipeline": TURNS}),
        ("deepseek_v3", {"stage": 4}, {"pipeline": FEW_TURNS[2]}),
        by_name("llama3", {"stage": 4}, {"pipeline": FEW_TURNS[1], "scan_layers": False}),
        by_name("llama3", {"stage": 2}, {"pipeline": FEW_TURNS[1]}),
        by_name("llama3", {"stage": 4, "data": 2}, {"pipeline": FEW_TURNS[4]}),
        by_name(
            "llama3",
            {"stage": 2, "fsdp": 2, "tensor": 2},
            {"accumulation": 2, "remat": "full", "pipeline": TURNS},
        ),
        by_name(
            "llama3",
            {"stage": 2, "fsdp": 2, "context": 2},
            {"attention": "ring", "pipeline": TURNS},
        ),
        by_name("qwen3", {"stage": 2, "context": 2}, {"pipeline": TURNS}),
        by_name("gemma2", {"stage": 2, "data": 2}, {"pipeline": TURNS}),
        by_name("gpt_oss", {"stage": 2, "fsdp": 2}, {"remat": "dots", "pipeline": TURNS}),
    ],
)
def test_stages_find_what_one_device_finds(case, axes, options):
    model = model_of(case)
    assert_same(run(model, axes, PLAIN, **options), run(model, {}, PLAIN))


@pytest.mark.long
@pytest.mark.parametrize("pipeline", [ROUNDS, TURNS], ids=["rounds", "1f1b"])
def test_what_is_random_is_the_same_in_stages(pipeline):
    """It is drawn by the keys of rows and the numbers of layers, independent of the order of
    rows."""
    model = model_of("llama3")
    noisy = run(model, {}, NOISY)
    assert abs(noisy[0].loss - run(model, {}, PLAIN)[0].loss) > 1e-4
    assert_same(run(model, {"stage": 2, "fsdp": 2}, NOISY, pipeline=pipeline), noisy)


@pytest.mark.long
@pytest.mark.parametrize(
    ("scope", "accumulation", "pipeline"),
    [
        ("global", 1, PipelineConfig(2)),
        by_name("global", 2, PipelineConfig(2)),
        by_name("sequence", 1, PipelineConfig(2)),
        ("global", 1, TURNS),
        by_name("global", 2, FEW_TURNS[2]),
        by_name("sequence", 1, TURNS),
    ],
)
def test_losses_of_routers_are_those_of_whole_batches(scope, accumulation, pipeline):
    model = model_of("mixtral", BALANCED[scope])
    axes = {"stage": 2, "fsdp": 2}
    found = run(model, axes, PLAIN, accumulation, pipeline=pipeline)
    assert found[0].of_layers["expert_balance_loss"].total > 0
    assert_same(found, run(model, {}, PLAIN))


@pytest.mark.long
@pytest.mark.parametrize("trained", [r"\.mlp\.", "embedding|head"])
def test_1f1b_trains_what_trains(trained):
    """Layers without what is around them, and the other way round."""
    model = model_of("llama3")
    alone = run(model, {}, PLAIN, trained=trained)
    assert 0 < len(alone[1]) < 8
    assert_same(run(model, {"stage": 2}, PLAIN, trained=trained, pipeline=TURNS), alone)


def of_answers():
    """The results of a reference for documents, and their labels."""
    rng = np.random.default_rng(4)
    segments = batch_of(8)["segment_ids"]
    found = rng.uniform(-30, -20, (B, 3)).astype(np.float32)
    labels = rng.choice(np.float32([-1, 1]), (B, 3))
    return {
        REFERENCE_SUM: np.take_along_axis(found, segments, axis=1),
        VALUE: np.take_along_axis(labels, segments, axis=1),
    }


@pytest.mark.long
@pytest.mark.parametrize(("make", "loss"), [(dpo, "sigmoid"), by_name(kto, "apo_zero_unpaired")])
def test_1f1b_minimises_what_compares_with_a_stored_reference(make, loss):
    objective = make(DpoConfig(loss_type=loss, reference_logprobs="stored"))
    model = model_of("llama3")
    alone = run(model, {}, objective, arrays=of_answers())
    assert alone[0].loss > 0
    found = run(model, {"stage": 2}, objective, 2, arrays=of_answers(), pipeline=TURNS)
    assert_same(found, alone)


def builds(model, stage) -> bool:
    """Return True if parameters can be placed on this number of stages, and rows can go through
    them."""
    mesh = make_mesh(MeshConfig(fsdp=1, stage=stage), jax.devices()[:stage])
    rows = jax.ShapeDtypeStruct((stage, 8), jnp.int32)

    def hidden(params, rows):
        return nnx.merge(graphdef, params).hidden(rows, rows, rows)

    try:
        graphdef, params = abstract_model(model, PrecisionConfig(), mesh)
        with jax.set_mesh(mesh):
            jax.eval_shape(hidden, params, rows)
    except ConfigError as error:
        assert "dim 'layers'" in str(error)
        return False
    except AssertionError as error:
        assert "rounds of" in str(error)
        return False
    return True


@pytest.mark.long
@settings(max_examples=15, deadline=None)
@given(
    family=st.sampled_from(["llama", "gemma2", "gemma3", "deepseek_v3"]),
    layers=st.integers(1, 16),
    stage=st.integers(2, 4),
    rounds=st.integers(1, 3),
)
@example(family="gemma2", layers=9, stage=2, rounds=2)
@example(family="deepseek_v3", layers=7, stage=3, rounds=2)
@example(family="deepseek_v3", layers=8, stage=4, rounds=1)
@example(family="llama", layers=12, stage=4, rounds=3)
def test_a_config_is_accepted_exactly_if_its_model_builds(family, layers, stage, rounds):
    model = ModelConfig(
        family,
        vocab_size=24,
        num_layers=layers,
        embed_dim=8,
        mlp_dim=8,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        attention="eager",
        latent=LatentConfig(kv_rank=4, rope_dim=4, value_dim=4),
        moe=MoeConfig(2, 1, expert_dim=8, dense_layers=1),
        routing=RoutingConfig(kernel="eager"),
        pipeline=PipelineConfig(rounds=rounds),
    )
    config = RunConfig(model=model, mesh=MeshConfig(fsdp=1, stage=stage))
    found = list(pipeline_problems(config, {}, 0))
    assert (not found) == builds(model, stage), found


def test_the_share_of_waiting_falls_with_micro_batches_and_rounds():
    assert PipelineLayout(4, 1, 1).waiting() == 3 / 4
    assert PipelineLayout(4, 1, 12).waiting() == 3 / 15
    assert PipelineLayout(4, 3, 12).waiting() == 3 / 39
    assert PipelineLayout(1, 1, 5).waiting() == 0


@pytest.mark.parametrize(
    ("rows", "asked", "count"), [(8, None, 8), (8, 4, 4), (6, 4, 3), (5, 2, 1)]
)
def test_rows_are_divided_as_far_as_they_can_be(rows, asked, count):
    assert micro_batches_of(rows, asked) == count


def test_micro_batches_make_the_batch_again():
    rows = jnp.arange(24).reshape(12, 2)
    micros = micro_batches(rows, 3)
    np.testing.assert_array_equal(micros[1], rows[1::3])
    np.testing.assert_array_equal(whole_batch(micros), rows)


def test_a_frozen_model_goes_through_the_stages_of_the_run():
    """Whatever rounds it was trained with."""
    own = ModelConfig(vocab_size=64, num_layers=4, pipeline=PipelineConfig(rounds=2))
    run = RunConfig(model=ModelConfig(vocab_size=64), mesh=MeshConfig(stage=4))
    hardware = hardware_of(jax.devices()[0])

    def beside(model):
        frozen = FrozenModel(
            "teacher", "distill.teacher=DIR", Path("DIR"), model, PrecisionConfig()
        )
        return frozen.with_kernel(run, hardware).model

    assert beside(own).pipeline == run.model.pipeline
    with pytest.raises(
        ConfigError, match=r"distill\.teacher=DIR, whose .*Set mesh\.stage to [^,]*$"
    ):
        beside(dataclasses.replace(own, num_layers=6))


@pytest.mark.long
@pytest.mark.usefixtures("this_process")
def test_nothing_is_gathered_whole_for_tables_of_positions():
    """XLA would gather them, with a warning, where their gradients are split over their width."""
    words = (
        "config=quickstart",
        "model.family=gpt2",
        "model.vocab_size=64",
        "model.num_layers=4",
        "model.num_heads=2",
        "model.num_kv_heads=2",
        "model.head_dim=16",
        "model.embed_dim=32",
        "model.mlp_dim=64",
        "model.max_length=32",
        "data.seq_length=32",
        "data.batch_size=8",
        "mesh.stage=4",
        "mesh.fsdp=2",
        "model.pipeline.schedule=1f1b",
    )
    programs = StepPrograms(load_config(list(words)), jax.devices())
    with compiler_warnings() as said:
        programs.compile(8, 32)
    assert said == []
