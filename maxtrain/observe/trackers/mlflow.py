"""MLflow, of the extra maxtrain[mlflow]: a server, or a database of SQLite in a file.

The extra brings mlflow-skinny, the client without the server, with what its store in a file of
SQLite needs: a store of plain folders is refused by MLflow itself since 3.x, unless
MLFLOW_ALLOW_FILE_STORE is set. `mlflow ui --backend-store-uri sqlite:///runs/mlflow.db`, of the
package mlflow, shows such a file.

A run keeps its id over all of its launches. Parameters can't be changed there: those that a later
launch has with another value are tags `changed.NAME`. Values can't be taken back: a run that goes
back has two values at a step, which their time distinguishes, and a tag says where it went back to.
"""

import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data_pipeline.base.errors import UsageError
from data_pipeline.base.extras import load_package, require_package
from data_pipeline.base.masking import is_masked, masked
from maxtrain.config.schema import ObserveConfig
from maxtrain.observe.samples import CompletionSample, as_markdown
from maxtrain.observe.tracker import Kind, RunInfo, Status, Tracker, Value, by_name, numbers

_WANTED_BY = "observe.trackers=[mlflow]"
_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_FILES = ("config.yaml", "curves.png", "samples.jsonl")
# The most that one request may have, and the longest values.
_MOST_PARAMETERS = 100
_LONGEST_PARAMETER = 6000
_LONGEST_TAG = 5000


class Mlflow(Tracker):
    """Shows a run on MLflow.

    Raises:
        UsageError: its package is not installed.
    """

    def __init__(self, config: ObserveConfig):
        require_package("mlflow", "mlflow", _WANTED_BY)
        self._config = config.tracking
        self._client: Any = None
        self._entities: Any = None
        self._id = ""
        self._folder = Path()
        self._monitor: Any = None

    def start(self, run: RunInfo) -> str:
        # MLflow would send usage data to its makers.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        logging.getLogger("alembic").setLevel(logging.WARNING)
        tracking = load_package("mlflow.tracking", "mlflow", _WANTED_BY)
        self._entities = load_package("mlflow.entities", "mlflow", _WANTED_BY)
        self._folder = run.folder
        uri = self._uri()
        self._client = tracking.MlflowClient(tracking_uri=uri)
        if run.known_as:
            self._go_on_with(run.known_as, uri)
            self.rewind(run.step)
        else:
            self._begin(run)
        self._describe(run)
        if self._config.system_metrics:
            self._measure_system(uri, is_known=bool(run.known_as))
        return self._id

    def log(self, step: int, values: Mapping[str, Value], kind: Kind) -> None:
        now = int(time.time() * 1000)
        found = numbers(by_name(values, kind))
        metrics = [self._entities.Metric(name, x, now, step) for name, x in found.items()]
        texts = {name: x for name, x in by_name(values, kind).items() if isinstance(x, str)}
        tags = [self._tag(name, text) for name, text in texts.items() if kind == "end"]
        self._client.log_batch(self._id, metrics=metrics, tags=tags)

    def show_samples(self, step: int, samples: Sequence[CompletionSample]) -> None:
        place = f"samples/{samples[0].set}/{step:08d}.md"
        self._client.log_text(self._id, as_markdown(samples), place)

    def rewind(self, step: int) -> None:
        self._client.set_tag(self._id, "trainer.rewound_to", step)

    def finish(self, status: Status) -> None:
        if self._monitor:
            self._monitor.finish()
        for name in _FILES:
            path = self._folder / name
            if path.exists():
                self._client.log_artifact(self._id, str(path))
        self._client.set_terminated(self._id, _STATUS[status])

    def _uri(self) -> str:
        """Return where runs are kept."""
        given = self._config.mlflow_uri or os.environ.get("MLFLOW_TRACKING_URI")
        if given and is_masked(given):
            raise UsageError(
                f"observe.tracking.mlflow_uri={given} comes from a record, where its secret was "
                "masked. Give the whole URI again on the command line, or set MLFLOW_TRACKING_URI."
            )
        if given:
            return given
        return f"sqlite:///{self._folder.parent.absolute() / 'mlflow.db'}"

    def _begin(self, run: RunInfo) -> None:
        """A new run, in the experiment of the config, which is made if there is none."""
        project = self._config.project
        experiment = self._client.get_experiment_by_name(project)
        if experiment is None:
            location = None
            if not (self._config.mlflow_uri or os.environ.get("MLFLOW_TRACKING_URI")):
                location = (self._folder.parent.absolute() / "mlartifacts").as_uri()
            experiment_id = self._client.create_experiment(project, artifact_location=location)
        else:
            experiment_id = experiment.experiment_id
        name = self._config.name or run.name
        self._id = self._client.create_run(experiment_id, run_name=name).info.run_id

    def _go_on_with(self, known_as: str, uri: str) -> None:
        """The run of an earlier launch; UsageError: it is not there, or was deleted."""
        found = self._client.search_runs(
            [each.experiment_id for each in self._client.search_experiments()],
            filter_string=f"attributes.run_id = '{known_as}'",
        )
        if not found:
            raise UsageError(
                f"{masked(uri)} has no run {known_as}, which earlier launches were shown as. To "
                f"begin a new one there, remove mlflow from {self._folder / 'trackers.json'}"
            )
        self._id = known_as
        self._client.update_run(known_as, status="RUNNING")

    def _describe(self, run: RunInfo) -> None:
        """Tags and parameters; those that are there with another value become tags."""
        tags = {"run": run.id, "git.revision": run.revision, "git.dirty": str(run.is_dirty)}
        for tag in self._config.tags:
            name, equals, value = tag.partition("=")
            tags[name] = value
            if not equals:
                tags[name] = "true"
        there = self._client.get_run(self._id).data.params
        parameters = []
        for name, value in run.hyperparameters.items():
            text = str(value)[:_LONGEST_PARAMETER]
            if name not in there:
                parameters.append(self._entities.Param(name, text))
            elif there[name] != text:
                tags[f"changed.{name}"] = text
        for first in range(0, len(parameters), _MOST_PARAMETERS):
            some = parameters[first : first + _MOST_PARAMETERS]
            self._client.log_batch(self._id, params=some)
        for name, text in tags.items():
            self._client.log_batch(self._id, tags=[self._tag(name, text)])

    def _tag(self, name: str, text: str) -> Any:
        return self._entities.RunTag(name, text[:_LONGEST_TAG])

    def _measure_system(self, uri: str, is_known: bool) -> None:
        monitors = load_package(
            "mlflow.system_metrics.system_metrics_monitor", "mlflow", _WANTED_BY
        )
        self._monitor = monitors.SystemMetricsMonitor(
            self._id, resume_logging=is_known, tracking_uri=uri
        )
        self._monitor.start()
