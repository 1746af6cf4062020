"""MLflow with a store in a file: metrics, parameters, tags and files, over several launches of one
run."""

import dataclasses
import importlib
import sys
import time

import pytest

from data_pipeline.base.errors import UsageError
from maxtrain.config.schema import ObserveConfig, TrackingConfig
from maxtrain.observe.samples import CompletionSample
from maxtrain.observe.tracker import RunInfo
from maxtrain.observe.trackers.mlflow import Mlflow

TRACKING = TrackingConfig(project="p", tags=("team=a", "bare"), system_metrics=False)
CONFIG = ObserveConfig(trackers=("mlflow",), tracking=TRACKING)


@pytest.fixture(autouse=True)
def local(monkeypatch):
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def launch(folder, step=0, config=CONFIG, **values):
    """A tracker that has begun, and the id that it gave the run."""
    tracker = Mlflow(config)
    info = RunInfo(
        folder=folder,
        name="tiny",
        id="0123",
        step=step,
        hyperparameters={
            "model.num_layers": 2,
            "steps": step,
            **dict.fromkeys(map(str, range(150))),
        },
        revision="f00",
        is_dirty=True,
        **values,
    )
    return tracker, tracker.start(info)


def wait_for_system_metrics(client, known_as):
    """Wait until a thread of MLflow has written one."""
    end = time.monotonic() + 120
    while "system/cpu_utilization_percentage" not in client.get_run(known_as).data.metrics:
        assert time.monotonic() < end, "no system metric within two minutes"
        time.sleep(0.05)


@pytest.mark.long
def test_two_launches_are_one_run(tmp_path, monkeypatch):
    """The second one measures the system, too."""
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.1")
    # Here, since every worker of the tests would import it otherwise.
    tracking = importlib.import_module("mlflow.tracking")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text("seed: 1\n")
    first, known_as = launch(folder)
    first.log(1, {"loss": 2.5, "batch": "hash"}, "train")
    first.log(2, {"loss": 2.0}, "train")
    first.rewind(1)
    first.log(2, {"loss": 1.5}, "train")
    first.finish("stopped")
    client = tracking.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    assert client.get_run(known_as).info.status == "KILLED"
    assert client.get_run(known_as).data.tags["trainer.rewound_to"] == "1"
    assert not any(name.startswith("system/") for name in client.get_run(known_as).data.metrics)
    measured = dataclasses.replace(TRACKING, system_metrics=True)
    config = dataclasses.replace(CONFIG, tracking=measured)
    second, same = launch(folder, step=2, config=config, known_as=known_as)
    assert same == known_as
    wait_for_system_metrics(client, known_as)
    second.log(2, {"set": "val", "nll": 1.25}, "eval")
    second.log(2, {"ending": "no better", "planned_steps": 9}, "end")
    second.show_samples(2, [CompletionSample("held", 0, "1+3=", "<4>", 1.5, {}, 4, False)])
    second.finish("finished")

    run = client.get_run(known_as)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "tiny")
    history = client.get_metric_history(known_as, "train/loss")
    assert sorted((metric.step, metric.value) for metric in history) == [
        (1, 2.5),
        (2, 1.5),
        (2, 2.0),
    ]
    assert run.data.metrics["eval/val/nll"] == 1.25
    assert run.data.params["model.num_layers"] == "2" and run.data.params["steps"] == "0"
    assert len(run.data.params) == 152
    expected = {
        "run": "0123",
        "git.revision": "f00",
        "git.dirty": "True",
        "team": "a",
        "bare": "true",
        "changed.steps": "2",
        "end/ending": "no better",
        "trainer.rewound_to": "2",
    }
    assert expected.items() <= run.data.tags.items()
    assert [file.path for file in client.list_artifacts(known_as)] == ["config.yaml", "samples"]
    folders = client.list_artifacts(known_as, "samples/held")
    assert [file.path for file in folders] == ["samples/held/00000002.md"]
    experiment = client.get_experiment_by_name("p")
    assert len(client.search_runs([experiment.experiment_id])) == 1

    with pytest.raises(UsageError, match=r"has no run beef.*remove mlflow from .*trackers.json"):
        launch(folder, known_as="beef")


def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(UsageError, match=r"pip install -e .*\[mlflow\]'"):
        Mlflow(CONFIG)
