"""`maxtrain launch slurm`: a batch script of Slurm.

The script starts the processes with srun and reads their exit codes. If another attempt can help,
it starts them again on the nodes of the job that still work, as long as spare nodes are left or the
run can train on fewer nodes (mesh.min_processes). Otherwise the job is requeued. Shortly before the
time limit, the processes save and the job is requeued. Several starts in a row that complete no
training step end the job.

Source: https://slurm.schedmd.com/sbatch.html, srun.html, scancel.html, scontrol.html, sinfo.html.
"""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from data_pipeline.base.errors import FINAL, WORTH_RESTARTING, UsageError
from data_pipeline.base.remote import is_url
from maxtrain import ENDS
from maxtrain.commands.launch.names import job_name, one_line, plain, seconds
from maxtrain.commands.launch.plan import LaunchPlan

# Seconds that other processes have after the first one has ended. It may have lost one of them,
# which they notice by themselves (mesh.heartbeat_seconds), or they may still be saving.
_WAIT = 300
# Seconds from the signal to save until the time limit, beside checkpoint.grace_seconds.
_MARGIN = 60
# Seconds beside checkpoint.grace_seconds after which processes that do not end are killed, so that
# the job can still be requeued.
_PATIENCE = 20
# The exit code of srun if srun itself fails. Nothing else in this project uses it.
_SRUN_FAILED = 113
# The name of the steps that the script starts.
_STEP = "maxtrain"
# If checkpoint.grace_seconds=0, which is no limit.
_LONG_GRACE = 600
# The longest that Slurm takes in --signal.
_LONGEST_SIGNAL = 65_535


class SlurmJob(NamedTuple):
    """Settings of a Slurm script."""

    name: str
    folder: str
    nodes: int
    # Fewer nodes, which the run can do with, the most first.
    fewer_nodes: Sequence[int]
    gpus_per_node: int
    processes_per_node: int
    spare_nodes: int
    max_restarts: int
    # Starts in a row without a new training step after which the job gives up.
    crash_loop: int
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


def _shared_folder(plan: LaunchPlan, job: SlurmJob) -> str:
    """A folder that all nodes have: that of the runs, or if these are behind a URL, that in which
    the script begins."""
    if is_url(plan.config.output_dir):
        return job.folder
    return os.path.join(job.folder, plan.config.output_dir)


def render(plan: LaunchPlan, job: SlurmJob) -> str:
    """The script.

    Raises:
        UsageError: something can't be written into it, or the time is too short to save.
    """
    notice = _notice(plan, job)
    values = {
        "head": "\n".join(_directives(job, notice)),
        "title": f"{one_line('--name', job.name)}",
        "all_nodes": job.nodes + job.spare_nodes,
        "choices": " ".join(map(str, [job.nodes, *job.fewer_nodes])),
        "spare_nodes": job.spare_nodes,
        "max_restarts": job.max_restarts,
        "crash_loop": job.crash_loop,
        "srun_failed": _SRUN_FAILED,
        "step": _STEP,
        "patience": int(_grace(plan)) + _PATIENCE,
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


def _grace(plan: LaunchPlan) -> float:
    """Seconds that the processes may take to save."""
    return plan.config.checkpoint.grace_seconds or _LONG_GRACE


def _notice(plan: LaunchPlan, job: SlurmJob) -> int:
    """Return the seconds before the time limit at which the processes get the signal to save."""
    grace = _grace(plan)
    notice = int(grace) + _MARGIN
    if notice > _LONGEST_SIGNAL:
        rule = f"is longer than Slurm can signal a job before its end ({_LONGEST_SIGNAL:,} s)"
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
        f"--job-name={job_name(job.name)}",
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
    """Return the words of srun before the command; nodes to be left out come at the end."""
    words = [
        "srun",
        f"--job-name={_STEP}",
        "--overlap",
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
# @title@
# Written by `maxtrain launch slurm`.
@head@

cd -- @folder@ || exit 1
@setup@

set -uo pipefail

# The numbers of nodes on which the run can train, the largest first.
choices=(@choices@)
spare_nodes=@spare_nodes@
max_restarts=@max_restarts@
crash_loop=@crash_loop@
# Seconds before the next start. They are doubled each time.
pause=10
# The exit code of srun if srun itself fails, and not the command that it runs.
srun_failed=@srun_failed@
# Each of these is set when its signal has arrived: the time limit is near, Slurm ends the job, and
# any signal that interrupted a wait.
near_time_limit=
ending=
interrupted=
# The process of srun, while it runs.
srun_pid=

# The processes of this job write here: their exit codes, and the last completed training step.
# The folder survives a requeue, so that starts without progress are counted across requeues.
state=@shared@/.ends-$SLURM_JOB_ID
export @ends@="$state"

# Prints the ids of the steps that this script has started and that have not ended.
our_steps() {
  squeue --noheader --steps --jobs="$SLURM_JOB_ID" --format='%i %j' |
    awk '$2 == "@step@" { print $1 }'
}

# Sends a signal to the processes of a step, if there is one.
signal_steps() {
  local steps
  mapfile -t steps < <(our_steps)
  if [ "${#steps[@]}" -gt 0 ]; then
    scancel --signal="$1" "${steps[@]}"
  fi
}

# The time limit is near: the processes save and end. What hangs is killed while there is still
# time to requeue the job.
on_time_limit() {
  near_time_limit=yes
  interrupted=yes
  local waited=0
  # A step that is being created cannot receive a signal yet.
  while [ -n "$srun_pid" ] && [ -z "$(our_steps)" ] && [ "$waited" -lt 30 ]; do
    kill -0 "$srun_pid" 2>/dev/null || return 0
    sleep 1
    waited=$((waited + 1))
  done
  signal_steps TERM
  { sleep @patience@; signal_steps KILL; } &
}
trap on_time_limit USR1

# Slurm ends the job, because somebody cancels it, a node failed, or the job must make room. Slurm
# has signalled the processes, too. They could not save if this script ended before them.
on_end() {
  ending=yes
  interrupted=yes
}
trap on_end TERM

# Waits for a process; a signal does not end the wait. Returns the exit code of the process.
wait_for() {
  local result
  while true; do
    interrupted=
    wait "$1"
    result=$?
    [ -n "$interrupted" ] || return "$result"
  done
}

# Prints the nodes of this job that cannot be used any more, with commas between them.
unusable_nodes() {
  sinfo --noheader --Node --nodes="$SLURM_JOB_NODELIST" --format=%N \
    --states=down,drain,fail,no_respond | sort -u | paste -sd, -
}

# Removes the state of this job. Slurm may requeue a job that it ends, after a failed node for
# example; then starts without progress must still be counted.
remove_state() {
  if [ -z "$ending" ] || [ "$starts" -eq 0 ]; then
    rm -rf -- "$state"
  fi
}
# Ends the job and lets Slurm queue it again. The script then starts from the beginning.
requeue() {
  echo "launch: $1; the job is requeued" >&2
  if scontrol requeue "$SLURM_JOB_ID"; then
    trap - EXIT
  else
    echo "launch: Slurm refused to requeue the job. Submit the script again to continue." >&2
  fi
  exit 75
}

# Starts in a row without a new training step, the last completed step, and the last exit code. A
# stay in the queue does not change them.
starts=0
furthest=0
code=75
if [ -f "$state/starts" ]; then
  read -r starts furthest code <"$state/starts"
fi
write_starts() {
  echo "$starts $furthest $code" >"$state/starts"
}
count_progress() {
  local step=
  if [ -f "$state/step" ]; then
    read -r step <"$state/step"
  fi
  if [ "${step:-0}" -gt "$furthest" ]; then
    furthest=$step
    starts=0
  fi
}
count_progress
trap remove_state EXIT

restarts=0
while true; do
  if [ -n "$ending" ]; then
    exit "$code"
  fi
  if [ "$starts" -ge "$crash_loop" ]; then
    echo "launch: $starts starts in a row completed no new training step, the last one with exit" \
      "code $code (--crash-loop $crash_loop); gives up. Look for the cause in the log above." >&2
    case $code in
      74) exit 74 ;;
      *) exit 70 ;;
    esac
  fi
  if [ -n "$near_time_limit" ]; then
    requeue "the time limit is near"
  fi
  down=$(unusable_nodes)
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
    requeue "$down cannot be used, and the job has $spare_nodes spare nodes"
  fi
  if [ "$nodes" -lt "${choices[0]}" ]; then
    echo "launch: continues with $nodes of ${choices[0]} nodes, without ${down:-any more}" >&2
  fi

  # The exit codes of the last start must not count for this one.
  rm -rf -- "$state"
  mkdir -p -- "$state" || exit 74
  starts=$((starts + 1))
  write_starts || exit 74

  # A step that lost a node keeps the CPUs and GPUs of its other nodes, hence --overlap.
  SLURM_EXIT_ERROR=$srun_failed @srun@ \
    @command@ &
  srun_pid=$!
  wait_for "$srun_pid"
  code=$?
  srun_pid=

  # One process may know why the others failed, although its exit code is not the highest.
  for file in "$state"/*-*; do
    [ -f "$file" ] || continue
    case $(cat -- "$file") in
      @final_failures@) code=$(cat -- "$file") ;;
    esac
  done
  count_progress
  write_starts

  case $code in
    # Done, or the same would happen again.
    @final@) exit "$code" ;;
    # It stopped after saving, storage failed, or srun could not start the processes.
    @again@ | "$srun_failed") ;;
    *)
      # Only a signal (128 and its number), or a node that went down, is worth another start.
      if { [ "$code" -le 128 ] || [ "$code" -gt 192 ]; } && [ "$(unusable_nodes)" = "$down" ]; then
        exit "$code"
      fi
      ;;
  esac
  # Processes on nodes that still answer must not keep their GPUs.
  signal_steps KILL
  if [ -n "$near_time_limit$ending" ] || [ "$starts" -ge "$crash_loop" ]; then
    continue
  fi
  if [ "$restarts" -ge "$max_restarts" ]; then
    echo "launch: ended with exit code $code after $restarts restarts (--max-restarts);" \
      "gives up" >&2
    exit "$code"
  fi
  restarts=$((restarts + 1))
  echo "launch: ended with exit code $code; starts again in $pause s" >&2
  sleep "$pause" &
  wait "$!"
  pause=$((pause < 150 ? pause * 2 : 300))
done
"""
