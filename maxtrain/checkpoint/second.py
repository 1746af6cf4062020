"""The second directory: good steps are copied there in the background, and no failure there stops
training.

A thread of process 0 copies the newest complete step whenever there is a new one; what is saved
while it copies is passed over for what is newest then, so a slow place gets fewer steps, not late
ones. Steps below the second directory are like others.
"""

import contextlib
import shutil
import sys
import threading
from pathlib import Path

from maxtrain import failpoints
from maxtrain.checkpoint.copying import copy_step, remove_step
from maxtrain.checkpoint.integrity import defect
from maxtrain.checkpoint.listing import complete


class SecondDirectory:
    """Copies the newest step of `source` to `target` when told that there may be one, and keeps
    `keep` of them there."""

    def __init__(self, source: Path, target: Path, keep: int):
        self.source, self.target, self._keep = source, target, keep
        self.copying: int | None = None  # this step is to be left where it is
        self.copied = self.failed = 0  # steps
        self._news, self._idle, self._ending = threading.Event(), threading.Event(), False
        self._idle.set()
        self._discard: int | None = None  # later steps than this are to go
        # As a daemon: a file system that hangs does not keep the process from ending, and what is
        # half copied does not count.
        self._thread = threading.Thread(target=self._work, name="second directory", daemon=True)

    def offer(self) -> None:
        """There may be a new step; returns at once."""
        if not self._thread.ident:
            self._thread.start()
        self._idle.clear()
        self._news.set()

    def discard_after(self, step: int) -> None:
        """Have later steps removed, too; returns at once."""
        self._discard = step if self._discard is None else min(step, self._discard)
        self.offer()

    def settle(self, seconds: float) -> bool:
        """Waits so long for what is under way; whether the newest step is there, and nothing is
        left to do."""
        return self._idle.wait(seconds) and not self._unlike(
            max(complete(self.source), default=None)
        )

    def close(self) -> None:
        """Ends the thread when the newest step is copied; waits a minute at most."""
        self._ending = True
        if self._thread.ident:
            self.offer()
            self._thread.join(60)

    def _work(self) -> None:
        while not (self._ending and self._idle.is_set()):
            self._news.wait()
            self._news.clear()
            try:
                self._catch_up()
            except Exception as error:  # of any kind: training goes on
                self._tell(error)
            finally:
                self.copying = None
            if not self._news.is_set():
                self._idle.set()
                if self._news.is_set():  # it came between these two lines
                    self._idle.clear()

    def _catch_up(self) -> None:
        if not (
            root := self.target.parents[1]
        ).is_dir():  # not mounted: what is made there would be on another disk
            raise FileNotFoundError(f"{root} is no directory")
        if (discard := self._discard) is not None:
            for later in [path for step, path in complete(self.target).items() if step > discard]:
                remove_step(later)
            if self._discard == discard:
                self._discard = None
        self.copying = step = max(complete(self.source), default=None)
        if step is None or not self._unlike(step):
            return
        for leftover in self.target.glob(".*.partial"):  # of a process that was killed
            shutil.rmtree(leftover)
        source = self.source / f"{step:08d}"
        try:
            copy_step(
                source, self.target, before_commit=lambda: failpoints.hit("during_copy", step)
            )
        except FileNotFoundError:
            if source.exists():
                raise
            return  # retired, or taken back, before it was marked as being copied
        self.copied += 1
        failpoints.hit("after_copy", step)
        for old in list(complete(self.target).values())[: -self._keep]:
            remove_step(old)

    def _unlike(self, step: int | None) -> bool:
        """Whether the second directory lacks this step, or has another one of its number."""
        if step is None:
            return False
        here, there = (directory / f"{step:08d}" for directory in (self.source, self.target))
        with contextlib.suppress(OSError):
            return (
                bool(defect(there))
                or (here / "commit.json").read_bytes() != (there / "commit.json").read_bytes()
            )
        return True

    def _tell(self, error: Exception) -> None:
        """After the first failure, the second, the fourth, and so on."""
        self.failed += 1
        if self.failed & (self.failed - 1) == 0:
            what = f"copying to checkpoint.copy_to failed ({error}); so far {self.failed} copies failed, {self.copied} did not"
            _print(f"WARNING: {what}. Training goes on; mend {self.target}.")


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
