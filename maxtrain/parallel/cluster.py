"""A process's place in its job, from the cluster: Slurm, Open MPI, Kubernetes, Cloud TPU.

JAX detects most of it (`jax.distributed.initialize` without arguments). This module detects it
instead, for two reasons. A failure of JAX's detection would end in a traceback. And JAX gives each
process one GPU, so a job with one process per host would leave seven of eight GPUs idle without a
message.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from data_pipeline.base.errors import ConfigError

ALONE = "mesh.num_processes=1"
_KEYS = "mesh.coordinator, mesh.num_processes and mesh.process_id"
_TPU = ("tpu", "gcetpu", "gketpu")


class ProcessInfo(NamedTuple):
    """Place of a process in its job."""

    # jax's name of it.
    cluster: str
    # host:port of process 0.
    coordinator: str
    # Processes in the job, and which one this is.
    count: int
    index: int
    # Number of processes on this host, and which one this is.
    local_count: int = 1
    local_index: int = 0

    @property
    def is_tpu(self) -> bool:
        """Return whether this is Cloud TPU, whose library has to see all hosts of a slice."""
        return self.cluster in _TPU


def find_place(connect_seconds: float, with_tpu: bool = True) -> ProcessInfo | None:
    """The place of this process in its job; None: it was started alone.

    Args:
        connect_seconds: how long process 0 may take to be known by its name.
        with_tpu: whether to query Cloud TPU, too.

    Raises:
        ConfigError: it is one of several, and the others can't be found.
    """
    for cluster in _clusters():
        name = cluster.name or "k8s"
        if name in _TPU and not with_tpu:
            continue
        if name == "k8s" and "JOB_COMPLETION_INDEX" not in os.environ:
            continue
        try:
            if not cluster.opt_in_only_method and cluster.is_env_present():
                return _place(cluster, name, connect_seconds)
        except (RuntimeError, OSError, ValueError, KeyError, LookupError) as error:
            what = " ".join(str(error).split()) or type(error).__name__
            rule = (
                f"a cluster ({name}) started this process, "
                f"but does not say where the others are: {what.rstrip('.')}"
            )
            raise ConfigError(f"{rule}. Set {_KEYS}, or {ALONE} if it is alone.") from error
    _require_alone(os.environ)
    return None


def _clusters() -> list[Any]:
    """JAX's classes, one for each kind of cluster, in the order in which it asks them."""
    try:
        # It has no public name; Place is all that is used of it.
        from jax._src.clusters import ClusterEnv  # noqa: PLC0415
    except ImportError:
        return []
    return list(ClusterEnv._cluster_types)


def _place(cluster: Any, name: str, connect_seconds: float) -> ProcessInfo | None:
    count = int(cluster.get_process_count())
    if count == 1:
        return None
    port = os.environ.get("JAX_COORDINATOR_PORT")
    coordinator = cluster.get_coordinator_address(
        timeout_secs=round(connect_seconds), override_coordinator_port=port
    )
    index = int(cluster.get_process_id())
    local_index = cluster.get_local_process_id()
    if local_index is None or name in _TPU:
        return ProcessInfo(name, coordinator, count, index)
    return ProcessInfo(name, coordinator, count, index, _local_count(os.environ), int(local_index))


def _local_count(environment: Mapping[str, str]) -> int:
    """Processes of the job on this host.

    Slurm writes `2(x3),1` for three hosts with two and one with one.
    """
    if "OMPI_COMM_WORLD_LOCAL_SIZE" in environment:
        return int(environment["OMPI_COMM_WORLD_LOCAL_SIZE"])
    host = int(environment["SLURM_NODEID"])
    tasks_per_node = environment["SLURM_STEP_TASKS_PER_NODE"]
    for tasks, hosts in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks_per_node):
        host -= int(hosts or 1)
        if host < 0:
            return int(tasks)
    raise ValueError(f"SLURM_STEP_TASKS_PER_NODE={tasks_per_node} has too few hosts")


def _require_alone(environment: Mapping[str, str]) -> None:
    """ConfigError: the environment says that there are several processes, and not where."""
    slurm = "srun python -m maxtrain.train ..."
    for name, what, fix in (
        ("SLURM_NTASKS", "a Slurm job", f"Start it by `{slurm}`"),
        ("SLURM_JOB_NUM_NODES", "a Slurm job, hosts", f"Start it by `{slurm}`"),
        ("OMPI_COMM_WORLD_SIZE", "mpirun", f"Install mpi4py, or set {_KEYS}"),
        ("PMI_SIZE", "mpirun", f"Set {_KEYS} (process_id is PMI_RANK)"),
    ):
        if environment.get(name, "1") not in ("", "0", "1"):
            rule = "nothing says how these find each other, so each would train alone"
            raise ConfigError(
                f"{name}={environment[name]} ({what}), but {rule}. "
                f"{fix}; or {ALONE}, if this process is all there is."
            )
    index = environment.get("JOB_COMPLETION_INDEX")
    if index:
        where = f"JOB_COMPLETION_INDEX={index} (an indexed job of Kubernetes)"
        rule = "jax needs the package `kubernetes` to find its pods"
        fix = f"Install `kubernetes`, or set {_KEYS}"
        raise ConfigError(f"{where}: {rule}. {fix}; or {ALONE}.")


def local_gpus(
    place: ProcessInfo | None, environment: Mapping[str, str], devices: str = "/dev"
) -> list[int] | None:
    """Return which of the GPUs that it sees this process takes; None: all of them.

    A process that is alone on its host takes all. Several that see the same GPUs share them evenly.

    Raises:
        ConfigError: they can't be shared evenly.
    """
    if place is None or place.local_count == 1 or environment.get("JAX_LOCAL_DEVICE_IDS"):
        return None
    count = len(list(Path(devices).glob("nvidia[0-9]*")))
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name for name in visible.split(",") if name.strip()]
        count = min(count, len(names))
    # With one, the cluster gives each process its own.
    if count <= 1:
        return None
    if count % place.local_count:
        who = f"{place.local_count} processes on this host"
        rule = f"{who} see {count} GPUs, which they can't share evenly"
        raise ConfigError(f"mesh: {rule}. Start one process for each GPU, or one for each host.")
    share = count // place.local_count
    return list(range(place.local_index * share, (place.local_index + 1) * share))
