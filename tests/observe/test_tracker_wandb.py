"""Weights & Biases, offline: its file has every number by trainer/step, the config and the files,
over several launches under one id."""

import importlib
import json
import shutil
import struct
import sys

import pytest

from data_pipeline.base.errors import UsageError
from maxtrain.config.schema import ObserveConfig, TrackingConfig
from maxtrain.observe.samples import CompletionSample
from maxtrain.observe.tracker import RunInfo
from maxtrain.observe.trackers.wandb import Wandb

_BLOCK = 32768
_HEADER = 7


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_MODE", "offline")


def records(path):
    """The records of a .wandb file: a log of blocks, each with chunks of (crc, length, type)."""
    # Here, since every worker of the tests would import it otherwise.
    messages = importlib.import_module("wandb.proto.wandb_internal_pb2")
    data = path.read_bytes()
    at = _HEADER
    whole = b""
    while at + _HEADER <= len(data):
        if _BLOCK - at % _BLOCK < _HEADER:
            at += _BLOCK - at % _BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + _HEADER])
        whole += data[at + _HEADER : at + _HEADER + length]
        at += _HEADER + length
        # Whole, or the last part of several.
        if kind in (1, 4):
            yield messages.Record.FromString(whole)
            whole = b""


def plain(items):
    return {".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items}


def launch(folder, step, config, **values):
    tracker = Wandb(config)
    info = RunInfo(
        folder=folder,
        name="tiny",
        id="0123456789abcdef",
        step=step,
        hyperparameters={"model.num_layers": 2, "data.sources": None, "seed": step},
        revision="f00",
        is_dirty=True,
        **values,
    )
    assert tracker.start(info) == "0123456789abcdef"
    return tracker


@pytest.mark.long
def test_two_launches_are_one_run(tmp_path):
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    tracking = TrackingConfig(project="p", tags=("a", "b"), system_metrics=False, wandb_group="g")
    config = ObserveConfig(trackers=("wandb",), tracking=tracking)
    first = launch(tmp_path, 0, config)
    first.log(1, {"loss": 2.5, "batch": "hash"}, "train")
    first.log(2, {"loss": 2.0}, "train")
    first.rewind(1)
    first.log(2, {"loss": 1.5}, "train")
    first.finish("stopped")
    shutil.move(tmp_path / "wandb", tmp_path / "first")
    second = launch(tmp_path, 2, config, known_as="0123456789abcdef")
    second.log(2, {"set": "val", "nll": 1.25}, "eval")
    samples = [
        CompletionSample("held", number, "1+3=", "<4>", reward, {}, 4, False)
        for number, reward in enumerate((1.5, None))
    ]
    second.show_samples(2, samples)
    second.finish("finished")

    (path,) = (tmp_path / "first").glob("offline-run-*/*.wandb")
    of_first = list(records(path))
    rows = [plain(record.history.item) for record in of_first if record.history.item]
    shown = [
        {name: value for name, value in row.items() if not name.startswith("_")} for row in rows
    ]
    assert shown == [
        {"train/loss": 2.5, "train/batch": "hash", "trainer/step": 1},
        {"train/loss": 2.0, "trainer/step": 2},
        {"trainer/rewound_to": 1, "trainer/step": 1},
        {"train/loss": 1.5, "trainer/step": 2},
    ]
    (run,) = [record.run for record in of_first if record.run.run_id][:1]
    assert (run.run_id, run.project, run.run_group) == ("0123456789abcdef", "p", "g")
    assert (run.display_name, list(run.tags)) == ("tiny", ["a", "b"])
    updates = {}
    for record in of_first:
        updates |= plain(record.config.update)
        updates |= plain(record.run.config.update)
    assert updates["model.num_layers"] == 2
    assert updates["maxtrain"]["git"] == {"revision": "f00", "dirty": True}
    assert updates["maxtrain"]["run"] == "0123456789abcdef"
    metrics = [record.metric for record in of_first if record.metric.step_metric]
    assert {metric.step_metric for metric in metrics} == {"trainer/step"}

    (path,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    of_second = list(records(path))
    assert {record.run.run_id for record in of_second if record.run.run_id} == {"0123456789abcdef"}
    rows = [plain(record.history.item) for record in of_second if record.history.item]
    (shown,) = [row for row in rows if any(name.startswith("samples/held") for name in row)]
    assert shown["trainer/step"] == 2
    (table,) = (tmp_path / "wandb").glob("offline-run-*/files/media/table/samples/*.table.json")
    assert json.loads(table.read_text())["data"] == [
        [2, 0, "1+3=", "<4>", 1.5, 4, False],
        [2, 1, "1+3=", "<4>", None, 4, False],
    ]
    rows = [plain(record.history.item) for record in of_second if record.history.item]
    assert [row["trainer/step"] for row in rows] == [2, 2, 2]
    assert rows[0]["trainer/rewound_to"] == 2 and rows[1]["eval/val/nll"] == 1.25
    files = [file.path for record in of_second for file in record.files.files]
    assert "run/config.yaml" in files


@pytest.mark.every_dose
@pytest.mark.long
def test_no_key_is_a_sentence_and_no_question(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    tracker = Wandb(ObserveConfig(trackers=("wandb",)))
    with pytest.raises(UsageError, match=r"no API key.*wandb login.*wandb_mode=offline"):
        tracker.start(RunInfo(folder=tmp_path, name="tiny", id="0123"))


def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match=r"pip install -e .*\[wandb\]'"):
        Wandb(ObserveConfig(trackers=("wandb",)))
