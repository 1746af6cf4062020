"""The section `observe`, and those of the trackers in it."""

import dataclasses
import re
from collections.abc import Iterator
from typing import Literal

from data_pipeline.base.config_key import AnyValueExcept, UsedBy, key
from maxtrain.config.sections.grpo import FROM_REWARDS


def _read_by(*trackers: str) -> UsedBy:
    """Return the rule that only runs with one of these trackers read a key."""
    return UsedBy(
        {"observe.trackers[*]": trackers},
        f"{{key}}={{value}} is not used without {' or '.join(trackers)}. "
        f"Set observe.trackers=[{trackers[0]}], or leave it out.",
        cause=f"observe.trackers without {' or '.join(trackers)}",
        help=f"{' or '.join(trackers)} in observe.trackers",
    )


@dataclasses.dataclass(frozen=True)
class TrackingConfig:
    """Trackers that a run is sent to, and what they show besides its records."""

    project: str = key(
        "maxtrain",
        "project on Weights & Biases, experiment on MLflow",
        used_by=_read_by("wandb", "mlflow"),
    )
    name: str | None = key(
        None, "name of the run in trackers; null: run_name", used_by=_read_by("wandb", "mlflow")
    )
    tags: tuple[str, ...] = key(
        (),
        "tags of the run in trackers; on MLflow NAME=VALUE, where NAME alone means true",
        used_by=_read_by("wandb", "mlflow"),
    )
    system_metrics: bool = key(
        True,
        "let trackers measure load and memory of this host and its devices",
        used_by=_read_by("wandb", "mlflow"),
    )
    wandb_entity: str | None = key(
        None,
        "Weights & Biases user or team; null: WANDB_ENTITY, or that of the API key",
        used_by=_read_by("wandb"),
    )
    wandb_group: str | None = key(
        None, "Weights & Biases group of runs; null: none", used_by=_read_by("wandb")
    )
    wandb_mode: Literal["online", "offline"] | None = key(
        None,
        "offline: only write to RUN/wandb, for `wandb sync`; null: WANDB_MODE, or online",
        used_by=_read_by("wandb"),
    )
    mlflow_uri: str | None = key(
        None,
        "MLflow server or store; null: MLFLOW_TRACKING_URI, or the file mlflow.db in output_dir",
        used_by=_read_by("mlflow"),
    )


@dataclasses.dataclass(frozen=True)
class ObserveConfig:
    """Progress, curves, completions, traces and trackers."""

    progress: Literal["auto", "rich", "plain", "off"] = key(
        "auto", "progress display: live line, plain lines, or none; auto: live in a terminal"
    )
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = key(
        ("tensorboard",), "where records are sent, besides metrics.jsonl, which always has them"
    )
    plot: bool = key(True, "draw the curves of the run to curves.png")
    prompts: tuple[str, ...] = key((), "prompts that the model completes at the end of the run")
    sample_interval: int = key(
        0,
        "steps between completions of prompts during training; 0: only at the end",
        low=0,
        used_by=UsedBy(
            {
                "observe.prompts": AnyValueExcept(()),
                "objective": FROM_REWARDS,
                "distill.on_policy": (True,),
            },
            "{key}={value} needs prompts, but observe.prompts is empty. "
            "Set observe.prompts='[Once upon a time]', or leave it out.",
        ),
    )
    num_samples: int = key(
        4,
        "number of prompts, the first of an evaluation set or of training, whose completions "
        "are recorded in samples.jsonl",
        low=0,
        high=1000,
        used_by=UsedBy(
            {"objective": FROM_REWARDS, "distill.on_policy": (True,)},
            "{key}={value} is not used with {cause}. Set objective=grpo, or leave it out.",
        ),
    )
    layer_norms_interval: int = key(
        0,
        "steps between records of kind norms: norms of gradient, weights and update of each layer; "
        "0: never",
        low=0,
    )
    slow_host_factor: float = key(
        2.0,
        "straggler warning: a host takes this many times as long as the others for its own "
        "part of steps, in three records in a row; 0: never",
        low=0,
        high=1e6,
    )
    profile: str | None = key(
        None,
        "steps to profile, such as 10:12 (first and last), into RUN/profile for Perfetto and "
        "TensorBoard; null: none",
    )
    peak_tflops: float | None = key(
        None,
        "peak TFLOP/s of one device, for MFU; null: from the table of devices, or measured on"
        " a CPU",
        above=0,
        high=1e9,
    )
    compilation_cache: str | None = key(
        "~/.cache/maxtrain/jax",
        "directory of the compilation cache, not used with several CPU devices; null: none",
        path="local",
    )
    tracking: TrackingConfig = key(TrackingConfig(), "settings of trackers")


def tracker_problems(observe: ObserveConfig) -> Iterator[str]:
    """Trackers that are named twice, and a project without a name."""
    for name in sorted(set(observe.trackers)):
        if observe.trackers.count(name) > 1:
            yield (
                f"observe.trackers has {name} {observe.trackers.count(name)} times; each tracker "
                f"gets every record once. Name it once."
            )
    if not observe.tracking.project:
        yield (
            "observe.tracking.project is empty, but every run belongs to a project. "
            "Set observe.tracking.project=maxtrain, for example."
        )


def profile_problems(observe: ObserveConfig) -> Iterator[str]:
    """A range of steps that is not written as first:last, or goes down."""
    given = observe.profile
    if given is None:
        return
    found = re.fullmatch(r"([0-9]+):([0-9]+)", given)
    if not found:
        yield (
            f"observe.profile={given} must be the first and the last step to trace. "
            "Set observe.profile=10:12, for example."
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
