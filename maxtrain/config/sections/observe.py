"""The section `observe`."""

import dataclasses
import re
from collections.abc import Iterator
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
    layer_norms_interval: int = key(
        0,
        "steps between norms of the gradient, the weights and the update of each layer, in records "
        "of kind norms; 0: never",
        low=0,
    )
    profile: str | None = key(
        None,
        "steps to trace, as in 10:12 (first and last), into RUN/profile for Perfetto and "
        "TensorBoard; null: none",
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


def profile_problems(observe: ObserveConfig) -> Iterator[str]:
    """A range of steps that is none."""
    given = observe.profile
    if given is None:
        return
    found = re.fullmatch(r"([0-9]+):([0-9]+)", given)
    if not found:
        yield (
            f"observe.profile={given} must be the first and the last step to trace, as in "
            f"observe.profile=10:12."
        )
        return
    first = int(found[1])
    last = int(found[2])
    if not 1 <= first <= last:
        yield (
            f"observe.profile={given} must go up from 1 or more: steps are counted from 1, and the "
            f"last one is traced, too. Set observe.profile={max(1, min(first, last))}:"
            f"{max(1, first, last)}."
        )
