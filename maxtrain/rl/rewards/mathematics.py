"""The reward `math`: the answer of a completion is mathematically equal to that of a column."""

from collections.abc import Callable, Mapping, Sequence

from data_pipeline.base.errors import ConfigError
from maxtrain.rl.rewards import verify
from maxtrain.rl.rewards.answers import POLICY
from maxtrain.rl.rewards.contract import RewardBatch, RowReward, column_of
from maxtrain.rl.rewards.verify import GOLD_POLICY, Verifier
from maxtrain.rl.rewards.workers import RewardWorkers

# An answer that breaks the parser is wrong; a skipped answer does not apply.
REWARDS: dict[str, float | None] = {
    verify.CORRECT: 1.0,
    verify.WRONG: 0.0,
    verify.UNPARSABLE: 0.0,
    verify.TIMEOUT: 0.0,
    verify.CRASH: 0.0,
    verify.SKIPPED: None,
}


def math(
    pool: RewardWorkers | None,
    column: str = "answer",
    policy: Sequence[str] = POLICY,
    gold_policy: Sequence[str] = GOLD_POLICY,
    rewards: Mapping[str, float | None] | None = None,
    seconds: float | None = None,
    deadline: float | None = None,
) -> Callable[[RewardBatch], list[RowReward]]:
    """Build a reward for correct answers, see `Verifier`. Without a pool, only numbers and equal
    texts are judged.

    Args:
        column: the column with the answers, or with solutions that contain them. The reward does
            not apply to rows with None.
        policy, gold_policy: where to find the answers in completions and in the dataset.
        rewards: rewards by outcome that replace those of REWARDS; None: the reward does not apply.
        seconds, deadline: time limits of an answer and of a batch.
    """
    values = REWARDS | dict(rewards or {})
    unknown = sorted(set(values) - set(REWARDS))
    if unknown:
        raise ConfigError(
            f"math.rewards has {', '.join(unknown)}, which is no outcome. Name some of "
            f"{', '.join(REWARDS)}."
        )
    verifier = Verifier(
        pool, policy=policy, gold_policy=gold_policy, seconds=seconds, deadline=deadline
    )

    def score(batch: RewardBatch) -> list[RowReward]:
        golds = column_of(batch.columns, column, "math")
        places = [place for place, gold in enumerate(golds) if gold is not None]
        found = [RowReward(None) for _ in golds]
        verdicts = verifier(
            [str(golds[place]) for place in places], [batch.completions[place] for place in places]
        )
        for place, verdict in zip(places, verdicts):
            found[place] = RowReward(values[verdict.outcome], verdict.outcome, verdict.detail)
        return found

    return score
