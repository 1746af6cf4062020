"""`maxtrain launch k8s` and `gke-tpu`: a JobSet of Kubernetes, with its config.

A config file is an annotation of the pods, which each of them mounts as a file (downward API). So
it belongs to its JobSet: it is deleted with it, and no other run can change it.

A pod is a process, and takes all devices of its node. Codes after which the same would happen again
fail the JobSet at once; after any other code all pods are made anew, a limited number of times.

Source: https://jobset.sigs.k8s.io/docs/concepts/,
https://kubernetes.io/docs/concepts/workloads/controllers/job/#pod-failure-policy
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from data_pipeline.base.errors import FINAL, UsageError
from maxtrain.commands.launch.names import plain
from maxtrain.commands.launch.plan import LaunchPlan
from maxtrain.commands.launch.pod import (
    fill_resources,
    merge,
    require_devices,
    require_mounts,
    require_reachable,
)
from maxtrain.commands.launch.tpu import Slice

CONTAINER = "maxtrain"
# The replicated job; it and two numbers are a part of each pod's name, of at most 63 letters.
_WORKERS = "workers"
LONGEST_NAME = 40
# Where the config file is mounted, and where the processes meet.
_CONFIG_FOLDER = "/etc/maxtrain"
_CONFIG_ANNOTATION = "maxtrain-config"
# Kubernetes takes 256 KiB of annotations.
_LONGEST_CONFIG = 200 * 1024
# Volumes of each pod that are not for the run's files.
_OWN_VOLUMES = ("shm", "config")
# What a pod of GPUs or CPUs requests of its node, if --pod does not say it: of each GPU, and of a
# pod without any. A TPU host has no other pods.
_REQUESTS_OF_GPU = {"cpu": 4, "memory": 32}
_REQUESTS = {"cpu": 1, "memory": 4}
_DISK = "20Gi"
_PORT = 8476
# Pods one of which must be there, where a job can do with fewer.
_LEADERS = 4
# Ports of TPU runtimes: between hosts of a slice, and between slices.
_TPU_PORTS = (8471, 8080)
# Seconds from the end of the process, at the latest, to the end of its pod.
_MARGIN = 30
_LONG_GRACE = 600
# The user of docker/*.Dockerfile, who may write to volumes.
USER = 1000


class KubernetesJob(NamedTuple):
    """Settings of a JobSet."""

    name: str
    image: str
    # Pods of each replicated job, and how many of these there are: slices of TPUs.
    hosts: int
    slices: int
    # Devices of each pod by their resource names, such as {"nvidia.com/gpu": 8}.
    resources: Mapping[str, int]
    tpu: Slice | None
    namespace: str | None
    queue: str | None
    max_restarts: int
    # Seconds that an attempt may take; None: any.
    seconds: int | None
    # Claims of volumes, each with the folder where it is mounted.
    volumes: Sequence[tuple[str, str]]
    environment: Mapping[str, str]
    # Merged into the pod's spec.
    pod: Mapping[str, Any]


class _LiteralText(str):
    """Text that is written line by line."""


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, and everything in full."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_block(dumper: yaml.SafeDumper, text: _LiteralText) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", str(text), style="|")


_Dumper.add_representer(_LiteralText, _represent_block)


def render(plan: LaunchPlan, job: KubernetesJob) -> str:
    """The manifest of a JobSet.

    Raises:
        UsageError: something can't be written into it, or would be lost with its pod.
    """
    file = plan.config_file
    template: dict[str, Any] = {}
    if file is not None:
        plan = plan.with_config_at(f"{_CONFIG_FOLDER}/{file.name}")
        template["metadata"] = {"annotations": {_CONFIG_ANNOTATION: _config_text(file)}}
    pod = merge(_pod(plan, job, file), job.pod)
    container = pod["containers"][0]
    if not job.tpu:
        fill_resources(container, _requests(job))
    require_devices(container, job.resources)
    require_mounts(pod)
    if plan.verb == "train":
        require_reachable(plan.config, pod, _OWN_VOLUMES)
    template["spec"] = pod
    return yaml.dump(_job_set(job, template), Dumper=_Dumper, sort_keys=False, width=100)


def _requests(job: KubernetesJob) -> dict[str, str]:
    """CPUs, memory and disk of a pod."""
    count = sum(job.resources.values())
    each = _REQUESTS_OF_GPU if count else _REQUESTS
    count = count or 1
    return {
        "cpu": str(each["cpu"] * count),
        "memory": f"{each['memory'] * count}Gi",
        "ephemeral-storage": _DISK,
    }


def _metadata(job: KubernetesJob) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": job.name}
    if job.namespace:
        metadata["namespace"] = job.namespace
    return metadata


def _config_text(file: Path) -> _LiteralText:
    """The text of a config file. UsageError: a pod cannot have it."""
    plain("config", file.name)
    text = file.read_text()
    size = len(text.encode())
    if size > _LONGEST_CONFIG:
        rule = f"must be at most {_LONGEST_CONFIG:,} bytes to go along with a JobSet"
        fix = "Put it into the image below configs/, and name it by config=NAME"
        raise UsageError(f"config={file} has {size:,} bytes, and {rule}. {fix}.")
    # A character that YAML can't show in a block is written in quotes.
    return _LiteralText(text)


def _job_set(job: KubernetesJob, template: dict[str, Any]) -> dict[str, Any]:
    metadata = _metadata(job)
    if job.queue:
        metadata["labels"] = {"kueue.x-k8s.io/queue-name": job.queue}
    if job.tpu and job.tpu.hosts > 1:
        # All pods of a slice are on one node pool, and no other slice is there.
        metadata["annotations"] = {
            "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
        }
    failed = ["PodFailurePolicy"]
    of_job: dict[str, Any] = {
        "parallelism": job.hosts,
        "completions": job.hosts,
        "completionMode": "Indexed",
        # The first pod that fails ends all: they wait for each other.
        "backoffLimit": 0,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {
                        "containerName": CONTAINER,
                        "operator": "In",
                        "values": sorted(FINAL),
                    },
                }
            ]
        },
    }
    if job.seconds:
        of_job["activeDeadlineSeconds"] = job.seconds
        failed.append("DeadlineExceeded")
    of_job["template"] = template
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "coordinator": {"replicatedJob": _WORKERS, "jobIndex": 0, "podIndex": 0},
            "failurePolicy": {
                "maxRestarts": job.max_restarts,
                # No pod of an earlier attempt is left that still has the run's folder.
                "restartStrategy": "BlockingRecreate",
                "rules": [
                    {
                        "name": "theSameWouldHappenAgain",
                        "action": "FailJobSet",
                        "onJobFailureReasons": failed,
                    }
                ],
            },
            "replicatedJobs": [
                {"name": _WORKERS, "replicas": job.slices, "template": {"spec": of_job}}
            ],
        },
    }


def _pod(plan: LaunchPlan, job: KubernetesJob, file: Path | None) -> dict[str, Any]:
    """The spec of each pod."""
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    # What workers and devices hand each other needs more than the 64 MiB that a container has.
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    if file is not None:
        field = f"metadata.annotations['{_CONFIG_ANNOTATION}']"
        item = {"path": file.name, "fieldRef": {"fieldPath": field}}
        volumes.append({"name": "config", "downwardAPI": {"items": [item]}})
        mounts.append({"name": "config", "mountPath": _CONFIG_FOLDER})
    for number, (claim, folder) in enumerate(job.volumes):
        name = f"volume-{number}"
        volumes.append({"name": name, "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": name, "mountPath": folder})
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": job.image,
        "command": list(plan.program),
        "args": [_escaped(word) for word in (plan.verb, *plan.arguments)],
        "env": _environment(job, plan.config.mesh.min_processes is not None),
        "volumeMounts": mounts,
    }
    if job.resources:
        container["resources"] = {
            "limits": dict(job.resources),
            "requests": dict(job.resources),
        }
    if job.tpu:
        container["ports"] = [{"containerPort": port} for port in _TPU_PORTS]
    grace = plan.config.checkpoint.grace_seconds or _LONG_GRACE
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": int(grace) + _MARGIN,
        "securityContext": {"fsGroup": USER, "fsGroupChangePolicy": "OnRootMismatch"},
    }
    if job.tpu:
        pod["nodeSelector"] = {
            "cloud.google.com/gke-tpu-accelerator": job.tpu.accelerator,
            "cloud.google.com/gke-tpu-topology": job.tpu.topology,
        }
    return pod | {"containers": [container], "volumes": volumes}


def _environment(job: KubernetesJob, may_be_fewer: bool) -> list[dict[str, Any]]:
    """Return the environment that gives the process of each pod its number; `may_be_fewer`: pod 0
    may be missing.
    """
    entries: list[dict[str, Any]] = []
    if job.hosts * job.slices == 1:
        # One pod is alone, though it is one of an indexed job.
        entries = [{"name": "JAX_NUM_PROCESSES", "value": "1"}]
    # GKE itself sets the addresses of TPU hosts.
    elif not job.tpu:
        leaders = 1
        if may_be_fewer:
            # The first of these that is there leads.
            leaders = min(job.hosts, _LEADERS)
        names = [f"{job.name}-{_WORKERS}-0-{pod}.{job.name}:{_PORT}" for pod in range(leaders)]
        coordinator = ",".join(names)
        index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        entries = [
            {"name": "JAX_COORDINATOR_ADDRESS", "value": coordinator},
            {"name": "JAX_NUM_PROCESSES", "value": str(job.hosts)},
            {"name": "JAX_PROCESS_ID", "valueFrom": {"fieldRef": {"fieldPath": index}}},
        ]
    for name, value in job.environment.items():
        entries.append({"name": name, "value": _escaped(value)})
    return entries


def _escaped(word: str) -> str:
    """A word as Kubernetes gives it to a container: `$(NAME)` in it would be a variable."""
    return word.replace("$", "$$")
