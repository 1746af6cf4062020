"""Storage of rollouts as files in the folder of a run.

Only process 0 reads and writes them, and sends what it has read to the other processes. So all
processes have the same rollout, or all know that there is none.
"""

from pathlib import Path

import jax
import numpy as np

from data_pipeline.base.errors import TryAgainError, UserError
from maxtrain.parallel.agreement import from_first, gather, raise_together
from maxtrain.rl.rollout import FOLDER, DamagedRolloutError, Rollout, from_bytes, read_file

# Longest text about a file in letters, and the bytes of the message that carries it.
_MOST_WORDS = 400
_MOST_BYTES = 4096


class RolloutStore:
    """The stored rollouts of a run. All processes call its functions in the same order."""

    def __init__(self, run: Path):
        self._folder = run / FOLDER

    def path(self, first: int) -> Path:
        """Return the path of the rollout whose first step is `first`, counted from 0."""
        return self._folder / f"{first + 1:08d}.npz"

    def path_as_sampled(self, first: int) -> Path:
        """Return the path of the samples for the rollout whose first step is `first`, counted from
        0."""
        return self._folder / f"{first + 1:08d}.sampled.npz"

    def load(self, path: Path) -> Rollout:
        """Load the rollout that process 0 reads.

        Raises:
            DamagedRolloutError: the file is missing or damaged; raised in all processes.
            TryAgainError: the content was damaged on its way to another process.
        """
        content = b""
        problem = ""
        if jax.process_index() == 0:
            try:
                content = read_file(path)
                from_bytes(content)
            except DamagedRolloutError as damage:
                problem = str(damage)[:_MOST_WORDS]
        report = gather({"problem": problem, "size": len(content)}, _MOST_BYTES)[0]
        if report["problem"]:
            raise DamagedRolloutError(report["problem"])
        mine = np.zeros(report["size"], np.uint8)
        if jax.process_index() == 0:
            mine = np.frombuffer(content, np.uint8)
        found = from_first(mine).tobytes()
        rollout = None
        error = None
        try:
            rollout = from_bytes(found)
        except DamagedRolloutError as damage:
            rule = f"{path}: {damage}, as it came from process 0"
            error = TryAgainError(f"{rule}. Run the same command again.")
        raise_together(error)
        assert rollout is not None
        return rollout

    def save(self, path: Path, rollout: Rollout) -> None:
        """Write a file, or raise in all processes. Raises a StorageError if there is no room."""
        error = None
        if jax.process_index() == 0:
            try:
                rollout.save(path)
            except (UserError, OSError) as problem:
                error = problem
        raise_together(error)

    def remove_before(self, first: int) -> None:
        """Remove the rollouts whose first step is before this one."""
        if jax.process_index() != 0:
            return
        for path in self._folder.glob("*.npz"):
            number, _, _ = path.name.partition(".")
            if number.isdecimal() and int(number) - 1 < first:
                path.unlink(missing_ok=True)
