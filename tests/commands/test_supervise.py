"""Exits after which a run is restarted and those after which it is not, with commands that only
pretend to train; then real runs, killed at several places."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
import yaml

from data_pipeline.prepare import command as prepare
from maxtrain.checkpoint.listing import saved_digests
from maxtrain.commands import supervise
from maxtrain.commands.compare import compare_records
from maxtrain.commands.launch import processes
from maxtrain.observe.attempts import reached_step, read_attempts, saved_step
from maxtrain.observe.metrics import read_metrics
from tests.support.shared import TINY_MODEL

ROOT = Path(__file__).parents[2]
# Does what its attempt's word says: an exit code, or s9 to die by signal 9; +STEP is a step on
# record before that.
PRETEND = """
import os, pathlib, sys, time
folder, words = pathlib.Path(sys.argv[1]), sys.argv[2].split(",")
word = words[min(int(os.environ["MAXTRAIN_ATTEMPT"]), len(words)) - 1]
end, _, step = word.partition("+")
index = os.environ.get("JAX_PROCESS_ID", "0")
count, address = os.environ.get("JAX_NUM_PROCESSES"), os.environ.get("JAX_COORDINATOR_ADDRESS", "")
# In one write, so that no other process writes into the line.
sys.stdout.write(f"process {index} of {count} {address[:10]}\\n")
sys.stdout.flush()
if step:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "step": %s}\\n' % step)
if end == "wait" or end == "peer" and index == "0":
    time.sleep(600)
if end == "slot2":  # that one is broken for good; the others only see that it is gone
    end = "s9" if os.environ["MAXTRAIN_SLOT"] == "2" else "0" if os.environ["JAX_NUM_PROCESSES"] in sys.argv[3] else "75"
if end == "peer":
    end = "s9"
if end == "late":
    time.sleep(1.5 if index == "0" else 0)
    end = "0"
os.kill(os.getpid(), int(end[1:])) if end[0] == "s" else sys.exit(int(end))
"""


@pytest.fixture
def tiny(tmp_path):
    values = {
        "output_dir": str(tmp_path / "runs"),
        "data": {"sources": {"text": {"path": str(tmp_path / "data")}}},
    }
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(values))
    (tmp_path / "pretend.py").write_text(PRETEND)
    return tmp_path


def command(folder, does, *options):
    own = ["--backoff", "0", *options, "--"]
    return [
        *own,
        sys.executable,
        str(folder / "pretend.py"),
        str(folder / "runs" / "run"),
        does,
        "train",
        f"config={folder / 'tiny.yaml'}",
    ]


def attempts(folder):
    return [
        (a["reason"], a["from_step"], a["reached_step"])
        for a in read_attempts(folder / "runs" / "run")
    ]


@pytest.mark.parametrize("code", [0, 1, 64, 65, 70, 78])
def test_what_would_be_the_same_again_is_passed_on_at_once(tiny, code):
    assert supervise.main(command(tiny, str(code)), "supervise") == code
    assert attempts(tiny) == [(f"exit {code}", 0, 0)]


def test_what_may_go_better_is_tried_again_and_put_on_record(tiny, capfd):
    assert supervise.main(command(tiny, "75+3,74+5,s9+6,s6+9,137+11,0"), "supervise") == 0
    expected = ["exit 75", "exit 74", "SIGKILL", "SIGABRT", "SIGKILL", "exit 0"]
    steps = [0, 3, 5, 6, 9, 11, 11]
    assert attempts(tiny) == list(zip(expected, steps, steps[1:]))
    records = read_attempts(tiny / "runs" / "run")
    assert [r["attempt"] for r in records] == [1, 2, 3, 4, 5, 6] and records[-1][
        "lost_seconds"
    ] == 0
    assert all(r["lost_seconds"] == r["end"] - r["start"] > 0 for r in records[:-1]), (
        "nothing was saved"
    )
    assert "ended with SIGKILL at step 6; starts again in 0.0 s" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("does", "code", "last"),
    [("s9+4", 70, "SIGKILL"), ("74", 74, "exit 74"), ("75+4,75+5,75", 70, "exit 75")],
)
def test_a_crash_loop_ends_and_says_at_which_step(tiny, capfd, does, code, last):
    assert supervise.main(command(tiny, does, "--crash-loop", "2"), "supervise") == code
    furthest = reached_step(tiny / "runs" / "run")
    said = f"error: 2 attempts in a row ended with no step after {furthest} (--crash-loop 2); the last with {last}. See the log"
    assert said in capfd.readouterr().err
    assert len(attempts(tiny)) == {"s9+4": 3, "74": 2, "75+4,75+5,75": 4}[does]


def test_there_is_an_end_to_restarts(tiny, capfd):
    assert supervise.main(command(tiny, "75+1,75+2,75+3", "--max-restarts", "1"), "supervise") == 75
    assert (
        "--max-restarts 1: the last attempt ended with exit 75 at step 2. Run the same"
        in capfd.readouterr().err
    )


def test_waits_grow_while_no_step_is_made(tiny, monkeypatch):
    waits = []
    monkeypatch.setattr("threading.Event.wait", lambda event, seconds: waits.append(seconds))
    monkeypatch.setattr("random.uniform", lambda low, high: high)
    options = ["--crash-loop", "5", "--max-backoff", "20", "--backoff", "4"]
    assert supervise.main(command(tiny, "75+1,75,75,75,75+2,0", *options), "supervise") == 0
    assert waits == [4, 8, 16, 20, 4]


def test_the_processes_of_a_job_know_each_other_and_end_together(tiny, capfd, monkeypatch):
    monkeypatch.setattr(supervise, "_SETTLE", 0.3)
    started = time.monotonic()
    assert supervise.main(command(tiny, "peer+1,0", "--processes", "3"), "supervise") == 0
    assert time.monotonic() - started < 30 and attempts(tiny) == [
        ("SIGKILL", 0, 1),
        ("exit 0", 1, 1),
    ]
    assert sorted(capfd.readouterr().out.split("\n")[:-1]) == sorted(
        f"process {i} of 3 localhost:" for i in (0, 1, 2, 0, 1, 2)
    )


@pytest.mark.every_dose
@pytest.mark.long
def test_it_sleeps_while_some_processes_have_ended_and_others_run(tiny, monkeypatch):
    looks = []
    real = subprocess.Popen.poll

    def poll(child):
        looks.append(child.pid)
        return real(child)

    monkeypatch.setattr(subprocess.Popen, "poll", poll)
    started = time.monotonic()
    assert supervise.main(command(tiny, "late", "--processes", "2"), "supervise") == 0
    seconds = time.monotonic() - started
    assert seconds > 1.5 and len(looks) <= 2 * (seconds / processes.POLL + 2)


@pytest.mark.every_dose
@pytest.mark.long
@pytest.mark.parametrize(
    ("overrides", "least", "ended", "said"),
    [
        (
            (),
            3,
            [4, 4, 3],
            "process 2 is lost; goes on with 3 of 4 processes, optimizer.accumulation=2\n",
        ),
        (
            ("data.batch_size=8",),
            1,
            [4, 4, 2],
            "goes on with 2 of 4 processes, optimizer.accumulation=2\n",
        ),
        (
            ("optimizer.accumulation=3",),
            2,
            [4, 4, 3],
            "goes on with 3 of 4 processes, optimizer.accumulation=4\n",
        ),
        (
            ("data.batch_size=12", "mesh.dcn_data=4"),
            1,
            [4, 4, 3],
            "goes on with 3 of 4 processes, optimizer.accumulation=2 mesh.dcn_data=3\n",
        ),
        (
            ("mesh.data=4", "mesh.fsdp=1"),
            1,
            [4, 4],
            "2 attempts in a row ended with no step after 0",
        ),
        ((), 4, [4, 4], "2 attempts in a row ended with no step after 0"),
    ],
)
def test_a_process_that_is_lost_for_good_is_done_without_if_that_fits(
    tiny, capfd, overrides, least, ended, said
):
    """12 rows, unless said otherwise, on one device of each process; the third process ends every
    attempt."""
    options = ["--processes", "4", "--min-processes", str(least), "--crash-loop", "2"]
    words = command(tiny, "slot2", *options)
    words.insert(words.index("train"), str(ended[-1] if len(ended) == 3 else 0))
    code = supervise.main(
        [*words, *(overrides if "data" in str(overrides) else ("data.batch_size=12", *overrides))],
        "supervise",
    )
    records = read_attempts(tiny / "runs" / "run")
    assert (
        code == (0 if len(ended) == 3 else 70)
        and [record["processes"] for record in records] == ended
    )
    assert [record["lost"] for record in records[:2]] == [2, 2] and said in capfd.readouterr().err
    if len(ended) == 3:
        assert records[-1]["command"].count("optimizer.accumulation=") == 1
        assert records[-1]["command"].count("mesh.dcn_data=") == said.count("mesh.dcn_data=")


@pytest.mark.processes
def test_a_signal_is_passed_on_once_and_ends_it_all(tiny):
    program = "import sys; from maxtrain.commands import supervise; sys.exit(supervise.main(sys.argv[1:], 'supervise'))"
    words = [sys.executable, "-c", program, *command(tiny, "wait,0", "--grace", "60")]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline() == b"process 0 of None \n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    assert attempts(tiny) == [("stopped by SIGTERM", 0, 0)]


@pytest.mark.parametrize(
    ("words", "code", "advice"),
    [
        ([], 64, "Write: supervise -- python -m maxtrain.train config=NAME"),
        (["--", "ls"], 64, "ls does not start a training run. Write -- python -m maxtrain.train"),
        (["--crash-loop", "0", "--", "maxtrain", "train"], 64, "Set --crash-loop to 1 or more"),
        (
            ["--", "maxtrain", "train", "config=quickstart", "optimizer.learning_rate=-1"],
            78,
            "optimizer.learning_rate=-1",
        ),
        (
            ["--processes", "2", "--", "train", "config=quickstart", "mesh.coordinator=a:1"],
            64,
            "Leave them out",
        ),
        (
            ["--", "./no-such-program", "train", "config=quickstart"],
            64,
            "Name a command that can be run",
        ),
    ],
)
def test_a_wrong_command_is_refused_before_anything_starts(
    words, code, advice, capfd, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    assert supervise.main(words, "supervise") == code
    assert advice in capfd.readouterr().err and not (tmp_path / "runs").exists()


def test_how_far_a_run_has_come_ignores_what_is_torn_or_unfinished(tmp_path):
    assert (reached_step(tmp_path), saved_step(tmp_path)) == (0, (0, 0.0))
    (tmp_path / "metrics.jsonl").write_text('{"step": 5}\n{"step": 6}\n{"st')
    for name in ("00000004", ".00000008.partial"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "commit.json").write_text("{}")
    (tmp_path / "checkpoints" / "00000009").mkdir()
    assert (reached_step(tmp_path), saved_step(tmp_path)[0]) == (6, 4)
    (tmp_path / "metrics.jsonl").unlink()
    assert reached_step(tmp_path) == 4
    (tmp_path / "fast" / "0" / "00000007").mkdir(parents=True)
    (tmp_path / "fast" / "0" / "00000007" / "commit.json").write_text("{}")
    assert saved_step(tmp_path, tmp_path / "fast")[0] == 7 and saved_step(tmp_path)[0] == 4


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """12 steps of a tiny model, saved every 4; a stall is one after three seconds."""
    folder, rng = tmp_path_factory.mktemp("supervise"), random.Random(0)
    for number in range(40):
        (folder / f"{number}.txt").write_text(
            " ".join(rng.choices(["the", "of", "and", "to", "in"], k=60))
        )
    data = folder / "data"
    assert (
        prepare.main(
            [str(data), "--text", f"{folder}/*.txt", "--workers", "1", "--tokenizer", "bytes"]
        )
        == 0
    )
    values = {
        "output_dir": str(folder / "runs"),
        "steps": 12,
        "log_interval": 1,
        "checkpoint_interval": 4,
        "checkpoint": {
            "asynchronous": False
        },  # so that it is known what is saved when a process dies
        "model": TINY_MODEL,
        "data": {
            "sources": {"text": {"path": str(data), "epochs": None}},
            "seq_length": 32,
            "batch_size": 4,
        },
        "schedule": {"warmup_steps": 2},
        "precision": {"compute": "float32"},
        "mesh": {"data": 2, "fsdp": 1},
        "watchdog": {"step_seconds": 3.0, "factor": 3.0},
        "observe": {
            "progress": "plain",
            "trackers": [],
            "plot": False,
            "peak_tflops": 1.0,
            "compilation_cache": None,
        },
    }
    (folder / "tiny.yaml").write_text(yaml.safe_dump(values))
    return folder / "tiny.yaml"


def train(config, run_name, faults, *options, devices=2, overrides=()):
    """A supervised run with faults, in processes that share the tests' cache of compiled programs;
    its folder."""
    names = [name for name in jax.config.values if name.startswith("jax_persistent_cache_min")]
    cache = {name.upper(): str(jax.config.values[name]) for name in names}
    cache |= {
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        "MAXTRAIN_FAILPOINT": faults,
    }
    # Only process 0 of a job writes to the cache of compiled programs, so the others always
    # compile: quickly, then.
    cache["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
    own = [
        f"config={config}",
        f"run_name={run_name}",
        f"mesh.simulated_devices={devices}",
        *overrides,
    ]
    words = [
        "supervise",
        "--backoff",
        "0",
        *options,
        "--",
        sys.executable,
        "-m",
        "maxtrain.train",
        *own,
    ]
    result = subprocess.run(
        [sys.executable, "-m", "maxtrain.cli", *words],
        cwd=ROOT,
        env=os.environ | cache,
        capture_output=True,
        text=True,
        timeout=700,
    )
    folder = config.parent / "runs" / run_name
    print(result.stdout, result.stderr, *read_attempts(folder), sep="\n")
    assert result.returncode == 0
    return folder


def assert_same_numbers(ours, theirs):
    fields = compare_records(read_metrics(ours), read_metrics(theirs))
    assert {"loss", "grad_norm", "params_hash", "batch"} <= {field.name for field in fields}
    assert [
        (field.name, field.first) for field in fields if field.different or field.compared != 12
    ] == []
    a, b = (saved_digests(folder / "checkpoints") for folder in (ours, theirs))
    assert max(a) == max(b) == 12 and a[12] == b[12]


@pytest.mark.every_dose
@pytest.mark.long
@pytest.mark.processes
def test_a_run_that_is_killed_is_started_again_and_ends_with_the_same_numbers(config):
    undisturbed = train(config, "whole", "")
    folder = train(config, "killed", "during_save:kill:8:1")
    assert_same_numbers(folder, undisturbed)
    ended = [(a["reason"], a["saved_step"]) for a in read_attempts(folder)]
    assert ended == [("SIGKILL", 4), ("exit 0", 12)]


@pytest.mark.slow
@pytest.mark.processes
def test_a_run_that_dies_at_several_places_ends_with_the_same_numbers(config):
    undisturbed = train(config, "undisturbed", "")
    faults = "during_save:kill:4:1,data:hang:7:2,after_commit:kill:8:3,before_step:enospc:11:4"
    folder = train(config, "disturbed", faults)
    assert_same_numbers(folder, undisturbed)
    ended = [(a["reason"], a["saved_step"]) for a in read_attempts(folder)]
    assert ended == [("SIGKILL", 0), ("exit 75", 4), ("SIGKILL", 8), ("exit 74", 8), ("exit 0", 12)]
    assert "in: data_wait" in (folder / "stalled-0.txt").read_text()


@pytest.mark.slow
@pytest.mark.processes
def test_when_one_process_dies_all_are_started_again(config):
    undisturbed = train(config, "two", "", "--processes", "2", devices=1)
    folder = train(config, "two-disturbed", "before_step:kill:7:1:1", "--processes", "2", devices=1)
    assert_same_numbers(folder, undisturbed)
    assert [a["reason"] for a in read_attempts(folder)] == ["SIGKILL", "exit 0"]
    launches = [json.loads(line) for line in (folder / "launches.jsonl").read_text().splitlines()]
    assert [(launch["step"], launch["processes"]) for launch in launches] == [(0, 2), (4, 2)]


@pytest.mark.slow
@pytest.mark.processes
def test_a_job_goes_on_with_fewer_processes_to_the_same_losses(config):
    """Three processes with a device each, of which the last one always dies at step 7; then two,
    with two micro-batches."""
    overrides = ["mesh.data=-1", "data.batch_size=12", "steps=9", "watchdog.factor=0"]
    alone = train(config, "alone", "", devices=3, overrides=overrides)
    options = ["--processes", "3", "--min-processes", "2", "--crash-loop", "1"]
    fewer = train(
        config, "fewer", "before_step:kill:7::2", *options, devices=1, overrides=overrides
    )
    ended = [
        (a["processes"], a["lost"], a["reason"], a["saved_step"]) for a in read_attempts(fewer)
    ]
    assert ended == [(3, 2, "SIGKILL", 4), (3, 2, "SIGKILL", 4), (2, None, "exit 0", 9)]
    ours, theirs = (
        [r for r in read_metrics(run) if r["kind"] == "train"] for run in (fewer, alone)
    )
    assert [(r["step"], r["batch"]) for r in ours] == [
        (r["step"], r["batch"]) for r in theirs
    ] and len(ours) == 9
    for key in ("loss", "grad_norm"):
        assert [r[key] for r in ours] == pytest.approx([r[key] for r in theirs], rel=1e-5)
    launches = [json.loads(line) for line in (fewer / "launches.jsonl").read_text().splitlines()]
    assert [(launch["step"], launch["processes"]) for launch in launches] == [
        (0, 3),
        (4, 3),
        (4, 2),
    ]


def test_a_signal_while_a_process_is_started_reaches_it(tiny, monkeypatch):
    begin, real = time.monotonic(), supervise.Supervisor._start

    def started(self, extra):
        child = real(self, extra)
        os.kill(os.getpid(), signal.SIGTERM)  # before anybody knows of the child
        return child

    monkeypatch.setattr(supervise.Supervisor, "_start", started)
    assert (
        supervise.main(command(tiny, "wait", "--grace", "60"), "supervise") == 128 + signal.SIGTERM
    )
    assert time.monotonic() - begin < 50 and attempts(tiny) == [("stopped by SIGTERM", 0, 0)]
