"""Tiny runs behind a URL, in this process, in one of their own, or on two hosts without a shared
disk; and the checks that they equal an undisturbed run on a disk."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.faulty_s3 import names_below
from data_pipeline.base.remote import RemotePath
from maxtrain import failpoints
from maxtrain.checkpoint.listing import saved_digests
from maxtrain.config import load_config
from maxtrain.observe.metrics import read_metrics
from maxtrain.storage.reading import readable
from maxtrain.trainer.loop import main

ROOT = Path(__file__).parents[2]
STEPS = 9
BUCKET = "s3://faulty"


@pytest.fixture(scope="module", name="folder")
def undisturbed(tmp_path_factory, tiny_run, s3) -> Path:
    """A folder with a config beside its data, and a run on a disk that nobody disturbed."""
    folder = tmp_path_factory.mktemp("url")
    tiny_run(
        folder,
        steps=STEPS,
        checkpoint_interval=3,
        schedule={"name": "constant", "warmup_steps": 1},
        mesh={"data": 1, "fsdp": 8},
        checkpoint={"keep": 2},
        observe={"trackers": ["tensorboard"]},
    )
    assert train(folder, "whole") == 0
    return folder


def options(folder, run, *overrides, disk=None, bucket=BUCKET):
    words = [f"config={folder / 'tiny.yaml'}", f"run_name={run}"]
    if disk is not None:
        words += [f"output_dir={bucket}/runs", f"local_dir={folder / disk}"]
    return [*words, *overrides]


def train(folder, run, *overrides, disk=None, bucket=BUCKET):
    return main(load_config(options(folder, run, *overrides, disk=disk, bucket=bucket)))


def in_a_process(folder, run, disk, failpoint="", overrides=(), bucket=BUCKET):
    """Return the exit code of a training in a process of its own, and its output."""
    words = options(folder, run, *overrides, disk=disk, bucket=bucket)
    command = [sys.executable, "-m", "maxtrain.train", *words]
    environment = os.environ | {failpoints.VARIABLE: failpoint}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    return done.returncode, done.stdout + done.stderr


def url_of(run, bucket=BUCKET):
    return f"{bucket}/runs/{run}"


def steps_at(run, bucket=BUCKET):
    names = names_below(RemotePath(url_of(run, bucket)))
    found = [re.fullmatch(r"checkpoints/(\d+)/commit.json", name) for name in names]
    return sorted(int(name[1]) for name in found if name)


def numbers(run):
    """Records of training without what depends on the clock or the machine."""
    kept = []
    for record in read_metrics(run):
        values = {}
        for name, value in record.items():
            if not re.search(r"second|mfu|bytes|slowest_process", name):
                values[name] = value.hex() if isinstance(value, float) else value
        kept.append(values)
    return kept


def assert_same(folder, run, bucket=BUCKET):
    """A run at a URL is the one on the disk."""
    ours = readable(url_of(run, bucket))
    whole = folder / "runs" / "whole"
    assert numbers(ours) == numbers(whole) and len(numbers(ours)) == STEPS
    digests = saved_digests(ours / "checkpoints")
    assert digests[STEPS] == saved_digests(whole / "checkpoints")[STEPS]
    assert sorted(digests) == steps_at(run, bucket)


def on_two_hosts(folder, run, disks, failpoint="", overrides=()):
    """Run two processes that share no disk (or one, if `disks` is empty). Returns their output and
    exit codes."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        _, port = free.getsockname()
    processes = []
    for index in range(2):
        disk = disks[index] if disks else None
        own = [word.format(index=index) for word in overrides]
        words = options(folder, run, "mesh.simulated_devices=4", *own, disk=disk)
        words += [f"mesh.coordinator=localhost:{port}", "mesh.num_processes=2"]
        words.append(f"mesh.process_id={index}")
        command = [sys.executable, "-m", "maxtrain.train", *words]
        environment = os.environ | {failpoints.VARIABLE: failpoint}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, **pipes))
    try:
        said = [process.communicate(timeout=600)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], "\n".join(said)
