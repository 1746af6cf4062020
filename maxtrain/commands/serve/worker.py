"""The thread that has the engine, and what it hears from others.

Clients come and go in threads of their own; the engine is for one. What they want is put into a
queue, and what comes of it is handed to a function of theirs, which must not take long.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from data_pipeline.tokenizer import Tokenizer
from maxtrain.commands.serve.request_error import log_exception
from maxtrain.inference.engine import Engine
from maxtrain.inference.generation import Alternatives, Constraint, Generation, Reason
from maxtrain.inference.sampling import Sampling
from maxtrain.inference.text import OutputToken, TextStream

# Longer than a step of the engine takes.
_END_SECONDS = 60


class TextChunk(NamedTuple):
    """New part of a text.

    Args:
        text: whole characters; empty where a stop text may have begun.
        tokens: new ones, of which `text` and the parts before are the text: none of a stop text.
        reason: why the text has ended; None: it goes on.
        prompt: the tokens of the prompt but the first, in the first part of a text whose prompt
            is scored.
    """

    text: str
    tokens: list[OutputToken]
    reason: Reason | None
    prompt: Sequence[tuple[float, Alternatives]] = ()


_FAILED = TextChunk("", [], "failed")


class _JobRequest(NamedTuple):
    """Request of a client for some texts.

    Args:
        jobs: the texts.
        is_wanted: they are to be made; False: they are not wanted any more.
    """

    jobs: Sequence["TextJob"]
    is_wanted: bool


class TextJob:
    """One text that a client wants.

    Args:
        prompt, max_tokens, sampling, seed, row, stop_ids, adapter: as of `Generation`.
        stop: texts that it ends before.
        tell: gets each part, in the engine's thread; the last one has a reason.
        constraint, scores_prompt: as of `Generation`.
        tokenizer: that decodes the text; None: the worker's.
        find_end: as of `TextStream`.
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
        tell: Callable[[TextChunk], object],
        adapter: int = 0,
        constraint: Constraint | None = None,
        scores_prompt: bool = False,
        tokenizer: Tokenizer | None = None,
        find_end: Callable[[str], int | None] | None = None,
    ):
        self.constraint = constraint
        self.find_end = find_end
        self.scores_prompt = scores_prompt
        self.tokenizer = tokenizer
        self.prompt = prompt
        self.max_tokens = max_tokens
        self.sampling = sampling
        self.seed = seed
        self.row = row
        self.stop_ids = stop_ids
        self.stop = stop
        self.tell = tell
        self.adapter = adapter


class _RunningJob:
    """A job that the engine has."""

    def __init__(self, job: TextJob, engine: Engine, tokenizer: Tokenizer):
        self.job = job
        self._stream = TextStream(job.tokenizer or tokenizer, job.prompt, job.stop, job.find_end)
        self._has_told = False
        self._told = 0
        self._text = ""
        self._error: Exception | None = None
        stop = None
        if job.stop or job.find_end is not None:
            stop = self._is_over
        self.generation: Generation = engine.submit(
            job.prompt,
            job.max_tokens,
            job.sampling,
            seed=job.seed,
            row=job.row,
            stop_ids=job.stop_ids,
            stop=stop,
            adapter=job.adapter,
            constraint=job.constraint,
            scores_prompt=job.scores_prompt,
        )

    def _is_over(self, ids: list[int]) -> bool:
        """Return whether the ids of the text contain a stop text. An error waits for `tell`: raised
        here, it would end the engine's step, which is that of other texts, too.
        """
        try:
            self._read(ids)
        except Exception as error:
            self._error = error
            return True
        return self._stream.has_stopped

    def _read(self, ids: list[int]) -> None:
        self._text += self._stream.add(ids[self._stream.num_read :])

    def tell(self) -> None:
        """Send the new part of the text to the client.

        Raises:
            Exception: the text can't be decoded or sent.
        """
        if self._error is not None:
            raise self._error
        generation = self.generation
        self._read(generation.ids)
        text = self._text
        self._text = ""
        if generation.reason is not None:
            text += self._stream.finish()
        tokens = []
        for number in range(self._told, self._stream.num_given):
            token = OutputToken(
                generation.ids[number],
                generation.logprobs[number],
                self._stream.offset(number),
                generation.top[number] if generation.top else (),
            )
            tokens.append(token)
        self._told = self._stream.num_given
        prompt: Sequence[tuple[float, Alternatives]] = ()
        if self.job.scores_prompt and not self._has_told:
            prompt = list(zip(generation.prompt_logprobs, generation.prompt_top, strict=True))
        if text or tokens or prompt or generation.reason is not None:
            self._has_told = True
            self.job.tell(TextChunk(text, tokens, generation.reason, prompt))


class EngineWorker:
    """Runs the engine for as long as there is something to do.

    Args:
        make_engine: called in the worker's thread, in which the engine stays.
        tokenizer: of the model.
        warm_ups: list what compiles programs for later texts, given the engine. Each is called when
            there is nothing else to do.

    Attributes:
        num_failures: steps of the engine that have failed.
        failures_in_a_row: those since the last that did not.
        problem: why the last step failed, or why the thread has ended; None: neither did.
    """

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        tokenizer: Tokenizer,
        warm_ups: Callable[[Engine], Sequence[Callable[[], None]]] = lambda engine: (),
    ):
        self._make_engine = make_engine
        self._list_warm_ups = warm_ups
        self._warm_ups: deque[Callable[[], None]] = deque()
        self._tokenizer = tokenizer
        self._wishes: queue.SimpleQueue[_JobRequest | None] = queue.SimpleQueue()
        # Nothing may be wished once the thread has looked at its last wish.
        self._lock = threading.Lock()
        self._has_ended = False
        self._running: dict[Generation, _RunningJob] = {}
        self._of_job: dict[TextJob, _RunningJob] = {}
        self._engine: Engine | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._is_ready = threading.Event()
        self._no_engine: BaseException | None = None
        self.num_failures = 0
        self.failures_in_a_row = 0
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

    def submit(self, jobs: Sequence[TextJob]) -> None:
        """Texts that are wanted; from any thread. They fail at once if the thread has ended."""
        with self._lock:
            if not self._has_ended:
                self._wishes.put(_JobRequest(jobs, is_wanted=True))
                return
        for job in jobs:
            _report_failed(job)

    def cancel(self, jobs: Sequence[TextJob]) -> None:
        """Cancel texts that no client wants any more: no part of them is sent; from any thread."""
        self._wishes.put(_JobRequest(jobs, is_wanted=False))

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
    def num_warm_ups(self) -> int:
        """Warm-ups that are still to come."""
        return len(self._warm_ups)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and not self._has_ended

    def _run(self) -> None:
        try:
            self._engine = self._make_engine()
            self._warm_ups.extend(self._list_warm_ups(self._engine))
        except BaseException as error:
            self._no_engine = error
            return
        finally:
            self._is_ready.set()
        try:
            self._work()
        except BaseException as error:
            log_exception()
            self.problem = f"{type(error).__name__}: {error}"
        finally:
            self._give_up()

    def _work(self) -> None:
        """Run the engine until the end is requested."""
        while True:
            # With nothing to do, the next wish is waited for.
            while not self._running or not self._wishes.empty():
                if self._wishes.empty() and self._warm_ups:
                    self._warm_up()
                    continue
                wish = self._wishes.get()
                if wish is None:
                    return
                for job in wish.jobs:
                    if wish.is_wanted:
                        self._take(job)
                    else:
                        self._drop(job)
            self._step()

    def _warm_up(self) -> None:
        """Compile programs while there is nothing else to do. Requests do without after a failure,
        such as of memory."""
        try:
            self._warm_ups.popleft()()
        except Exception:
            log_exception()
            self._warm_ups.clear()

    def _give_up(self) -> None:
        """Send all waiting clients the end of their texts."""
        with self._lock:
            self._has_ended = True
        left = dict.fromkeys(self._of_job)
        while not self._wishes.empty():
            wish = self._wishes.get()
            if wish is None:
                continue
            for job in wish.jobs:
                if wish.is_wanted:
                    left[job] = None
                else:
                    left.pop(job, None)
        for job in left:
            _report_failed(job)

    def _take(self, job: TextJob) -> None:
        assert self._engine is not None
        try:
            running = _RunningJob(job, self._engine, self._tokenizer)
        except Exception:
            # The request had been checked before.
            log_exception()
            _report_failed(job)
            return
        self._running[running.generation] = running
        self._of_job[job] = running

    def _drop(self, job: TextJob) -> None:
        assert self._engine is not None
        running = self._of_job.get(job)
        if running is not None:
            self._forget(running)
            self._engine.cancel(running.generation)

    def _forget(self, running: _RunningJob) -> None:
        del self._running[running.generation]
        del self._of_job[running.job]

    def _fail(self, running: _RunningJob) -> None:
        """Ends one text, and no other."""
        self._drop(running.job)
        _report_failed(running.job)

    def _step(self) -> None:
        assert self._engine is not None
        try:
            changed = self._engine.step()
        except Exception as error:
            log_exception()
            changed = self._after_failure(error)
        else:
            self.failures_in_a_row = 0
            self.problem = None
        for generation in changed:
            running = self._running.get(generation)
            if running is None:
                continue
            try:
                running.tell()
            except Exception:
                log_exception()
                self._fail(running)
                continue
            if generation.reason is not None:
                self._forget(running)

    def _after_failure(self, error: Exception) -> list[Generation]:
        """Texts that have ended with a step that failed. What was on its way is lost, what waits
        may go well."""
        self.num_failures += 1
        self.failures_in_a_row += 1
        self.problem = f"{type(error).__name__}: {error}"
        ended = [generation for generation in self._running if generation.reason is not None]
        if not ended:
            # The next step would find what this one found, and so for ever.
            for running in list(self._running.values()):
                self._fail(running)
        return ended


def _report_failed(job: TextJob) -> None:
    try:
        job.tell(_FAILED)
    except Exception:
        log_exception()
