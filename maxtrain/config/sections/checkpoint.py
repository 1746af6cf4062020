"""The section `checkpoint`."""

import dataclasses
from collections.abc import Iterator

from data_pipeline.config_key import AllBut, UsedBy, key


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """Which checkpoints are saved and kept, besides checkpoint_interval at the root. The last step
    is always saved."""

    minutes: float | None = key(
        None,
        "also save when so many minutes have passed since the last save; null: never",
        above=0,
        high=1e6,
    )
    keep: int = key(3, "newest checkpoints kept", low=1)
    keep_every: int | None = key(
        None, "also keep every checkpoint whose step is a multiple of this; null: none", low=1
    )
    keep_best: bool = key(
        False, "also keep the saved steps at which an evaluation set's loss is the best so far"
    )
    asynchronous: bool = key(True, "write in the background while training goes on")
    copy_to: str | None = key(
        None,
        "directory on another disk to which good checkpoints are copied meanwhile; null: none",
        path="local",
    )
    copy_keep: int = key(
        3,
        "newest checkpoints kept in copy_to",
        low=1,
        used_by=UsedBy(
            {"checkpoint.copy_to": AllBut(None)},
            "{key}={value} is not used without checkpoint.copy_to. "
            "Set checkpoint.copy_to, or leave it out.",
        ),
    )
    local: str | None = key(
        None,
        "directory on the disk of each host for saves that are not uploaded, of a run behind a "
        "URL; null: all are uploaded",
        path="local",
    )
    local_keep: int = key(
        2,
        "newest checkpoints kept in checkpoint.local",
        low=2,
        used_by=UsedBy(
            {"checkpoint.local": AllBut(None)},
            "{key}={value} is not used without checkpoint.local. "
            "Set checkpoint.local, or leave it out.",
        ),
    )
    upload_every: int = key(
        10,
        "of so many saves in a row, the last is uploaded; the others stay in checkpoint.local",
        low=2,
        used_by=UsedBy(
            {"checkpoint.local": AllBut(None)},
            "{key}={value} is not used without checkpoint.local. "
            "Set checkpoint.local, or leave it out.",
        ),
    )
    grace_seconds: float = key(
        300.0,
        "longest time from SIGTERM or SIGINT to the end of the process, saved or not; 0: no limit",
        low=0,
        high=1e8,
    )
    init_from: str | None = key(
        None,
        "start from the weights of this run, checkpoint or Hugging Face directory, also by URL; "
        "null: random",
        path="any",
    )
    init_adapters: str | None = key(
        None,
        "start from the adapters of this directory of PEFT, on the weights of init_from; null: new",
        path="local",
        used_by=UsedBy(
            {"model.lora.rank": AllBut(None)},
            "{key}={value} needs adapters, but model.lora.rank=null. "
            "Set model.lora.rank to r in its adapter_config.json, or leave it out.",
        ),
    )
    start_over: bool = key(
        False,
        "start at step 1 although saved checkpoints are gone; the run's other files are kept in "
        "its folder, in before-DATE",
    )
    init_partial: tuple[str, ...] = key(
        (),
        "regular expressions: parameters that may differ from init_from, and are then initialised",
        used_by=UsedBy(
            {"checkpoint.init_from": AllBut(None)},
            "{key}={value} is not used without checkpoint.init_from. "
            "Set checkpoint.init_from, or leave it out.",
        ),
    )


def adapters_problems(checkpoint: CheckpointConfig) -> Iterator[str]:
    """Adapters without the weights that they are for."""
    if checkpoint.init_adapters is not None and checkpoint.init_from is None:
        yield (
            f"checkpoint.init_adapters={checkpoint.init_adapters} needs the weights that these "
            "adapters are for, but checkpoint.init_from=null. Set checkpoint.init_from to them."
        )
