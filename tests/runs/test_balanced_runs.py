"""Runs on balanced batches: resumed bit for bit, replayed, the same on two processes, and refused
where there is nothing to balance."""

import os
import random
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.base.errors import ConfigError
from data_pipeline.prepare import command as prepare
from maxtrain.checkpoint.listing import saved_digests
from maxtrain.commands import replay
from maxtrain.config import load_config
from maxtrain.observe.metrics import read_metrics
from maxtrain.trainer.loop import main
from tests.support.shared import WORDS

REPOSITORY = Path(__file__).parents[2]
pytestmark = [pytest.mark.long, pytest.mark.usefixtures("this_process")]


def train(config: Path, run_name: str, *overrides: str) -> int:
    """Exit code of a run in this process."""
    return main(load_config([f"config={config}", f"run_name={run_name}", *overrides]))


@pytest.fixture(scope="module")
def config(tmp_path_factory, tiny_run) -> Path:
    """A config file beside short documents of very different lengths, and a finished run."""
    folder = tmp_path_factory.mktemp("balanced")
    rng = random.Random(1)
    (folder / "short").mkdir()
    for number in range(120):
        words = rng.choices(WORDS, k=rng.choice([1, 1, 2, 3, 12]))
        (folder / "short" / f"{number}.txt").write_text(" ".join(words))
    made = [str(folder / "ragged"), "--text", f"{folder}/short/*.txt", "--workers", "1"]
    assert prepare.main(made) == 0
    path = tiny_run(
        folder,
        steps=8,
        checkpoint_interval=4,
        model={"max_length": 64},
        data={
            "sources": {"text": {"path": str(folder / "ragged"), "epochs": None}},
            "seq_length": 64,
            "batch_size": 32,
            "packing": "balanced",
            "balance_rows": 8,
        },
        schedule={"warmup_steps": 2},
    )
    assert train(path, "whole") == 0
    return path


def test_a_resumed_run_is_as_never_stopped_and_can_be_replayed(config):
    folder = config.parent / "runs" / "whole"
    expected = saved_digests(folder / "checkpoints")[8]
    shutil.rmtree(folder / "checkpoints" / "00000008")
    assert train(config, "whole") == 0
    assert saved_digests(folder / "checkpoints")[8] == expected
    assert replay.main([str(folder), "--steps", "4:8"]) == 0


def test_a_batch_is_judged_by_its_own_rows(config):
    """With 32 rows, one for each document, hardly a tenth would be targets."""
    records = [r for r in read_metrics(config.parent / "runs" / "whole") if r["kind"] == "train"]
    assert min(record["fill"] for record in records) > 0.3
    strict = ["data.min_fill=0.3", "data.fill_patience=2", "steps=4"]
    assert train(config, "strict", *strict) == 0


def test_its_losses_are_those_of_padded_rows(config):
    """The same documents in every step, in fewer rows."""
    pad = ["data.packing=pad", "data.balance_rows=1"]
    assert train(config, "padded", *pad) == 0
    runs = config.parent / "runs"
    ours, theirs = (
        [r for r in read_metrics(runs / name) if r["kind"] == "train"]
        for name in ("whole", "padded")
    )
    for name in ("loss", "grad_norm", "tokens_seen"):
        found = [[record[name] for record in records] for records in (ours, theirs)]
        np.testing.assert_allclose(*found, rtol=2e-3, err_msg=name)
    assert np.mean([r["fill"] for r in ours]) > 1.5 * np.mean([r["fill"] for r in theirs])


@pytest.mark.slow
@pytest.mark.processes
def test_two_processes_are_as_one(config):
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port = listener.getsockname()[1]
    job = [f"mesh.coordinator=localhost:{port}", "mesh.num_processes=2", "mesh.simulated_devices=4"]
    words = [f"config={config}", "run_name=two", *job]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "maxtrain.train", *words, f"mesh.process_id={number}"],
            cwd=REPOSITORY,
            env=os.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(2)
    ]
    try:
        told = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(told)
    runs = config.parent / "runs"
    two, one = (
        [r for r in read_metrics(runs / name) if r["kind"] == "train"] for name in ("two", "whole")
    )
    for name in ("loss", "grad_norm", "tokens_seen", "fill"):
        found = [[record[name] for record in records] for records in (two, one)]
        np.testing.assert_allclose(*found, rtol=1e-4, err_msg=name)
    assert [record["batch"] for record in two] == [record["batch"] for record in one]


def test_rows_that_the_mesh_does_not_divide_are_refused(config):
    sets = f"eval.sets.held.path={config.parent / 'ragged'}"
    with pytest.raises(ConfigError, match=r"data\.balance_rows=3 must be divisible by mesh"):
        train(config, "refused", "data.balance_rows=3")
    with pytest.raises(ConfigError, match=r"eval\.batch_size=null means data\.batch_size=33"):
        train(config, "refused", "data.batch_size=33", sets)
