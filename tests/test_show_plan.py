"""The command that prints a plan: what it says, and that it starts no device."""

import json
import subprocess
import sys

import pytest

from data_pipeline import prepare
from data_pipeline.config import DataConfig, SourceConfig, StageConfig
from data_pipeline.plan import Plan, PlanSource
from maxtrain.show_plan import timeline


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    for name, text in (("web", "a web page. "), ("code", "x = 1; ")):
        (folder / f"{name}.txt").write_text(text * 200)
        assert prepare.main([str(folder / name), "--text", str(folder / f"{name}.txt"), "--workers", "1"]) == 0
    sources = {name: {"path": str(folder / name), "epochs": None} for name in ("web", "code")}
    data = {"sources": sources, "seq_length": 32, "batch_size": 4}
    data["stages"] = [{"until": 10, "weights": {"web": 3, "code": 1}}, {"weights": {"code": 1}, "batch_size": 8}]
    (folder / "run.yaml").write_text(json.dumps({"steps": 40, "data": data, "schedule": {"warmup_steps": 1}}))
    return folder / "run.yaml"


@pytest.mark.parametrize("module", ["data_pipeline.plan", "maxtrain.show_plan", "maxtrain.cli"])
def test_prints_stretches_shares_epochs_and_a_timeline_without_a_device(config, module):
    verb = ["plan"] if module == "maxtrain.cli" else []
    code = f"import runpy, sys; sys.argv = [{module!r}, *{verb!r}, 'config={config}']\n"
    code += f"try: runpy.run_module({module!r}, run_name='__main__')\n"
    code += "finally: print(sys.modules['jax._src.xla_bridge'].backends_are_initialized(), file=sys.stderr)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0 and result.stderr.split()[-1] == "False", result.stderr
    assert result.stdout.startswith("plan: 40 steps, 8.96 k tokens (rows x length); ends because steps=40;")
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["0", "to", "10", "1.28k", "4", "x", "32", "25.0%", "0.227", "75.0%", "0.395"] in rows
    assert ["10", "to", "40", "7.68k", "8", "x", "32", "100.0%", "5.68", "-"] in rows
    assert rows[-1] == ["step", "0", "40"] and rows[-2][0] == "web" and set(rows[-2][1]) == {"▆"}


@pytest.mark.parametrize(
    "override, code, message",
    [
        ("data.sources.web.path=nowhere", 65, "data.sources.web.path: nowhere"),
        ("eval.sets.held.path=nowhere", 65, "eval.sets.held.path: nowhere"),
        ("model.vocab_size=8", 78, "Set model.vocab_size to 257 or more"),
    ],
)
def test_what_can_not_be_planned_is_said_with_its_code(config, override, code, message):
    command = [sys.executable, "-m", "maxtrain.show_plan", f"config={config}", override]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == code and message in result.stderr and not result.stdout


def test_the_timeline_begins_where_the_plan_does():
    sources = {name: PlanSource(name, 1000, {10: 100}) for name in "ab"}
    stages = (StageConfig(10, weights={"a": 1}), StageConfig(None, weights={"b": 1}))
    named = {name: SourceConfig(name, 1.0, None) for name in "ab"}
    config = DataConfig(sources=named, stages=stages, seq_length=10, batch_size=2)
    plan = Plan.solve(0, sources, config, 20)
    first, second, steps = timeline(plan, 26).splitlines()
    assert first == "   a  " + "█" * 10 + " " * 10 and second == "   b  " + " " * 10 + "█" * 10
    assert steps == "step  0" + " " * 17 + "20"
    rest = Plan.solve(0, sources, config, 20, plan.cursor_at(15))
    assert rest.changes() == [15, 20] and set(timeline(rest, 30).splitlines()[0]) <= {" ", "a"}
