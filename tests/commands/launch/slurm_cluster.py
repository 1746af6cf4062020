"""A real Slurm on this machine for tests: munged, slurmctld, and a slurmd for each node.

The nodes are named 127.0.0.1, 127.0.0.2 and so on, so that processes can connect to them by name.
Everything is in a temporary folder, and `stop` ends every process that uses its configuration.
"""

import contextlib
import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "squeue", "scancel")
# System programs are not on the PATH of every user.
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"

CONFIG = """
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort={controller}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SlurmdTimeout=10
KillWait=8
MpiDefault=none
SchedulerParameters=batch_sched_delay=1,sched_interval=5
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing_programs() -> list[str]:
    """The programs of Slurm that are not installed here."""
    return [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("", 0))
        return [one.getsockname()[1] for one in sockets]


class SlurmCluster:
    """The daemons of a Slurm, and what tests do with them."""

    def __init__(self, nodes: int = 3):
        # pytest's folders are too long for the name of a socket.
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.nodes = [f"127.0.0.{number}" for number in range(1, nodes + 1)]
        self.environment = os.environ | {
            "PATH": PATH,
            "SLURM_CONF": str(self.folder / "slurm.conf"),
        }
        self._daemons: dict[str, subprocess.Popen] = {}
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def _start(self) -> None:
        controller, *ports = free_ports(len(self.nodes) + 1)
        lines = []
        for node, port in zip(self.nodes, ports, strict=True):
            (self.folder / f"spool-{node}").mkdir()
            where = f"NodeHostName=localhost NodeAddr={node} Port={port}"
            lines.append(f"NodeName={node} {where} CPUs=2 State=UNKNOWN")
        (self.folder / "state").mkdir()
        (self.folder / "slurm.conf").write_text(
            CONFIG.format(
                controller=controller,
                user=getpass.getuser(),
                folder=self.folder,
                nodes="\n".join(lines),
            )
        )
        version = self.run("slurmd", "-V")
        numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
        # Before 23.02 there was no way to have no plugin; this one is not used by what is set here.
        plugin = "disabled" if numbers >= (23, 2) else "cgroup/v1"
        (self.folder / "cgroup.conf").write_text(f"CgroupPlugin={plugin}\n")
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        munge = {
            "key-file": key,
            "socket": self.folder / "munge.socket",
            "pid-file": self.folder / "munge.pid",
            "seed-file": self.folder / "munge.seed",
            "log-file": self.folder / "munge.log",
        }
        words = [f"--{name}={value}" for name, value in munge.items()]
        self._daemon("munged", "munged", "--foreground", "--force", *words)
        wait_until(lambda: (self.folder / "munge.socket").exists(), "munged")
        self._daemon("slurmctld", "slurmctld", "-D", "-c")
        for node in self.nodes:
            self.start_node(node)
        wait_until(lambda: self.states() == ["idle"] * len(self.nodes), "all nodes are idle")

    def _daemon(self, name: str, *words: str) -> None:
        with open(self.folder / f"{name}.log", "a") as log:
            self._daemons[name] = subprocess.Popen(
                words, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )

    def run(self, *words: str, cwd: Path | None = None) -> str:
        """Run a command of Slurm and return its output."""
        done = subprocess.run(
            words, env=self.environment, cwd=cwd, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout.strip()

    def states(self) -> list[str]:
        """The state of each node, with a * if it does not answer."""
        try:
            return self.run("sinfo", "--noheader", "--Node", "--format=%T").split()
        except AssertionError:
            return []

    def start_node(self, node: str) -> None:
        """Starts the daemon of a node."""
        self._daemon(f"slurmd-{node}", "slurmd", "-D", "-N", node)

    def kill_node(self, node: str) -> None:
        """Kills the daemon of a node and all processes of its jobs, as a power failure would."""
        daemon = self._daemons.pop(f"slurmd-{node}")
        daemon.kill()
        daemon.wait()
        pids = self.processes(f"SLURMD_NODENAME={node}")
        stepds = {parent for pid in pids if (parent := _parent_stepd(pid))}
        for pid in [*stepds, *pids]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def processes(self, *variables: str) -> list[int]:
        """Processes of this Slurm that have these variables in their environment."""
        wanted = {f"SLURM_CONF={self.folder / 'slurm.conf'}", *variables}
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if wanted <= set((entry / "environ").read_text(errors="replace").split("\0")):
                    found.append(int(entry.name))
        return found

    def submit(self, script: Path, *options: str) -> str:
        """Submits a script from its folder; the number of the job."""
        return self.run("sbatch", "--parsable", *options, script.name, cwd=script.parent)

    def job(self, job: str) -> dict[str, str]:
        """Return Slurm's description of a job."""
        text = self.run("scontrol", "--oneliner", "show", "job", job)
        fields = {}
        for word in text.split():
            name, _, value = word.partition("=")
            fields[name] = value
        return fields

    def wait_for(self, job: str, *states: str, seconds: float = 90) -> dict[str, str]:
        """Waits until a job is in one of these states; what Slurm says of it."""
        wait_until(lambda: self.job(job)["JobState"] in states, f"job {job} is {states}", seconds)
        return self.job(job)

    def start_requeued(self, job: str) -> None:
        """Starts a requeued job without the two minutes that Slurm lets it wait."""
        self.wait_for(job, "PENDING")
        wait_until(lambda: not self.processes(f"SLURM_JOB_ID={job}"), f"job {job} has ended")
        # A node refuses a job that is newer than its last end by less than a second, in which
        # Slurm counts both.
        time.sleep(2)

        def has_started() -> bool:
            # Slurm sets the time once more when the last process of the job has ended.
            found = self.job(job)
            if found["JobState"] == "PENDING" and found["Reason"] == "BeginTime":
                self.run("scontrol", "update", f"JobId={job}", "StartTime=now")
            return found["JobState"] != "PENDING"

        wait_until(has_started, f"job {job} starts again", 90)

    def settle(self) -> None:
        """Cancels all jobs and starts the nodes that are not there."""
        self.run("scancel", "--me")
        for node in self.nodes:
            if f"slurmd-{node}" not in self._daemons:
                self.start_node(node)
        wait_until(lambda: self.states() == ["idle"] * len(self.nodes), "all nodes are idle")

    def stop(self) -> None:
        """Ends everything that uses this Slurm, and removes its folder."""
        with contextlib.suppress(AssertionError, subprocess.SubprocessError, FileNotFoundError):
            self.run("scancel", "--signal=KILL", "--full", "--me")
        for _ in range(20):
            pids = self.processes()
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not pids:
                break
            time.sleep(0.1)
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def wait_until(is_done: Callable[[], bool], what: str, seconds: float = 60) -> None:
    """Waits until something is so; AssertionError: it takes too long."""
    end = time.monotonic() + seconds
    while not is_done():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.2)


def _parent_stepd(pid: int) -> int | None:
    """The slurmstepd that started a process; None: something else did."""
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        parent = int(re.findall(r"^PPid:\s+(\d+)", status, re.MULTILINE)[0])
        if "slurmstepd" in Path(f"/proc/{parent}/comm").read_text():
            return parent
    return None
