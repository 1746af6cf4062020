"""Slots, the rows of the engine's batch, as the host knows them: who has which, and what each
remembers."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int

from maxtrain.inference.generation import Generation

# Prompts that begin alike for fewer tokens than this are read anew.
LEAST_SHARED = 16


def as_ids(ids: Sequence[int]) -> Int[np.ndarray, " N"]:
    """Ids as an array."""
    return np.array(ids, np.int32)


@dataclasses.dataclass(eq=False)
class Slot:
    """One row of the batch."""

    number: int
    # Whose row it is; None: nobody's.
    generation: Generation | None = None
    # Ids whose keys and values are in its caches.
    kept: Int[np.ndarray, " N"] = dataclasses.field(default_factory=lambda: as_ids([]))
    # Of a prompt, what is to be read before the first new token can be made.
    unread: Int[np.ndarray, " M"] = dataclasses.field(default_factory=lambda: as_ids([]))
    # The adapters that `kept` was read with.
    adapter: int = 0
    # How many columns have been written to its rings, some of which may be behind `kept`: a ring
    # has the last of them.
    reach: int = 0
    # Its pages, in the order of their columns, where caches have pages.
    pages: list[int] = dataclasses.field(default_factory=list)
    # Which ids its text has, where they have a penalty.
    seen: Bool[np.ndarray, " V"] | None = None
    # How often each id is among the new ones, of which so many are counted.
    counts: Int[np.ndarray, " V"] | None = None
    num_counted: int = 0
    # When it was last given to a prompt, and when a piece of that was last read.
    taken: int = 0
    read: int = 0
    # Something in its caches may not be finite.
    is_spoiled: bool = False

    @property
    def is_reading(self) -> bool:
        """Whether some of a prompt must be read before new tokens can be made."""
        return self.generation is not None and len(self.unread) > 0

    @property
    def is_decoding(self) -> bool:
        """Whether it can get new tokens."""
        return self.generation is not None and len(self.unread) == 0

    @property
    def scores_prompt(self) -> bool:
        """Whether the tokens of its prompt are scored while they are read."""
        return self.generation is not None and self.generation.scores_prompt

    @property
    def whole_length(self) -> int:
        """Tokens of its prompt."""
        assert self.generation is not None
        return len(self.generation.prompt)

    def extend(self, ids: Int[np.ndarray, " N"]) -> None:
        """These are in its caches, too."""
        self.kept = np.concatenate([self.kept, ids])
        self.reach = max(self.reach, len(self.kept))

    def leave(self) -> None:
        """It is nobody's; what it remembers stays."""
        self.generation = None
        self.unread = as_ids([])
        self.seen = None
        self.counts = None

    def forget(self) -> None:
        """Nothing is in its caches."""
        self.kept = as_ids([])
        self.reach = 0
        self.is_spoiled = False


def num_equal(ids: Int[np.ndarray, " N"], others: Int[np.ndarray, " M"]) -> int:
    """How many of the first ids are the same; 0 also for fewer than LEAST_SHARED."""
    count = min(len(ids), len(others))
    # Most that differ do so at once.
    if count < LEAST_SHARED or not np.array_equal(ids[:LEAST_SHARED], others[:LEAST_SHARED]):
        return 0
    differs = ids[:count] != others[:count]
    first = int(differs.argmax())
    if differs[first]:
        return first
    return count
