"""A trace is taken of the requested steps, once, and is one that Perfetto reads."""

import gzip
import json

import jax
import jax.numpy as jnp
import pytest

from data_pipeline.base.errors import ConfigError
from maxtrain.config.load import load_config
from maxtrain.observe.metrics import Stopwatch, read_metrics
from maxtrain.observe.profile import StepTrace, TraceRange, traced_steps
from maxtrain.trainer.loop import main


def events(folder):
    """Return the events of the only trace in a folder."""
    (path,) = folder.glob("profile/plugins/profile/*/perfetto_trace.json.gz")
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def test_it_is_due_before_the_first_step_and_after_the_last_one(tmp_path):
    trace = StepTrace(tmp_path, traced_steps("3:4"), Stopwatch(), print)
    assert [trace.due(step) for step in range(6)] == [False, False, True, True, False, False]
    trace.is_open = True
    assert [trace.due(step) for step in range(6)] == [False] * 4 + [True] * 2
    without = StepTrace(tmp_path, None, Stopwatch(), print)
    assert not any(without.due(step) for step in range(6))
    without.close(3)
    assert not list(tmp_path.iterdir())


def test_a_trace_has_events_and_is_taken_once(tmp_path):
    said = []
    clock = Stopwatch()
    trace = StepTrace(tmp_path, TraceRange(1, 2), clock, said.append)
    state = jnp.ones(8)
    trace.turn(0, state)
    assert trace.is_open
    state = jax.block_until_ready(jnp.sin(state))
    trace.turn(2, state)
    assert not trace.is_open and not trace.due(0) and clock.seconds()["profile"] > 0
    assert len(events(tmp_path)) > 10
    (line,) = said
    assert line.startswith("profile: steps 1 to 2 are in ") and "https://ui.perfetto.dev" in line


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ("3", "Set observe.profile=10:12"),
        ("a:b", "Set observe.profile=10:12"),
        ("0:2", "Set observe.profile=1:2"),
        ("5:2", "Set observe.profile=2:5"),
    ],
)
def test_what_is_no_range_of_steps_is_refused(given, advice):
    with pytest.raises(ConfigError, match=advice):
        load_config(["config=quickstart", f"observe.profile={given}"])


@pytest.mark.long
@pytest.mark.usefixtures("this_process")
def test_a_run_writes_its_trace_and_the_norms_of_its_layers(tmp_path, tiny_run, capsys):
    """The trace begins with the run and is closed where the run ends, before the last step that
    was asked for."""
    config = tiny_run(tmp_path, steps=5, schedule={"warmup_steps": 0})
    options = [f"config={config}", "run_name=traced", "observe.profile=4:9"]
    assert main(load_config([*options, "observe.layer_norms_interval=2"])) == 0
    folder = tmp_path / "runs" / "traced"
    assert len(events(folder)) > 100
    assert "profile: steps 4 to 5 are in" in capsys.readouterr().out
    norms = {r["step"]: r for r in read_metrics(folder) if r["kind"] == "norms"}
    assert list(norms) == [2, 4]
    record = norms[2]
    assert {"weight/layers.0.mlp.up.kernel", "gradient/layers.0.attention.q.kernel"} <= set(record)
    train = {r["step"]: r for r in read_metrics(folder) if r["kind"] == "train"}
    for measured, name in (("weight", "weight_norm"), ("gradient", "grad_norm")):
        squares = [x**2 for key, x in record.items() if key.startswith(f"{measured}/")]
        assert sum(squares) ** 0.5 == pytest.approx(train[2][name], rel=1e-5)
