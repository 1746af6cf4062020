"""Batches, rows and the model, and what they are divided into: micro-batches, devices."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator

from data_pipeline.base.errors import ConfigError
from maxtrain.config.across.context import context_problems
from maxtrain.config.across.experts import split_problems
from maxtrain.config.across.pipeline import goes_row_by_row, pipeline_problems
from maxtrain.config.across.presets import with_preset
from maxtrain.config.across.tensor import tensor_problems
from maxtrain.config.rollouts import rollout_settings
from maxtrain.config.schema import RunConfig
from maxtrain.config.sections.mesh import (
    MeshConfig,
    axes_of,
    num_slices,
    row_axes_of,
    row_shards,
    slow_axes_of,
)
from maxtrain.config.words import divisors, multiples, nearest


def division_problems(config: RunConfig) -> Iterator[str]:
    """Yield the sizes that accumulation and the mesh cannot divide; a mesh axis without a known
    size divides nothing.
    """
    yield from _batch_problems(config)
    yield from _held_out_problems(config)
    yield from tensor_problems(config)
    yield from context_problems(config)
    yield from split_problems(config)
    yield from pipeline_problems(config, _rows_of_steps(config), row_shards(config.mesh))


def _batch_sizes(config: RunConfig) -> dict[str, int]:
    """Every number of rows, or documents, of a step, by its key."""
    sizes = {"data.batch_size": config.data.batch_size}
    for index, stage in enumerate(config.data.stages):
        if stage.batch_size:
            sizes[f"data.stages[{index}].batch_size"] = stage.batch_size
    return sizes


def _rows_of_steps(config: RunConfig) -> dict[str, int]:
    """Every number of rows of a step, by its key."""
    if config.data.packing == "balanced":
        return {"data.balance_rows": config.data.balance_rows}
    return _batch_sizes(config)


def balance_problems(config: RunConfig) -> Iterator[str]:
    """Yield the problems of `data.packing=balanced`: fewer documents in a step than rows, and
    several sources whose losses are reported apart.
    """
    data = config.data
    if data.packing != "balanced":
        return
    for key, documents in _batch_sizes(config).items():
        if documents < data.balance_rows:
            yield (
                f"data.balance_rows={data.balance_rows} must be at most {key}={documents}, "
                "the documents of a step; otherwise some rows would be empty. "
                f"Set data.balance_rows to {documents} or less, or {key} higher."
            )
    if config.loss.by_source and len(data.sources) > 1:
        yield (
            "loss.by_source=true needs rows of one source each, and data.packing=balanced puts "
            "documents of several sources into one row. "
            "Set loss.by_source=false, or data.packing=bins."
        )


def auto_accumulation_problems(config: RunConfig) -> Iterator[str]:
    """optimizer.accumulation=auto where no batch is known before its step."""
    if config.optimizer.accumulation != "auto":
        return
    cause = (
        "data.packing=balanced makes the rows of a step of its documents: "
        "a later step may have more than those that are counted ahead."
    )
    if rollout_settings(config) is not None:
        cause = (
            f"objective={config.objective} makes the rows of a step of what it samples: "
            "how many there are is not known yet."
        )
    elif config.data.packing != "balanced":
        return
    yield (
        f"optimizer.accumulation=auto compiles the step before the first one, and {cause} "
        "Set optimizer.accumulation to a number."
    )


def _batch_problems(config: RunConfig) -> Iterator[str]:
    accumulation = config.optimizer.least_micro_batches
    for key, rows in _rows_of_steps(config).items():
        unit = row_shards(config.mesh)
        by = _by_mesh(config)
        if rows % accumulation:
            valid = multiples(rows, accumulation)
            parts = nearest(accumulation, divisors(rows))
            yield (
                f"{key}={rows} must be divisible by optimizer.accumulation={accumulation}. "
                f"Set {key} to {valid}, or optimizer.accumulation to {parts}."
            )
        elif accumulation > 1:
            unit *= accumulation
            by = f"{by} times optimizer.accumulation={accumulation}"
        if row_shards(config.mesh) and rows % unit:
            yield f"{key}={rows} must be divisible by {by}. Set {key} to {multiples(rows, unit)}."


def _held_out_problems(config: RunConfig) -> Iterator[str]:
    if not row_shards(config.mesh):
        return
    sizes = {"eval.batch_size": config.eval.batch_size}
    for name, held_out in config.eval.sets.items():
        sizes[f"eval.sets.{name}.batch_size"] = held_out.batch_size
    shards = row_shards(config.mesh)
    is_default = config.eval.batch_size is None
    default = config.data.batch_size
    if config.data.packing == "balanced" and config.eval.sets and is_default and default % shards:
        yield (
            f"eval.batch_size=null means data.batch_size={default} rows, "
            f"which must be divisible by {_by_mesh(config)}. "
            f"Set eval.batch_size to {multiples(default, shards)}."
        )
    for key, rows in sizes.items():
        if rows and rows % shards:
            yield (
                f"{key}={rows} must be divisible by {_by_mesh(config)}. "
                f"Set {key} to {multiples(rows, shards)}."
            )


def _by_mesh(config: RunConfig) -> str:
    return " times ".join(f"{key}={size}" for key, size in row_axes_of(config.mesh).items())


def fit_to_devices(config: RunConfig, num_devices: int) -> RunConfig:
    """A checked config with the mesh's -1 filled in, and what its preset decides, for `num_devices`
    devices of all processes together.

    Raises:
        ConfigError: the axes' product is not `num_devices`, or the batch or the model can't be
            divided by them.
    """
    config = with_preset(config, num_devices)
    axes = slow_axes_of(config.mesh) | axes_of(config.mesh)
    for key in ("mesh.stage", "mesh.context", "mesh.expert"):
        # Few set these: where nobody does, messages are about the others.
        if axes[key] == 1:
            del axes[key]
    sizes = {key: size for key, size in axes.items() if size > 0}
    free = [key for key in axes if key not in sizes]
    product = math.prod(sizes.values())
    fits = product == num_devices
    if free:
        fits = num_devices % product == 0
    if not fits:
        raise ConfigError(_unlike_devices(sizes, bool(free), num_devices))
    filled = {key.removeprefix("mesh."): num_devices // product for key in free}
    config = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, **filled))
    problems = list(division_problems(config))
    if problems:
        raise ConfigError(problems)
    return config


def with_accumulation(config: RunConfig, count: int) -> RunConfig:
    """Return the config with `count` micro-batches in a step."""
    optimizer = dataclasses.replace(config.optimizer, accumulation=count)
    return dataclasses.replace(config, optimizer=optimizer)


def accumulations(config: RunConfig, num_devices: int) -> list[int]:
    """Return every number of micro-batches into which the batches of a run can be divided on this
    number of devices, from the fewest. Only the fewest is returned if more would need as much
    memory.
    """
    rows = math.gcd(*_rows_of_steps(config).values())
    found = []
    for count in range(1, rows + 1):
        if rows % count:
            continue
        with contextlib.suppress(ConfigError):
            fit_to_devices(with_accumulation(config, count), num_devices)
            found.append(count)
    if goes_row_by_row(config):
        return found[:1]
    return found


def _unlike_devices(sizes: dict[str, int], has_free: bool, num_devices: int) -> str:
    """The problem of axes that don't multiply to the number of devices, or don't divide it."""
    product = math.prod(sizes.values())
    verb = "be"
    if has_free:
        verb = "divide"
    # Changing one axis alone may be enough.
    fixes = []
    for key, size in sizes.items():
        share = num_devices * size / product
        if share % 1:
            continue
        if has_free:
            fixes.append(f"{key} to {nearest(size, divisors(int(share)))}")
        else:
            fixes.append(f"{key} to {int(share)}")
    fix = ", or ".join(fixes)
    if not fixes:
        fix = f"{' and '.join(sizes)} so that they multiply to {num_devices}, or mesh.fsdp=-1"
    given = " x ".join(f"{key}={size}" for key, size in sizes.items())
    return f"{given} = {product} must {verb} the number of devices, {num_devices}. Set {fix}."


def fit_to_fewer(config: RunConfig, had: int, count: int, devices: int) -> RunConfig | None:
    """Return the config for `count` of the `had` processes it is meant for, with `devices` devices
    each; None if the config cannot run with so few.

    Accumulation grows, so that no device gets more rows at a time than before; the batch of a step
    stays the same. If accumulation is still to be decided (auto), that happens on the fewer
    devices. Only whole slices are kept. The new config is meant for `count` processes, whatever
    mesh.planned_processes was, so that it is not reduced again when it is read.
    """
    mesh = _with_fewer_slices(config.mesh, had, count)
    if mesh is None:
        return None
    mesh = dataclasses.replace(mesh, planned_processes=None)
    config = dataclasses.replace(config, mesh=mesh)
    if config.optimizer.accumulation == "auto":
        tried = [config]
    else:
        least = math.ceil(config.optimizer.accumulation * had / count)
        counts = range(least, config.data.batch_size + 1)
        tried = (with_accumulation(config, accumulation) for accumulation in counts)
    for fewer in tried:
        with contextlib.suppress(ConfigError):
            fit_to_devices(fewer, count * devices)
            return fewer
    return None


def fit_to_planned(config: RunConfig, count: int, devices: int) -> RunConfig:
    """Return the config for `count` processes with `devices` devices each, fewer than
    mesh.planned_processes. ConfigError: the config cannot run with so few.
    """
    planned = config.mesh.planned_processes
    assert planned is not None and planned > count
    fewer = fit_to_fewer(config, planned, count, devices)
    if fewer is None:
        # If the batch or the model can't be divided by these devices at all, that is the reason.
        fit_to_devices(config, count * devices)
        raise ConfigError(
            f"mesh.planned_processes={planned}: no optimizer.accumulation divides "
            f"data.batch_size={config.data.batch_size} so that no device gets more rows at a time "
            f"than with {planned} processes. Set mesh.planned_processes=null and "
            "optimizer.accumulation to a number of your choice."
        )
    return fewer


def _with_fewer_slices(mesh: MeshConfig, had: int, count: int) -> MeshConfig | None:
    """The mesh with as many slices as `count` of `had` processes have; None: one is not whole.

    There are fewer replicas (mesh.dcn_data) rather than fewer shards (mesh.dcn_fsdp), and fewer of
    these rather than fewer stages (mesh.dcn_stage).
    """
    slices = num_slices(mesh)
    if slices == 1:
        return mesh
    left, rest = divmod(count * slices, had)
    if rest:
        return None
    of_replica = mesh.dcn_fsdp * mesh.dcn_stage
    if left % of_replica == 0:
        return dataclasses.replace(mesh, dcn_data=left // of_replica)
    if left % mesh.dcn_stage == 0:
        return dataclasses.replace(mesh, dcn_data=1, dcn_fsdp=left // mesh.dcn_stage)
    return dataclasses.replace(mesh, dcn_data=1, dcn_fsdp=1, dcn_stage=left)


def fewer_settings(config: RunConfig, fewer: RunConfig) -> dict[str, str]:
    """Return the keys that `fit_to_fewer` has changed, as settings of a command line."""
    settings = {"optimizer.accumulation": str(fewer.optimizer.accumulation)}
    for name in ("dcn_data", "dcn_stage", "dcn_fsdp"):
        size = getattr(fewer.mesh, name)
        if size != getattr(config.mesh, name):
            settings[f"mesh.{name}"] = str(size)
    if config.mesh.planned_processes is not None:
        settings["mesh.planned_processes"] = "null"
    return settings
