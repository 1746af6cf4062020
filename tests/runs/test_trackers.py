"""A run with every tracker: stopped, gone on with, rolled back; and one whose trackers are
broken."""

import importlib
import json
import threading

import pytest

from maxtrain import failpoints
from maxtrain.config import load_config
from maxtrain.observe import tracking
from maxtrain.observe.metrics import read_metrics
from maxtrain.observe.tracker import Tracker
from maxtrain.trainer.loop import main

pytestmark = pytest.mark.usefixtures("this_process")
ALL = "observe.trackers=tensorboard,wandb,mlflow"


@pytest.fixture(scope="module")
def config(tmp_path_factory, tiny_run):
    return tiny_run(
        tmp_path_factory.mktemp("trackers"),
        steps=6,
        checkpoint_interval=2,
        schedule={"warmup_steps": 1},
        mesh={"data": 1, "fsdp": 8},
    )


@pytest.fixture(autouse=True)
def nearby(monkeypatch):
    """No tracker reaches a network, and on a busy machine each has the time that it needs."""
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for status in tracking.PATIENCE:
        monkeypatch.setitem(tracking.PATIENCE, status, 400.0)


def train(config, run_name, *overrides):
    values = [f"config={config}", f"run_name={run_name}", *overrides]
    return main(load_config(values))


class BrokenTracker(Tracker):
    """A tracker that raises an error in every call."""

    def start(self, run):
        return ""

    def log(self, step, values, kind):
        raise ConnectionError("no route")

    def finish(self, status):
        raise ConnectionError("no route either")


class HangingTracker(BrokenTracker):
    """Answers nothing until the test is over."""

    def __init__(self):
        self.over = threading.Event()
        self.is_abandoned = False

    def log(self, step, values, kind):
        self.over.wait()

    def abandon(self):
        self.is_abandoned = True


@pytest.mark.long
def test_trackers_that_are_broken_or_hang_stop_nothing(config, monkeypatch, capsys):
    hanging = HangingTracker()
    monkeypatch.setitem(tracking.PATIENCE, "finished", 2.0)
    monkeypatch.setitem(tracking.TRACKERS, "wandb", lambda observe: BrokenTracker())
    monkeypatch.setitem(tracking.TRACKERS, "mlflow", lambda observe: hanging)
    try:
        assert train(config, "broken", "steps=2", "observe.trackers=wandb,mlflow") == 0
    finally:
        hanging.over.set()
    assert len(read_metrics(config.parent / "runs" / "broken")) == 2
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("wandb failed (ConnectionError: no route). The run goes on") == 1
    assert "wandb did not take 2 of 2 records; metrics.jsonl has them." in said
    assert said.count("mlflow did not finish in time and is left alone.") == 1
    assert "mlflow did not take 2 of 2 records; metrics.jsonl has them." in said
    assert hanging.is_abandoned


@pytest.mark.long
def test_every_tracker_shows_a_run_over_its_launches(config, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv(failpoints.VARIABLE, "after_step:nan:4")
        assert train(config, "all", ALL, "observe.plot=true") == 75
    folder = config.parent / "runs" / "all"
    before = json.loads((folder / "trackers.json").read_text())
    assert train(config, "all", ALL, "observe.plot=true") == 0
    known = json.loads((folder / "trackers.json").read_text())
    assert known == before and set(known) == {"run", "wandb", "mlflow"}
    assert known["run"] == known["wandb"] == json.loads((folder / "run.json").read_text())["run"]
    assert len(list((folder / "tensorboard").iterdir())) == 2
    assert len(list((folder / "wandb").glob(f"offline-run-*-{known['wandb']}/*.wandb"))) == 2

    client = importlib.import_module("mlflow.tracking").MlflowClient(
        tracking_uri=f"sqlite:///{folder.parent / 'mlflow.db'}"
    )
    run = client.get_run(known["mlflow"])
    assert (run.info.status, run.info.run_name) == ("FINISHED", "all")
    assert run.data.params["model.embed_dim"] == "16" and run.data.tags["run"] == known["run"]
    shown = {m.step: m.value for m in client.get_metric_history(known["mlflow"], "train/loss")}
    assert shown == {record["step"]: record["loss"] for record in read_metrics(folder)}
    files = {file.path for file in client.list_artifacts(known["mlflow"])}
    assert files == {"config.yaml", "curves.png"}
