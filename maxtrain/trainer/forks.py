"""Forks: runs that continue from a checkpoint of another run, in a folder of their own.

There are two ways to make one. `maxtrain checkpoint copy RUN NEW` copies the checkpoint and makes
the whole folder. A training with `checkpoint.fork_from=RUN@STEP` restores the checkpoint onto its
own mesh and saves it as its own first one. Both take over the records up to that step: metrics,
samples, launches, rollbacks and stored rollouts. So the history of a fork is whole, and the other
run is not needed again. Each checkpoint of a fork names the checkpoints that it descends from.

Needs no device.
"""

import dataclasses
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from data_pipeline.base import strict_yaml
from data_pipeline.base.errors import (
    ConfigError,
    DamagedError,
    DataError,
    StorageError,
    UsageError,
    UserError,
)
from data_pipeline.base.inner_names import require_inside, require_no_way_out
from data_pipeline.base.masking import masked
from data_pipeline.base.remote import is_url
from data_pipeline.shards import write_atomic
from data_pipeline.tokenizer import CARRIED, TOKENIZER_FOLDER, TokenizerRecord
from maxtrain.checkpoint.copying import change_record, copy_step
from maxtrain.checkpoint.frozen_params import copy_frozen
from maxtrain.checkpoint.integrity import FORMAT, RECORD, defect, read_commit, survey
from maxtrain.checkpoint.listing import complete, read_record
from maxtrain.checkpoint.rollback import Rollback, read_rollbacks, write_rollbacks
from maxtrain.checkpoint.run_state import Origin, RunState, fork_record
from maxtrain.config.across.directories import run_name_problems
from maxtrain.config.schema import CheckpointConfig, RunConfig
from maxtrain.config.sections.checkpoint import fork_source
from maxtrain.config.started import header, read_header
from maxtrain.observe import metrics, samples
from maxtrain.observe.jsonl_logs import RUN
from maxtrain.observe.launches import read_launches, write_launches
from maxtrain.rl.rollout import FOLDER as ROLLOUTS
from maxtrain.rl.rollout import DamagedRolloutError, from_bytes, read_file
from maxtrain.storage.publish import publishing
from maxtrain.storage.reading import readable_model, split_run
from maxtrain.trainer.run_dir import (
    CONFIG,
    RunFolder,
    decided_accumulation,
    run_id,
    write_identity,
)

# The field of launches.jsonl with the checkpoint that a launch was forked from.
FORKED_FROM = "forked_from"
# Steps that a message lists.
_MOST_LISTED = 20


@dataclasses.dataclass(frozen=True)
class Fork:
    """A checkpoint of another run, from which a new run continues.

    Attributes:
        key: the setting that names the fork, for messages, such as
            `checkpoint.fork_from=runs/a@20`.
        run: the folder of the other run on this host.
        path: the directory of the checkpoint.
        state: the other run at that checkpoint. Its last origin is that checkpoint.
        rollbacks: rollbacks of the other run.
        launches: the launches of the other run that made the steps up to the checkpoint.
        other_steps: the other complete checkpoints of that run.
    """

    key: str
    run: Path
    path: Path
    state: RunState
    rollbacks: Sequence[Rollback]
    launches: Sequence[dict[str, Any]]
    other_steps: Sequence[int] = ()

    @property
    def origin(self) -> Origin:
        """Return the origin that names the checkpoint itself."""
        return self.state.forked_from[-1]

    def damaged(self, damage: DamagedError) -> StorageError:
        """Return the error for a damaged checkpoint of the other run. It belongs to that run, so it
        is not moved to quarantine."""
        return StorageError(
            f"{self.key}: {damage.path} is damaged: {damage.what}. "
            f"{_use_another(self.origin.place, self.other_steps)}"
        )

    def require_steps_left(self, num_steps: int) -> None:
        """Raise a ConfigError if a plan of this many steps ends at the checkpoint, or before."""
        step = self.state.step
        if num_steps <= step:
            raise ConfigError(
                f"{self.key} continues after step {step:,}, so steps={num_steps} must be at least "
                f"{step + 1}. Set steps={step + 1} or more."
            )


def open_fork(key: str, place: str, run: Path, path: Path, others: Sequence[int] = ()) -> Fork:
    """Read what a new run needs to know of a complete checkpoint of another run.

    Args:
        key: the setting that names the fork, for messages.
        place: the other run, as it was named.
        run: its folder on this host.
        path: the directory of the checkpoint.
        others: its other complete checkpoints.

    Raises:
        StorageError: a file of the other run cannot be read.
    """
    state = _read_state(path)
    rollbacks = read_rollbacks(run)
    if rollbacks is None:
        rollbacks = list(state.rollbacks)
    origin = Origin(state.run, masked(place), state.step)
    launches = [launch for launch in read_launches(run) if launch["step"] < state.step]
    state = dataclasses.replace(
        state,
        rollbacks=rollbacks,
        forked_from=(*state.forked_from, origin),
        owner=masked(place),
        way_out="leave checkpoint.fork_from out to start afresh",
    )
    return Fork(key, run, path, state, rollbacks, launches, others)


def find_fork(
    fork_from: str, own_launches: Sequence[Mapping[str, Any]], starts_over: bool = False
) -> Fork:
    """Find the checkpoint of another run that a new run begins from.

    Args:
        fork_from: the value of checkpoint.fork_from.
        own_launches: earlier launches of the new run, which ended before its first checkpoint. They
            decide which step RUN without a step means.
        starts_over: whether earlier launches are to be ignored.

    Raises:
        ConfigError: there is no such run or checkpoint, or no run can continue from it.
        StorageError: the checkpoint is damaged, or cannot be read.
    """
    key = f"checkpoint.fork_from={masked(fork_from)}"
    place, step = fork_source(fork_from)
    run, folder = _find_run(key, place)
    if folder.name.isdecimal() and (folder / "commit.json").exists():
        if step is not None:
            raise ConfigError(
                f"{key} names a step twice. Set checkpoint.fork_from={masked(place)}, or RUN@STEP."
            )
        step = int(folder.name)
        folder = folder.parent
        place = str(place).rstrip("/").rpartition("/")[0]
    place = place.rstrip("/").removesuffix("/checkpoints") or place
    rollbacks = read_rollbacks(run)
    defects = survey(folder)
    if step is None and not starts_over:
        step = _step_before(own_launches, masked(place))
        if step is not None:
            key += f" (an earlier launch of this run was forked at step {step:,})"
    whole = _steps_that_fit(folder, defects, rollbacks, step)
    if step is None:
        step = max(whole, default=None)
    if step is None:
        lines = "".join(f"\n    {folder / f'{bad:08d}'}: {why}" for bad, why in defects.items())
        raise ConfigError(
            f"{key}: {masked(place)} has no complete checkpoint.{lines} "
            "Wait for its first checkpoint, or name another run."
        )
    if step not in whole:
        _refuse_step(key, masked(place), folder, step, defects, whole)
    others = [number for number in whole if number != step]
    path = whole[step]
    commit = read_commit(path)
    if commit["format"] > FORMAT:
        raise StorageError(
            f"{key}: {path} has format {commit['format']}; this version reads up to {FORMAT}. "
            "Upgrade maxtrain."
        )
    fork = open_fork(key, place, run, path, others)
    if fork.state.imported is not None:
        raise ConfigError(
            f"{key}: {masked(place)} holds imported weights, without the state of an optimizer or "
            f"of data. Set checkpoint.init_from={masked(place)} instead."
        )
    return fork


def _find_run(key: str, place: str) -> tuple[Path, Path]:
    """Return the folder of a run on this host, and its folder of checkpoints or one of these."""
    try:
        named = readable_model(place).absolute()
    except UsageError as error:
        raise ConfigError(f"{key}: {error}") from error
    if not named.is_dir():
        hint = ""
        before, mark, after = place.rpartition("@")
        if mark and not is_url(place) and Path(before).expanduser().is_dir():
            hint = f" A step is a whole number, and {after!r:.40} is none."
        raise ConfigError(
            f"{key}: {masked(place)} is not a directory.{hint} "
            "Set checkpoint.fork_from=RUN, or RUN@STEP, with the folder or URL of a run."
        )
    if (named / "checkpoints").is_dir():
        return named, named / "checkpoints"
    if named.name.isdecimal() and (named / "commit.json").exists():
        return _run_above(named.parent), named
    if (named / "config.json").exists():
        raise ConfigError(
            f"{key}: {masked(place)} is a Hugging Face directory, without the state of an "
            f"optimizer or of data. Set checkpoint.init_from={masked(place)} instead."
        )
    return _run_above(named), named


def _run_above(folder: Path) -> Path:
    """Return the run that a folder of checkpoints belongs to."""
    if folder.name == "checkpoints":
        return folder.parent
    return folder


def run_of_step(path: Path) -> Path:
    """Return the folder of the run that a checkpoint directory belongs to."""
    return _run_above(path.parent)


def _read_state(path: Path) -> RunState:
    """Read the run's state at a complete checkpoint. Raise a StorageError if its record cannot be
    read."""
    try:
        return RunState.from_record(read_record(path))
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, UserError):
            raise
        raise StorageError(
            f"{path / RECORD} is not the record of a run ({error or type(error).__name__}). "
            "Name another checkpoint."
        ) from error


def _steps_that_fit(
    folder: Path,
    defects: Mapping[int, str],
    rollbacks: Sequence[Rollback] | None,
    step: int | None = None,
) -> dict[int, Path]:
    """Return the complete checkpoints that no rollback has undone, by step, ascending.

    A checkpoint that the run removes meanwhile is left out, and so is one with an unreadable
    record, unless it is the one to be used.

    Args:
        folder: the folder of the checkpoints.
        defects: the result of `survey(folder)`.
        rollbacks: rollbacks of the run; None: it has no list.
        step: the step to be used; None: the newest that fits.

    Raises:
        StorageError: the record of the checkpoint to be used cannot be read.
    """
    found = {}
    for number in sorted(defects, reverse=True):
        path = folder / f"{number:08d}"
        if defects[number]:
            continue
        try:
            fits = _read_state(path).went_with(rollbacks)
        except StorageError:
            is_to_be_used = step == number or (step is None and not found)
            if is_to_be_used and _is_there(path):
                raise
            continue
        if fits:
            found[number] = path
    return dict(sorted(found.items()))


def _is_there(path: Path) -> bool:
    """Return whether a checkpoint still exists. A removal deletes its commit record first."""
    return (path / "commit.json").exists()


def newest_that_fits(path: Path) -> Path:
    """Return the newest complete checkpoint of a run that no rollback has undone.

    Args:
        path: the newest complete checkpoint.

    Returns:
        the checkpoint's directory; `path` itself if there is none.

    Raises:
        StorageError: the rollbacks or a checkpoint cannot be read.
    """
    found = _steps_that_fit(path.parent, survey(path.parent), read_rollbacks(run_of_step(path)))
    if not found:
        return path
    return found[max(found)]


def _step_before(launches: Sequence[Mapping[str, Any]], place: str) -> int | None:
    """Return the step at which the last launch of this run was forked from the run at `place`;
    None: it was not."""
    origin = _origin_of_launch(launches[-1]) if launches else None
    if origin is None or origin.place != place:
        return None
    return origin.step


def _refuse_step(
    key: str,
    place: str,
    folder: Path,
    step: int,
    defects: Mapping[int, str],
    whole: Mapping[int, Path],
) -> None:
    """Raise the error for a step that no run can be forked at."""
    use = _use_another(place, list(whole))
    why = defects.get(step)
    if why:
        raise StorageError(f"{key}: {folder / f'{step:08d}'} is damaged: {why}. {use}")
    if step in defects and _is_there(folder / f"{step:08d}"):
        raise ConfigError(f"{key}: a rollback of {place} has taken step {step:,} back. {use}")
    aside = sorted(folder.glob(f"{step:08d}.damaged-*"))
    if aside:
        raise ConfigError(f"{key}: step {step:,} was damaged and is put aside as {aside[0]}. {use}")
    raise ConfigError(
        f"{key}: {place} has no checkpoint of step {step:,}. It was not saved, or it was removed "
        f"(checkpoint.keep). {use}"
    )


def _use_another(place: str, steps: Sequence[int]) -> str:
    """Name the complete checkpoints of a run, and how to fork at one."""
    if not steps:
        return f"{place} has no other complete checkpoint. Name another run."
    known = ", ".join(map(str, steps[-_MOST_LISTED:]))
    if len(steps) > _MOST_LISTED:
        known = f"..., {known}"
    return f"Complete checkpoints: {known}. Set checkpoint.fork_from={place}@{steps[-1]}."


def require_same_fork(config: RunConfig, folder: Path, saved: RunState) -> None:
    """Raise a ConfigError if a run that continues was not forked from where checkpoint.fork_from
    says: the key would otherwise be ignored.

    Args:
        config: of this launch.
        folder: of the run.
        saved: the run at its own newest checkpoint.
    """
    fork_from = config.checkpoint.fork_from
    if fork_from is None:
        return
    place, step = fork_source(fork_from)
    if any(_is_from(origin, place, step) for origin in saved.forked_from):
        return
    was = "has begun already, and not as a fork"
    if saved.forked_from:
        last = saved.forked_from[-1]
        was = f"has begun already, as a fork of {last.place} at step {last.step:,}"
    raise ConfigError(
        f"checkpoint.fork_from={masked(fork_from)}: {folder} {was}. Its newest checkpoint is that "
        f"of step {saved.step:,}. Set run_name to a new name to fork, or leave "
        "checkpoint.fork_from out to continue this run."
    )


def require_no_unsaved_fork(folder: Path, launches: Sequence[Mapping[str, Any]]) -> None:
    """Raise a ConfigError if a run without a checkpoint has begun as a fork: without
    checkpoint.fork_from it would begin at random, with the records of the other run.

    Args:
        folder: of the run.
        launches: its earlier launches.
    """
    origin = _origin_of_launch(launches[-1]) if launches else None
    if origin is None:
        return
    fork_from = f"{origin.place}@{origin.step}"
    raise ConfigError(
        f"{folder} has begun as a fork of {origin.place} at step {origin.step:,}, and ended before "
        f"its first checkpoint. Set checkpoint.fork_from={fork_from} to go on, or run_name to a "
        "new name."
    )


def _origin_of_launch(launch: Mapping[str, Any]) -> Origin | None:
    """Return the checkpoint that a launch was forked from; None: it was not forked."""
    origin = launch.get(FORKED_FROM)
    if not isinstance(origin, dict):
        return None
    run, place, step = (origin.get(name) for name in Origin._fields)
    if not isinstance(run, str) or not isinstance(place, str) or type(step) is not int:
        return None
    return Origin(run, place, step)


def _is_from(origin: Origin, place: str, step: int | None) -> bool:
    """Return whether the run and step of checkpoint.fork_from name an origin."""
    named, named_step, _ = split_run(masked(place))
    if step is None:
        step = named_step
    if step not in (None, origin.step):
        return False
    if named == origin.place or is_url(place):
        return named == origin.place
    # The other run may be named differently, have been moved, or be gone.
    there = run_id(Path(named).expanduser())
    return there in ("", origin.run)


def take_records(fork: Fork, target: Path, run: str) -> list[str]:
    """Write the records of the other run, up to the checkpoint, into the folder of a new run.

    Args:
        fork: where the new run continues from.
        target: the folder of the new run. What it has on record of itself counts only for launches
            that were forked at this checkpoint.
        run: the id of the new run.

    Returns:
        A text about each record that cannot be read and is left out.
    """
    step = fork.state.step
    problems = metrics.copy_records(fork.run, target, step, run)
    problems += metrics.copy_records(fork.run, target, step, run, samples.FILE_NAME)
    launches = [{**launch, RUN: run} for launch in fork.launches]
    origin = fork.origin._asdict()
    own = [launch for launch in read_launches(target) if launch.get(FORKED_FROM) == origin]
    if launches or own:
        write_launches(target, [*launches, *(launch for launch in own if launch not in launches)])
    if fork.rollbacks or read_rollbacks(target):
        write_rollbacks(target, fork.rollbacks, run)
    _copy_rollouts(fork.run / ROLLOUTS, target / ROLLOUTS, step)
    return problems


def _copy_rollouts(source: Path, target: Path, step: int) -> None:
    """Copy the stored rollouts that steps after this one may need: rollouts whose first step has
    been made, and completions that were sampled before this step for later ones."""
    for path in sorted(source.glob("*.npz")):
        number, _, kind = path.name.partition(".")
        if not number.isdecimal():
            continue
        try:
            content = read_file(path)
            about = from_bytes(content).about
            is_needed = int(number) <= step
            if kind != "npz":
                is_needed = about["sampled_after"] < step
        except (DamagedRolloutError, KeyError, TypeError):
            # The run would make it again from the checkpoint, as the other run would.
            continue
        if is_needed:
            target.mkdir(parents=True, exist_ok=True)
            write_atomic(target / path.name, content)


def copy_run(key: str, place: str, path: Path, target: Path) -> list[str]:
    """Make a run that continues from a checkpoint of another run, with everything that its folder
    needs. It gets its name when it is complete and checked.

    Args:
        key: the option that names the source, for messages.
        place: the other run, as it was named.
        path: the directory of the checkpoint, which is complete.
        target: the folder of the new run, absolute.

    Returns:
        What the new run lacks, a text each.

    Raises:
        DamagedError: the checkpoint is not what was saved.
        StorageError: a file cannot be read or written, or the files are of several runs.
        UsageError: there is something at `target`, no run can have its name, or a rollback has
            taken the checkpoint back.
    """
    problems = list(run_name_problems(target.name))
    if problems:
        raise UsageError(f"TO={target}: {problems[0]}")
    run = run_of_step(path)
    # Refuses files of several runs.
    RunFolder(run)
    if read_commit(path)["format"] > FORMAT:
        raise StorageError(f"{path} was written by a newer version. Upgrade maxtrain.")
    fork = open_fork(key, place, run, path)
    # The state of the fork already has the rollbacks of the run; the checkpoint has its own.
    if not _read_state(path).went_with(fork.rollbacks):
        raise UsageError(
            f"{key}: a rollback of {masked(place)} has taken step {fork.state.step:,} back. "
            "Use an earlier step with --step."
        )
    config, folder, notes = _config_for(fork, target)
    with publishing(target, "copy", "TO") as staged:
        identity = secrets.token_hex(8)
        checkpoints = staged / "checkpoints"
        try:
            copy_frozen(path, checkpoints, read_back=True)
            copied = copy_step(path, checkpoints, read_back=True)
        except FileNotFoundError as error:
            if path.exists():
                raise
            raise StorageError(
                f"{path} was removed while it was copied: its run is training, and keeps its "
                "newest checkpoints only. Copy again, or set checkpoint.keep_every."
            ) from error
        change_record(copied, {RUN: identity} | fork_record(fork.state.forked_from))
        why = defect(copied)
        if why:
            raise StorageError(f"{copied}: the copy is not what was written: {why}. Copy again.")
        notes += take_records(fork, staged, identity)
        notes += _copy_tokenizer(run / TOKENIZER_FOLDER, staged / TOKENIZER_FOLDER)
        write_identity(staged, identity, fork.state.step, decided_accumulation(run))
        text = header(identity, folder) + config
        write_atomic(staged / CONFIG, text.encode(), private=True)
    return notes


def _config_for(fork: Fork, target: Path) -> tuple[str, str, list[str]]:
    """Build the config of a copied run at its new place.

    Returns:
        the config as YAML, the folder that its relative paths start from, and notes for the user.

    Raises:
        StorageError: there is no config, or it cannot be read.

    StorageError: there is none, or it cannot be read.
    """
    file = fork.run / CONFIG
    notes = []
    if file.exists():
        text = file.read_text(encoding="utf-8", errors="replace")
        _, folder = read_header(file)
    else:
        text = fork.state.config
        folder = ""
        if fork.launches:
            folder = str(fork.launches[-1].get("folder", ""))
        notes.append(f"{fork.run} has no {CONFIG}: the config is that of the checkpoint.")
    try:
        tree = strict_yaml.loads(text)
        if not isinstance(tree, dict):
            raise ValueError("it is not a mapping of keys")
    except ValueError as error:
        raise StorageError(
            f"{fork.run}: the config of the run cannot be read ({error}). Restore {file}."
        ) from error
    was_at_url = is_url(tree.get("output_dir"))
    tree["run_name"] = target.name
    tree["output_dir"] = _as_seen_from_here(target.parent)
    if was_at_url:
        # Only runs behind a URL have these keys.
        tree.pop("local_dir", None)
        checkpoint = tree.get("checkpoint")
        if isinstance(checkpoint, dict):
            for name in ("local", "local_keep", "upload_every"):
                checkpoint.pop(name, None)
    # Letters beyond ASCII are escaped, as in every config of a run.
    return yaml.safe_dump(tree, sort_keys=False, width=1000), folder, notes


def _as_seen_from_here(folder: Path) -> str:
    """Return a folder relative to the working directory if it lies below, as people type it."""
    if folder.is_relative_to(Path.cwd()):
        return str(folder.relative_to(Path.cwd()))
    return str(folder)


def _copy_tokenizer(source: Path, target: Path) -> list[str]:
    """Copy the tokenizer that a run carries, and check the copy. Return a note if the run has no
    complete tokenizer."""
    try:
        carried = TokenizerRecord.load(source)
        for name in (*carried.files, CARRIED):
            require_inside(name, str(source), "Restore the folder")
            content = require_no_way_out(source, name).read_bytes()
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomic(target / name, content)
        TokenizerRecord.load(target)
    except DataError as error:
        shutil.rmtree(target, ignore_errors=True)
        return [f"The tokenizer is not copied ({error}) The next launch takes it from the data."]
    return []


def starting_weights(run: Path, config: RunConfig) -> CheckpointConfig:
    """Return the section `checkpoint` with the weights that a run began with; for a fork, those of
    the first run."""
    if config.checkpoint.fork_from is None:
        return config.checkpoint
    for launch in read_launches(run):
        try:
            section = strict_yaml.loads(launch["config"])["checkpoint"]
            place = section.get("init_from")
            partial = tuple(section.get("init_partial") or ())
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
        if section.get("fork_from") is None:
            return dataclasses.replace(config.checkpoint, init_from=place, init_partial=partial)
    return config.checkpoint


def origins_of(run: Path) -> Sequence[Origin]:
    """Return the forks that led to a run, oldest first, from its newest checkpoint. Raise a
    StorageError if it cannot be read.

    StorageError: the checkpoint cannot be read.
    """
    steps = complete(run / "checkpoints")
    if not steps:
        return ()
    return _read_state(steps[max(steps)]).forked_from
