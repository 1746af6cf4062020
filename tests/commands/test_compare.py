"""Comparison of two runs: the points where their records, arrays and launches differ. The runs are
synthetic; no device is started."""

import json

import pytest

from data_pipeline.base.errors import DataError, UsageError
from maxtrain.checkpoint.integrity import FORMAT, encode_commit
from maxtrain.commands import compare
from maxtrain.commands.compare import values_in_words
from maxtrain.config import to_yaml
from maxtrain.config.schema import OptimizerConfig, RunConfig
from maxtrain.observe.metrics import OF_THE_MACHINE, MetricsLog
from maxtrain.observe.stragglers import HostTime, OwnTime, SlowestHost, in_record


def launch(config, jax="1.0"):
    where = {"devices": {"kind": "cpu", "count": 1}, "processes": 1, "determinism": "full"}
    return {
        "step": 0,
        "time": "now",
        "versions": {"jax": jax},
        "seed": 0,
        "config": to_yaml(config),
        **where,
    }


def make_run(folder, losses, *, launched=None, digests=None, nlls=(), seconds=1.0):
    log = MetricsLog(folder)
    for step, loss in losses.items():
        log.append(step, {"loss": loss, "batch": f"b{step}", "step_seconds": seconds})
    for step, nll in enumerate(nlls, 1):
        log.append(step, {"set": "heldout", "nll": nll}, "eval")
    log.close()
    if launched:
        (folder / "launches.jsonl").write_text(json.dumps(launched) + "\n")
    for step, leaves in (digests or {}).items():
        path = folder / "checkpoints" / f"{step:08d}"
        path.mkdir(parents=True)
        (path / "record.json").write_text(json.dumps({"step": step, "format": FORMAT}))
        arrays = {
            name: {"shape": [], "dtype": "float32", "digest": digest}
            for name, digest in leaves.items()
        }
        (path / "commit.json").write_bytes(
            encode_commit({"format": FORMAT, "step": step, "arrays": arrays, "files": {}})
        )
    return folder


def compared(a, b, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    code = compare.main([str(a), str(b)])
    said = capsys.readouterr()
    return code, said.out + said.err


@pytest.fixture
def one(tmp_path):
    arrays = {4: {"params.a": "00", "params.b": "11"}, 8: {"params.a": "22"}}
    return make_run(
        tmp_path / "one",
        {s: 1 / s for s in range(1, 9)},
        launched=launch(RunConfig()),
        digests=arrays,
        nlls=[2.0],
    )


def test_the_same_run_is_the_same_but_for_the_clock(one, tmp_path, capsys, monkeypatch):
    losses = {s: 1 / s for s in range(2, 11)}  # more steps, and records of others
    arrays = {4: {"params.a": "00", "params.b": "11"}}
    config = RunConfig(run_name="two", log_interval=1)
    other = make_run(
        tmp_path / "two", losses, launched=launch(config), digests=arrays, nlls=[2.0], seconds=3.0
    )
    code, text = compared(one, other, capsys, monkeypatch)
    assert code == 0 and "The same bit for bit: 15 numbers." in text and "launched alike" in text
    assert "checkpoints of step 4: all 2 arrays are the same" in text and "seconds" not in text


def test_the_first_step_of_each_number_that_differs(one, tmp_path, capsys, monkeypatch):
    losses = {s: 1 / s + (s == 7) * 0.5 + (s == 5) * 2**-53 for s in range(1, 9)}
    arrays = {4: {"params.a": "00", "params.b": "12", "params.c": "33"}}
    config = RunConfig(optimizer=OptimizerConfig(beta1=0.5))
    other = make_run(
        tmp_path / "two", losses, launched=launch(config, "2.0"), digests=arrays, nlls=[2.5]
    )
    code, text = compared(one, other, capsys, monkeypatch)
    assert code == 70
    lines = {line.split("  ")[0]: line.split() for line in text.splitlines()}
    assert lines["loss"] == [
        "loss",
        "2",
        "of",
        "8",
        "step",
        "5",
        "0.2",
        "0.20000000000000012",
        "0.5",
    ]
    assert lines["heldout nll"][2:] == ["1", "of", "1", "step", "1", "2", "2.5", "0.5"]
    assert lines["batch"] == ["batch", "0", "of", "8", "-", "-", "-", "-"]
    assert "checkpoints of step 4: 2 of 3 arrays differ: params.b, params.c" in text
    assert "versions.jax: 1.0 and 2.0" in text and "config.optimizer.beta1: 0.9 and 0.5" in text
    assert "error:" not in text, "other configs were meant"
    assert (
        "The configs differ (optimizer.beta1), so other numbers are no surprise. They are not the same from step 1"
        in text
    )


def test_with_the_same_config_it_is_an_error(one, tmp_path, capsys, monkeypatch):
    losses = {s: 1 / s + (s == 7) * 0.5 for s in range(1, 9)}
    code, text = compared(
        one,
        make_run(tmp_path / "two", losses, launched=launch(RunConfig(), "2.0")),
        capsys,
        monkeypatch,
    )
    assert code == 70 and "error: the numbers of" in text and "versions.jax: 1.0 and 2.0" in text
    assert (
        "are not the same from step 7 on. Replay 6:7 of each with `maxtrain replay` to see which one repeats."
        in text
    )


def test_no_number_is_broken_over_lines_in_a_narrow_terminal(one, tmp_path, capsys, monkeypatch):
    other = make_run(
        tmp_path / "two-with-a-long-name",
        {s: 1 / s + 1e-3 for s in range(1, 9)},
        launched=launch(RunConfig()),
    )
    monkeypatch.setenv("COLUMNS", "40")
    assert compare.main([str(one), str(other)]) == 70
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"A: {one}" and lines[1] == f"B: {other}"
    assert any(
        line.split() == ["loss", "8", "of", "8", "step", "1", "1", "1.001", "0.001"]
        for line in lines
    )
    assert values_in_words(0.1, 0.2) == ("0.1", "0.2")
    assert values_in_words("a" * 40, "b" * 40) == ("a" * 12 + "...", "b" * 12 + "...")


def test_arrays_alone_may_differ(one, tmp_path, capsys, monkeypatch):
    other = make_run(tmp_path / "two", {8: 1 / 8}, digests={8: {"params.a": "23"}})
    code, text = compared(one, other, capsys, monkeypatch)
    assert code == 70 and "1 of 1 arrays differ: params.a" in text and "from step 8 on" in text


def test_not_a_number_is_like_another(one, tmp_path, capsys, monkeypatch):
    a, b = (make_run(tmp_path / name, {1: float("nan"), 2: float("inf")}) for name in "ab")
    assert compared(a, b, capsys, monkeypatch)[0] == 0
    assert (
        compared(a, make_run(tmp_path / "c", {1: float("nan"), 2: 1.0}), capsys, monkeypatch)[0]
        == 70
    )


def test_what_depends_on_the_machine_is_not_compared(tmp_path, capsys, monkeypatch):
    """Equal runs of several processes differ in these, and in nothing else."""
    own = OwnTime(0.5, 0.25)
    of_host = in_record(SlowestHost(HostTime(3, "host-3", own), 0.125), 2)
    assert of_host.keys() <= OF_THE_MACHINE
    for folder, value in (("a", 1), ("b", 2)):
        log = MetricsLog(tmp_path / folder)
        measured = dict.fromkeys(OF_THE_MACHINE, value) | {"slowest_host": f"host-{value}"}
        log.append(1, {"loss": 1.0, **measured})
        log.append(1, {"set": "held", "nll": 2.0, "seconds": value}, "eval")
        log.close()
    code, said = compared(tmp_path / "a", tmp_path / "b", capsys, monkeypatch)
    assert code == 0 and "The same bit for bit: 2 numbers" in said


@pytest.mark.parametrize("name", ["loss/second", "reward/seconds_taken", "epochs/mfu", "kl_bytes"])
def test_names_that_sound_like_the_clock_are_compared(name, tmp_path, capsys, monkeypatch):
    for folder, value in (("a", 1.0), ("b", 2.0)):
        log = MetricsLog(tmp_path / folder)
        log.append(1, {name: value})
        log.close()
    code, said = compared(tmp_path / "a", tmp_path / "b", capsys, monkeypatch)
    assert code == 70 and name in said


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("missing", ["none", "empty", "file", "folder of runs"])
def test_a_run_that_is_none_is_named_with_those_beside_it(one, tmp_path, capsys, place, missing):
    (one / "config.yaml").write_text("steps: 8\n")
    other = tmp_path / "other"
    if missing == "empty":
        other.mkdir()
    elif missing == "file":
        other.write_text("text")
    elif missing == "folder of runs":
        other = tmp_path
    runs = [str(one), str(one)]
    runs[place] = str(other)
    assert compare.main(runs) == UsageError.exit_code
    said = capsys.readouterr().err
    assert f"RUN={other}:" in said and str(one) in said and "Traceback" not in said


def test_a_run_without_records_is_named(one, tmp_path, capsys):
    young = tmp_path / "young"
    young.mkdir()
    (young / "config.yaml").write_text("steps: 8\n")
    for runs in ([one, young], [young, one]):
        assert compare.main(list(map(str, runs))) == DataError.exit_code
        said = capsys.readouterr().err
        assert said.startswith(f"error: {young} has no records") and "metrics.jsonl" in said
    MetricsLog(young).close()
    assert compare.main([str(one), str(young)]) == DataError.exit_code
    assert f"{young} has no records" in capsys.readouterr().err


def test_runs_without_a_common_step_are_named_with_their_steps(one, tmp_path, capsys):
    later = make_run(tmp_path / "later", {20: 1.0, 30: 1.0})
    assert compare.main([str(one), str(later)]) == DataError.exit_code
    said = capsys.readouterr().err
    assert "steps 1 to 8" in said and "steps 20 to 30" in said
