"""Worker processes of a stream, watched: grain waits for ever for one that is killed while it
writes a batch into its pipe, for the reader has the pipe's other end open, too."""

import contextlib
import gc
import multiprocessing
import queue
import threading
from collections.abc import Iterator
from typing import Any

from data_pipeline.errors import TryAgainError

_PATIENCE = 5.0  # seconds without a batch after which is looked whether all workers are there


def watched[T](stream: Iterator[T], workers: int) -> Iterator[T]:
    """The items of a stream that starts so many processes when it is first read; it is read in a
    thread of its own.

    TryAgainError: one was killed.
    """
    others, mine = {*multiprocessing.active_children()}, set()
    items: queue.Queue[tuple[list[T], Exception | None]] = queue.Queue(1)
    left, first, lost = threading.Event(), True, False

    def read() -> None:
        try:
            for item in stream:
                items.put(([item], None))
                if left.is_set():
                    return
            items.put(([], None))
        except Exception as error:
            items.put(([], error))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        while True:
            try:
                item, error = items.get(timeout=_PATIENCE)
            except queue.Empty:
                lost = _release(mine) or lost
                continue
            if error is not None:
                if lost or "terminated unexpectedly with exit code -" in str(error):
                    mend = "Run the same command again, with fewer of them or a lower data.prefetch if memory was short"
                    raise TryAgainError(
                        f"data.workers={workers}: a worker process was killed. {mend}."
                    ) from error
                raise error
            if not item:
                return
            if first:
                mine, first = {*multiprocessing.active_children()} - others, False
            yield item[0]
    finally:
        left.set()
        while reader.is_alive():
            _release(mine)
            with contextlib.suppress(queue.Empty):
                items.get(timeout=0.01)


def _release(workers: set[Any]) -> bool:
    """Let what waits for workers that were killed see the end of their pipes, and grain forget
    them; whether there are any."""
    if killed := {worker for worker in workers if (worker.exitcode or 0) < 0}:
        for each in gc.get_objects():  # grain gives nobody its iterators
            if (
                type(each).__name__ == "ProcessPrefetchDatasetIterator"
                and each._prefetch_process in killed
            ):
                each._prefetch_process = None  # to close it would be to read its pipe, too
                each._buffer._writer.close()
        workers -= killed
    return bool(killed)
