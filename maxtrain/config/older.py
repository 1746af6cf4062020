"""What a run keeps that was begun by a version with other defaults: the same command must go on to
the same numbers.

Such a version wrote every key into its checkpoints, those that nobody had set, too. So they say
what the defaults were.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import yaml

from maxtrain.config.schema import LossScaleConfig, RunConfig, ScheduleConfig

_LOSS_SCALE = {"initial": 2.0**32, "window": 5}  # the defaults that there were


def kept_settings(record: Mapping[str, Any] | None) -> dict[str, Any]:
    """Settings that a run keeps, by dotted path, as the record of its checkpoint says; none for a
    new run.

    A record without them is of an older version. Later ones hand them on, so that a run does not
    lose them on its way.
    """
    if record is None:
        return {}
    if "kept" in record:
        return dict(record["kept"])
    try:
        saved = yaml.safe_load(record.get("config", ""))
        schedule, loss_scale = saved["schedule"], saved["loss_scale"]
        kept = {"schedule.min_learning_rate": schedule["min_learning_rate"]}
        kept |= {
            f"loss_scale.{name}": value
            for name, value in _LOSS_SCALE.items()
            if loss_scale[name] == value
        }
        if saved["steps"] == "auto":  # a warm-up longer than the plan was cut off at its end
            kept["schedule.warmup_steps"] = schedule["warmup_steps"]
    except (yaml.YAMLError, KeyError, TypeError):  # of a version that had no such keys
        return {}
    return kept


def with_kept(config: RunConfig, kept: Mapping[str, Any]) -> tuple[RunConfig, str]:
    """The config with what the run keeps where it says nothing else, and a line about what that
    changes, or nothing."""
    schedule = config.schedule
    told = []
    low = kept.get("schedule.min_learning_rate")
    says_nothing = (
        schedule.min_learning_rate is None
        and schedule.min_lr_ratio == ScheduleConfig().min_lr_ratio
    )
    reads_it = schedule.name not in ("constant", "pieces")
    peak = config.optimizer.learning_rate
    if low is not None and says_nothing and reads_it and low <= peak:
        if abs(low - schedule.min_lr_ratio * peak) > 1e-6 * low:
            told.append(f"schedule.min_learning_rate={low}")
        config = dataclasses.replace(
            config, schedule=dataclasses.replace(schedule, min_learning_rate=low)
        )
    scaled = config.loss_scale.mode == "dynamic" or (
        config.loss_scale.mode == "auto" and config.precision.compute == "float16"
    )
    default = LossScaleConfig()
    changes = {}
    for name in _LOSS_SCALE:
        value = kept.get(f"loss_scale.{name}")
        if (
            scaled
            and value is not None
            and getattr(config.loss_scale, name) == getattr(default, name)
        ):
            changes[name] = value
            told.append(f"loss_scale.{name}={value:g}")
    if changes:
        config = dataclasses.replace(
            config, loss_scale=dataclasses.replace(config.loss_scale, **changes)
        )
    if not told:
        return config, ""
    return (
        config,
        f"The run goes on with what it was begun with, where defaults are others now: {', '.join(told)}.",
    )
