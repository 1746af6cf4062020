"""The metrics file survives kills and resumes; the stopwatch loses no second."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.base.errors import DataError
from maxtrain.observe.metrics import (
    MetricsLog,
    Stopwatch,
    metrics_owner,
    read_metrics,
    require_free_names,
)
from maxtrain.ops.quantity import Metric


def refuse(name):
    raise AssertionError(f"{name} is not strict JSON")


def test_every_line_is_strict_json_and_reads_back(tmp_path):
    log = MetricsLog(tmp_path / "run")
    values = {
        "loss": math.nan,
        "norm": np.float32(-math.inf),
        "rate": math.inf,
        "lr": np.float32(0.5),
        "skipped": np.int32(3),
    }
    log.append(1, values)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 1, "visible before the file is closed"
    raw = json.loads(lines[0], parse_constant=refuse)
    assert raw == {
        "kind": "train",
        "step": 1,
        "loss": "nan",
        "norm": "-inf",
        "rate": "inf",
        "lr": 0.5,
        "skipped": 3,
    }
    log.append(2, {"set": "val", "nll": 1.5, "note": None}, kind="eval")
    log.close()
    first, second = read_metrics(tmp_path / "run")
    assert math.isnan(first["loss"]) and first["norm"] == -math.inf and first["rate"] == math.inf
    assert second == {"kind": "eval", "step": 2, "set": "val", "nll": 1.5, "note": None}


@given(torn=st.binary(max_size=30).filter(lambda b: b"\n" not in b), step=st.integers(0, 6))
def test_resuming_drops_later_records_and_a_torn_line(tmp_path_factory, torn, step):
    run = tmp_path_factory.mktemp("run")
    log = MetricsLog(run)
    for i in range(1, 6):
        log.append(i, {"loss": i / 3})
        log.append(i, {"nll": math.inf}, kind="eval")
    log.close()
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(torn)
    assert len(read_metrics(run)) == 10
    log = MetricsLog(run, resume_step=step)
    log.append(step + 1, {"loss": 0.0})
    log.close()
    steps = [record["step"] for record in read_metrics(run)]
    assert steps == [i for i in range(1, min(step, 5) + 1) for _ in range(2)] + [step + 1]
    assert all(
        record["nll"] == math.inf for record in read_metrics(run) if record["kind"] == "eval"
    )
    assert [path.name for path in run.iterdir()] == ["metrics.jsonl"]


def test_a_run_without_metrics_has_none(tmp_path):
    assert read_metrics(tmp_path) == []


BROKEN = [
    "{broken",
    "3",
    '{"loss": 1}',
    '{"step": 2, "loss": 1}',
    '{"kind": "train", "step": "2"}',
    "[" * 100_000,
]


@pytest.mark.parametrize("line", BROKEN, ids=range(len(BROKEN)))
def test_a_broken_line_in_the_middle_is_named_and_put_aside(tmp_path, line):
    before = f'{{"kind": "train", "step": 1}}\n{line}\n{{"kind": "train", "step": 2}}\n'
    (tmp_path / "metrics.jsonl").write_text(before)
    with pytest.raises(DataError, match=r"metrics.jsonl:2 .*Delete that line"):
        read_metrics(tmp_path)
    log = MetricsLog(tmp_path, resume_step=2)
    log.close()
    assert "metrics.jsonl:2 is not a record of metrics" in log.problems[0]
    (aside,) = tmp_path.glob("metrics.jsonl.damaged-*")
    assert aside.read_text() == before and aside.name in log.problems[1]
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2]


def test_a_log_knows_whether_its_records_are_those_that_were_saved(tmp_path):
    log = MetricsLog(tmp_path, run="a")
    for step in (1, 2):
        log.append(step, {"loss": float("nan"), "set": "é"})
    kept = log.mark()
    log.append(3, {"loss": 1.0})
    log.close()
    assert metrics_owner(tmp_path) == "a" and kept.records == 2
    for again in (MetricsLog(tmp_path, 3, kept=kept), MetricsLog(tmp_path, 2, kept=kept)):
        again.close()
        assert again.problems == []
    assert again.mark() == kept
    lost = MetricsLog(tmp_path, 1, kept=kept)
    lost.close()
    assert (
        len(lost.problems) == 1
        and "of 2 records up to step 1, 1 are there, the last of step 1" in lost.problems[0]
    )


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_laps_leave_out_what_is_not_a_step():
    clock = Clock()
    watch = Stopwatch(clock)
    with watch.during("compile"):
        clock.now += 20
    for _ in range(2):
        with watch.during("data_wait"):
            clock.now += 0.5
        clock.now += 2
    with watch.during("eval"):
        clock.now += 7
    assert watch.lap() == 5
    with watch.during("save"):
        clock.now += 1
        with pytest.raises(ZeroDivisionError), watch.during("data_wait"):
            clock.now += 3
            1 / 0  # noqa: B018
        clock.now += 1
    clock.now += 4
    assert watch.lap() == 7
    assert watch.lap() == 0
    assert watch.seconds() == {"compile": 20, "step": 8, "eval": 7, "data_wait": 4, "save": 2}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["eval", "save", "data_wait", "step", "lap"]), st.integers(0, 100)
        ),
        max_size=20,
    )
)
def test_every_second_belongs_to_one_cause(events):
    clock, laps = Clock(), 0
    watch = Stopwatch(clock)
    for cause, seconds in events:
        with watch.during(cause):
            clock.now += seconds
        if cause == "lap":
            laps += watch.lap()
        clock.now += 1
    laps += watch.lap()
    ledger = watch.seconds()
    assert sum(ledger.values()) == clock.now - 100
    assert laps == ledger["step"] + ledger.get("data_wait", 0)


@pytest.mark.parametrize("name", ["tokens", "step_loss", "fill", "loss/web", "params_hash"])
def test_quantities_have_names_of_their_own(name):
    with pytest.raises(ValueError, match="Give the quantity another name"):
        require_free_names([Metric("z", "nats"), Metric(name, "nats")])


def test_one_name_has_one_meaning():
    require_free_names([Metric("z", "nats"), Metric("z", "nats")])
    with pytest.raises(ValueError, match=r"z means both .* Rename one of them"):
        require_free_names([Metric("z", "nats"), Metric("z", "nats", "sum")])
