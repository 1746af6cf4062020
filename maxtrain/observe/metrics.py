"""What a run measures, on disk and on the clock. No jax: every number comes in as an argument.

RUN/metrics.jsonl has one object of strict JSON a line, with `kind` ("train", "eval" or "end"), `step` and numbers. Floats that
JSON lacks are the strings "nan", "inf" and "-inf"; `read_metrics` gives them back as floats. Names that others rely on:

    train   loss (nats per token), learning_rate, tokens_per_second, mfu (0..1), step_seconds, tokens_seen (since step 0),
            data_wait_seconds (of each of step_seconds, how much it waited for its batch)
    eval    set, nll (nats per token), perplexity, bits_per_byte, tokens (evaluated)
    end     ending (why the run ends early), planned_steps
"""

import contextlib
import json
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from data_pipeline.errors import DataError
from data_pipeline.shards import write_atomic

FILE_NAME = "metrics.jsonl"
_NOT_IN_JSON = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class MetricsLog:
    """Appends records to RUN/metrics.jsonl; a record survives a kill of the process as soon as `append` returns.

    The run goes on from `resume_step`, where the evaluation of the sets in `again` is left to do: records of what comes after
    it are dropped, and so is a torn last line. A missing directory is made.

    Raises:
        DataError: a line before the last one is not JSON.
    """

    def __init__(self, run_dir: str | Path, resume_step: int = 0, again: Sequence[str] = ()):
        path = Path(run_dir) / FILE_NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [record for record in read_metrics(run_dir) if record["step"] <= resume_step]
        kept = [r for r in kept if not (again and r["step"] == resume_step and (r["kind"] == "end" or r.get("set") in again))]
        write_atomic(path, "".join(map(_line, kept)).encode())
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115

    def append(self, step: int, values: Mapping[str, Any], kind: Literal["train", "eval", "end"] = "train") -> None:
        """Write one record, of names to numbers (of Python, numpy or a jax array of one element), strings or None."""
        self._file.write(_line({"kind": kind, "step": step, **values}))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """All records of a run in the order they were written; a torn last line is left out. None without a metrics file.

    Raises:
        DataError: a line before the last one is not JSON.
    """
    path = Path(run_dir) / FILE_NAME
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    records = []
    for number, line in enumerate(lines[:-1], 1):  # what follows the last line break is empty or torn
        try:
            record = json.loads(line)
            record["step"] = int(record["step"])
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}:{number} is not a record of metrics ({error}). Delete that line.") from error
        records.append({k: _NOT_IN_JSON.get(v, v) if isinstance(v, str) else v for k, v in record.items()})
    return records


def same(a: Any, b: Any) -> bool:
    """Whether two values of records are the same bit for bit; NaNs are alike."""
    return a.hex() == b.hex() if isinstance(a, float) and isinstance(b, float) else a == b


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps({name: _plain(value) for name, value in record.items()}, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class Stopwatch:
    """A ledger of wall time: every second since it was made belongs to exactly one cause.

    The time belongs to "step" but for what runs inside `during(cause)`. Steps run behind the host's back, so their time is
    only known over a window: wait for the last step's result, then call `lap`. `data_wait` is part of a lap, because a
    step that waits for its batch is slow; evaluation, saving and compiling are not.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock, self._now = clock, ("step", clock())
        self._seconds = defaultdict[str, float](float, step=0.0)
        self._lap_start = 0.0
        self.laps = deque[float](maxlen=16)  # the last ones, in seconds

    @contextlib.contextmanager
    def during(self, cause: str) -> Iterator[None]:
        """Book the time inside to a cause ("compile", "eval", "save", "data_wait", ...). Nested, the inner one gets it."""
        outer = self._switch(cause)
        try:
            yield
        finally:
            self._switch(outer)

    def lap(self) -> float:
        """Seconds of steps, data waits included, since the last lap."""
        seconds = self.seconds()
        total = seconds["step"] + seconds.get("data_wait", 0.0)
        lap, self._lap_start = total - self._lap_start, total
        self.laps.append(lap)
        return lap

    def doing(self) -> tuple[str, float]:
        """The cause that time belongs to now, and since when on this clock; for other threads, too."""
        return self._now

    def seconds(self) -> dict[str, float]:
        """Wall seconds by cause until now, largest first; they sum to the time since the stopwatch was made."""
        seconds, (cause, since) = dict(self._seconds), self._now
        seconds[cause] = seconds.get(cause, 0.0) + self._clock() - since
        return dict(sorted(seconds.items(), key=lambda item: -item[1]))

    def _switch(self, cause: str) -> str:
        now, (outer, since) = self._clock(), self._now
        self._seconds[outer] += now - since
        self._now = cause, now
        return outer
