"""`maxtrain fit`: the real step, compiled for TPUs and GPUs that are not here."""

import dataclasses
import json
import math
import platform
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import pytest

from data_pipeline.base.errors import ConfigError
from data_pipeline.prepare import command as prepare
from maxtrain.cli import main
from maxtrain.commands.fit import command as fit
from maxtrain.commands.fit import search as fit_search
from maxtrain.commands.fit.estimate import FitEstimate, RowBatchShape, batch_shape, require_fit
from maxtrain.commands.fit.report import advice, mesh_words
from maxtrain.commands.fit.search import (
    MeshAxes,
    MeshCandidate,
    meshes,
    promising,
    search,
    with_choice,
)
from maxtrain.config import fit_to_devices, load_config
from maxtrain.config.across.attention_choice import KernelChoice
from maxtrain.config.schema import PipelineConfig
from maxtrain.models.cost import TokenFlops
from maxtrain.parallel.compiled.roofline import CollectiveTime, Roofline
from maxtrain.parallel.topologies import described_devices

pytestmark = pytest.mark.usefixtures("this_process")
# Their compilers are for this platform alone; there, a missing package fails the test.
on_linux_x86 = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64",
    reason="libtpu and XLA's compiler for GPUs are for Linux on x86",
)
SMALL = [
    "config=llama3_8b",
    "model.vocab_size=512",
    "model.num_layers=3",
    "model.embed_dim=128",
    "model.mlp_dim=256",
    "model.num_heads=4",
    "model.num_kv_heads=4",
    "model.head_dim=64",
    "model.max_length=256",
    "data.seq_length=256",
    "data.batch_size=8",
]
# Of three layers, the embedding and the output; and of the norms, which every device has whole.
WEIGHTS = 3 * (4 * 128 * 4 * 64 + 3 * 128 * 256) + 2 * 512 * 128
NORMS = (2 * 3 + 1) * 128
# As JAX says it.
MISSING = "cuDNN not found."


@pytest.fixture
def fitted(tmp_path, capfd):
    """Runs the command, which must succeed; what it writes and what it prints. Compiled with all
    optimizations; programs for devices elsewhere can't be read from a cache."""

    def run(*words: str) -> tuple[dict, str]:
        given = {word.split("=")[0] for word in words}
        small = [word for word in SMALL if word.split("=")[0] not in given]
        arguments = ["fit", *small, *words, f"output_dir={tmp_path}", "run_name=fitted"]
        code = main(arguments)
        shown = capfd.readouterr()
        assert code == 0, shown.err
        return json.loads((tmp_path / "fitted" / "fit.json").read_text()), shown.out

    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", False)
    yield run
    jax.config.update("jax_disable_most_optimizations", before)
    jax.config.update("jax_enable_compilation_cache", True)


def by_kind(record):
    """Count and bytes of collectives, by kind and axes."""
    return {
        (line["kind"], *line["axes"]): (line["count"], line["num_bytes"])
        for line in record["collectives"]
    }


@pytest.mark.long
@pytest.mark.every_dose
@on_linux_x86
@pytest.mark.parametrize(
    ("topology", "temporaries", "total", "collectives"),
    [
        (
            "v5e:2x2",
            8_524_800,
            12_195_344,
            {
                "all-gather": (12, 319_488),
                "reduce-scatter": (1, 393_216),
                "all-reduce": (4, 100_896),
            },
        ),
        (
            "h100:2",
            6_216_951,
            7_135_080,
            {"all-gather": (1, 294_912), "reduce-scatter": (1, 262_144), "all-reduce": (5, 67_300)},
        ),
    ],
    ids=["tpu", "gpu"],
)
def test_a_small_step_for_each_compiler(fitted, topology, temporaries, total, collectives):
    """The step has one layer of one head. Bytes that shapes determine are exact, and others are
    pinned; so are collectives, whose kinds and counts test_collectives.py derives."""
    words = ["model.num_layers=1", "model.num_heads=1", "model.num_kv_heads=1"]
    words += ["model.head_dim=128", "model.mlp_dim=128", "model.vocab_size=128"]
    words += ["model.max_length=128", "data.seq_length=128", "data.batch_size=4"]
    words += ["model.remat=none", "model.attention=xla"]
    record, _ = fitted(f"topology={topology}", *words)
    # Query, key, value and output; gate, up and down; embedding and head. Norms are whole.
    stored = 4 * ((4 + 3 + 2) * 128 * 128 // record["devices"] + 3 * 128)
    assert record["memory_bytes"]["parameters"] == stored
    assert record["memory_bytes"]["optimizer"] == pytest.approx(2 * stored, rel=0.02)
    of_step = record["memory_bytes"]["gradients, activations and other temporaries"]
    assert of_step == pytest.approx(temporaries, rel=0.05)
    assert record["total_bytes"] == pytest.approx(total, rel=0.05)
    found = by_kind(record)
    assert set(found) == {(kind, "fsdp") for kind in collectives}
    for kind, (count, num_bytes) in collectives.items():
        assert found[kind, "fsdp"][0] == count
        assert found[kind, "fsdp"][1] == pytest.approx(num_bytes, rel=0.05)
    assert record["compiler_warnings"] == []


@pytest.mark.long
@on_linux_x86
def test_a_step_on_gpus(fitted):
    record, shown = fitted("topology=h100:8", "optimizer.accumulation=1", "mesh.fsdp=8")
    found = by_kind(record)
    assert set(found) == {(kind, "fsdp") for kind in ("all-gather", "reduce-scatter", "all-reduce")}
    assert found["all-gather", "fsdp"][1] == pytest.approx(3784704, rel=0.05)
    assert found["reduce-scatter", "fsdp"][1] == pytest.approx(2637824, rel=0.05)
    assert record["compiler_warnings"] == []
    assert record["loops_of_unknown_length"] == 0
    assert record["total_bytes"] == pytest.approx(9816732, rel=0.05)
    assert record["total_bytes"] == sum(record["memory_bytes"].values())
    # Float32 arrays of 827,264 weights, split over 8 devices but for the norms; two of moments.
    assert record["memory_bytes"]["parameters"] == 4 * (WEIGHTS // 8 + NORMS)
    assert record["memory_bytes"]["optimizer"] == pytest.approx(
        8 * (WEIGHTS // 8 + NORMS), rel=0.01
    )
    assert record["limit_bytes"] == 63707234304
    # With model.remat=full, layers are computed twice.
    flops = record["program_flops_per_device"] * 8 / (8 * 256)
    of_model = record["model_flops_per_token"]
    assert 1.1 * of_model["full"] < flops < 4 / 3 * of_model["full"]
    assert flops == pytest.approx(8355840, rel=0.01)
    estimate = record["estimate"]
    assert estimate["limit"] == "memory"
    assert estimate["step_seconds"] == estimate["seconds"]["memory"]
    assert estimate["seconds"]["products"] == pytest.approx(flops * 256 / 989.5e12)
    assert "8 x NVIDIA H100 80GB HBM3, mesh fsdp=8" in shown
    # By the devices of the topology, not by the CPU that this runs on.
    said = " ".join(shown.split())
    assert (
        "attention: xla, since devices are NVIDIA H100 80GB HBM3, and model.attention=cudnn" in said
    )
    assert "data.packing=stream puts several into one" in record["attention_reason"]
    assert "an estimate from data sheets, not measured" in shown
    assert "needed, of 59.33 GiB: fits" in shown


@pytest.mark.long
@on_linux_x86
def test_what_lies_on_hosts(fitted):
    """Moments, and matrices of layers; and how often a step copies them."""
    words = ["topology=v5e:2x2", "optimizer.accumulation=1", "mesh.fsdp=4"]
    words += ["model.scan_layers=true", "model.remat=full", "optimizer.on_host=true"]
    record, shown = fitted(*words, "train.on_host=all")
    held = record["host_memory_bytes"]
    of_layers = (WEIGHTS - 2 * 512 * 128) // 4
    others = 2 * 512 * 128 // 4 + 128
    assert held["parameters"] == 4 * of_layers
    assert held["optimizer"] == 8 * (of_layers + others)
    assert record["memory_bytes"]["parameters"] == 4 * (others + 6 * 128)
    # Of layers: weights forward and backward and for their norm; gradients there and back; weights
    # and moments to see whether all is finite, and again to change them; and what they are then.
    copied = 4 * (3 + 2 + 3 + 3 + 3) * of_layers
    # Of others: moments once, and there.
    copied += 4 * (2 + 2) * others
    assert record["host_traffic_bytes"] == pytest.approx(copied, rel=0.02)
    assert "memory of its host, for each device" in shown
    assert "copied in a step, there and back" in shown


@pytest.mark.slow
@on_linux_x86
def test_a_rule_changes_what_is_stored_and_sent(fitted):
    """The width of the model, by 8 in place of 4."""
    words = ["topology=h100:8", "optimizer.accumulation=1", "mesh.fsdp=4", "mesh.context=2"]
    rule = "mesh.rules.embed=[fsdp, context]"
    record, shown = fitted(*words, rule)
    assert record["rules"] == {"embed": ["fsdp", "context"]}
    # Lines are broken where the window ends.
    assert "mesh fsdp=4 context=2 with rules embed=[fsdp, context]" in " ".join(shown.split())
    assert record["memory_bytes"]["parameters"] == 4 * (WEIGHTS // 8 + NORMS)
    assert record["memory_bytes"]["optimizer"] == pytest.approx(
        8 * (WEIGHTS // 8 + NORMS), rel=0.01
    )
    assert by_kind(record)["all-gather", "fsdp", "context"][0] > 0
    assert record["compiler_warnings"] == []


@pytest.mark.long
@on_linux_x86
def test_a_kernel_without_its_library_is_refused(capsys, monkeypatch):
    monkeypatch.setattr(jax.nn, "dot_product_attention", Mock(side_effect=RuntimeError(MISSING)))
    words = ["topology=h100:1", "model.attention=cudnn", "data.attend_across_documents=true"]
    assert main(["fit", *SMALL, *words]) == 78
    said = capsys.readouterr().err
    assert "cuDNN is not installed here. Set model.attention=xla." in said
    jax.config.update("jax_enable_compilation_cache", True)


@pytest.mark.slow
@on_linux_x86
def test_micro_batches_are_chosen_for_devices_that_are_not_here(fitted):
    words = ("topology=v5e:2x2", "mesh.fsdp=1", "mesh.tensor=4", "model.remat=none")
    one, _ = fitted(*words, "optimizer.accumulation=1")
    assert one["accumulation"] == 1
    limit = f"{one['total_bytes'] - 1}"
    found, shown = fitted(*words, "optimizer.accumulation=auto", "--memory", limit)
    assert found["fits"] and found["total_bytes"] < one["total_bytes"]
    count = found["accumulation"]
    assert count in (2, 4, 8)
    line = f"optimizer.accumulation={count}: a step needs"
    assert line in shown and f"; with {count // 2} it would be" in shown


@pytest.mark.long
@on_linux_x86
def test_a_search_on_tpus(fitted):
    words = ["--search", "--tries", "2", "--memory", "100MiB"]
    # Not flash: XLA counts the FLOPs of its own blocks.
    record, shown = fitted("topology=v5p:2x2x1", "model.attention=xla", *words)
    split, whole = record["tried"]
    assert (split["mesh"]["fsdp"], split["remat"], split["accumulation"]) == (4, "none", 1)
    # What sends as little by what is known before.
    assert (whole["mesh"]["data"], whole["mesh"]["fsdp"]) == (4, 1)
    assert record["best"] == split
    found = by_kind(split)
    assert found["all-gather", "fsdp"][1] == pytest.approx(2359296, rel=0.05)
    assert found["reduce-scatter", "fsdp"][1] == pytest.approx(2260992, rel=0.05)
    # Gradients alone, float32: three quarters of them there, and three quarters back.
    sent = 1.5 * 4 * (WEIGHTS + NORMS)
    assert by_kind(whole) == {("all-reduce", "data"): (6, pytest.approx(sent, rel=0.05))}
    for tried, needed in ((split, 41751424), (whole, 47480768)):
        assert tried["compiler_warnings"] == []
        assert tried["loops_of_unknown_length"] == 0
        assert tried["total_bytes"] == pytest.approx(needed, rel=0.05)
        # What causal attention needs, and less than the whole square.
        flops = tried["program_flops_per_device"] * 4 / (8 * 256)
        assert tried["model_flops_per_token"]["causal"] < flops
        assert flops < tried["model_flops_per_token"]["full"]
    assert "what fits, fastest first" in shown
    assert "Raise --tries from 2" in shown
    assert "mesh.fsdp=4 mesh.context=1 mesh.expert=1 mesh.tensor=1 data.batch_size=8" in shown


@pytest.mark.long
@on_linux_x86
@pytest.mark.parametrize(
    ("topology", "attention"),
    [
        ("v5p:2x2x1", "auto"),
        ("v5p:2x2x1", "xla"),
        pytest.param("h100:4", "ring", marks=pytest.mark.slow),
        pytest.param("h100:4", "xla", marks=pytest.mark.slow),
    ],
)
def test_parts_of_rows_go_round_or_are_dealt_out(fitted, topology, attention):
    words = ["mesh.fsdp=1", "mesh.context=4", f"model.attention={attention}"]
    record, _ = fitted(f"topology={topology}", *words)
    found = by_kind(record)
    chosen = {"auto": "ring"}.get(attention, attention)
    assert record["attention"] == chosen
    assert record["compiler_warnings"] == []
    assert record["loops_of_unknown_length"] == 0
    # Of keys, or values, of a device's 8 x 64 tokens in bfloat16, in each of 3 layers.
    part = 8 * 64 * 4 * 64 * 2
    if attention == "xla":
        # Queries, keys, values and results are dealt out three times, with the recomputation;
        # gradients of two of them in float32. A device keeps a quarter.
        assert ("collective-permute", "context") not in found
        sent = 3 * (10 + 2 * 2) * 3 / 4 * part
        assert found["all-to-all", "context"][1] == pytest.approx(sent, rel=0.02)
    else:
        assert ("all-to-all", "context") not in found
        # Keys and values go three times round in three passes, and their gradients four times,
        # in float32. Beside them, positions and documents.
        sent = 3 * (3 * 3 * 2 + 2 * 4 * 2) * part
        if topology.startswith("h100"):
            # This compiler sends float32 as it is.
            sent = 3 * (2 * 3 * 3 * 2 + 2 * 4 * 2) * part
        assert found["collective-permute", "context"][1] == pytest.approx(sent, rel=0.02)
    stored = {("v5p:2x2x1", "ring"): 59594080, ("v5p:2x2x1", "xla"): 45101376}
    if (topology, attention) in stored:
        needed = stored[topology, attention]
        assert record["total_bytes"] == pytest.approx(needed, rel=0.05)


@pytest.mark.slow
@on_linux_x86
@pytest.mark.parametrize(
    ("topology", "attention"),
    [
        ("v5p:4x4x4", "flash"),
        ("v5p:4x4x4", "xla"),
        ("v5e:8x8", "flash"),
        ("v6e:8x8", "xla"),
    ],
)
def test_weights_are_gathered_on_many_tpus(fitted, topology, attention):
    """They are not summed from arrays that are zero except for a part, which sends twice as
    much."""
    words = ["mesh.fsdp=64", f"model.attention={attention}", "model.scan_layers=true"]
    words += ["data.batch_size=64", "model.loss_chunk=64"]
    record, _ = fitted(f"topology={topology}", *words)
    assert record["compiler_warnings"] == []
    assert record["loops_of_unknown_length"] == 0
    found = by_kind(record)
    of_layer = 4 * 128 * 4 * 64 + 3 * 128 * 256
    head = 512 * 128
    # In bfloat16, in the forward pass and in the backward pass; queries, keys and values there
    # twice. The embedding is gathered in float32.
    gathered = 3 * (2 * of_layer + 3 * 128 * 4 * 64) * 2 + head * (2 + 4)
    assert found["all-gather", "fsdp"][1] == pytest.approx(gathered * 63 / 64, rel=0.02)
    # Gradients in float32: those of embedding and head once, for all chunks of the loss.
    summed = sum(
        count
        for (kind, *_), (_, count) in found.items()
        if kind in ("all-reduce", "reduce-scatter")
    )
    assert summed <= 1.05 * 2 * 4 * (3 * of_layer + 2 * head)


@pytest.mark.slow
@on_linux_x86
def test_a_step_on_many_hosts_of_gpus(fitted):
    """It sends the same as on one host: all weights but a 64th are gathered, and gradients are
    summed."""
    words = ["mesh.fsdp=64", "data.batch_size=64", "optimizer.accumulation=1"]
    record, _ = fitted("topology=h100:8x8", *words, "model.scan_layers=true")
    assert record["devices"] == 64
    assert record["compiler_warnings"] == []
    found = by_kind(record)
    # Gradients in float32, each part summed on its device or on all.
    scattered = found["reduce-scatter", "fsdp"][1]
    summed = found["all-reduce", "fsdp"][1]
    assert scattered + summed / 2 == pytest.approx(4 * WEIGHTS * 63 / 64, rel=0.05)
    # In bfloat16, at least once in each pass.
    assert found["all-gather", "fsdp"][1] > 2 * 2 * WEIGHTS * 63 / 64


CONFIG = load_config([*SMALL, "mesh.fsdp=4", "mesh.data=1", "optimizer.accumulation=2"])
TURNS = dataclasses.replace(
    CONFIG,
    model=dataclasses.replace(CONFIG.model, remat="none", pipeline=PipelineConfig(schedule="1f1b")),
)
LINE = CollectiveTime("all-gather", ("fsdp",), 3, 1e6, 0.2)


def a_fit(config=CONFIG, total=1000, seconds=(0.1, 0.2, 0.3), lines=(LINE,), **others):
    """A result that fits into 2000 bytes per device."""
    found = FitEstimate(
        config=config,
        attention=KernelChoice("xla", "as model.attention says"),
        device="TPU v5",
        num_devices=4,
        batch=RowBatchShape(config.data.batch_size, 256),
        limit=2000,
        memory={"parameters": total},
        on_host={},
        refused=None,
        sampling=None,
        model=TokenFlops(6e6, 5e6),
        peak=1e12,
        flops=4e9,
        memory_traffic=1e9,
        host_traffic=0.0,
        lines=list(lines),
        times=Roofline(*seconds),
        warnings=[],
        unknown_loops=0,
        compile_seconds=1.0,
    )
    return found._replace(**others)


def test_the_words_for_a_mesh_have_the_rules_that_are_set():
    ruled = load_config([*SMALL, "mesh.fsdp=4", "mesh.rules.embed=[]", "mesh.rules.mlp=[tensor]"])
    assert mesh_words(a_fit(ruled)) == "fsdp=4 with rules embed=[]"
    assert a_fit(ruled).record()["rules"] == {"embed": ()}
    assert mesh_words(a_fit()) == "fsdp=4"


def test_all_axes_are_told_and_recorded():
    """The axes include those that only some models have."""
    meshed = dataclasses.replace(CONFIG.mesh, expert=2, stage=2)
    split = dataclasses.replace(CONFIG, mesh=meshed)
    assert mesh_words(a_fit(split)) == "stage=2 fsdp=4 expert=2"
    assert a_fit(split).record()["mesh"]["expert"] == 2


def test_a_step_that_does_not_fit_is_refused_with_its_bytes_and_a_mend():
    require_fit(a_fit())
    too_large = r"a step of 8 rows x 256 tokens on 4 x TPU v5 needs 3\.00 GiB of the 2\.00 GiB"
    with pytest.raises(ConfigError, match=rf"data\.batch_size=8: {too_large} that programs may"):
        require_fit(a_fit(total=3 << 30, limit=2 << 30))
    with pytest.raises(ConfigError, match=r"Set a higher mesh\.tensor or mesh\.context, or more"):
        require_fit(a_fit(total=3000))
    whole = dataclasses.replace(CONFIG, data=dataclasses.replace(CONFIG.data, batch_size=16))
    recomputed = dataclasses.replace(whole, model=dataclasses.replace(whole.model, remat="none"))
    with pytest.raises(ConfigError, match=r"Set optimizer\.accumulation=4 and model\.remat=full"):
        require_fit(a_fit(recomputed, total=3000))
    staged = dataclasses.replace(recomputed, mesh=dataclasses.replace(whole.mesh, stage=2))
    with pytest.raises(ConfigError, match=r"Set model\.pipeline\.schedule=1f1b and model\.remat="):
        require_fit(a_fit(staged, total=3000))
    turns = dataclasses.replace(staged, model=TURNS.model)
    with pytest.raises(ConfigError, match=r"Set model\.remat=full"):
        require_fit(a_fit(turns, total=3000))
    with pytest.raises(ConfigError, match=r"needs more than the compiler allows of"):
        require_fit(a_fit(memory={}))
    with pytest.raises(ConfigError, match=r"needs 28\.00 GiB of the"):
        require_fit(a_fit(memory={}, refused=28 << 30))
    with pytest.raises(ConfigError, match=r"needs 0\.00 MiB"):
        require_fit(a_fit(sampling=2500))


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (a_fit(), "all-gather over mesh.fsdp is 67% of it. A lower optimizer.accumulation, if it"),
        (a_fit(lines=[LINE._replace(axes=("tensor",))]), "A lower mesh.tensor sends fewer"),
        (a_fit(lines=[LINE._replace(axes=("context",))]), "A lower mesh.context sends fewer keys"),
        (a_fit(lines=[LINE._replace(axes=("expert",))]), "A lower mesh.expert exchanges fewer"),
        (
            a_fit(lines=[LINE._replace(kind="all-reduce", axes=("data",))]),
            "once for each micro-batch. A lower optimizer.accumulation, if it fits, sums them less "
            "often; optimizer.zero=2 sends half of it",
        ),
        (a_fit(seconds=(0.1, 0.4, 0.3)), "4 rows at a time use each weight for few tokens"),
        (a_fit(seconds=(0.5, 0.4, 0.3)), "1.56 times what the model needs. model.remat=dots or"),
        (a_fit(seconds=(0.5, 0.4, 0.3), flops=2.6e9), "More devices make it faster"),
        (a_fit(TURNS, seconds=(0.5, 0.4, 0.3)), "model.pipeline.schedule=gpipe, if it fits,"),
    ],
)
def test_what_would_help_is_said(found, said):
    assert said in advice(found)


def test_meshes_split_rows_first_and_have_all_devices():
    found = meshes(CONFIG, 4, near=4)
    assert found[:3] == [
        MeshAxes(1, 1, 4, 1, 1, 1),
        MeshAxes(4, 1, 1, 1, 1, 1),
        MeshAxes(1, 1, 2, 1, 1, 2),
    ]
    assert all(math.prod(mesh) == 4 for mesh in found)
    assert len(found) == len(set(found))
    assert {mesh.expert for mesh in found} == {1}


def test_meshes_split_experts_into_all_numbers_of_equal_parts():
    config = load_config(["config=mixtral_8x7b", "model.moe.num_experts=12"])
    found = meshes(config, 24, near=24)
    assert {mesh.expert for mesh in found} == {1, 2, 3, 4, 6, 12}
    assert MeshAxes(1, 1, 2, 1, 12, 1) in found
    # Stages exchange no tokens.
    staged = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, stage=2))
    assert {(mesh.stage, mesh.expert) for mesh in meshes(staged, 24, near=24)} == {(2, 1)}


def test_meshes_have_a_replica_for_each_host_and_as_many_as_the_config_has():
    alone = [mesh for mesh in meshes(CONFIG, 32, near=8) if mesh.tensor == mesh.context == 1]
    assert [mesh.data for mesh in alone] == [1, 4, 32]
    two = dataclasses.replace(CONFIG, mesh=dataclasses.replace(CONFIG.mesh, data=2))
    alone = [mesh for mesh in meshes(two, 32, near=32) if mesh.tensor == mesh.context == 1]
    assert [(mesh.data, mesh.fsdp) for mesh in alone] == [(1, 32), (2, 16), (32, 1)]
    # Slices are replicas, too.
    slices = dataclasses.replace(CONFIG, mesh=dataclasses.replace(CONFIG.mesh, dcn_data=4))
    assert {math.prod(mesh) for mesh in meshes(slices, 32, near=8)} == {8}


@pytest.mark.parametrize("preset", ["moe", "hsdp", "fsdp_tensor", "long_context"])
def test_a_choice_is_the_mesh_whatever_the_preset(preset):
    config = load_config(["config=mixtral_8x7b", f"mesh.preset={preset}"])
    for mesh in (MeshAxes(1, 1, 8, 1, 1, 1), MeshAxes(1, 1, 4, 1, 2, 1)):
        chosen = fit_to_devices(with_choice(config, mesh, 64, 1, "full"), 8)
        assert [getattr(chosen.mesh, axis) for axis in mesh._fields] == list(mesh)


@pytest.mark.every_dose
@pytest.mark.long
@on_linux_x86
def test_a_search_begins_with_what_sends_least():
    """The first candidate for a model with experts and few tokens splits experts and gathers only
    the other weights; for a small dense model on several hosts, it does not split heads."""
    config = load_config(["config=mixtral_8x7b", "model.num_layers=2"])
    first, *others = promising(config, described_devices("h100:8"), [32])
    assert first.mesh == MeshAxes(1, 1, 1, 1, 8, 1)
    assert {choice.mesh.expert for choice in others} >= {1, 2, 4}
    small = load_config(["config=qwen3_0_6b", "data.batch_size=1024"])
    found = promising(small, described_devices("h100:4x8"), [1024])
    assert {choice.mesh.data for choice in found} == {1, 2, 4, 8, 16, 32}
    assert [choice.mesh.tensor for choice in found[:3]] == [1, 1, 1]
    # All weights of 2 bytes go once to each device, and gradients once to where they are.
    sent = 2 * 2 * 440_401_920 * 31 / 32
    whole = found[[choice.mesh for choice in found].index(MeshAxes(1, 1, 32, 1, 1, 1))]
    of_network = (whole.seconds[1] - whole.seconds[0]) * 1024 * small.data.seq_length
    assert of_network == pytest.approx(sent / (8 * 50e9), rel=0.01)
    times = [choice.seconds for choice in found]
    assert times == sorted(times)
    with pytest.raises(ConfigError, match=r"data\.batch_size=7 must be divisible by"):
        slices = dataclasses.replace(small, mesh=dataclasses.replace(small.mesh, dcn_data=4))
        promising(slices, described_devices("h100:4x8"), [7])


def a_search(monkeypatch, choices, seconds_of):
    """Run a search with memory and time by a rule instead of the compiler. Returns the settings
    that it tried, and the search."""
    tried = []

    def fit_step(config, devices, limit):
        accumulation = config.optimizer.accumulation
        activations = {"none": 4000, "dots": 1600, "named": 1400, "full": 400}[config.model.remat]
        total = 100 + activations // accumulation
        tried.append((config.mesh.tensor, config.model.remat, accumulation))
        return a_fit(config, total, (seconds_of(config), 0.0, config.mesh.tensor), limit=limit)

    parts = SimpleNamespace(parts=SimpleNamespace(abstract=()))
    monkeypatch.setattr(fit_search, "fit_step", fit_step)
    monkeypatch.setattr(fit_search, "StepPrograms", lambda config, devices: parts)
    monkeypatch.setattr(fit_search, "promising", lambda *_: choices)
    return tried, lambda limit, most: search(CONFIG, [None], limit, [8], most)


ONE = MeshCandidate(MeshAxes(1, 1, 1, 1, 1, 1), 8, (0.0, 0.0))


def test_a_search_leaves_out_what_can_not_be_better_or_can_not_fit(monkeypatch):
    def seconds_of(config):
        of_remat = {"none": 3.0, "dots": 3.4, "named": 3.5, "full": 4.0}[config.model.remat]
        return of_remat + config.optimizer.accumulation

    tried, searched = a_search(monkeypatch, [ONE], seconds_of)
    found = searched(1200, 99)
    # One accumulates more for each that recomputes less; 4000 / 2 is known to be too large.
    assert tried == [
        (1, "none", 1),
        (1, "dots", 1),
        (1, "named", 1),
        (1, "full", 1),
        (1, "dots", 2),
        (1, "none", 4),
    ]
    assert [one.config.model.remat for one in found.fits] == ["full", "dots", "none"]
    assert found.is_whole and found.num_tried == 6
    assert not searched(1200, 2).is_whole
    monkeypatch.setattr(fit_search, "bytes_on_device", lambda state: 5000)
    assert searched(1200, 99).num_tried == 0


def test_a_search_leaves_out_meshes_that_send_too_much(monkeypatch):
    """The bound is the least time of a step of 8 x 256 tokens, compared with the time of one that
    fits."""
    tokens = 8 * 256
    split = MeshAxes(1, 1, 1, 1, 1, 2)
    choices = [
        ONE,
        MeshCandidate(split, 8, (2.9 / tokens, 3.0 / tokens)),
        MeshCandidate(split._replace(tensor=4), 8, (3.1 / tokens, 3.2 / tokens)),
    ]
    tried, searched = a_search(monkeypatch, choices, lambda config: 3.0)
    found = searched(5000, 99)
    assert [tensor for tensor, _, _ in tried] == [1, 2]
    assert found.num_slower == 1 and found.is_whole


def test_the_largest_batch_of_a_run_counts():
    assert batch_shape(load_config(["config=llama3_8b"])) == RowBatchShape(128, 8192)
    assert batch_shape(load_config(["config=grpo_qwen2_5_1_5b"])) == RowBatchShape(32 * 8, 1024)
    words = ["data.stages=[{until: 5, seq_length: 128, batch_size: 64}, {seq_length: 32}]"]
    assert batch_shape(load_config([*SMALL, *words])) == RowBatchShape(64, 128)
    balanced = ["data.packing=balanced", "data.batch_size=500", "data.balance_rows=8"]
    # The multiples of 8 that are tried grow by an eighth, up to a row for each document.
    assert batch_shape(load_config([*SMALL[:-1], *balanced])) == RowBatchShape(512, 256)


@pytest.mark.parametrize("is_here", [True, False], ids=["here", "elsewhere"])
def test_balanced_batches_are_as_large_as_their_data_says(is_here, tmp_path, monkeypatch, capfd):
    """Without the data, each row counts as one document."""
    shapes = []

    def fit_step(config, devices, limit, largest):
        shapes.append(largest or batch_shape(config))
        return a_fit(config, 100, (1.0, 0.0, 0.0), limit=limit)

    monkeypatch.setattr(fit, "fit_step", fit_step)
    for number in range(64):
        (tmp_path / f"{number}.txt").write_text("a word " * (1 + number % 5))
    options = ["--text", f"{tmp_path}/*.txt", "--workers", "1"]
    if is_here:
        assert prepare.main([str(tmp_path / "data"), *options]) == 0
    words = [f"data.sources={{text: {{path: {tmp_path}/data, epochs: null}}}}", "steps=30"]
    words += ["data.packing=balanced", "data.batch_size=64", "data.balance_rows=2"]
    words += ["topology=h100:1", "mesh.fsdp=1", f"output_dir={tmp_path}", "run_name=fitted"]
    assert main(["fit", *SMALL[:-2], "data.seq_length=128", *words]) == 0
    shown = capfd.readouterr().out
    (shape,) = shapes
    if not is_here:
        # The least number of rows from 64 on that a batch may have.
        assert shape == RowBatchShape(66, 128)
        assert "counted with 66 rows, a row for each document, since their data can't be" in shown
        return
    # 64 documents of 7 to 35 bytes.
    least = 64 * 21 / 128
    assert least < shape.rows < 1.3 * least
    assert f"data.packing=balanced: {shape.rows} rows, the most of all that are counted" in shown


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 64, "topology=NAME is missing: the devices to compile for. Write v5e:16x16"),
        (["topology=h100:12"], 64, "at most 8 GPUs. Write h100:2x8"),
        (["topology=v5e:2x2", "--batches", "8"], 64, "--batches is for --search"),
        (["topology=v5e:2x2", "--search", "--batches", "8,x"], 64, "must be numbers of rows"),
        (["topology=v5e:2x2", "--search", "--tries", "0"], 64, "--tries 0 must be at least 1"),
    ],
)
def test_what_can_not_be_asked_is_said_with_its_code_and_mend(capsys, words, code, message):
    assert main(["fit", *SMALL, *words]) == code
    assert message in capsys.readouterr().err


def test_gpus_need_their_compiler(capsys, monkeypatch):
    monkeypatch.setattr("sys.modules", {**sys.modules, "jax_plugins.xla_cuda13": None})
    assert main(["fit", *SMALL, "topology=h100:8"]) == 64
    said = capsys.readouterr().err
    assert "--topology h100:1x8: needs jax_plugins.xla_cuda13" in said
    assert "[compile-gpu]" in said
