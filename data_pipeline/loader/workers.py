"""Notices when a worker process of a stream is killed.

grain by itself would wait for ever if a worker is killed while it writes a batch into its pipe: the
reader also holds the writing end of the pipe, so it never sees the pipe's end.
"""

import contextlib
import gc
import multiprocessing
import queue
import threading
from collections.abc import Iterator
from typing import Any

from data_pipeline.base.errors import TryAgainError

# Seconds without a batch after which it is checked whether all workers are alive.
_PATIENCE = 5.0


def watched[T](stream: Iterator[T], workers: int) -> Iterator[T]:
    """The items of a stream, which is read in a thread of its own.

    Args:
        stream: starts its worker processes when it is first read.
        workers: the number of worker processes, for the message.

    Raises:
        TryAgainError: a worker process was killed.
    """
    others = set(multiprocessing.active_children())
    own: set[Any] = set()
    # An item in a list, or an empty list at the end of the stream or with its error.
    items: queue.Queue[tuple[list[T], Exception | None]] = queue.Queue(1)
    closed = threading.Event()
    is_first = True
    was_killed = False

    def read() -> None:
        try:
            for item in stream:
                items.put(([item], None))
                if closed.is_set():
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
                if _release(own):
                    was_killed = True
                continue
            if error is not None:
                if was_killed or "terminated unexpectedly with exit code -" in str(error):
                    fix = "Run the same command again, with fewer of them or a lower data.prefetch"
                    raise TryAgainError(
                        f"data.workers={workers}: a worker process was killed. {fix} if memory "
                        "was short."
                    ) from error
                raise error
            if not item:
                return
            if is_first:
                own = set(multiprocessing.active_children()) - others
                is_first = False
            yield item[0]
    finally:
        closed.set()
        # The reader may wait for room in the queue, or for a worker that was killed.
        while reader.is_alive():
            _release(own)
            with contextlib.suppress(queue.Empty):
                items.get(timeout=0.01)


def _release(workers: set[Any]) -> bool:
    """Closes the pipes of workers that were killed, so that their readers see the end, makes grain
    forget them, and removes them from `workers`. Returns whether there were any."""
    killed = {worker for worker in workers if (worker.exitcode or 0) < 0}
    if not killed:
        return False
    # grain has no way to ask for its iterators.
    for each in gc.get_objects():
        if type(each).__name__ != "ProcessPrefetchDatasetIterator":
            continue
        if each._prefetch_process in killed:
            # Otherwise grain would read the pipe once more when it closes the iterator.
            each._prefetch_process = None
            each._buffer._writer.close()
    workers -= killed
    return True
