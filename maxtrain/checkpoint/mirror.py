"""The second directory: good steps are copied there in the background.

No failure there stops training.

A thread of process 0 copies the newest complete step whenever there is a new one; what is saved
while it copies is passed over for what is newest then, so a slow place gets fewer steps, not late
ones. Steps below the second directory are like others.
"""

import functools
import shutil
import sys
import threading
from pathlib import Path

from maxtrain import failpoints
from maxtrain.checkpoint.copying import copy_step, remove_step
from maxtrain.checkpoint.frozen_params import KEY, copy_frozen, lack
from maxtrain.checkpoint.integrity import defect, read_commit
from maxtrain.checkpoint.listing import complete


class SecondDirectory:
    """Copier of the newest step of `source` to `target`, when it is notified of a new step.

    The newest `keep` steps are kept there.
    """

    def __init__(self, source: Path, target: Path, keep: int):
        self.source = source
        self.target = target
        self._keep = keep
        # This step is to be left where it is.
        self.copying: int | None = None
        # Counts of copies.
        self.copied = 0
        self.failed = 0
        self._news = threading.Event()
        self._idle = threading.Event()
        self._idle.set()
        self._ending = False
        # Later steps than this are to go.
        self._discard: int | None = None
        # As a daemon: a file system that hangs does not keep the process from ending, and what is
        # half copied does not count.
        self._thread = threading.Thread(target=self._work, name="second directory", daemon=True)

    def offer(self) -> None:
        """Announce that there may be a new step; returns at once."""
        if not self._thread.ident:
            self._thread.start()
        self._idle.clear()
        self._news.set()

    def discard_after(self, step: int) -> None:
        """Have later steps removed, too; returns at once."""
        earlier = self._discard
        if earlier is not None:
            step = min(step, earlier)
        self._discard = step
        self.offer()

    def settle(self, seconds: float) -> bool:
        """Waits so long for what is under way.

        Returns:
            Whether the newest step is there, and nothing is left to do.
        """
        if not self._idle.wait(seconds):
            return False
        return not self._lacks(max(complete(self.source), default=None))

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
            # Whatever it is, training goes on.
            except Exception as error:
                self._report(error)
            finally:
                self.copying = None
            if not self._news.is_set():
                self._idle.set()
                # News may have come between the last look and this line.
                if self._news.is_set():
                    self._idle.clear()

    def _catch_up(self) -> None:
        # One that is not mounted: what is made there would be on another disk.
        root = self.target.parents[1]
        if not root.is_dir():
            raise FileNotFoundError(f"{root} is no directory")
        self._remove_discarded()
        step = max(complete(self.source), default=None)
        self.copying = step
        if step is None or not self._lacks(step):
            return
        # What is left of a process that was killed.
        for leftover in self.target.glob(".*.partial"):
            shutil.rmtree(leftover)
        source = self.source / f"{step:08d}"
        before_commit = functools.partial(failpoints.hit, "during_copy", step)
        try:
            copy_frozen(source, self.target)
            copy_step(source, self.target, before_commit=before_commit)
        except FileNotFoundError:
            if source.exists():
                raise
            # It was retired, or taken back, before it was marked as being copied.
            return
        self.copied += 1
        failpoints.hit("after_copy", step)
        for old in list(complete(self.target).values())[: -self._keep]:
            remove_step(old)

    def _remove_discarded(self) -> None:
        """Removes the steps after the one that the run has gone back to."""
        discard = self._discard
        if discard is None:
            return
        for step, path in complete(self.target).items():
            if step > discard:
                remove_step(path)
        # An earlier one may have been named meanwhile.
        if self._discard == discard:
            self._discard = None

    def _lacks(self, step: int | None) -> bool:
        """Return whether the second directory lacks this step, or has another one of its number."""
        if step is None:
            return False
        here = self.source / f"{step:08d}"
        there = self.target / f"{step:08d}"
        try:
            if defect(there):
                return True
            ours = (here / "commit.json").read_bytes()
            theirs = (there / "commit.json").read_bytes()
            frozen = read_commit(here).get(KEY)
            if frozen is not None and lack(self.target, frozen):
                return True
        except (OSError, ValueError):
            return True
        return ours != theirs

    def _report(self, error: Exception) -> None:
        """Report the first failed copy, the second, the fourth, and so on."""
        self.failed += 1
        if self.failed & (self.failed - 1) == 0:
            counts = f"so far {self.failed} copies failed, {self.copied} did not"
            what = f"copying to checkpoint.copy_to failed ({error}); {counts}"
            _print(
                f"WARNING: {what}. Training goes on. Check the space and access of {self.target}."
            )


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
