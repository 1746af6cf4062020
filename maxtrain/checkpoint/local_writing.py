"""Writing a step on the disks of the hosts alone: each process keeps the files that it wrote.

All processes of a job call these methods, in the same order.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path

import jax

from data_pipeline.base.errors import StorageError
from maxtrain import failpoints
from maxtrain.checkpoint.copying import remove_step
from maxtrain.checkpoint.integrity import LOCAL_FILE, encode_commit, survey, sync
from maxtrain.checkpoint.writing import StepFiles, StepSave, StepWriter, commit_record
from maxtrain.checkpoint.zarr_reader import is_part_of_array
from maxtrain.parallel.agreement import broadcast_text, forget, raising_together, report


class LocalWriter(StepWriter):
    """Writer of steps below a directory of each process.

    A process gives its part of a step the final name when all processes have written their parts,
    and process 0 has sent the list of files: the commit record is the same everywhere.
    """

    def __init__(self, directory: Path, before_commit: Callable[[], object] | None = None):
        super().__init__(directory, None, before_commit)
        self._is_shared = False
        # Saves since the last upload, with the one under way; a launch goes on counting from there.
        self.since_upload = 0
        # Name of the message that process 0 has sent to the others, and still keeps.
        self._told = ""

    def prepare(self, step: int) -> bool:
        """Makes room in each process; always True, since a step that is there is of an earlier past
        of the run.

        StorageError, in all processes: one can't make room.
        """
        with raising_together(StorageError), self.saving(step):
            self._make_room(step)
        # All have heard it by now.
        if self._told and jax.process_index() == 0:
            forget(self._told)
        self._told = ""
        return True

    def finish(self, step: StepSave) -> None:
        """Commit a step on the disks of the hosts; see `StepWriter.finish`."""
        written = self._written(step)
        staging = self.staging(step.number)
        sync(*written.entries, staging)
        said = report(f"local/{step.save}", json.dumps(written.files))
        self._told = f"local commit/{step.save}"
        text = ""
        if jax.process_index() == 0:
            try:
                text = self._agreed(step, written, commit_record(step, written.finite, said))
            except BaseException:
                # Else the others would wait for it.
                broadcast_text(self._told, "")
                raise
        text = broadcast_text(self._told, text)
        if not text:
            raise StorageError(
                f"saving step {step.number} to {self.directory} failed in process 0. "
                "See its message there, then run the same command again."
            )
        self._make_it_count_here(step.number, json.loads(text))

    def _agreed(self, step: StepSave, written: StepFiles, commit: dict) -> str:
        """Return what all processes have beside the arrays, by its name, as JSON."""
        failpoints.hit("before_commit", step.number)
        # What belongs to the steps before is at the URL, when this one counts.
        if self._before_commit:
            self._before_commit()
        texts = {}
        # Each process has written these, too, and some have the time of that.
        for name in written.files:
            if not is_part_of_array(name) and not name.endswith("/.zarray"):
                texts[name] = (self.staging(step.number) / name).read_text(encoding="utf-8")
        texts[LOCAL_FILE] = json.dumps({"since_upload": self.since_upload})
        texts["commit.json"] = encode_commit(commit).decode()
        return json.dumps(texts)

    def _make_it_count_here(self, step: int, texts: dict[str, str]) -> None:
        """Gives this process's part of a step its name by one rename."""
        staging = self.staging(step)
        write_texts(staging, texts)
        # Nothing goes on from them: the run has been here again.
        for later in survey(self.directory):
            if later >= step:
                remove_step(self.path(later))
        os.rename(staging, self.path(step))
        sync(self.directory)
        failpoints.hit("after_commit", step, self.path(step))


def write_texts(folder: Path, texts: dict[str, str]) -> None:
    """Writes files that are text, and brings them to the disk."""
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    sync(*(folder / name for name in texts), folder)
