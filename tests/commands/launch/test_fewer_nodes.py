"""A job of Slurm that loses a node trains on with the others: real processes, in a Slurm that is
pretended."""

import os
import random
import subprocess
import sys
from pathlib import Path

import jax
import pytest
import yaml

from data_pipeline.prepare import command as prepare
from maxtrain.commands.launch import command
from maxtrain.observe.launches import read_launches
from maxtrain.observe.metrics import read_metrics
from tests.support.shared import TINY_MODEL, WORDS

pytestmark = [pytest.mark.slow, pytest.mark.processes]
ROOT = Path(__file__).parents[3]
# Starts a process on this machine for each node; in the first attempt the one on n1 dies, and then
# n1 is down.
SRUN = """
import os, pathlib, socket, subprocess, sys
options = [word for word in sys.argv[1:] if word.startswith("--")]
command = sys.argv[1 + max(i for i, word in enumerate(sys.argv[1:]) if word.startswith("--")) :]
given = dict(word.partition("=")[::2] for word in options)
down = given.get("--exclude", "").split(",")
nodes = [f"n{i}" for i in range(1, 5) if f"n{i}" not in down][: int(given["--nodes"])]
here = pathlib.Path(os.environ["PRETEND"])
with socket.socket() as free:
    free.bind(("localhost", 0))
    port = free.getsockname()[1]
step = {
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_STEP_TASKS_PER_NODE": str(len(nodes)),
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": str(len(nodes)),
    "JAX_COORDINATOR_PORT": str(port),
}
if "n1" in nodes:
    step["MAXTRAIN_FAILPOINT"] = "before_step:kill:7::0"
children = []
for index, node in enumerate(nodes):
    task = {"SLURM_PROCID": str(index), "SLURM_LOCALID": str(index)}
    log = open(here / f"log-{len(nodes)}-{node}", "w")
    words = [word for word in command if not word.startswith("--")]
    children.append(
        subprocess.Popen(words, env=os.environ | step | task, stdout=log, stderr=log)
    )
codes = [child.wait() for child in children]
if "n1" in nodes:
    (here / "down").write_text("n1")
sys.exit(max(128 - code if code < 0 else code for code in codes))
"""
SINFO = """#!/bin/sh
[ ! -f "$PRETEND/down" ] || cat "$PRETEND/down"
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nodes")
    rng = random.Random(0)
    for number in range(40):
        (folder / f"{number}.txt").write_text(" ".join(rng.choices(WORDS, k=60)))
    data = folder / "data"
    assert prepare.main([str(data), "--text", f"{folder}/*.txt", "--workers", "1"]) == 0
    values = {
        "output_dir": str(folder / "runs"),
        "steps": 10,
        "log_interval": 1,
        "checkpoint_interval": 4,
        "checkpoint": {"asynchronous": False},
        "model": TINY_MODEL,
        "data": {
            "sources": {"text": {"path": str(data), "epochs": None}},
            "seq_length": 32,
            "batch_size": 12,
        },
        "schedule": {"warmup_steps": 2},
        "precision": {"compute": "float32"},
        "mesh": {"fsdp": 1, "platform": "cpu"},
        "watchdog": {"factor": 0},
        "observe": {"progress": "plain", "plot": False, "trackers": [], "peak_tflops": 1.0},
    }
    (folder / "tiny.yaml").write_text(yaml.safe_dump(values))
    return folder / "tiny.yaml"


def environment(folder):
    """Programs are compiled quickly, and those of a single process are kept."""
    cache = {"JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir)}
    flags = {"XLA_FLAGS": "--xla_backend_optimization_level=0", "PRETEND": str(folder)}
    return os.environ | cache | flags


def records(config, run_name):
    found = read_metrics(config.parent / "runs" / run_name)
    return [record for record in found if record["kind"] == "train"]


def test_a_job_that_loses_the_node_of_process_0_trains_on_with_the_same_batches(
    config, tmp_path, capsys
):
    """Four replicas on four nodes, of which n1 is lost at step 7; three replicas go on from step 4,
    with two micro-batches, to the losses of a run that lost nothing."""
    words = ["slurm", "--nodes", "4", f"config={config}", "run_name=fewer", "mesh.dcn_data=4"]
    words += ["mesh.min_processes=2", "observe.compilation_cache=null"]
    assert command.main(words, "maxtrain launch") == 0
    script = capsys.readouterr().out
    assert "choices=(4 3 2)" in script
    programs = tmp_path / "bin"
    programs.mkdir()
    (tmp_path / "srun.py").write_text(SRUN)
    srun = f'#!/bin/sh\nexec {sys.executable} {tmp_path}/srun.py "$@"\n'
    nothing = dict.fromkeys(("sleep", "squeue", "scancel"), "#!/bin/sh\n")
    for name, text in ({"srun": srun, "sinfo": SINFO} | nothing).items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    slurm = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NODELIST": "n[1-4]",
        "SLURM_JOB_NUM_NODES": "4",
    }
    job = subprocess.run(
        ["bash", "-c", script],
        env=environment(tmp_path) | slurm,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=700,
    )
    logs = {log.name: log.read_text() for log in tmp_path.glob("log-*")}
    assert job.returncode == 0, (job.stderr, logs)
    assert "launch: continues with 3 of 4 nodes, without n1\n" in job.stderr
    assert "Goes on from step 4" in logs["log-3-n2"]
    launches = read_launches(config.parent / "runs" / "fewer")
    assert [(one["step"], one["processes"]) for one in launches] == [(0, 4), (4, 3)]
    assert "dcn_data: 3\n" in launches[1]["config"] and "accumulation: 2\n" in launches[1]["config"]

    alone = [sys.executable, "-m", "maxtrain.train", f"config={config}", "run_name=alone"]
    alone += ["mesh.simulated_devices=4", "mesh.data=4", "observe.compilation_cache=null"]
    subprocess.run(alone, env=environment(tmp_path), cwd=ROOT, check=True, timeout=700)
    ours = records(config, "fewer")
    theirs = records(config, "alone")
    assert [record["step"] for record in ours] == list(range(1, 11))
    assert [record["batch"] for record in ours] == [record["batch"] for record in theirs]
    for key in ("loss", "grad_norm"):
        expected = pytest.approx([record[key] for record in theirs], rel=1e-5)
        assert [record[key] for record in ours] == expected
