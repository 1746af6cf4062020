"""`maxtrain launch slurm`: a batch script of Slurm.

The script starts the processes by srun, and looks at how they ended. What may go better is started
again on the nodes that it has, without those that went down, as long as spare nodes are left, or
the run can do with fewer (mesh.min_processes); else the job goes back to the queue. Shortly before
its time is over, the processes are asked to save, and the job goes back to the queue.

Source: https://slurm.schedmd.com/sbatch.html, srun.html, scancel.html, scontrol.html, sinfo.html.
"""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from data_pipeline.errors import FINAL, WORTH_RESTARTING, UsageError
from data_pipeline.remote import is_url
from maxtrain import ENDS
from maxtrain.launch.names import one_line, plain, seconds
from maxtrain.launch.plan import Plan

# Seconds that other processes have after the first one has ended. It may have lost one of them,
# which they notice by themselves (mesh.heartbeat_seconds), or they may still be saving.
_WAIT = 300
# Seconds from the request to save to the end of the time, beside checkpoint.grace_seconds.
_MARGIN = 60
# If checkpoint.grace_seconds=0, which is no limit.
_LONG_GRACE = 600
# The longest that Slurm takes in --signal.
_LONGEST_SIGNAL = 65_535


class SlurmJob(NamedTuple):
    """What a script asks Slurm for."""

    name: str
    folder: str
    nodes: int
    # Fewer nodes, which the run can do with, the most first.
    fewer_nodes: Sequence[int]
    gpus_per_node: int
    processes_per_node: int
    spare_nodes: int
    max_restarts: int
    cpus_per_task: int | None
    time: str | None
    partition: str | None
    account: str | None
    image: str | None
    # More options of sbatch, lines of bash before the start, and more options of srun.
    directives: Sequence[str]
    setup: Sequence[str]
    srun: Sequence[str]
    environment: Mapping[str, str]


def _shared_folder(plan: Plan, job: SlurmJob) -> str:
    """A folder that all nodes have: that of the runs, or if these are behind a URL, that in which
    the script begins."""
    if is_url(plan.config.output_dir):
        return job.folder
    return os.path.join(job.folder, plan.config.output_dir)


def render(plan: Plan, job: SlurmJob) -> str:
    """The script.

    Raises:
        UsageError: something can't be written into it, or the time is too short to save.
    """
    notice = _notice(plan, job)
    values = {
        "head": "\n".join(_directives(job, notice)),
        "name": job.name,
        "all_nodes": job.nodes + job.spare_nodes,
        "choices": " ".join(map(str, [job.nodes, *job.fewer_nodes])),
        "spare_nodes": job.spare_nodes,
        "max_restarts": job.max_restarts,
        "folder": shlex.quote(job.folder),
        "shared": shlex.quote(_shared_folder(plan, job)),
        "setup": "\n".join(_setup(job)),
        "srun": " \\\n    ".join(_srun(job)),
        "command": shlex.join(plan.command),
        "final": "|".join(map(str, sorted({0, *FINAL}))),
        "final_failures": "|".join(map(str, sorted(FINAL))),
        "again": "|".join(map(str, sorted(WORTH_RESTARTING))),
        "ends": ENDS,
    }
    # In one pass: a value may have such a name in it.
    return re.sub(r"@([a-z_]+)@", lambda found: str(values[found[1]]), _SCRIPT)


def _notice(plan: Plan, job: SlurmJob) -> int:
    """Seconds before the end of the time at which the processes are asked to save."""
    grace = plan.config.checkpoint.grace_seconds or _LONG_GRACE
    notice = int(grace) + _MARGIN
    if notice > _LONGEST_SIGNAL:
        rule = f"is longer than Slurm can tell a job before its end ({_LONGEST_SIGNAL:,} s)"
        raise UsageError(
            f"checkpoint.grace_seconds={grace:g} {rule}. Set checkpoint.grace_seconds=3600."
        )
    if job.time and seconds(job.time) <= notice:
        rule = f"is not longer than the {notice} s that saving may take (checkpoint.grace_seconds)"
        raise UsageError(f"--time {job.time} {rule}. Set --time higher, or that key lower.")
    return notice


def _directives(job: SlurmJob, notice: int) -> list[str]:
    nodes = f"{job.nodes + job.spare_nodes}"
    if job.fewer_nodes:
        nodes = f"{min(job.fewer_nodes)}-{nodes}"
    options = [
        f"--job-name={plain('--name', job.name)}",
        f"--nodes={nodes}",
        f"--ntasks-per-node={job.processes_per_node}",
    ]
    if job.gpus_per_node:
        options.append(f"--gpus-per-node={job.gpus_per_node}")
    if job.cpus_per_task:
        options.append(f"--cpus-per-task={job.cpus_per_task}")
    for name in ("time", "partition", "account"):
        value = getattr(job, name)
        if value:
            options.append(f"--{name}={plain(f'--{name}', value)}")
    options += ["--output=%x-%j.log", "--open-mode=append", "--requeue"]
    if job.spare_nodes or job.fewer_nodes:
        options.append("--no-kill")
    options.append(f"--signal=B:USR1@{notice}")
    options += [one_line("--directive", line) for line in job.directives]
    return [f"#SBATCH {option}" for option in options]


def _setup(job: SlurmJob) -> list[str]:
    lines = [f"export {name}={shlex.quote(value)}" for name, value in job.environment.items()]
    return [*lines, *job.setup]


def _srun(job: SlurmJob) -> list[str]:
    """The words of srun before the command; nodes to be left out come at the end."""
    words = [
        "srun",
        '--nodes="$nodes"',
        f'--ntasks="$((nodes * {job.processes_per_node}))"',
        f"--ntasks-per-node={job.processes_per_node}",
    ]
    if job.cpus_per_task:
        words.append(f"--cpus-per-task={job.cpus_per_task}")
    else:
        # Each process may use all CPUs that the job has on its node.
        words.append("--cpu-bind=none")
    words += ["--kill-on-bad-exit=0", f"--wait={_WAIT}"]
    if job.image:
        words.append(f"--container-image={shlex.quote(job.image)}")
    words += [shlex.quote(option) for option in job.srun]
    words.append('${down:+"--exclude=$down"}')
    return words


_SCRIPT = r"""#!/usr/bin/env bash
# @name@, by `maxtrain launch slurm`.
@head@

set -uo pipefail

# How many nodes it trains on: all, or so many if there are fewer, the most first.
choices=(@choices@)
spare_nodes=@spare_nodes@
max_restarts=@max_restarts@
# Seconds before the next start, doubled each time.
pause=10
# Not empty when the time of this job is nearly over, when Slurm ends it, when a signal has come.
nearly_over=
told_to_end=
woken=

cd -- @folder@ || exit 1
@setup@

# Slurm says that the time is nearly over: the processes save and end.
ask_to_save() {
  nearly_over=yes
  woken=yes
  scancel --signal=TERM "$SLURM_JOB_ID"
}
trap ask_to_save USR1

# Slurm ends the job, since somebody cancels it or it has to make room, and has told the processes
# so. They save; if this script ended before them, they could not.
wait_for_the_end() {
  told_to_end=yes
  woken=yes
}
trap wait_for_the_end TERM

# The nodes of this job that are of no use any more, with commas between them.
nodes_down() {
  sinfo --noheader --Node --nodes="$SLURM_JOB_NODELIST" --states=down,drain,fail --format=%N |
    sort -u | paste -sd, -
}

# The job waits for nodes, and begins this script anew.
back_to_the_queue() {
  echo "launch: $1; goes back to the queue" >&2
  scontrol requeue "$SLURM_JOB_ID"
  exit 75
}

# Each process that fails leaves its exit code here.
ends=@shared@/.ends-$SLURM_JOB_ID
export @ends@="$ends"
trap 'rm -rf -- "$ends"' EXIT

restarts=0
code=75
while true; do
  if [ -n "$told_to_end" ]; then
    exit "$code"
  fi
  if [ -n "$nearly_over" ]; then
    back_to_the_queue "the time is over"
  fi
  down=$(nodes_down)
  count=0
  if [ -n "$down" ]; then
    IFS=, read -ra names <<<"$down"
    count=${#names[@]}
  fi
  usable=$((${SLURM_JOB_NUM_NODES:-@all_nodes@} - count))
  nodes=0
  for choice in "${choices[@]}"; do
    if [ "$choice" -le "$usable" ]; then
      nodes=$choice
      break
    fi
  done
  if [ "$nodes" -eq 0 ]; then
    back_to_the_queue "$down can't be used, and there are $spare_nodes spare nodes"
  fi
  if [ "$nodes" -lt "${choices[0]}" ]; then
    echo "launch: goes on with $nodes of ${choices[0]} nodes, without ${down:-any more}" >&2
  fi

  # What an earlier attempt has left is not about this one.
  rm -rf -- "$ends"
  mkdir -p -- "$ends" || exit 74

  @srun@ \
    @command@ &
  job=$!
  while true; do
    woken=
    wait "$job"
    code=$?
    # A signal ends a wait early.
    [ -n "$woken" ] || break
  done

  # One process may say why the others failed, though its code is not the highest.
  for file in "$ends"/*; do
    [ -f "$file" ] || continue
    case $(cat -- "$file") in
      @final_failures@) code=$(cat -- "$file") ;;
    esac
  done

  case $code in
    # Done; or the same would happen again.
    @final@) exit "$code" ;;
    # It stopped after saving, or storage failed.
    @again@) ;;
    *)
      # A signal ended it; or srun failed, as it does if a node goes down.
      if [ "$code" -le 128 ] && [ "$(nodes_down)" = "$down" ]; then
        exit "$code"
      fi
      ;;
  esac
  if [ -n "$nearly_over$told_to_end" ]; then
    continue
  fi
  if [ "$restarts" -ge "$max_restarts" ]; then
    echo "launch: ended with $code after $restarts restarts; gives up" >&2
    exit "$code"
  fi
  restarts=$((restarts + 1))
  echo "launch: ended with $code; starts again in $pause s" >&2
  sleep "$pause"
  pause=$((pause < 150 ? pause * 2 : 300))
done
"""
