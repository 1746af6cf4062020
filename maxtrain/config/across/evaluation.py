"""Evaluation sets, and what asks for evaluations of them."""

from collections.abc import Iterator

from data_pipeline.config import Interval
from maxtrain.config.schema import RunConfig
from maxtrain.config.words import choices


def batches_problems(config: RunConfig) -> Iterator[str]:
    """Evaluations without a batch, if a set has no `steps` of its own."""
    without = [held_out for held_out in config.eval.sets.values() if held_out.steps is None]
    if config.eval_interval and config.eval_steps == 0 and without:
        yield (
            "eval_steps=0 would evaluate nothing, "
            f"every eval_interval={_in_words(config.eval_interval)}. "
            "Set eval_steps=-1 to evaluate whole sets, or eval_interval=0."
        )


def _in_words(interval: Interval) -> str:
    if isinstance(interval, int):
        return f"{interval} steps"
    return interval


def early_stop_problems(config: RunConfig) -> Iterator[str]:
    """Early stopping by a set that does not exist or is never evaluated while training."""
    patience = config.eval.stop_patience
    sets = config.eval.sets
    if patience is None or not sets:
        return
    name = config.eval.stop_set or next(iter(sets))
    if name not in sets:
        yield (
            f"eval.stop_set={name} must be one of eval.sets: {choices(sets)}. "
            "Set eval.stop_set to one of these."
        )
        return
    interval = sets[name].interval
    if interval is None:
        interval = config.eval_interval
    if not interval:
        yield (
            f"eval.stop_patience={patience} needs evaluations of eval.sets.{name} while training, "
            "but there are none. "
            "Set eval_interval=100, for example, or leave it out."
        )


def set_problems(config: RunConfig) -> Iterator[str]:
    """Sets of which nothing would be evaluated."""
    for name, held_out in config.eval.sets.items():
        if held_out.steps == 0:
            yield (
                f"eval.sets.{name}.steps=0 would evaluate nothing. "
                "Set it to -1 for the whole set, or leave the set out."
            )


def repeated_set_problems(config: RunConfig) -> Iterator[str]:
    """Sets that are the same as an earlier one."""
    first_names: dict[str, str] = {}
    for name, held_out in config.eval.sets.items():
        first = first_names.setdefault(str(held_out), name)
        if held_out.path and first != name:
            yield (
                f"eval.sets.{name}.path={held_out.path} is the same as eval.sets.{first}, "
                "with the same interval, steps and batch_size. Leave one of them out."
            )
