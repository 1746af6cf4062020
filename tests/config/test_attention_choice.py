"""model.attention=auto: which kernel it is on which devices, and why."""

import dataclasses
from types import SimpleNamespace

import pytest

from data_pipeline.base.errors import ConfigError
from maxtrain.checkpoint.run_state import RunState
from maxtrain.config import fit_to_devices, load_config
from maxtrain.config.across.attention_choice import Hardware, choose
from maxtrain.config.problems import problems_of
from maxtrain.parallel.hardware import hardware_of

CPU = Hardware("cpu", "CPUs")
V5P = Hardware("tpu", "TPU v5")
H100 = Hardware("gpu", "NVIDIA H100 80GB HBM3", (9, 0))
V100 = Hardware("gpu", "Tesla V100-SXM2-16GB", (7, 0))
A100 = Hardware("gpu", "NVIDIA A100-SXM4-80GB", (8, 0))
ALONE = ("data.packing=pad",)
PARTED = ("mesh.context=2",)
DEEPSEEK = (
    "model.family=deepseek_v3",
    "model.head_dim=96",
    "model.num_kv_heads=4",
    "model.max_length=256",
)
DPO = ("objective=dpo", "checkpoint.init_from=/weights", *ALONE)
DROPPED = ("regularization.attention_dropout=0.1",)


def config_of(*overrides: str):
    """The quickstart on as many devices as its mesh needs."""
    config = load_config(["config=quickstart", *overrides])
    return fit_to_devices(config, max(1, config.mesh.context))


@pytest.mark.parametrize(
    ("hardware", "overrides", "kernel", "reason"),
    [
        (CPU, (), "xla", "since devices are CPUs"),
        (CPU, ALONE, "xla", "since devices are CPUs"),
        (V5P, (), "flash", "since devices are TPU v5, and rows are multiples of 128 tokens"),
        (
            V5P,
            ("model.family=gemma2", "model.attention_softcap=50", "model.window=64"),
            "flash",
            "since devices are TPU v5, and rows",
        ),
        (
            V5P,
            ("data.seq_length=200",),
            "xla",
            "since devices are TPU v5, and model.attention=flash needs rows of a multiple of 128 "
            "tokens, and data.seq_length is 200",
        ),
        (V5P, ("eval.seq_length=64",), "xla", "and eval.seq_length is 64"),
        (V5P, ("precision.compute=float16",), "xla", "does not support precision.compute=float16"),
        (V5P, ("model.family=gpt_oss",), "xla", "model.attention=flash has no attention sinks"),
        (V5P, DEEPSEEK, "xla", "model.attention=flash needs values of the size of keys"),
        (V5P, ("determinism=full",), "flash", "since devices are TPU v5, and rows"),
        (
            H100,
            (),
            "xla",
            "since devices are NVIDIA H100 80GB HBM3, and model.attention=cudnn does not keep the "
            "documents of a row apart, and data.packing=stream puts several into one",
        ),
        (H100, ALONE, "cudnn", "and no row has documents to keep apart"),
        (H100, ("data.attend_across_documents=true",), "cudnn", "since devices are NVIDIA H100"),
        (H100, (*ALONE, "determinism=full"), "xla", "may add in another order each time"),
        (H100, (*ALONE, "precision.compute=float32"), "xla", "does not support precision.compute"),
        (H100, (*ALONE, "model.head_dim=256"), "xla", "needs heads of at most 128"),
        (H100, DPO, "xla", "with objective=dpo a row has both answers of a pair"),
        (V100, ALONE, "xla", "needs GPUs of compute capability 8.0 or more, and Tesla V100"),
        (H100._replace(capability=(0, 0)), ALONE, "xla", "needs GPUs of compute capability"),
        (H100._replace(capability=None), ALONE, "cudnn", "no row has documents to keep apart"),
        *(
            (hardware, (*PARTED, *more), "ring", "since mesh.context=2 splits rows over devices")
            for hardware, more in ((CPU, ()), (V5P, ()), (H100, ALONE))
        ),
        (
            V5P,
            (*PARTED, "regularization.residual_dropout=0.1"),
            "flash",
            "since devices are TPU v5, and regularization.residual_dropout=0.1 goes by a token's "
            "place in the row, and model.attention=ring puts tokens in another order",
        ),
        (
            H100,
            (*PARTED, "regularization.residual_dropout=0.1"),
            "xla",
            "puts tokens in another order, and model.attention=cudnn does not keep",
        ),
        *(
            (hardware, (*DROPPED, *more), "eager", "since regularization.attention_dropout=0.1 dr")
            for hardware, more in ((CPU, ()), (V5P, PARTED), (H100, ALONE))
        ),
        (V5P, ("model.attention=xla",), "xla", "as model.attention says"),
        (V5P, ("model.attention=flash",), "flash", "as model.attention says"),
        (H100, ("model.attention=triton",), "triton", "as model.attention says"),
        (H100, ("model.attention=triton", "determinism=full"), "triton", "as model.attention"),
        (H100, ("model.attention=mosaic",), "mosaic", "as model.attention says"),
    ],
)
def test_auto_chooses_by_devices_rows_and_model(hardware, overrides, kernel, reason):
    config = config_of(*overrides)
    choice = choose(hardware, config)
    assert choice.kernel == kernel
    assert choice.reason.startswith(reason) or reason in choice.reason, choice.reason
    assert ". Set" not in choice.line
    assert choice.line.startswith(f"attention: {kernel}, ")
    assert choose(hardware, config) == choice
    # The checks accept what is chosen.
    model = dataclasses.replace(config.model, attention=kernel)
    named = dataclasses.replace(config, model=model)
    assert problems_of(named) == []
    assert choose(hardware, named).kernel == kernel


def test_a_kernel_that_auto_never_takes_is_named_where_it_would_do():
    reason = choose(H100, config_of()).reason
    for kernel in ("triton", "mosaic"):
        assert f"; {kernel} would do, too, and is taken only where it is named" in reason
    reason = choose(Hardware("gpu", "GPUs"), config_of()).reason
    assert "; triton would do, too, on GPUs of compute capability 8.0 or more, and is" in reason
    assert (
        "; mosaic would do, too, on GPUs of compute capability 9.0 or more, below 11.0, and"
        in reason
    )
    for hardware, overrides in (
        (H100, ALONE),  # cudnn is taken
        (H100, ("precision.compute=float32",)),
        (H100, ("model.head_dim=256",)),
        (V100, ()),
        (V5P, ("data.seq_length=200",)),
        (CPU, ()),
    ):
        reason = choose(hardware, config_of(*overrides)).reason
        assert "triton" not in reason
        assert "mosaic" not in reason


def test_rows_that_no_kernel_can_split_are_refused_when_the_config_is_read():
    words = ("config=quickstart", "mesh.context=4", "model.num_heads=2", "model.num_kv_heads=2")
    with pytest.raises(ConfigError) as caught:
        load_config([*words, "regularization.residual_dropout=0.1"])
    (problem,) = caught.value.problems
    assert "model.attention=auto finds no kernel for rows that mesh.context=4 splits" in problem
    assert "residual_dropout=0.1 goes by a token's place in the row" in problem
    assert "model.num_heads=2 must be divisible by" in problem
    assert ". Set mesh.context=1, or" in problem
    assert load_config([*words]).model.attention == "auto"


def test_a_kernel_of_servers_is_not_for_later_cards():
    config = config_of("model.attention=mosaic")
    with pytest.raises(ConfigError, match=r"capability below 11\.0, and NVIDIA GB10 has more.*Set"):
        choose(Hardware("gpu", "NVIDIA GB10", (12, 1)), config)


def test_a_kernel_that_is_named_is_never_another_one():
    for hardware, kernel, rule in (
        (CPU, "flash", "flash is for TPUs only, and the devices here are of platform cpu"),
        (H100, "flash", "flash is for TPUs only, and the devices here are of platform gpu"),
        (V5P, "triton", "triton is for GPUs only, and the devices here are of platform tpu"),
        (V100, "triton", r"triton needs GPUs of compute capability 8\.0 or more, and Tesla V100"),
        (A100, "mosaic", r"mosaic needs GPUs of compute capability 9\.0 or more, and NVIDIA A100"),
        (V5P, "cudnn", "cudnn is for GPUs only, and the devices here are of platform tpu"),
        (V100, "cudnn", r"cudnn needs GPUs of compute capability 8\.0 or more, and Tesla V100"),
    ):
        with pytest.raises(ConfigError, match=rf"{rule}.*Set model\.attention=xla"):
            choose(hardware, config_of(f"model.attention={kernel}", *ALONE))


def test_a_run_goes_on_with_the_kernel_that_it_had_where_it_can():
    config = config_of()
    until_now = "with which the run was trained until now"
    for hardware in (CPU, V5P, H100):
        for had in ("xla", "eager"):
            assert choose(hardware, config, had) == (had, until_now)
    assert choose(V5P, config, "flash") == ("flash", until_now)
    elsewhere = choose(CPU, config, "flash")
    assert elsewhere.kernel == "xla"
    assert "until now the run had flash, but model.attention=flash is for TPUs" in elsewhere.reason
    whole = choose(V5P, config, "ring")
    assert whole.kernel == "flash" and "until now the run had ring, but" in whole.reason
    assert choose(V5P, config_of("model.attention=xla"), "flash").kernel == "xla"


@pytest.mark.parametrize(
    ("config", "kernel"),
    [
        ("model: {attention: xla}", "xla"),
        ("model: {attention: auto}", None),
        ("model: {attention: [1]}", None),
        ("model: {}", None),
        ("", None),
        ("{", None),
    ],
)
def test_a_checkpoint_says_which_kernel_its_run_had(config, kernel):
    assert RunState(config=config).attention() == kernel


def test_devices_say_what_they_are():
    gpu = SimpleNamespace(platform="gpu", device_kind="A card", compute_capability="9.0")
    assert hardware_of(gpu) == Hardware("gpu", "A card", (9, 0))
    gpu.compute_capability = "gfx942"
    assert hardware_of(gpu) == Hardware("gpu", "A card", (0, 0))
    del gpu.compute_capability
    assert hardware_of(gpu) == Hardware("gpu", "A card")
    assert hardware_of(SimpleNamespace(platform="tpu", device_kind="TPU v5")) == V5P
    assert hardware_of(SimpleNamespace(platform="cpu", device_kind="cpu")) == CPU


@pytest.mark.parametrize(
    ("overrides", "rule"),
    [
        (DPO, "with objective=dpo a row has both answers of a pair"),
        (("objective=reward", "model.score=true", *ALONE), "with objective=reward a row has both"),
        (("objective=grpo", *ALONE, "grpo.beta=0"), "and rows have several completions each"),
    ],
)
def test_cudnn_is_refused_where_rows_have_several_documents_whatever_the_packing(overrides, rule):
    with pytest.raises(ConfigError, match=rf"cudnn does not keep .*{rule}.*attention=xla"):
        load_config(["config=quickstart", "model.attention=cudnn", *overrides])
