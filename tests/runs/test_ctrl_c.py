"""Ctrl-C of long commands in the middle of their work: they end in time, and leave nothing behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks.imports import write_model
from maxtrain.commands.import_hf import import_weights
from maxtrain.config.schema import ModelConfig

ROOT = Path(__file__).parents[2]
# Three, and as much as a busy machine may take until it gets to it.
SECONDS = 5.0
# 230 MB: none of what is waited for is over before the signal comes.
MODEL = ModelConfig(
    vocab_size=512,
    num_layers=6,
    embed_dim=768,
    mlp_dim=3072,
    num_heads=12,
    num_kv_heads=12,
    max_length=4096,
)
# As a terminal starts it, even where the tests themselves ignore the signal.
PROGRAM = (
    "import signal, sys\n"
    "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "from maxtrain import cli\n"
    "sys.exit(cli.main())\n"
)


class Case(NamedTuple):
    """A command, and when the signal comes: a file is there, or a program is compiled."""

    command: str
    file: str = ""
    program: str = ""


IMPORT = "import {source} {folder}/run"
EXPORT = "export {run} {folder}/out"
SAVING = Case(IMPORT, file=".run.import-*/checkpoints/*/*/*")
OTHERS = {
    "import, reading": Case(IMPORT, file=".run.import-*"),
    "import, reading again": Case(IMPORT, file=".run.import-*/checkpoints/00000000"),
    "export, writing": Case(EXPORT, file=".out.export-*/*.safetensors*"),
    "export, reading again": Case(EXPORT, program="logits"),
    "merge": Case("merge {recipe} {folder}/out", file=".out.merge-*/*"),
    "generate": Case("generate {run} --prompt a --max-tokens 3000", program="decode"),
    "evaluate": Case("evaluate {run} --text {text}", program="_score"),
    "score": Case("score {run} --file {text}", program="_score"),
}
CASES = [pytest.param(SAVING, id="import, saving", marks=pytest.mark.long)]
for name, case in OTHERS.items():
    CASES.append(pytest.param(case, id=name, marks=pytest.mark.slow))


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """The inputs of the commands, by their names in them."""
    folder = tmp_path_factory.mktemp("sources")
    source = folder / "source"
    write_model(source, MODEL, "float32", 1)
    text = folder / "text.txt"
    text.write_text("All work and no play. " * 20_000)
    recipe = folder / "recipe.yml"
    recipe.write_text(
        f"merge_method: linear\nmodels:\n- {{model: {source}, parameters: {{weight: 1.0}}}}\n"
    )
    return {"source": source, "run": folder / "runs" / "imported", "text": text, "recipe": recipe}


@pytest.mark.processes
@pytest.mark.parametrize("case", CASES)
def test_it_ends_in_time_and_leaves_nothing(case, places, tmp_path):
    if "{run}" in case.command and not places["run"].exists():
        import_weights(places["source"], places["run"], "float32", lambda text: None)
    folder = tmp_path / "folder"
    folder.mkdir()
    words = case.command.format(folder=folder, **places).split()
    log = tmp_path / "stderr"
    with log.open("wb") as stderr:
        child = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *words],
            cwd=ROOT,
            env=os.environ | {"JAX_LOG_COMPILES": "1"},
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )
    try:
        while not _has_happened(case, folder, log):
            assert child.poll() is None, log.read_text()
            time.sleep(0.002)
        begin = time.monotonic()
        child.send_signal(signal.SIGINT)
        child.wait(60)
        seconds = time.monotonic() - begin
    finally:
        child.kill()
    told = log.read_text()
    assert child.returncode == 130, told
    assert told.endswith("interrupted. Run the same command again.\n")
    assert "Traceback" not in told
    assert list(folder.iterdir()) == []
    assert seconds < SECONDS


def _has_happened(case: Case, folder: Path, log: Path) -> bool:
    if case.program:
        return f"Finished XLA compilation of jit({case.program})" in log.read_text()
    # Directories come and go meanwhile.
    with contextlib.suppress(OSError):
        return any(folder.glob(case.file))
    return False
