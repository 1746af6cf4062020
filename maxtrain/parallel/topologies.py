"""Devices to compile for that need not be here: slices of TPUs, and hosts of GPUs.

TPU's compiler, libtpu, knows slices by names such as v5p:4x4x4. XLA's compiler for GPUs compiles
for a card that it has a description of (a GpuTargetConfigProto; `gpu_targets` has those of three
cards), without a GPU or a driver. Compiled programs have their memory, collectives and kernels; how
fast they are, and which kernels tuning would choose, only the devices themselves can show.
"""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from data_pipeline.base.errors import UsageError
from data_pipeline.base.extras import load_package
from maxtrain.parallel.hardware import links
from maxtrain.parallel.libtpu import answer_libtpu

_TARGETS = Path(__file__).parent / "gpu_targets"
GPUS = ("h100", "h200", "b200")
# That NVLink connects, in the machines that these cards are sold in.
_GPUS_OF_A_HOST = 8
# Of the card, as JAX takes it without XLA_PYTHON_CLIENT_MEM_FRACTION.
_GPU_SHARE = 0.75
EXAMPLES = (
    "v5e:16x16, v5p:4x4x4, v5p:4x4x4:2 (two slices), h100:8, h200:2x8 (hosts x GPUs) or b200:8"
)
# Waits for a character, which comes unless the process that writes it ends.
_TELL = """
import os, sys
file, most = map(int, sys.argv[1:])
if not sys.stdin.buffer.read(1):
    start = max(0, os.fstat(file).st_size - most)
    os.write(2, os.pread(file, most, start))
"""
_TOLD_BYTES = 4000
_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
_REMATERIALIZED = re.compile(r"Involuntary full rematerialization.*")


class GpuHosts(NamedTuple):
    """Hosts of GPUs: a number of hosts with a number of GPUs each."""

    card: str
    hosts: int
    gpus: int


def described_devices(topology: str) -> Sequence[Any]:
    """The devices of a topology, to compile for.

    Starts jax on the CPU, if it has not started yet, and turns the cache of compiled programs off:
    what is compiled for devices elsewhere can't be read here.

    Args:
        topology: such as v5p:4x4x4, v5p:4x4x4:2 for two such slices, or h200:2x8 for two hosts with
            eight GPUs each.

    Raises:
        UsageError: there is no such topology, or no compiler for it is installed.
    """
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)
    name, _, shape = topology.partition(":")
    if name in GPUS:
        hosts = parse_gpus(name, shape)
        _require_warnings()
        return _gpus(hosts)
    found = re.fullmatch(r"((?:v\d\w*|tpu\d+x):\d+(?:x\d+)*)(?::([1-9]\d*))?", topology)
    if not found:
        raise UsageError(f"--topology {topology}: there is no such. Write {EXAMPLES}.")
    return _tpus(found[1], int(found[2] or 1))


def _require_warnings() -> None:
    """UsageError: warnings of XLA's compiler, which `compiler_warnings` reads, are kept back. It
    looks at the variable when jax is imported; libtpu has its own (libtpu.py)."""
    level = os.environ.get(_LOG_LEVEL, "")
    if level.isdecimal() and int(level) >= 2:
        raise UsageError(
            f"{_LOG_LEVEL}={level} keeps back what the compiler says of arrays that it gathers "
            "whole, and this command reports them. Unset it, or set it to 1."
        )


def parse_gpus(card: str, shape: str) -> GpuHosts:
    """Hosts and GPUs of 8 or 2x8. UsageError: it is something else."""
    given = f"--topology {card}:{shape}"
    found = re.fullmatch(r"(?:(\d+)x)?(\d+)", shape)
    if found is None:
        raise UsageError(
            f"{given}: must be a number of GPUs, or hosts x GPUs of each. "
            f"Write {card}:8 or {card}:2x8."
        )
    hosts = int(found[1] or 1)
    gpus = int(found[2])
    if hosts < 1 or gpus < 1:
        raise UsageError(f"{given}: there must be at least one GPU. Write {card}:1 or {card}:8.")
    if gpus > _GPUS_OF_A_HOST:
        several = f"{-(-gpus // _GPUS_OF_A_HOST)}x{_GPUS_OF_A_HOST}"
        raise UsageError(
            f"{given}: a host has at most {_GPUS_OF_A_HOST} GPUs. Write {card}:{several}."
        )
    return GpuHosts(card, hosts, gpus)


def _tpus(topology: str, num_slices: int) -> Sequence[Any]:
    load_package("libtpu", "tpu", f"--topology {topology}")
    # Its import starts nothing, but takes its time.
    from jax.experimental import topologies  # noqa: PLC0415

    # The topology is given.
    answer_libtpu()
    try:
        described = topologies.get_topology_desc(
            platform="tpu", topology_name=topology, num_slices=num_slices
        )
    # jax passes on whatever the plugin raises.
    except Exception as error:
        what = str(error).splitlines()[0][:200]
        raise UsageError(
            f"--topology {topology}: libtpu knows no such: {what}. Write {EXAMPLES}."
        ) from error
    devices = described.devices
    if num_slices > 1 and links(devices[0]).beyond is None:
        raise UsageError(
            f"--topology {topology}:{num_slices}: how fast slices of {devices[0].device_kind} "
            f"reach each other is not known. Write {topology}."
        )
    return devices


def _gpus(args: GpuHosts) -> Sequence[Any]:
    wanted_by = f"--topology {args.card}:{args.hosts}x{args.gpus}"
    load_package("jax_plugins.xla_cuda13", "compile-gpu", wanted_by)
    from jax.experimental import topologies  # noqa: PLC0415

    target = (_TARGETS / f"{args.card}.txtpb").read_text()
    # Slices, hosts of each, GPUs of each. NVLink ends with the host: GPUs of one slice are taken to
    # reach each other's memory, and the kernels for that can't be compiled for dozens.
    described = topologies.get_topology_desc(
        platform="cuda", target_config=target, topology=f"{args.hosts}x1x{args.gpus}"
    )
    return described.devices


def gpu_memory(kind: str) -> int | None:
    """Bytes that programs may use on a described GPU: the share of the card that JAX takes.

    Args:
        kind: the name of the device, as the description of the card has it; None: of no card here.
    """
    for card in GPUS:
        target = (_TARGETS / f"{card}.txtpb").read_text()
        if f'device_description_str: "{kind}"' in target:
            found = re.search(r"device_memory_size: (\d+)", target)
            assert found is not None
            return int(_GPU_SHARE * int(found[1]))
    return None


def is_described(device: Any) -> bool:
    """Return whether it is a device of a topology, not one that this process runs on."""
    return device.platform != jax.default_backend()


def compile_options(device: Any) -> dict[str, str]:
    """Return the compiler options of programs for described devices, beside the options of real
    ones.

    Without a GPU, CUB cannot report how much memory a sort needs: XLA's own sort takes its place.
    """
    if device.platform == "gpu" and is_described(device):
        return {"xla_gpu_deviceless_cub_mode": "DEVICELESS_CUB_DISABLED"}
    return {}


@contextlib.contextmanager
def compiler_warnings() -> Iterator[list[str]]:
    """Keep compiler output about devices that are not here from the terminal. The list gets the
    arrays that XLA gathers whole because it finds no other way between two shardings.

    A compiler may end the whole process. The end of its output is then printed after all.
    """
    found: list[str] = []
    sys.stderr.flush()
    with tempfile.TemporaryFile() as file, _told_if_it_ends(file.fileno()):
        terminal = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield found
        finally:
            sys.stderr.flush()
            os.dup2(terminal, 2)
            os.close(terminal)
            file.seek(0)
            found += _REMATERIALIZED.findall(file.read().decode(errors="replace"))


@contextlib.contextmanager
def _told_if_it_ends(file: int) -> Iterator[None]:
    """Prints the end of a file to stderr if this process ends meanwhile."""
    command = [sys.executable, "-I", "-S", "-c", _TELL, str(file), str(_TOLD_BYTES)]
    # In a session of its own: Ctrl-C is for this process.
    teller = subprocess.Popen(
        command, stdin=subprocess.PIPE, pass_fds=[file], start_new_session=True
    )
    assert teller.stdin is not None
    try:
        yield
    finally:
        teller.stdin.write(b".")
        teller.stdin.close()
        teller.wait()
