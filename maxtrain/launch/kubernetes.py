"""`maxtrain launch k8s` and `gke-tpu`: a JobSet of Kubernetes, with its config.

A pod is a process, and takes all devices of its node. Codes after which the same would happen again
fail the JobSet at once; after anything else all pods are made anew, so many times.

Source: https://jobset.sigs.k8s.io/docs/concepts/,
https://kubernetes.io/docs/concepts/workloads/controllers/job/#pod-failure-policy
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from data_pipeline.errors import FINAL, UsageError
from data_pipeline.remote import is_url
from maxtrain.launch.names import plain
from maxtrain.launch.plan import Plan
from maxtrain.launch.tpu import Slice

CONTAINER = "maxtrain"
# The replicated job; it and two numbers are a part of each pod's name, of at most 63 letters.
_WORKERS = "workers"
LONGEST_NAME = 40
# Where the config file is mounted, and where the processes meet.
_CONFIG_FOLDER = "/etc/maxtrain"
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
    """What a JobSet asks Kubernetes for."""

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


class _Block(str):
    """Text that is written line by line."""


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, and everything in full."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_block(dumper: yaml.SafeDumper, text: _Block) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", str(text), style="|")


_Dumper.add_representer(_Block, _represent_block)


def render(plan: Plan, job: KubernetesJob) -> str:
    """The manifest: a JobSet, and a ConfigMap before it if the config is a file.

    Raises:
        UsageError: something can't be written into it, or would be lost with its pod.
    """
    documents = manifests(plan, job)
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=100)


def manifests(plan: Plan, job: KubernetesJob) -> list[dict[str, Any]]:
    """As `render`, as plain values."""
    documents: list[dict[str, Any]] = []
    file = plan.config_file
    if file is not None:
        plan = plan.with_config_at(f"{_CONFIG_FOLDER}/{file.name}")
        documents.append(_config_map(job, file))
    pod = _merged(_pod(plan, job, file), job.pod)
    if plan.verb == "train":
        _require_volume(plan.config.output_dir, pod)
    documents.append(_job_set(job, pod))
    return documents


def _metadata(job: KubernetesJob) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": job.name}
    if job.namespace:
        metadata["namespace"] = job.namespace
    return metadata


def _config_map(job: KubernetesJob, file: Path) -> dict[str, Any]:
    # A character that YAML can't show in a block is written in quotes.
    text = file.read_text()
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(job),
        "data": {plain("config", file.name): _Block(text)},
    }


def _job_set(job: KubernetesJob, pod: dict[str, Any]) -> dict[str, Any]:
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
    of_job["template"] = {"spec": pod}
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


def _pod(plan: Plan, job: KubernetesJob, file: Path | None) -> dict[str, Any]:
    """The spec of each pod."""
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    # What workers and devices hand each other needs more than the 64 MiB that a container has.
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    if file is not None:
        volumes.append({"name": "config", "configMap": {"name": job.name}})
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
        container["resources"] = {"limits": dict(job.resources)}
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
    """What tells the process of each pod which one it is; `may_be_fewer`: pod 0 may be missing."""
    entries: list[dict[str, Any]] = []
    if job.hosts * job.slices == 1:
        # One pod is alone, though it is one of an indexed job.
        entries = [{"name": "JAX_NUM_PROCESSES", "value": "1"}]
    # GKE tells the hosts of TPUs of each other itself.
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


def _merged(ours: dict[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Our pod with what the user says of it: sections are merged, lists are added to, and the first
    container is ours."""
    result = dict(ours)
    for key, value in theirs.items():
        own = result.get(key)
        if key == "containers" and isinstance(own, list) and isinstance(value, list) and value:
            first, *others = value
            if not isinstance(first, Mapping):
                raise UsageError(
                    "--pod: containers must be a list of sections. Leave it out, or mend it."
                )
            first = {name: inner for name, inner in first.items() if name != "name"}
            result[key] = [_merged(own[0], first), *others]
        elif isinstance(own, dict) and isinstance(value, Mapping):
            result[key] = _merged(own, value)
        elif isinstance(own, list) and isinstance(value, list):
            result[key] = [*own, *value]
        else:
            result[key] = value
    return result


def _require_volume(output_dir: str, pod: Mapping[str, Any]) -> None:
    """UsageError: checkpoints would be written into a container, and be lost with it."""
    if is_url(output_dir):
        return
    mounts = pod["containers"][0].get("volumeMounts", [])
    for mount in mounts:
        folder = Path(mount["mountPath"])
        if mount["name"] not in ("shm", "config") and Path(output_dir).is_relative_to(folder):
            return
    rule = "is on no volume, so checkpoints would be lost with their pod"
    mend = "Set --volume CLAIM:/data and output_dir=/data/runs, or output_dir=gs://BUCKET/runs"
    raise UsageError(f"output_dir={output_dir} {rule}. {mend}.")
