"""Estimate of how a training step fits onto devices: its memory by kind, its collectives, and the
least time that it takes. All of it comes from the compiled step; nothing is executed.
"""

import dataclasses
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx

from data_pipeline.base.errors import ConfigError
from data_pipeline.loader.balance import row_counts
from maxtrain.config import RunConfig
from maxtrain.config.across.attention_choice import KernelChoice
from maxtrain.config.across.pipeline import goes_row_by_row, may_take_turns
from maxtrain.config.across.rows import rows_of_step
from maxtrain.config.kernels import ATTENTION
from maxtrain.config.rollouts import rollout_settings
from maxtrain.config.sections.mesh import row_shards
from maxtrain.config.sections.rules import changed_rules
from maxtrain.inference.engine import cache_room
from maxtrain.models.cost import TokenFlops, product_weights, token_flops
from maxtrain.models.decoder import Decoder
from maxtrain.objectives.objective import POLICY
from maxtrain.parallel.compiled.hlo import parse
from maxtrain.parallel.compiled.roofline import CollectiveTime, Roofline, lines_of, roofline
from maxtrain.parallel.compiled.work import work_of
from maxtrain.parallel.hardware import links, peak_or
from maxtrain.parallel.memory import (
    GIB,
    bytes_beside_arguments,
    bytes_on_device,
    bytes_on_host,
    is_out_of_memory,
    size,
)
from maxtrain.parallel.mesh import AXES
from maxtrain.parallel.sharding import named_sharding
from maxtrain.rl.rows import count_rows
from maxtrain.train_step.state import TrainState, policy_variables
from maxtrain.trainer.abstract_step import StepPrograms
from maxtrain.trainer.job import TrainingParts

_USED = re.compile(r"Used ([\d.]+)([KMG]) of")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": GIB}
_TEMPORARIES = "gradients, activations and other temporaries"


class RowBatchShape(NamedTuple):
    """Shape of a batch."""

    rows: int
    length: int


class FitEstimate(NamedTuple):
    """Estimate of a step on each device.

    Attributes:
        config: with the mesh filled in, and the kernel of attention named.
        attention: why it is that one.
        device: its kind.
        limit: bytes that programs may use.
        memory: bytes by kind; they add up to what a step needs. Empty: the compiler refused it.
        on_host: bytes in the memory of hosts, for each device, by kind; empty: nothing lies there,
            or the compiler refused it.
        refused: bytes that the compiler says it would need; None: it compiled, or did not say.
        sampling: bytes of parameters, optimizer and caches while completions are sampled; None:
            the run samples none.
        model: FLOPs of the model on a token.
        flops: that the program computes on a device in a step; those of attention kernels are as
            the model needs them.
        memory_traffic: bytes.
        host_traffic: bytes that go between a device and the memory of its host.
        lines: collectives.
        times: None: the compiler refused it.
        warnings: arrays that XLA gathers whole for want of a better way.
        unknown_loops: loops that count once, since their trip count is not known.
        compile_seconds: how long compiling took.
    """

    config: RunConfig
    attention: KernelChoice
    device: str
    num_devices: int
    batch: RowBatchShape
    limit: int
    memory: dict[str, int]
    on_host: dict[str, int]
    refused: int | None
    sampling: int | None
    model: TokenFlops
    peak: float
    flops: float
    memory_traffic: float
    host_traffic: float
    lines: list[CollectiveTime]
    times: Roofline | None
    warnings: list[str]
    unknown_loops: int
    compile_seconds: float

    @property
    def total(self) -> int | None:
        """Bytes that are needed; None: more than the compiler allows."""
        if not self.memory:
            return None
        return max(sum(self.memory.values()), self.sampling or 0)

    @property
    def fits(self) -> bool:
        return self.total is not None and self.total <= self.limit

    @property
    def tokens(self) -> int:
        """Tokens in a batch."""
        return self.batch.rows * self.batch.length

    @property
    def tokens_per_second(self) -> float:
        """Highest tokens per second of one device."""
        assert self.times is not None
        return self.tokens / self.times.seconds / self.num_devices

    @property
    def utilisation(self) -> float:
        """Model FLOPs utilisation at best, of the FLOPs that causal attention needs."""
        return self.tokens_per_second * self.model.causal / self.peak

    @property
    def model_share(self) -> float:
        """Model FLOPs of one device in a step, as causal attention needs them."""
        return self.model.causal * self.tokens / self.num_devices

    def record(self) -> dict[str, Any]:
        """Return the estimate for JSON."""
        mesh = self.config.mesh
        found: dict[str, Any] = {
            "device": self.device,
            "devices": self.num_devices,
            "mesh": {axis: getattr(mesh, axis) for axis in AXES},
            "rules": changed_rules(mesh.rules),
            "rows": self.batch.rows,
            "seq_length": self.batch.length,
            "accumulation": self.config.optimizer.micro_batches,
            "remat": self.config.model.remat,
            "attention": self.attention.kernel,
            "attention_reason": self.attention.reason,
            "limit_bytes": self.limit,
            "memory_bytes": self.memory,
            "host_memory_bytes": self.on_host,
            "total_bytes": self.total,
            "sampling_bytes": self.sampling,
            "refused_bytes": self.refused,
            "fits": self.fits,
            "model_flops_per_token": self.model._asdict(),
            "model_flops_per_step": self.model.full * self.tokens,
            "program_flops_per_device": self.flops,
            "memory_traffic_bytes": self.memory_traffic,
            "host_traffic_bytes": self.host_traffic,
            "collectives": [line._asdict() for line in self.lines],
            "compiler_warnings": self.warnings,
            "loops_of_unknown_length": self.unknown_loops,
            "compile_seconds": self.compile_seconds,
        }
        if self.times is not None:
            found["estimate"] = {
                "seconds": self.times._asdict(),
                "step_seconds": self.times.seconds,
                "step_seconds_without_overlap": self.times.without_overlap,
                "limit": self.times.limit,
                "tokens_per_second_per_device": self.tokens_per_second,
                "model_flops_utilisation": self.utilisation,
            }
        return found


def batch_shape(config: RunConfig) -> RowBatchShape:
    """Return the shape of the largest batch of a run. Rollouts have a row for each completion, and
    balanced batches a row for each document, which is more than there are where several lie in one
    row.
    """
    data = config.data
    shapes = []
    for stage in (data, *data.stages):
        rows = stage.batch_size or data.batch_size
        if data.packing == "balanced":
            rows = row_counts(rows, data.balance_rows)[-1]
        shapes.append(RowBatchShape(rows, stage.seq_length or data.seq_length))
    largest = max(shapes, key=lambda shape: shape.rows * shape.length)
    settings = rollout_settings(config)
    if settings is not None:
        return largest._replace(rows=largest.rows * settings.num_generations)
    return largest


def fit_step(
    config: RunConfig, devices: Sequence[Any], limit: int, largest: RowBatchShape | None = None
) -> FitEstimate:
    """Compiles the step of a config, and measures what it needs.

    Args:
        config: knows its vocabulary.
        devices: described or real ones.
        limit: bytes of a device that programs may use.
        largest: shape of the largest batch, where the data says more of it than the config; None:
            `batch_shape`.

    Raises:
        ConfigError: config and devices do not fit together, or devices that are not known.
    """
    shape = largest or batch_shape(config)
    data = dataclasses.replace(config.data, batch_size=shape.rows, seq_length=shape.length)
    if rollout_settings(config) is not None or data.packing == "balanced":
        # Of prompts or documents: rows are made of them.
        data = config.data
    programs = StepPrograms(dataclasses.replace(config, data=data), devices)
    return fit_program(programs, counted_shape(programs, shape), limit)


def counted_shape(programs: StepPrograms, largest: RowBatchShape) -> RowBatchShape:
    """Return the shape of the rows that are computed for the largest batch of a run: sampled texts
    are padded.
    """
    if rollout_settings(programs.parts.config) is None:
        return largest
    return largest._replace(rows=count_rows(largest.rows, programs.unit))


def fit_program(programs: StepPrograms, shape: RowBatchShape, limit: int) -> FitEstimate:
    """Estimate the step of compiled programs; see `fit_step`."""
    parts = programs.parts
    device = programs.devices[0]
    tflops = parts.config.observe.peak_tflops
    peak = peak_or(tflops, device, parts.config.precision.compute)
    frozen = product_weights(parts.abstract.frozen[POLICY], parts.config.model)
    found = FitEstimate(
        config=parts.config,
        attention=parts.attention,
        device=device.device_kind,
        num_devices=len(programs.devices),
        batch=shape,
        limit=limit,
        memory={},
        on_host={},
        refused=None,
        sampling=sampling_bytes(parts, shape.length),
        model=token_flops(parts.config.model, shape.length, frozen),
        peak=peak,
        flops=0.0,
        memory_traffic=0.0,
        host_traffic=0.0,
        lines=[],
        times=None,
        warnings=[],
        unknown_loops=0,
        compile_seconds=0.0,
    )
    start = time.perf_counter()
    try:
        compiled = programs.compile(*shape)
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return found._replace(
            refused=_refused_bytes(str(error)), compile_seconds=time.perf_counter() - start
        )
    seconds = time.perf_counter() - start
    module = parse(compiled.as_text() or "")
    work = work_of(module, has_small_memories=device.platform == "tpu")
    work.flops += kernel_flops(parts.config, shape, frozen) / len(programs.devices)
    network = links(device)
    lines = lines_of(work, parts.mesh, network)
    return found._replace(
        memory=memory_by_kind(programs, compiled, shape),
        on_host=host_memory_by_kind(parts, compiled),
        flops=work.flops,
        memory_traffic=work.memory_bytes,
        host_traffic=work.host_bytes,
        lines=lines,
        times=roofline(work, found.model_share, peak, lines, network),
        warnings=sorted(set(programs.warnings)),
        unknown_loops=work.loops_of_unknown_length,
        compile_seconds=seconds,
    )


def kernel_flops(config: RunConfig, shape: RowBatchShape, frozen: int) -> float:
    """Return the FLOPs of attention in a step, if its kernel hides them from the program: the FLOPs
    that the model needs.
    """
    if ATTENTION[config.model.attention].platform is None:
        return 0.0
    whole = token_flops(config.model, shape.length, frozen).causal
    alone = token_flops(config.model, 1, frozen).causal
    return (whole - alone) * shape.rows * shape.length


def memory_by_kind(
    programs: StepPrograms, compiled: jax.stages.Compiled, shape: RowBatchShape
) -> dict[str, int]:
    """Bytes on each device."""
    found = _state_by_kind(programs.parts.abstract, bytes_on_device)
    batch = bytes_on_device(programs.batch(*shape))
    found["batch, with those that wait"] = batch + programs.waiting_bytes(*shape)
    analysis = compiled.memory_analysis()
    assert analysis is not None
    code = analysis.generated_code_size_in_bytes
    # Of what a tile of a TPU leaves empty.
    arguments = sum(found.values()) - programs.waiting_bytes(*shape)
    found["padding of layouts"] = max(0, analysis.argument_size_in_bytes - arguments)
    found[_TEMPORARIES] = bytes_beside_arguments(compiled) - code
    found["program"] = code
    return {kind: count for kind, count in found.items() if count}


def host_memory_by_kind(parts: TrainingParts, compiled: jax.stages.Compiled) -> dict[str, int]:
    """Bytes in the memory of hosts, for each device."""
    found = _state_by_kind(parts.abstract, bytes_on_host)
    analysis = compiled.memory_analysis()
    assert analysis is not None
    found[_TEMPORARIES] = analysis.host_temp_size_in_bytes
    return {kind: count for kind, count in found.items() if count}


def _state_by_kind(state: TrainState, count: Callable[[Any], int]) -> dict[str, int]:
    """Bytes of the training state.

    `count`: those of a tree in one kind of memory.
    """
    others = {name: params for name, params in state.frozen.items() if name != POLICY}
    return {
        "parameters": count((state.trainable, state.frozen[POLICY], state.buffers)),
        "other models": count(others),
        "optimizer": count((state.opt_state, state.control, state.step)),
    }


def _refused_bytes(message: str) -> int | None:
    """Return what TPU's compiler says that a program needs of the main memory."""
    used = _USED.search(message)
    if used is None:
        return None
    return int(float(used[1]) * _UNITS[used[2]])


def sampling_bytes(parts: TrainingParts, length: int) -> int | None:
    """Bytes on each device of the training state and of the engine's caches, by their shapes, while
    completions are sampled; what its programs need beside is not counted. None: nothing is sampled.

    Args:
        length: of a prompt and its completion.
    """
    settings = rollout_settings(parts.config)
    if settings is None:
        return None
    model = parts.config.model
    shards = row_shards(parts.config.mesh)
    room = cache_room(settings.slots, shards, length, model.max_length)
    policy: Decoder = nnx.merge(parts.policy_graphdef, policy_variables(parts.abstract))
    caches = jax.eval_shape(lambda: room.empty(policy))
    total = bytes_on_device(parts.abstract)
    for array in jax.tree.leaves(caches):
        heads = "kv_heads"
        if array.shape[-3] == 1:
            # The one key that all heads share.
            heads = None
        axes = (*[None] * (array.ndim - 4), "activation_batch", heads, None, None)
        sharding = named_sharding(parts.mesh, axes, array.shape, "caches")
        total += bytes_on_device(jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding))
    return total


def require_fit(found: FitEstimate) -> None:
    """ConfigError: a step does not fit, with its bytes and what needs less."""
    if found.fits:
        return
    config = found.config
    what = f"{found.batch.rows:,} rows x {found.batch.length:,} tokens"
    needed = "more than the compiler allows"
    if found.refused is not None:
        needed = size(found.refused)
    if found.total is not None:
        needed = size(found.total)
    raise ConfigError(
        f"data.batch_size={config.data.batch_size}: a step of {what} on {found.num_devices:,} x "
        f"{found.device} needs {needed} of the {size(found.limit)} that programs may use of each "
        f"device. {_fix(found)}"
    )


def _fix(found: FitEstimate) -> str:
    """Return what needs less memory."""
    config = found.config
    ways = []
    takes_turns = may_take_turns(config)
    if takes_turns:
        ways.append("model.pipeline.schedule=1f1b")
    unit = row_shards(config.mesh) * config.optimizer.micro_batches
    rows = found.batch.rows
    if config.data.packing == "balanced":
        # Batches have multiples of the smallest.
        rows = rows_of_step(config)
    can_accumulate = rows % (2 * unit) == 0 and not goes_row_by_row(config)
    if can_accumulate and not takes_turns:
        ways.append(f"optimizer.accumulation={2 * config.optimizer.micro_batches}")
    if config.model.remat != "full":
        ways.append("model.remat=full")
    if config.optimizer.micro_batches < 2 or not ways:
        ways.append("a higher mesh.tensor or mesh.context, or more devices")
    ways = ways[:2]
    return f"Set {' and '.join(ways)}; `maxtrain fit --search` looks for what fits."
