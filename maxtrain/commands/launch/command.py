"""`maxtrain launch TARGET config=NAME key=value ...`: a job of one or many processes."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from data_pipeline.base.errors import UsageError, run_command
from data_pipeline.shards import write_atomic
from maxtrain.commands.launch import kubernetes, names, slurm
from maxtrain.commands.launch.local import run_local, submit
from maxtrain.commands.launch.options import parse
from maxtrain.commands.launch.plan import (
    JobDevices,
    LaunchPlan,
    enough_nodes,
    make_plan,
    nodes_of_slices_are_known,
)
from maxtrain.commands.launch.pod import read_pod
from maxtrain.commands.launch.secrets import require_no_secrets
from maxtrain.commands.launch.tpu import TPUS, Slice, make_slice
from maxtrain.config.sections.mesh import num_slices
from maxtrain.models.known import MODELS

_HERE = (sys.executable, "-m", "maxtrain.cli")
_IN_IMAGE = ("maxtrain",)
# Seconds that processes have to end after they have saved.
_MARGIN = 10.0
_LONG_GRACE = 600.0
# Where a secret belongs that pods need.
_SECRET = (
    "Put it into a Secret of Kubernetes, and name the secret in --pod: "
    "containers: [{envFrom: [{secretRef: {name: NAME}}]}]"
)


def main(argv: Sequence[str], prog: str = "maxtrain launch") -> int:
    """Launches a job, or writes what launches it; the exit code."""
    code = 0

    def job() -> None:
        nonlocal code
        options = parse(argv, prog)
        if options.target == "local":
            code = _run_here(options)
        elif options.target == "slurm":
            _deliver(_slurm_script(options), ["sbatch"], options)
        else:
            text, command = _manifest(options)
            _deliver(text, command, options)

    failed = run_command(job)
    return failed or code


def _plan(options: argparse.Namespace, given: JobDevices, program: Sequence[str]) -> LaunchPlan:
    return make_plan(options.job, options.settings, options.job_options, given, MODELS, program)


def _run_here(options: argparse.Namespace) -> int:
    words = f"{options.processes} processes on this machine"
    given = JobDevices(words, options.processes, None, ("auto", "cpu", "gpu", "tpu"))
    plan = _plan(options, given, _HERE)
    grace = options.grace
    if grace is None:
        grace = (plan.config.checkpoint.grace_seconds or _LONG_GRACE) + _MARGIN
    return run_local(plan, options.processes, names.variables(options.env), grace)


def _slurm_script(options: argparse.Namespace) -> str:
    environment = names.variables(options.env)
    texts = [*options.settings, *options.setup, *options.directive, *options.srun]
    elsewhere = "Set it in the environment in which you submit the job, or in a file in your home"
    require_no_secrets(texts, environment, "the script", elsewhere)
    per_node = options.processes_per_node
    nodes = f"{options.nodes} nodes without GPUs"
    per_process = 0
    platforms = ("auto", "cpu")
    if options.gpus_per_node:
        nodes = f"{options.nodes} nodes with {options.gpus_per_node} GPUs each"
        per_process, rest = divmod(options.gpus_per_node, per_node)
        platforms = ("auto", "gpu")
        if rest:
            rule = f"--processes-per-node {per_node} must divide --gpus-per-node"
            fix = "Set it to 1, or to the number of GPUs"
            raise UsageError(f"{rule} {options.gpus_per_node}: processes share GPUs evenly. {fix}.")
    given = JobDevices(nodes, options.nodes * per_node, per_process, platforms)
    program = _HERE
    if options.image:
        program = _IN_IMAGE
    plan = _plan(options, given, program)
    fewer = enough_nodes(plan, given, per_node)
    _warn_if_all_are_needed(plan, given, per_node, fewer)
    if fewer:
        planned = max(given.processes, plan.config.mesh.planned_processes or 0)
        plan = plan.with_setting("mesh.planned_processes", planned)
    job = slurm.SlurmJob(
        name=options.name or names.default_label(plan.config.run_name, 63),
        folder=os.getcwd(),
        nodes=options.nodes,
        fewer_nodes=fewer,
        gpus_per_node=options.gpus_per_node,
        processes_per_node=per_node,
        spare_nodes=options.spare_nodes,
        max_restarts=options.max_restarts,
        crash_loop=options.crash_loop,
        cpus_per_task=options.cpus_per_task,
        time=options.time,
        partition=options.partition,
        account=options.account,
        image=options.image,
        directives=options.directive,
        setup=options.setup,
        srun=options.srun,
        environment=environment,
    )
    return slurm.render(plan, job)


def _warn_if_all_are_needed(
    plan: LaunchPlan, given: JobDevices, per_node: int, fewer: Sequence[int]
) -> None:
    """Prints that mesh.min_processes changes nothing, if no number of nodes is `fewer`."""
    least = plan.config.mesh.min_processes
    if plan.verb != "train" or least is None or least > given.processes - per_node or fewer:
        return
    nodes = given.processes // per_node
    why = f"rows and mesh can't be divided by fewer than {nodes} nodes"
    if not nodes_of_slices_are_known(plan, given, per_node):
        slices = num_slices(plan.config.mesh)
        why = f"which of {nodes} nodes make one of {slices} slices is not known"
    print(
        f"maxtrain launch: mesh.min_processes={least}: {why}, so it trains on all of them, "
        "or waits",
        file=sys.stderr,
    )


def _manifest(options: argparse.Namespace) -> tuple[str, list[str]]:
    """The manifest, and the command that submits it."""
    pod = read_pod(options.pod)
    environment = names.variables(options.env)
    texts = [*options.settings, yaml.safe_dump(pod, width=10_000)]
    require_no_secrets(texts, environment, "the manifest", _SECRET)
    if options.target == "gke-tpu":
        tpu = _slice(options)
        slices = options.slices
        hosts = tpu.hosts
        words = f"{slices} slices of {options.accelerator}:{tpu.topology}"
        given = JobDevices(words, hosts * slices, tpu.devices_per_host, ("auto", "tpu"), slices)
        resources = {"google.com/tpu": tpu.chips_per_host}
    else:
        tpu = None
        slices = 1
        hosts = options.nodes
        gpus = options.gpus_per_node
        resources = {}
        given = JobDevices(f"{hosts} nodes without GPUs", hosts, 0, ("auto", "cpu"))
        if gpus:
            words = f"{hosts} nodes with {gpus} GPUs each"
            given = JobDevices(words, hosts, gpus, ("auto", "gpu"))
            resources = {"nvidia.com/gpu": gpus}
    plan = _plan(options, given, _IN_IMAGE)
    if plan.config_file is not None:
        require_no_secrets([plan.config_file.read_text()], {}, "the manifest", _SECRET)
    if options.target == "k8s":
        _warn_if_all_are_needed(plan, given, 1, enough_nodes(plan, given, 1))
    longest = kubernetes.LONGEST_NAME
    name = options.name or names.default_label(plan.config.run_name, longest)
    job = kubernetes.KubernetesJob(
        name=names.label("--name", name, longest),
        image=names.plain("--image", options.image),
        hosts=hosts,
        slices=slices,
        resources=resources,
        tpu=tpu,
        namespace=options.namespace and names.label("--namespace", options.namespace),
        queue=options.queue and names.label("--queue", options.queue),
        max_restarts=options.max_restarts,
        seconds=options.time and names.seconds(options.time),
        volumes=[_volume(text) for text in options.volume],
        environment=environment,
        pod=pod,
    )
    return kubernetes.render(plan, job), ["kubectl", "create", "-f", "-"]


def _slice(options: argparse.Namespace) -> Slice:
    """One slice of TPUs. UsageError: there is no such one, or there can't be several of it."""
    kind = options.accelerator.removeprefix("tpu").removeprefix("-")
    if kind not in TPUS:
        choices = ", ".join(TPUS)
        raise UsageError(f"--accelerator {options.accelerator} is not known. Use one of {choices}.")
    tpu = make_slice(kind, options.topology, options.chips_per_node)
    if options.slices > 1 and tpu.hosts == 1:
        rule = "has one host, and several slices need several hosts each"
        fix = "Take a larger topology, or --slices 1"
        raise UsageError(f"--slices {options.slices}: {kind}:{tpu.topology} {rule}. {fix}.")
    return tpu


def _volume(text: str) -> tuple[str, str]:
    claim, colon, folder = text.partition(":")
    if not colon or not folder.startswith("/"):
        example = "--volume checkpoints:/data"
        raise UsageError(f"--volume {text!r} must be CLAIM:/FOLDER. Write for example {example}.")
    return names.subdomain("--volume", claim), folder


def _deliver(text: str, command: list[str], options: argparse.Namespace) -> None:
    """Writes, submits or prints what was made."""
    if options.output:
        write_atomic(Path(options.output), text.encode(), private=True)
        print(f"written: {options.output}", file=sys.stderr)
    if options.submit:
        submit(command, text)
    elif not options.output:
        print(text, end="")
