"""The table of peaks, looked up by the names that devices give themselves."""

from unittest.mock import Mock

import jax
import pytest

from data_pipeline.errors import ConfigError
from maxtrain.parallel.hardware import measure_matmul, peak_flops


def device(kind, platform):
    return Mock(spec=jax.Device, device_kind=kind, platform=platform)


# Names as drivers and libtpu report them; TFLOP/s from the makers' data sheets, dense, bfloat16.
KINDS = [
    ("NVIDIA A100-SXM4-80GB", 312),
    ("NVIDIA A100-PCIE-40GB", 312),
    ("NVIDIA H100 80GB HBM3", 989.5),
    ("NVIDIA H100 PCIe", 756.5),
    ("NVIDIA H100 NVL", 835.5),
    ("NVIDIA H200", 989.5),
    ("NVIDIA GH200 480GB", 989.5),
    ("NVIDIA B200", 2250),
    ("NVIDIA GB200", 2500),
    ("TPU v4", 275),
    ("TPU v5 lite", 197),
    ("TPU v5e", 197),
    ("TPU v5", 459),
    ("TPU v5p", 459),
    ("TPU v6 lite", 918),
    ("TPU v6e", 918),
    ("TPU7x", 1153.5),
]


@pytest.mark.parametrize(("kind", "tflops"), KINDS)
def test_known_devices_have_their_makers_peak(kind, tflops):
    platform = "tpu" if kind.startswith("TPU") else "gpu"
    assert peak_flops(device(kind, platform), "bfloat16") == tflops * 1e12


@pytest.mark.parametrize("kind", ["NVIDIA GeForce RTX 4090", "TPU v2", "AMD Instinct MI300X"])
def test_an_unknown_accelerator_is_named_with_the_key_to_set(kind):
    with pytest.raises(
        ConfigError,
        match=rf"observe\.peak_tflops=null: no peak is known for '{kind}'\. Set it from the data",
    ):
        peak_flops(device(kind, "gpu"), "bfloat16")


def test_a_cpu_is_measured_and_shared_by_its_simulated_devices(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "maxtrain.parallel.hardware.measure_matmul", lambda dtype: asked.append(dtype) or 8e12
    )
    assert peak_flops(device("cpu", "cpu"), "bfloat16") == 8e12 / jax.local_device_count()
    assert asked == ["bfloat16"]


def test_the_measurement_is_a_rate_that_a_cpu_can_have():
    assert 1e9 < measure_matmul("float32", seconds=0.01) < 1e15
