"""The command that prints a plan: what it says, and that it starts no device."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest

from data_pipeline.config import DataConfig, SourceConfig, StageConfig
from data_pipeline.loader.loader import open_training
from data_pipeline.plan.plan import Plan, PlanSource
from data_pipeline.prepare import command as prepare
from data_pipeline.prepare.preview import preview_rows
from data_pipeline.shards import TokenShards
from maxtrain import cli
from maxtrain.commands.plan.command import timeline
from maxtrain.config import load_config
from maxtrain.observe.metrics import read_metrics
from maxtrain.trainer.data import open_data
from tests.support.commands import run


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    for name, text in (("web", "a web page. "), ("code", "x = 1; ")):
        (folder / f"{name}.txt").write_text(text * 200)
        assert (
            prepare.main(
                [str(folder / name), "--text", str(folder / f"{name}.txt"), "--workers", "1"]
            )
            == 0
        )
    sources = {name: {"path": str(folder / name), "epochs": None} for name in ("web", "code")}
    data = {"sources": sources, "seq_length": 32, "batch_size": 4}
    data["stages"] = [
        {"until": 10, "weights": {"web": 3, "code": 1}},
        {"weights": {"code": 1}, "batch_size": 8},
    ]
    (folder / "run.yaml").write_text(
        json.dumps({"steps": 40, "data": data, "schedule": {"warmup_steps": 1}})
    )
    return folder / "run.yaml"


@pytest.mark.long
def test_prints_stretches_shares_epochs_and_a_timeline_without_a_device(config):
    code = f"import runpy, sys; sys.argv = ['maxtrain', 'plan', 'config={config}']\n"
    code += "try: runpy.run_module('maxtrain', run_name='__main__')\n"
    code += "finally: print(sys.modules['jax._src.xla_bridge'].backends_are_initialized(), file=sys.stderr)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0 and result.stderr.split()[-1] == "False", result.stderr
    assert result.stdout.startswith(
        "plan: 40 steps, 8.96 k tokens (rows x length); ends because steps=40;"
    )
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["0", "to", "10", "1.28k", "4", "x", "32", "25.0%", "0.227", "75.0%", "0.395"] in rows
    assert ["10", "to", "40", "7.68k", "8", "x", "32", "100.0%", "5.68", "-"] in rows
    assert rows[-1] == ["step", "0", "40"] and rows[-2][0] == "web" and set(rows[-2][1]) == {"▆"}


@pytest.mark.long
@pytest.mark.parametrize(
    "override, code, message",
    [
        ("data.sources.web.path=nowhere", 65, "data.sources.web.path: nowhere"),
        ("eval.sets.held.path=nowhere", 65, "eval.sets.held.path: nowhere"),
        ("model.vocab_size=8", 78, "Set model.vocab_size to 257 or more"),
    ],
)
def test_what_can_not_be_planned_is_said_with_its_code(config, override, code, message):
    command = [sys.executable, "-m", "maxtrain", "plan", f"config={config}", override]
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


def plan(*arguments):
    """Exit code and both streams of `maxtrain plan`, and whether a device was started."""
    code = (
        f"import sys; from maxtrain.cli import main; code = main(['plan', *{list(arguments)!r}])\n"
    )
    code += "if 'jax' in sys.modules: assert not sys.modules['jax._src.xla_bridge'].backends_are_initialized()\n"
    result = subprocess.run(
        [sys.executable, "-c", code + "sys.exit(code)"],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "100"},
    )
    assert "AssertionError" not in result.stderr
    return result.returncode, result.stdout, result.stderr


@pytest.mark.every_dose
@pytest.mark.long
def test_a_step_shows_its_rows_documents_and_text_without_a_device(config):
    code, said, _ = plan(f"config={config}", "--step", "12", "--rows", "2")
    loaded = load_config([f"config={config}"])
    data = open_training(loaded.data, loaded.seed, loaded.steps)
    batch = data.batch(11)
    lines = said.splitlines()
    assert (
        code == 0 and lines[0] == "step 12 of 40: 8 rows of 32 tokens, 256 targets in 256 positions"
    )
    assert lines[1] == f"  batch {batch.digest}" and data.digest_at(11) == batch.digest
    assert re.fullmatch(
        r"  code: 8 rows, 256 targets, of \S+/code; made by: .*prepare OUT --text \S+code.txt",
        lines[2],
    )
    text = data.tokenizer.decode(batch.arrays["targets"][0])
    row = data.rows_at(11).row[0]
    assert (
        lines[3]
        == f"row 0: code, epoch 0, row {row} of it, document 0; 32 of 32 tokens are targets"
    )
    assert lines[4] == "    " + text and "and 6 rows more; --rows 8 shows all" in lines
    commands = [line.split(": python ", 1)[1] for line in lines if line.startswith("A whole ")]
    programs = [[sys.executable, *shlex.split(command)] for command in commands]
    shown = [subprocess.run(program, capture_output=True, text=True).stdout for program in programs]
    assert shown[0].startswith("x = 1; x = 1;") and text in shown[1]
    assert lines[-1] == "To be read, unless data or settings change before."


@pytest.mark.long
def test_a_step_is_of_the_seed_of_the_data_as_in_training(config, tmp_path):
    words = [f"config={config}", "data.seed=5"]
    loaded = load_config(words)
    data, _ = open_data(loaded, None)
    digest = data.digest_at(11)
    assert digest != open_training(loaded.data, loaded.seed, loaded.steps).digest_at(11)
    code, said, _ = plan(*words, "--step", "12")
    assert code == 0 and f"  batch {digest}" in said.splitlines()
    shutil.copy(config, tmp_path / "config.yaml")
    record = {"kind": "train", "step": 12, "batch": digest}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    code, said, error = plan(str(tmp_path), "data.seed=5", "--step", "12")
    assert code == 0 and f"  batch {digest}" in said.splitlines(), error
    assert said.endswith("Read by the run: its record of this step names the same batch.\n")


@pytest.mark.parametrize("packing", ["stream", "bins", "pad", "balanced"])
def test_the_documents_of_a_row_are_those_whose_tokens_it_has(tmp_path, packing):
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number:02d}.txt").write_text(f"<{number:02d}> " * (1 + number % 5))
    assert prepare.main([str(tmp_path / "out"), "--text", f"{folder}/*.txt", "--workers", "1"]) == 0
    settings = {
        "sources": {"a": SourceConfig(str(tmp_path / "out"))},
        "seq_length": 48,
        "batch_size": 1,
    }
    data = open_training(DataConfig(packing=packing, **settings), seed=3, steps="auto")
    shards = TokenShards.open(tmp_path / "out")
    numbers = np.arange(shards.num_documents)
    first, lengths = shards.documents(numbers)
    assert (
        shards.documents_at(first).tolist()
        == shards.documents_at(first + lengths - 1).tolist()
        == numbers.tolist()
    )
    texts = [
        data.tokenizer.decode(shards.read(*shards.document(number))) for number in numbers.tolist()
    ]
    seen = []
    for step in range(data.plan.num_steps):
        arrays = data.batch(step).arrays
        for i, row in enumerate(preview_rows(data, step, arrays, 3, 1000)):
            ends = "".join(texts[number] + "|" for number in row.documents.tolist())
            targets = arrays["targets"][i][arrays["segment_ids"][i] > 0]
            read = "".join("|" if token == 256 else chr(token) for token in targets.tolist())
            assert read in ends and row.num_tokens == row.num_targets == len(read)
            seen += row.documents.tolist()
    assert set(seen) == set(numbers.tolist())


@pytest.fixture(scope="module")
def finished(config):
    """The folder of a run of twenty steps, that read something else from step 12 on."""
    small = [
        "model.num_layers=1",
        "model.embed_dim=16",
        "model.mlp_dim=16",
        "model.num_heads=2",
        "model.num_kv_heads=2",
    ]
    quiet = [
        "observe.trackers=[]",
        "observe.plot=false",
        "log_interval=5",
        "checkpoint_interval=6",
        "eval_interval=0",
    ]
    where = [
        f"config={config}",
        f"output_dir={config.parent / 'runs'}",
        "run_name=one",
        "data.stages=[]",
        *small,
        *quiet,
    ]
    for more in (["steps=12"], ["steps=20", "data.batch_size=2", "data.accept_changes=true"]):
        run(shlex.join(["maxtrain", "train", *where, *more]), config.parent)
    return config.parent / "runs" / "one"


@pytest.mark.long
@pytest.mark.processes
def test_steps_of_a_run_are_those_that_it_has_read(finished, tmp_path):
    records = {
        record["step"]: record["batch"]
        for record in read_metrics(finished)
        if record["kind"] == "train"
    }
    moved = tmp_path / "elsewhere"
    shutil.copytree(finished, moved)
    for folder in (finished, moved):
        for step, rows in ((5, 4), (15, 2)):
            code, said, error = plan(str(folder), "--step", str(step))
            assert code == 0 and said.startswith(
                f"step {step} of {12 if step < 12 else 20}: {rows} rows of 32"
            ), error
            assert f"  batch {records[step]}\n" in said
            assert said.endswith("Read by the run: its record of this step names the same batch.\n")
    assert (
        "as the batches on record of step 5 and step 10 show."
        in plan(str(finished), "--step", "7")[1]
    )
    assert "as the batches on record of step 15 show." in plan(str(finished), "--step=13")[1]
    assert plan(str(moved))[1].startswith("plan: 20 steps")
    code, said, _ = plan(str(moved), "--step", "25", "steps=30")
    assert (
        code == 0 and said.startswith("step 25 of 30: 2 rows") and said.endswith("change before.\n")
    )
    shutil.rmtree(moved / "checkpoints")
    code, said, error = plan(str(moved), "--step", "15")
    assert code == 65 and "do not give the batches that are on record" in error and not said
    code, _, error = plan(str(finished), "--step", "5", "seed=7")
    assert code == 65 and "leave out settings that it did not have" in error


@pytest.mark.every_dose
@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            ["RUN", "--step", "99"],
            64,
            "--step=99 is after the end of RUN, at step 40 because steps=40. Use a step from 1 to 40",
        ),
        (
            ["RUN", "--step", "0"],
            64,
            "--step=0 must be the number of a step, counted from 1. Use for example --step 100.",
        ),
        (["RUN", "--step", "x"], 64, "--step=x must be"),
        (["RUN", "--step"], 64, "--step= must be"),
        (["RUN", "--step", "1", "--step=2"], 64, "--step is given twice. Keep one of them."),
        (["RUN", "--rows", "3"], 64, "Give --step N, too."),
        (["RUN", "config=quickstart"], 64, "a plan shows one run"),
        (["RUN", "RUN"], 64, "a plan shows one run"),
        (["quickstart"], 64, "or write config=quickstart."),
        ([], 64, "Add config=NAME"),
    ],
)
def test_steps_and_folders_that_can_not_be_shown(config, tmp_path, arguments, code, message):
    shutil.copy(config, tmp_path / "config.yaml")
    arguments = [word.replace("RUN", str(tmp_path)) for word in arguments]
    found, said, error = plan(*arguments)
    assert found == code and message.replace("RUN", str(tmp_path)) in error and not said


def test_help_tells_of_steps():
    code, said, _ = plan("--help")
    assert code == 0 and "RUN|config=NAME --step N" in said and "keys" in said
    assert "model.num_layers" in plan("--help", "model")[1]


def test_adapters_of_another_rank_are_refused(config, tmp_path, capsys):
    there = {"peft_type": "LORA", "r": 16, "lora_alpha": 16.0}
    (tmp_path / "adapter_config.json").write_text(json.dumps(there))
    begins = [f"checkpoint.init_from={tmp_path}", f"checkpoint.init_adapters={tmp_path}"]
    words = ["plan", f"config={config}", *begins, "model.lora.rank=4"]
    assert cli.main(words) == 78
    assert "which has r=16. Set model.lora.rank=16." in capsys.readouterr().err
    assert cli.main([*words[:-1], "model.lora.rank=16"]) == 0
