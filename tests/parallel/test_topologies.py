"""Names of devices that are not here, and what their compilers print."""

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from data_pipeline.base.errors import UsageError
from maxtrain.parallel.libtpu import answer_libtpu
from maxtrain.parallel.topologies import (
    GPUS,
    GpuHosts,
    compile_options,
    compiler_warnings,
    described_devices,
    gpu_memory,
    parse_gpus,
)


@pytest.fixture(autouse=True)
def cache() -> Iterator[None]:
    """Turn the cache of compiled programs on again, which describing devices turns off."""
    yield
    jax.config.update("jax_enable_compilation_cache", True)


def test_hosts_and_gpus_are_read():
    assert parse_gpus("h100", "8") == GpuHosts("h100", 1, 8)
    assert parse_gpus("h200", "2x8") == GpuHosts("h200", 2, 8)
    assert parse_gpus("b200", "32x4") == GpuHosts("b200", 32, 4)


@pytest.mark.parametrize(
    ("topology", "advice"),
    [
        ("h100:", r"number of GPUs, or hosts x GPUs of each\. Write h100:8 or h100:2x8"),
        ("h100:2x2x2", r"hosts x GPUs of each"),
        ("h100:0", r"at least one GPU\. Write h100:1"),
        ("h200:0x8", r"at least one GPU"),
        ("h100:64", r"at most 8 GPUs\. Write h100:8x8"),
        ("b200:2x12", r"at most 8 GPUs\. Write b200:2x8"),
        ("a100:8", r"there is no such\. Write v5e:16x16"),
        ("h100", r"number of GPUs"),
        ("v5p", r"there is no such"),
        ("v5p:4x", r"there is no such"),
        ("v5p:4x4x4:0", r"there is no such"),
        ("v5p:4x4x4:", r"there is no such.*v5p:4x4x4:2 \(two slices\)"),
        ("", r"there is no such"),
    ],
)
def test_another_name_is_refused_with_what_to_write(topology, advice):
    with pytest.raises(UsageError, match=advice):
        described_devices(topology)


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs maxtrain[tpu]")
def test_slices_have_numbers_and_a_network_that_is_known():
    devices = described_devices("v5e:2x2:2")
    assert [device.slice_index for device in devices] == [0] * 4 + [1] * 4
    message = (
        r"v4:2x2x1:2: how fast slices of TPU v4 reach each other is not known\. Write v4:2x2x1"
    )
    with pytest.raises(UsageError, match=message):
        described_devices("v4:2x2x1:2")


def test_programs_may_use_three_quarters_of_a_described_gpu():
    found = [
        gpu_memory(kind)
        for kind in ("NVIDIA H100 80GB HBM3", "NVIDIA H200 141GB HBM3e", "NVIDIA B200")
    ]
    assert found == [63707234304, 113548197888, 143635808256]
    assert gpu_memory("NVIDIA A100-SXM4-80GB") is None
    assert len(GPUS) == 3


@pytest.mark.long
@pytest.mark.every_dose
@pytest.mark.parametrize(
    ("end", "code", "told"),
    [
        ("os.abort()", -signal.SIGABRT, "no room\n"),
        ("os._exit(3)", 3, "no room\n"),
        ("pass", 0, ""),
    ],
)
def test_what_a_compiler_printed_is_told_if_it_ends_the_process(end, code, told):
    lines = [
        "import os",
        "from maxtrain.parallel.topologies import compiler_warnings",
        "with compiler_warnings():",
        "    os.write(2, b'no room\\n')",
        f"    {end}",
    ]
    ended = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (code, told)


@pytest.mark.long
@pytest.mark.every_dose
@pytest.mark.parametrize("topology", ["cpu", "v5e:2x4", "v5p:2x2x2", "h100:8"])
def test_an_array_that_is_gathered_whole_is_told_of_every_compiler(topology):
    """There is no other way from a third dim that is split to the first two, but there is one to
    the first alone."""
    devices = jax.devices()
    if topology.startswith("h100"):
        pytest.importorskip("jax_plugins.xla_cuda13")
    elif topology != "cpu":
        pytest.importorskip("libtpu")
    if topology != "cpu":
        devices = described_devices(topology)
    if len(devices) < 8:
        pytest.skip("needs eight devices")
    mesh = Mesh(np.array(devices[:8]).reshape(2, 2, 2), ("e", "f", "g"))
    whole = NamedSharding(mesh, PartitionSpec())

    def told(*parts: PartitionSpec) -> list[str]:
        first, last = (NamedSharding(mesh, part) for part in parts)

        def program(x):
            x = jnp.sin(jax.lax.with_sharding_constraint(x, first))
            return jnp.sum(jnp.cos(jax.lax.with_sharding_constraint(x, last)))

        x = jax.ShapeDtypeStruct((4, 16, 2, 16), jnp.float32, sharding=whole)
        with compiler_warnings() as said:
            jax.jit(program).lower(x).compile(compiler_options=compile_options(devices[0]))
        return said

    third = PartitionSpec(None, None, "e", None)
    both = PartitionSpec("e", "f", None, None)
    (warning,) = told(third, both)
    assert warning.startswith("Involuntary full rematerialization") and "{'e'}, {'f'}" in warning
    assert told(both, PartitionSpec("e")) == []


@pytest.mark.parametrize("level", ["2", "3"])
def test_a_level_that_keeps_warnings_back_is_refused(monkeypatch, level):
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", level)
    with pytest.raises(UsageError, match=rf"TF_CPP_MIN_LOG_LEVEL={level} keeps back .* Unset it"):
        described_devices("h100:8")


def test_libtpu_tells_its_warnings_whatever_the_environment_says(monkeypatch):
    environment = {"TPU_MIN_LOG_LEVEL": "3", "TPU_ACCELERATOR_TYPE": "v4-8"}
    monkeypatch.setattr(os, "environ", environment)
    answer_libtpu()
    assert environment["TPU_MIN_LOG_LEVEL"] == environment["TPU_STDERR_LOG_LEVEL"] == "1"
    assert environment["TPU_ACCELERATOR_TYPE"] == "v4-8"
