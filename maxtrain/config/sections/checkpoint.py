"""The section `checkpoint`."""

import dataclasses
import re
from collections.abc import Iterator

from data_pipeline.base.config_key import AnyValueExcept, UsedBy, key

_STEP = re.compile(r"[0-9]{1,18}")
# A fork takes everything from its checkpoint, so nothing reads what a run begins with.
_NO_FORK = UsedBy(
    {"checkpoint.fork_from": (None,)},
    "{key}={value} is not used with {cause}, which takes the weights of that run. "
    "Leave one of the two out.",
    cause="checkpoint.fork_from={config.checkpoint.fork_from}",
)


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints to save and to keep, besides checkpoint_interval at the root. The last step is
    always saved.
    """

    minutes: float | None = key(
        None,
        "also save when this many minutes have passed since the last save; null: never",
        above=0,
        high=1e6,
    )
    keep: int = key(3, "retention: number of newest checkpoints to keep", low=1)
    keep_every: int | None = key(
        None, "also keep every checkpoint whose step is a multiple of this; null: none", low=1
    )
    keep_best: bool = key(
        False, "also keep saved steps at which the loss of an evaluation set is the best so far"
    )
    asynchronous: bool = key(True, "write checkpoints in the background while training continues")
    copy_to: str | None = key(
        None,
        "directory on another disk, to which good checkpoints are copied in the background; "
        "null: none",
        path="local",
    )
    copy_keep: int = key(
        3,
        "number of newest checkpoints to keep in copy_to",
        low=1,
        used_by=UsedBy(
            {"checkpoint.copy_to": AnyValueExcept(None)},
            "{key}={value} is not used without checkpoint.copy_to. "
            "Set checkpoint.copy_to, or leave it out.",
        ),
    )
    local: str | None = key(
        None,
        "directory on each host's disk for saves that are not uploaded, for a run behind a "
        "URL; null: all saves are uploaded",
        path="local",
    )
    local_keep: int = key(
        2,
        "number of newest checkpoints to keep in checkpoint.local",
        low=2,
        used_by=UsedBy(
            {"checkpoint.local": AnyValueExcept(None)},
            "{key}={value} is not used without checkpoint.local. "
            "Set checkpoint.local, or leave it out.",
        ),
    )
    upload_every: int = key(
        10,
        "upload one of this many saves; the others stay in checkpoint.local",
        low=2,
        used_by=UsedBy(
            {"checkpoint.local": AnyValueExcept(None)},
            "{key}={value} is not used without checkpoint.local. "
            "Set checkpoint.local, or leave it out.",
        ),
    )
    grace_seconds: float = key(
        300.0,
        "longest time between SIGTERM or SIGINT and the end of the process, saved or not; 0: "
        "no limit",
        low=0,
        high=1e8,
    )
    init_from: str | None = key(
        None,
        "start from the weights of this run, checkpoint or Hugging Face directory, also a "
        "URL; null: random weights",
        path="any",
        used_by=_NO_FORK,
    )
    fork_from: str | None = key(
        None,
        "continue this run in a new one: RUN@STEP, or RUN for its newest checkpoint, also a "
        "URL; null: no fork",
        path="any",
    )
    init_adapters: str | None = key(
        None,
        "start from the PEFT adapters in this directory, on the weights of init_from; null: "
        "new adapters",
        path="local",
        used_by=(
            _NO_FORK,
            UsedBy(
                {"model.lora.rank": AnyValueExcept(None)},
                "{key}={value} needs adapters, but model.lora.rank=null. "
                "Set model.lora.rank to r in its adapter_config.json, or leave it out.",
            ),
        ),
    )
    start_over: bool = key(
        False,
        "start at step 1 although saved checkpoints are missing; other files of the run are "
        "moved to before-DATE in its folder",
    )
    init_partial: tuple[str, ...] = key(
        (),
        "regular expressions: matching parameters may be missing in init_from or have another"
        " shape, and are then initialised",
        used_by=(
            _NO_FORK,
            UsedBy(
                {"checkpoint.init_from": AnyValueExcept(None)},
                "{key}={value} is not used without checkpoint.init_from. "
                "Set checkpoint.init_from, or leave it out.",
            ),
        ),
    )


def fork_source(fork_from: str) -> tuple[str, int | None]:
    """The run that checkpoint.fork_from names, and the step; None: the newest one."""
    place, _, step = fork_from.rpartition("@")
    if _STEP.fullmatch(step) and len(step) < len(fork_from):
        return place, int(step)
    return fork_from, None


def fork_problems(checkpoint: CheckpointConfig) -> Iterator[str]:
    """Yield the problems of the text of checkpoint.fork_from."""
    if checkpoint.fork_from is None:
        return
    place, step = fork_source(checkpoint.fork_from)
    if not place or step == 0:
        yield (
            f"checkpoint.fork_from={checkpoint.fork_from} must be RUN or RUN@STEP, with a step of "
            "at least 1. Set checkpoint.fork_from=runs/NAME@1000, for example."
        )


def adapters_problems(checkpoint: CheckpointConfig) -> Iterator[str]:
    """Adapters without the weights that they are for."""
    if checkpoint.init_adapters is not None and checkpoint.init_from is None:
        yield (
            f"checkpoint.init_adapters={checkpoint.init_adapters} needs the weights that these "
            "adapters are for, but checkpoint.init_from=null. Set checkpoint.init_from to them."
        )
