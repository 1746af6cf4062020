"""Keys of the sampling of completions, which the sections `grpo` and `distill` both have. Each
function declares one for a section; `used_by` is as of `key`."""

from typing import Any

from data_pipeline.base.config_key import UsedBy, key


def num_generations(default: int, help: str, *used_by: UsedBy) -> Any:
    """How many completions a prompt has."""
    return key(default, help, low=1, high=1 << 16, used_by=used_by)


def max_completion_length(*used_by: UsedBy) -> Any:
    """Where a completion is cut."""
    return key(
        256,
        "tokens of a completion at most; with its prompt, it fits into a row",
        low=1,
        used_by=used_by,
    )


def slots(*used_by: UsedBy) -> Any:
    """How many completions are sampled side by side."""
    return key(64, "completions that are sampled at once", low=1, high=1 << 16, used_by=used_by)


def temperature(help: str, *used_by: UsedBy) -> Any:
    """The sampler's; what else it divides, the help says."""
    return key(1.0, help, above=0, high=100, used_by=used_by)


def num_iterations(*used_by: UsedBy) -> Any:
    """How often a rollout is read."""
    return key(
        1,
        "so many steps read their prompts together, and all of them train on all completions",
        low=1,
        high=1000,
        used_by=used_by,
    )


def keep_rollouts(*used_by: UsedBy) -> Any:
    """Whether rollouts stay when no checkpoint needs them."""
    return key(
        False, "keep all rollouts of the run, not only those that checkpoints need", used_by=used_by
    )


def mask_truncated_completions(*used_by: UsedBy) -> Any:
    """Whether completions that were cut train."""
    return key(False, "completions that reach max_completion_length do not train", used_by=used_by)
