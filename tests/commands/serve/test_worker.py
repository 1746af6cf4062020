"""The engine's thread: what fails for one text fails for no other, and nobody waits for nothing."""

import queue
import time

import pytest

from data_pipeline.tokenizer import ByteTokenizer
from maxtrain.commands.serve.worker import EngineWorker, TextJob
from maxtrain.inference.engine import Engine
from maxtrain.inference.generation import Generation
from maxtrain.inference.sampling import Sampling

TEXT = b"one two three four five six"


class ScriptedEngine(Engine):
    """Gives every text four more tokens of TEXT at each step, beginning at its seed."""

    num_active = 0

    def __init__(self, errors=()):
        self.generations = []
        # What the next steps raise.
        self.errors = list(errors)

    def submit(self, prompt, max_tokens, sampling, *, seed, row, stop_ids, stop, adapter, **_):
        generation = Generation(
            tuple(prompt), max_tokens, sampling, seed, row, 0, (), tuple(stop_ids), stop, adapter
        )
        self.generations.append(generation)
        return generation

    def cancel(self, generation):
        generation.reason = generation.reason or "cancelled"

    def step(self):
        if self.errors:
            error = self.errors.pop(0)
            if error is not None:
                raise error
        open_ = [generation for generation in self.generations if generation.reason is None]
        for generation in open_:
            made = generation.seed + len(generation.ids)
            new = list(TEXT[made : made + min(4, generation.max_tokens - len(generation.ids))])
            generation.take(new, [-1.0] * len(new), 1000)
        self.generations = [g for g in open_ if g.reason is None]
        return open_


class Told:
    """A job, and the parts of it that came."""

    def __init__(self, tell=None, **options):
        self.parts = queue.Queue()
        settings = {"prompt": [65], "max_tokens": 10, "stop": ()} | options
        self.job = TextJob(
            settings["prompt"],
            settings["max_tokens"],
            Sampling(),
            0,
            0,
            (),
            settings["stop"],
            tell or self.parts.put,
            find_end=settings.get("find_end"),
        )

    def wait(self):
        """Text, tokens and reason of all parts until the last."""
        text = ""
        tokens = []
        while True:
            part = self.parts.get(timeout=60)
            text += part.text
            tokens += part.tokens
            if part.reason is not None:
                return text, tokens, part.reason


class PartlyBroken(ByteTokenizer):
    """Can't decode texts after the prompt [1]."""

    def decode(self, ids):
        ids = list(ids)
        if ids[:1] == [1] and len(ids) > 1:
            raise RuntimeError("these ids have no text")
        return super().decode(ids)


@pytest.fixture
def begin():
    """Makes workers, and ends them."""
    workers = []

    def make(engine, tokenizer=None):
        worker = EngineWorker(lambda: engine, tokenizer or ByteTokenizer())
        worker.start()
        workers.append(worker)
        return worker

    yield make
    for worker in workers:
        worker.end()
        assert not worker.is_alive


def test_a_text_is_told_as_it_comes(begin):
    told = Told()
    begin(ScriptedEngine()).submit([told.job])
    text, tokens, reason = told.wait()
    assert text == "one two th" and reason == "length"
    assert [token.id for token in tokens] == list(TEXT[:10])
    assert [token.offset for token in tokens] == list(range(10))


@pytest.mark.parametrize("stop", ["two", "o three", " "])
def test_tokens_of_a_stop_text_and_behind_it_are_not_told(begin, stop):
    told = Told(stop=[stop], max_tokens=20)
    begin(ScriptedEngine()).submit([told.job])
    text, tokens, reason = told.wait()
    assert text == TEXT.decode().partition(stop)[0]
    assert len(tokens) == len(text) and reason == "stop"


@pytest.mark.parametrize("stop", [(), ["never"], ["four"]])
def test_a_text_ends_where_its_end_is_found(begin, stop):
    seen = []

    def find_end(text):
        before = len("".join(seen))
        seen.append(text)
        whole = "".join(seen)
        return None if "three" not in whole else whole.index("three") + 5 - before

    told = Told(find_end=find_end, stop=stop, max_tokens=25)
    begin(ScriptedEngine()).submit([told.job])
    text, tokens, reason = told.wait()
    assert (text, reason) == ("one two three", "stop")
    assert [token.id for token in tokens] == list(b"one two three")


@pytest.mark.parametrize("stop", [(), ["never"]])
def test_a_text_that_can_not_be_decoded_fails_alone(begin, stop, capsys):
    """Covers engines with and without stop texts."""
    good = Told(stop=stop)
    bad = Told(stop=stop, prompt=[1])
    worker = begin(ScriptedEngine(), PartlyBroken())
    worker.submit([bad.job, good.job])
    assert bad.wait()[2] == "failed"
    assert good.wait()[2] == "length"
    later = Told(stop=stop)
    worker.submit([later.job])
    assert later.wait()[0] == "one two th"
    assert worker.num_failures == 0
    assert "these ids have no text" in capsys.readouterr().err


def test_a_client_that_can_not_be_told_is_no_other_client_s_problem(begin, capsys):
    def fail(part):
        raise RuntimeError("nobody listens")

    good = Told()
    worker = begin(ScriptedEngine())
    worker.submit([Told(tell=fail).job, good.job])
    assert good.wait()[2] == "length"
    assert worker.is_alive
    worker.end()
    assert "nobody listens" in capsys.readouterr().err


def test_whoever_waits_is_told_when_the_thread_ends(begin, capsys):
    first = Told()
    second = Told()
    cancelled = Told()
    engine = ScriptedEngine()
    worker = begin(engine)

    def step():
        # By now the first is on its way; the others are only wished for.
        worker.submit([second.job])
        worker.submit([cancelled.job])
        worker.cancel([cancelled.job])
        raise SystemExit("the device is gone")

    engine.step = step
    worker.submit([first.job])
    assert first.wait()[2] == "failed"
    assert second.wait()[2] == "failed"
    assert cancelled.parts.empty()
    assert not worker.is_alive
    assert worker.problem == "SystemExit: the device is gone"
    later = Told()
    worker.submit([later.job])
    assert later.wait()[2] == "failed"
    worker.end()
    assert "the device is gone" in capsys.readouterr().err


def test_a_step_that_fails_and_ends_nothing_is_not_tried_for_ever(begin, capsys):
    engine = ScriptedEngine([RuntimeError("no memory"), RuntimeError("no memory"), None])
    worker = begin(engine)
    for failures in (1, 2):
        told = Told()
        worker.submit([told.job])
        assert told.wait()[2] == "failed"
        assert worker.num_failures == worker.failures_in_a_row == failures
        assert worker.problem == "RuntimeError: no memory"
    told = Told()
    worker.submit([told.job])
    assert told.wait()[2] == "length"
    assert worker.failures_in_a_row == 0 and worker.problem is None
    assert worker.num_failures == 2
    assert "no memory" in capsys.readouterr().err


def test_what_is_cancelled_is_told_no_more(begin):
    told = Told(max_tokens=1000)
    engine = ScriptedEngine()
    worker = begin(engine)
    script = engine.step

    def slow_step():
        time.sleep(0.01)
        return script()

    engine.step = slow_step
    worker.submit([told.job])
    told.parts.get(timeout=60)
    worker.cancel([told.job])
    other = Told()
    worker.submit([other.job])
    assert other.wait()[2] == "length"
    assert all(part.reason is None for part in list(told.parts.queue))
