"""Settings that a run keeps if an earlier version with other defaults started it: the same command
must continue with the same numbers.

Such a version wrote every key into its checkpoints, with the defaults included. So the checkpoints
show what the defaults were.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from data_pipeline.base import strict_yaml
from maxtrain.config.schema import LossScaleConfig, RunConfig, ScheduleConfig
from maxtrain.config.sections.schedule import TO_THE_LOWEST

# The defaults that there were.
_LOSS_SCALE = {"initial": 2.0**32, "window": 5}


def kept_settings(kept: Mapping[str, Any] | None, config: str) -> dict[str, Any]:
    """Settings that a run keeps, by dotted path, as its checkpoint says.

    Args:
        kept: what the checkpoint has; later ones hand it on, so that a run does not lose it on its
            way. None: the checkpoint is of an older version, which did not say.
        config: of the run, as YAML.
    """
    if kept is not None:
        return dict(kept)
    try:
        return _settings_of(strict_yaml.loads(config))
    except (ValueError, KeyError, TypeError):
        # Of a version that had no such keys.
        return {}


def _settings_of(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a saved config whose defaults have changed, or whose meaning has."""
    schedule = saved["schedule"]
    loss_scale = saved["loss_scale"]
    kept = {"schedule.min_learning_rate": schedule["min_learning_rate"]}
    for name, value in _LOSS_SCALE.items():
        if loss_scale[name] == value:
            kept[f"loss_scale.{name}"] = value
    # A warm-up longer than the plan was cut off at its end.
    if saved["steps"] == "auto":
        kept["schedule.warmup_steps"] = schedule["warmup_steps"]
    return kept


def with_kept(config: RunConfig, kept: Mapping[str, Any]) -> tuple[RunConfig, str]:
    """The config with what the run keeps where it says nothing else, and a line about what that
    changes, or nothing."""
    settings: list[str] = []
    config = _with_lowest_rate(config, kept, settings)
    config = _with_loss_scale(config, kept, settings)
    if not settings:
        return config, ""
    words = ", ".join(settings)
    return config, (
        f"The run goes on with what it was begun with, where defaults are others now: {words}."
    )


def _with_lowest_rate(config: RunConfig, kept: Mapping[str, Any], settings: list[str]) -> RunConfig:
    """Return the config with the lowest learning rate of the run, unless it sets one itself; a
    change is added to `settings`.
    """
    schedule = config.schedule
    low = kept.get("schedule.min_learning_rate")
    peak = config.optimizer.learning_rate
    default_ratio = ScheduleConfig().min_lr_ratio
    says_its_own = schedule.min_learning_rate is not None or schedule.min_lr_ratio != default_ratio
    is_read = schedule.name in TO_THE_LOWEST
    if low is None or says_its_own or not is_read or low > peak:
        return config
    if abs(low - schedule.min_lr_ratio * peak) > 1e-6 * low:
        settings.append(f"schedule.min_learning_rate={low}")
    schedule = dataclasses.replace(schedule, min_learning_rate=low)
    return dataclasses.replace(config, schedule=schedule)


def _with_loss_scale(config: RunConfig, kept: Mapping[str, Any], settings: list[str]) -> RunConfig:
    """Return the config with the dynamic loss scale of the run, unless it sets one itself; a change
    is added to `settings`.
    """
    loss_scale = config.loss_scale
    is_auto = loss_scale.mode == "auto" and config.precision.compute == "float16"
    if loss_scale.mode != "dynamic" and not is_auto:
        return config
    default = LossScaleConfig()
    changes = {}
    for name in _LOSS_SCALE:
        value = kept.get(f"loss_scale.{name}")
        is_default = getattr(loss_scale, name) == getattr(default, name)
        if value is not None and is_default:
            changes[name] = value
            settings.append(f"loss_scale.{name}={value:g}")
    if not changes:
        return config
    loss_scale = dataclasses.replace(loss_scale, **changes)
    return dataclasses.replace(config, loss_scale=loss_scale)
