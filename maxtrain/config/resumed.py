"""Effects of resuming a run with other settings: which keys differ, and what each difference
does.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from data_pipeline.base import strict_yaml
from maxtrain.config.load import plain_leaves
from maxtrain.config.schema import RunConfig
from maxtrain.config.words import show

NO_EFFECT = "no effect on the numbers of training"
_FROM = "applies from step {next:,} on"
_ROUNDING = "how a step is computed: the same numbers but for rounding"
_AT_START = "only read when a run begins: no effect now"
_OBJECTIVE = "another loss from step {next:,} on"
_EVALUATION = "evaluations from step {next:,} on, and what stops a run because of them"

# What a change of each key does, by patterns of dotted keys. The first that matches counts.
EFFECTS: Mapping[str, str] = {
    r"steps": "the run ends at step {end:,}, and the schedule is recomputed for that",
    r"schedule\..*": "the schedule is recomputed for {end:,} steps; applies from step {next:,} on",
    r"seed": "other random choices from step {next:,} on; initial weights stay as they are",
    r"run_name|output_dir|local_dir": "where the run is kept: " + NO_EFFECT,
    r"log_interval|checkpoint_interval|(observe|watchdog|integrity)\..*": NO_EFFECT,
    r"checkpoint\.(init_\w+|fork_from)": _AT_START,
    r"checkpoint\..*": NO_EFFECT,
    r"eval_interval|eval_at_start|eval_steps|eval\..*": _EVALUATION,
    r"determinism": _ROUNDING,
    r"init\.mup_base_width": "other learning rates of parameters from step {next:,} on",
    r"init\..*": _AT_START,
    r"optimizer\.learning_rate": "applies from step {next:,} on, through the schedule",
    r"optimizer\.(accumulation|zero|on_host)": _ROUNDING,
    r"optimizer\..*": "applies from step {next:,} on; what the optimizer has summed up stays",
    r"data\.sources\..*\.path": "where the data is read; its tokens are those of before",
    r"data\.(workers|prefetch|verify|cache|cache_bytes)": NO_EFFECT,
    r"data\.accept_changes": "whether other data may be read from step {next:,} on",
    r"data\..*": "what is read from step {next:,} on",
    r"mesh\..*": _ROUNDING,
    r"model\.(attention|remat|kept|scan_layers|loss_chunk|pipeline|routing)\b.*": _ROUNDING,
    r"model\..*": "another model from step {next:,} on, with the same weights",
    r"train\.on_host": _ROUNDING,
    r"train\..*": "which parameters train from step {next:,} on",
    r"precision\..*": "other roundings from step {next:,} on",
    r"(grpo|ppo|distill)\.num_generations": (
        "completions of each prompt from step {next:,} on; the step and its gradient have as many "
        "more or fewer rows"
    ),
    r"(grpo|ppo)\.slots|distill\.slots": "how completions are sampled together: " + NO_EFFECT,
    r"objective|(loss|distill|dpo|reward|grpo|ppo|regularization)\..*": _OBJECTIVE,
    r"(anomaly|loss_scale)\..*": _FROM,
}
# Keys that a fork sets for itself, so that a difference means nothing.
OF_EACH_FORK = frozenset(("run_name", "output_dir", "local_dir", "checkpoint.fork_from"))
# What decides which arrays a checkpoint holds, and of which shapes and types.
_OF_STATE = re.compile(
    r"objective|optimizer\.(name|ema_decay)|loss_scale\.mode|precision\.(params|compute)"
    r"|train\.(only|freeze)|model\.(?!attention$|vocab_size$).*"
)


class Change(NamedTuple):
    """A setting that differs from that of the launch before."""

    key: str
    before: Any
    now: Any

    def words(self) -> str:
        """The key, and both values."""
        return f"{self.key}: {show(self.before)} -> {show(self.now)}"

    def has_effect(self) -> bool:
        """Return whether the change can alter the numbers of training when a run resumes."""
        effect = effect_of(self.key)
        return NO_EFFECT not in effect and effect != _AT_START

    def describe(self, step: int, num_steps: int) -> str:
        """A line for people.

        Args:
            step: finished steps.
            num_steps: those of the plan.
        """
        effect = effect_of(self.key).format(next=step + 1, end=num_steps)
        return f"{self.words()} ({effect})"


def effect_of(key: str) -> str:
    """Return what a change of a key does, with `next` and `end` in braces."""
    for pattern, effect in EFFECTS.items():
        if re.fullmatch(pattern, key):
            return effect
    return _FROM


def changed_settings(before: str, now: RunConfig) -> list[Change]:
    """The settings that differ between a config as YAML, such as launches.jsonl has it, and a
    config; in the order of the schema."""
    known = _leaves_of(before)
    if known is None:
        return []
    # What an earlier version did not know had its default.
    of_before = plain_leaves(RunConfig()) | known
    of_now = plain_leaves(now)
    changes = []
    for key in [*of_now, *(key for key in of_before if key not in of_now)]:
        old = of_before.get(key)
        new = of_now.get(key)
        # A dict without entries stands for itself in one of the two.
        if old != new and not (old in (None, {}) and new in (None, {})):
            changes.append(Change(key, old, new))
    return changes


def changed_state_settings(before: str, now: RunConfig) -> list[Change]:
    """Return `changed_settings` of the keys that decide which arrays the training state has."""
    return [change for change in changed_settings(before, now) if _OF_STATE.fullmatch(change.key)]


def _leaves_of(text: str) -> dict[str, Any] | None:
    """The keys of a config that is YAML; None: it can't be read."""
    try:
        tree = strict_yaml.loads(text)
    except strict_yaml.StrictYamlError:
        return None
    if not isinstance(tree, dict):
        return None
    return _flat("", tree)


def _flat(path: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {path: value}
    found = {}
    for name, inner in value.items():
        found |= _flat(f"{path}.{name}" if path else str(name), inner)
    return found
