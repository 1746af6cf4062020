"""A run behind s3://, whose process is killed, or whose store fails: the same command goes on, also
from an empty disk, and comes to the numbers of a run on a disk that nobody disturbed.

The store is moto's, in a process of its own. It counts requests, so that a fault hits a request
that is drawn from all those of an undisturbed attempt: its lock, listings, records, arrays that are
read, written or removed. What is behind the URL is looked at past all of the code that is tested.

Each trial is drawn from the seed and its number. With --directory, trials that were made are kept
in trials-FAULT.jsonl, and the same command goes on after them.
"""

import argparse
import collections
import dataclasses
import json
import random
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from benchmarks.chaos.report import Tally, failure
from benchmarks.chaos.victim import (
    ForkedProcess,
    RunFiles,
    Scene,
    end,
    ended_with,
    kept,
    put_away,
    size_of,
    train_forked,
    wait_for,
)
from benchmarks.faulty_s3 import BUCKET, FaultyS3Process, RequestFault
from data_pipeline.base import remote
from data_pipeline.base.extras import load_package
from maxtrain.storage import lease

RUN = "victim"
PREFIX = f"runs/{RUN}/"
CHANGES = {
    "steps": 12,
    "checkpoint_interval": 4,
    "eval_interval": 6,
    # The same whatever the number of steps is.
    "schedule": {"name": "constant", "warmup_steps": 2},
    "checkpoint": {"keep": 2, "keep_every": 100},
    # Fewer files in a checkpoint, and so fewer requests.
    "optimizer": {"name": "sgd", "learning_rate": 0.1},
}
# The step at which a run was stopped that a trial goes on with.
HALF = 6
# How a process is killed, and how often.
AIMS = {"request": 5, "instant": 2, "place": 3}
PLACES = (
    "during_save",
    "before_commit",
    "during_upload",
    "before_upload_counts",
    "after_upload",
    "after_commit",
    "during_removal",
    "restore",
    "before_step",
    "eval",
)
# Seconds that a request may take, and pauses between tries: all of it is to be over soon.
TIMEOUT = 1.5
PAUSE = 0.02
# Seconds after which a silent holder of the lock is taken for dead.
LEASE = 6.0
_ANY = "(GET|HEAD|PUT|POST|DELETE) .*"
_CHANGES = "(PUT|POST|DELETE) .*"
_OBJECT = f"/{BUCKET}/.+"
# What a store does to a request, and to which: a pattern, and the marks of a Fault.
FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "connection closed, the request not done": (_ANY, {"drop": True}),
    "connection closed, the request done": (_CHANGES, {"drop": True, "done": True}),
    "connection closed within the answer": ("GET .*", {"cut": True}),
    "500 InternalError": (_ANY, {"status": 500, "code": "InternalError"}),
    "503 SlowDown": (_ANY, {"status": 503, "code": "SlowDown"}),
    "no answer in time": (_ANY, {"seconds": 2 * TIMEOUT}),
    "an upload cut short": (f"PUT {_OBJECT}", {"keep": 5}),
    "an upload lost, and answered": (f"PUT {_OBJECT}", {"lose": True}),
    "wrong bytes read": (f"GET {_OBJECT}", {"flip": True}),
    "writing denied": (_CHANGES, {"status": 403, "code": "AccessDenied"}),
}
# How many requests in a row it hits; infinity: all from then on.
TIMES = {1: 5, 2: 2, 4: 1, float("inf"): 2}
# A store that does this to all of them keeps nothing, or takes too long for a trial.
NOT_TO_ALL = ("an upload cut short", "no answer in time")


@dataclasses.dataclass(frozen=True)
class TrialStart:
    """Start of a trial: objects below the URL, and whether the host has their copy."""

    name: str
    contents: dict[str, bytes]
    disk: bool


class BucketScene(Scene):
    """A scene whose run is behind a URL, with its store."""

    def __init__(self, folder: Path):
        super().__init__(folder, **CHANGES)
        # Before a process is forked that would have to import it.
        self._fsspec = load_package("fsspec", "remote", "s3://")
        self._s3fs = load_package("s3fs", "s3", "s3://")
        self.server = FaultyS3Process()
        self.environment |= self.server.environment
        self.disk = folder / "disk"
        self._half_disk = folder / "half"
        self.undisturbed = self.reference()

    def launch(self, *overrides: str, fault: str = "") -> ForkedProcess:
        """An attempt at the run at the URL."""
        places = [f"output_dir=s3://{BUCKET}/runs", f"local_dir={self.disk}"]
        words = self.words(RUN, *places, *overrides)
        environment = self.environment | {"MAXTRAIN_FAILPOINT": fault}
        return ForkedProcess(lambda: self._train(words), self.log(RUN), environment)

    def _train(self, words: list[str]) -> int:
        remote._PAUSE = PAUSE
        lease.LEASE = LEASE
        self._s3fs.S3FileSystem.retries = 2
        client = {
            "retries": {"max_attempts": 0},
            "read_timeout": TIMEOUT,
            "connect_timeout": TIMEOUT,
        }
        self._fsspec.config.conf["s3"] = {"config_kwargs": client}
        return train_forked(words)

    def look(self) -> RunFiles:
        """Return the content of the URL."""
        folder = self.folder / "looked" / RUN
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name, content in self.server.contents(PREFIX).items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return RunFiles(folder)

    def starts(self) -> list[TrialStart]:
        """Return what trials begin with: nothing, and a run that was stopped half way, with the
        disk of its host and without.
        """
        kept_half = self.folder / "half-at-the-url"
        if not kept_half.exists():
            self.begin_with(TrialStart("nothing", {}, disk=False))
            code = end(self.launch(f"steps={HALF}"))
            if code != 0:
                raise RuntimeError(f"an undisturbed run ended with {code}; see {self.log(RUN)}")
            shutil.rmtree(self._half_disk, ignore_errors=True)
            shutil.copytree(self.disk, self._half_disk)
            shutil.copytree(self.look().run, kept_half)
        files = [path for path in kept_half.rglob("*") if path.is_file()]
        contents = {path.relative_to(kept_half).as_posix(): path.read_bytes() for path in files}
        return [
            TrialStart("nothing", {}, disk=False),
            TrialStart("half a run", contents, disk=True),
            TrialStart("half a run, an empty disk", contents, disk=False),
        ]

    def begin_with(self, start: TrialStart) -> None:
        """Makes the URL and the disk those of a start, and has no faults."""
        self.server.begin([])
        self.server.fill(PREFIX, start.contents)
        shutil.rmtree(self.disk, ignore_errors=True)
        if start.disk:
            shutil.copytree(self._half_disk, self.disk)
        self.log(RUN).unlink(missing_ok=True)

    def requests(self, start: TrialStart) -> list[str]:
        """All requests of an undisturbed attempt, which is made once.

        RuntimeError: it does not come to the numbers of a run on a disk.
        """
        path = self.folder / f"requests of {start.name}.txt"
        if path.exists():
            return path.read_text(encoding="utf-8").splitlines()
        self.begin_with(start)
        code = end(self.launch())
        problems = judge(self, code, counted=0)
        if problems or code != 0:
            listed = "; ".join(problems)
            raise RuntimeError(f"undisturbed, it ended with {code}: {listed}; see {self.log(RUN)}")
        requests = self.server.requests()
        path.write_text("\n".join(requests), encoding="utf-8")
        return requests

    def put_away(self) -> Path:
        """Keeps what a failed trial has left, for people to look at."""
        target = put_away(self, RUN)
        shutil.copytree(self.folder / "looked" / RUN, target / "at-the-url")
        if self.disk.exists():
            shutil.copytree(self.disk, target / "disk")
        (target / "requests.txt").write_text("\n".join(self.server.requests()))
        return target

    def said(self, since: int = 0) -> str:
        return self.log(RUN).read_bytes()[since:].decode(errors="replace")


def judge(scene: BucketScene, code: int | str, counted: int) -> list[str]:
    """Return the problem with what is at the URL.

    Args:
        code: with which the attempt ended; 0: it must be the end.
        counted: a step whose checkpoint was there before.
    """
    left = scene.look()
    policy = scene.values["checkpoint"]
    problems = left.unlike(scene.undisturbed, whole=code == 0)
    wanted = kept(left.newest, scene.interval, policy["keep"], policy["keep_every"])
    # A run that was stopped has saved its last step, too.
    missing = {step for step in wanted if step > counted} - set(left.saved)
    if missing or left.newest < counted:
        problems.append(
            f"lost checkpoints: {sorted(missing)}; {counted} was there, {left.saved} are"
        )
    # What is uploaded or removed does not count meanwhile; at the end none of it is left.
    for what in left.bad:
        if code == 0 or "commit.json is missing" not in what:
            problems.append(f"not whole: {what}")
    problems += [f"put aside: {name}" for name in left.aside()]
    if code == 0 and list((left.run / "lock").glob("*")) == []:
        problems.append("its lock is gone")
    return problems


def bucket_kills(folder: Path, tally: Tally, args: argparse.Namespace) -> None:
    """Kill the process of a run behind a URL, again and again."""
    scene = BucketScene(folder / "bucket")
    trials = Trials(folder, tally, args)
    starts = scene.starts()
    requests = {start.name: len(scene.requests(start)) for start in starts}

    def begin(rng: random.Random) -> BucketVictim:
        return BucketVictim(scene, rng.choice(starts), requests)

    kill_all(scene, tally, trials, begin)
    where = trials.places()
    tally.rows = [("SIGKILL of a run behind s3://", tally.trials, len(tally.failures))]
    tally.rows += [(f"of these: {what}", count, bad) for what, (count, bad) in where.items()]
    tally.notes.append(
        f"Runs of {scene.steps} steps, a checkpoint every {scene.interval}, that begin with nothing "
        f"or half way; an undisturbed one makes {min(requests.values())} to "
        f"{max(requests.values())} requests. After each kill, in a half of cases, the disk of the "
        "host was lost, too."
    )


class KilledRun(Protocol):
    """One run, whose attempts are killed until one reaches the end."""

    def attempt(self, rng: random.Random) -> tuple[str, list[str]] | None:
        """Starts an attempt and kills it: where, and what is wrong; None: it reached its end."""
        ...

    def finish(self) -> list[str]:
        """Lets the run go on undisturbed; what is wrong with its end."""
        ...


def kill_all(
    scene: BucketScene, tally: Tally, trials: "Trials", begin: Callable[[random.Random], KilledRun]
) -> None:
    """Makes the trials, with runs that begin one after the other, and closes the store."""
    run: KilledRun | None = None
    for number, rng in trials.numbers():
        if run is None:
            run = begin(rng)
        killed = run.attempt(rng)
        if killed is None:
            run = None
            continue
        where, problems = killed
        trials.count(number, where, problems)
        if problems:
            tally.tell(f"kept in {scene.put_away()}")
            run = None
    if run is not None:
        problems = run.finish()
        if problems:
            tally.fail(failure("the end of the last run", problems))
    scene.server.close()


class BucketVictim:
    """One run, whose attempts are killed until one reaches the end."""

    def __init__(self, scene: BucketScene, start: TrialStart, requests: dict[str, int]):
        self._scene = scene
        self._requests = requests[start.name]
        # The newest step whose checkpoint is known to be at the URL.
        self._counted = 0
        if start.contents:
            self._counted = HALF
        scene.begin_with(start)

    def attempt(self, rng: random.Random) -> tuple[str, list[str]] | None:
        """Starts an attempt and kills it: where, and what is wrong; None: it reached its end."""
        scene = self._scene
        aim = rng.choices(list(AIMS), list(AIMS.values()))[0]
        fault = ""
        where = aim
        if aim == "place":
            place = rng.choice(PLACES)
            step = rng.choice([4, 6, 8, 12])
            fault = f"{place}:kill:{step}"
            where = f"at {place}"
        before = size_of(scene.log(RUN))
        scene.server.begin([])
        process = scene.launch(fault=fault)
        if aim == "instant":
            wait_for(lambda: False, process, rng.uniform(0, 3))
            process.send_signal(signal.SIGKILL)
        if aim == "request":
            is_done = rng.random() < 0.5
            skip = rng.randrange(self._requests)
            kill = RequestFault(".*", skip=skip, times=1, done=is_done, pid=process.pid, drop=True)
            scene.server.begin([kill])
            where = "when a request is done" if is_done else "before a request is done"
        code = end(process)
        scene.server.begin([])
        problems = judge(scene, code, self._counted)
        problems += ended_with(code, 0, -signal.SIGKILL)
        problems += self._lost()
        if code == 0 and not problems:
            return None
        if "Traceback" in scene.said(before):
            problems.append("there is a traceback")
        self._counted = max(self._counted, scene.look().newest)
        if rng.random() < 0.5:
            shutil.rmtree(scene.disk, ignore_errors=True)
        return where, problems

    def _lost(self) -> list[str]:
        """Report that more work is lost than an interval, or two while a save is under way."""
        here = self._scene.disk / "s3" / BUCKET / "runs" / RUN
        if not here.exists():
            return []
        lost = RunFiles(here).last - self._scene.look().newest
        if lost <= 2 * self._scene.interval:
            return []
        return [f"{lost} steps lost, with an interval of {self._scene.interval}"]

    def finish(self) -> list[str]:
        """Lets the run go on undisturbed; what is wrong with its end."""
        code = end(self._scene.launch())
        return ended_with(code, 0) + judge(self._scene, code, self._counted)


def bucket_faults(folder: Path, tally: Tally, args: argparse.Namespace) -> None:
    """Let the store of a run behind a URL fail, again and again."""
    scene = BucketScene(folder / "bucket")
    trials = Trials(folder, tally, args)
    starts = scene.starts()
    requests = {start.name: scene.requests(start) for start in starts}
    for number, rng in trials.numbers():
        start = rng.choice(starts)
        kind = rng.choice(list(FAULTS))
        outcome, problems = _with_fault(scene, start, requests[start.name], kind, rng)
        trials.count(number, kind, problems, outcome)
        if problems:
            tally.tell(f"kept in {scene.put_away()}")
    scene.server.close()
    tally.rows = [("a store that fails, of a run behind s3://", tally.trials, len(tally.failures))]
    where = trials.places()
    tally.rows += [(f"of these: {what}", count, bad) for what, (count, bad) in where.items()]
    outcomes = ", ".join(f"{what} {count}" for what, count in trials.outcomes().most_common())
    tally.notes.append(
        f"Runs of {scene.steps} steps, a checkpoint every {scene.interval}, that begin with nothing "
        "or half way, with the disk of their host or an empty one. A fault hits one request of an "
        "attempt, some in a row, or all of its kind from then on; what the same command makes of it, "
        f"without the fault, is compared. Outcomes: {outcomes}"
    )


def _with_fault(
    scene: BucketScene, start: TrialStart, requests: list[str], kind: str, rng: random.Random
) -> tuple[str, list[str]]:
    """An attempt with a fault, and another without it, if that is needed: what came of it, and what
    is wrong."""
    pattern, marks = FAULTS[kind]
    count = sum(bool(re.fullmatch(pattern, request)) for request in requests)
    times = rng.choices(list(TIMES), list(TIMES.values()))[0]
    if kind in NOT_TO_ALL:
        times = min(times, 4)
    skip = rng.randrange(count)
    scene.begin_with(start)
    scene.server.begin([RequestFault(pattern, skip=skip, times=times, **marks)])
    code = end(scene.launch())
    made = len(scene.server.requests())
    scene.server.begin([])
    counted = 0
    if start.contents:
        counted = HALF
    problems = judge(scene, code, counted)
    said = scene.said()
    where = f"request {skip} of {count} and {times} from there"
    if code == 0:
        return "went on by itself", [f"{what} ({where})" for what in problems]
    # Another process seems to write where a late request is done.
    problems += ended_with(code, 74, 75)
    errors = [line for line in said.splitlines() if line.startswith("error:")]
    if not any(f"s3://{BUCKET}/" in line for line in errors):
        problems.append(f"no message names what is not reached ({made} requests)")
    if "Traceback" in said:
        problems.append("there is a traceback")
    again = end(scene.launch())
    problems += ended_with(again, 0)
    problems += judge(scene, again, scene.look().newest)
    return f"ended with {code} and went on", [f"{what} ({where})" for what in problems]


class Trials:
    """The trials of one kind of fault, in the order of their numbers; those that were made before
    in this folder with this seed are counted, and not made again."""

    def __init__(self, folder: Path, tally: Tally, args: argparse.Namespace):
        self._tally = tally
        self._seed = args.seed
        self._path = folder / f"trials-{tally.name}-{args.seed}.jsonl"
        self._made: list[dict[str, Any]] = []
        self._next = 0
        if self._path.exists():
            for line in self._path.read_text(encoding="utf-8").splitlines():
                self._note(json.loads(line))

    def numbers(self) -> Iterator[tuple[int, random.Random]]:
        """The number of each trial that is still to be made, and what it is drawn from."""
        while not self._tally.done():
            number = self._next
            self._next += 1
            yield number, random.Random(f"{self._seed}/{self._tally.name}/{number}")

    def count(self, number: int, what: str, problems: list[str], outcome: str = "") -> None:
        """One trial was made."""
        problem = failure(f"trial {number}, {what}", problems)
        trial = {"number": number, "what": what, "problem": problem, "outcome": outcome}
        with self._path.open("a", encoding="utf-8") as file:
            print(json.dumps(trial), file=file)
        self._note(trial)

    def _note(self, trial: dict[str, Any]) -> None:
        self._made.append(trial)
        self._next = trial["number"] + 1
        self._tally.count(trial["problem"], trial["what"])

    def places(self) -> dict[str, tuple[int, int]]:
        """Trials and failures by what was tried, the most frequent first."""
        counts = collections.Counter(trial["what"] for trial in self._made)
        bad = collections.Counter(trial["what"] for trial in self._made if trial["problem"])
        return {what: (count, bad[what]) for what, count in counts.most_common()}

    def outcomes(self) -> collections.Counter[str]:
        return collections.Counter(trial["outcome"] for trial in self._made)
