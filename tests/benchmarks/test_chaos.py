"""The harness of faults: it sees what is wrong where something is, and a small dose of each fault
finds nothing."""

import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.chaos import report
from benchmarks.chaos.flips import damage
from benchmarks.chaos.goodput import Costs, best_interval, efficiency
from benchmarks.chaos.meaning import LaunchFault, judge_words
from benchmarks.chaos.meshes import ROWS, shapes, unlike
from benchmarks.chaos.report import Tally, quantile
from benchmarks.chaos.rollbacks import unlike_so_far
from benchmarks.chaos.rollouts import PHASES, rollouts_unlike
from benchmarks.chaos.victim import RunFiles, kept
from maxtrain.failpoints import PLACES
from maxtrain.rl.rollout import FOLDER, Rollout

ROOT = Path(__file__).parents[2]


def chaos(folder, *words):
    """The output of the chaos benchmark, which must find nothing."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.chaos", *words, "--directory", str(folder)]
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    logs = "".join(
        path.read_text(errors="replace")[-4000:] for path in folder.rglob("failed/*/*.log")
    )
    assert result.returncode == 0, result.stdout + result.stderr + logs
    return result.stdout


@pytest.mark.long
@pytest.mark.every_dose
@pytest.mark.processes
def test_a_run_that_is_killed_once_ends_as_if_it_had_not_been(tmp_path):
    """The least that runs with every change; the doses are slow."""
    shown = chaos(tmp_path, "kills", "--trials", "1", "--seed", "1")
    assert "| SIGKILL | 1 | 0 |" in shown


@pytest.mark.slow
@pytest.mark.processes
def test_a_dose_of_each_fault(tmp_path):
    shown = chaos(tmp_path, "dose", "--seed", "1", "--commands", "0")
    for row in (
        "SIGKILL | 3 |",
        "SIGKILL around rollbacks | 2 |",
        "SIGKILL of runs of GRPO | 2 |",
        "another mesh, accumulation or number of processes | 1 |",
        "worthless weights, all hashes right | 1 |",
        "a checkpoint of another run | 1 |",
        "signal in: step | 1 |",
        "disk full | 2 |",
        "checkpoint: no damage, no alarm | 2 |",
        "data shards: any of these, in whole runs | 1 |",
    ):
        assert f"| {row} 0 |" in shown


@pytest.mark.slow
@pytest.mark.processes
def test_a_dose_of_what_happens_to_a_run_behind_a_url(tmp_path):
    """The second command goes on where the first has ended."""
    pytest.importorskip("s3fs", reason="needs maxtrain[s3]")
    chaos(tmp_path, "bucket-kills", "--trials", "2")
    shown = chaos(tmp_path, "bucket-kills", "--trials", "5")
    assert "| SIGKILL of a run behind s3:// | 5 | 0 |" in shown
    made = (tmp_path / "trials-bucket-kills-1.jsonl").read_text().splitlines()
    numbers = [json.loads(line)["number"] for line in made]
    assert len(numbers) == 5 and numbers == sorted({*numbers})
    shown = chaos(tmp_path, "bucket-faults", "--trials", "5")
    assert "| a store that fails, of a run behind s3:// | 5 | 0 |" in shown


@pytest.mark.slow
@pytest.mark.processes
def test_a_dose_of_what_happens_between_uploads(tmp_path):
    pytest.importorskip("s3fs", reason="needs maxtrain[s3]")
    shown = chaos(tmp_path, "local-kills", "--trials", "5")
    assert "| SIGKILL of a run that saves between uploads | 5 | 0 |" in shown


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("fault", ["deaths", "hangs"])
def test_a_dose_of_what_happens_to_one_of_four_processes(tmp_path, fault):
    shown = chaos(tmp_path, fault, "--trials", "2")
    assert (
        re.search(r"\| one of four processes .* \| 2 \| 0 \|", shown)
        and "All were started again" in shown
    )


def records(*losses, **more):
    common = {"grad_norm": 1.0, "batch": "b", "params_hash": "p", "batch_hash": "h"}
    return [
        {"kind": "train", "step": step, "loss": loss, **common, **more}
        for step, loss in enumerate(losses, 1)
    ]


def left(folder, lines):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return RunFiles(folder)


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (records(3.0, 2.0), ""),
        (records(3.0), ""),
        ([], ""),
        (records(3.0, 2.0000000000000004), r"loss differs at \(2, 2.0000000000000004, 2.0\)"),
        (records(3.0, 2.0, params_hash="q"), "params_hash differs"),
        (records(3.0, 2.0)[1:], "have not every step up to 2 once"),
        (records(3.0, 2.0) + records(3.0)[:1], "have not every step up to 1 once"),
        ([{**record, "batch": None} for record in records(3.0, 2.0)], "batch differs"),
        (
            [{k: v for k, v in record.items() if k != "params_hash"} for record in records(3.0)],
            "are not all on record",
        ),
    ],
)
def test_other_records_than_the_references_are_seen(tmp_path, lines, problem):
    reference = left(tmp_path / "reference", records(3.0, 2.0))
    found = left(tmp_path / "victim", lines).unlike(reference, whole=False)
    assert any(re.search(problem, what) for what in found) if problem else found == []


def test_an_end_that_is_not_the_references_is_seen(tmp_path):
    reference = left(tmp_path / "reference", records(3.0, 2.0))
    assert left(tmp_path / "same", records(3.0, 2.0)).unlike(reference, whole=True) == []
    assert left(tmp_path / "short", records(3.0)).unlike(reference, whole=True) == [
        "it has other records than the reference"
    ]


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (records(3.0, 2.0, seed=1), ""),
        (records(3.0, 2.00001, seed=1), ""),
        (records(3.0, 2.0001, seed=1), r"loss differs by 5\.0e-05 of itself at step 2"),
        (records(3.0, math.nan, seed=1), "loss differs by nan"),
        (records(3.0, 2.0, batch_hash="other"), "batch_hash differs at step 1"),
        (records(3.0, 2.0, batch_hash=None), "step 1 has no digest of its batch"),
        (records(3.0, 2.0)[1:], "have not every step up to 2 once"),
    ],
)
def test_another_layout_changes_losses_by_roundings_and_batches_not_at_all(
    tmp_path, lines, problem
):
    reference = left(tmp_path / "reference", records(3.0, 2.0))
    victim = left(tmp_path / "victim", [])
    victim.records, victim.steps = lines, [line["step"] for line in lines]
    victim.last = 2
    found, largest = unlike(victim, reference)
    assert (
        any(re.search(problem, what) for what in found)
        if problem
        else not found and largest <= 1e-5
    )


def test_layouts_fit_the_batch_and_the_processes():
    for processes in (1, 2):
        found = shapes(processes)
        assert len(found) > 20 and len({*found}) == len(found)
        for shape in found:
            assert shape.devices in (1, 2, 4, 8) and shape.devices % processes == 0
            rows = shape.data * shape.fsdp * shape.expert * shape.accumulation
            assert ROWS % rows == 0
            assert {shape.tensor, shape.context} <= {1, 2} and shape.expert in (1, 4)
        for axis in ("data", "fsdp", "context", "expert", "tensor"):
            assert len({getattr(shape, axis) for shape in found}) > 1, axis


PLANNED = [{"step": 5, "kind": "loss_spike", "left_out": [3, 5]}]


@pytest.mark.parametrize(
    ("losses", "written", "problem"),
    [
        ([3.0, 2.0, None, None, None, 1.0], 1, ""),
        ([3.0, 2.0, 1.9, 1.8], 0, ""),  # before the anomaly
        (
            [3.0, 2.0, 1.9, 1.8],
            1,
            "",
        ),  # killed when the list was written, and the records not yet dropped
        ([3.0, 2.0, None], 1, ""),
        ([3.0, 2.1, None], 1, "loss differs"),
        ([3.0, 2.0, 1.9, 1.8, 1.7, 1.0], 0, "should have been rolled back at step 5"),
        ([3.0, 2.0, None, None, None, 1.1], 1, "loss differs"),
    ],
)
def test_a_run_that_was_taken_back_is_compared_as_far_as_it_was(tmp_path, losses, written, problem):
    reference = left(tmp_path / "reference", records(3.0, 2.0, None, None, None, 1.0))
    victim = left(tmp_path / "victim", records(*losses))
    found = unlike_so_far(victim, reference, PLANNED, written)
    assert any(re.search(problem, what) for what in found) if problem else found == []


def stored(folder, tokens):
    """A run whose one rollout has these tokens, a completion each."""
    count = len(tokens)
    rollout = Rollout(
        prompts=np.array([1], np.int32),
        prompt_lengths=np.array([1], np.int32),
        tokens=np.array(tokens, np.int32),
        lengths=np.ones(count, np.int32),
        sampled=np.zeros(count, np.float32),
        old=np.zeros(count, np.float32),
        reference=np.zeros(0, np.float32),
        truncated=np.zeros(count, bool),
        rewards=np.zeros((1, count)),
        advantages=np.zeros(count),
        about={},
    )
    (folder / FOLDER).mkdir(parents=True)
    rollout.save(folder / FOLDER / "00000001.npz")
    return folder


def test_another_rollout_a_missing_and_a_damaged_one_are_seen(tmp_path):
    reference = stored(tmp_path / "reference", [5, 6])
    same = stored(tmp_path / "same", [5, 6])
    assert rollouts_unlike(same, reference, whole=True) == []
    other = stored(tmp_path / "other", [5, 7])
    assert rollouts_unlike(other, reference, whole=True) == ["00000001.npz differs"]
    # It may be of steps that are taken back.
    assert rollouts_unlike(other, reference, whole=False) == []
    path = same / FOLDER / "00000001.npz"
    path.write_bytes(path.read_bytes()[:-40])
    (damage,) = rollouts_unlike(same, reference, whole=False)
    assert damage.startswith("00000001.npz: it can't be read")
    path.unlink()
    (missing,) = rollouts_unlike(same, reference, whole=True)
    assert missing == "rollouts ['00000001.npz'] are missing, and [] are too many"
    assert rollouts_unlike(same, reference, whole=True, since=1) == []


def test_every_place_of_a_run_of_rollouts_is_a_failpoint():
    assert set(PHASES) - {""} <= set(PLACES)


SAYS_NOTHING = LaunchFault("a fault", names=("clock.jsonl",), must_say=True)


@pytest.mark.parametrize(
    ("code", "said", "problem"),
    [
        (0, "clock.jsonl:3 is not a record. The file as it was is kept as ...", ""),
        (0, "step 1", "SILENT: it says nothing of clock.jsonl"),
        (74, "error: runs/a/checkpoints has no checkpoint. Bring it back.", ""),
        (78, "error: 1 problem in the config:\n  * data.seq_length=0 must be at least 1", ""),
        (74, "error: something went wrong", "no message that names"),
        (1, "error: runs/a is gone", "ended with 1"),
        (70, "Traceback (most recent call last):\n...\nerror: a/b", "there is a traceback"),
        ("hangs", "", "ended with hangs"),
    ],
)
def test_a_fault_that_nothing_is_said_of_is_seen(code, said, problem):
    found = judge_words(SAYS_NOTHING, code, said)
    assert any(problem in what for what in found) if problem else found == []


def test_a_refusal_is_no_way_out_where_the_run_could_go_on():
    assert judge_words(LaunchFault("a fault", must_go_on=True), 74, "error: runs/a is gone") == [
        "ended with 74, where it could have gone on"
    ]


def test_which_checkpoints_must_be_there():
    assert kept(0, 20, 2, 100) == set()
    assert kept(60, 20, 2, 100) == {40, 60}
    assert kept(240, 20, 2, 100) == {100, 200, 220, 240}


@pytest.mark.parametrize(
    "costs", [Costs(0.01, 0.1, 2.0), Costs(0.01, 1.0, 5.0), Costs(1.0, 0.01, 0.0)]
)
def test_the_recommended_interval_is_near_the_best_there_is(costs):
    reached = {
        factor: efficiency(factor * best_interval(costs, 60.0), costs, 60.0)
        for factor in (0.1, 0.25, 1, 4, 10)
    }
    assert (
        0.5 < reached[1] < 1
        and reached[0.1] < reached[0.25] < reached[1] > reached[4] > reached[10]
    )
    best = max(efficiency(0.01 * number, costs, 60.0) for number in range(1, 10_000))
    assert reached[1] > 0.99 * best
    assert efficiency(5.0, costs, 1e9) == pytest.approx(
        5 / (5 + costs.save), rel=1e-6
    )  # nothing fails


def test_every_kind_of_damage_changes_a_file(tmp_path):
    rng = random.Random(0)
    for number, kind in enumerate(["flipped bit", "truncated", "removed", "emptied"]):
        folder = tmp_path / str(number)
        (folder / "below").mkdir(parents=True)
        (folder / "below" / "file").write_bytes(bytes(range(100)))
        assert damage(folder, rng, {kind: 1})[0] == kind
        files = [path for path in folder.rglob("*") if path.is_file()]
        content = files[0].read_bytes() if files else b""
        assert content != bytes(range(100)) and bool(files) == (
            kind in ("flipped bit", "truncated")
        )
        shutil.rmtree(folder)


def test_results_replace_their_own_section_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path / "reliability.md")
    monkeypatch.setattr(report, "git_revision", lambda folder: f"{'ab12' * 10}+changes")
    tally = Tally("kills", 10)
    tally.rows, tally.notes = [("SIGKILL", 300, 0), ("more", 5, 1)], ["A note."]
    assert tally.text().splitlines()[2:4] == [
        "| SIGKILL | 300 | 0 | 1.00% |",
        "| more | 5 | 1 |  |",
    ]
    for section, text in (("one", "first"), ("two", tally.text()), ("one", "second")):
        report.write(section, text, "python -m benchmarks.chaos", load=0.0)
    written = report.RESULTS.read_text()
    assert written.startswith(report.HEAD.rstrip()) and written.count("\n## ") == 2
    assert ", commit ab12ab12ab12+changes; load 0.0 before it began." in written
    assert "\n\n## two\n\n" in written and "\n\n\n" not in written
    assert "first" not in written and written.index("second") < written.index("A note.")


def test_a_tally_ends_and_tells_of_failures(capfd):
    tally = Tally("kills", 2)
    tally.count()
    assert not tally.done()
    tally.count("loss differs", "save")
    assert (
        tally.done()
        and tally.failures == ["loss differs"]
        and "* failed: loss differs" in tally.text()
    )
    assert "kills: FAILED: loss differs" in capfd.readouterr().err
    assert quantile([1.0, 2.0, 3.0], 0.5) == 2.0 and quantile([1.0, 2.0], 0.99) == 2.0
