"""The measurements themselves, on CPUs: right results pass, wrong ones are found, and two processes
are one job."""

import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import yaml

from maxtrain import ENDS
from maxtrain.commands.doctor import command, devices, host
from maxtrain.config.schema import MeshConfig
from maxtrain.parallel.mesh import make_mesh
from tests.support.commands import run

DOCTOR = "maxtrain launch local --processes 2 --job doctor -- --seconds 0.05 --json"


def test_each_device_multiplies_rightly_and_alike():
    found = [devices.measure(device, 0.01, 64, 1 << 16) for device in jax.devices()[:2]]
    assert [each["wrong"] for each in found] == [[], []]
    assert found[0]["digest"] == found[1]["digest"] and len(found[0]["digest"]) == 2
    assert all(each[dtype] > 0 for each in found for dtype in devices.DTYPES)
    assert all(each["memory_bytes_per_second"] > 0 for each in found)
    assert found[1]["id"] == jax.devices()[1].id and found[1]["memory_bytes"] > 0


def test_a_wrong_product_is_found(monkeypatch):
    """A fault is found in the compared rows, and in other rows by its digest."""
    right = devices._product

    def spoilt(row: int):
        return lambda a, b: right(a, b).at[row, 3].add(1.0)

    sound = devices.measure(jax.devices()[0], 0.01, 64, 1 << 16)
    monkeypatch.setattr(devices, "_product", spoilt(0))
    found = devices.measure(jax.devices()[0], 0.01, 64, 1 << 16)
    assert found["wrong"] == ["bfloat16 products", "float32 products"]
    monkeypatch.setattr(devices, "_product", spoilt(60))
    found = devices.measure(jax.devices()[0], 0.01, 64, 1 << 16)
    assert found["wrong"] == [] and found["digest"] != sound["digest"]


def test_memory_that_holds_something_else_is_found(monkeypatch):
    right = devices._plus_one
    monkeypatch.setattr(devices, "_plus_one", lambda numbers: right(numbers).at[1000].set(7))
    found = devices.measure(jax.devices()[1], 0.01, 64, 1 << 16)
    assert found["wrong"] == ["sums of one in its memory"]


def test_sums_over_each_axis_are_right_and_timed(monkeypatch):
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    found = devices.measure_sums(mesh, 0.01, 4096)
    assert [(each.axis, each.size) for each in found] == [("data", 2), ("fsdp", 2), ("tensor", 2)]
    assert all(each.bytes_per_second > 0 and each.near == 2 and each.wrong == [] for each in found)
    # A device that sums wrongly is named.
    real = jax.lax.psum

    def wrong(x, axis):
        is_fifth = jax.lax.axis_index(mesh.axis_names) == 5
        return real(x, axis) + is_fifth.astype(x.dtype)

    monkeypatch.setattr(jax.lax, "psum", wrong)
    found = devices.measure_sums(mesh, 0.01, 4096)
    numbers = [device.id for device in mesh.devices.flat]
    assert [each.wrong for each in found] == [[numbers[5]]] * 3


@pytest.mark.parametrize(
    ("sizes", "axis", "near", "groups"),
    [
        # Devices 0 and 6, 1 and 7, and so on: hosts 0 and 1, and 1 and 2.
        ((2, 6), 0, 1, [0, 0, 0]),
        # Devices 3, 4 and 5 are of hosts 0 and 1.
        ((4, 3), 1, 1, [0, 0, 0]),
        ((6, 2), 1, 2, [0, 1, 2]),
    ],
)
def test_a_group_has_all_processes_that_sum_through_others(monkeypatch, sizes, axis, near, groups):
    """Three hosts of four devices each, in several meshes."""
    of_hosts = [SimpleNamespace(platform="cpu", process_index=index // 4) for index in range(12)]
    placed = np.array(of_hosts, dtype=object).reshape(sizes)
    for process, group in enumerate(groups):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        assert devices._near_and_group(placed, axis) == (near, group)


def test_clocks_are_compared_by_the_median_of_several_looks():
    """A look that came late does not count."""
    ours = [10.0, 20.0, 30.0, 40.0, 50.0]
    theirs = [11.5, 21.5, 39.0, 41.5, 51.5]
    np.testing.assert_allclose(devices.offsets([ours, theirs]), [0.0, 1.5])


def test_a_disk_that_can_not_be_written_is_told(tmp_path, monkeypatch):
    found = host.disk(tmp_path / "not" / "yet", 4)
    assert found["folder"] == str(tmp_path) and found["bytes_per_second"] > 0
    assert list(tmp_path.iterdir()) == []

    def full(number: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    assert host.disk(tmp_path, 4)["error"] == f"{tmp_path}: No space left on device"


def test_the_driver_is_read_as_it_writes_itself(tmp_path):
    file = tmp_path / "proc/driver/nvidia/version"
    file.parent.mkdir(parents=True)
    file.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n"
    )
    assert host.versions(tmp_path)["driver"] == "580.95.05"
    assert "jax" in host.versions(tmp_path)


@pytest.mark.long
@pytest.mark.every_dose
def test_one_host_is_examined_and_what_is_broken_ends_it_with_70(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(devices, "_SIZE", {"cpu": 64})
    monkeypatch.setattr(host, "disk", lambda folder: real(folder, 4))
    values = {
        "output_dir": str(tmp_path / "runs"),
        "data": {"sources": {"a": {"path": str(tmp_path / "no")}}},
        "mesh": {"fsdp": 4, "tensor": 2},
        "observe": {"compilation_cache": None},
    }
    (tmp_path / "it.yaml").write_text(yaml.safe_dump(values))
    words = ["--seconds", "0.01", f"config={tmp_path / 'it.yaml'}"]
    ends = tmp_path / "ends"
    ends.mkdir()
    monkeypatch.setenv(ENDS, str(ends))
    assert command.main([*words, "--json"], "maxtrain doctor") == 70
    assert [file.read_text() for file in ends.iterdir()] == ["70\n"]
    out, err = capsys.readouterr()
    found = json.loads(out)
    (problem,) = found["problems"]
    assert "can't read data.sources.a.path" in problem
    assert "one thing is broken. See what process 0 has printed" in err
    (report,) = found["processes"]
    assert len(report["devices"]) == 8
    assert [each["axis"] for each in report["sums"]] == ["fsdp", "tensor"]
    assert command.main([*words[:2]], "maxtrain doctor") == 0
    assert "Nothing is broken." in capsys.readouterr().out


real = host.disk


def test_what_hangs_is_told_and_ended(monkeypatch, capsys):
    """The process is ended from another thread."""
    ended = threading.Event()
    codes = []

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    monkeypatch.setattr(os, "_exit", end)
    with command._patience(0.1) as doing:
        doing("multiplying on device 3")
        assert ended.wait(60)
    assert codes == [75]
    assert "hangs for 0.1 s (--patience), in: multiplying on device 3." in capsys.readouterr().err
    assert command.main(["--patience", "nan"], "maxtrain doctor") == 64


@pytest.mark.long
@pytest.mark.processes
def test_two_processes_are_examined_as_one_job(tmp_path):
    """Started by the launcher, as the documents have it."""
    said = run(DOCTOR, tmp_path)
    lines = said.stdout.splitlines()
    text = "\n".join(line.removeprefix("[0] ") for line in lines if line.startswith("[0] "))
    # Before that, the runtime of CPUs says whom it is connected to.
    found = json.loads(text[text.index("{") :])
    assert found["problems"] == []
    first, second = found["processes"]
    assert abs(first["clock"] - second["clock"]) < 1.0
    assert first["devices"][0]["digest"] == second["devices"][0]["digest"]
    (sums,) = first["sums"]
    assert sums["size"] == 2 and (sums["near"], sums["group"]) == (1, 0) and sums["wrong"] == []
    assert list(Path(tmp_path).glob(".doctor-*")) == []
