"""Worker processes of a stream, watched: grain waits for ever for one that is killed while it writes a batch into its pipe,
for the reader has the pipe's other end open, too."""

import contextlib
import multiprocessing
import queue
import threading
from collections.abc import Iterator

from data_pipeline.errors import TryAgainError

_PATIENCE = 5.0  # seconds without a batch after which is looked whether all workers are there


def watched[T](stream: Iterator[T], workers: int) -> Iterator[T]:
    """The items of a stream that starts so many processes when it is first read; it is read in a thread of its own.

    TryAgainError: one was killed. The stream must not be touched any more then: its reader may still wait.
    """
    others, mine = {*multiprocessing.active_children()}, set()
    items: queue.Queue[tuple[list[T], Exception | None]] = queue.Queue(1)
    left = threading.Event()

    def read() -> None:
        try:
            for item in stream:
                items.put(([item], None))
                if left.is_set():
                    return
            items.put(([], None))
        except Exception as error:
            items.put(([], error))

    def killed() -> bool:
        return any((worker.exitcode or 0) < 0 for worker in mine)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        while True:
            try:
                item, error = items.get(timeout=_PATIENCE)
            except queue.Empty:
                if killed():
                    raise _lost(workers) from None
                continue
            if error is not None:
                raise _lost(workers) if killed() or "terminated unexpectedly with exit code -" in str(error) else error
            if not item:
                return
            mine = mine or {*multiprocessing.active_children()} - others
            yield item[0]
    finally:
        left.set()
        while reader.is_alive() and not killed():
            with contextlib.suppress(queue.Empty):
                items.get(timeout=0.01)
        for worker in mine if killed() else ():
            worker.kill()


def _lost(workers: int) -> TryAgainError:
    mend = "Run the same command again, with fewer of them or a lower data.prefetch if memory was short"
    return TryAgainError(f"data.workers={workers}: a worker process was killed. {mend}.")
