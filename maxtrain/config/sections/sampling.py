"""Keys of the sampling of completions, which the sections `grpo` and `distill` both have. Each
function declares one for a section; `used_by` is as of `key`."""

from typing import Any

from data_pipeline.base.config_key import UsedBy, key


def num_generations(default: int, help: str, *used_by: UsedBy) -> Any:
    """Declare the key for the number of completions of a prompt."""
    return key(default, help, low=1, high=1 << 16, used_by=used_by)


def max_completion_length(*used_by: UsedBy) -> Any:
    """Declare the key for the length at which a completion is cut."""
    return key(
        256,
        "longest completion in tokens; with its prompt, it must fit into a row",
        low=1,
        used_by=used_by,
    )


def slots(*used_by: UsedBy) -> Any:
    """Declare the key for the number of completions that are sampled side by side."""
    return key(
        64, "completions that are sampled at the same time", low=1, high=1 << 16, used_by=used_by
    )


def temperature(help: str, *used_by: UsedBy) -> Any:
    """The sampler's; what else it divides, the help says."""
    return key(1.0, help, above=0, high=100, used_by=used_by)


def num_iterations(*used_by: UsedBy) -> Any:
    """Declare the key for the number of steps that train on each rollout."""
    return key(
        1,
        "steps that train on each rollout: they read their prompts together, and each of them"
        " trains on all completions",
        low=1,
        high=1000,
        used_by=used_by,
    )


def keep_rollouts(*used_by: UsedBy) -> Any:
    """Declare the key that keeps rollouts when no checkpoint needs them."""
    return key(
        False,
        "keep the files of all rollouts, not only of those that checkpoints need",
        used_by=used_by,
    )


def mask_truncated_completions(*used_by: UsedBy) -> Any:
    """Declare the key that excludes truncated completions from training."""
    return key(
        False, "leave completions that reach max_completion_length out of the loss", used_by=used_by
    )
