"""`make quickstart` from a fresh clone, with a smaller model and fewer steps: prepare, train,
evaluate, save, write text."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.tokenizer import load_tokenizer
from maxtrain.observe.launches import read_launches
from tests.support.llama_cpp import LlamaCpp

ROOT = Path(__file__).parents[2]
SMALL = "steps=6 eval_interval=3 checkpoint_interval=3 log_interval=2 schedule.warmup_steps=2 model.num_layers=2 model.embed_dim=64"


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A clone that holds the files of the working tree, and uses this interpreter's packages."""
    folder = tmp_path_factory.mktemp("fresh") / "clone"
    subprocess.run(
        ["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(folder)], check=True
    )
    return folder


def quickstart(clone: Path, *more: str) -> subprocess.CompletedProcess:
    arguments = " ".join([SMALL, *more])
    command = [
        "make",
        "-o",
        ".venv/.ready",
        "quickstart",
        f"PY={sys.executable}",
        f"ARGS={arguments}",
    ]
    return subprocess.run(command, cwd=clone, capture_output=True, text=True, timeout=400)


@pytest.fixture(scope="module")
def quickstart_shown(clone) -> str:
    """The output of `make quickstart`; its data and its run are in the clone from then on."""
    first = quickstart(clone)
    assert first.returncode == 0, first.stdout + first.stderr
    return first.stdout


@pytest.fixture(scope="module")
def finished(clone, quickstart_shown) -> Path:
    """The clone after `make quickstart`."""
    return clone


@pytest.mark.long
@pytest.mark.processes
def test_quickstart_does_the_whole_job_and_says_so(clone, quickstart_shown):
    shown = quickstart_shown
    assert (
        "-m data_pipeline.prepare data/stdlib --python-stdlib" in shown
    )  # the plain commands are printed
    assert "-m maxtrain.train config=quickstart" in shown
    run = clone / "runs" / "quickstart"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evals = [r for r in records if r["kind"] == "eval"]
    manifest = json.loads((clone / "data/stdlib/eval/manifest.json").read_text())
    assert [r["step"] for r in evals] == [3, 6]
    assert all(r["tokens"] == manifest["num_tokens"] for r in evals)
    assert evals[-1]["nll"] < evals[0]["nll"] < 8.5
    assert "gzip -9 reaches" in shown and "bits per byte" in shown
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "maxtrain generate" in shown
    for prompt in ("def __init__(self, ", "import os\n"):
        # Each prompt with its completion is above a line that is drawn.
        completion = shown.split(prompt, 1)[1].split("\u2500")[0]
        assert completion.removesuffix("\n"), f"nothing was written after {prompt!r}"
    # A make inside another one says where it leaves.
    lines = [line.strip() for line in shown.splitlines() if not line.startswith("make[")]
    offered = [line for line in lines if line]
    assert offered[-1].endswith("export runs/quickstart exported/quickstart --format hf")
    again = quickstart(clone)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "Nothing to do" in again.stdout


def python(clone: Path, *command: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=clone, capture_output=True, text=True, timeout=400
    )


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize(
    "more",
    [
        "run_name=wide model.embed_dim=512 optimizer.learning_rate=1e-3 model.num_layers=1",
        "run_name=mixed data.sources.docs.path=data/docs/train data.sources.docs.weight=0.2",
        "run_name=meshed mesh.simulated_devices=4 mesh.fsdp=2 mesh.tensor=2",
        "run_name=long mesh.simulated_devices=4 mesh.fsdp=2 mesh.context=2 model.attention=ring",
        "run_name=stored mesh.simulated_devices=4 mesh.fsdp=2 mesh.context=2 model.attention=ring "
        "'mesh.rules.embed=[fsdp, context]'",
        "run_name=staged mesh.simulated_devices=4 mesh.fsdp=2 mesh.stage=2 model.pipeline.micro_batches=4",
        "run_name=turns mesh.simulated_devices=4 mesh.fsdp=2 mesh.stage=2 model.pipeline.schedule=1f1b",
        "run_name=moments optimizer.on_host=true",
        "run_name=weights optimizer.on_host=true train.on_host=all model.remat=full "
        "model.scan_layers=true",
        "run_name=kept model.remat=named 'model.kept.on_device=[attention, gate_up]' 'model.kept.on_host=[qkv]'",
        "run_name=fitting optimizer.accumulation=auto",
        "run_name=experts model.family=mixtral model.moe.num_experts=4 mesh.simulated_devices=4 mesh.fsdp=2 mesh.expert=2",
    ],
    ids=lambda more: more.split()[0],
)
def test_readme_variants_train(finished, more):
    """The README's other runs, a few steps of them, on the quickstart's data."""
    if "docs" in more:
        options = ["--text", "*.md", "--holdout", "0.3", "--tokenizer", "data/stdlib/train"]
        made = python(finished, "data_pipeline.prepare", "data/docs", *options)
        assert made.returncode == 0, made.stdout + made.stderr
    small = [key for key in SMALL.split() if key.split("=")[0] not in more]
    short = [
        "steps=2",
        "schedule.warmup_steps=1",
        "eval_interval=0",
        "eval_steps=2",
        "observe.prompts=[]",
    ]
    small = [key for key in small if key.split("=")[0] not in {s.split("=")[0] for s in short}]
    result = python(
        finished, "maxtrain.train", "config=quickstart", *small, *short, *shlex.split(more)
    )
    assert result.returncode == 0, result.stdout + result.stderr
    if "meshed" in more:
        assert "  tensor  2  heads, hidden units and vocabulary\n" in result.stdout
        (launch,) = read_launches(finished / "runs" / "meshed")
        held = launch["device_bytes"]
        assert held["optimizer_state"] > held["parameters"] > held["batch"] > 0
    if "stored" in more:
        assert "  parameters are stored by embed=[fsdp, context]\n" in result.stdout
    assert "2 steps" in result.stdout


def written(finished: Path, *options: str) -> str:
    """Return the text that a finished run writes after the prompt."""
    command = ["maxtrain.cli", "generate", "runs/quickstart", "--prompt", "def main(", *options]
    result = python(finished, *command)
    assert result.returncode == 0, result.stdout + result.stderr
    (before, *after) = result.stdout.split("def main(", 1)
    assert after and not before.strip(), "it begins with the prompt"
    # A character whose last bytes were not written yet is shown as U+FFFD.
    return after[0].removesuffix("\n").rstrip("\ufffd")


@pytest.mark.long
@pytest.mark.processes
def test_a_finished_run_writes_text(finished):
    """More than the prompt: the more tokens, the more text, which begins with the same."""
    short = written(finished, "--max-tokens", "8")
    longer = written(finished, "--max-tokens", "16")
    assert short
    assert longer.startswith(short) and len(longer) > len(short)


@pytest.mark.long
@pytest.mark.processes
def test_steps_of_a_finished_run_are_the_same_again(finished):
    result = python(finished, "maxtrain.cli", "replay", "runs/quickstart", "--steps", "3:6")
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"[1-9]\d* numbers .*all the same bit for bit", result.stdout)


@pytest.mark.long
@pytest.mark.processes
def test_a_finished_run_is_exported_as_it_offers(finished):
    words = ["runs/quickstart", "exported/quickstart", "--format", "hf"]
    result = python(finished, "maxtrain.cli", "export", *words)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "bit for bit" in result.stdout
    found = {path.name for path in (finished / "exported/quickstart").iterdir()}
    assert found == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


@pytest.mark.long
@pytest.mark.processes
def test_a_finished_run_is_a_file_for_llama_cpp(finished):
    """The file has the tokenizer that was trained for it, and generates text."""
    words = ["runs/quickstart", "quickstart.gguf", "--format", "gguf", "--quant", "q8_0"]
    result = python(finished, "maxtrain.cli", "export", *words)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "its tensors and keys are what was written" in result.stdout
    assert result.stdout.splitlines()[-1] == "run it: llama-cli -m quickstart.gguf"
    theirs = LlamaCpp(finished / "quickstart.gguf")
    text = "def main(\n    self, \u00e9):"
    tokenizer = load_tokenizer(finished / "data/stdlib")
    ids = [tokenizer.eod_id, *tokenizer.encode(text).tolist()]
    assert theirs.tokenize(text, begin=True) == ids
    likely = theirs.log_probabilities(ids, tokenizer.vocab_size)
    assert np.exp(likely).sum() == pytest.approx(1, abs=1e-3)
    again = python(finished, "maxtrain.cli", "export", *words)
    assert again.returncode == 64 and "exists. Name a file" in again.stderr
