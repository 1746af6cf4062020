"""The same run on one, two and four processes: the batches of all steps, where it ends, and what is
left of it by kills.

All jobs have four simulated devices, most of them in the same mesh, and train a tiny model on three
epochs of a tiny corpus.
"""

import contextlib
import fcntl
import itertools
import json
import os
import platform
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml

from data_pipeline.prepare import command as prepare
from data_pipeline.shards import Manifest
from maxtrain import failpoints
from maxtrain.checkpoint.listing import latest_record, saved_digests
from maxtrain.observe.launches import read_launches
from maxtrain.observe.lock import RunLock
from maxtrain.observe.metrics import read_metrics
from tests.support.shared import TINY_MODEL, WORDS

REPOSITORY = Path(__file__).parents[2]
DEVICES = 4
EVAL_BATCHES = (4, 12)
SECONDS = 700  # for a job; one that is killed here has hung

pytestmark = [pytest.mark.processes, pytest.mark.long]


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    """A config file beside its data: two sources, three epochs of both, a checkpoint every 5
    steps."""
    folder, rng = tmp_path_factory.mktemp("processes"), random.Random(0)
    for name, count in (("large", 36), ("small", 9), ("unseen", 7)):
        (folder / name).mkdir()
        for number in range(count):
            (folder / name / f"{number}.txt").write_text(
                " ".join(rng.choices(WORDS, k=rng.randrange(20, 80)))
            )
        assert (
            prepare.main(
                [str(folder / f"data-{name}"), "--text", f"{folder / name}/*.txt", "--workers", "1"]
            )
            == 0
        )
    sources = {
        name: {"path": str(folder / f"data-{name}"), "epochs": 3} for name in ("large", "small")
    }
    values = {
        "output_dir": str(folder / "runs"),
        "steps": "auto",
        "log_interval": 1,
        "eval_interval": 0,
        "checkpoint_interval": 5,
        # Of bytes, made even, so that a tensor axis divides it.
        "model": TINY_MODEL | {"vocab_size": 260},
        "data": {
            "sources": sources,
            "on_exhausted": "renormalize",
            "seq_length": 32,
            "batch_size": 8,
        },
        "optimizer": {"learning_rate": 1e-3},
        # A rate that does not go by the number of steps: a shorter run is the beginning of a longer
        # one.
        "schedule": {"name": "constant", "warmup_steps": 5},
        "mesh": {"data": 2, "fsdp": 2},
        "eval": {
            "sets": {
                f"by{n}": {"path": str(folder / "data-unseen"), "batch_size": n}
                for n in EVAL_BATCHES
            }
        },
        "precision": {"compute": "float32"},  # roundings to bfloat16 would hide what is compared
        "observe": {
            "progress": "plain",
            "trackers": [],
            "plot": False,
            "prompts": [],
            "peak_tflops": 1.0,
        },
    }
    (folder / "tiny.yaml").write_text(yaml.safe_dump(values))
    return folder / "tiny.yaml"


class HostsRun:
    """A run on `count` processes that can't get far unobserved: what process 0 says goes to a pipe
    that soon is full.

    `devices` are those of each process, `own` the overrides of each; only those in `present` are
    started. One of the first `leaders` must be there.
    """

    def __init__(
        self,
        config: Path,
        run_name: str,
        count: int,
        *overrides: str,
        devices: Sequence[int] = (),
        own: Sequence[str] = (),
        present: Sequence[int] = range(99),
        leaders: int = 1,
    ):
        with contextlib.ExitStack() as held:
            taken = [held.enter_context(socket.socket()) for _ in range(leaders)]
            for listener in taken:
                listener.bind(("localhost", 0))
            coordinator = ",".join(f"localhost:{one.getsockname()[1]}" for one in taken)
        command = [
            sys.executable,
            "-m",
            "maxtrain.train",
            f"config={config}",
            f"run_name={run_name}",
        ]
        command += ["observe.compilation_cache=null", *overrides]
        cache = {"JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir)}
        names = [name for name in jax.config.values if name.startswith("jax_persistent_cache_min")]
        cache |= {name.upper(): str(jax.config.values[name]) for name in names}
        # Only process 0 of a job writes to the cache of compiled programs, so the others always
        # compile: quickly, then.
        environment = (
            os.environ
            | cache
            | {"XLA_FLAGS": "--xla_backend_optimization_level=0", "PYTHONFAULTHANDLER": "1"}
        )
        pipes = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
            "bufsize": 0,
            "cwd": REPOSITORY,
            "env": environment,
        }
        self.processes, self.text = [], ""
        for index in (index for index in range(count) if index in present):
            job = [
                f"mesh.coordinator={coordinator}",
                f"mesh.num_processes={count}",
                f"mesh.process_id={index}",
            ]
            job = [*(job if count > 1 else ()), *own[index : index + 1]]
            job.append(f"mesh.simulated_devices={devices[index] if devices else DEVICES // count}")
            self.processes.append(subprocess.Popen([*command, *job], **pipes))
        if hasattr(fcntl, "F_SETPIPE_SZ"):
            fcntl.fcntl(self.processes[0].stdout, fcntl.F_SETPIPE_SZ, 4096)

    def __enter__(self) -> "HostsRun":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()

    def lines(self) -> Iterator[str]:
        """Return the output of process 0."""
        while line := self.processes[0].stdout.readline().decode():
            self.text += line
            yield line

    def kill_after(self, steps: int) -> None:
        """Kill all processes when this number of steps was reported; they are at most a pipe of
        reports, 30 steps, further."""
        reports = (line for line in self.lines() if re.match(r"step +\d+/", line))
        assert len(list(itertools.islice(reports, steps))) == steps, self.text
        for process in self.processes:
            process.kill()
        assert self.processes[0].wait() == -signal.SIGKILL

    def end(self, code: int = 0) -> list[str]:
        """Every process ends by itself, with this code: none waits for another in vain. One that
        hangs says where."""
        deadline, outputs = time.monotonic() + SECONDS, []
        for process in self.processes:
            try:
                outputs.append(process.communicate(timeout=max(1, deadline - time.monotonic()))[0])
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGABRT)  # faulthandler prints what every thread does
                outputs.append(process.communicate()[0])
        self.text += outputs[0].decode()
        codes = [process.returncode for process in self.processes]
        said = [self.text, *(output.decode() for output in outputs[1:])]
        assert codes == [code] * len(codes), "\n".join(said)
        return said


def trained(
    config: Path, run_name: str
) -> tuple[list[tuple[int, str]], list[float], tuple[int, str]]:
    """Return of a run: step and digest of every batch, the losses, and the position of the data in
    its last checkpoint."""
    folder = config.parent / "runs" / run_name
    records = [record for record in read_metrics(folder) if record["kind"] == "train"]
    last = latest_record(folder / "checkpoints")
    assert last is not None
    return (
        [(r["step"], r["batch"]) for r in records],
        [r["loss"] for r in records],
        (last["step"], last["data"]),
    )


@pytest.fixture(scope="module")
def alone(config):
    """The results of a run on one process."""
    with HostsRun(config, "alone", 1, "checkpoint_interval=0") as job:
        job.end()
    return trained(config, "alone")


@pytest.fixture(scope="module")
def on_4(config):
    """The output of a run on four processes, of which one waits longer for its data."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(failpoints.VARIABLE, "data:delay=0.06:::2")
        with HostsRun(config, "on-4", 4, "checkpoint_interval=0") as job:
            job.end()
    return job.text


def assert_same(ours, theirs):
    assert (ours[0], ours[2]) == (theirs[0], theirs[2])
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-5)


def test_three_epochs_end_where_the_plan_says(alone):
    batches, losses, (step, _) = alone
    assert [number for number, _ in batches] == list(range(1, step + 1))
    assert len(set(batches)) == step > 90 and losses[-1] < losses[0]


def test_processes_read_the_same_batches_and_end_together(config, alone, on_4):
    """One of them waits longer for its data. Records name it, a line says so, and nothing else
    changes."""
    assert_same(trained(config, "on-4"), alone)
    records = [r for r in read_metrics(config.parent / "runs" / "on-4") if r["kind"] == "train"]
    named = [r for r in records if r["slowest_process"] == 2]
    # On a busy machine another one may be slower for a moment.
    assert len(named) > 0.8 * len(records)
    for record in named:
        waited = record["slowest_host_data_wait_seconds"]
        assert record["slowest_host"] == platform.node()[:60]
        assert record["slowest_host_seconds"] >= waited > 0.055
    # Others wait for it in collectives, which is no time of their own.
    assert statistics.median(record["other_hosts_seconds"] for record in named) < 0.03
    assert f"process 2 on {platform.node()[:60]} holds up the others, 3 records in a row" in on_4
    alone_records = read_metrics(config.parent / "runs" / "alone")
    assert not any("slowest_host" in record for record in alone_records)


@pytest.mark.parametrize(
    "gone",
    [
        pytest.param(1, marks=pytest.mark.slow),
        pytest.param(0, marks=[pytest.mark.long, pytest.mark.every_dose]),
    ],
)
def test_those_who_come_go_on_without_one_that_is_gone_for_good(config, alone, gone):
    """Process 0, too."""
    fewer = ["mesh.min_processes=2", "mesh.connect_seconds=12", "checkpoint_interval=0"]
    name = f"without-{gone}"
    present = [index for index in range(3) if index != gone]
    with HostsRun(config, name, 3, *fewer, devices=(2, 2, 2), present=present, leaders=2) as job:
        job.end()
    assert f"process {gone} did not come in time; goes on with 2 of 3\n" in job.text
    assert_same(trained(config, name), alone)
    (launch,) = read_launches(config.parent / "runs" / name)
    assert launch["processes"] == 2 and "accumulation: 2\n" in launch["config"], (
        "no device gets more rows than it would have"
    )


@pytest.mark.long
@pytest.mark.every_dose
def test_parameters_may_be_split_over_four_processes_by_rows_and_within_layers(config, alone):
    """The beginning of the run alone, and without evaluation, whose programs each process would
    compile, too."""
    steps = 30
    axes = ("mesh.data=1", "mesh.fsdp=2", "mesh.tensor=2")
    shorter = ("checkpoint_interval=0", "eval_steps=0", f"steps={steps}")
    with HostsRun(config, "on-4-tensor", 4, *shorter, *axes) as job:
        job.end()
    batches, losses, (last_step, _) = trained(config, "on-4-tensor")
    assert last_step == steps
    assert batches == alone[0][:steps]
    np.testing.assert_allclose(losses, alone[1][:steps], rtol=1e-5)


@pytest.mark.usefixtures("alone", "on_4")
def test_evaluation_is_the_same_for_any_batch_size_and_number_of_processes(config):
    """A run on one process and one on four have evaluated one set in batches of two sizes, at their
    ends: four results, of every target of the set."""
    targets = Manifest.load(config.parent / "data-unseen").num_targets
    results = []
    for run in ("alone", "on-4"):
        records = [r for r in read_metrics(config.parent / "runs" / run) if r["kind"] == "eval"]
        assert {r["set"] for r in records} == {f"by{n}" for n in EVAL_BATCHES} and len(
            records
        ) == len(EVAL_BATCHES), run
        assert {r["tokens"] for r in records} == {targets}
        results += [r["nll"] for r in records]
    # The parameters that they evaluate differ by the rounding of all steps before; within a run
    # they are the same.
    for first, second in zip(results[::2], results[1::2]):
        np.testing.assert_allclose(first, second, rtol=1e-6)
    np.testing.assert_allclose(results, results[0], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kills", [1, 3])
def test_killed_and_resumed_on_other_numbers_of_processes(config, alone, kills):
    """SIGKILL to a whole job, at random steps; other numbers of processes go on, and it is as if
    nothing was."""
    *counts, last = random.Random().sample((1, 2, 4, random.choice((1, 2))), 4)
    counts = counts[:kills]
    run_name = f"killed-{kills}"
    steps = [
        random.Random().randrange(11, 19) for _ in counts
    ]  # so that a checkpoint is complete, and the end is not near
    print(f"killed {counts} processes after {steps} steps, ended on {last}")
    for number, (count, killed_after) in enumerate(zip(counts, steps)):
        with HostsRun(config, run_name, count) as job:
            job.kill_after(killed_after)
        assert ("Goes on from step" in job.text) == (number > 0), job.text
    with HostsRun(config, run_name, last) as job:
        job.end()
    assert "Goes on from step" in job.text
    assert_same(trained(config, run_name), alone)


@pytest.mark.slow
def test_all_processes_put_a_damaged_checkpoint_aside_and_go_on_from_the_same_one(config):
    checkpoints, short = (
        config.parent / "runs" / "flipped" / "checkpoints",
        ("steps=6", "checkpoint_interval=3", "eval_steps=0"),
    )
    with HostsRun(config, "flipped", 2, *short) as job:
        job.end()
    newest, digests = checkpoints / "00000006", saved_digests(checkpoints)[6]
    listed = json.loads((newest / "commit.json").read_text())["files"]
    writers = {name.split("/")[1] for name in listed if "/d/" in name}
    assert {"ocdbt.process_0", "ocdbt.process_1"} <= writers and all(
        entry["crc32"] for entry in listed.values()
    )
    file = max(newest.glob("arrays/ocdbt.process_1/d/*"), key=lambda file: file.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with HostsRun(config, "flipped", 2, *short) as job:
        outputs = job.end()
    assert (
        f"WARNING: {newest} is damaged" in job.text
        and file.name in job.text
        and "WARNING" not in outputs[1]
    )
    assert (
        "Goes on from step 3 " in job.text
        and len(list(checkpoints.glob("00000006.damaged-*"))) == 1
    )
    assert saved_digests(checkpoints)[6] == digests


def test_a_second_launch_is_refused_in_all_its_processes(config):
    """A job whose folder is being written by another one: process 0 alone finds out."""
    folder = config.parent / "runs" / "taken"
    with RunLock(folder), HostsRun(config, "taken", 2) as job:
        outputs = job.end(74)
        assert [path.name for path in folder.iterdir()] == ["lock"], "and nothing was written"
    for output in outputs:
        assert (
            f"{folder} is being written by process {os.getpid()} on {platform.node()}" in output
        ), output
        assert "Wait for it or end it, or set run_name to another name." in output
    assert not folder.exists(), "which whoever holds the lock had made"


def damaged_copy(data: Path, copy: Path) -> Path:
    """A copy of a data set, with one bit changed in the tokens of its first shard."""
    shutil.copytree(data, copy)
    shard = copy / "tokens-00000.bin"
    content = bytearray(shard.read_bytes())
    content[5] ^= 1
    shard.write_bytes(content)
    return shard


def test_what_one_process_alone_cannot_read_ends_all_of_them_with_its_name(config):
    """A block that is damaged on one host only, met at step 4; then one of an evaluation set."""
    folder, place = config.parent, f"process 1 on {platform.node()}: "
    shard = damaged_copy(folder / "data-large", folder / "damaged")
    stages = "data.stages=[{until: 3, weights: {small: 1}}, {weights: {large: 1}}]"
    own = [f"data.sources.large.path={path}" for path in (folder / "data-large", shard.parent)]
    with HostsRun(config, "torn", 2, "steps=20", stages, "checkpoint_interval=1", own=own) as job:
        outputs = job.end(65)
    for output in outputs:
        assert re.search(
            re.escape(f"error: {place}{shard}: bytes 0 to ") + r".*\(block 0\): expected crc32",
            output,
        ), output
    batches, _, (step, _) = trained(config, "torn")
    assert [number for number, _ in batches] == [1, 2, 3] and step == 3, (
        "what came before it counts, and nothing after it"
    )
    (folder / "held.txt").write_text(" ".join(random.Random(1).choices(WORDS, k=300)))
    assert (
        prepare.main([str(folder / "held"), "--text", str(folder / "held.txt"), "--workers", "1"])
        == 0
    )
    shard = damaged_copy(folder / "held", folder / "held-damaged")
    sets = [f"eval.sets.held.path={path}" for path in (folder / "held", shard.parent)]
    with HostsRun(config, "torn-eval", 2, "steps=20", "eval_interval=4", own=sets) as job:
        outputs = job.end(65)
    for output in outputs:
        assert re.search(
            re.escape(f"error: {place}{shard}: bytes 0 to ") + r".*\(block 0\): expected crc32",
            output,
        ), output
    records = read_metrics(folder / "runs" / "torn-eval")
    assert [r["step"] for r in records if r["kind"] == "train"] == [1, 2, 3, 4]
    assert "held" not in {r["set"] for r in records if r["kind"] == "eval"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "devices, mesh", [((1, 3), "mesh.data=4"), ((2, 2), "mesh.data=1"), ((1, 3), "mesh.data=2")]
)
def test_uneven_rows_and_rows_on_several_hosts_give_the_same_run(config, devices, mesh):
    """One process with a row of the devices, one with three; and a tensor axis across both, which
    then hold the same rows."""
    axes = [
        mesh,
        "mesh.fsdp=1",
        "mesh.tensor=-1",
        "model.num_heads=4",
        "model.num_kv_heads=4",
        "steps=12",
    ]
    name = f"{devices}-{mesh[-1]}"
    with HostsRun(config, name, 2, *axes, devices=devices) as job:
        job.end()
    with HostsRun(config, f"{name}-alone", 1, *axes) as job:
        job.end()
    assert_same(trained(config, name), trained(config, f"{name}-alone"))


@pytest.mark.slow
def test_processes_choose_micro_batches_together(config):
    with HostsRun(config, "auto", 2, "optimizer.accumulation=auto", "steps=12") as job:
        job.end()
    with HostsRun(config, "auto-alone", 1, "optimizer.accumulation=1", "steps=12") as job:
        job.end()
    assert_same(trained(config, "auto"), trained(config, "auto-alone"))
    identity = (config.parent / "runs/auto/run.json").read_text()
    assert json.loads(identity)["accumulation"] == 1


MIXTRAL = ["model.family=mixtral", "model.moe.num_experts=4", "model.routing.exchange_factor=0.5"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh", "same"),
    [
        ("ring", ["mesh.context=4", "model.attention=ring"], []),
        (
            "heads",
            [
                "mesh.context=4",
                "model.attention=xla",
                "model.num_heads=4",
                "model.num_kv_heads=4",
            ],
            [],
        ),
        ("ring-within", ["mesh.fsdp=2", "mesh.context=2", "model.attention=ring"], []),
        ("experts", ["mesh.expert=4", *MIXTRAL], []),
        # What a slow network connects is a matter of order alone.
        ("slices", ["mesh.fsdp=2", "mesh.dcn_data=2"], ["mesh.dcn_data=1", "mesh.data=2"]),
        (
            "stages",
            ["mesh.fsdp=2", "mesh.dcn_stage=2", "model.num_layers=2"],
            ["mesh.dcn_stage=1", "mesh.stage=2"],
        ),
    ],
)
def test_rows_experts_and_slices_may_be_those_of_several_processes(config, name, mesh, same):
    """`same`: what a run on one process has instead."""
    axes = ["mesh.data=1", "mesh.fsdp=1", *mesh, "steps=12"]
    axes = list({word.partition("=")[0]: word for word in axes}.values())
    with HostsRun(config, name, 2, *axes, devices=(2, 2)) as job:
        job.end()
    alone = {word.partition("=")[0]: word for word in [*axes, *same]}
    with HostsRun(config, f"{name}-alone", 1, *alone.values()) as job:
        job.end()
    assert_same(trained(config, name), trained(config, f"{name}-alone"))
