"""Interface of trackers: services besides metrics.jsonl that show the records of a run, such as
TensorBoard, Weights & Biases or MLflow.

`tracking.py` drives the trackers of a run, each from a thread of its own. No jax.
"""

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from maxtrain.observe.samples import CompletionSample

Kind = Literal["train", "eval", "end", "norms"]
Status = Literal["finished", "stopped", "failed"]
Value = int | float | str


@dataclasses.dataclass(frozen=True)
class RunInfo:
    """The run that a tracker is to show.

    Attributes:
        folder: RUN.
        name: run_name.
        id: the run's id, of run.json.
        step: finished steps; records of later ones follow.
        known_as: the id that this tracker gave the run in an earlier launch; empty: there was none.
        hyperparameters: every key of the config by its dotted path.
        revision: of the working directory's git repository; empty outside of one.
        is_dirty: whether files there differ from that revision.
    """

    folder: Path
    name: str
    id: str
    step: int = 0
    known_as: str = ""
    hyperparameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    revision: str = ""
    is_dirty: bool = False


class Tracker(abc.ABC):
    """Tracker that shows the records of one run elsewhere, on process 0.

    It is made on the loop's thread, where it only checks that it can work; UsageError names a
    missing package. All other methods are called on one other thread, one after another: `start`
    first, `finish` last. They may wait for a network and may raise: neither reaches the run. An
    error is reported once, and later records are tried all the same; after `start` has raised,
    nothing else is called.
    """

    @abc.abstractmethod
    def start(self, run: RunInfo) -> str:
        """Begins to show a run, or goes on with the one it is known as.

        Returns:
            The id by which a later launch goes on with it; empty if none is needed.
        """

    @abc.abstractmethod
    def log(self, step: int, values: Mapping[str, Value], kind: Kind) -> None:
        """One record, as metrics.jsonl has it, without the values that are null.

        Args:
            step: finished steps.
            values: plain numbers and texts by name; an evaluation's `set` is among them.
            kind: of training, of an evaluation set, of why the run ended early, or of norms.
        """

    # Not abstract: many show numbers alone.
    def show_samples(self, step: int, samples: Sequence[CompletionSample]) -> None:  # noqa: B027
        """Completions of prompts after a step, all of one set, as text."""

    # Not abstract: many trackers have nothing to do here.
    def rewind(self, step: int) -> None:  # noqa: B027
        """Records of later steps do not count any more; they are made again, with other values.

        Does nothing unless a tracker can forget them, or mark them.
        """

    @abc.abstractmethod
    def finish(self, status: Status) -> None:
        """The launch ends: the run has come to its end, was stopped and will go on, or failed."""

    # Not abstract: many trackers have nothing to do here.
    def abandon(self) -> None:  # noqa: B027
        """The launch ends while another method hangs: releases what would keep the process from
        ending. Called on the loop's thread; does nothing unless a tracker holds such things."""


def by_name(values: Mapping[str, Value], kind: Kind) -> dict[str, Value]:
    """The values of a record by the names that trackers show: `train/NAME` or `eval/SET/NAME`."""
    prefix = kind
    if "set" in values:
        prefix = f"{kind}/{values['set']}"
    return {f"{prefix}/{name}": value for name, value in values.items() if name != "set"}


def numbers(values: Mapping[str, Value]) -> dict[str, float]:
    """Return the values that are numbers."""
    return {name: float(value) for name, value in values.items() if not isinstance(value, str)}
