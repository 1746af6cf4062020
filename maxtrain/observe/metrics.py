"""Measurements of a run, on disk and on the clock. No jax: every number comes in as an argument.

RUN/metrics.jsonl has one object of strict JSON a line, with `kind` ("train", "eval", "end" or
"norms"), `step` and numbers; the first line has the id of the run instead, which `read_metrics`
leaves out.
Floats that JSON lacks are the strings "nan", "inf" and "-inf"; `read_metrics` gives them back as
floats. Names that others rely on:

    train   loss (nats per token, over all targets since the last record; steps whose loss is not
            finite are not in it), step_loss (of this step alone), learning_rate, tokens_per_second,
            mfu (0..1; None: not known), step_seconds, tokens_seen (targets since step 0),
            data_wait_seconds (of each of step_seconds, how much it waited for its batch),
            with several processes slowest_process, slowest_host (its name),
            slowest_host_seconds (of each step, for its own part; stragglers.py),
            slowest_host_data_wait_seconds (a part of these), other_hosts_seconds (the median),
            weight_norm (of all parameters, before the update of this step), host_bytes (resident,
            of process 0), device_bytes and device_peak_bytes (of its fullest device; not on CPUs),
            epoch_begun/SOURCE (the number of an epoch that began since the last record), and what
            the objective records of this step alone, with the units that launches.jsonl has
    eval    set, nll (nats per token), perplexity, bits_per_byte, tokens (evaluated), data (what the
            set was: another text after it was exchanged begins another series), and what
            the objective evaluates
    end     ending (why the run ends early), planned_steps
    norms   gradient/NAME, weight/NAME, update/NAME: Euclidean norms of the parameters of each layer
            (of the gradient before clipping, of the weights before the update)

Of rollouts, `train` has reward, accuracy, reward/NAME, reward_outcomes/NAME/OUTCOME (completions),
completion_length and longest_completion (tokens), truncated and groups_without_signal (shares),
with objective=ppo score (reward less what the divergence costs) and explained_variance (of values),
rollout_seconds (of each step, beside its step_seconds), sampling_seconds, reward_seconds and
scoring_seconds of the rollout, and sampled_tokens_per_second; with determinism=full
sampling_passes and tokens_replaced (rl/sampler.py). Of a set of prompts, `eval` has the
same of its completions, and how many `prompts` they are of, instead of nll and what follows it.

RUN/samples.jsonl is a log of the same form, of records of kind "sample" (samples.py).
"""

import contextlib
import json
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from zlib_ng.zlib_ng import crc32

from data_pipeline.base import strict_json
from data_pipeline.base.errors import DataError
from data_pipeline.shards import write_atomic
from maxtrain.checkpoint.run_state import LogMark
from maxtrain.observe.jsonl_logs import put_aside
from maxtrain.ops.quantity import Metric

FILE_NAME = "metrics.jsonl"
_NOT_IN_JSON = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


# Numbers of records that depend on the machine and its load, not on config, data and seed alone:
# equal runs differ in them.
OF_THE_MACHINE = frozenset(
    (
        *("time", "seconds", "step_seconds", "data_wait_seconds", "rollout_seconds"),
        *("sampling_seconds", "reward_seconds", "scoring_seconds"),
        *("tokens_per_second", "positions_per_second", "sampled_tokens_per_second"),
        *("mfu", "mfu_causal", "host_bytes", "device_bytes", "device_peak_bytes"),
        *("slowest_process", "slowest_host", "slowest_host_seconds"),
        *("slowest_host_data_wait_seconds", "other_hosts_seconds"),
    )
)
# Names of records of training and of evaluations that nothing else may have.
TAKEN = OF_THE_MACHINE | frozenset(
    (
        *("kind", "step"),
        *("loss", "step_loss", "objective", "grad_norm", "learning_rate", "skipped", "loss_scale"),
        *("weight_norm", "batch", "tokens_seen", "fill", "targets", "empty_rows"),
        *("set", "nll", "perplexity", "tokens", "bits_per_byte", "best_step", "data"),
    )
)
KINDS = ("train", "eval", "end", "norms", "sample")
_HEADER = "run"  # the kind of the first line


class MetricsLog:
    """Appends records to RUN/metrics.jsonl, or to another log; a record survives a kill of the
    process as soon as `append` returns.

    The run goes on from `resume_step`, where the evaluation of the sets in `again` is left to do:
    records of what comes after it are dropped, and so is a torn last line. A missing directory is
    made.

    Args:
        run_dir: folder of the run.
        resume_step: finished steps.
        again: evaluation sets that are to be evaluated again after that step.
        run: id of the run.
        kept: what the checkpoint of that step remembers of the records; None: nothing.
        file_name: of the log.

    `problems` has a text for everything that was found to be wrong with the file; it is put aside
    as it was. `end_at` is the step of the last record of why the run ended early; None: there is
    none. `dropped_to` is the last step of the records that were dropped; 0: none was.
    """

    def __init__(
        self,
        run_dir: str | Path,
        resume_step: int = 0,
        again: Sequence[str] = (),
        run: str = "",
        kept: LogMark | None = None,
        file_name: str = FILE_NAME,
    ):
        path = Path(run_dir) / file_name
        path.parent.mkdir(parents=True, exist_ok=True)
        records, self.problems = _read(path)
        if self.problems:
            aside = put_aside(path, copy=True)
            self.problems.append(
                f"{path} as it was is kept as {aside.name}; the run goes on without what can't be "
                "read."
            )
        before = [record for record in records if not _comes_again(record, resume_step, again)]
        lines = [_line(record) for record in before]
        self.dropped_to = max(
            (record["step"] for record in records if record["step"] > resume_step), default=0
        )
        self.end_at = next(
            (record["step"] for record in reversed(before) if record["kind"] == "end"), None
        )
        if kept and LogMark(len(lines[: kept.records]), _crc(lines[: kept.records])) != kept:
            self.problems.append(_gap(path, before, resume_step, kept))
        header = [_line({"kind": _HEADER, "step": 0, "run": run})] if run else []
        write_atomic(path, "".join([*header, *lines]).encode())
        self._records, self._crc = len(lines), crc32("".join(lines).encode())
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115

    def append(
        self,
        step: int,
        values: Mapping[str, Any],
        kind: Literal["train", "eval", "end", "norms", "sample"] = "train",
    ) -> None:
        """Write one record, of names to numbers (of Python, numpy or a jax array of one element),
        strings or None."""
        line = _line({"kind": kind, "step": step, **values})
        self._file.write(line)
        self._file.flush()
        self._records += 1
        self._crc = crc32(line.encode(), self._crc)

    def mark(self) -> LogMark:
        """Return the mark of all records that are there now."""
        return LogMark(self._records, f"{self._crc:08x}")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(run_dir: str | Path, file_name: str = FILE_NAME) -> list[dict[str, Any]]:
    """All records of a run in the order they were written; a torn last line is left out. None
    without a metrics file, or the other log that is named.

    Raises:
        DataError: a line before the last one is not a record.
    """
    records, problems = _read(Path(run_dir) / file_name)
    if problems:
        raise DataError(
            f"{problems[0]} Delete that line, or let the run go on: it puts the file aside and "
            "leaves the line out."
        )
    return records


def copy_records(
    run_dir: Path, target: Path, step: int, run: str, file_name: str = FILE_NAME
) -> list[str]:
    """Write the records of a run up to a step into the folder of another run.

    Args:
        run_dir: the run whose records are read. Without any, nothing is written.
        target: the folder of the other run. Its own records are replaced.
        step: the last step whose records are copied.
        run: the id of the other run.
        file_name: the log that is copied.

    Returns:
        A text about each line that cannot be read and is left out.
    """
    records, problems = _read(run_dir / file_name)
    lines = [_line(record) for record in records if record["step"] <= step]
    if lines:
        header = _line({"kind": _HEADER, "step": 0, "run": run})
        write_atomic(target / file_name, "".join([header, *lines]).encode())
    else:
        (target / file_name).unlink(missing_ok=True)
    return problems


def has_records(run_dir: str | Path, kept: LogMark) -> bool:
    """Return whether the first records of a run are those that a checkpoint remembers."""
    records, _ = _read(Path(run_dir) / FILE_NAME)
    lines = [_line(record) for record in records[: kept.records]]
    return LogMark(len(lines), _crc(lines)) == kept


def metrics_owner(run_dir: str | Path) -> str:
    """The id of the run that RUN/metrics.jsonl is of; empty if it does not say, or is not there."""
    path = Path(run_dir) / FILE_NAME
    if not path.exists():
        return ""
    with path.open("rb") as file:
        first = file.readline()
    try:
        header = strict_json.loads(first)
    except ValueError:
        return ""
    is_header = isinstance(header, dict) and header.get("kind") == _HEADER
    return str(header.get("run", "")) if is_header else ""


def _read(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The records of a file that can be read, and a text about each line that can't."""
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    records, problems = [], []
    for number, line in enumerate(
        lines[:-1], 1
    ):  # what follows the last line break is empty or torn
        try:
            record = _record(line)
        except ValueError as error:
            problems.append(f"{path}:{number} is not a record of metrics ({error}).")
        else:
            if record["kind"] != _HEADER:
                records.append(record)
    return records, problems


def _record(line: bytes) -> dict[str, Any]:
    record = strict_json.loads(line)
    if not isinstance(record, dict):
        raise ValueError("it is no JSON object")
    if record.get("kind") not in (*KINDS, _HEADER):
        raise ValueError(f"kind must be {', '.join(KINDS)}, not {record.get('kind')!r:.40}")
    if type(record.get("step")) is not int or record["step"] < 0:
        raise ValueError(f"step must be a whole number, not {record.get('step')!r:.40}")
    return {
        name: _NOT_IN_JSON.get(value, value) if isinstance(value, str) else value
        for name, value in record.items()
    }


def _comes_again(record: Mapping[str, Any], resume_step: int, again: Sequence[str]) -> bool:
    """Return whether a run that goes on from this step will write the record once more."""
    if record["step"] != resume_step:
        return record["step"] > resume_step
    return bool(again) and (record["kind"] == "end" or record.get("set") in again)


def _gap(path: Path, records: Sequence[Mapping[str, Any]], resume_step: int, kept: LogMark) -> str:
    """Return what to say of records that are not those that were there when a checkpoint was
    saved.
    """
    if len(records) >= kept.records:
        up_to = f"records up to step {resume_step:,}"
        return f"{path}: {up_to} are not those that were there when it was saved."
    steps = [record["step"] for record in records if record["kind"] == "train"]
    there = (
        f"{len(records):,} are there, the last of step {max(steps):,}"
        if steps
        else "none of training is there"
    )
    were = f"{kept.records:,} records up to step {resume_step:,}"
    return f"{path}: of {were}, {there}: the others are lost."


def _crc(lines: Sequence[str]) -> str:
    return f"{crc32(''.join(lines).encode()):08x}"


def same(a: Any, b: Any) -> bool:
    """Return whether two values of records are the same bit for bit; NaNs are alike."""
    return a.hex() == b.hex() if isinstance(a, float) and isinstance(b, float) else a == b


def require_free_names(quantities: Iterable[Metric]) -> None:
    """Check that objectives and layers record numbers under names of their own.

    Raises:
        ValueError: a name is one of those that every record has, or has two meanings.
    """
    named = {}
    for quantity in quantities:
        name = quantity.name
        if name in TAKEN or "/" in name or name.endswith("_hash"):
            raise ValueError(
                f"{quantity}: records have a {name} already, or a name like it. "
                "Give the quantity another name."
            )
        before = named.setdefault(name, quantity)
        if before != quantity:
            raise ValueError(f"{name} means both {before} and {quantity}. Rename one of them.")


def as_json(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with strings for floats that JSON lacks."""
    return {name: _plain(value) for name, value in record.items()}


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(as_json(record), allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class Stopwatch:
    """A ledger of wall time: every second since it was made belongs to exactly one cause.

    The time belongs to "step" but for what runs inside `during(cause)`. Steps run behind the host's
    back, so their time is only known over a window: wait for the last step's result, then call
    `lap`. `data_wait` is part of a lap, because a step that waits for its batch is slow;
    evaluation, saving and compiling are not.

    Of a lap, `own` is what this host takes for itself: all but what is marked by `waiting`.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock, self._now = clock, ("step", clock())
        self._seconds = defaultdict[str, float](float, step=0.0)
        self._lap_start = 0.0
        self._waited = 0.0
        self.laps = deque[float](maxlen=16)  # the last ones, in seconds

    @contextlib.contextmanager
    def during(self, cause: str) -> Iterator[None]:
        """Book the time inside to a cause ("compile", "eval", "save", "data_wait", ...). Nested,
        the inner one gets it."""
        outer = self._switch(cause)
        try:
            yield
        finally:
            self._switch(outer)

    @contextlib.contextmanager
    def waiting(self, computes: bool = False) -> Iterator[None]:
        """Marks time of steps in which this host waits for devices or for other processes.

        `computes`: what this thread computes meanwhile is no waiting. So a step is dispatched,
        which waits for those before it if too many are under way.
        """
        begin = self._clock()
        computed = time.thread_time()
        try:
            yield
        finally:
            waited = self._clock() - begin
            if computes:
                waited -= time.thread_time() - computed
            self._waited += max(0.0, waited)

    def lap(self) -> float:
        """Seconds of steps, data waits included, since the last lap."""
        lap = self._in_steps() - self._lap_start
        self._lap_start += lap
        self._waited = 0.0
        self.laps.append(lap)
        return lap

    def own(self) -> float:
        """Return the seconds of steps since the last lap in which this host did not wait for
        devices or other processes.
        """
        return max(0.0, self._in_steps() - self._lap_start - self._waited)

    def _in_steps(self) -> float:
        """Seconds of steps, data waits included, since the stopwatch was made."""
        seconds = self.seconds()
        return seconds["step"] + seconds.get("data_wait", 0.0)

    def doing(self) -> tuple[str, float]:
        """The cause that time belongs to now, and since when on this clock; for other threads,
        too."""
        return self._now

    def seconds(self) -> dict[str, float]:
        """Wall seconds by cause until now, largest first; they sum to the time since the stopwatch
        was made."""
        seconds, (cause, since) = dict(self._seconds), self._now
        seconds[cause] = seconds.get(cause, 0.0) + self._clock() - since
        return dict(sorted(seconds.items(), key=lambda item: -item[1]))

    def _switch(self, cause: str) -> str:
        now, (outer, since) = self._clock(), self._now
        self._seconds[outer] += now - since
        self._now = cause, now
        return outer
