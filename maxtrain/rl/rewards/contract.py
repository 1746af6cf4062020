"""The interface of rewards, and the checks of what they return.

    reward(prompts, completions, completion_ids, **columns) -> list[float | None]

`prompts` are texts or lists of messages, `completions` texts, `completion_ids` their tokens, and
`columns` the columns of the dataset by name; each has an entry for each row. None means that the
reward does not apply to a row, which is not 0. Functions of users are called as TRL calls them, see
user.py.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

from data_pipeline.base.errors import ConfigError, DataError

# Outcome of a value that is a number, or None.
OK = "ok"
# Outcome of a value that is NaN or infinite.
INVALID = "invalid"


# A function with the interface above.
type Reward = Callable[..., list[float | None]]


class RowReward(NamedTuple):
    """The reward of a row, its outcome (OK, INVALID, or one of workers.py or verify.py), and a text
    about what went wrong."""

    value: float | None
    outcome: str = OK
    detail: str = ""


class RewardBatch(NamedTuple):
    """Rows to score; every list has an entry for each row."""

    prompts: list
    completions: list[str]
    completion_ids: list[list[int]]
    columns: Mapping[str, list]

    def rows(self, start: int, end: int) -> "RewardBatch":
        """Return the rows from `start` to before `end`."""
        return RewardBatch(
            self.prompts[start:end],
            self.completions[start:end],
            self.completion_ids[start:end],
            {name: list(values[start:end]) for name, values in self.columns.items()},
        )

    def call(self, reward: Reward) -> Any:
        """Call a reward with these rows."""
        return reward(self.prompts, self.completions, self.completion_ids, **self.columns)


def checked(name: str, returned: Any, rows: int) -> list[RowReward]:
    """Check the return value of a reward for this number of rows.

    A NaN or infinite number may depend on the completion, so it is counted as INVALID and does not
    apply. Other errors are faults of the function.

    Raises:
        DataError: the value is no list, has another number of entries, or an entry is no number.
    """
    fix = "Let the function return a list with a number or None for each completion."
    if isinstance(returned, str | bytes | Mapping) or not isinstance(returned, Sequence):
        raise DataError(f"the reward {name} returned {_shown(returned)}, which is no list. {fix}")
    if len(returned) != rows:
        raise DataError(
            f"the reward {name} returned {len(returned)} values for {rows} completions. {fix}"
        )
    scored = []
    for value in returned:
        if value is None:
            scored.append(RowReward(None))
        elif not isinstance(value, Real):
            raise DataError(f"the reward {name} returned {_shown(value)} as a value. {fix}")
        elif not math.isfinite(value):
            scored.append(RowReward(None, INVALID, f"{name} returned {float(value)}"))
        else:
            scored.append(RowReward(float(value)))
    return scored


def column_of(columns: Mapping[str, list], column: str, reward: str) -> list:
    """Return a column that a reward needs. Raise a ConfigError if the dataset has no such
    column."""
    if column not in columns:
        known = ", ".join(sorted(columns)) or "none"
        raise ConfigError(
            f"the reward {reward} needs the column {column!r}, and the dataset has {known}. Add it "
            "to the dataset, or set the reward's option `column`."
        )
    return columns[column]


def _shown(value: Any) -> str:
    """Show a value and its type, shortened."""
    return f"{value!r:.60} ({type(value).__name__})"
