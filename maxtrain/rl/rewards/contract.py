"""What a reward is, and what it may return.

    reward(prompts, completions, completion_ids, **columns) -> list[float | None]

`prompts` are texts or lists of messages, `completions` texts, `completion_ids` their tokens, and
`columns` the columns of the dataset by name; all of them have an entry for each row. None says that
the reward does not apply to a row, which is not 0. Functions of users are called as TRL calls them,
see user.py.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

from data_pipeline.base.errors import ConfigError, DataError

# Of a value of a reward: it is a number, or None.
OK = "ok"
# It is NaN or infinite.
INVALID = "invalid"


# A function of the contract above.
type Reward = Callable[..., list[float | None]]


class Scored(NamedTuple):
    """The reward of a row, what became of it (OK, INVALID, or an outcome of workers.py or of
    verify.py), and words about what went wrong."""

    value: float | None
    outcome: str = OK
    detail: str = ""


class Batch(NamedTuple):
    """Rows to be scored; every list has an entry for each."""

    prompts: list
    completions: list[str]
    completion_ids: list[list[int]]
    columns: Mapping[str, list]

    def rows(self, start: int, end: int) -> "Batch":
        """The rows from `start` to before `end`."""
        return Batch(
            self.prompts[start:end],
            self.completions[start:end],
            self.completion_ids[start:end],
            {name: list(values[start:end]) for name, values in self.columns.items()},
        )

    def call(self, reward: Reward) -> Any:
        return reward(self.prompts, self.completions, self.completion_ids, **self.columns)


def checked(name: str, returned: Any, rows: int) -> list[Scored]:
    """What a reward has returned, for so many rows.

    A NaN or an infinite number depends on what was written, so it is counted as INVALID and does
    not apply. What is wrong for every row is a fault of the function.

    Raises:
        DataError: it is no list, has another number of entries, or an entry is no number.
    """
    mend = "Mend the function: it returns a list with a number or None for each completion."
    if isinstance(returned, str | bytes | Mapping) or not isinstance(returned, Sequence):
        raise DataError(f"the reward {name} returned {_shown(returned)}, which is no list. {mend}")
    if len(returned) != rows:
        raise DataError(
            f"the reward {name} returned {len(returned)} values for {rows} completions. {mend}"
        )
    scored = []
    for value in returned:
        if value is None:
            scored.append(Scored(None))
        elif not isinstance(value, Real):
            raise DataError(f"the reward {name} returned {_shown(value)} as a value. {mend}")
        elif not math.isfinite(value):
            scored.append(Scored(None, INVALID, f"{name} returned {float(value)}"))
        else:
            scored.append(Scored(float(value)))
    return scored


def column_of(columns: Mapping[str, list], column: str, reward: str) -> list:
    """A column that a reward needs. ConfigError: the dataset has no such column."""
    if column not in columns:
        known = ", ".join(sorted(columns)) or "none"
        raise ConfigError(
            f"the reward {reward} needs the column {column!r}, and the dataset has {known}. Add it "
            "to the dataset, or set the reward's option `column`."
        )
    return columns[column]


def _shown(value: Any) -> str:
    return f"{value!r:.60} ({type(value).__name__})"
