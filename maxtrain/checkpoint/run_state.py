"""All that a run must remember beside its arrays: the record of a checkpoint (`record.json`).

Every key of that record is named in this file and in no other. The parts of a run get their piece
of a `RunState` when the run begins at a checkpoint, and give it when the next one is saved.
Changing what is stored is a change of format: raise FORMAT in checkpoint/integrity.py.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from data_pipeline.base import strict_yaml
from data_pipeline.loader.batch_checks import GuardState
from data_pipeline.plan.plan import DataRead
from maxtrain.checkpoint.rollback import Rollback, check_rollback, same_left_out
from maxtrain.config.kernels import ATTENTION

# Of frozen models beside the policy.
_ROLES = ("teacher", "reference")
# What messages call the run that they are about.
_THIS_RUN = "this run"


class LogMark(NamedTuple):
    """Length of metrics.jsonl at a checkpoint, so that missing records are noticed."""

    records: int
    crc32: str  # of their lines


class BestEvaluation(NamedTuple):
    """The best evaluation of a set."""

    step: int
    # What the set is judged by: a loss, or the reward of a set of prompts.
    loss: float
    # Its name; the record has it by this one.
    name: str


@dataclass(frozen=True)
class RecorderState:
    """Sums of the recorder since its last record (trainer/recorder.py).

    Attributes:
        log: how far the log went; None on processes that write none.
        tokens_seen: targets since the run began.
        since_record: total and weight of the objective's loss since the last training record.
        by_source: since then, a row of nats and a row of targets with a number for each source;
            not finite where a step was not. Empty: nothing is known.
    """

    log: LogMark | None = None
    tokens_seen: int = 0
    since_record: tuple[float, float] = (0.0, 0.0)
    by_source: Sequence[Sequence[float]] = ()


@dataclass(frozen=True)
class HealthState:
    """Health of the steps of a run (trainer/health.py).

    Attributes:
        skipped: steps of the whole run that changed nothing.
        guard: what the guard of batches remembers; None: nothing yet.
        ending: why the run ended before its plan did; empty: it did not.
    """

    skipped: int = 0
    guard: GuardState | None = None
    ending: str = ""


@dataclass(frozen=True)
class ValidationState:
    """Results of evaluations, by the name of the set (trainer/validation.py).

    Attributes:
        best: the best evaluation.
        stale: evaluations since then.
        read: what the set was; losses of another text can't be compared.
    """

    best: Mapping[str, BestEvaluation] = field(default_factory=dict)
    stale: Mapping[str, int] = field(default_factory=dict)
    read: Mapping[str, str] = field(default_factory=dict)


class Origin(NamedTuple):
    """The checkpoint of another run that a run was forked from."""

    # The id of that run; empty: it has none.
    run: str
    # Its folder or URL as it was named, without secrets.
    place: str
    step: int


@dataclass(frozen=True)
class RunState:
    """A run after a step.

    Attributes:
        run: id of the run; empty: of a version that gave none.
        step: finished steps.
        num_steps: steps of the plan.
        recorder, health, validation: of these parts.
        data: what was read.
        unevaluated: evaluation sets that were due and are not read yet.
        rollbacks: those of the run, in their order.
        seed: of the run.
        kept: settings that were chosen when the run began and that it keeps, by dotted path.
        config: of the run on its devices, as YAML: with the mesh filled in, and the kernel of
            attention named.
        frozen_models: digests of the models that the policy learnt from or was compared with, by
            their roles.
        tokenizer: the SHA-256 of the tokenizer that the data was made with; empty: not known.
        imported: where `maxtrain import` found these weights, which nothing was trained of yet;
            None: it did not make this run.
        forked_from: the forks that led to this run, oldest first; empty: it began by itself.
        owner: what messages call the run of this state; not stored.
        way_out: what messages advise to begin without this state; not stored.
    """

    run: str = ""
    step: int = 0
    num_steps: int = 0
    recorder: RecorderState = RecorderState()
    health: HealthState = HealthState()
    data: DataRead = field(default_factory=lambda: DataRead(0, "", {}, None))
    validation: ValidationState = field(default_factory=ValidationState)
    unevaluated: Sequence[str] = ()
    rollbacks: Sequence[Rollback] = ()
    seed: int = 0
    kept: Mapping[str, Any] = field(default_factory=dict)
    config: str = ""
    frozen_models: Mapping[str, str] = field(default_factory=dict)
    tokenizer: str = ""
    imported: str | None = None
    forked_from: Sequence[Origin] = ()
    owner: str = _THIS_RUN
    way_out: str = "set run_name to a new name to start afresh"

    @property
    def is_of_another_run(self) -> bool:
        """Return whether the state belongs to a run that this one is forked from."""
        return self.owner != _THIS_RUN

    def attention(self) -> str | None:
        """The kernel of attention that the run was trained with, by its config; None: it does not
        say."""
        try:
            kernel = strict_yaml.loads(self.config)["model"]["attention"]
        except (ValueError, KeyError, TypeError):
            return None
        if not isinstance(kernel, str) or kernel not in ATTENTION:
            return None
        return kernel

    def to_record(self) -> dict[str, Any]:
        """Return what the checkpoint of a step stores, as JSON."""
        log = None
        if self.recorder.log is not None:
            log = self.recorder.log._asdict()
        guard: dict[str, Any] = {}
        if self.health.guard is not None:
            guard = self.health.guard._asdict()
        best = {}
        for name, mark in self.validation.best.items():
            best[name] = {"step": mark.step, mark.name: mark.loss}
        record = {
            "run": self.run,
            "step": self.step,
            "num_steps": self.num_steps,
            "metrics": log,
            "tokens_seen": self.recorder.tokens_seen,
            "since_record": list(self.recorder.since_record),
            "by_source": [_words_of(row) for row in self.recorder.by_source],
            "skipped": self.health.skipped,
            "guard": guard,
            "ending": self.health.ending,
            "data": self.data.fingerprint,
            "cursor": self.data.cursor,
            "start": self.data.start,
            "best": best,
            "stale": dict(self.validation.stale),
            "read": dict(self.validation.read),
            "unevaluated": list(self.unevaluated),
            "rollbacks": list(self.rollbacks),
            "seed": self.seed,
            "kept": dict(self.kept),
            "config": self.config,
            "tokenizer": self.tokenizer,
            **self.frozen_models,
        }
        if not self.tokenizer:
            del record["tokenizer"]
        if self.forked_from:
            record |= fork_record(self.forked_from)
        return record

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "RunState":
        """Return the contents of a checkpoint's record.

        A key that is not there, because its version had none, has its default; keys of no meaning
        here are ignored.

        Raises:
            ValueError, KeyError, TypeError: a value is not of its type.
        """
        step = _value(record, "step", 0, int)
        log = _value(record, "metrics", None, dict, type(None))
        guard = _value(record, "guard", {}, dict)
        recorder = RecorderState(
            log=_log_mark(log) if log else None,
            tokens_seen=_value(record, "tokens_seen", 0, int),
            since_record=_pair(_value(record, "since_record", [0.0, 0.0], list)),
            by_source=_rows(_value(record, "by_source", [], list)),
        )
        health = HealthState(
            skipped=_value(record, "skipped", 0, int),
            guard=GuardState(**guard) if guard else None,
            ending=_value(record, "ending", "", str),
        )
        data = DataRead(
            step=step,
            fingerprint=_value(record, "data", "", str),
            cursor=_value(record, "cursor", {}, dict),
            start=_value(record, "start", None, dict, type(None)),
        )
        stale = _value(record, "stale", {}, dict)
        if not all(type(count) is int for count in stale.values()):
            raise ValueError("stale must be counts")
        validation = ValidationState(
            best=_best(record), stale=stale, read=_value(record, "read", {}, dict)
        )
        unevaluated = _value(record, "unevaluated", [], list)
        if not all(isinstance(name, str) for name in unevaluated):
            raise ValueError("unevaluated must be names")
        return cls(
            run=run_of(record),
            step=step,
            num_steps=_value(record, "num_steps", 0, int),
            recorder=recorder,
            health=health,
            data=data,
            validation=validation,
            unevaluated=unevaluated,
            rollbacks=[check_rollback(entry) for entry in _value(record, "rollbacks", [], list)],
            seed=_value(record, "seed", 0, int),
            kept=_value(record, "kept", {}, dict),
            config=config_of(record),
            frozen_models=_frozen_models(record),
            tokenizer=tokenizer_of(record),
            imported=_value(record, "imported", None, str),
            forked_from=_origins(_value(record, "forked_from", [], list)),
        )

    def went_with(self, rollbacks: Sequence[Rollback] | None) -> bool:
        """Return whether this checkpoint left out, of the steps before it, what a run with these
        rollbacks does.

        A run without a list of rollbacks (None) can't say otherwise: True.
        """
        return rollbacks is None or same_left_out(self.rollbacks, rollbacks, self.step)


def imported_record(
    run: str,
    source: str | None,
    config: str,
    tokenizer: str,
    stored_as: str = "",
    stored_dtype: str | None = None,
) -> dict[str, Any]:
    """The record of step 0 of a run that `maxtrain import` makes.

    Args:
        run: id of the run.
        source: where the weights were found.
        config: of the run, as YAML.
        tokenizer: the SHA-256 of its tokenizer.
        stored_as: for people, how the weights there were quantised; empty: they were not.
        stored_dtype: of most numbers there; None: they were quantised.
    """
    record = {
        "run": run,
        "step": 0,
        "imported": source,
        "config": config,
        "tokenizer": tokenizer,
    }
    if stored_as:
        record["stored_as"] = stored_as
    if stored_dtype is not None:
        record["stored_dtype"] = stored_dtype
    return record


def fork_record(origins: Sequence[Origin]) -> dict[str, Any]:
    """Return what a checkpoint's record says of the forks that led to its run."""
    return {"forked_from": [origin._asdict() for origin in origins]}


def run_of(record: Mapping[str, Any]) -> str:
    """The id of the run that a record is of; empty if it carries none."""
    return str(record.get("run", ""))


def config_of(record: Mapping[str, Any]) -> str:
    """The config, as YAML, that a record was saved with; empty if it does not say."""
    return _value(record, "config", "", str)


def tokenizer_of(record: Mapping[str, Any]) -> str:
    """The SHA-256 of the tokenizer that a record was saved with; empty if it does not say."""
    return _value(record, "tokenizer", "", str)


def best_steps(record: Mapping[str, Any]) -> dict[str, Any]:
    """The step of the best evaluation of each set, as a record says; its types are not checked."""
    return {name: mark["step"] for name, mark in record.get("best", {}).items()}


def wrong_type(record: Any) -> str:
    """Return what of a checkpoint's record is not of its type; empty if nothing is.

    Hashes say that it is what was written, not that a run can go on from it. Records that carry no
    run's id are their caller's affair.
    """
    if not isinstance(record, dict):
        return "record.json is no JSON object"
    if not record.get("run"):
        return ""
    try:
        RunState.from_record(record)
    except (ValueError, KeyError, TypeError) as error:
        return f"record.json: {error or type(error).__name__}"
    return ""


def _value(record: Mapping[str, Any], key: str, default: Any, *kinds: type) -> Any:
    """Return what a record has under a key, or the default; ValueError: it is of none of these
    types.
    """
    if key not in record:
        return default
    value = record[key]
    # A bool is no int here.
    if type(value) not in kinds:
        names = " or ".join(kind.__name__ for kind in kinds)
        raise ValueError(f"{key} is {type(value).__name__}, not {names}")
    return value


def _frozen_models(record: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for role in _ROLES:
        digest = _value(record, role, None, str)
        if digest is not None:
            found[role] = digest
    return found


def _best(record: Mapping[str, Any]) -> dict[str, BestEvaluation]:
    best = {}
    for name, mark in _value(record, "best", {}, dict).items():
        losses = [key for key in mark if key != "step"]
        if type(mark["step"]) is not int or len(losses) != 1:
            raise ValueError("best must have step and a loss")
        (loss,) = losses
        if not isinstance(mark[loss], int | float):
            raise ValueError("the loss of best must be a number")
        best[name] = BestEvaluation(mark["step"], mark[loss], loss)
    return best


def _origins(entries: Sequence[Any]) -> list[Origin]:
    """ValueError: an entry is not a checkpoint of a run."""
    origins = []
    for entry in entries:
        if not isinstance(entry, dict):
            raise ValueError("forked_from must be objects")
        run = _value(entry, "run", "", str)
        place = _value(entry, "place", "", str)
        origins.append(Origin(run, place, _value(entry, "step", 0, int)))
    return origins


def _log_mark(values: Mapping[str, Any]) -> LogMark:
    if type(values["records"]) is not int or not isinstance(values["crc32"], str):
        raise ValueError("metrics must have records and crc32")
    return LogMark(values["records"], values["crc32"])


def _pair(numbers: Sequence[Any]) -> tuple[float, float]:
    if len(numbers) != 2 or not all(type(number) is float for number in numbers):
        raise ValueError("since_record must be two numbers")
    total, weight = numbers
    return total, weight


def _rows(rows: Sequence[Any]) -> list[list[float]]:
    if not all(isinstance(row, list) for row in rows):
        raise ValueError("by_source must be rows")
    return [[float(number) for number in row] for row in rows]


def _words_of(row: Sequence[float]) -> list[float | str]:
    """Numbers as JSON has them: those that are not finite are words."""
    return [number if math.isfinite(number) else str(number) for number in row]
