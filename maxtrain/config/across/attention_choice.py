"""The attention kernel of a run: the one that model.attention names, or with auto the one that
suits the devices, the mesh, the rows and the model.

The limits of each kernel are declared elsewhere (`config/kernels.py`, `across/attention.py`,
`across/context.py`); this module only applies them.
"""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from data_pipeline.base.errors import ConfigError
from maxtrain.config.across.attention import dropout_problems, kernel_problems
from maxtrain.config.across.context import context_problems
from maxtrain.config.kernels import ATTENTION, AUTO, Kernel, candidates
from maxtrain.config.schema import RunConfig
from maxtrain.config.words import rule_of

# Reasons why a kernel of one platform is the best there, if it supports the run.
_BEST = {
    "cudnn": "no row has documents to keep apart",
    "flash": f"rows are multiples of {ATTENTION['flash'].rows} tokens",
}


class Hardware(NamedTuple):
    """The devices that a step is compiled for, which need not be here.

    Attributes:
        platform: cpu, gpu or tpu.
        kind: name of the device, for messages.
        capability: of a GPU, its compute capability, (0, 0) where it has none; None: no GPU, or not
            known.
    """

    platform: str
    kind: str
    capability: tuple[int, int] | None = None


class KernelChoice(NamedTuple):
    """A kernel, and why it is the one; the reason continues a sentence."""

    kernel: str
    reason: str

    @property
    def line(self) -> str:
        """Return the line that a launch prints about the kernel."""
        return f"attention: {self.kernel}, {self.reason}"


def choose(hardware: Hardware, config: RunConfig, had: str | None = None) -> KernelChoice:
    """The kernel of a run. The same devices and config have the same one.

    With auto, in this order, the first that supports all settings of the run:

    * eager alone, where attention weights are dropped;
    * ring, where rows are split over devices;
    * the kernel that these devices have and others have not: flash on TPUs, cuDNN on GPUs;
    * xla.

    Args:
        hardware: devices of the run.
        config: with all axes of the mesh filled in.
        had: the kernel that the run was trained with so far, which auto keeps if possible; None for
            a new run.

    Raises:
        ConfigError: these devices do not have the kernel that is named; or auto finds none.
    """
    named = config.model.attention
    if named != AUTO:
        problems = list(device_problems(named, hardware))
        if problems:
            raise ConfigError(problems)
        return KernelChoice(named, "as model.attention says")
    changed = ""
    if had is not None:
        problem = next(_problems_with(had, hardware, config), None)
        if problem is None:
            return KernelChoice(had, "with which the run was trained until now")
        changed = f"; until now the run had {had}, but {rule_of(problem)}"
    refused: list[str] = []
    splits_rows = config.mesh.context > 1
    drops_weights = config.regularization.attention_dropout > 0
    for kernel in candidates(hardware.platform, splits_rows, drops_weights):
        problem = next(_problems_with(kernel, hardware, config), None)
        if problem is None:
            why = _why(kernel, refused, hardware, config)
            others = _by_name(hardware, config) if kernel == "xla" else ""
            return KernelChoice(kernel, f"since {why}{others}{changed}")
        refused.append(problem)
    raise ConfigError(refused)


def device_problems(kernel: str, hardware: Hardware) -> Iterator[str]:
    """Devices that do not have a kernel."""
    can = ATTENTION[kernel]
    if can.platform is None:
        return
    if can.platform != hardware.platform:
        yield (
            f"model.attention={kernel} is for {can.platform.upper()}s only, and the devices here "
            f"are of platform {hardware.platform}. Set model.attention=xla."
        )
        return
    if (
        can.below is not None
        and hardware.capability is not None
        and hardware.capability >= can.below
    ):
        most = ".".join(map(str, can.below))
        yield (
            f"model.attention={kernel} is for GPUs of compute capability below {most}, and "
            f"{hardware.kind} has more. Set model.attention=triton, or xla."
        )
        return
    least = can.capability
    if least is not None and hardware.capability is not None and hardware.capability < least:
        yield (
            f"model.attention={kernel} needs GPUs of compute capability {least[0]}.{least[1]} or "
            f"more, and {hardware.kind} has less. Set model.attention=xla."
        )


def _problems_with(kernel: str, hardware: Hardware, config: RunConfig) -> Iterator[str]:
    """Yield the settings of the run that a kernel does not support."""
    model = dataclasses.replace(config.model, attention=kernel)
    with_kernel = dataclasses.replace(config, model=model)
    yield from device_problems(kernel, hardware)
    yield from kernel_problems(with_kernel)
    yield from dropout_problems(with_kernel)
    yield from context_problems(with_kernel)


def _by_name(hardware: Hardware, config: RunConfig) -> str:
    """Name kernels of these devices that would do as well, but are used only if a config names
    them.
    """
    found = ""
    for kernel, can in ATTENTION.items():
        is_theirs = can.by_name and can.platform == hardware.platform
        if is_theirs and next(_problems_with(kernel, hardware, config), None) is None:
            where = ""
            if hardware.capability is None and can.capability is not None:
                where = f" on GPUs of compute capability {_range(can)},"
            found += f"; {kernel} would do, too,{where} and is taken only where it is named"
    return found


def _range(can: Kernel) -> str:
    """The compute capabilities that a kernel is for."""
    assert can.capability is not None
    least = ".".join(map(str, can.capability))
    if can.below is None:
        return f"{least} or more"
    below = ".".join(map(str, can.below))
    return f"{least} or more, below {below}"


def _why(kernel: str, refused: list[str], hardware: Hardware, config: RunConfig) -> str:
    """Return the reason for a kernel; `refused` are the problems of the kernels that would have
    been better.
    """
    if kernel == "eager":
        rate = config.regularization.attention_dropout
        return f"regularization.attention_dropout={rate} drops weights, and no other can"
    if kernel == "ring":
        return f"mesh.context={config.mesh.context} splits rows over devices"
    reasons = [f"devices are {hardware.kind}"]
    if refused:
        reasons += [rule_of(problem) for problem in refused]
    elif kernel in _BEST:
        reasons.append(_BEST[kernel])
    return ", and ".join(reasons)
