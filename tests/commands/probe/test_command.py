"""The probe, end to end: the largest batch against a linear scan, a rate from a real run, and what
it writes and refuses."""

import argparse
import dataclasses
import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import matplotlib.image
import pytest

from data_pipeline.base.errors import ConfigError
from data_pipeline.loader.balance import pack
from maxtrain.cli import main
from maxtrain.commands.probe import command as probe
from maxtrain.commands.probe.command import fitting_tokens, probe_batch
from maxtrain.config import load_config
from maxtrain.observe.metrics import read_metrics
from maxtrain.parallel.batches import abstract_batch
from maxtrain.trainer.abstract_step import StepMemory
from maxtrain.trainer.job import open_job

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.usefixtures("this_process")


@pytest.fixture(scope="module")
def config(tmp_path_factory, tiny_run) -> Path:
    folder = tmp_path_factory.mktemp("probe")
    return tiny_run(
        folder,
        texts=430,
        run_name="tiny",
        model={"embed_dim": 32, "mlp_dim": 64, "num_heads": 4, "max_length": 512},
        data={"sources": {"text": {"path": str(folder / "data")}}},
        schedule={"warmup_steps": 5},
    )


def loaded(config, *overrides):
    return load_config([f"config={config}", "model.vocab_size=260", *overrides])


class Remembering(StepMemory):
    """Compiles each shape once."""

    @functools.cache  # noqa: B019 - a test or two
    def bytes(self, rows, length):
        return super().bytes(rows, length)


@pytest.mark.slow
def test_the_batch_is_the_largest_of_a_linear_scan_and_nothing_is_executed(config):
    memory = Remembering(
        loaded(config, "optimizer.accumulation=2", "mesh.data=1", "mesh.fsdp=2"), jax.devices()[:2]
    )
    assert memory.unit == 4
    needed = {rows: memory.bytes(rows, 32) for rows in range(4, 4 * 5, 4)}
    assert sorted(needed.values()) == list(needed.values()), "more rows need more"
    for fitting in (8, 12):  # test_memory.py has more of them
        limit, shown = needed[fitting], []
        tries = probe_batch(
            memory,
            limit,
            32,
            lambda tries, pending, shown=shown: shown.append((len(tries), pending)),
        )
        assert (
            max(t.rows for t in tries if t.fits)
            == max(rows for rows, size in needed.items() if size <= limit)
            == fitting
        )
        assert all(t.fits == (t.num_bytes <= limit) for t in tries)
        assert shown == [*((i, t.rows) for i, t in enumerate(tries)), (len(tries), 0)]
    with pytest.raises(
        ConfigError,
        match=r"data\.batch_size=4 is the smallest .* of 0\.00 MiB a device\. Set model\.remat=full",
    ):
        probe_batch(memory, 1, 32, lambda *_: None)


@pytest.mark.long
def test_batches_as_shapes_are_those_of_the_loader(config):
    job = open_job(loaded(config), None)
    batch, _ = next(iter(job.batches(0, 1)))
    shapes = abstract_batch(job.mesh, 8, 32)
    assert {name: (x.shape, x.dtype, x.sharding) for name, x in shapes.items()} == {
        name: (x.shape, x.dtype, x.sharding) for name, x in batch.items()
    }
    assert (
        job.make_step().lower(job.abstract, shapes).as_text()
        == job.make_step().lower(job.abstract, batch).as_text()
    )


@pytest.mark.slow
def test_the_most_tokens_of_a_row_are_the_room_of_a_group(config):
    memory = Remembering(loaded(config, "mesh.data=1", "mesh.fsdp=1"), jax.devices()[:1])
    tokens = fitting_tokens(memory, memory.bytes(1, 384))
    assert tokens == 384 and pack([100, 200, 300], tokens).tokens.max() <= tokens
    assert fitting_tokens(memory, 1 << 40) == 512, "model.max_length"
    short = dataclasses.replace(
        memory.config, model=dataclasses.replace(memory.config.model, max_length=96)
    )
    assert fitting_tokens(Remembering(short, jax.devices()[:1]), 1 << 40) == 96
    with pytest.raises(
        ConfigError, match=r"not even 128 tokens .* fit into 0\.00 MiB\. Set model\.remat=full"
    ):
        fitting_tokens(memory, 1000)


@pytest.mark.long
def test_probing_both_writes_a_picture_and_a_record_and_says_how_to_train(config, capsys):
    folder = config.parent / "runs" / "tiny"
    (folder / "checkpoints" / "00000001").mkdir(parents=True)
    (folder / "checkpoints" / "00000001" / "commit.json").write_text("not to be read")
    asked = ["--memory", "2MiB", "--steps", "30", f"config={config}"]
    asked += ["optimizer.learning_rate=0.05"]
    # Limits of the training, which must not stop its trials.
    asked += ["anomaly.loss_spike=stop", "anomaly.loss_limit=0.01", "anomaly.min_steps=4"]
    assert main(["probe", *asked]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    record = json.loads((folder / "probe.json").read_text())
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["checkpoints", "probe.json", "probe.png"]
    assert (folder / "checkpoints" / "00000001" / "commit.json").read_text() == "not to be read"
    assert matplotlib.image.imread(folder / "probe.png").shape[1] > 1500, "two panels"
    rows = record["overrides"]["data.batch_size"]
    rate = record["overrides"]["optimizer.learning_rate"]
    assert f"maxtrain train config={config} anomaly.loss_spike=stop" in shown
    assert f"data.batch_size={rows} optimizer.learning_rate={rate:g}" in shown
    batch = record["batch"]
    assert batch["largest"] > rows >= 8 and rows % 8 == 0 and batch["limit_bytes"] == 2 << 20
    assert f"recommended: {rows} rows" in shown and "tokens a step (" in shown
    assert next(iter(batch["tokens_per_second"])) == "8" and " tokens/s" in shown
    assert {t["fits"] for t in batch["tries"]} == {True, False} and "does not fit" in shown
    found = record["learning_rate"]
    assert found["batch_size"] == rows, "the rate was measured with the batch"
    assert found["suggestion"] == rate and found["steps"] == 30
    losses = {trial["rate"]: trial["loss"] for trial in found["trials"]}
    assert 0.05 in losses and all(trial["steps"] <= 30 for trial in found["trials"])
    finite = [loss for loss in losses.values() if loss is not None]
    assert losses[rate] == min(finite) < 5 and found["below"] < rate < found["above"]
    assert f"learning rate {rate:g} with {rows} rows a step" in shown
    for neighbour in (found["below"], found["above"]):
        assert f"{neighbour:g}: " in shown


@pytest.mark.long
def test_the_advice_trains_no_worse_than_rates_around_it(tiny_run, tmp_path):
    """Whole runs with the batch and the rate of the advice, and with other rates."""
    steps = 60
    config = tiny_run(
        tmp_path,
        texts=430,
        steps=steps,
        run_name="advised",
        model={"embed_dim": 32, "mlp_dim": 64, "num_heads": 4, "max_length": 512},
        data={"sources": {"text": {"path": str(tmp_path / "data"), "epochs": None}}},
        schedule={"warmup_steps": 6},
        log_interval=1,
        eval_interval=0,
        optimizer={"learning_rate": 0.03},
        observe={"progress": "off"},
    )
    options = ["--memory", "2MiB", "--steps", "30", f"config={config}"]
    assert main(["probe", *options]) == 0
    found = json.loads((tmp_path / "runs" / "advised" / "probe.json").read_text())["overrides"]
    losses = {}
    for factor in (1, 3, 1 / 3):
        rate = found["optimizer.learning_rate"] * factor
        words = [f"data.batch_size={found['data.batch_size']}", f"optimizer.learning_rate={rate}"]
        name = f"factor{factor:.2f}"
        assert main(["train", f"config={config}", *words, f"run_name={name}"]) == 0
        records = read_metrics(tmp_path / "runs" / name)
        last = [record["step_loss"] for record in records if record["kind"] == "train"][-10:]
        losses[factor] = sum(last) / len(last)
    assert losses[1] < min(losses[3], losses[1 / 3]) + 0.02, losses


@pytest.mark.long
def test_the_room_of_a_group_is_printed_as_pack_takes_it(config, capsys):
    alone = ["mesh.data=1", "mesh.fsdp=-1", "model.max_length=256", f"config={config}"]
    assert main(["probe", "--what", "max_tokens", "--memory", "1GiB", *alone]) == 0
    shown = capsys.readouterr().out
    assert "max_tokens: 8 x cpu, 1.00 GiB each" in shown and "compiling 128 tokens" in shown
    assert "pack(lengths, max_tokens=256)" in shown and "maxtrain train" not in shown


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--what", "batch", "--memory", "1KiB"], 78, r"data.batch_size=8 is the smallest batch"),
        (["--memory", "much"], 64, "'much' is not a number of bytes. Write for example 16e9"),
        (
            ["--low", "1", "--high", "0.1"],
            64,
            "--low 1 must be less than --high 0.1. Set for example --low 1e-06",
        ),
        (["--low", "-1"], 64, "-1 must be more than 0"),
        (["--steps", "3"], 64, "--steps 3 must be at least 16"),
        (["--tries", "2"], 64, "--tries 2 must be at least 3"),
        (
            ["--topology", "v5e:2x4", "--what", "both"],
            64,
            "use --what batch, or leave --topology out",
        ),
        (["--what", "batch", "mesh.tensor=3"], 78, "Set mesh.tensor"),
        (
            ["--what", "learning_rate", "--low", "1e-12", "--high", "1e-11", "--steps", "16"],
            65,
            "Set --high to a higher rate",
        ),
        (["nothing"], 64, "arguments are key=value"),
    ],
)
def test_what_can_not_be_probed_is_said_with_its_code_and_mend(
    config, capsys, arguments, code, message
):
    try:
        found = main(["probe", *arguments, f"config={config}"])
    except SystemExit as stop:  # of a config that is not right
        found = stop.code
    assert found == code and message in capsys.readouterr().err


@pytest.mark.parametrize("what", ["learning_rate", "both", None])
def test_rates_of_a_run_that_samples_its_batches_are_refused_before_anything_is_tried(config, what):
    sampling = dataclasses.replace(loaded(config), objective="grpo")
    with pytest.raises(ConfigError, match="Use --what batch"):
        probe.probe(sampling, argparse.Namespace(what=what, topology=None), [])


@pytest.mark.parametrize("what", ["learning_rate", "batch", "both", "max_tokens"])
def test_a_fork_is_refused_since_it_goes_on_with_another_run(config, what):
    checkpoint = dataclasses.replace(loaded(config).checkpoint, fork_from="runs/a@3")
    forked = dataclasses.replace(loaded(config), checkpoint=checkpoint)
    with pytest.raises(ConfigError, match=r"Leave checkpoint\.fork_from out"):
        probe.probe(forked, argparse.Namespace(what=what, topology=None), [])


def test_a_topology_needs_libtpu(config, capsys, monkeypatch):
    monkeypatch.setattr("sys.modules", {**sys.modules, "libtpu": None})
    assert main(["probe", "--topology", "v5e:2x4", f"config={config}"]) == 64
    assert "--topology v5e:2x4: needs libtpu" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu, TPU's compiler, is not installed: pip install libtpu",
)
def test_a_pod_slice_is_probed_from_a_laptop(config):
    """There is no data: the model determines its vocabulary. Less memory holds fewer rows."""
    rows, model = (
        {},
        [
            f"config={config}",
            "model.vocab_size=260",
            "data.sources.text.path=nowhere",
            "mesh.data=1",
            "mesh.fsdp=-1",
        ],
    )
    for memory in ("10MiB", "7MiB"):
        command = [
            sys.executable,
            "-m",
            "maxtrain",
            "probe",
            "--topology",
            "v5e:2x2",
            "--memory",
            memory,
            *model,
        ]
        result = subprocess.run(
            command, cwd=ROOT, env=os.environ | {"COLUMNS": "100"}, capture_output=True, text=True
        )
        assert (
            result.returncode == 0
            and "WARNING" not in result.stderr
            and "Warning" not in result.stderr
        ), result.stderr
        found = json.loads((config.parent / "runs" / "tiny" / "probe.json").read_text())["batch"]
        assert found["devices"] == "4 x TPU v5 lite" and found["unit"] == 4
        rows[memory] = found["batch_size"]
    assert 4 <= rows["7MiB"] < rows["10MiB"]
    bad = [
        sys.executable,
        "-m",
        "maxtrain",
        "probe",
        "--topology",
        "v5e:3x5x7",
        *model,
    ]
    result = subprocess.run(bad, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 64 and "Write KIND:CHIPS, for example v5e:2x4" in result.stderr


def test_the_command_explains_itself(capsys):
    assert probe.main(["--help"]) == 0
    assert "--topology NAME" in capsys.readouterr().out
