"""Runs whose reference is evaluated once: the same losses as where it is evaluated in each step,
files that are not its own, and passes that were stopped."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import create_autospec

import numpy as np
import pytest

from data_pipeline.base.errors import ConfigError
from data_pipeline.loader.loader import open_evaluation
from data_pipeline.shards import TokenShards
from maxtrain.commands import replay
from maxtrain.config import load_config
from maxtrain.config.schema import ModelConfig, RoutingConfig, RunConfig
from maxtrain.observe.metrics import Stopwatch, read_metrics
from maxtrain.observe.progress import Progress
from maxtrain.train_step.state import TrainState
from maxtrain.trainer import reference_logprobs
from maxtrain.trainer.job import Job
from maxtrain.trainer.reference_file import ReferenceFile
from maxtrain.trainer.reference_model import FrozenModel
from tests.runs.test_distilled_runs import final_state
from tests.support.preference_runs import STEPS, prepared_labels, prepared_pairs, train

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("this_process")]
REPOSITORY = Path(__file__).parents[2]
STORED = "dpo.reference_logprobs=stored"


def preferences(config: Path, *overrides: str) -> list[str]:
    """Overrides of a run that learns which answers are preferred."""
    base = config.parent / "runs" / "base"
    return ["objective=dpo", f"checkpoint.init_from={base}", *overrides]


def files(config: Path, part: str = "train") -> list[Path]:
    """Return the files of the log-probabilities of references; `*` for all parts."""
    return sorted((config.parent / "data").glob(f"{part}/*.logprobs"))


def losses(config: Path, run_name: str) -> list[float]:
    """Return the losses of all steps and evaluations of a run."""
    folder = config.parent / "runs" / run_name
    return [record["preference"] for record in read_metrics(folder) if "preference" in record]


@pytest.fixture(scope="module")
def config(tmp_path_factory, this_process) -> Path:
    """A config file beside pairs, a run that has read them, and two that have learnt from them: one
    asks the reference in each step, the other has stored what it gives."""
    path = prepared_pairs(tmp_path_factory.mktemp("stored"))
    assert train(path, "base", "steps=4", "eval_at_start=false") == 0
    assert train(path, "computed", *preferences(path)) == 0
    assert not files(path)
    assert train(path, "stored", *preferences(path, STORED)) == 0
    return path


@pytest.fixture
def same_files(config) -> Iterator[None]:
    """Restore the files of the log-probabilities of references after a test."""
    before = {path: path.read_bytes() for path in files(config, "*")}
    yield
    for path in files(config, "*"):
        path.unlink()
    for path, content in before.items():
        path.write_bytes(content)


def test_losses_are_those_of_the_reference_asked_in_each_step(config):
    expected = losses(config, "computed")
    assert len(expected) == STEPS + 2
    np.testing.assert_allclose(losses(config, "stored"), expected, rtol=0, atol=1e-6)
    assert expected[-1] < 0.9 * expected[0]
    for part in ("train", "eval"):
        (path,) = files(config, part)
        shards = TokenShards.open(path.parent)
        numbers = np.frombuffer(path.read_bytes().partition(b"\n")[2], "<f4")
        assert numbers.shape == (shards.num_documents,)
        assert (numbers < 0).all()


@pytest.mark.usefixtures("same_files")
def test_a_run_goes_on_and_is_replayed_bit_for_bit_and_reads_what_is_there(config, capfd):
    folder = config.parent / "runs" / "stored"
    expected = final_state(folder)
    shutil.rmtree(folder / "checkpoints" / f"{STEPS:08d}")
    before = {path: path.read_bytes() for path in files(config)}
    assert train(config, "stored", *preferences(config, STORED)) == 0
    told = capfd.readouterr().out
    assert f"196 log-probabilities from {files(config)[0]}" in told
    assert "computed in" not in told
    assert final_state(folder) == expected
    assert replay.main([str(folder), "--steps", "4:12"]) == 0
    assert {path: path.read_bytes() for path in files(config)} == before
    other = preferences(config, STORED, f"dpo.reference={folder}")
    shutil.rmtree(folder / "checkpoints" / f"{STEPS:08d}")
    assert train(config, "stored", *other) == 78
    assert "Set dpo.reference to that one" in capfd.readouterr().err


@pytest.mark.usefixtures("same_files")
def test_a_pass_that_was_stopped_goes_on_where_it_was_saved(config, monkeypatch, capfd):
    (path,) = files(config)
    whole = path.read_bytes()
    path.unlink()
    monkeypatch.setattr(reference_logprobs, "_SAVE_SECONDS", -1.0)
    monkeypatch.setattr(reference_logprobs, "_BATCHES_AT_A_TIME", 1)
    monkeypatch.setattr(reference_logprobs, "_AHEAD", 0)
    taken = []
    take = reference_logprobs.StoredReference._take

    def failing(self, part, documents, sums, numbers):
        taken.append(part.key)
        if len(taken) == 3:
            raise KeyboardInterrupt
        take(self, part, documents, sums, numbers)

    monkeypatch.setattr(reference_logprobs.StoredReference, "_take", failing)
    overrides = preferences(config, STORED, "steps=1")
    assert train(config, "stopped", *overrides) == 75
    assert files(config) == [path]
    left = np.isnan(np.frombuffer(path.read_bytes().partition(b"\n")[2], "<f4"))
    assert 0 < left.sum() < left.size
    assert train(config, "stopped", *overrides) == 0
    assert f"of {left.sum()} documents of data.sources.pairs" in capfd.readouterr().out
    data = open_evaluation(path.parent, load_config([f"config={config}"]).data, 8)
    assert len(taken) == data.num_batches + 1
    assert path.read_bytes() == whole


@pytest.mark.parametrize("change", ["flip", "cut", "other data", "infinite", "not finite now"])
@pytest.mark.usefixtures("same_files")
def test_a_file_that_does_not_fit_is_told(config, monkeypatch, capfd, change):
    (path,) = files(config)
    whole = path.read_bytes()
    line, _, body = whole.partition(b"\n")
    numbers = np.frombuffer(body, "<f4").copy()
    about = {name: value for name, value in json.loads(line).items() if name != "digest"}
    message = f"{path}: is damaged"
    if change == "flip":
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    elif change == "cut":
        path.write_bytes(whole[:-4])
    elif change == "other data":
        other = ReferenceFile({**about, "data": "another"}, len(numbers), [path.parent])
        shutil.move(other.save(numbers), path)
        message = "has data=another, and not"
    elif change == "infinite":
        numbers[3] = -np.inf
        own = ReferenceFile(about, len(numbers), [path.parent])
        assert own.save(numbers) == path
        message = "has numbers that are infinite"
    else:
        path.unlink()
        monkeypatch.setattr(
            reference_logprobs,
            "document_log_probs",
            lambda model, batch: np.nan * batch["segment_ids"][:, :1] + np.zeros((1, 97)),
        )
        message = "log-probability that is not finite"
    code = train(config, "refused", *preferences(config, STORED))
    told = capfd.readouterr().err.replace("\n", "")
    assert code == 65
    assert message in told


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["dpo.loss_type=kto"], "needs them behind other prompts"),
        (["data.corruption.rate=0.1", "data.corruption.token_id=1"], "replaces other tokens"),
        (["dpo.loss_type=simpo"], "which is free of a reference. Leave it out"),
    ],
)
def test_what_can_not_be_stored_is_refused(config, overrides, message):
    given = [f"config={config}", *preferences(config, STORED), *overrides]
    with pytest.raises(ValueError, match=message):
        load_config(given)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ["data.packing=pad", "dpo.loss_type=ipo"],
        ["data.packing=balanced", "data.batch_size=16", "data.balance_rows=8"],
        ["mesh.data=2", "mesh.fsdp=4", "data.batch_size=16", "optimizer.accumulation=2"],
        ["model.lora.rank=2", "optimizer.learning_rate=0.02"],
        ["dpo.loss_type=robust", "dpo.label_smoothing=0.1", "data.workers=2"],
    ],
)
@pytest.mark.usefixtures("same_files")
def test_losses_are_the_same_however_rows_are_made_and_split(config, overrides):
    name = overrides[0].partition("=")[2] + overrides[1].partition("=")[2]
    given = preferences(config, "steps=4", *overrides)
    assert train(config, f"computed-{name}", *given) == 0
    for path in files(config, "*"):
        path.unlink()
    assert train(config, f"stored-{name}", *given, STORED) == 0
    expected = losses(config, f"computed-{name}")
    found = losses(config, f"stored-{name}")
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_data_that_can_not_be_written_to_has_its_numbers_in_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda place, mode: False)
    file = ReferenceFile(
        {"data": "d", "reference": "r", "cut_at": None}, 3, [tmp_path, tmp_path / "run"]
    )
    assert file.found() is None
    numbers = np.array([-1.0, np.nan, -3.0], np.float32)
    path = file.save(numbers)
    assert path.parent == tmp_path / "run"
    assert file.found() == path
    np.testing.assert_array_equal(file.parsed(path, path.read_bytes()), numbers)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.usefixtures("same_files")
def test_two_processes_read_and_compute_together(config):
    """The numbers of the data are there, those of the evaluation set are not."""
    (held_out,) = files(config, "eval")
    _, _, expected = held_out.read_bytes().partition(b"\n")
    held_out.unlink()
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port = listener.getsockname()[1]
    job = [f"mesh.coordinator=localhost:{port}", "mesh.num_processes=2", "mesh.simulated_devices=4"]
    words = [f"config={config}", "run_name=two", *job, *preferences(config, STORED, "steps=4")]
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
    assert f"196 log-probabilities from {files(config)[0]}" in told[0]
    found = np.frombuffer(held_out.read_bytes().partition(b"\n")[2], "<f4")
    np.testing.assert_allclose(found, np.frombuffer(expected, "<f4"), rtol=1e-6)
    # A shorter run has another learning rate from its end on, and another last evaluation.
    losses_of_one = losses(config, "computed")[:2]
    np.testing.assert_allclose(losses(config, "two")[:2], losses_of_one, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["labels", "rows that get longer"])
@pytest.mark.usefixtures("same_files")
def test_losses_are_the_same_for_labels_and_in_rows_of_several_lengths(config, what):
    if what == "labels":
        more = ["dpo.loss_type=apo_zero_unpaired", *prepared_labels(config.parent)]
    else:
        # Longer pairs are left out until the rows have room.
        stages = "data.stages=[{until: 3, seq_length: 64}, {}]"
        more = [stages, "data.on_long=skip", "eval.seq_length=80"]
    given = preferences(config, "steps=6", *more)
    name = what.replace(" ", "-")
    assert train(config, f"computed-{name}", *given) == 0
    assert train(config, f"stored-{name}", *given, STORED) == 0
    expected = losses(config, f"computed-{name}")
    assert len(expected) == 8
    np.testing.assert_allclose(losses(config, f"stored-{name}"), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("of_run", [True, False])
def test_a_reference_that_looks_at_other_answers_of_a_row_is_refused(tmp_path, of_run):
    model = ModelConfig(routing=RoutingConfig(capacity_factor=1.0))
    reference = create_autospec(FrozenModel, instance=True, model=model)
    job = create_autospec(
        Job, instance=True, stored_reference=reference, config=RunConfig(model=model)
    )
    progress = create_autospec(Progress, instance=True)
    stored = reference_logprobs.StoredReference(job, tmp_path, progress, Stopwatch())
    with pytest.raises(ConfigError, match=r"capacity_factor=1\.0 drop what other answers"):
        if of_run:
            stored.attach_of(create_autospec(TrainState, instance=True, buffers={}))
        else:
            stored.attach()
