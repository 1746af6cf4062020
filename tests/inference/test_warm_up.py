"""Programs are compiled before the requests that need them come."""

import functools
import inspect
import queue
import threading

import jax
import pytest

from data_pipeline.tokenizer import ByteTokenizer
from maxtrain.commands.serve.worker import EngineWorker, TextJob
from maxtrain.inference import programs
from maxtrain.inference.engine import Engine
from maxtrain.inference.sampling import Sampling
from maxtrain.inference.warm_up import first_warm_ups, more_warm_ups
from tests.inference.test_engine import tiny

STOP_IDS = (2, 3)


@pytest.fixture
def compiled(monkeypatch):
    """Counts how often each program is compiled."""
    counts = {"read_into": 0, "decode": 0, "new_caches": 0, "enlarge": 0}

    def counting(name, function):
        def traced(*arguments):
            counts[name] += 1
            return function(*arguments)

        return traced

    for name, static in (
        ("read_into", (0, 1, 2, 3)),
        ("decode", (0, 1, 2, 3)),
        ("new_caches", (0, 1)),
        ("enlarge", (0, 1)),
    ):
        function = counting(name, inspect.unwrap(getattr(programs, name)))
        monkeypatch.setattr(programs, name, jax.jit(function, static_argnums=static))
    return counts


@pytest.mark.long
@pytest.mark.every_dose
@pytest.mark.parametrize("cache_tokens", [None, 1024])
def test_ordinary_requests_find_their_programs(compiled, cache_tokens):
    engine = Engine(tiny(), slots=2, chunk=4, piece=64, cache_tokens=cache_tokens)
    submit = functools.partial(engine.submit, max_tokens=6, stop_ids=STOP_IDS)
    for warm_up in first_warm_ups(engine, STOP_IDS):
        warm_up()
    before = dict(compiled)
    for kind in (Sampling(0.0), Sampling(0.7, min_p=0.0), Sampling(1.3)):
        submit([7] * 14, sampling=kind)
        engine.run()
    assert compiled == before, "the first requests waited"
    for warm_up in more_warm_ups(engine, STOP_IDS):
        warm_up()
    assert engine.num_active == engine.num_waiting == 0
    before = dict(compiled)
    for number, kind in enumerate(
        (
            Sampling(0.0),
            Sampling(0.7, top_p=0.9),
            Sampling(0.0, top_logprobs=5),
            Sampling(0.0, logit_bias=((5, 3.0),)),
            Sampling(1.0, logit_bias=((5, 3.0),)),
        )
    ):
        submit([20 + number] * 16, sampling=kind)
        engine.run()
    for number, length in enumerate((33, 60, 100, 130)):
        text = submit([40 + number] * length, sampling=Sampling(0.0))
        engine.run()
        submit([*text.prompt, *text.ids, *[8] * 20], sampling=Sampling(0.0))
        engine.run()
    for number in range(2):
        submit([60 + number] * 30, sampling=Sampling(1.0))
    engine.run()
    unpaged = cache_tokens is None
    assert compiled == before or not unpaged
    # With pages, only what several texts of different sizes need together is left.
    assert sum(compiled.values()) - sum(before.values()) <= 8


@pytest.mark.parametrize("max_length", [1, 8, 18])
def test_a_model_of_short_texts_has_no_warm_ups(max_length):
    engine = Engine(tiny(max_length=max_length), slots=1, chunk=2, piece=64)
    warm_ups = [*first_warm_ups(engine, STOP_IDS), *more_warm_ups(engine, STOP_IDS)]
    for warm_up in warm_ups:
        warm_up()
    assert not warm_ups and engine.num_active == engine.num_waiting == 0


class Idle:
    """An engine without texts."""

    num_active = 0


def test_a_worker_warms_up_while_it_has_nothing_else_to_do():
    begun = threading.Event()
    go_on = threading.Event()
    order = []

    def first():
        begun.set()
        go_on.wait(60)
        order.append("first")

    def second():
        order.append("second")

    told = queue.Queue()
    worker = EngineWorker(Idle, ByteTokenizer(), lambda engine: [first, second])
    worker.start()
    assert begun.wait(60) and worker.num_warm_ups == 1
    # A job that the engine does not take fails at once, but comes before the next warm-up.
    job = TextJob(
        [1], 1, Sampling(), 0, 0, (), (), lambda part: (order.append("job"), told.put(part))
    )
    worker.submit([job])
    go_on.set()
    assert told.get(timeout=60).reason == "failed"
    worker.end()
    assert order[:2] == ["first", "job"]


def test_a_warm_up_that_fails_ends_all_of_them(capsys):
    done = []
    worker = EngineWorker(
        Idle, ByteTokenizer(), lambda engine: [lambda: 1 / 0, lambda: done.append(1)]
    )
    worker.start()
    worker.end()
    assert not done and worker.num_warm_ups == 0
    assert "ZeroDivisionError" in capsys.readouterr().err
