"""The section `mesh`, and what must hold inside it."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Literal

from data_pipeline.base.config_key import key
from maxtrain.config.sections.rules import RulesConfig
from maxtrain.config.words import choices


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Arrangement of the devices. At most one axis may be -1, for all devices that are left."""

    data: int = key(
        1, "data parallelism: replicas of the model, each with its own rows", high=1 << 20
    )
    fsdp: int = key(
        -1,
        "FSDP: shards of the parameters, which are gathered layer by layer; each shard has "
        "its own rows",
        high=1 << 20,
    )
    tensor: int = key(
        1,
        "tensor parallelism: shards of heads, feed-forward units and vocabulary inside each layer",
        high=1 << 20,
    )
    context: int = key(
        1,
        "context parallelism: parts of each row; devices exchange heads, or with "
        "model.attention=ring keys and values",
        high=1 << 20,
    )
    expert: int = key(
        1, "expert parallelism: shards of the experts; each shard has its own rows", high=1 << 20
    )
    stage: int = key(
        1, "pipeline parallelism: stages that each have some of the layers", high=1 << 20
    )
    preset: Literal["none", "fsdp", "hsdp", "fsdp_tensor", "moe", "long_context"] = key(
        "none",
        "sets the axes that are not set: fsdp: all devices; hsdp: replicas of up to 8 "
        "devices; fsdp_tensor, moe, long_context: tensor, expert or context of up to 8, and "
        "fsdp for the rest",
    )
    rules: RulesConfig = key(
        RulesConfig(), "sharding rules: the mesh axes that split each dim of stored parameters"
    )
    dcn_data: int = key(
        1,
        "slices (TPU) or processes connected by a slow network (DCN); each has its own "
        "mesh.data replicas",
        low=1,
        high=1 << 20,
    )
    dcn_stage: int = key(
        1,
        "slices or processes connected by a slow network (DCN); each has its own mesh.stage stages",
        low=1,
        high=1 << 20,
    )
    dcn_fsdp: int = key(
        1,
        "slices or processes connected by a slow network (DCN); each has its own mesh.fsdp shards",
        low=1,
        high=1 << 20,
    )
    platform: Literal["auto", "cpu", "gpu", "tpu"] = key(
        "auto", "device kind that the run requires; auto: the best available"
    )
    simulated_devices: int | None = key(
        None, "number of devices to simulate, on a CPU only", low=1, high=4096
    )
    coordinator: str | None = key(
        None,
        "host:port of process 0, or a list of the first ones; null: JAX_COORDINATOR_ADDRESS, "
        "or the cluster's own",
    )
    num_processes: int | None = key(
        None,
        "processes in the job; null: JAX_NUM_PROCESSES, or the cluster's own",
        low=1,
        high=1 << 20,
    )
    process_id: int | None = key(
        None, "index of this process; null: JAX_PROCESS_ID, or the cluster's own", low=0
    )
    min_processes: int | None = key(
        None,
        "start with this many processes if the others are missing; null: all must be there",
        low=1,
    )
    planned_processes: int | None = key(
        None,
        "processes that the settings are meant for; with fewer, accumulation grows and slices "
        "shrink; null: as many as there are",
        low=1,
        high=1 << 20,
    )
    connect_seconds: float = key(
        300.0, "time limit for processes to meet at the start, in seconds", above=0, high=1e6
    )
    heartbeat_seconds: int = key(
        100,
        "the job ends if a process sends no heartbeat for this many seconds",
        low=1,
        high=1_000_000,
    )


def axes_of(mesh: MeshConfig) -> dict[str, int]:
    """The sizes of the axes by their keys, outer to inner; of what a fast network connects."""
    return {
        "mesh.data": mesh.data,
        "mesh.stage": mesh.stage,
        "mesh.fsdp": mesh.fsdp,
        "mesh.context": mesh.context,
        "mesh.expert": mesh.expert,
        "mesh.tensor": mesh.tensor,
    }


def slow_axes_of(mesh: MeshConfig) -> dict[str, int]:
    """Return the sizes, by key, of the axes that a slow network connects, except those of size
    1.
    """
    slow = {
        "mesh.dcn_data": mesh.dcn_data,
        "mesh.dcn_stage": mesh.dcn_stage,
        "mesh.dcn_fsdp": mesh.dcn_fsdp,
    }
    return {key: size for key, size in slow.items() if size != 1}


def num_slices(mesh: MeshConfig) -> int:
    """Return the number of slices that a slow network connects; 1 if none are configured."""
    return math.prod(slow_axes_of(mesh).values())


def stage_axes_of(mesh: MeshConfig) -> dict[str, int]:
    """Return the axes that split layers, by key, except those of size 1."""
    axes = {"mesh.dcn_stage": mesh.dcn_stage, "mesh.stage": mesh.stage}
    return {key: size for key, size in axes.items() if size != 1}


def num_stages(mesh: MeshConfig) -> int:
    """Parts of the layers; 0: the mesh is not known yet."""
    if mesh.stage < 1:
        return 0
    return math.prod(stage_axes_of(mesh).values())


def stage_words(mesh: MeshConfig) -> str:
    """Return the sizes of the axes that split layers, as messages show them."""
    return " times ".join(f"{key}={size}" for key, size in stage_axes_of(mesh).items())


def without_stages(mesh: MeshConfig) -> str:
    """The settings that split no layers."""
    return " and ".join(f"{key}=1" for key in stage_axes_of(mesh))


def row_axes_of(mesh: MeshConfig) -> dict[str, int]:
    """Return the axes that split rows, by key, with the expert axis if it splits rows."""
    axes = axes_of(mesh)
    of_rows = slow_axes_of(mesh)
    of_rows.pop("mesh.dcn_stage", None)
    for axis in ("mesh.data", "mesh.fsdp"):
        of_rows[axis] = axes[axis]
    if axes["mesh.expert"] != 1:
        of_rows["mesh.expert"] = axes["mesh.expert"]
    return of_rows


def row_shards(mesh: MeshConfig) -> int:
    """Devices with rows of their own; 0: the mesh is not known yet."""
    sizes = row_axes_of(mesh).values()
    if any(size < 1 for size in sizes):
        return 0
    return math.prod(sizes)


def axis_problems(mesh: MeshConfig) -> Iterator[str]:
    """Axes of an impossible size, or more than one axis of size -1."""
    axes = axes_of(mesh)
    for axis, size in axes.items():
        if size < 1 and size != -1:
            yield (
                f"{axis}={size} must be at least 1, or -1 for all devices that are left. "
                f"Set {axis} to 1 or -1."
            )
    free = [axis for axis, size in axes.items() if size == -1]
    if len(free) > 1:
        given = " and ".join(f"{axis}=-1" for axis in free)
        yield f"{given}: only one axis may be -1. Set {choices(free)} to 1."


def process_problems(mesh: MeshConfig) -> Iterator[str]:
    """Devices that a platform can't simulate, and processes that the job does not have."""
    if mesh.simulated_devices and mesh.platform not in ("auto", "cpu"):
        yield (
            f"mesh.simulated_devices={mesh.simulated_devices} is not for "
            f"mesh.platform={mesh.platform}. Set mesh.platform=cpu, or mesh.simulated_devices=null."
        )
    count = mesh.num_processes
    if count is None:
        return
    if mesh.min_processes is not None and mesh.min_processes > count:
        yield (
            f"mesh.min_processes={mesh.min_processes} is more than mesh.num_processes={count}. "
            f"Set mesh.min_processes to at most {count}."
        )
    if mesh.process_id is not None and mesh.process_id >= count:
        yield (
            f"mesh.process_id={mesh.process_id} must be less than mesh.num_processes={count}. "
            f"Set mesh.process_id to at most {count - 1}; it counts from 0."
        )
