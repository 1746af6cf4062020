"""The section `checkpoint`."""

import dataclasses

from data_pipeline.config_key import AllBut, UsedBy, key


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """What is saved beside the root's checkpoint_interval. A final checkpoint is always written."""

    minutes: float | None = key(
        None,
        "also save when so many minutes passed since the last save; null: never",
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
        "directory on another disk that good steps are copied to meanwhile; null: none",
        path="local",
    )
    copy_keep: int = key(
        3,
        "newest checkpoints kept there",
        low=1,
        used_by=UsedBy(
            {"checkpoint.copy_to": AllBut(None)},
            "{key}={value} is not used without checkpoint.copy_to. "
            "Set checkpoint.copy_to, or leave it out.",
        ),
    )
    grace_seconds: float = key(
        300.0,
        "from SIGTERM or SIGINT to the end of the process, saved or not; 0: no limit",
        low=0,
        high=1e8,
    )
    init_from: str | None = key(
        None,
        "start from the weights of this run, checkpoint or Hugging Face directory; null: random",
        path="local",
    )
    start_over: bool = key(
        False,
        "begin at step 1 although saved steps are gone; what the run left otherwise is kept in "
        "its folder, before-DATE",
    )
    init_partial: tuple[str, ...] = key(
        (),
        "regular expressions: parameters of init_from that may differ, and are new then",
        used_by=UsedBy(
            {"checkpoint.init_from": AllBut(None)},
            "{key}={value} is not used without checkpoint.init_from. "
            "Set checkpoint.init_from, or leave it out.",
        ),
    )
