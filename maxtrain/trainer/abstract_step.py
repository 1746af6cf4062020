"""The training step of a config, compiled from shapes alone, for present or merely described
devices. Nothing is executed, and no data is read."""

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from data_pipeline.base.errors import ConfigError
from maxtrain.config import RunConfig, fit_to_devices
from maxtrain.config.sections.moe import WITH_EXPERTS
from maxtrain.ops.tokamax import lowered_for
from maxtrain.parallel.batches import abstract_batch
from maxtrain.parallel.memory import bytes_on_device, is_out_of_memory, program_bytes
from maxtrain.parallel.sharding import batch_shards
from maxtrain.parallel.topologies import compile_options, compiler_warnings, is_described
from maxtrain.trainer.job import TrainingParts, make_parts


class StepPrograms:
    """The compiled train steps of a config on some devices.

    Args:
        config: of the run, with a known vocabulary and a batch that the devices divide.
        devices: present ones, or descriptions of devices elsewhere.

    Raises:
        ConfigError: config and devices do not fit together.
    """

    def __init__(self, config: RunConfig, devices: Sequence[Any]):
        self.devices = devices
        data = dataclasses.replace(config.data, stages=())
        evaluation = dataclasses.replace(config.eval, sets={}, batch_size=None)
        bare = dataclasses.replace(config, data=data, eval=evaluation)
        fitted = fit_to_devices(bare, len(devices))
        parts = make_parts(fitted, devices, 1 << 20, len(config.data.sources))
        # Weights do not matter for compilation, so none are read. The objective keeps its
        # reference.
        random = dataclasses.replace(fitted.checkpoint, init_from=None, init_partial=())
        trained = dataclasses.replace(parts.config, checkpoint=random)
        self.parts: TrainingParts = dataclasses.replace(parts, config=trained)
        self.step = self.parts.make_step()
        # Compiler warnings up to now: arrays that XLA gathers whole for lack of a better
        # resharding.
        self.warnings: list[str] = []

    @property
    def unit(self) -> int:
        """Return the number of rows that every batch size must be a multiple of.

        It is the number of batch shards, times gradient accumulation, times the pipeline's
        micro-batches.
        """
        config = self.parts.config
        with jax.set_mesh(self.parts.mesh):
            shards = batch_shards()
        return shards * config.optimizer.micro_batches * least_micro_batches(config)

    def batch(self, rows: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return a batch as abstract arrays."""
        return abstract_batch(self.parts.mesh, rows, length, self.parts.objective.arrays)

    def compile(self, rows: int, length: int) -> jax.stages.Compiled:
        """Compile the step for batches of this shape.

        Raises:
            ConfigError: a kernel cannot be traced without its library, or the compiler cannot
                generate its code for these devices.
            JaxRuntimeError: the compilation fails, also for lack of device memory; see
                `is_out_of_memory`.
        """
        options = compile_options(self.devices[0])
        with contextlib.ExitStack() as entered:
            entered.enter_context(jax.set_mesh(self.parts.mesh))
            lowered = self._lowered(rows, length)
            warnings: list[str] = []
            if is_described(self.devices[0]):
                warnings = entered.enter_context(compiler_warnings())
            try:
                compiled = lowered.compile(options or None)
            except jax.errors.JaxRuntimeError as error:
                if "Mosaic GPU pass pipeline failed" not in str(error):
                    raise
                kind = self.devices[0].device_kind
                raise ConfigError(
                    f"{' and '.join(self._mosaic_keys())}: the compiler that is here makes no code "
                    f"for {kind} without one. Set model.attention=triton, or xla, and "
                    "model.routing.kernel=blocks."
                ) from error
        self.warnings += warnings
        return compiled

    def _lowered(self, rows: int, length: int) -> jax.stages.Lowered:
        """Lower the step for batches of this shape."""
        device = self.devices[0]
        elsewhere = contextlib.nullcontext()
        if self._mosaic_keys() and device.platform == "gpu" and is_described(device):
            elsewhere = lowered_for(device)
        try:
            with elsewhere:
                return self.step.lower(self.parts.abstract, self.batch(rows, length))
        except RuntimeError as error:
            if "cuDNN not found" not in str(error):
                raise
            raise ConfigError(
                f"model.attention={self.parts.config.model.attention}: JAX asks cuDNN for its "
                "version, and cuDNN is not installed here. Set model.attention=xla."
            ) from error

    def _mosaic_keys(self) -> list[str]:
        """List the config keys that choose Mosaic kernels, which are written for one kind of
        GPU."""
        model = self.parts.config.model
        keys = []
        if model.attention == "mosaic":
            keys.append("model.attention=mosaic")
        if model.family in WITH_EXPERTS and model.routing.kernel == "tokamax":
            keys.append("model.routing.kernel=tokamax")
        return keys

    def waiting_bytes(self, rows: int, length: int) -> int:
        """Return the bytes on each device of the prefetched batches."""
        return self.parts.config.data.prefetch * bytes_on_device(self.batch(rows, length))


class StepMemory(StepPrograms):
    """Bytes of device memory that a training step needs, for batches of different shapes."""

    def __init__(self, config: RunConfig, devices: Sequence[Any]):
        self.config = config
        # Every mesh divides a batch of this size.
        rows = len(devices) * config.optimizer.micro_batches * least_micro_batches(config)
        data = dataclasses.replace(config.data, stages=(), batch_size=rows)
        super().__init__(dataclasses.replace(config, data=data), devices)

    def bytes(self, rows: int, length: int) -> int | None:
        """Return the bytes on each device that a step and the prefetched batches need.

        Returns None if the compiler finds that the step needs more memory than the device has.
        """
        try:
            compiled = self.compile(rows, length)
        except jax.errors.JaxRuntimeError as error:
            if is_out_of_memory(error):
                return None
            raise
        return program_bytes(compiled) + self.waiting_bytes(rows, length)


def least_micro_batches(config: RunConfig) -> int:
    """Return the number of micro-batches that the pipeline splits a device's rows into; 1 if not
    given."""
    return config.model.pipeline.micro_batches or 1
