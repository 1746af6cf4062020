"""A small run with steps of about 10 ms, which is started again and again, and compared with one
that nobody disturbed.

Victims do what `python -m maxtrain.train` does. Most of them are forked from this process, which
has imported everything and used no device: an attempt then takes one second, and not the five
seconds of importing. A share of the victims are the command itself.
"""

import atexit
import contextlib
import faulthandler
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import yaml

from data_pipeline.prepare import command as prepare
from maxtrain.checkpoint.integrity import survey
from maxtrain.checkpoint.listing import saved_digests
from maxtrain.commands.checkpoint import check
from maxtrain.commands.compare import compare_records
from maxtrain.config import from_command_line
from maxtrain.observe.attempts import reached_step
from maxtrain.observe.metrics import FILE_NAME, read_metrics
from maxtrain.trainer import loop

ROOT = Path(__file__).parents[2]
# Seconds of an attempt; one that takes longer hangs.
PATIENCE = 300.0
POLL = 0.004
WORDS = "the of and to in is that it was for on are as with his they".split()
CONFIG = {
    "steps": 240,
    "log_interval": 1,
    "eval_interval": 50,
    "checkpoint_interval": 20,
    "model": {
        "num_layers": 1,
        "embed_dim": 32,
        "mlp_dim": 64,
        "num_heads": 2,
        "num_kv_heads": 2,
        "max_length": 32,
    },
    "data": {"seq_length": 32, "batch_size": 8},
    "schedule": {"warmup_steps": 20},
    # Rounding to bfloat16 could hide a difference.
    "precision": {"compute": "float32"},
    "mesh": {"simulated_devices": 1},
    "checkpoint": {"keep": 2, "keep_every": 100},
    "observe": {
        "progress": "plain",
        "trackers": [],
        "plot": False,
        "peak_tflops": 1.0,
        "compilation_cache": None,
    },
}


class ForkedProcess:
    """A job in a process forked from this one: as much of `subprocess.Popen` as a supervisor
    uses."""

    def __init__(self, job: Callable[[], int], log: Path, environment: Mapping[str, str]):
        sys.stdout.flush()
        sys.stderr.flush()
        self.returncode: int | None = None
        self.pid = os.fork()
        if not self.pid:
            _become(job, log, environment)

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None: it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float = PATIENCE) -> int:
        """The exit code, once it has ended.

        Raises:
            subprocess.TimeoutExpired: it did not end in time.
        """
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a forked job", timeout)
            time.sleep(POLL)
        return code

    def send_signal(self, number: int) -> None:
        """Sends a signal to this process, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


def _become(job: Callable[[], int], log: Path, environment: Mapping[str, str]) -> None:
    """Runs the job in a process that was just forked, and ends the process: it never returns."""
    code = 70
    try:
        os.setsid()
        file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        faulthandler.enable()
        os.environ.update(environment)
        # When jax was imported, it read the environment of the parent.
        cache = environment.get("JAX_COMPILATION_CACHE_DIR")
        if cache:
            jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        code = job()
        atexit._run_exitfuncs()
    except SystemExit as stop:
        code = 70
        if isinstance(stop.code, int):
            code = stop.code
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def train_forked(words: Sequence[str]) -> int:
    """Return what `python -m maxtrain.train` does with these words, in this process; the exit
    code.
    """
    sys.argv = ["maxtrain/trainer/loop.py", *words]
    return loop.main(from_command_line(words, "python -m maxtrain.train"))


class Scene:
    """Data, a config and a reference run below a folder, which is made, and whose `runs` are the
    victims."""

    def __init__(self, folder: Path, megabytes: float = 0.05, **changes: Any):
        self.folder = folder
        self.runs = folder / "runs"
        if not (folder / "data").exists():
            make_data(folder, megabytes)
        values = {**CONFIG, "output_dir": str(self.runs), **changes}
        text = {"path": str(folder / "data" / "train"), "epochs": None}
        data = {**CONFIG["data"], **changes.get("data", {})}
        values["data"] = data | {"sources": {"text": text} | data.get("sources", {})}
        values["eval"] = {"sets": {"heldout": {"path": str(folder / "data" / "eval")}}}
        self.values = values
        self.steps = values["steps"]
        self.interval = values["checkpoint_interval"]
        self.config = folder / "small.yaml"
        self.config.write_text(yaml.safe_dump(values))
        self.environment = {
            "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "JAX_PLATFORMS": "cpu",
        }

    def words(self, run: str, *overrides: str) -> list[str]:
        return [f"config={self.config}", f"run_name={run}", *overrides]

    def start(
        self, run: str, *overrides: str, fault: str = "", command: bool = False
    ) -> ForkedProcess | subprocess.Popen:
        """An attempt, in a session of its own; its output is added to RUN.log."""
        words = self.words(run, *overrides)
        environment = self.environment | {"MAXTRAIN_FAILPOINT": fault}
        if not command:
            return ForkedProcess(lambda: train_forked(words), self.log(run), environment)
        with open(self.log(run), "ab") as log:
            program = [sys.executable, "-X", "faulthandler", "-m", "maxtrain.train", *words]
            environment = {**os.environ, **environment, "PYTHONPATH": str(ROOT)}
            return subprocess.Popen(
                program, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def log(self, run: str) -> Path:
        return self.folder / f"{run}.log"

    def reference(self) -> "RunFiles":
        """Return what a run leaves that nobody disturbs; made once."""
        if not (self.runs / "reference").exists():
            code = end(self.start("reference"))
            if code != 0:
                raise RuntimeError(
                    f"the reference itself ended with {code}; see {self.log('reference')}"
                )
        return RunFiles(self.runs / "reference")


def make_data(folder: Path, megabytes: float, vocabulary: Sequence[str] = WORDS) -> None:
    """Documents of these words, prepared by `prepare`, with an evaluation set."""
    rng = random.Random(0)
    count = 120
    (folder / "text").mkdir(parents=True)
    # Words of a document, of four characters each.
    mean = 1e6 * megabytes / count / 4
    for number in range(count):
        words = rng.choices(vocabulary, k=rng.randrange(int(0.3 * mean), int(1.7 * mean)))
        (folder / "text" / f"{number}.txt").write_text(" ".join(words))
    words = [
        str(folder / "data"),
        "--text",
        f"{folder}/text/*.txt",
        "--tokenizer",
        "bytes",
        "--holdout",
        "0.1",
    ]
    with (
        open(folder / "prepare.log", "w") as log,
        contextlib.redirect_stdout(log),
        contextlib.redirect_stderr(log),
    ):
        if prepare.main([*words, "--workers", "1"]):
            raise RuntimeError(f"prepare failed; see {folder / 'prepare.log'}")


def apart(job: Callable[[], Iterator[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Yield what a job yields, which runs in a process forked from this one; it is passed on as
    JSON.

    Raises:
        RuntimeError: the process failed.
    """
    read, write = os.pipe()

    def tell() -> int:
        with os.fdopen(write, "w") as pipe:
            for said in job():
                print(json.dumps(said), file=pipe, flush=True)
        return 0

    log = Path(tempfile.gettempdir(), f"chaos-{os.getpid()}.log")
    process = ForkedProcess(tell, log, {})
    os.close(write)
    try:
        with os.fdopen(read) as pipe:
            for line in pipe:
                yield json.loads(line)
        if process.wait():
            raise RuntimeError(f"it ended with {process.returncode}: {log.read_text()}")
        log.unlink()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def end(process: ForkedProcess | subprocess.Popen, patience: float = PATIENCE) -> int | str:
    """The exit code of an attempt. One that hangs is ended, with its stacks in the log; its code is
    "hangs"."""
    try:
        return process.wait(patience)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)
        time.sleep(2)
        return "hangs"
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class RunFiles:
    """Files of a run on the disk: its records, and the checkpoints that count."""

    def __init__(self, run: Path):
        self.run = run
        self.records = read_metrics(run)
        self.steps = [record["step"] for record in self.records if record["kind"] == "train"]
        # The last step on record.
        self.last = 0
        if self.steps:
            self.last = self.steps[-1]
        found = survey(run / "checkpoints")
        self.saved = [step for step, why in found.items() if not why]
        self.bad = [f"{step}: {why}" for step, why in found.items() if why]
        self.newest = max(self.saved, default=0)

    def aside(self) -> list[str]:
        """Checkpoints that were put aside."""
        return [path.name for path in (self.run / "checkpoints").glob("*.damaged-*")]

    def unlike(self, reference: "RunFiles", whole: bool) -> list[str]:
        """Return how the records so far differ from those of a reference in any bit.

        Args:
            reference: what an undisturbed run has left.
            whole: compare how the run ends, too: all records, checkpoints and weights.
        """
        problems = []
        if self.steps != list(range(1, self.last + 1)):
            problems.append(f"the records have not every step up to {self.last} once, in order")
        fields = compare_records(self.records, reference.records)
        problems += [
            f"{field.name} differs at {field.first}" for field in fields if field.different
        ]
        needed = {"loss", "grad_norm", "batch", "params_hash", "batch_hash"}
        if self.steps and not needed <= {
            field.name for field in fields if field.compared == self.last
        }:
            problems.append(f"{', '.join(sorted(needed))} are not all on record")
        if whole:
            problems += self._end_unlike(reference)
        return problems

    def keys(self) -> list[tuple[str, str | None, int]]:
        """Return which records there are, in order."""
        return [(record["kind"], record.get("set"), record["step"]) for record in self.records]

    def _end_unlike(self, reference: "RunFiles") -> list[str]:
        problems = []
        if self.keys() != reference.keys():
            problems.append("it has other records than the reference")
        ours = saved_digests(self.run / "checkpoints")
        theirs = saved_digests(reference.run / "checkpoints")
        for step in sorted(ours.keys() & theirs.keys()):
            if ours[step] != theirs[step]:
                problems.append(f"arrays of checkpoint {step} differ")
            why = check(self.run / "checkpoints" / f"{step:08d}")
            if why:
                problems.append(f"checkpoint {step} is damaged: {why}")
        if self.newest != reference.newest:
            problems.append(
                f"the newest checkpoint is of step {self.newest}, not {reference.newest}"
            )
        return problems


def kept(newest: int, interval: int, keep: int, every: int) -> set[int]:
    """The steps whose checkpoints must be there once that of `newest` is, if a run saves each
    interval."""
    steps = list(range(interval, newest + 1, interval))
    return set(steps[-keep:]) | {step for step in steps if step % every == 0}


def wait_for(
    condition: Callable[[], bool],
    process: ForkedProcess | subprocess.Popen,
    patience: float = PATIENCE,
) -> bool:
    """Return whether something became true before the process ended, and before patience did."""
    deadline = time.monotonic() + patience
    while process.poll() is None and time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(POLL)
    return False


class AttemptProgress:
    """Progress of an attempt of a run: whether it has opened its records, from which it drops those
    after the step that it goes on from, and whether it has made a step.
    """

    def __init__(self, run: Path, newest: int):
        self._run = run
        self._path = run / FILE_NAME
        self._newest = newest
        self._before = self._identity()

    def opened(self) -> bool:
        """Return whether the attempt has opened its records."""
        return self._identity() != self._before

    def has_made_a_step(self) -> bool:
        """Return whether a record of a new step is there."""
        # The file is read while it is written.
        with contextlib.suppress(ValueError, OSError, KeyError):
            return self.opened() and reached_step(self._run) > self._newest
        return False

    def _identity(self) -> int:
        if not self._path.exists():
            return 0
        return self._path.stat().st_ino


def ended_with(code: int | str, *allowed: int) -> list[str]:
    """Report that a command ended with another exit code than it should; empty if it did not."""
    if code in allowed:
        return []
    return [f"ended with {code}"]


def size_of(path: Path) -> int:
    """The bytes of a file; 0: there is none."""
    if not path.exists():
        return 0
    return path.stat().st_size


def put_away(scene: Scene, run: str) -> Path:
    """Keeps what a failed victim has left, for people to look at."""
    target = scene.folder / "failed" / f"{run}-{time.strftime('%H%M%S')}"
    target.mkdir(parents=True)
    for path in (scene.runs / run, scene.log(run)):
        if path.exists():
            shutil.move(path, target)
    return target
