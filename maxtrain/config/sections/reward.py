"""The section `reward`, and what must hold inside it."""

import dataclasses

from data_pipeline.base.config_key import UsedBy, key

_REWARD = UsedBy(
    {"objective": ("reward",)},
    "{key}={value} is not used with {cause}. Set objective=reward, or leave it out.",
)


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    """Reward model: training of a score on pairs of answers, of which one was preferred."""

    margin: bool = key(
        False,
        "require the chosen answer to win by the margin that the data has for its pair "
        "(prepare --margin)",
        used_by=_REWARD,
    )
    centre_weight: float = key(
        0.0,
        "weight of the squared sum of a pair's two rewards, which keeps rewards near 0; "
        "usual: 0.01",
        low=0,
        high=1000,
        used_by=_REWARD,
    )
