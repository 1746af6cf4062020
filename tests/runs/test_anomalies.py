"""Anomalies in whole runs: messages, skipped batches, and that a run taken back is one run,
wherever it is killed.

One step of a small run on words reads a stretch of noise instead: its loss and gradient are far
above those before it.
"""

import dataclasses
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.base.errors import StorageError
from data_pipeline.prepare import command as prepare
from maxtrain.checkpoint.listing import saved_steps
from maxtrain.checkpoint.manager import Checkpoints
from maxtrain.checkpoint.rollback import left_out, read_rollbacks, write_rollbacks
from maxtrain.checkpoint.run_state import RunState
from maxtrain.commands import checkpoint
from maxtrain.config import load_config
from maxtrain.config.schema import CheckpointConfig
from maxtrain.observe.metrics import read_metrics
from maxtrain.trainer import loop as job
from maxtrain.trainer import recorder
from maxtrain.trainer import run as run_module

STEPS, BAD = 24, 18
REPOSITORY = Path(__file__).parents[2]


pytestmark = pytest.mark.usefixtures("this_process")


@pytest.fixture(scope="module")
def config(tmp_path_factory, tiny_run) -> Path:
    """A config file beside its data; step BAD reads noise."""
    folder, rng = tmp_path_factory.mktemp("anomalies"), random.Random(0)
    (folder / "noise").mkdir()
    for number in range(40):
        words = rng.choices([chr(code) for code in range(0x100, 0x800)], k=rng.randrange(20, 120))
        (folder / "noise" / f"{number}.txt").write_text(" ".join(words))
    noise = folder / "data-noise"
    assert prepare.main([str(noise), "--text", f"{folder}/noise/*.txt", "--workers", "1"]) == 0
    return tiny_run(
        folder,
        steps=STEPS,
        log_interval=3,
        checkpoint_interval=4,
        data={
            "sources": {
                name: {"path": str(path), "epochs": None}
                for name, path in (("text", folder / "data"), ("noise", noise))
            },
            "stages": [
                {"until": BAD - 1, "weights": {"text": 1}},
                {"until": BAD, "weights": {"noise": 1}},
                {"weights": {"text": 1}},
            ],
        },
        optimizer={"learning_rate": 1e-2},
        schedule={"warmup_steps": 2},
        anomaly={"window": 8, "min_steps": 6, "loss_limit": 8.0},
        mesh={"data": 1, "fsdp": 8},
    )


def train(config, run_name, *overrides):
    """Exit code of a run in this process."""
    return job.main(load_config([f"config={config}", f"run_name={run_name}", *overrides]))


def folder_of(config, run_name):
    return config.parent / "runs" / run_name


def numbers(folder):
    """The records of training that do not depend on the clock, floats as hex."""
    return [
        {
            k: v.hex() if isinstance(v, float) else v
            for k, v in record.items()
            if not re.search("second|mfu|_bytes", k)
        }
        for record in read_metrics(folder)
    ]


OWN = (
    "config",
    "run",
    "metrics",
)  # in a checkpoint's record, of the run alone: its settings, its id, its log with the clock


def state_at(folder, step=None):
    """Bits of every array of a checkpoint (None: the newest), and its record but for what each run
    has of its own."""
    checkpoints = Checkpoints(folder / "checkpoints", CheckpointConfig())
    step = checkpoints.latest() if step is None else step
    saved = json.loads((folder / "checkpoints" / f"{step:08d}" / "commit.json").read_text())[
        "arrays"
    ]
    tree = {name: jax.ShapeDtypeStruct(tuple(x["shape"]), x["dtype"]) for name, x in saved.items()}
    state, record = checkpoints.restore(tree, step)
    checkpoints.close()
    return {name: np.asarray(x).tobytes() for name, x in state.items()}, {
        k: v for k, v in record.items() if k not in OWN
    }


ROLLBACK = ("anomaly.loss_spike=rollback", "anomaly.leave_out=3")


@pytest.fixture(scope="module")
def taken_back(config):
    """The folder of a run that met the noise, went back, and ended."""
    assert train(config, "back", *ROLLBACK) == 0
    return folder_of(config, "back")


@pytest.mark.long
def test_a_spike_is_told_with_its_numbers_its_data_and_the_command_to_look_at_it(config, capsys):
    assert train(config, "warned") == 0
    out = capsys.readouterr().out
    told = rf"step {BAD}: loss_spike: loss [\d.]+, gradient norm [\d.]+: more than [\d.]+ = [\d.]+ \+ 8 x [\d.]+ \(median, dev"
    assert re.search(told, out) and "the run goes on (anomaly.loss_spike=warn)" in out
    assert re.search(r"anomalies: \d x loss_spike", out), "and in the summary"
    reads, command = re.search(
        r"It reads (noise, epoch 0: rows .*)\. To look at the first: (.*) Look at the data", out
    ).groups()
    assert len(re.findall(r"\d+", reads)) == 1 + 8
    words = command.rstrip(".").split()
    shown = subprocess.run(
        [sys.executable, *words[1:]], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert shown.returncode == 0 and re.search("[\u0100-\u0800] ", shown.stdout), shown.stderr
    records = read_metrics(folder_of(config, "warned"))
    assert [r.get("anomalies/loss_spike", 0) >= 1 for r in records] == [
        r["step"] >= BAD for r in records
    ]


@pytest.mark.long
def test_a_rollback_leaves_the_steps_out_as_if_it_had_been_known_from_the_start(
    config, taken_back, capsys
):
    """Bit for bit, counters and all: a run that finds the list of steps when it begins."""
    assert read_rollbacks(taken_back) == [
        {"step": BAD, "kind": "loss_spike", "left_out": [BAD - 2, BAD]}
    ]
    folder = folder_of(config, "known")
    folder.mkdir()
    write_rollbacks(folder, read_rollbacks(taken_back), "")
    assert train(config, "known", *ROLLBACK) == 0
    assert (
        f"back from step {BAD} (loss_spike), left out {BAD - 2} to {BAD}" in capsys.readouterr().out
    )
    assert numbers(folder) == numbers(taken_back) and state_at(folder) == state_at(taken_back)
    records = {r["step"]: r for r in read_metrics(folder)}
    assert (
        list(records) == list(range(3, STEPS + 1, 3))
        and records[BAD]["loss"] is None
        and records[STEPS]["skipped"] == 3
    )
    assert [r.get("rollbacks") for r in records.values()] == [None] * 5 + [1] * 3
    assert not any("anomalies/loss_spike" in r for r in records.values()), "it never happened"


@pytest.mark.long
def test_a_fork_does_not_go_back_to_before_it_was_forked(config, capsys):
    """Its own first checkpoint is one of the skipped steps: it must not begin at random."""
    assert train(config, "stable", "checkpoint.keep=9") == 0
    stable = folder_of(config, "stable")
    words = ["copy", str(stable), str(folder_of(config, "copied")), "--step", "16"]
    assert checkpoint.main(words) == 0
    for name, more in (("forked", [f"checkpoint.fork_from={stable}@16"]), ("copied", [])):
        capsys.readouterr()
        assert train(config, name, *ROLLBACK, *more) == 70
        said = capsys.readouterr().err
        assert "cannot go back before step 16" in said and "anomaly.loss_spike=skip" in said
        run = folder_of(config, name)
        assert list(saved_steps(run / "checkpoints")) == [16] and not read_rollbacks(run)
    assert train(config, "forked", *ROLLBACK[:1], "anomaly.leave_out=2") == 0
    assert [entry["left_out"] for entry in read_rollbacks(run.parent / "forked")] == [[17, 18]]


class LoopKill(BaseException):
    """An exception with the effect of a kill: nobody catches it."""


def dying(original, call, before):
    """The function, but its call with this number, from 1, is the last, and is made or not."""
    calls = []

    def instead(*arguments, **options):
        calls.append(1)
        if len(calls) == call and before:
            raise LoopKill
        result = original(*arguments, **options)
        if len(calls) == call:
            raise LoopKill
        return result

    return instead


@pytest.mark.long
@pytest.mark.parametrize(
    "owner, name, call, before",
    [
        (run_module, "write_rollbacks", 1, True),
        pytest.param(run_module, "write_rollbacks", 1, False, marks=pytest.mark.slow),
        (Checkpoints, "discard_after", 1, False),
        pytest.param(Checkpoints, "restore", 1, False, marks=pytest.mark.slow),
        pytest.param(recorder, "MetricsLog", 2, True, marks=pytest.mark.slow),
    ],
    ids=["found", "written", "discarded", "restored", "logs"],
)
def test_killed_anywhere_in_a_rollback_the_same_command_goes_on_to_the_same_run(
    config, taken_back, monkeypatch, owner, name, call, before
):
    run_name = f"killed-{name}-{before}"
    folder = folder_of(config, run_name)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, dying(getattr(owner, name), call, before))
        with pytest.raises(LoopKill):
            train(config, run_name, *ROLLBACK)
    assert (read_rollbacks(folder) is None) == (name == "write_rollbacks" and before)
    assert train(config, run_name, *ROLLBACK) == 0
    assert numbers(folder) == numbers(taken_back) and state_at(folder) == state_at(taken_back)


@pytest.mark.long
def test_processes_that_see_different_checkpoints_do_not_go_back(config, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "gather", lambda values: [values, {"back": values["back"] - 1}])
        assert train(config, "views", *ROLLBACK) == 74
    assert "Give all hosts the same view of" in capsys.readouterr().err
    assert read_rollbacks(folder_of(config, "views")) is None, "nothing is changed"


@pytest.mark.long
@pytest.mark.processes
def test_a_real_kill_between_the_list_and_the_checkpoints(config, taken_back):
    """SIGKILL when the list is written and checkpoints of the way that was left are still there."""
    program = """
        import os, signal, sys
        from maxtrain import train
        from maxtrain.config import load_config
        from maxtrain.checkpoint.manager import Checkpoints
        from maxtrain.parallel import distributed
        Checkpoints.discard_after = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        distributed.keep_host_memory = lambda: ""
        train.main(load_config(sys.argv[1:]))
    """
    overrides = [f"config={config}", "run_name=sigkill", *ROLLBACK]
    command = [sys.executable, "-c", textwrap.dedent(program), *overrides]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    folder = folder_of(config, "sigkill")
    assert result.returncode == -signal.SIGKILL and read_rollbacks(folder) == read_rollbacks(
        taken_back
    ), result.stderr
    assert (folder / "checkpoints" / f"{BAD - 2:08d}").exists(), (
        "it went through steps that are left out now"
    )
    assert train(config, "sigkill", *ROLLBACK) == 0
    assert numbers(folder) == numbers(taken_back) and state_at(folder) == state_at(taken_back)


@pytest.mark.long
@pytest.mark.parametrize(
    "policy, first", [pytest.param("skip", 10, marks=pytest.mark.slow), ("rollback", 8)]
)
def test_tokens_of_an_earlier_batch_are_left_out_as_if_it_had_been_known(
    config, capsys, policy, first
):
    """Steps 9 and 10 read rows of one letter: of other places, and the same."""
    folder = config.parent
    if not (folder / "data-letter").exists():
        (folder / "letter.txt").write_text("a" * 30_000)
        assert (
            prepare.main(
                [str(folder / "data-letter"), "--text", f"{folder}/letter.txt", "--workers", "1"]
            )
            == 0
        )
    stages = "data.stages=[{until: 8, weights: {text: 1}}, {until: 10, weights: {letter: 1}}, {weights: {text: 1}}]"
    overrides = [stages, f"data.sources.letter.path={folder / 'data-letter'}"]
    run = f"repeated-{policy}"
    assert train(config, run, *overrides) == 65
    error = capsys.readouterr().err
    assert (
        "step 10: its tokens are those of an earlier batch of other rows (data.repeated)" in error
    )
    asked = (
        ["data.repeated=rollback", "anomaly.leave_out=3"]
        if policy == "rollback"
        else ["data.repeated=skip"]
    )
    assert train(config, run, *overrides, *asked) == 0
    out = capsys.readouterr().out
    assert re.search(r"It reads letter, epoch 0: rows .*\n +The run goes back to step", out), out
    left = [first, 10]
    assert read_rollbacks(folder_of(config, run)) == [
        {"step": 10, "kind": "repeated", "left_out": left}
    ]
    known = folder_of(config, f"{run}-known")
    known.mkdir()
    write_rollbacks(known, read_rollbacks(folder_of(config, run)), "")
    assert train(config, known.name, *overrides) == 0, "what is left out is not judged"
    assert state_at(known)[0] == state_at(folder_of(config, run))[0]
    assert numbers(known)[-1]["skipped"] == 11 - first


@pytest.mark.long
def test_without_a_checkpoint_the_run_goes_back_to_its_start(config, taken_back, capsys):
    assert train(config, "start", *ROLLBACK, "checkpoint_interval=0") == 0
    assert (
        "The run goes back to step 0; steps 16 to 18 are left out (rollback 1 of at most 4)"
        in capsys.readouterr().out
    )
    assert numbers(folder_of(config, "start")) == numbers(taken_back)
    assert state_at(folder_of(config, "start")) == state_at(taken_back)


@pytest.mark.long
def test_stop_saves_the_run_as_before_the_step_and_another_policy_goes_on(config, capsys):
    assert train(config, "before", f"checkpoint_interval={BAD - 1}") == 0
    assert train(config, "stop", "anomaly.loss_spike=stop") == 70
    error = capsys.readouterr().err
    assert (
        f"The run stops, saved as it was before, at step {BAD - 1}. Look at the data there" in error
    )
    (state, record), (expected, other) = (
        state_at(folder_of(config, "stop")),
        state_at(folder_of(config, "before"), BAD - 1),
    )
    assert state == expected
    seen = ("guard",)  # it has read on
    assert {k: v for k, v in record.items() if k not in seen} == {
        k: v for k, v in other.items() if k not in seen
    }
    assert train(config, "stop", "anomaly.loss_spike=stop") == 70, "it is still there"
    assert train(config, "stop", "anomaly.loss_spike=skip") == 0
    assert numbers(folder_of(config, "stop"))[-1]["skipped"] == 1


@pytest.mark.long
def test_more_rollbacks_than_allowed_end_the_run_with_everything_named(config, capsys):
    assert train(config, "limit", *ROLLBACK, "anomaly.max_rollbacks=0") == 70
    error = capsys.readouterr().err
    assert f"step {BAD}: loss_spike: loss" in error and "prepare show" in error
    assert (
        "after 0 rollbacks; anomaly.max_rollbacks allows no more, saved as it was before, at step 17."
        in error
    )
    assert train(config, "limit", *ROLLBACK) == 0 and read_rollbacks(folder_of(config, "limit"))


@pytest.mark.long
def test_a_parameter_that_is_not_finite_is_named(config, monkeypatch, capsys):
    """Weights that a Hugging Face directory, say, brought along: nothing can be trained, and
    nothing is."""
    original = job.Job.initial_state

    def initial_state(self, *tell):
        state = original(self, *tell)
        trainable = jax.tree.map_with_path(spoil, state.trainable)
        return dataclasses.replace(state, trainable=trainable)

    def spoil(path, x):
        return x * np.float32(np.inf) if "final_norm" in jax.tree_util.keystr(path) else x

    monkeypatch.setattr(job.Job, "initial_state", initial_state)
    assert train(config, "inf", "anomaly.non_finite=stop") == 70
    assert re.search(
        r"step 1: non_finite: loss (nan|inf), gradient norm nan, first in \w+",
        capsys.readouterr().err,
    )
    assert train(config, "inf", "anomaly.non_finite=rollback", "anomaly.max_rollbacks=2") == 75
    error = capsys.readouterr().err
    assert "step 2 is not saved: params.final_norm" in error, (
        "after 2 rollbacks it would be saved as it was before"
    )


@given(st.sets(st.integers(1, 30)), st.integers(0, 30), st.booleans())
def test_a_checkpoint_is_of_the_run_if_it_left_out_the_same_steps_before_it(steps, at, known):
    later = [{"step": s, "kind": "dead", "left_out": [s, s]} for s in steps]
    saved = RunState(step=at, rollbacks=later if known else [])
    assert left_out(later) == {s - 1 for s in steps}
    assert saved.went_with(later) == (known or not any(s <= at for s in steps))
    assert saved.went_with(None)


def test_a_list_that_is_no_list_is_refused_with_a_mend(config, tmp_path):
    assert read_rollbacks(tmp_path) is None
    (tmp_path / "rollbacks.json").write_text('[{"step": 3}]')
    with pytest.raises(
        StorageError, match=r"rollbacks\.json is not a list of rollbacks.*Restore it, or remove it"
    ):
        read_rollbacks(tmp_path)


@pytest.mark.long
def test_what_is_not_finite_is_saved_with_the_sums_by_source(config, monkeypatch):
    """Step 7 is skipped, and step 8 is saved, before there is a record of both."""
    monkeypatch.setenv("MAXTRAIN_FAILPOINT", "data:nan:7")
    folder = folder_of(config, "by-source")
    assert train(config, "by-source", "loss.by_source=true", "steps=10") == 0
    saved, records = saved_steps(folder / "checkpoints"), numbers(folder)
    assert [nats for nats in saved[8][1]["by_source"][0] if isinstance(nats, str)] == ["nan"]
    shutil.rmtree(folder / "checkpoints" / "00000010")
    assert train(config, "by-source", "loss.by_source=true", "steps=10") == 0
    assert numbers(folder) == records and "loss/text" in str(records)
