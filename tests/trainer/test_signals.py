"""Stopping: the first signal asks, the second one ends the process, and afterwards everything is as
it was."""

import contextlib
import itertools
import json
import os
import pty
import random
import re
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import jax
import pytest
import yaml

from data_pipeline.base.errors import end_at_signals, end_by_signal
from data_pipeline.prepare import command as prepare
from maxtrain import failpoints
from maxtrain.checkpoint.listing import saved_digests, saved_steps
from maxtrain.config import load_config
from maxtrain.observe.anomaly import Finding
from maxtrain.observe.metrics import read_metrics
from maxtrain.trainer import signals
from maxtrain.trainer.loop import main
from maxtrain.trainer.run import Run
from maxtrain.trainer.signals import StopRequest
from tests.support.shared import TINY_MODEL

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def hangup_is_not_ignored():
    """Do not ignore the hangup signal, as if no `nohup` started the tests."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", StopRequest.SIGNALS, ids=lambda n: n.name)
def test_the_first_signal_asks_and_handlers_are_put_back(number):
    before = {n: signal.getsignal(n) for n in StopRequest.SIGNALS}
    with StopRequest() as stop:
        stop.save_first(str)
        assert (
            not stop.name
            and stop.agreed() == (False, False)
            and stop.agreed(save=True) == (False, True)
        )
        os.kill(os.getpid(), number)
        assert stop.name == number.name and stop.agreed() == (True, False), (
            "alone, nobody else must be asked"
        )
    assert {n: signal.getsignal(n) for n in StopRequest.SIGNALS} == before and signal.set_wakeup_fd(
        -1
    ) == -1


@pytest.mark.every_dose
@pytest.mark.long
@pytest.mark.parametrize("ends_process", [False, True])
def test_a_process_that_goes_on_after_the_run_is_left_alone(monkeypatch, ends_process):
    """A program that calls `train.main` itself was killed later, when the time to save after the
    signal was over."""
    ended = threading.Event()
    for_ever = threading.Event()
    monkeypatch.setattr(
        StopRequest, "_end", staticmethod(lambda code, text: ended.set() or for_ever.wait())
    )
    with StopRequest(0.5, ends_process) as stop:
        stop.save_first(str)
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop.name == "SIGTERM"
    assert ended.wait(1.5) == ends_process


def test_where_it_interrupts_a_signal_raises_even_if_it_came_before():
    with StopRequest() as stop:
        stop.save_first(str)
        with pytest.raises(KeyboardInterrupt), stop.interrupting():
            os.kill(os.getpid(), signal.SIGTERM)
            pytest.fail("not interrupted")
        with pytest.raises(KeyboardInterrupt), stop.interrupting():
            pytest.fail("not interrupted")


def test_handlers_are_put_back_after_an_error():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(OSError), StopRequest():
        raise OSError
    assert signal.getsignal(signal.SIGINT) is before


def test_a_hangup_that_is_ignored_stays_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    before = {n: signal.getsignal(n) for n in StopRequest.SIGNALS}
    try:
        end_at_signals()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.name
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)


def test_in_another_thread_signals_are_left_alone():
    seen = []

    def work():
        with StopRequest() as stop:
            seen.append((signal.getsignal(signal.SIGINT), stop.agreed()[0]))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(before, False)] and signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    "others, expected", [([False, False], False), ([False, True], True), ([True, True], True)]
)
def test_processes_ask_each_other_every_few_seconds_as_process_0_says(
    monkeypatch, others, expected
):
    now, asked = [100.0], []

    def gathered(values, size):
        assert len(json.dumps(values)) <= size
        asked.append(now[0])
        mine = {"stop": others[0], "save": expected, "calls": 5 if len(asked) > 1 else 2}
        return [mine, {"stop": others[1], "save": True, "calls": 7}]

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(signals, "gather", gathered)
    monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])
    stop, answers = StopRequest(), []
    for _ in range(9):
        now[0] += 1
        answers.append(stop.agreed())
    assert asked == [101, 103, 108] and answers == [
        (bool(expected and now in (0, 2, 7)),) * 2 for now in range(9)
    ]


def test_how_often_processes_ask_follows_how_long_that_takes(monkeypatch):
    now, said = [0.0], []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(
        signals, "gather", lambda values, size: said.append((now[0], values["calls"])) or [values]
    )
    monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])
    stop = StopRequest()
    for seconds in [0.01] * 1500 + [10.0] * 400:
        now[0] += seconds
        stop.agreed()
    gaps = [after - before for (before, _), (after, _) in itertools.pairwise(said)]
    quick = [gap for (start, _), gap in zip(said, gaps) if 1 < start + gap < 15]
    assert (
        all(gap == pytest.approx(3, abs=0.7) for gap in quick[1:])
        and said[-1][1] == 1
        and gaps[-1] == 10
    )


PROGRAM = """
    import ctypes, sys
    from maxtrain.trainer.signals import StopRequest
    with StopRequest(float(sys.argv[1])) as stop:
        if sys.argv[2] == "steps":
            stop.save_first(lambda: "save")
        print("ready", flush=True)
        lock, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
        for _ in range(2):  # as a compiler: no instruction of Python's any more
            libc.pthread_mutex_lock(lock)
"""


@pytest.mark.every_dose
@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize(
    ("grace", "phase", "sent", "code", "said"),
    [
        (
            300,
            "steps",
            [signal.SIGTERM, signal.SIGINT],
            130,
            "SIGTERM, then SIGINT: ended at once. Run the same command",
        ),
        (
            0,
            "start",
            [signal.SIGINT],
            75,
            "SIGINT: nothing is left to save. Run the same command again",
        ),
        (
            300,
            "steps",
            [signal.SIGHUP, signal.SIGTERM, signal.SIGHUP, signal.SIGTERM],
            143,
            "SIGTERM, then SIGTERM: ended at once. Run the same command",
        ),
        (
            1.5,
            "steps",
            [signal.SIGHUP, signal.SIGHUP],
            75,
            "SIGHUP: checkpoint.grace_seconds=1.5 are over, in: save. The last whole checkpoint",
        ),
        (
            0.5,
            "steps",
            [signal.SIGTERM],
            75,
            "SIGTERM: checkpoint.grace_seconds=0.5 are over, in: save. The last whole checkpoint",
        ),
    ],
)
def test_a_process_ends_even_if_python_does_not_get_to_it(grace, phase, sent, code, said):
    words = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(grace), phase]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, cwd=ROOT, **pipes) as process:
        try:
            assert process.stdout and process.stdout.readline() == "ready\n"
            for number in sent:
                time.sleep(0.3)
                process.send_signal(number)
            err = process.communicate(timeout=60)[1]
        finally:
            process.kill()
    assert process.returncode == code and said in err


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("number", StopRequest.SIGNALS, ids=lambda n: n.name)
@pytest.mark.parametrize(
    "command",
    [["-m", "maxtrain.train"], ["-m", "maxtrain.cli", "train"]],
    ids=lambda words: words[1],
)
def test_while_it_is_imported_a_signal_ends_it_without_a_traceback(config, command, number):
    words = [sys.executable, "-X", "importtime", *command, f"config={config}"]
    with subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr
            assert any(line.split()[-1] == "jax.version" for line in process.stderr), (
                "the first of jax's modules"
            )
            process.send_signal(number)
            lines = process.communicate(timeout=60)[1].splitlines()
        finally:
            process.kill()
    said = [line for line in lines if not line.startswith("import time:")]
    assert (process.returncode, said) == (
        75,
        [f"{number.name}: nothing is left to save. Run the same command again."],
    )


# Makes standard input the terminal of this session, and becomes another program.
IN_TERMINAL = """
    import fcntl, os, signal, sys, termios
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGHUP, signal.SIG_IGN if sys.argv[1] == "nohup" else signal.SIG_DFL)
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("kind", ["terminal", "nohup"])
def test_a_run_saves_when_its_terminal_is_closed(config, kind):
    """The kernel sends SIGHUP to all processes of the terminal, also to those that read data, and
    each write to the terminal fails from then on. nohup writes to a file."""
    folder = config.parent / "runs" / kind
    steps = 20 if kind == "nohup" else 1_000_000
    words = [sys.executable, "-c", textwrap.dedent(IN_TERMINAL), kind]
    words += ["-m", "maxtrain.train", f"config={config}", "observe.progress=rich"]
    words += [f"run_name={kind}", f"steps={steps}", "data.workers=1"]
    ours, theirs = pty.openpty()
    with (
        (config.parent / f"{kind}.txt").open("wb") as file,
        subprocess.Popen(
            words,
            cwd=ROOT,
            stdin=theirs,
            stdout=file if kind == "nohup" else theirs,
            stderr=file if kind == "nohup" else theirs,
            start_new_session=True,
        ) as process,
    ):
        os.close(theirs)
        try:
            deadline = time.monotonic() + 240
            while not (folder / "metrics.jsonl").exists() or not read_metrics(folder):
                assert process.poll() is None and time.monotonic() < deadline
                # Otherwise the run waits until somebody reads what it has written.
                while select.select([ours], [], [], 0.1)[0]:
                    os.read(ours, 1 << 16)
            os.close(ours)
            code = process.wait(timeout=240)
        finally:
            process.kill()
    saved = sorted(saved_steps(folder / "checkpoints"))
    assert code == (0 if kind == "nohup" else 75)
    assert saved == [20] if kind == "nohup" else len(saved) == 1


@pytest.mark.long
@pytest.mark.processes
def test_a_run_saves_when_the_program_that_reads_its_output_is_hung_up_too(config):
    """The reader may be `tee`: the run gets its signal first, and prints a line for each step."""
    folder = config.parent / "runs" / "piped"
    words = [sys.executable, "-m", "maxtrain.train", f"config={config}", "run_name=piped"]
    words += ["observe.progress=plain", "log_interval=1", "steps=1000000"]
    with subprocess.Popen(
        words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            assert process.stdout
            assert any(line.startswith("step 3") for line in process.stdout)
            process.send_signal(signal.SIGHUP)
            process.stdout.close()
            code = process.wait(timeout=240)
        finally:
            process.kill()
    assert code == 75 and len(saved_steps(folder / "checkpoints")) == 1


@pytest.mark.parametrize("stderr", ["closed", "full", "none"])
def test_where_nobody_reads_stderr_a_signal_ends_it_before_it_has_begun(stderr):
    program = "from data_pipeline.base.errors import end_at_signals\nend_at_signals(); import os, signal; "
    program += (
        "os.close(2); " if stderr == "none" else ""
    ) + "\ntry: signal.raise_signal(15)\nexcept OSError: pass"
    reader, writer = os.pipe()
    if stderr == "full":
        os.set_blocking(writer, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, bytes(4096))
        os.set_blocking(writer, True)
    if stderr == "closed":
        os.close(reader)
    process = subprocess.run([sys.executable, "-c", program], cwd=ROOT, stderr=writer, timeout=60)
    assert process.returncode == 75


def test_the_end_of_imports_by_a_signal_is_over_with_the_run():
    before = {n: signal.getsignal(n) for n in StopRequest.SIGNALS}
    try:
        end_at_signals()
        with StopRequest():
            assert end_by_signal not in {signal.getsignal(n) for n in StopRequest.SIGNALS}
        assert {signal.getsignal(n) for n in StopRequest.SIGNALS} == {signal.SIG_DFL}
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """9 steps of a tiny model, evaluated every 3 on two sets; no checkpoint but where it stops."""
    folder, rng = tmp_path_factory.mktemp("signals"), random.Random(0)
    for name in ("data", "a", "b"):
        (folder / f"{name}.txt").write_text(
            " ".join(rng.choices(["the", "of", "and", "to", "in"], k=500))
        )
        words = [
            str(folder / name),
            "--text",
            str(folder / f"{name}.txt"),
            "--workers",
            "1",
            "--tokenizer",
            "bytes",
        ]
        assert prepare.main(words) == 0
    values = {
        "output_dir": str(folder / "runs"),
        "steps": 9,
        "log_interval": 2,
        "eval_interval": 3,
        "checkpoint_interval": 0,
        "checkpoint": {"grace_seconds": 0, "keep_best": True},
        "model": TINY_MODEL,
        "data": {
            "sources": {"text": {"path": str(folder / "data"), "epochs": None}},
            "seq_length": 32,
            "batch_size": 8,
        },
        "eval": {"sets": {name: {"path": str(folder / name)} for name in ("a", "b")}},
        "loss": {"by_source": True},
        "schedule": {"warmup_steps": 2},
        "precision": {"compute": "float32"},
        "observe": {
            "progress": "off",
            "trackers": [],
            "plot": False,
            "peak_tflops": 1.0,
            "compilation_cache": None,
        },
    }
    (folder / "tiny.yaml").write_text(yaml.safe_dump(values))
    return folder / "tiny.yaml"


def train(config, monkeypatch, run_name, faults):
    """Exit code and folder of a run in this process."""
    monkeypatch.setenv(failpoints.VARIABLE, faults)
    code = main(load_config([f"config={config}", f"run_name={run_name}"]))
    failpoints._armed.clear()
    return code, config.parent / "runs" / run_name


def numbers(folder):
    """Return the numbers that do not depend on the clock."""
    return [
        {k: v for k, v in r.items() if not re.search("second|mfu|_bytes", k)}
        for r in read_metrics(folder)
    ]


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "saved", "left"),
    [
        ("data:term:5", 4, []),
        ("before_step:term:6", 6, ["a", "b"]),
        ("eval:term:9", 9, ["a", "b"]),
    ],
)
@pytest.mark.usefixtures("this_process")
def test_stopped_anywhere_and_started_again_is_as_never_stopped(
    config, monkeypatch, capsys, fault, saved, left
):
    undisturbed = config.parent / "runs" / "undisturbed"
    assert undisturbed.exists() or train(config, monkeypatch, "undisturbed", "")[0] == 0
    name = fault.replace(":", "-")
    capsys.readouterr()
    code, folder = train(config, monkeypatch, name, fault)
    evaluation = f", before the evaluation of {', '.join(left)}" if left else ""
    said = f"SIGTERM: stopped and saved at step {saved} of 9{evaluation}. Run the same command again to go on.\n"
    assert code == 75 and said in capsys.readouterr().err
    ((_, record),) = saved_steps(folder / "checkpoints").values()
    assert (record["step"], record["unevaluated"]) == (saved, left)
    for _ in range(2 if saved == 9 else 1):  # the second time, nothing is left to do
        assert train(config, monkeypatch, name, "")[0] == 0
        assert numbers(folder) == numbers(undisturbed)
    ours, theirs = (saved_digests(path / "checkpoints")[9] for path in (folder, undisturbed))
    assert ours == theirs


@pytest.mark.long
@pytest.mark.usefixtures("this_process")
def test_taken_back_to_before_an_evaluation_it_is_on_record_once(config, monkeypatch):
    code, folder = train(config, monkeypatch, "back", "before_step:term:6")
    assert code == 75 and not [r for r in numbers(folder) if r["kind"] == "eval" and r["step"] == 6]
    look, found = Run.look, [Finding(8, "loss_limit", "skip", "step 8: as if", "Mend it")]
    monkeypatch.setattr(
        Run, "look", lambda *given: look(*given) or (found.pop() if found else None)
    )
    assert train(config, monkeypatch, "back", "")[0] == 0 and not found
    assert [r["set"] for r in numbers(folder) if r["kind"] == "eval" and r["step"] == 6] == [
        "a",
        "b",
    ]
    assert [r["step"] for r in saved_steps(folder / "checkpoints")[9][1]["rollbacks"]] == [8]
