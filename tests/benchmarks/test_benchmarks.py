"""The benchmarks run and print their tables; their figures are not judged here."""

import dataclasses
import math
import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from benchmarks import (
    attention,
    balance,
    checkpoint,
    checks,
    data,
    experts,
    families,
    fit,
    fit_here,
    one_core,
    prefetch,
    prepare,
    quantized,
    remote,
    rl_speed,
    serving,
    stage_seconds,
    stages,
    train_step,
    weak_scaling,
    zero,
)
from maxtrain.commands.fit.estimate import RowBatchShape
from maxtrain.ops.attention.mask import Mask
from maxtrain.parallel.compiled.roofline import CollectiveTime, Roofline
from maxtrain.parallel.hardware import Links


@pytest.mark.slow
def test_train_step_prints_a_row_for_each_variant(monkeypatch, capsys):
    small = dataclasses.replace(
        train_step.MODEL, num_layers=1, embed_dim=64, mlp_dim=64, num_heads=2, num_kv_heads=2
    )
    monkeypatch.setattr(train_step, "MODEL", small)
    monkeypatch.setattr(train_step, "LENGTH", 64)
    monkeypatch.setattr(train_step, "keep_host_memory", lambda: None)
    with jax.numpy_dtype_promotion("standard"):  # optax's own arithmetic is not strict
        assert train_step.main(["--steps", "1"]) == 0
    shown = capsys.readouterr().out
    for compute, activations, remat in train_step.VARIANTS:
        assert f"| {compute} | {activations} | {remat} |" in shown
    assert "times as fast as float32" in shown


def test_pairs_of_queries_and_keys_are_those_that_the_mask_shows():
    for rows in attention.kinds_of_rows(2, 2048):
        mask = Mask.of_rows(jax.numpy.asarray(rows.segments)).within(rows.window)
        assert rows.pairs == int(mask.visible().sum()), rows.name


@pytest.mark.long
def test_attention_prints_a_row_for_each_kind_of_rows(monkeypatch, tmp_path, capsys):
    """Runs on CPUs, with the kernels that they have."""
    monkeypatch.setattr(attention, "HEADS", ((2, 1, 16),))
    monkeypatch.setattr(attention, "RESULTS", tmp_path / "attention.md")
    assert attention.main(["--rows", "1", "--length", "64", "--repeats", "1", "--write"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (tmp_path / "attention.md").read_text().splitlines()[-len(lines) :] == lines
    assert lines[0] == "| heads | rows | eager, ms | TFLOP/s | xla, ms | TFLOP/s |"
    for line, rows in zip(lines[2:], attention.kinds_of_rows(1, 64), strict=True):
        assert line.startswith(f"| 2 and 1 of 16 | {rows.name} | "), line
        assert line.count("|") == 7


@pytest.mark.slow
def test_checks_are_held_against_a_bare_step(monkeypatch, capsys):
    small = dataclasses.replace(
        train_step.MODEL, num_layers=1, embed_dim=64, mlp_dim=64, num_heads=2, num_kv_heads=2
    )
    monkeypatch.setattr(train_step, "MODEL", small)
    monkeypatch.setattr(train_step, "LENGTH", 64)
    monkeypatch.setattr(checks, "keep_host_memory", lambda: None)
    with jax.numpy_dtype_promotion("standard"):
        assert checks.main(["--steps", "2"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"\| bare step \| [\d.]+ \| \+0.00% \|", shown)
    assert (
        re.search(r"watch on anomalies \| [\d.,]+ \| [+-]", shown) and "once in 10 steps" in shown
    )
    assert (
        re.search(r"replicas_interval=100: [^|]+\| [\d.]+ \| \+", shown)
        and "repeat_interval=100: a step made" in shown
    )


@pytest.mark.slow
def test_experts_print_a_row_for_each_balance_and_each_kernel(capsys):
    small = ["--tokens", "512", "--embed-dim", "64", "--width", "16", "--repeats", "1"]
    with jax.numpy_dtype_promotion("standard"):
        assert experts.main(["--steps", "2", *small]) == 0
    shown = capsys.readouterr().out
    for name in (*experts.KINDS, "dense block", "blocks", "ragged", "eager"):
        assert f"| {name} | " in shown


@pytest.mark.slow
@pytest.mark.processes
def test_steps_of_grpo_print_a_row_and_say_that_nothing_is_beside_them(capsys):
    small = ["--layers", "1", "--width", "32", "--inner", "32", "--heads", "2", "--kv-heads", "1"]
    few = ["--prompt", "5", "--tokens", "6", "--prompts", "2", "--samples", "2", "--turns", "1"]
    assert rl_speed.main([*small, *few, "--other-python", "no-such-python"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"\| maxtrain \| [\d,]+ \| .* \| [56]\.\d \|", shown)
    assert "| TRL | not measured |" in shown and "(--other-python)" in shown


def test_rates_of_stacks_are_medians_over_all_steps_of_all_turns():
    turns = [
        rl_speed.SpeedResult([100.0, 120.0], [10.0, 30.0], {"length": 8.0}),
        rl_speed.SpeedResult([1000.0], [20.0], {"length": 6.0}),
    ]
    assert rl_speed.row("ours", turns) == "| ours | 120 | 100 to 1,000 | 20 | 10 to 30 | 7.0 |"


def test_kind_tells_attention_from_head_and_weights():
    assert (
        train_step.kind("ynn_fusion.1", "jit(step)/jvp(bkmh,bkhs->bkms)/dot_general")
        == "attention: products"
    )
    assert (
        train_step.kind("ynn_fusion", "jit(step)/while/body/dot_general")
        == "head and loss: products"
    )
    assert (
        train_step.kind("ynn_fusion", "jit(step)/jvp(...i,io->...o)/dot_general")
        == "layers: products with weights"
    )


@pytest.mark.long
def test_data_prints_a_row_for_each_way_to_make_rows(monkeypatch, capsys):
    small = {"DOCUMENTS": 800, "TOKENS": 2000, "REPEATS": 1, "SHARDS": 20, "MEMORY_TOKENS": 500_000}
    for name, value in small.items():
        monkeypatch.setattr(data, name, value)
    monkeypatch.setattr(data, "ROWS", (("stream", 2, 512), ("bins", 2, 512), ("pad", 2, 512)))
    monkeypatch.setattr(one_core.os, "sched_setaffinity", lambda *_: None, raising=False)
    monkeypatch.setattr("sys.argv", ["data"])
    monkeypatch.setattr(data, "ahead", lambda paths: [f"ahead with {len(paths)} sources"])
    data.main()
    shown = capsys.readouterr().out
    for what in (
        "| stream | 2 x 512",
        "| bins | 2 x 512",
        "| pad | 2 x 512",
        "grain's DataLoader",
        "grain's first fit",
        "at row 1e+12",
        "20 shards",
        "ahead with 2 sources",
        "MiB",
    ):
        assert what in shown


@pytest.mark.long
def test_prefetch_prints_a_row_for_each_way(tmp_path, monkeypatch, capsys):
    for name, value in {"ROWS": 2, "LENGTH": 64, "STEPS": 3, "REPEATS": 1}.items():
        monkeypatch.setattr(prefetch, name, value)
    monkeypatch.setattr(
        prefetch.jax, "make_mesh", lambda *_: jax.sharding.Mesh(jax.devices()[:1], ("data",))
    )
    prefetch.main([str(data.make_source(tmp_path / "a", 1, 20))])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8 and all(line.count("|") == 6 for line in lines[2:])
    assert "one after the other" in lines[4] and "data.prefetch=4" in lines[7]


def test_prepare_prints_its_ratio_to_the_bare_loop(monkeypatch, capsys, tmp_path):
    for name, value in {"ENTRIES": 300, "INPUT_BYTES": 20_000, "REPEATS": 1}.items():
        monkeypatch.setattr(prepare, name, value)
    monkeypatch.setattr(prepare.tempfile, "gettempdir", lambda: str(tmp_path))
    library = prepare.python_stdlib("", prepare.InputOptions())[:3]
    monkeypatch.setattr(prepare, "python_stdlib", lambda *_: library)
    monkeypatch.setattr(one_core.os, "sched_setaffinity", lambda *_: None, raising=False)
    monkeypatch.setattr(one_core, "__file__", str(tmp_path / "one_core.py"))
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setattr("sys.argv", ["prepare", "--write"])
    prepare.main()
    shown = capsys.readouterr().out
    assert (
        "| `tokenizers` in a bare loop |" in shown
        and "| `prepare --dedupe` |" in shown
        and "BPE of 300 entries" in shown
    )
    written = (tmp_path / "results" / "prepare.md").read_text()
    assert (
        written.startswith("# Preparing\n\nOne core of ")
        and "python -m benchmarks.prepare --write" in written
        and shown in written
    )


@pytest.mark.long
def test_balance_prints_a_row_for_each_way():
    lines = balance.measure(64, 2, 6.0, 8192, (1.0, 1e-4), slow=True)
    assert [line.split("|")[1].strip() for line in lines] == [
        "`pack`",
        "LPT",
        "Karmarkar-Karp",
        "first fit, longest first",
    ]
    assert all(line.count("|") == 7 for line in lines)
    for way in (balance.karmarkar_karp, balance.longest_first):
        assert sorted(i for group in way([5, 4, 3, 2, 1], 2) for i in group) == [0, 1, 2, 3, 4]


def test_remote_prints_a_row_for_each_state_of_the_cache(tmp_path, monkeypatch, capsys):
    for name, value in {"_BATCHES": 2, "_REPEATS": 1, "_LENGTH": 64}.items():
        monkeypatch.setattr(remote, name, value)
    make = remote.make
    monkeypatch.setattr(remote, "make", lambda folder: make(folder, shards=1, documents=30))
    remote.shards(f"file://{tmp_path}")
    shown = capsys.readouterr().out
    assert all(f"| {name} |" in shown for name in ("local", "cold cache", "warm cache"))


@pytest.mark.every_dose
@pytest.mark.long
def test_remote_saves_and_restores_beside_plain_copies(tmp_path, capsys):
    remote.checkpoints(f"file://{tmp_path}/there", mib=16, rounds=1)
    shown = capsys.readouterr().out
    for row in ("one file, uploaded", "save", "one file, downloaded", "restore to an empty disk"):
        assert f"| {row} | 1 |" in shown
    remote.between(f"file://{tmp_path}/there", mib=16, rounds=1)
    shown = capsys.readouterr().out
    for what in ("uploaded", "on the disk"):
        assert f"| {what}: until the state may change | 1 |" in shown
        assert f"| {what}: from there until it counts | 1 |" in shown
    assert not list(tmp_path.rglob("*.json")) and not list(tmp_path.rglob("plain"))


@pytest.mark.long
def test_serving_prints_a_row_for_each_number_of_streams(tmp_path, monkeypatch, capsys):
    small = dataclasses.replace(
        serving.MODEL, vocab_size=300, num_layers=1, embed_dim=32, mlp_dim=32, max_length=64
    )
    monkeypatch.setattr(serving, "MODEL", small)
    sizes = {"STREAMS": (1, 3), "SLOTS": 2, "PROMPT": 8, "NEW": 16, "TEXT_FILES": 2}
    for name, value in (sizes | {"ROUNDS": 1, "TOGETHER": (1, 2)}).items():
        monkeypatch.setattr(serving, name, value)
    monkeypatch.setattr(serving, "RESULTS", tmp_path / "serving.md")
    assert serving.main(["--write"]) == 0
    shown = capsys.readouterr().out
    for streams in (1, 3):
        assert re.search(rf"\| {streams}( \| [\d,]+){{5}} \|\n", shown)
    written = (tmp_path / "serving.md").read_text()
    assert written.startswith("# Serving\n\n`python -m benchmarks.serving --write` on ")
    assert written in shown


@pytest.mark.slow
def test_zero_prints_a_row_for_each_stage_and_later_ones_hold_less(monkeypatch, capsys):
    small = dataclasses.replace(
        zero.MODEL,
        vocab_size=64,
        num_layers=1,
        embed_dim=64,
        mlp_dim=64,
        num_heads=2,
        num_kv_heads=2,
    )
    monkeypatch.setattr(zero, "MODEL", small)
    monkeypatch.setattr(zero, "LENGTH", 16)
    with jax.numpy_dtype_promotion("standard"):
        assert zero.main() == 0
    rows = [
        line.split("|") for line in capsys.readouterr().out.splitlines() if re.match(r"\| \d", line)
    ]
    state = [float(row[2]) for row in rows]
    assert [int(row[1]) for row in rows] == [0, 1, 2, 3] and state[0] > state[1] >= state[
        2
    ] > state[3]


@pytest.mark.long
def test_checkpoint_costs_and_damage_are_tables_and_nothing_is_silent(
    monkeypatch, capsys, tmp_path
):
    words = [
        "checkpoint",
        "--mib",
        "16",
        "--rounds",
        "1",
        "--pairs",
        "1",
        "--flips",
        "10",
        "--directory",
        str(tmp_path),
    ]
    monkeypatch.setattr("sys.argv", words)
    assert checkpoint.main() == 0
    shown = capsys.readouterr().out
    figures = r" \| 1( \| [\d.]+){5} \|\n"
    assert re.search(rf"\| restore{figures}\| restore by Orbax{figures}", shown)
    assert re.search(rf"\| restore with checks{figures}\| restore without checks{figures}", shown)
    assert "| flipped bit | 10 | 10 | 0 |" in shown and "| removed | 2 | 2 | 0 |" in shown


@pytest.mark.slow
@pytest.mark.processes
def test_the_memory_of_saves_is_a_table(monkeypatch, capsys, tmp_path):
    words = ["--mib", "64", "--rounds", "0", "--pairs", "0", "--flips", "0", "--memory"]
    monkeypatch.setattr("sys.argv", ["checkpoint", *words, "--directory", str(tmp_path)])
    assert checkpoint.main() == 0
    rows = re.findall(
        r"^\| (\w+) \| (\d) \| [\d,]+ \| (\d\.\d\d) \|$", capsys.readouterr().out, re.MULTILINE
    )
    assert [row[:2] for row in rows] == [
        ("synchronous", "0"),
        ("asynchronous", "0"),
        ("asynchronous", "3"),
    ]
    # Steps can't change in place what is being written, and no more than that is there twice.
    assert float(rows[0][2]) < 0.7 < float(rows[2][2]) < 1.7


@pytest.mark.long
def test_quantized_prints_a_row_for_each_base(capsys):
    small = ["num_layers=1", "embed_dim=256", "mlp_dim=512", "num_heads=2", "num_kv_heads=2"]
    words = [f"model.{word}" for word in (*small, "vocab_size=64", "max_length=32")]
    words += ["config=quickstart", "data.seq_length=32", "model.lora.base=nf4"]
    with jax.numpy_dtype_promotion("standard"):  # optax's own arithmetic is not strict
        assert quantized.main([*words, "model.lora.base_block=8"]) == 0
    rows = re.findall(r"\| (full|int8|nf4) \| ([\d.]+) \| ([\d.]+) \|", capsys.readouterr().out)
    assert [base for base, _, _ in rows] == ["full", "int8", "nf4"]
    sizes = [float(parameters) for _, _, parameters in rows]
    assert sizes == sorted(sizes, reverse=True)


def test_families_writes_a_row_for_each_case_and_leaves_those_of_others(
    tmp_path, monkeypatch, capsys
):
    def row(case, folder):
        assert folder.is_dir()
        return [case, "1.0e-06", *["same"] * 14]

    monkeypatch.setattr(families, "RESULTS", tmp_path / "families.md")
    monkeypatch.setattr(families, "row", row)
    assert families.main(["--only", "qwen2", "gemma2", "--write"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    monkeypatch.setattr(families, "row", lambda case, _: [case, "2.0e-06", families.same(False)])
    assert families.main(["--only", "qwen2", "--write"]) == 1
    written = families.RESULTS.read_text()
    assert written.startswith("# Every family\n\n`python -m benchmarks.families --write` on ")
    head, sides, *rows = [line for line in written.splitlines() if line.startswith("| ")]
    assert rows[0].startswith("| gemma2 | 1.0e-06 | same |")
    assert rows[1:] == ["| qwen2 | 2.0e-06 | **differs** |"]
    assert head.count("|") == sides.count("|") == rows[0].count("|")


def test_families_are_apart_by_a_share_of_the_largest_number():
    assert families.apart([0.0, 4.0], [0.0, 5.0]) == pytest.approx(0.2)
    assert families.apart([0.0], [0.0]) == 0
    assert families.apart([1e-9], [0.0]) == families.apart([np.nan, 1.0], [2.0, 1.0]) == np.inf
    worst = families.worst({"a": [1.0], "b": [np.nan]}, {"a": [2.0], "b": [1.0]})
    assert worst == (np.inf, "b")


def test_families_documents_are_the_same_packed_and_alone():
    packed, alone, places = families.documents()
    assert max(families.DOCUMENTS) > 16
    for number, length in enumerate(families.DOCUMENTS):
        assert len(places[number]) == 3
        for row, start in places[number]:
            there = slice(start, start + length)
            assert len(set(packed["segment_ids"][row, there])) == 1
            for name in ("inputs", "targets", "positions", "loss_mask"):
                expected = alone[name][number, :length]
                np.testing.assert_array_equal(packed[name][row, there], expected)
    assert packed["loss_mask"].sum() == 3 * alone["loss_mask"].sum() == 3 * (42 - 3)
    assert (packed["segment_ids"] == 0).sum() == 3 * (families.ROW - 42)


def test_rows_of_what_fits_are_kept_when_others_are_measured(monkeypatch, tmp_path, capsys):
    line = {"kind": "all-gather", "axes": ["fsdp"], "count": 3, "num_bytes": 2**30, "seconds": 0.5}
    line["is_between_slices"] = False
    record = {
        "mesh": {"data": 1, "fsdp": 8},
        "rows": 16,
        "seq_length": 64,
        "accumulation": 2,
        "total_bytes": 3 << 30,
        "limit_bytes": 4 << 30,
        "fits": True,
        "collectives": [line, line | {"kind": "all-reduce", "num_bytes": 10}],
        "compiler_warnings": ["as the last resort"],
        "estimate": {
            "limit": "network",
            "step_seconds": 0.5,
            "step_seconds_without_overlap": 0.75,
        },
    }
    refused = record | {"fits": False, "total_bytes": None, "refused_bytes": 6 << 30}
    refused |= {"collectives": [], "estimate": None}
    written = tmp_path / "fit.md"
    monkeypatch.setattr(fit, "RESULTS", written)
    monkeypatch.setattr(fit, "measure", lambda case: record)
    assert fit.main(["--only", "llama3_8b on h100:8x8", "--write"]) == 0
    monkeypatch.setattr(fit, "measure", lambda case: refused)
    assert fit.main(["--only", "sft_qwen", "--write"]) == 0
    tables, beyond = written.read_text().split("## Beyond")
    assert "| 4,096 | 0.38 |" in beyond
    rows = [row for row in tables.splitlines() if row.startswith("| ")]
    assert rows[1:3] == [
        "| sft_qwen2_5_0_5b | h200:1 | fsdp=8 | 16 x 64 in 2 | 6.00 | **150%, does not fit** |  |  |",
        "| llama3_8b | h100:8x8 | fsdp=8 | 16 x 64 in 2 | 3.00 | 75% | network | 0.50 (0.75) |",
    ]
    assert rows[4:] == ["| llama3_8b | h100:8x8 | all-gather | fsdp | 3 | 1.000 | 0.500 |"]
    told = capsys.readouterr()
    assert rows[1] in told.out and "XLA gathers an array whole: as the last resort" in told.err


def test_weak_scaling_keeps_rows_that_are_not_measured(monkeypatch, tmp_path, capsys):
    lines = [
        CollectiveTime("all-gather", ("fsdp",), 3, 2.0 * 2**20, 1.0),
        CollectiveTime("all-gather", ("data",), 1, 1.0 * 2**20, 1.0),
        CollectiveTime("all-reduce", ("fsdp",), 1, 4.0 * 2**20, 1.0),
    ]
    found = SimpleNamespace(
        lines=lines,
        total=5 << 20,
        times=Roofline(0.001, 0.002, 0.003),
        model_share=6e9,
        flops=7e9,
        compile_seconds=1.0,
        warnings=[],
    )
    written = tmp_path / "weak_scaling.md"
    monkeypatch.setattr(weak_scaling, "RESULTS", written)
    monkeypatch.setattr(weak_scaling, "measure", lambda case: found)
    # Not that of h100:8x8 beside it.
    assert weak_scaling.main(["--only", "fsdp on h100:8 ", "--write"]) == 0
    written.write_text(f"{written.read_text()}\n## What grows\n\nBytes.\n")
    larger = SimpleNamespace(**vars(found) | {"total": 8 << 20})
    monkeypatch.setattr(weak_scaling, "measure", lambda case: larger)
    assert weak_scaling.main(["--only", "fsdp on v5p:2x2x2", "--write"]) == 0
    text = written.read_text()
    rows = [row for row in text.splitlines() if ":" in row and row.startswith("| ")]
    sent = "3.00 | 0.00 | 4.00 | 0.00 | 0.00 | 3.000 | 3.000 |"
    assert rows == [
        f"| fsdp | v5p:2x2x2 | 6.0 | 7.0 | 8.00 | {sent}",
        f"| fsdp | h100:8 | 6.0 | 7.0 | 5.00 | {sent}",
    ]
    assert rows[0] in capsys.readouterr().out
    assert text.endswith("\n\n## What grows\n\nBytes.\n")


@pytest.mark.every_dose
@pytest.mark.long
def test_each_device_has_as_many_rows_on_any_mesh_of_weak_scaling():
    found = weak_scaling.cases()
    assert len({(case.mesh, case.topology) for case in found}) == len(found)
    for case in found:
        _, _, shape = case.topology.partition(":")
        assert math.prod(map(int, shape.split("x"))) == case.num_devices
        rows = case.config(weak_scaling.MODEL).data.batch_size
        assert rows == weak_scaling.ROWS_OF_A_DEVICE * case.num_devices


def test_the_waiting_of_measured_steps_is_that_of_their_forms():
    """The times are those of the iterations alone."""
    forms = stage_seconds.FORMS
    times = [form.iterations() / form.rounds for form in forms]
    assert {form.rounds for form in forms} == {1, 2}
    assert stage_seconds.waiting(forms, times) == pytest.approx([form.waiting() for form in forms])


@pytest.mark.slow
@pytest.mark.parametrize("fewer", [{"accumulation": 2}, {"schedule": "1f1b"}], ids=str)
def test_what_stages_keep_is_what_the_compiler_counts(fewer):
    devices = jax.devices()[: stages.STAGES]
    found = [stages.StageCase(16), stages.StageCase(16, **fewer)]
    with jax.numpy_dtype_promotion("standard"):
        one, less = (stages.temporaries(case, devices) for case in found)
    assert one - less > (found[0].kept - found[1].kept) * stages.UNIT


@pytest.mark.long
def test_1f1b_keeps_as_much_however_many_micro_batches_there_are():
    """With twice as many, the batch and the positions of its tokens grow, but no activations."""
    devices = jax.devices()[: stages.STAGES]
    with jax.numpy_dtype_promotion("standard"):
        few = stages.temporaries(stages.StageCase(8, schedule="1f1b"), devices)
        many = stages.temporaries(stages.StageCase(16, schedule="1f1b"), devices)
    assert many - few < stages.UNIT


def test_how_far_a_line_is_from_a_compiled_step():
    needed = {1: 100, 2: 150, 4: 250, 8: 500}
    assert fit_here.apart(needed, 1, 2, 4) == 0
    assert fit_here.apart(needed, 1, 2, 8) == pytest.approx(450 / 500 - 1)


@pytest.mark.long
def test_the_line_through_two_compiled_steps_is_near_a_larger_one():
    """Each layer is computed twice, and the smallest steps show too little of that."""
    [case] = [case for case in fit_here.CASES if case.name == "remat=full"]
    with jax.numpy_dtype_promotion("standard"):
        needed = fit_here.needed_by_units(case, (2, 4, 8))
    assert abs(fit_here.apart(needed, 2, 4, 8)) < 0.1


@pytest.mark.long
def test_what_fit_counts_is_beside_a_step_of_a_gpu(monkeypatch):
    """A CPU stands in for the GPU here."""
    monkeypatch.setattr(fit_here, "links", lambda _: Links(1e11, 1.0, None))
    small = fit_here.StepCase(
        "small", ("model.num_layers=1", "model.embed_dim=64"), RowBatchShape(2, 64)
    )
    with jax.numpy_dtype_promotion("standard"):
        cells = [cell.strip() for cell in fit_here.gpu_row(small, 1).strip("|").split("|")]
    assert cells[:2] == ["small", "2 x 64"]
    assert len(cells) == 12
    assert re.fullmatch(r"\d+%", cells[8])


def test_what_is_said_of_more_devices_begins_with_rows_that_were_compiled():
    text = fit.RESULTS.read_text()
    assert fit.BEYOND in text
    row = re.compile(r"\| llama3_405b [^|]*\| h100:(\d+)x8 \|[^|]*\|[^|]*\| ([\d.]+) \| \d+% \|")
    compiled = {int(hosts) * 8: memory for hosts, memory in row.findall(text)}
    said = re.findall(r"\| ([\d,]+) \|.*\| ([\d.]+) \| compiled \|", fit.BEYOND)
    assert {int(devices.replace(",", "")): memory for devices, memory in said} == compiled
