"""The section `reward`, and what must hold inside it."""

import dataclasses

from data_pipeline.base.config_key import UsedBy, key

_REWARD = UsedBy(
    {"objective": ("reward",)},
    "{key}={value} is not used with {cause}. Set objective=reward, or leave it out.",
)


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    """How a model learns to score answers from pairs of them, of which one was preferred."""

    margin: bool = key(
        False,
        "a chosen answer should win by the margin that its pair has in the data (prepare --margin)",
        used_by=_REWARD,
    )
    centre_weight: float = key(
        0.0,
        "weight of the squared sum of both rewards of a pair, which keeps rewards around 0; "
        "usual: 0.01",
        low=0,
        high=1000,
        used_by=_REWARD,
    )
