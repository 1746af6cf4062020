"""Allocation of cache pages to texts: the host's side of `maxtrain.models.cache`."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from maxtrain.models.cache import PAGE


def num_pages(columns: int) -> int:
    """Return the number of pages that this number of columns needs."""
    return -(-columns // PAGE)


class Pages:
    """Allocator of cache pages with reference counts: texts with an equal prefix share pages.

    Args:
        count: number of pages.
    """

    def __init__(self, count: int):
        self.count = count
        self._num_users = np.zeros(count, np.int32)
        # The first page is handed out first.
        self._free = list(reversed(range(count)))

    @property
    def num_free(self) -> int:
        """Return the number of free pages."""
        return len(self._free)

    @property
    def num_users(self) -> Int[np.ndarray, " P"]:
        """Return how many texts use each page."""
        return self._num_users

    def num_free_after(self, given_back: Sequence[list[int]]) -> int:
        """Return how many pages would be free if these were given back."""
        users = self._num_users.copy()
        for pages in given_back:
            users[pages] -= 1
        return int((users == 0).sum())

    def take(self, count: int) -> list[int]:
        """Allocate `count` free pages; there must be as many."""
        assert count <= len(self._free), (count, len(self._free))
        taken = [self._free.pop() for _ in range(count)]
        self._num_users[taken] += 1
        return taken

    def share(self, pages: list[int]) -> None:
        """Count one more text that uses these pages."""
        self._num_users[pages] += 1

    def give_back(self, pages: list[int]) -> None:
        """Count one text fewer that uses these pages, and free the unused ones."""
        self._num_users[pages] -= 1
        for page in pages:
            if self._num_users[page] == 0:
                self._free.append(page)
