"""All problems of a config are reported at once; and what must hold for the devices of a run."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.base.errors import ConfigError
from maxtrain.config import (
    accumulations,
    fewer_settings,
    fit_to_devices,
    fit_to_fewer,
    fit_to_planned,
    load_config,
)
from tests.config.checking import load, problems


def test_all_are_reported_at_once():
    found = problems(
        "schedule.warmup_steps=500", "eval.sets={}", "schedule.min_learning_rate=1", "optimizer.beta2=1", "mesh.data=0",
        "output_dir=data/stdlib/train", "model.num_kv_heads=3", "run_name=a/b", "optimizer.accumulation=3",
    )  # fmt: skip
    assert len(found) == 9


def test_a_value_already_refused_is_not_judged_against_others():
    (problem,) = problems("steps=ten", "schedule.warmup_steps=400")
    assert problem.startswith("steps=ten")
    assert len(problems("steps=ten", "schedule.warmup_steps=400", "mesh.data=0")) == 2


@pytest.mark.parametrize(
    ("overrides", "devices", "rule", "advice"),
    [
        (["mesh.fsdp=3"], 8, "= 3 must be the number of devices, 8", "Set mesh.fsdp to 8"),
        (
            ["mesh.data=2", "mesh.fsdp=2"],
            8,
            "mesh.data=2 x mesh.fsdp=2 x mesh.tensor=1 = 4 must be",
            "mesh.data to 4, or",
        ),
        (
            ["mesh.data=3"],
            8,
            "mesh.data=3 x mesh.tensor=1 = 3 must divide the number of devices, 8",
            "to 1, 2, 4 or 8",
        ),
        (
            ["mesh.data=16"],
            8,
            "= 16 must divide the number of devices, 8",
            "mesh.data to 1, 2, 4 or 8",
        ),
        (
            ["mesh.data=4", "mesh.fsdp=4"],
            6,
            "= 16 must be the number of devices, 6",
            "multiply to 6, or mesh.fsdp=-1",
        ),
        (
            ["mesh.dcn_data=2", "mesh.fsdp=2"],
            8,
            "mesh.dcn_data=2 x mesh.data=1 x mesh.fsdp=2 x mesh.tensor=1 = 4 must be",
            "mesh.data to 2, or mesh.fsdp to 4",
        ),
        (
            ["mesh.dcn_stage=2", "mesh.fsdp=2"],
            8,
            "mesh.dcn_stage=2 x mesh.data=1 x mesh.fsdp=2 x mesh.tensor=1 = 4 must be",
            "mesh.data to 2, or mesh.fsdp to 4",
        ),
        (
            # Stages have no rows of their own.
            ["mesh.dcn_data=2", "mesh.dcn_stage=2", "data.batch_size=18"],
            16,
            "mesh.dcn_data=2 times mesh.data=1 times mesh.fsdp=4",
            "Set data.batch_size to 16 or 24",
        ),
        (
            ["mesh.dcn_data=2", "mesh.dcn_fsdp=2", "data.batch_size=18"],
            16,
            "mesh.dcn_data=2 times mesh.dcn_fsdp=2 times mesh.data=1 times mesh.fsdp=4",
            "Set data.batch_size to 16 or 32",
        ),
        (
            ["data.batch_size=16"],
            3,
            "data.batch_size=16 must be divisible by mesh.data=1 times mesh.fsdp=3",
            "to 15 or 18",
        ),
        (
            ["mesh.fsdp=1", "mesh.tensor=-1"],
            4,
            "mesh.tensor=4 must divide model.num_kv_heads=2",
            "mesh.tensor to 1 or 2",
        ),
    ],
)
def test_devices_that_do_not_fit(overrides, devices, rule, advice):
    given_batch = any(o.startswith("data.batch_size") for o in overrides)
    config = load_config(
        ["config=quickstart", *overrides, *([] if given_batch else ["data.batch_size=48"])]
    )
    with pytest.raises(ConfigError) as caught:
        fit_to_devices(config, devices)
    assert rule in str(caught.value) and advice in str(caught.value)


@pytest.mark.long
@settings(deadline=None, max_examples=60)
@given(
    sizes=st.tuples(*[st.integers(1, 4)] * 3),
    free=st.sampled_from([None, "data", "fsdp", "tensor"]),
)
def test_the_free_axis_takes_what_is_left(sizes, free):
    config = load_config(["config=quickstart"])
    axes = dict(zip(("data", "fsdp", "tensor"), sizes))
    devices = sizes[0] * sizes[1] * sizes[2]
    model = dataclasses.replace(config.model, num_heads=12, num_kv_heads=12, mlp_dim=12)
    data = dataclasses.replace(config.data, batch_size=144)
    given_axes = axes | ({free: -1} if free else {})
    config = dataclasses.replace(
        config, model=model, data=data, mesh=dataclasses.replace(config.mesh, **given_axes)
    )
    mesh = fit_to_devices(config, devices).mesh
    assert {name: getattr(mesh, name) for name in axes} == axes


MIXTRAL = ("model.family=mixtral", "model.moe.num_experts=12")
RING = ("model.attention=ring",)
HEADS = ("model.attention=xla",)


@pytest.mark.parametrize(
    ("preset", "overrides", "devices", "axes"),
    [
        ("fsdp", (), 16, {"fsdp": 16}),
        ("hsdp", (), 32, {"data": 4, "fsdp": 8}),
        ("hsdp", (), 4, {"data": 1, "fsdp": 4}),
        ("hsdp", ("mesh.data=2",), 32, {"data": 2, "fsdp": 16}),
        ("hsdp", ("mesh.fsdp=4",), 32, {"data": 8, "fsdp": 4}),
        ("hsdp", ("mesh.dcn_data=2", "mesh.tensor=2"), 32, {"data": 1, "fsdp": 8, "tensor": 2}),
        # The quickstart has two key heads.
        ("fsdp_tensor", (), 16, {"fsdp": 8, "tensor": 2}),
        ("fsdp_tensor", ("model.num_heads=8", "model.num_kv_heads=8"), 16, {"tensor": 8}),
        ("fsdp_tensor", ("mesh.data=2",), 16, {"data": 2, "fsdp": 4, "tensor": 2}),
        ("moe", MIXTRAL, 16, {"fsdp": 4, "expert": 4}),
        ("moe", (*MIXTRAL, "mesh.expert=2"), 16, {"fsdp": 8, "expert": 2}),
        ("moe", (*MIXTRAL, "mesh.fsdp=8"), 16, {"fsdp": 8, "expert": 2}),
        ("long_context", RING, 16, {"fsdp": 2, "context": 8}),
        ("long_context", (), 16, {"fsdp": 2, "context": 8}),
        ("long_context", HEADS, 16, {"fsdp": 4, "context": 4}),
        (
            "long_context",
            ("regularization.residual_dropout=0.1",),
            16,
            {"fsdp": 4, "context": 4},
        ),
        ("long_context", (*RING, "data.seq_length=24"), 8, {"fsdp": 2, "context": 4}),
    ],
)
def test_a_preset_fills_in_what_is_not_set(preset, overrides, devices, axes):
    config = load_config(
        ["config=quickstart", "data.batch_size=96", f"mesh.preset={preset}", *overrides]
    )
    mesh = fit_to_devices(config, devices).mesh
    assert {name: getattr(mesh, name) for name in axes} == axes
    fast = mesh.data * mesh.fsdp * mesh.context * mesh.expert * mesh.tensor
    assert fast * mesh.dcn_data * mesh.dcn_fsdp == devices


def test_a_preset_is_held_to_the_same_checks():
    config = load_config(["config=quickstart", "mesh.preset=long_context", "model.attention=ring"])
    with pytest.raises(ConfigError, match=r"and mesh\.context is 1\. Set model\.attention=xla"):
        fit_to_devices(config, 1)
    config = load_config(["config=quickstart", "mesh.preset=hsdp", "mesh.tensor=2"])
    with pytest.raises(ConfigError, match="must divide the number of devices, 9"):
        fit_to_devices(config, 9)


@pytest.mark.parametrize("kernel", ["eager", "xla"])
def test_kernels_that_repeat_are_allowed_with_full_determinism(kernel):
    assert load("determinism=full", f"model.attention={kernel}").model.attention == kernel
    assert load("determinism=full").model.attention == "auto"
    assert load("model.attention=cudnn", "data.packing=pad").determinism == "seeded"


def test_fewer_processes_leave_open_what_has_not_been_decided():
    config = load_config(["config=quickstart", "data.batch_size=48", "optimizer.accumulation=auto"])
    assert fit_to_fewer(config, 4, 3, 1) == config
    assert fit_to_fewer(config, 8, 7, 1) is None
    assert config.optimizer.least_micro_batches == 1
    with pytest.raises(AssertionError, match="has not been decided"):
        _ = config.optimizer.micro_batches


@pytest.mark.parametrize(
    ("overrides", "choices"),
    [
        ((), [1, 2, 3, 6]),
        (("model.pipeline.micro_batches=4", "mesh.stage=2"), [1, 3]),
        (("mesh.tensor=2",), [1, 2, 3, 4, 6, 12]),
        (("data.stages=[{until: 9}, {batch_size: 32}]",), [1, 2]),
    ],
)
def test_micro_batches_that_divide_the_batches_of_all_stages_and_the_mesh(overrides, choices):
    words = ["config=quickstart", "data.batch_size=48", "optimizer.accumulation=auto", *overrides]
    assert accumulations(load_config(words), 8) == choices


@pytest.mark.parametrize(
    ("overrides", "cause"),
    [
        (
            ["data.packing=balanced"],
            "data.packing=balanced makes the rows of a step of its documents",
        ),
        (
            ["objective=grpo", "grpo.rewards=[exact]"],
            "objective=grpo makes the rows of a step of what it samples",
        ),
    ],
)
def test_micro_batches_are_not_chosen_for_rows_that_are_not_known_yet(overrides, cause):
    found = problems("optimizer.accumulation=auto", *overrides)
    (problem,) = [text for text in found if "accumulation" in text]
    assert cause in problem and "Set optimizer.accumulation to a number" in problem


@pytest.mark.parametrize(
    ("overrides", "had", "count", "devices", "accumulation"),
    [
        ((), 4, 2, 1, 2),
        ((), 4, 3, 1, 2),  # a device gets 8 rows instead of 12
        (("optimizer.accumulation=2",), 4, 1, 1, 8),
        (("optimizer.accumulation=3",), 8, 3, 8, None),  # 24 devices would need 72 rows at least
        (("mesh.fsdp=8",), 4, 2, 2, None),
    ],
)
def test_fewer_processes_accumulate_so_that_no_device_gets_more_rows_at_a_time(
    overrides, had, count, devices, accumulation
):
    config = load_config(["config=quickstart", "data.batch_size=48", *overrides])
    fewer = fit_to_fewer(config, had, count, devices)
    assert (fewer and fewer.optimizer.accumulation) == accumulation
    if fewer:
        rows = config.data.batch_size / config.optimizer.micro_batches / (had * devices)
        assert config.data.batch_size / fewer.optimizer.micro_batches / (count * devices) <= rows
        assert dataclasses.replace(fewer, optimizer=config.optimizer) == config


def test_fewer_processes_than_planned_are_fitted_to_once():
    """The written config can be read again, and is the same."""
    words = ["config=quickstart", "data.batch_size=48"]
    config = load_config([*words, "mesh.planned_processes=4"])
    fewer = fit_to_planned(config, 2, 1)
    assert fewer.optimizer.accumulation == 2
    assert fewer.mesh.planned_processes is None
    settings = [f"{key}={value}" for key, value in fewer_settings(config, fewer).items()]
    assert settings == ["optimizer.accumulation=2", "mesh.planned_processes=null"]
    assert load_config([*words, *settings]) == fewer


@pytest.mark.parametrize(
    ("planned", "count", "message"),
    [
        (
            64,
            1,
            r"mesh\.planned_processes=64: no optimizer\.accumulation divides data\.batch_size=48",
        ),
        (64, 5, r"data\.batch_size=48 must be divisible by mesh\.data=1 times mesh\.fsdp=5"),
    ],
)
def test_fewer_processes_than_planned_that_nothing_fits_are_refused(planned, count, message):
    words = ["config=quickstart", "data.batch_size=48", f"mesh.planned_processes={planned}"]
    with pytest.raises(ConfigError, match=message):
        fit_to_planned(load_config(words), count, 1)


@pytest.mark.parametrize(
    ("overrides", "had", "count", "devices", "settings"),
    [
        # A process is a slice.
        (("mesh.dcn_data=4",), 4, 3, 8, "optimizer.accumulation=2 mesh.dcn_data=3"),
        (("mesh.dcn_data=4", "mesh.fsdp=2"), 4, 1, 2, "optimizer.accumulation=4 mesh.dcn_data=1"),
        (("mesh.dcn_fsdp=4",), 4, 2, 1, "optimizer.accumulation=2 mesh.dcn_fsdp=2"),
        # Replicas go rather than shards, as long as that is possible.
        (
            ("mesh.dcn_data=2", "mesh.dcn_fsdp=2"),
            4,
            2,
            1,
            "optimizer.accumulation=2 mesh.dcn_data=1",
        ),
        (
            ("mesh.dcn_data=2", "mesh.dcn_fsdp=2"),
            4,
            3,
            1,
            "optimizer.accumulation=2 mesh.dcn_data=1 mesh.dcn_fsdp=3",
        ),
        # Shards go rather than stages, and stages only where layers allow it.
        (
            ("mesh.dcn_stage=2", "mesh.dcn_fsdp=2"),
            4,
            2,
            1,
            "optimizer.accumulation=2 mesh.dcn_fsdp=1",
        ),
        (("mesh.dcn_data=2", "mesh.dcn_stage=2"), 4, 3, 1, None),
        (
            ("mesh.dcn_stage=4", "model.num_layers=12", "model.vocab_size=4104"),
            4,
            3,
            1,
            "optimizer.accumulation=2 mesh.dcn_stage=3",
        ),
        # Two processes are a slice, of which there is no half.
        (("mesh.dcn_data=4",), 8, 4, 1, "optimizer.accumulation=2 mesh.dcn_data=2"),
        (("mesh.dcn_data=4",), 8, 5, 1, None),
    ],
)
def test_fewer_processes_are_fewer_whole_slices(overrides, had, count, devices, settings):
    config = load_config(["config=quickstart", "data.batch_size=96", *overrides])
    fewer = fit_to_fewer(config, had, count, devices)
    if settings is None:
        assert fewer is None
        return
    assert fewer is not None
    written = fewer_settings(config, fewer)
    assert " ".join(f"{key}={value}" for key, value in written.items()) == settings
    # As a command line has them, they are the same.
    kept = [word for word in overrides if word.partition("=")[0] not in written]
    words = ["config=quickstart", "data.batch_size=96", *kept, *settings.split()]
    assert load_config(words) == fewer
