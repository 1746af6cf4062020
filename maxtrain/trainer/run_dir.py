"""The folder of a run: each file carries the run's id, and a launch checks that all ids agree.

The id is created at the first launch of a run, and kept in RUN/run.json together with the newest
step that ever counted. Files that determine steps and records (checkpoints, rollbacks.json,
metrics.jsonl) must belong to this run, otherwise the launch is refused. Files that only report on
the run (config.yaml and the logs of observe/jsonl_logs.py) are moved aside if they belong to
another run.
"""

import contextlib
import json
import os
import secrets
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from data_pipeline.base import strict_json
from data_pipeline.base.errors import ConfigError, StorageError, UsageError
from data_pipeline.shards import write_atomic
from data_pipeline.tokenizer import TOKENIZER_FOLDER
from maxtrain.checkpoint import rollback
from maxtrain.checkpoint.listing import complete, read_record
from maxtrain.checkpoint.run_state import RunState, run_of
from maxtrain.config import RunConfig
from maxtrain.config.load import load_config
from maxtrain.config.started import header, read_header
from maxtrain.observe import launches, metrics
from maxtrain.observe.attempts import attempts
from maxtrain.observe.goodput import CLOCK
from maxtrain.observe.jsonl_logs import put_aside
from maxtrain.observe.lock import FILE_NAME as LOCK

FILE_NAME = "run.json"
CONFIG = "config.yaml"
_MOST_SUPERVISORS = 4096
# Most steps that a message lists.
_MOST_STEPS = 20
# A folder with one of these entries is the folder of a run, possibly of one that has just begun.
_SIGNS_OF_A_RUN = (
    *(CONFIG, FILE_NAME, metrics.FILE_NAME, CLOCK.name, "attempts.jsonl"),
    *("checkpoints", "rollouts"),
)
# Most runs that a message names.
_MOST_NAMED = 5


class RunFolder:
    """The folder of one run, as found when a launch begins.

    Args:
        path: RUN.
        second: the folder that checkpoints are copied to; None: there is none.

    Raises:
        StorageError: files that determine steps belong to several runs, or cannot be read.
    """

    def __init__(self, path: Path, second: Path | None = None):
        self.path = path
        self._steps = list(complete(path / "checkpoints").values())
        if second:
            self._steps += complete(second).values()
        # Problems that were found and do not stop the run.
        self._notes: list[str] = []
        content = self._read()
        self._made_here = False
        # The newest step that is known to have been saved; 0: none.
        self.saved = int(content.get("saved", 0))
        self.id = _one_run(path, self._owners(str(content.get("run", ""))))
        # Without run.json, a launch that did not begin at step 0 shows that a checkpoint existed.
        if not content:
            self.saved = max((launch["step"] for launch in launches.read_launches(path)), default=0)
        # Whether steps were saved and none is left. If that is intended, earlier records no longer
        # count.
        self.starts_over = self.saved > 0 and not self._steps
        # The number chosen for optimizer.accumulation=auto; None: none was chosen.
        self.accumulation: int | None = None
        if not self.starts_over:
            self.accumulation = _accumulation(content)

    def _read(self) -> dict[str, Any]:
        """Read run.json; empty if it is missing or invalid."""
        try:
            return _read_identity(self.path)
        except (OSError, ValueError, TypeError) as error:
            what = f"{self.path / FILE_NAME} can't be read ({error})"
            self._notes.append(f"{what}. It is made anew from the other files of the run.")
            return {}

    def _owners(self, own: str) -> Iterator[tuple[str, str]]:
        """Iterate over the files that determine steps, each with the id that it carries.

        The id is empty for a file that should carry one and does not.
        """
        if own:
            yield FILE_NAME, own
        of_metrics = metrics.metrics_owner(self.path)
        if of_metrics:
            yield metrics.FILE_NAME, of_metrics
        for path in self._steps:
            yield str(path), run_of(read_record(path))
        of_rollbacks = rollback.owner(self.path)
        if of_rollbacks is not None:
            yield rollback.FILE_NAME, of_rollbacks

    def require_checkpoints(self, start_over: bool) -> None:
        """Raise a StorageError if steps were saved and are gone, unless the run is to start
        over."""
        if self.starts_over and not start_over:
            rule = f"has no checkpoint, although step {self.saved:,} was saved; nothing is changed"
            raise StorageError(
                f"{self.path / 'checkpoints'} {rule}. "
                "Mount or bring back that folder to go on. "
                "To begin again at step 1, set checkpoint.start_over=true, which keeps what is "
                "left of the run in its folder, or set run_name to another name."
            )

    def begin(self, tell: Callable[[str], object], accumulation: int | None = None) -> None:
        """Make the folder this run's own. Only the process that holds its lock calls this.

        Args:
            tell: called with a line about each problem found and each file moved aside.
            accumulation: the number that this launch chose for optimizer.accumulation=auto; None:
                it chose none.
        """
        if accumulation is not None:
            self.accumulation = accumulation
        if self.starts_over:
            tell(f"The run starts over. What is left of it is kept in {self._set_aside()}.")
        for text in self._notes:
            tell(text)
        if not self.id:
            self.id = secrets.token_hex(8)
        self._made_here = not (self.path / FILE_NAME).exists()
        self._write()
        self._repair_logs(tell)

    def withdraw(self) -> None:
        """Undo `begin` if nothing has followed it: a launch that failed before its run began leaves
        no run. Only the process that holds the lock calls this."""
        with contextlib.suppress(OSError):
            names = {name for name in os.listdir(self.path) if not name.startswith(".")}
            if self._made_here and names <= {LOCK, FILE_NAME, TOKENIZER_FOLDER}:
                shutil.rmtree(self.path / TOKENIZER_FOLDER, ignore_errors=True)
                (self.path / FILE_NAME).unlink()

    def _repair_logs(self, tell: Callable[[str], object]) -> None:
        """Move logs and config.yaml aside if they belong to another run."""
        books = [CLOCK, launches.LAUNCHES]
        for number in range(_MOST_SUPERVISORS):
            book = attempts(number)
            if (self.path / book.name).exists():
                books.append(book)
        for book in books:
            try:
                for text in book.fix(self.path, self.id):
                    tell(text)
            except OSError as error:
                what = f"{self.path / book.name} cannot be repaired ({error.strerror})"
                tell(f"{what}; the run goes on.")
        file = self.path / CONFIG
        owner = config_owner(self.path)
        if owner not in ("", self.id):
            kept = put_aside(file).name
            tell(f"{file} is of another run, {owner}. It is kept as {kept}, and written anew.")

    def note_saved(self, step: int) -> None:
        """Record that a checkpoint of this step is complete."""
        self.saved = max(self.saved, step)
        # If the record cannot be written, the checkpoint counts nevertheless.
        with contextlib.suppress(OSError):
            self._write()

    def note_discarded_after(self, step: int) -> None:
        """Record that checkpoints of later steps are about to be removed."""
        if self.saved > step:
            self.saved = step
            self._write()

    def write_config(self, text: str) -> None:
        """Write RUN/config.yaml, with the run's id and the current folder in its first lines."""
        content = header(self.id, os.getcwd()) + text
        write_atomic(self.path / CONFIG, content.encode(), private=True)

    def _write(self) -> None:
        """Write run.json."""
        write_identity(self.path, self.id, self.saved, self.accumulation)

    def _set_aside(self) -> Path:
        """Move all files but the lock to a new subfolder, and return it.

        run.json moves last, because it records that the move is to be done.
        """
        target = self.path / f"before-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        target.mkdir()
        stay = {LOCK, FILE_NAME, "checkpoints"}
        for entry in sorted(self.path.iterdir()):
            if entry.name not in stay and not entry.name.startswith(("before-", ".")):
                entry.rename(target / entry.name)
        (self.path / FILE_NAME).rename(target / FILE_NAME)
        self.id = ""
        self.saved = 0
        return target


def write_identity(run: Path, run_id: str, saved: int, accumulation: int | None) -> None:
    """Write RUN/run.json.

    Args:
        run: the folder of the run.
        run_id: the id of the run.
        saved: the newest step that ever counted.
        accumulation: the number chosen for optimizer.accumulation=auto; None: none was chosen.
    """
    content: dict[str, Any] = {"run": run_id, "saved": saved}
    if accumulation is not None:
        content["accumulation"] = accumulation
    write_atomic(run / FILE_NAME, json.dumps(content).encode() + b"\n")


def _read_identity(run: Path) -> dict[str, Any]:
    """Read RUN/run.json; empty if there is none.

    Raises an OSError, ValueError or TypeError if the file is invalid.
    """
    file = run / FILE_NAME
    if not file.exists():
        return {}
    content = strict_json.read(file)
    if not isinstance(content, dict) or not isinstance(content.get("run"), str):
        raise ValueError("it has no id of a run")
    # These calls raise if the values are no numbers.
    int(content.get("saved", 0))
    _accumulation(content)
    return content


def _accumulation(content: Mapping[str, Any]) -> int | None:
    """Return the number in run.json that was chosen for optimizer.accumulation=auto. Raise a
    ValueError if it is invalid."""
    count = content.get("accumulation")
    if count is not None and (type(count) is not int or count < 1):
        raise ValueError(f"accumulation is {count!r}")
    return count


def decided_accumulation(run: Path) -> int | None:
    """Return the number chosen for optimizer.accumulation=auto of the run in this folder; None:
    none was chosen, or it cannot be read."""
    try:
        return _accumulation(_read_identity(run))
    except (OSError, ValueError, TypeError):
        return None


def require_no_stray_steps(run: Path, second: Path | None = None) -> None:
    """Raise a ConfigError if checkpoints lie in a run's folder itself: no launch looks there, so
    the run would silently begin at the start.

    Args:
        run: the folder of the run.
        second: the folder that its checkpoints are copied to; None: there is none.
    """
    folders = [run]
    if second is not None:
        folders.append(second.parent)
    for folder in folders:
        found = sorted(
            path.parent for path in folder.glob("*/commit.json") if path.parent.name.isdecimal()
        )
        if found:
            steps = ", ".join(str(int(path.name)) for path in found[:_MOST_STEPS])
            raise ConfigError(
                f"run_name={run.name}: checkpoints (step {steps}) lie in {folder} itself, where no "
                f"launch looks for them. Make a run of them with `maxtrain checkpoint copy "
                f"{folder} NEW` and set run_name to it, or move them to {folder / 'checkpoints'}."
            )


def require_trained(run: Path, saved: RunState | None) -> None:
    """Raise a ConfigError if the newest checkpoint of a run was made by `import`, with weights
    alone."""
    if saved is not None and saved.imported is not None:
        raise ConfigError(
            f"{run} holds imported weights, without the state of an optimizer or of data, so no "
            f"run can go on there. Set run_name to another name, and checkpoint.init_from={run}."
        )


def run_id(run: Path) -> str:
    """Return the id of the run in this folder, for its logs.

    Empty if the run has no id or it cannot be read.
    """
    try:
        return str(_read_identity(run).get("run", ""))
    except (OSError, ValueError, TypeError):
        return ""


def require_run(folder: Path, name: str = "", argument: str = "RUN") -> None:
    """Check that a folder is the folder of a run.

    Args:
        folder: on this machine.
        name: what to call it, such as its URL; empty: by its path.
        argument: the command-line argument that names the folder.

    Raises:
        UsageError: the folder is not one of a run. The message names runs nearby.
    """
    if any((folder / sign).exists() for sign in _SIGNS_OF_A_RUN):
        return
    raise UsageError(
        f"{argument}={name or folder}: {why_no_run(folder)}. "
        f"Name the folder of a run, such as {runs_beside(folder)}."
    )


def why_no_run(folder: Path, *missing: str) -> str:
    """Return why a folder is not the folder of a run or of a model.

    Args:
        folder: the path that was named.
        missing: the files that were looked for.
    """
    if folder.is_dir():
        if not any(folder.iterdir()):
            return "is an empty directory"
        if _runs_in(folder):
            return "is a folder of runs, not a run"
        return f"has no {' and no '.join(missing or (CONFIG,))}"
    if folder.exists():
        return "is a file"
    return "is not there"


def runs_beside(folder: Path) -> str:
    """Name some runs that the user may have meant: those in a folder, beside it, or in runs/."""
    for place in (folder, folder.parent, Path("runs")):
        found = _runs_in(place)
        if found:
            return ", ".join(map(str, found[:_MOST_NAMED]))
    return "runs/quickstart"


def _runs_in(folder: Path) -> list[Path]:
    """Return the runs directly below a folder, by name."""
    return sorted(path.parent for path in folder.glob(f"*/{CONFIG}"))


def require_own_config(run: Path) -> None:
    """Raise a StorageError if RUN/config.yaml belongs to another run than the other files of the
    folder."""
    folder = RunFolder(run)
    owner = config_owner(run)
    if folder.id and owner not in ("", folder.id):
        rule = f"is of run {owner}, and the checkpoints beside it are of run {folder.id}"
        raise StorageError(f"{run / CONFIG} {rule}. Bring back the one that belongs there.")


def launched_config(
    run: Path, launch: Mapping[str, Any] | None, overrides: Sequence[str] = ()
) -> RunConfig:
    """Load the config of a recorded launch, with the attention kernel that it used, and
    overrides."""
    if launch is None:
        return load_config([f"config={run / CONFIG}", *overrides])
    kernel = launches.attention_of(launch)
    if kernel is not None and not any(word.startswith("model.attention=") for word in overrides):
        overrides = [f"model.attention={kernel}", *overrides]
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary, CONFIG)
        text = header("", launch.get("folder", "")) + launch["config"]
        path.write_text(text, encoding="utf-8")
        return load_config([f"config={path}", *overrides])


def config_owner(run: Path) -> str:
    """Return the id of the run that RUN/config.yaml belongs to; empty if it has none or does not
    exist."""
    owner, _ = read_header(run / CONFIG)
    return owner


def _one_run(path: Path, owners: Iterator[tuple[str, str]]) -> str:
    """Return the one id that all these files carry, empty if there are none.

    Raises a StorageError if they belong to several runs.
    """
    files = defaultdict[str, list[str]](list)
    for name, run in owners:
        files[run].append(name)
    if len(files) <= 1:
        return next(iter(files), "")
    lines = []
    for run, names in files.items():
        whose = f"of run {run}" if run else "of no run"
        lines.append(f"\n  {whose}: {', '.join(names[:8])}")
    fix = "Move away what is not of this run, or set run_name to another name"
    raise StorageError(
        f"{path} holds files of several runs; nothing is changed.{''.join(lines)}\n{fix}."
    )
