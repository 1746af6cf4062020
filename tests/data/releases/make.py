"""Write runs of this version as a fixture that later versions must resume.

    python tests/data/releases/make.py

It trains three runs of six steps, writes down their numbers, trains each again until it is stopped
after its checkpoint of step 3, and packs the stopped runs with their data into
`run-of-VERSION.tar.gz` beside this file. To be run once for each release.
"""

import json
import os
import random
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import yaml

from maxtrain import __version__, failpoints
from maxtrain.observe.metrics import read_metrics

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
WORDS = "one two three four five six seven eight nine ten".split()
CONFIG = {
    "output_dir": "runs",
    "steps": 6,
    "log_interval": 1,
    "eval_interval": 0,
    "checkpoint_interval": 3,
    "model": {
        "num_layers": 2,
        "embed_dim": 8,
        "mlp_dim": 16,
        "num_heads": 2,
        "num_kv_heads": 2,
        "max_length": 32,
    },
    "data": {
        "sources": {"text": {"path": "data", "epochs": None}},
        "seq_length": 32,
        "batch_size": 8,
    },
    "schedule": {"name": "constant", "warmup_steps": 2},
    "mesh": {"data": 1, "fsdp": 8, "simulated_devices": 8},
    "observe": {
        "progress": "plain",
        "trackers": [],
        "plot": False,
        "peak_tflops": 1.0,
        "compilation_cache": None,
    },
}
# What each run has beside that.
OPTIONS = {
    "adamw": [],
    "muon": [
        "optimizer.name=muon",
        "optimizer.ema_decay=0.9",
        "optimizer.groups.slow.pattern=mlp",
        "optimizer.groups.slow.lr_factor=0.5",
    ],
    "adafactor": [
        "optimizer.name=adafactor",
        "model.tie_embeddings=true",
        "model.family=qwen3",
        "precision.compute=float16",
        "optimizer.no_decay=['norm']",
    ],
}


def train(folder: Path, name: str, *words: str, code: int = 0, failpoint: str = "") -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), failpoints.VARIABLE: failpoint}
    command = [sys.executable, "-m", "maxtrain.train", "config=tiny.yaml", f"run_name={name}"]
    ended = subprocess.run([*command, *words], cwd=folder, env=environment)
    assert ended.returncode == code, ended


def make(folder: Path) -> None:
    rng = random.Random(0)
    texts = folder / "texts"
    texts.mkdir()
    for number in range(40):
        words = rng.choices(WORDS, k=rng.randrange(20, 120))
        (texts / f"{number}.txt").write_text(" ".join(words))
    prepare = [sys.executable, "-m", "data_pipeline.prepare", "data", "--text", "texts/*.txt"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([*prepare, "--workers", "1"], cwd=folder, env=environment, check=True)
    (folder / "tiny.yaml").write_text(yaml.safe_dump(CONFIG))
    numbers = {}
    for name, words in OPTIONS.items():
        train(folder, f"{name}-whole", *words)
        numbers[name] = [
            [record["step"], record["loss"].hex(), record["grad_norm"].hex(), record["params_hash"]]
            for record in read_metrics(folder / "runs" / f"{name}-whole")
            if record["kind"] == "train"
        ]
        train(folder, name, *words, code=75, failpoint="after_step:nan:4")
    (folder / "numbers.json").write_text(json.dumps(numbers, indent=1))
    with tarfile.open(HERE / f"run-of-{__version__}.tar.gz", "w:gz") as archive:
        for name in ("data", "tiny.yaml", "numbers.json", *(f"runs/{name}" for name in OPTIONS)):
            archive.add(folder / name, name)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        make(Path(made))
