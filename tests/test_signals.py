"""Stopping: the first signal asks, the second one ends the process, and afterwards everything is as it was."""

import os
import signal
import subprocess
import sys
import textwrap
import threading

import jax
import pytest

from maxtrain import signals
from maxtrain.signals import StopRequest


@pytest.mark.parametrize("number", StopRequest.SIGNALS, ids=lambda n: n.name)
def test_the_first_signal_asks_and_handlers_are_put_back(number):
    before = {n: signal.getsignal(n) for n in StopRequest.SIGNALS}
    with StopRequest() as stop:
        assert not stop.name and stop.agreed(True) == (False, False) and stop.agreed(False, save=True) == (False, True)
        os.kill(os.getpid(), number)
        assert stop.name == number.name
        assert stop.agreed(False) == stop.agreed(True) == (True, False)  # alone, nobody else must be asked
    assert {n: signal.getsignal(n) for n in StopRequest.SIGNALS} == before


def test_handlers_are_put_back_after_an_error():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(OSError), StopRequest():
        raise OSError
    assert signal.getsignal(signal.SIGINT) is before


def test_in_another_thread_signals_are_left_alone():
    seen = []

    def work():
        with StopRequest() as stop:
            seen.append((signal.getsignal(signal.SIGINT), stop.agreed(True)[0]))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(before, False)] and signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("others, expected", [([False, False], False), ([False, True], True), ([True, True], True)])
def test_processes_agree_where_all_of_them_are_and_nowhere_else(monkeypatch, others, expected):
    asked = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    said = [{"stop": other, "save": save} for other, save in zip(others, (others[1], True))]
    monkeypatch.setattr(signals, "gather", lambda values, size: asked.append(values["stop"]) or said)
    with StopRequest() as stop:
        stop.name = "SIGTERM" if others[0] else ""
        assert stop.agreed(False, save=True) == (False, False) and not asked
        assert stop.agreed(True) == (expected, others[1]) and asked == [others[0]]  # process 0 alone says when to save


@pytest.mark.processes
def test_the_second_signal_ends_the_process_at_once():
    program = """
        import time
        from maxtrain.signals import StopRequest
        with StopRequest() as stop:
            print("ready", flush=True)
            while not stop.name:
                time.sleep(0.01)
            print(stop.name, flush=True)
            time.sleep(600)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGTERM)
            assert process.stdout.readline() == "SIGTERM\n"
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == -signal.SIGINT
        finally:
            process.kill()
