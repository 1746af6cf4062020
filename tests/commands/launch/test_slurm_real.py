"""Batch scripts in a real Slurm: what happens when a job is cancelled, reaches its time limit,
loses a process or loses a node.

The processes only pretend to train: they count steps, save on SIGTERM, notice when another one is
gone, and end with the exit codes of a training run.
"""

import os
import random
import re
import shlex
import signal
import sys
from pathlib import Path

import jax
import pytest
import yaml

from data_pipeline.prepare import command as prepare
from maxtrain.commands.launch import command
from maxtrain.observe.attempts import reached_step
from maxtrain.observe.launches import read_launches
from tests.commands.launch.slurm_cluster import SlurmCluster, missing_programs, wait_until
from tests.support.shared import TINY_MODEL, WORDS

pytestmark = [pytest.mark.long, pytest.mark.processes]
every_dose = pytest.mark.every_dose
MISSING = missing_programs()
if MISSING:
    pytest.skip(
        f"a real Slurm is not installed ({', '.join(MISSING)}): apt-get install slurm-wlm munge",
        allow_module_level=True,
    )

ROOT = Path(__file__).parents[3]
# Arguments: a folder that all processes share, and what they do: `steps:N` trains for N steps,
# `exit:N` ends at once with this exit code.
TRAIN = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
word, number, *more = sys.argv[2].split(":")
# Seconds without a sign of another process after which it counts as lost.
patience = float(more[0]) if more else 8
rank, count = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
start = int(os.environ.get("SLURM_STEP_ID", "0")), os.environ.get("SLURM_RESTART_COUNT", "0")
with open(folder / "starts", "a") as file:
    print(*start, rank, count, os.environ["SLURMD_NODENAME"], file=file)
def end(code):
    report = pathlib.Path(os.environ["MAXTRAIN_ENDS"], f"{os.environ['SLURMD_NODENAME']}-{os.getpid()}")
    if code:
        report.write_text(str(code))
    sys.exit(code)
def save(number, frame):
    time.sleep(1)
    (folder / f"saved-{rank}").write_text(str(step))
    end(75)
signal.signal(signal.SIGTERM, save)
if word == "exit":
    end(int(number))
checkpoint = folder / "checkpoint"
step = int(checkpoint.read_text()) if checkpoint.exists() else 0
def beat(rank):
    return folder / f"beat-{'-'.join(map(str, start))}-{rank}"
began = time.time()
while step < int(number):
    time.sleep(0.2)
    step += 1
    beat(rank).touch()
    if rank == 0:
        checkpoint.with_name("new").write_text(str(step))
        checkpoint.with_name("new").rename(checkpoint)
        pathlib.Path(os.environ["MAXTRAIN_ENDS"], "step").write_text(str(step))
    for other in range(count):
        last = beat(other).stat().st_mtime if beat(other).exists() else began
        if time.time() - max(began, last) > patience:
            end(75)
end(0)
"""


@pytest.fixture(scope="module")
def cluster():
    cluster = SlurmCluster()
    yield cluster
    cluster.stop()
    assert cluster.processes() == []


class RealSlurmJob:
    """A batch script of ours, submitted to a cluster."""

    def __init__(self, cluster: SlurmCluster, folder: Path, capsys, does: str, *options: str):
        self.cluster = cluster
        self.folder = folder
        (folder / "train.py").write_text(TRAIN)
        (folder / "config.yaml").write_text(yaml.safe_dump({"output_dir": str(folder / "a $b's")}))
        words = ["slurm", *options, f"config={folder / 'config.yaml'}", "run_name=it"]
        words += ["data.sources.a.path=/d", "data.batch_size=16", "checkpoint.grace_seconds=20"]
        words += ["mesh.platform=cpu"]
        assert command.main(words, "maxtrain launch") == 0, capsys.readouterr().err
        text = capsys.readouterr().out
        stand_in = shlex.join([sys.executable, str(folder / "train.py"), str(folder), does])
        program = re.escape(shlex.join([sys.executable, "-m", "maxtrain.cli", "train"]))
        text, count = re.subn(f"(?m)^    {program} .*&$", lambda _: f"    {stand_in} &", text)
        assert count == 1
        text, count = re.subn("(?m)^pause=10$", "pause=2", text)
        assert count == 1
        self.script = folder / "job.sh"
        self.script.write_text(text)
        self.id = ""

    def submit(self, *options: str) -> None:
        self.id = self.cluster.submit(self.script, *options)

    @property
    def log(self) -> str:
        (file,) = self.folder.glob(f"*-{self.id}.log")
        return file.read_text()

    @property
    def step(self) -> int:
        file = self.folder / "checkpoint"
        return int(file.read_text()) if file.exists() else 0

    def starts(self) -> list[list[str]]:
        """Nodes of each start."""
        file = self.folder / "starts"
        found: dict[tuple[str, str], list[str]] = {}
        for line in file.read_text().splitlines() if file.exists() else []:
            step, restart, _, _, node = line.split()
            found.setdefault((restart, step), []).append(node)
        return [sorted(nodes) for nodes in found.values()]

    def reach(self, step: int) -> None:
        wait_until(lambda: self.step >= step, f"step {step}", 240)

    def has_no_state(self) -> bool:
        return list((self.folder / "a $b's").glob(".ends-*")) == []


@pytest.fixture
def submit(cluster, tmp_path, capsys, monkeypatch):
    """Submits a job of two nodes, from a folder with a space in its name."""
    folder = tmp_path / "sub mitted"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def submit(does: str, *options: str, sbatch: tuple[str, ...] = ()) -> RealSlurmJob:
        job = RealSlurmJob(cluster, folder, capsys, does, "--nodes", "2", *options)
        job.submit(*sbatch)
        return job

    yield submit
    cluster.settle()


@pytest.mark.parametrize(("code", "starts"), [(0, 1), (70, 1), (78, 1), (74, 2)])
@every_dose
def test_exit_codes_reach_slurm_and_a_job_that_cannot_succeed_is_not_started_again(
    cluster, submit, code, starts
):
    job = submit(f"exit:{code}", "--max-restarts", "1", "--name", "my run, $(x) & more")
    found = cluster.wait_for(job.id, "COMPLETED", "FAILED")
    assert found["ExitCode"] == f"{code}:0" and found["Restarts"] == "0"
    assert len(job.starts()) == starts and job.has_no_state()
    # The log is where the job was submitted, under the name of the job.
    assert (job.folder / f"my run, $(x) & more-{job.id}.log").exists()


@every_dose
def test_a_cancelled_job_saves_and_is_not_requeued(cluster, submit):
    job = submit("steps:9999:60")
    job.reach(3)
    cluster.run("scancel", job.id)
    found = cluster.wait_for(job.id, "CANCELLED")
    wait_until(lambda: cluster.states() == ["idle"] * 3, "the nodes are free")
    assert len(list(job.folder.glob("saved-*"))) == 2
    assert found["Restarts"] == "0" and "requeued" not in job.log
    assert cluster.job(job.id)["ExitCode"] == "75:0"
    assert len(job.starts()) == 1 and job.has_no_state()


@every_dose
def test_all_processes_are_started_again_after_one_is_killed(cluster, submit):
    job = submit("steps:40")
    job.reach(3)
    (pid,) = [
        pid
        for pid in cluster.processes(f"SLURM_JOB_ID={job.id}", "SLURM_PROCID=1")
        if "train.py" in Path(f"/proc/{pid}/cmdline").read_text()
    ]
    os.kill(pid, signal.SIGKILL)
    cluster.wait_for(job.id, "COMPLETED")
    assert len(job.starts()) == 2 and "starts again" in job.log
    assert cluster.job(job.id)["Restarts"] == "0"


@every_dose
def test_a_job_saves_before_its_time_limit_and_continues_after_the_queue(cluster, submit):
    # Slurm looks at time limits every 30 s.
    job = submit("steps:9999:60", "--time", "90", sbatch=("--time=1", "--signal=B:USR1@50"))
    job.reach(3)
    found = cluster.wait_for(job.id, "PENDING", "FAILED", "TIMEOUT")
    assert found["JobState"] == "PENDING", job.log
    saved = {int(file.read_text()) for file in job.folder.glob("saved-*")}
    assert len(list(job.folder.glob("saved-*"))) == 2 and "the job is requeued" in job.log
    cluster.start_requeued(job.id)
    job.reach(max(saved) + 3)
    assert cluster.job(job.id)["Restarts"] == "1"


@every_dose
def test_a_spare_node_replaces_a_dead_node(cluster, submit):
    """The step that lost the node still holds its resources, which must not block the next one."""
    job = submit("steps:9999", "--spare-nodes", "1")
    job.reach(3)
    (used,) = job.starts()
    cluster.kill_node(used[1])
    wait_until(lambda: len(job.starts()) == 2, job.id, 120)
    job.reach(job.step + 3)
    _, again = job.starts()
    assert len(again) == 2 and used[1] not in again
    assert cluster.job(job.id)["Restarts"] == "0"


@every_dose
def test_without_a_spare_node_a_job_that_loses_a_node_is_requeued(cluster, submit):
    job = submit("steps:9999")
    job.reach(3)
    (used,) = job.starts()
    cluster.kill_node(used[1])
    cluster.wait_for(job.id, "PENDING", seconds=120)
    before = job.step
    cluster.start_requeued(job.id)
    job.reach(before + 3)
    _, again = job.starts()
    assert used[1] not in again and cluster.job(job.id)["Restarts"] == "1"


@every_dose
def test_starts_without_progress_have_a_limit_that_a_requeue_does_not_reset(cluster, submit):
    job = submit("exit:75", "--crash-loop", "3")
    wait_until(lambda: len(job.starts()) == 2, "two starts")
    cluster.run("scontrol", "requeue", job.id)
    cluster.start_requeued(job.id)
    found = cluster.wait_for(job.id, "FAILED", "COMPLETED")
    assert found["ExitCode"] == "70:0" and job.has_no_state()
    assert "completed no new training step" in job.log


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    rng = random.Random(0)
    for number in range(20):
        (folder / f"{number}.txt").write_text(" ".join(rng.choices(WORDS, k=60)))
    words = [str(folder / "data"), "--text", f"{folder}/*.txt", "--workers", "1"]
    assert prepare.main(words) == 0
    return folder / "data"


@pytest.mark.slow
def test_a_run_of_two_processes_survives_the_death_of_a_node(
    cluster, data, tmp_path, capsys, monkeypatch
):
    """The real program: processes find each other through Slurm, notice the lost one, and continue
    on the spare node from the last checkpoint."""
    monkeypatch.chdir(tmp_path)
    values = {
        "output_dir": str(tmp_path / "runs"),
        "steps": 400,
        "log_interval": 1,
        "checkpoint_interval": 20,
        "model": TINY_MODEL,
        "data": {
            "sources": {"text": {"path": str(data), "epochs": None}},
            "seq_length": 32,
            "batch_size": 4,
        },
        "mesh": {"platform": "cpu", "heartbeat_seconds": 10},
        "checkpoint": {"grace_seconds": 20},
        "observe": {"progress": "plain", "plot": False, "trackers": []},
    }
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(values))
    cache = str(jax.config.jax_compilation_cache_dir)
    words = ["slurm", "--nodes", "2", "--spare-nodes", "1", f"config={tmp_path / 'tiny.yaml'}"]
    words += ["run_name=real", "--env", "XLA_FLAGS=--xla_backend_optimization_level=0"]
    words += ["--env", f"JAX_COMPILATION_CACHE_DIR={cache}", "--env", f"PYTHONPATH={ROOT}"]
    assert command.main(words, "maxtrain launch") == 0
    (tmp_path / "job.sh").write_text(capsys.readouterr().out)
    job = cluster.submit(tmp_path / "job.sh")
    run = tmp_path / "runs" / "real"

    def log() -> str:
        return (tmp_path / f"real-{job}.log").read_text()

    try:
        wait_until(lambda: reached_step(run) >= 25, "step 25", 180)
        cluster.kill_node("127.0.0.2")
        cluster.wait_for(job, "COMPLETED", "FAILED", seconds=240)
        assert cluster.job(job)["JobState"] == "COMPLETED", log()
    except AssertionError as error:
        raise AssertionError(log()) from error
    finally:
        cluster.settle()
    first, second = read_launches(run)
    assert first["processes"] == second["processes"] == 2 and second["step"] >= 20
    assert reached_step(run) == 400 and "starts again" in log()
