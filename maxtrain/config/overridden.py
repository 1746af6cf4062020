"""Effects of overrides on a config file that was valid by itself: keys of the file that nothing
reads any more, and a warmup that does not fit into the new number of steps. Both are corrected with
a note, not refused.
"""

import dataclasses
from collections.abc import Collection
from typing import Any

from maxtrain.config.across.steps import fit_warmup
from maxtrain.config.paths import expand_paths
from maxtrain.config.problems import problems_of
from maxtrain.config.schema import RunConfig, ScheduleConfig
from maxtrain.config.unused_keys import UnusedKey, idle_keys
from maxtrain.config.values import section_from
from maxtrain.config.words import show


def with_fitting_warmup(config: RunConfig, typed: Collection[str]) -> tuple[RunConfig, list[str]]:
    """The config with a shorter warm-up, if nobody set it for this number of steps and it does not
    fit into them; and a line about that.

    Args:
        config: with the overrides in it.
        typed: the keys of the overrides.
    """
    if config.steps == "auto" or "schedule.warmup_steps" in typed:
        return config, []
    is_default = config.schedule.warmup_steps == ScheduleConfig().warmup_steps
    if not is_default and "steps" not in typed:
        return config, []
    fitted = fit_warmup(config, config.steps)
    if fitted is config:
        return config, []
    note = (
        f"warm-up: schedule.warmup_steps={config.schedule.warmup_steps}, which was not set for "
        f"steps={config.steps}, does not fit and is {fitted.schedule.warmup_steps}. "
        "Set schedule.warmup_steps for another."
    )
    return fitted, [note]


def made_idle(config: RunConfig, file_tree: dict, typed: Collection[str]) -> list[UnusedKey]:
    """Return the keys of the file that nothing reads any more because of an override which did not
    set them, in the order in which problems are reported.

    Args:
        config: of the file with the overrides in it.
        file_tree: the plain values of the file without them.
        typed: the keys of the overrides.
    """
    found = [problem for problem in problems_of(config) if isinstance(problem, UnusedKey)]
    of_file = [idle for idle in found if not any(_covers(key, idle.key) for key in typed)]
    if not of_file:
        return []
    file_alone = expand_paths(section_from(RunConfig, file_tree, "", []))
    before = [idle.key for idle in idle_keys(file_alone)]
    return [idle for idle in of_file if not any(_covers(key, idle.key) for key in before)]


def _covers(path: str, key: str) -> bool:
    """Return whether setting `path` sets `key`."""
    return key == path or key.startswith((f"{path}.", f"{path}["))


def with_defaults(config: RunConfig, idle: list[UnusedKey]) -> tuple[RunConfig, list[str]]:
    """The config with idle keys as if they had not been set, and a line about them."""
    if not idle:
        return config, []
    words = []
    for found in idle:
        config = _with_default(config, found.key)
        words.append(f"{found.key}={show(found.value)} (not read with {found.cause})")
    return config, [f"idle: {', '.join(words)}"]


def _with_default(section: Any, path: str) -> Any:
    """A section with one of its keys as if it had not been set."""
    name, _, rest = path.partition(".")
    if rest:
        value = _with_default(getattr(section, name), rest)
    else:
        value = getattr(type(section)(), name)
    return dataclasses.replace(section, **{name: value})
