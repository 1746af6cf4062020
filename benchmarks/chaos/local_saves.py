"""A run behind s3:// that saves on the disk of its host between uploads (`checkpoint.local`), whose
process is killed: the same command goes on from the newest step that is whole, on the disk or at
the URL, and comes to the numbers of a run that nobody disturbed.

After a kill, the disk may be lost, or a byte of its newest step may be another one. Which step the
next attempt has to begin with follows from what is there, looked at past the code that is tested.
"""

import argparse
import random
import re
import shutil
import signal
from pathlib import Path

from benchmarks.chaos.bucket import BUCKET, RUN, BucketScene, Trials, TrialStart, kill_all
from benchmarks.chaos.flips import damage
from benchmarks.chaos.report import Tally
from benchmarks.chaos.victim import ForkedProcess, end, ended_with, size_of, wait_for
from maxtrain.checkpoint.integrity import survey

# Steps between saves, and of these, which is uploaded.
INTERVAL = 2
UPLOAD_EVERY = 3
PLACES = (
    "during_save",
    "before_commit",
    "after_commit",
    "during_upload",
    "before_upload_counts",
    "after_upload",
    "before_step",
    "restore",
)
# What becomes of the disk after a kill, and how often.
DISK = {"kept": 5, "lost": 2, "damaged": 3}
_BEGUN = re.compile(r"Goes on from step (\d+) in")


class LocalSavesScene(BucketScene):
    """A scene whose run is behind a URL, and on the disk of its host."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.fast = folder / "fast"

    def launch(self, *overrides: str, fault: str = "") -> ForkedProcess:
        """An attempt at the run."""
        between = [
            f"checkpoint_interval={INTERVAL}",
            f"checkpoint.local={self.fast}",
            f"checkpoint.upload_every={UPLOAD_EVERY}",
        ]
        return super().launch(*between, *overrides, fault=fault)

    def begin_with(self, start: TrialStart) -> None:
        """Begin as with a bucket, with an empty disk for the steps between uploads."""
        super().begin_with(start)
        shutil.rmtree(self.fast, ignore_errors=True)

    @property
    def place(self) -> Path:
        """Return where the steps of the one process are."""
        return self.fast / "s3" / BUCKET / "runs" / RUN / "0"

    def on_the_disk(self) -> list[int]:
        """Steps that are whole there."""
        if not self.place.exists():
            return []
        return sorted(step for step, why in survey(self.place).items() if not why)


class LocalSavesVictim:
    """One run, whose attempts are killed until one reaches the end."""

    def __init__(self, scene: LocalSavesScene, start: TrialStart):
        self._scene = scene
        self._uploaded = 0
        # The step that the next attempt has to begin with, at least.
        self._from = 0
        # Whether the step behind it is damaged, which the next attempt has to notice.
        self._is_damaged = False
        scene.begin_with(start)

    def attempt(self, rng: random.Random) -> tuple[str, list[str]] | None:
        """Starts an attempt and kills it: where, and what is wrong; None: it reached its end."""
        scene = self._scene
        fault = ""
        where = "instant"
        if rng.random() < 0.6:
            place = rng.choice(PLACES)
            fault = f"{place}:kill:{rng.choice([2, 4, 6, 8, 10, 12])}"
            where = f"at {place}"
        before = size_of(scene.log(RUN))
        process = scene.launch(fault=fault)
        if not fault:
            wait_for(lambda: False, process, rng.uniform(0.5, 3.5))
            process.send_signal(signal.SIGKILL)
        code = end(process)
        said = scene.said(before)
        problems = self._judge(code, said)
        problems += ended_with(code, 0, -signal.SIGKILL)
        if code == 0 and not problems:
            return None
        if "Traceback" in said:
            problems.append("there is a traceback")
        disk = self._strike(rng)
        return f"{where}, disk {disk}", problems

    def finish(self) -> list[str]:
        """Lets the run go on undisturbed; what is wrong with its end."""
        before = size_of(self._scene.log(RUN))
        code = end(self._scene.launch())
        return ended_with(code, 0) + self._judge(code, self._scene.said(before))

    def _judge(self, code: int | str, said: str) -> list[str]:
        """Return what is wrong after an attempt."""
        scene = self._scene
        left = scene.look()
        problems = left.unlike(scene.undisturbed, whole=code == 0)
        begun = _BEGUN.search(said)
        if begun is not None:
            if int(begun[1]) != self._from:
                problems.append(f"it went on from step {begun[1]}, where {self._from} was whole")
            if self._is_damaged and "is damaged" not in said:
                problems.append("no message reported the damaged step")
        if left.newest < self._uploaded:
            problems.append(f"lost: step {self._uploaded} was at the URL, {left.saved} are")
        self._uploaded = left.newest
        on_disk = scene.on_the_disk()
        reached = max([left.newest, *on_disk])
        if reached < self._from:
            problems.append(f"lost: step {self._from} was whole, {reached} is")
        for what in left.bad:
            if code == 0 or "commit.json is missing" not in what:
                problems.append(f"not whole: {what}")
        problems += [f"put aside at the URL: {name}" for name in left.aside()]
        if code == 0 and on_disk:
            problems.append(f"steps {on_disk} are left on the disk behind the end")
        return problems

    def _strike(self, rng: random.Random) -> str:
        """Has the disk lose or damage something; says what, and notes what the next attempt has to
        do."""
        scene = self._scene
        on_disk = scene.on_the_disk()
        what = rng.choices(list(DISK), list(DISK.values()))[0]
        self._is_damaged = False
        if what == "lost":
            shutil.rmtree(scene.fast, ignore_errors=True)
            on_disk = []
        # A step that is older than the one at the URL is not read.
        if what == "damaged" and on_disk and on_disk[-1] > self._uploaded:
            arrays = scene.place / f"{on_disk.pop():08d}" / "arrays"
            damage(arrays, rng, {"flipped bit": 1})
            self._is_damaged = True
        elif what == "damaged":
            what = "kept"
        self._from = max([self._uploaded, *on_disk])
        return what


def local_kills(folder: Path, tally: Tally, args: argparse.Namespace) -> None:
    """Kill the process of a run that saves on its disk between uploads, again and again."""
    scene = LocalSavesScene(folder / "local")
    trials = Trials(folder, tally, args)
    start = TrialStart("nothing", {}, disk=False)
    kill_all(scene, tally, trials, lambda rng: LocalSavesVictim(scene, start))
    tally.rows = [
        ("SIGKILL of a run that saves between uploads", tally.trials, len(tally.failures))
    ]
    for disk in DISK:
        found = [pair for what, pair in trials.places().items() if what.endswith(f"disk {disk}")]
        count = sum(made for made, _ in found)
        bad = sum(failed for _, failed in found)
        tally.rows.append((f"of these, with the disk {disk} afterwards", count, bad))
    tally.notes.append(
        f"Runs of {scene.steps} steps that save every {INTERVAL} on the disk of their host, and "
        f"upload each {UPLOAD_EVERY}rd save. Each attempt must begin with the newest step that is "
        "whole, and say what is damaged."
    )
