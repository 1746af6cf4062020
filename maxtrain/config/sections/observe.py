"""The section `observe`."""

import dataclasses
from typing import Literal

from data_pipeline.config_key import AllBut, UsedBy, key


@dataclasses.dataclass(frozen=True)
class ObserveConfig:
    """What a person sees."""

    progress: Literal["auto", "rich", "plain", "off"] = key(
        "auto", "live line, plain lines, or none; auto: live in a terminal"
    )
    tensorboard: bool = key(True, "write TensorBoard event files")
    plot: bool = key(True, "draw the curves to curves.png")
    prompts: tuple[str, ...] = key((), "texts that the model completes at the end of the run")
    sample_interval: int = key(
        0,
        "steps between completions of prompts while training; 0: only at the end",
        low=0,
        used_by=UsedBy(
            {"observe.prompts": AllBut(())},
            "{key}={value} needs prompts, but observe.prompts is empty. "
            "Set observe.prompts='[Once upon a time]', or leave it out.",
        ),
    )
    peak_tflops: float | None = key(
        None,
        "TFLOP/s of one device for MFU; null: from the table, or measured on a CPU",
        above=0,
        high=1e9,
    )
    compilation_cache: str | None = key(
        "~/.cache/maxtrain/jax",
        "directory that keeps compiled programs between runs; null: none",
        path="local",
    )
