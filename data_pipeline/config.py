"""The `data` and `eval` sections of a run's config: frozen dataclasses with a type, a default and a
line of help per key."""

import dataclasses
import re
from decimal import Decimal
from typing import Literal, NewType

from data_pipeline.base.config_key import AnyValueExcept, UsedBy, key

# See shards.TokenShards.open.
Verify = Literal["off", "size", "lazy", "full"]
CACHE = "~/.cache/maxtrain/shards"
CACHE_BYTES = 1 << 36
MAX_SEED = 2**32 - 1
# Rows of a batch and tokens of a row: far above what anybody trains with.
MAX_ROWS = 1 << 22
MAX_TOKENS = 1 << 24

# A number of epochs as text, such as "0.5 epochs".
Epochs = NewType("Epochs", str)
# Between things that are due again and again: steps, or epochs of all sources together.
Interval = int | Epochs
_EPOCHS = re.compile(r"\s*(\d{1,9}(\.\d{1,9})?|\.\d{1,9})\s*(epochs?|ep)\s*")


def epochs_of(text: str) -> float:
    """The number in a text such as "0.5 epochs"; ValueError: it is none, or not above 0."""
    found = _EPOCHS.fullmatch(text)
    if not found or not float(found[1]):
        raise ValueError("a number above 0, and `epochs`")
    return float(found[1])


def as_epochs(text: str) -> str:
    """The one way to write a number of epochs; ValueError as `epochs_of`."""
    number = epochs_of(text)
    digits = f"{Decimal(str(number)):f}".removesuffix(".0")
    if number == 1:
        return f"{digits} epoch"
    return f"{digits} epochs"


_CORRUPTED = UsedBy(
    {"data.corruption.rate": AnyValueExcept(0.0)},
    "{key}={value} is not used with {cause}. Set data.corruption.rate=0.15, or leave it out.",
)

_BALANCED = UsedBy({"data.packing": ("balanced",)})


@dataclasses.dataclass(frozen=True)
class SourceConfig:
    """One training source: a directory of token shards."""

    path: str = key("", "directory or URL with manifest.json, made by `prepare`", path="any")
    weight: float = key(
        1.0, "share of the tokens in the mixture, relative to the other sources", low=0
    )
    epochs: float | None = key(
        1.0,
        "passes over the source, also fractional such as 0.5; null: no limit",
        above=0,
        high=1e9,
    )


@dataclasses.dataclass(frozen=True)
class StageConfig:
    """One stage: its mixture and the shape of its batches. Every source continues where the stage
    before ended."""

    until: float | None = key(
        None,
        "end of the stage, counted from the start of the run; null: the end of the run",
        above=0,
    )
    unit: Literal["steps", "tokens", "fraction"] = key(
        "steps", "unit of `until`; fraction: share of `steps`"
    )
    weights: dict[str, float] = key(
        {}, "share of tokens from each source in this stage; empty: the sources' own weights"
    )
    batch_size: int | None = key(
        None, "rows in a step of this stage; null: data.batch_size", low=1, high=MAX_ROWS
    )
    seq_length: int | None = key(
        None,
        "tokens in a row of this stage; a change starts a new pass over the sources; null: "
        "data.seq_length",
        low=1,
        high=MAX_TOKENS,
    )


@dataclasses.dataclass(frozen=True)
class CorruptionConfig:
    """Input tokens of training rows that are replaced, while the targets stay; see
    loader/corruption.py."""

    rate: float = key(
        0.0, "expected share of input tokens that are replaced; 0: none", low=0, high=0.99
    )
    span: float = key(
        1.0,
        "mean length of a replaced span in tokens; 1: single tokens",
        low=1,
        high=1000,
        used_by=_CORRUPTED,
    )
    token_id: int | None = key(
        None, "replacement token id; null: random ids", low=0, used_by=_CORRUPTED
    )


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Training data: sources, their order, and checks of the batches."""

    sources: dict[str, SourceConfig] = key(
        {}, "training sources by name: data.sources.NAME.path=DIR"
    )
    stages: tuple[StageConfig, ...] = key(
        (), "mixture stages in order; empty: one stage with the sources' own weights"
    )
    on_exhausted: Literal["stop", "renormalize", "repeat", "error"] = key(
        "stop",
        "when a source has no more rows: stop: end the run; renormalize: give its weight to "
        "the others; repeat: read it again; error: refuse to start",
    )
    seq_length: int = key(1024, "tokens in a row (sequence length)", low=1, high=MAX_TOKENS)
    batch_size: int = key(
        8,
        "rows in one optimizer step, over all hosts; with packing=balanced, documents in one step",
        low=1,
        high=MAX_ROWS,
    )
    seed: int | None = key(
        None,
        "seed of the row order and of corruption; null: the root's seed",
        low=0,
        high=MAX_SEED,
    )
    packing: Literal["stream", "bins", "pad", "balanced"] = key(
        "stream",
        "sequence packing: stream: windows of one token stream; bins: documents packed by "
        "best fit; pad: one document per row; balanced: a step's documents in rows of equal "
        "cost",
    )
    balance_rows: int = key(
        1,
        "the number of rows in a step is a multiple of this, which accumulation and the mesh "
        "must divide",
        low=1,
        high=MAX_ROWS,
        used_by=_BALANCED,
    )
    balance_quadratic: float | None = key(
        None,
        "b in n + b n^2, the cost of a document of n tokens; null: computed from the FLOPs of"
        " the layers",
        low=0,
        high=1,
        used_by=_BALANCED,
    )
    on_long: Literal["raise", "skip", "truncate"] = key(
        "raise",
        "action for a document that is longer than a row",
        used_by=UsedBy(
            {"data.packing": ("bins", "pad", "balanced")},
            "{key}={value} is not used with {cause}. Set data.packing=bins, or leave it out.",
        ),
    )
    accept_changes: bool = key(
        False,
        "resume a checkpoint although the data have changed: the row order of the old data "
        "ends there, and that of this config starts",
    )
    attend_across_documents: bool = key(
        False, "let attention cross document boundaries inside a row"
    )
    restart_positions: bool = key(True, "restart positions at 0 in every document of a row")
    corruption: CorruptionConfig = key(
        CorruptionConfig(), "replaces some input tokens, for regularisation"
    )
    zero_weight: Literal["raise", "stop", "warn"] = key(
        "raise",
        "action for a batch with no targets, with too few of them (min_fill), or with too "
        "many empty rows (max_empty_rows)",
    )
    repeated: Literal["raise", "skip", "rollback", "stop", "warn"] = key(
        "raise",
        "action for a batch with the same tokens as an earlier one; skip, rollback: go back "
        "to a checkpoint and leave out one step or several",
    )
    min_fill: float = key(
        0.0,
        "smallest share of positions that are training targets, averaged over fill_patience steps",
        low=0,
        high=1,
    )
    fill_patience: int = key(
        8,
        "steps over which min_fill is averaged",
        low=1,
        high=1000,
        used_by=UsedBy(
            {"data.min_fill": AnyValueExcept(0.0)},
            "{key}={value} is not used with {cause}. Set data.min_fill=0.5, or leave it out.",
        ),
    )
    max_empty_rows: float = key(
        1.0, "largest share of a batch's rows that may have no target", low=0, high=1
    )
    verify: Verify = key(
        "lazy",
        "shard checks: off: none; size: file sizes at launch; lazy: the CRC-32 of a block "
        "when it is first read; full: everything at launch",
    )
    cache: str = key(
        CACHE,
        "local cache folder for shards behind URLs; all processes of a host share it",
        path="local",
    )
    cache_bytes: int = key(
        CACHE_BYTES,
        "size limit of the cache in bytes; the least recently used shards are removed first",
        low=1 << 24,
        high=1 << 60,
    )
    workers: int = key(0, "Grain worker processes; 0: threads of this process", low=0, high=1024)
    prefetch: int = key(
        4,
        "batches that are prepared on the host and copied to the device ahead of use",
        low=1,
        high=1024,
    )


@dataclasses.dataclass(frozen=True)
class EvalSetConfig:
    """One evaluation set: a directory of token shards."""

    path: str = key("", "directory or URL with manifest.json, made by `prepare`", path="any")
    interval: Interval | None = key(
        None,
        "steps or epochs between evaluations of this set; 0: only at the end; null: eval_interval",
        low=0,
    )
    steps: int | None = key(
        None,
        "batches in each evaluation of this set; -1: the whole set, exactly once; null: eval_steps",
        low=-1,
    )
    batch_size: int | None = key(
        None, "rows in an evaluation batch of this set; null: eval.batch_size", low=1, high=MAX_ROWS
    )


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Evaluation sets. eval_interval and eval_steps at the root say when they are read, unless a
    set has its own."""

    sets: dict[str, EvalSetConfig] = key({}, "evaluation sets by name: eval.sets.NAME.path=DIR")
    batch_size: int | None = key(
        None, "rows in one evaluation batch; null: data.batch_size", low=1, high=MAX_ROWS
    )
    seq_length: int | None = key(
        None,
        "tokens in a row of the evaluation sets; null: data.seq_length",
        low=1,
        high=MAX_TOKENS,
    )
    stop_patience: int | None = key(
        None,
        "early stopping: end the run after this many evaluations of stop_set in a row without"
        " a lower loss; null: never",
        low=1,
        used_by=UsedBy(
            {"eval.sets": AnyValueExcept({})},
            "{key}={value} needs an evaluation set, but eval.sets is empty. "
            "Add eval.sets.NAME.path=DIR, or leave it out.",
        ),
    )
    stop_set: str | None = key(
        None,
        "evaluation set of stop_patience; null: the first one in eval.sets",
        used_by=UsedBy(
            {"eval.stop_patience": AnyValueExcept(None)},
            "{key}={value} is not used without eval.stop_patience. "
            "Set eval.stop_patience=3, or leave it out.",
        ),
    )
