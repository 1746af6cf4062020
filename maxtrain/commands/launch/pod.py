"""Allowed fields of `--pod FILE` for the pods of a JobSet, and fields that every pod must have.

Kubernetes drops or refuses a field that it does not know only when the job is created, and a wrong
path shows up only when the pod runs. Both are answered here.

Source: https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/ (v1.34)
"""

import difflib
import posixpath
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from data_pipeline.base import strict_yaml
from data_pipeline.base.errors import UsageError
from data_pipeline.base.remote import is_url
from maxtrain.config import RunConfig
from maxtrain.config.paths import path_keys

_POD_FIELDS = frozenset(
    """activeDeadlineSeconds affinity automountServiceAccountToken containers dnsConfig dnsPolicy
    enableServiceLinks ephemeralContainers hostAliases hostIPC hostNetwork hostPID hostUsers
    hostname hostnameOverride imagePullSecrets initContainers nodeName nodeSelector os overhead
    preemptionPolicy priority priorityClassName readinessGates resourceClaims resources
    restartPolicy runtimeClassName schedulerName schedulingGates securityContext serviceAccount
    serviceAccountName setHostnameAsFQDN shareProcessNamespace subdomain
    terminationGracePeriodSeconds tolerations topologySpreadConstraints volumes""".split()
)
_CONTAINER_FIELDS = frozenset(
    """args command env envFrom image imagePullPolicy lifecycle livenessProbe name ports
    readinessProbe resizePolicy resources restartPolicy restartPolicyRules securityContext
    startupProbe stdin stdinOnce terminationMessagePath terminationMessagePolicy tty volumeDevices
    volumeMounts workingDir""".split()
)
_LISTS = ("containers", "initContainers", "volumes", "tolerations", "imagePullSecrets")
# Directories that a process makes for itself and that may be lost with its pod.
_SCRATCH = ("local_dir", "data.cache", "observe.compilation_cache", "checkpoint.local")
# Directories of which the contents must outlive the pod.
_LASTING = ("output_dir", "checkpoint.copy_to")


def read_pod(file: str | None) -> dict[str, Any]:
    """The fields of a pod's spec in a YAML file; none without a file.

    Raises:
        UsageError: it is no YAML, or has a field that pods or containers do not have.
    """
    if not file:
        return {}
    try:
        pod = strict_yaml.read(Path(file))
    except ValueError as error:
        raise UsageError(f"--pod {file} is not valid YAML: {error}. Correct it there.") from error
    if not isinstance(pod, dict):
        example = "tolerations: [{operator: Exists}]"
        raise UsageError(f"--pod {file} must have keys of a pod's spec, such as {example}.")
    _require_known(pod, _POD_FIELDS, f"--pod {file}", "a pod's spec")
    for key in _LISTS:
        if key in pod and not (
            isinstance(pod[key], list) and all(isinstance(item, dict) for item in pod[key])
        ):
            rule = "must be a list of sections"
            raise UsageError(f"--pod {file}: {key} {rule}. Write `- name: ...` below {key}.")
    for key in ("containers", "initContainers"):
        for number, container in enumerate(pod.get(key, [])):
            where = f"--pod {file}: {key}[{number}]"
            _require_known(container, _CONTAINER_FIELDS, where, "a container")
    if pod.get("restartPolicy", "Never") != "Never":
        rule = "must be Never, since exit codes decide what is started again"
        raise UsageError(
            f"--pod {file}: restartPolicy={pod['restartPolicy']} {rule}. Leave it out."
        )
    return pod


def _require_known(section: Mapping[Any, Any], known: Iterable[str], where: str, what: str) -> None:
    """UsageError: a section has a key that is not known."""
    for key in section:
        if key in known:
            continue
        close = difflib.get_close_matches(str(key), known, 1, 0.5)
        lower = {name.lower(): name for name in known}
        guess = lower.get(str(key).lower().replace("_", "").replace("-", ""), *close[:1])
        fix = "Leave it out"
        if key in ("spec", "metadata", "apiVersion", "kind", "template"):
            fix = "Write the contents of `spec` alone, without `spec:` above it"
        elif guess:
            fix = f"Did you mean {guess}?"
        raise UsageError(f"{where}: {key!r} is not a field of {what}. {fix.rstrip('.')}.")


def merge(ours: dict[str, Any], theirs: Mapping[str, Any], where: str = "--pod") -> dict[str, Any]:
    """Our pod with what the user says of it: sections are merged, lists are added to, and the first
    container is ours.

    Raises:
        UsageError: a value is of another kind than ours.
    """
    result = dict(ours)
    for key, value in theirs.items():
        own = result.get(key)
        if key == "containers" and isinstance(own, list) and value:
            first, *others = value
            first = {name: inner for name, inner in first.items() if name != "name"}
            result[key] = [merge(own[0], first, f"{where} containers[0]"), *others]
        elif isinstance(own, dict) and isinstance(value, Mapping):
            result[key] = merge(own, value, f"{where} {key}")
        elif isinstance(own, list) and isinstance(value, list):
            result[key] = [*own, *value]
        elif isinstance(own, dict | list):
            kind = "a list" if isinstance(own, list) else "a section"
            raise UsageError(
                f"{where}: {key} must be {kind}. Write {key} as {kind}, or leave it out."
            )
        else:
            result[key] = value
    return result


def fill_resources(container: dict[str, Any], defaults: Mapping[str, str]) -> None:
    """Adds requests of CPUs, memory and disk that neither requests nor limits name."""
    resources = container.setdefault("resources", {})
    requests = resources.setdefault("requests", {})
    for name, amount in defaults.items():
        if name not in requests and name not in resources.get("limits", {}):
            requests[name] = amount


def require_devices(container: Mapping[str, Any], devices: Mapping[str, int]) -> None:
    """UsageError: a pod would get another number of devices than the mesh is planned for."""
    resources = container.get("resources", {})
    for name, count in devices.items():
        for kind in ("limits", "requests"):
            given = resources.get(kind, {}).get(name, count)
            if str(given) != str(count):
                option = "--gpus-per-node" if name == "nvidia.com/gpu" else "--chips-per-node"
                rule = f"must be the {count} devices for which the mesh is planned"
                fix = f"Leave it out of --pod, or set {option} {given}"
                raise UsageError(f"--pod: resources.{kind}[{name}]={given} {rule}. {fix}.")


def require_mounts(pod: Mapping[str, Any]) -> None:
    """UsageError: a volume is there twice, a folder is mounted twice, or a mount has no volume."""
    names = [volume.get("name") for volume in pod["volumes"]]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"--pod: volume {name!r} is there twice. Use another name.")
    for number, container in enumerate(pod["containers"]):
        folders = []
        for mount in container.get("volumeMounts", []):
            name, folder = mount.get("name"), str(mount.get("mountPath", ""))
            if name not in names:
                close = difflib.get_close_matches(str(name), map(str, names), 1)
                fix = f"Did you mean {close[0]}?" if close else "Add it below `volumes`"
                where = f"--pod: containers[{number}].volumeMounts"
                raise UsageError(f"{where}: there is no volume {name!r}. {fix.rstrip('.')}.")
            if not folder.startswith("/"):
                raise UsageError(
                    f"volume {name!r}: mountPath={folder!r} must be a path from /. "
                    "Write for example /data."
                )
            folders.append(posixpath.normpath(folder))
        for folder in folders:
            if folders.count(folder) > 1:
                raise UsageError(
                    f"{folder} is mounted twice. Mount one of the volumes at another folder."
                )


def require_reachable(config: RunConfig, pod: Mapping[str, Any], own: Iterable[str]) -> None:
    """Checks that each path of a run is a URL, or on a volume of its pods.

    Args:
        config: of the run.
        pod: spec of each pod.
        own: names of volumes that are not for the run's files.

    Raises:
        UsageError: a path is in no pod, or checkpoints would be lost with their pod.
    """
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    folders: dict[str, bool] = {}
    for mount in pod["containers"][0].get("volumeMounts", []):
        name = mount["name"]
        if name not in own:
            folders[mount["mountPath"]] = "emptyDir" not in volumes[name]
    problems = []
    for key, value, may_be_url in path_keys(config):
        if not value or key in _SCRATCH or is_url(value):
            continue
        path = PurePosixPath(posixpath.normpath(value))
        lasting = [lasts for folder, lasts in folders.items() if path.is_relative_to(folder)]
        url = f", or {key}=gs://BUCKET/{path.name}" if may_be_url else ""
        fix = f"Set --volume CLAIM:/data and {key}=/data/{path.name}{url}"
        if not lasting:
            what = "no pod has it"
            if key in _LASTING:
                what = "checkpoints would be lost with their pod"
            problems.append(f"{key}={value} is on no volume, so {what}. {fix}.")
        elif key in _LASTING and not any(lasting):
            rule = "is on an emptyDir, so checkpoints would be lost with their pod"
            problems.append(f"{key}={value} {rule}. {fix}.")
    if problems:
        head = "files that pods cannot read or would lose:"
        raise UsageError("\n  * ".join([head, *problems]))
