"""Where rollouts are kept: files in the folder of a run.

Process 0 alone reads and writes them, like all that is told of a run, and hands what it has read to
the others. So all processes have the same rollout, or know together that there is none.
"""

from pathlib import Path

import jax
import numpy as np

from data_pipeline.base.errors import TryAgainError, UserError
from maxtrain.parallel.agreement import from_first, gather, raise_together
from maxtrain.rl.rollout import FOLDER, DamagedRolloutError, Rollout, from_bytes, read_file

# Of words about a file, and bytes in which they are told to others.
_MOST_WORDS = 400
_MOST_BYTES = 4096


class RolloutStore:
    """The rollouts of a run. All processes call these functions in the same order."""

    def __init__(self, run: Path):
        self._folder = run / FOLDER

    def path(self, first: int) -> Path:
        """Of the rollout that step `first`, counted from 0, is the first to read."""
        return self._folder / f"{first + 1:08d}.npz"

    def path_as_sampled(self, first: int) -> Path:
        """Likewise, of what the sampler has made for it."""
        return self._folder / f"{first + 1:08d}.sampled.npz"

    def load(self, path: Path) -> Rollout:
        """What process 0 reads.

        Raises:
            DamagedRolloutError: in all processes: it is missing there, or not what was written.
            TryAgainError: it was damaged on its way to another process.
        """
        content = b""
        problem = ""
        if jax.process_index() == 0:
            try:
                content = read_file(path)
                from_bytes(content)
            except DamagedRolloutError as damage:
                problem = str(damage)[:_MOST_WORDS]
        said = gather({"problem": problem, "size": len(content)}, _MOST_BYTES)[0]
        if said["problem"]:
            raise DamagedRolloutError(said["problem"])
        mine = np.zeros(said["size"], np.uint8)
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
        """Writes a file, or raises in all processes. StorageError: there is no room."""
        error = None
        if jax.process_index() == 0:
            try:
                rollout.save(path)
            except (UserError, OSError) as problem:
                error = problem
        raise_together(error)

    def remove_before(self, first: int) -> None:
        """Removes what steps before this one were the first to read."""
        if jax.process_index() != 0:
            return
        for path in self._folder.glob("*.npz"):
            number, _, _ = path.name.partition(".")
            if number.isdecimal() and int(number) - 1 < first:
                path.unlink(missing_ok=True)
