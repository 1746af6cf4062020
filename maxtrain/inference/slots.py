"""Slots, the rows of the engine's batch, as the host knows them: their texts, and their cached
prefixes."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int

from maxtrain.inference.generation import Generation

# Shorter common prefixes of prompts are not reused.
LEAST_SHARED = 16


def as_ids(ids: Sequence[int]) -> Int[np.ndarray, " N"]:
    """Return ids as an array."""
    return np.array(ids, np.int32)


@dataclasses.dataclass(eq=False)
class Slot:
    """One row of the batch."""

    number: int
    # The text of this row; None: the slot is free.
    generation: Generation | None = None
    # Ids whose keys and values are in the slot's KV cache.
    kept: Int[np.ndarray, " N"] = dataclasses.field(default_factory=lambda: as_ids([]))
    # The part of the prompt that is not read yet.
    unread: Int[np.ndarray, " M"] = dataclasses.field(default_factory=lambda: as_ids([]))
    # The adapters that `kept` was read with.
    adapter: int = 0
    # Number of columns written to the rings, some perhaps after `kept`; a ring holds the last of
    # them.
    reach: int = 0
    # The slot's pages, in the order of their columns, if caches have pages.
    pages: list[int] = dataclasses.field(default_factory=list)
    # Which ids the text has, if they have a penalty.
    seen: Bool[np.ndarray, " V"] | None = None
    # How often each id was generated, among the first `num_counted` new ids.
    counts: Int[np.ndarray, " V"] | None = None
    num_counted: int = 0
    # Numbers of the last assignment of the slot, and of the last read of a piece of its prompt.
    taken: int = 0
    read: int = 0
    # Whether the slot's caches may hold non-finite values.
    is_spoiled: bool = False

    @property
    def is_reading(self) -> bool:
        """Return whether a part of the prompt must be read before new tokens can be decoded."""
        return self.generation is not None and len(self.unread) > 0

    @property
    def is_decoding(self) -> bool:
        """Return whether the slot can get new tokens."""
        return self.generation is not None and len(self.unread) == 0

    @property
    def scores_prompt(self) -> bool:
        """Return whether the tokens of the prompt are scored while they are read."""
        return self.generation is not None and self.generation.scores_prompt

    @property
    def whole_length(self) -> int:
        """Return the number of tokens of the prompt."""
        assert self.generation is not None
        return len(self.generation.prompt)

    def extend(self, ids: Int[np.ndarray, " N"]) -> None:
        """Record that these tokens are in the KV cache."""
        self.kept = np.concatenate([self.kept, ids])
        self.reach = max(self.reach, len(self.kept))

    def leave(self) -> None:
        """Free the slot; its cached prefix stays."""
        self.generation = None
        self.unread = as_ids([])
        self.seen = None
        self.counts = None

    def forget(self) -> None:
        """Mark the caches as empty."""
        self.kept = as_ids([])
        self.reach = 0
        self.is_spoiled = False


def num_equal(ids: Int[np.ndarray, " N"], others: Int[np.ndarray, " M"]) -> int:
    """Return the length of the common prefix; 0 if it is shorter than LEAST_SHARED."""
    count = min(len(ids), len(others))
    # Most prompts with different beginnings differ at once.
    if count < LEAST_SHARED or not np.array_equal(ids[:LEAST_SHARED], others[:LEAST_SHARED]):
        return 0
    differs = ids[:count] != others[:count]
    first = int(differs.argmax())
    if differs[first]:
        return first
    return count
