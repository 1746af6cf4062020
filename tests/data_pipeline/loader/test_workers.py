"""A process whose grain worker is killed ends, with the code that says: run it again."""

import subprocess
import sys
from pathlib import Path

import pytest

from data_pipeline.prepare import command as prepare

READER = """
import multiprocessing, os, signal, sys
from data_pipeline.loader import workers
from data_pipeline.config import DataConfig, SourceConfig
from data_pipeline.base.errors import run_command
from data_pipeline.loader.loader import open_training

def read():
    source = SourceConfig(sys.argv[1], 1.0, None)
    data = open_training(DataConfig({"a": source}, seq_length=64, batch_size=128, workers=2, prefetch=4), 0, 10**6)
    for number, _ in enumerate(data.iterate(0)):
        if number == 2:
            os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)

workers._PATIENCE = 0.2
sys.exit(run_command(read))
"""


@pytest.mark.long
@pytest.mark.processes
def test_the_process_ends_and_does_not_hang(tmp_path):
    """One of two workers dies while it writes a batch that is larger than a pipe holds."""
    (tmp_path / "a.txt").write_text("some text " * 2000)
    assert (
        prepare.main([str(tmp_path / "data"), "--text", f"{tmp_path}/a.txt", "--workers", "1"]) == 0
    )
    command = [sys.executable, "-c", READER, str(tmp_path / "data")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, cwd=Path(__file__).parents[3]
    )
    assert done.returncode == 75, done.stderr
    assert "data.workers=2: a worker process was killed. Run the same command again" in done.stderr
    assert "Traceback" not in done.stderr
