"""Which pages of the caches are whose: the host's side of `maxtrain.models.cache`."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from maxtrain.models.cache import PAGE


def num_pages(columns: int) -> int:
    """That so many columns need."""
    return -(-columns // PAGE)


class Pages:
    """Pages that texts take and give back; one may be in several texts that begin alike.

    Args:
        count: how many there are.
    """

    def __init__(self, count: int):
        self.count = count
        self._num_users = np.zeros(count, np.int32)
        # The first page is handed out first.
        self._free = list(reversed(range(count)))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_users(self) -> Int[np.ndarray, " P"]:
        """How many texts have each page."""
        return self._num_users

    def num_free_after(self, given_back: Sequence[list[int]]) -> int:
        """How many would be free if these were given back."""
        users = self._num_users.copy()
        for pages in given_back:
            users[pages] -= 1
        return int((users == 0).sum())

    def take(self, count: int) -> list[int]:
        """So many pages that are nobody's; there must be as many."""
        assert count <= len(self._free), (count, len(self._free))
        taken = [self._free.pop() for _ in range(count)]
        self._num_users[taken] += 1
        return taken

    def share(self, pages: list[int]) -> None:
        """One more text has these."""
        self._num_users[pages] += 1

    def give_back(self, pages: list[int]) -> None:
        """A text that had these needs them no more."""
        self._num_users[pages] -= 1
        for page in pages:
            if self._num_users[page] == 0:
                self._free.append(page)
