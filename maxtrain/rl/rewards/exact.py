"""The reward `exact`: the answer is the text of a column."""

from collections.abc import Sequence

from maxtrain.rl.rewards.answers import extract
from maxtrain.rl.rewards.contract import Reward, column_of
from maxtrain.rl.rewards.letters import plain


def exact(
    column: str = "answer",
    reward: float = 1.0,
    policy: Sequence[str] = ("all",),
    ignore_case: bool = False,
) -> Reward:
    """Build a reward for completions whose answer equals the text of a column, after normalising
    both: compatibility forms of Unicode (see `plain`), and single spaces.

    Args:
        column: the column with the answers; None there: the reward does not apply.
        reward: the reward of an equal text; any other text gives 0.
        policy: where to find the answers in completions, see `extract`.
        ignore_case: whether upper and lower case are equal.
    """
    extract("", policy)

    def normalized(text: str) -> str:
        text = " ".join(plain(text).split())
        if ignore_case:
            return text.casefold()
        return text

    def score(
        prompts: list, completions: list[str], completion_ids: list[list[int]], **columns: list
    ) -> list[float | None]:
        rewards = []
        for text, gold in zip(completions, column_of(columns, column, "exact")):
            answer = extract(text, policy)
            if gold is None:
                rewards.append(None)
            elif answer is not None and normalized(answer) == normalized(str(gold)):
                rewards.append(reward)
            else:
                rewards.append(0.0)
        return rewards

    return score
