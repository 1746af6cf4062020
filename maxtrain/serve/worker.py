"""The thread that has the engine, and what it hears from others.

Clients come and go in threads of their own; the engine is for one. What they want is put into a
queue, and what comes of it is handed to a function of theirs, which must not take long.
"""

import queue
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple

from data_pipeline.errors import UserError
from data_pipeline.tokenizer import Tokenizer
from maxtrain.serve.engine import Engine
from maxtrain.serve.generation import Generation, Reason
from maxtrain.serve.sampling import Sampling
from maxtrain.serve.text import TextStream

# Longer than a step of the engine takes.
_END_SECONDS = 60


class Part(NamedTuple):
    """What is new of a text.

    Args:
        text: whole characters; empty where a stop text may have begun.
        ids, logprobs: of new tokens, which may be ahead of `text`.
        reason: why the text has ended; None: it goes on.
    """

    text: str
    ids: list[int]
    logprobs: list[float]
    reason: Reason | None


class Job:
    """One text that a client wants.

    Args:
        prompt, max_tokens, sampling, seed, row, stop_ids, adapter: as of `Generation`.
        stop: texts that it ends before.
        tell: gets each part, in the engine's thread; the last one has a reason.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        sampling: Sampling,
        seed: int,
        row: int,
        stop_ids: Sequence[int],
        stop: Sequence[str],
        tell: Callable[[Part], object],
        adapter: int = 0,
    ):
        self.prompt = prompt
        self.max_tokens = max_tokens
        self.sampling = sampling
        self.seed = seed
        self.row = row
        self.stop_ids = stop_ids
        self.stop = stop
        self.tell = tell
        self.adapter = adapter


class _Running:
    """A job that the engine has."""

    def __init__(self, job: Job, engine: Engine, tokenizer: Tokenizer):
        self.job = job
        self._stream = TextStream(tokenizer, job.prompt, job.stop)
        # Of the ids, in the stream; and of those, told.
        self._read = 0
        self._told = 0
        self._text = ""
        stop = None
        if job.stop:
            stop = self._has_stopped
        self.generation: Generation = engine.submit(
            job.prompt,
            job.max_tokens,
            job.sampling,
            seed=job.seed,
            row=job.row,
            stop_ids=job.stop_ids,
            stop=stop,
            adapter=job.adapter,
        )

    def _has_stopped(self, ids: list[int]) -> bool:
        self._text += self._stream.add(ids[self._read :])
        self._read = len(ids)
        return self._stream.has_stopped

    def tell(self) -> None:
        """What is new, to whoever wants it."""
        generation = self.generation
        self._has_stopped(generation.ids)
        text = self._text
        self._text = ""
        if generation.reason is not None:
            text += self._stream.finish()
        ids = generation.ids[self._told :]
        logprobs = generation.logprobs[self._told : self._told + len(ids)]
        self._told += len(ids)
        self.job.tell(Part(text, ids, logprobs, generation.reason))


class Worker:
    """Runs the engine for as long as there is something to do.

    Args:
        make_engine: called in the worker's thread, in which the engine stays.
        tokenizer: of the model.

    Attributes:
        problem: why the last step of the engine failed; None: it did not.
    """

    def __init__(self, make_engine: Callable[[], Engine], tokenizer: Tokenizer):
        self._make_engine = make_engine
        self._tokenizer = tokenizer
        self._wishes: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._running: dict[Generation, _Running] = {}
        self._of_job: dict[Job, _Running] = {}
        self._engine: Engine | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._is_ready = threading.Event()
        self._no_engine: BaseException | None = None
        self.problem: str | None = None

    def start(self) -> None:
        """Begins, and returns when there is an engine.

        Raises:
            BaseException: of `make_engine`.
        """
        self._thread.start()
        self._is_ready.wait()
        if self._no_engine is not None:
            raise self._no_engine

    def submit(self, jobs: Sequence[Job]) -> None:
        """Texts that are wanted; from any thread."""
        self._wishes.put(lambda: self._take(jobs))

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Texts that nobody wants any more: no part of them is told; from any thread."""
        self._wishes.put(lambda: self._drop(jobs))

    def end(self) -> None:
        """Gives up what is not done, and ends the thread."""
        self._wishes.put(None)
        self._thread.join(_END_SECONDS)

    @property
    def num_active(self) -> int:
        """Texts that are being made now."""
        if self._engine is None:
            return 0
        return self._engine.num_active

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._engine = self._make_engine()
        except BaseException as error:
            self._no_engine = error
            return
        finally:
            self._is_ready.set()
        while True:
            # With nothing to do, the next wish is waited for.
            while not self._running or not self._wishes.empty():
                wish = self._wishes.get()
                if wish is None:
                    return
                wish()
            self._step()

    def _take(self, jobs: Sequence[Job]) -> None:
        assert self._engine is not None
        for job in jobs:
            try:
                running = _Running(job, self._engine, self._tokenizer)
            except UserError:
                # What was asked for had been checked before.
                traceback.print_exc()
                job.tell(Part("", [], [], "failed"))
                continue
            self._running[running.generation] = running
            self._of_job[job] = running

    def _drop(self, jobs: Sequence[Job]) -> None:
        assert self._engine is not None
        for job in jobs:
            running = self._of_job.pop(job, None)
            if running is not None:
                self._engine.cancel(running.generation)
                del self._running[running.generation]

    def _step(self) -> None:
        assert self._engine is not None
        try:
            changed = self._engine.step()
            self.problem = None
        except Exception as error:
            # What was on its way is lost, what waits may go well.
            traceback.print_exc()
            self.problem = f"{type(error).__name__}: {error}"
            changed = [generation for generation in self._running if generation.reason is not None]
        for generation in changed:
            running = self._running.get(generation)
            if running is None:
                continue
            running.tell()
            if generation.reason is not None:
                del self._running[generation]
                del self._of_job[running.job]
