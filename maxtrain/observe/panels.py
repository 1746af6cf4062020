"""Extra panels of a run's curves, besides loss, gradient norm, speed and learning rate: numbers
that only some runs record. A panel is drawn if it has data.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

REWARD = "reward"
_PART = "reward/"


class CurvePanel(NamedTuple):
    """A small chart below the first one.

    Attributes:
        label: of its axis, with the unit.
        lines: what each line is called, by the name of the number in records of training. A line
            without words is the panel's only one.
    """

    label: str
    lines: Mapping[str, str]


# Of runs that learn from rewards, in their order.
_OF_ROLLOUTS = (
    CurvePanel("accuracy", {"accuracy": ""}),
    CurvePanel("tokens", {"completion_length": "mean length", "longest_completion": "longest"}),
    CurvePanel("entropy, nats", {"entropy": ""}),
    CurvePanel("KL, nats", {"kl": ""}),
    CurvePanel("reward of tokens", {"value": "value", "returns": "returns"}),
    CurvePanel("explained variance of values", {"explained_variance": ""}),
    CurvePanel("loss of values", {"value_loss": ""}),
    CurvePanel(
        "share",
        {
            "truncated": "truncated",
            "groups_without_signal": "groups without signal",
            "clipped_low": "clipped low",
            "clipped_high": "clipped high",
            "value_clipped": "values clipped",
        },
    ),
    CurvePanel("sampler gap, nats", {"sampler_gap": ""}),
    CurvePanel(
        "seconds",
        {
            "sampling_seconds": "sampling",
            "reward_seconds": "rewards",
            "scoring_seconds": "scoring",
            "step_seconds": "training",
        },
    ),
)


def has_rewards(train: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a run learns from rewards: then these, not the loss, are what people look at
    first.
    """
    return any(REWARD in record for record in train)


def panels_of(
    train: Sequence[Mapping[str, Any]], evals: Sequence[Mapping[str, Any]]
) -> list[CurvePanel]:
    """The panels of a run, with the lines that its records of training and of evaluations have."""
    if not has_rewards(train):
        return []
    names = dict.fromkeys(name for record in (*train, *evals) for name in record)
    parts = {name: name.removeprefix(_PART) for name in names if name.startswith(_PART)}
    found = []
    # One alone is the reward itself.
    if len(parts) > 1:
        found.append(CurvePanel("rewards", parts))
    for panel in _OF_ROLLOUTS:
        lines = {name: words for name, words in panel.lines.items() if name in names}
        if lines:
            found.append(CurvePanel(panel.label, lines))
    return found
