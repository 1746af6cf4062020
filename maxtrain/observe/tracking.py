"""The trackers of a run, each driven by a thread of its own: what one of them waits for, or raises,
never reaches the loop. metrics.jsonl is written by the loop itself, and has every record.

RUN/trackers.json keeps the id by which each tracker knows the run, so that later launches go on
with it.
"""

import collections
import dataclasses
import functools
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from data_pipeline.base import strict_json
from data_pipeline.base.errors import TryAgainError, UsageError
from data_pipeline.shards import write_atomic
from maxtrain.config.schema import ObserveConfig
from maxtrain.observe.jsonl_logs import RUN, put_aside
from maxtrain.observe.samples import CompletionSample
from maxtrain.observe.tracker import Kind, RunInfo, Status, Tracker, Value
from maxtrain.observe.trackers.mlflow import Mlflow
from maxtrain.observe.trackers.tensorboard import TensorBoard
from maxtrain.observe.trackers.wandb import Wandb

FILE_NAME = "trackers.json"
# By their names in observe.trackers.
TRACKERS: dict[str, Callable[[ObserveConfig], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": Mlflow,
}
# Seconds that the end of a launch waits for all trackers together.
PATIENCE: dict[Status, float] = {"finished": 30.0, "failed": 10.0, "stopped": 5.0}
_MOST_WAITING = 10_000
_LONGEST_CALL = 60.0
_GOES_ON = "The run goes on; metrics.jsonl has every record"


class TrackerThread:
    """One tracker and the thread that calls it.

    Args:
        name: of the tracker, for messages.
        tracker: is called by the thread only.
        run: the run to show.
        note_id: is called with the id that the tracker gave the run, by the thread.
        most_waiting: records that may wait for the tracker; later ones are dropped.
        longest_call: seconds that one call may take before a warning.
    """

    def __init__(
        self,
        name: str,
        tracker: Tracker,
        run: RunInfo,
        note_id: Callable[[str], object],
        most_waiting: int = _MOST_WAITING,
        longest_call: float = _LONGEST_CALL,
    ):
        self.name = name
        self._tracker = tracker
        self._run = run
        self._note_id = note_id
        self._most_waiting = most_waiting
        self._longest_call = longest_call
        self._changed = threading.Condition()
        self._waiting = collections.deque[Callable[[], object]]()
        self._status: Status | None = None
        self._called_at: float | None = None
        # Of records: those handed over, and those that the tracker took.
        self._given = 0
        self._taken = 0
        self._has_complained = False
        self._complaint = ""
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log(self, step: int, values: Mapping[str, Value], kind: Kind) -> None:
        """Hands over a record; never waits."""
        self._hand_over(self._tracker.log, step, values, kind)

    def show_samples(self, step: int, samples: Sequence[CompletionSample]) -> None:
        """Hands over completions of prompts; never waits."""
        self._hand_over(self._tracker.show_samples, step, tuple(samples))

    def _hand_over(self, method: Callable[..., object], *arguments: Any) -> None:
        """A record that the tracker is to take, unless too many wait for it."""
        with self._changed:
            self._given += 1
            if len(self._waiting) < self._most_waiting:
                self._waiting.append(functools.partial(self._deliver, method, *arguments))
                self._changed.notify()

    def rewind(self, step: int) -> None:
        """Queue a rewind of the tracker to this step; never waits."""
        with self._changed:
            self._waiting.append(functools.partial(self._call, self._tracker.rewind, step))
            self._changed.notify()

    def finish(self, status: Status) -> None:
        """Queue the end of the launch, after all waiting records; never waits itself."""
        with self._changed:
            self._status = status
            self._changed.notify()

    def complaint(self) -> str:
        """Return the problem with the tracker, the first time that anything is; else empty."""
        called_at = self._called_at
        if called_at is not None and time.monotonic() - called_at > self._longest_call:
            self._complain(f"has not answered for {self._longest_call:,.0f} s. {_GOES_ON}.")
        found = self._complaint
        self._complaint = ""
        return found

    def end(self, deadline: float) -> list[str]:
        """Wait until the tracker is done, or until the deadline on the monotonic clock; return
        messages for the user. Call `finish` before.
        """
        self._thread.join(max(0.0, deadline - time.monotonic()))
        messages = [self.complaint()]
        is_hanging = self._thread.is_alive()
        missed = self._given - self._taken
        if is_hanging:
            messages.append(
                f"observe.trackers: {self.name} did not finish in time and is left alone."
            )
            self._tracker.abandon()
        if missed:
            messages.append(
                f"observe.trackers: {self.name} did not take {missed:,} of {self._given:,} "
                f"records; metrics.jsonl has them."
            )
        return [text for text in messages if text]

    def _work(self) -> None:
        if not self._call(self._start):
            with self._changed:
                self._most_waiting = 0
                self._waiting.clear()
            return
        while True:
            with self._changed:
                while not self._waiting and self._status is None:
                    self._changed.wait()
                if not self._waiting:
                    break
                job = self._waiting.popleft()
            job()
        self._call(self._tracker.finish, self._status)

    def _start(self) -> None:
        known_as = self._tracker.start(self._run)
        if known_as:
            self._note_id(known_as)

    def _deliver(self, method: Callable[..., object], *arguments: Any) -> None:
        if self._call(method, *arguments):
            self._taken += 1

    def _call(self, method: Callable[..., object], *arguments: Any) -> bool:
        """Return whether a method of the tracker came back without an error."""
        self._called_at = time.monotonic()
        try:
            method(*arguments)
        # Whatever it is: some packages raise SystemExit.
        except BaseException as error:
            what = f"{type(error).__name__}: {error}"
            self._complain(f"failed ({what}). {_GOES_ON}.")
            return False
        finally:
            self._called_at = None
        return True

    def _complain(self, text: str) -> None:
        with self._changed:
            if not self._has_complained:
                self._has_complained = True
                self._complaint = f"observe.trackers: {self.name} {text}"


class Trackers:
    """The trackers of one launch; use as `with Trackers() as trackers:` around all of it.

    They start with `begin`, which processes other than the first never call. The end of the block
    finishes them, however it is reached, and waits for them only so long (`PATIENCE`): a tracker
    that hangs is left alone then.
    """

    def __init__(self) -> None:
        self._threads: list[TrackerThread] = []
        self._tell: Callable[[str], object] = str
        self._known: dict[str, str] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> "Trackers":
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        status: Status = "failed"
        if kind is None:
            status = "finished"
        elif issubclass(kind, TryAgainError | KeyboardInterrupt):
            status = "stopped"
        self.finish(status)

    def begin(
        self,
        config: ObserveConfig,
        run: RunInfo,
        tell: Callable[[str], object],
        kinds: Mapping[str, Callable[[ObserveConfig], Tracker]] | None = None,
    ) -> None:
        """Starts the trackers of a config.

        Args:
            config: the section `observe`.
            run: the run to show; `known_as` is filled in from RUN/trackers.json.
            tell: gets a sentence about whatever goes wrong, on the loop's thread.
            kinds: how each is made, by name; None: as in `TRACKERS`.
        """
        self._tell = tell
        path = run.folder / FILE_NAME
        self._known, problem = _read(path, run.id)
        if problem:
            tell(problem)
        made = {}
        for name in config.trackers:
            try:
                made[name] = (kinds or TRACKERS)[name](config)
            except UsageError as missing:
                tell(f"{missing} The run goes on without it.")
        for name, tracker in made.items():
            info = dataclasses.replace(run, known_as=self._known.get(name, ""))
            note_id = functools.partial(self._note_id, path, run.id, name)
            self._threads.append(TrackerThread(name, tracker, info, note_id))

    def log(self, step: int, values: Mapping[str, Any], kind: Kind) -> None:
        """One record for every tracker; values that are null are left out."""
        if not self._threads:
            return
        plain = {name: _plain(value) for name, value in values.items() if value is not None}
        for thread in self._threads:
            thread.log(step, plain, kind)
            self._report_complaint(thread)

    def show_samples(self, step: int, samples: Sequence[CompletionSample]) -> None:
        """Completions of prompts after a step, for every tracker that shows text."""
        for thread in self._threads:
            thread.show_samples(step, samples)
            self._report_complaint(thread)

    def rewind(self, step: int) -> None:
        """Records of later steps do not count any more."""
        for thread in self._threads:
            thread.rewind(step)

    def finish(self, status: Status) -> None:
        """Ends all trackers, and says what they did not take."""
        threads = self._threads
        self._threads = []
        for thread in threads:
            thread.finish(status)
        deadline = time.monotonic() + PATIENCE[status]
        for thread in threads:
            for text in thread.end(deadline):
                self._tell(text)

    def _report_complaint(self, thread: TrackerThread) -> None:
        text = thread.complaint()
        if text:
            self._tell(text)

    def _note_id(self, path: Path, run: str, name: str, known_as: str) -> None:
        """Keeps the id of the run on one tracker; called by its thread."""
        with self._lock:
            if self._known.get(name) == known_as:
                return
            self._known[name] = known_as
            content = {RUN: run, **self._known}
            write_atomic(path, json.dumps(content).encode() + b"\n")


def _read(path: Path, run: str) -> tuple[dict[str, str], str]:
    """The ids in RUN/trackers.json, and what is wrong with it; then it is put aside."""
    if not path.exists():
        return {}, ""
    try:
        content = strict_json.read(path)
        if not isinstance(content, dict):
            raise ValueError("it is no JSON object")
        if content.get(RUN) != run:
            raise ValueError(f"it is of another run, {content.get(RUN)}")
    except (OSError, ValueError) as error:
        aside = put_aside(path)
        return {}, (
            f"{path} can't be used ({error}). It is kept as {aside.name}, and the trackers begin "
            f"new runs."
        )
    return {name: str(value) for name, value in content.items() if name != RUN}, ""


def _plain(value: Any) -> Value:
    """A value as a plain number or text."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, int | float | str):
        return value
    return str(value)
