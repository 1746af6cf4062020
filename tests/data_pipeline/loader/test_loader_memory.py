"""Memory of the loader: what is read ahead is bounded, in this process and in its workers, however
far it goes."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.shards import Manifest, ShardWriter
from data_pipeline.tokenizer import ByteTokenizer

ROOT = Path(__file__).parents[3]
ROWS, LENGTH, AHEAD = 64, 4096, 4
BATCH = ROWS * LENGTH * 5 * 4  # bytes
MEASURED = """
import json, multiprocessing, sys, time
from pathlib import Path
from data_pipeline.config import DataConfig, SourceConfig
from data_pipeline.loader.loader import open_training

def own(pid):  # without the pages of mapped files, which the system takes back
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return next(int(words[1]) for words in lines if words and words[0] == "RssAnon:") << 10

if __name__ == "__main__":
    path, workers, *shape = sys.argv[1], *map(int, sys.argv[2:])
    shape = dict(zip(("batch_size", "seq_length", "prefetch"), shape))
    config = DataConfig({"a": SourceConfig(path, 1.0, None)}, workers=workers, **shape)
    found = {0: [], 1: []}  # of this process, of all workers: at each of some steps
    for batch in open_training(config, 0, 400).iterate(0):
        if batch.step in (20, 60, 120, 250, 399):
            time.sleep(1)  # a slow step: all that may be read ahead is
            found[0].append(own("self"))
            found[1].append(sum(own(child.pid) for child in multiprocessing.active_children()))
    print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("workers", [0, 1, 2, 4])
def test_memory_does_not_grow_with_the_steps_nor_with_the_batches_that_could_be_read_ahead(
    tmp_path, workers
):
    tokenizer = ByteTokenizer()
    writer = ShardWriter(tmp_path, "tokens-00000", tokenizer.vocab_size)
    writer.append(np.random.default_rng(0).integers(0, 256, 4_000_000), np.full(4000, 1000))
    tokenizer.save(tmp_path)
    described = {
        "name": "bytes",
        "sha256": tokenizer.sha256,
        "vocab_size": 257,
        "special_ids": {"eod": tokenizer.eod_id},
    }
    Manifest(described, "uint16", "append", 4_000_000, (writer.close(),)).save(tmp_path)
    (tmp_path / "measured.py").write_text(MEASURED)
    command = [
        sys.executable,
        str(tmp_path / "measured.py"),
        *map(str, (tmp_path, workers, ROWS, LENGTH, AHEAD)),
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr
    here, there = json.loads(done.stdout).values()
    # Each worker keeps its share of what is read ahead, one that it makes and one that it sends; as
    # much is on its way here.
    assert max(here) < 150e6 + (2 * AHEAD + 4 * workers) * BATCH
    assert (
        max(there) < workers * (120e6 + 4 * BATCH) + AHEAD * BATCH if workers else there == [0] * 5
    )
    assert here[-1] < here[1] + 4 * BATCH and there[-1] < there[1] + 4 * workers * BATCH + 1, (
        "it grows with the steps"
    )
