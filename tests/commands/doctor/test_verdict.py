"""The verdict names one of many hosts and devices, given synthetic reports."""

import io
import re

import pytest
from rich.console import Console

from maxtrain.commands.doctor.show import show
from maxtrain.commands.doctor.verdict import notes, problems

H100 = "NVIDIA H100 80GB HBM3"


def device(number: int, **changes) -> dict:
    found = {
        "id": number,
        "kind": H100,
        "platform": "gpu",
        "memory_bytes": 64_000_000_000,
        "bfloat16": 7e14,
        "float32": 5e13,
        "memory_bytes_per_second": 3e12,
        "wrong": [],
        "digest": [1, 2],
    }
    return found | changes


def report(index: int, **changes) -> dict:
    """A sound host with two devices."""
    sums = {
        "axis": "fsdp",
        "size": 2,
        "bytes_per_second": 3.6e11,
        "near": 2,
        "group": index,
        "wrong": [],
    }
    found = {
        "host": f"h{index}",
        "clock": 0.001 * index,
        "versions": {"jax": "1"},
        "disk": {"folder": "/runs", "free_bytes": 10**12, "bytes_per_second": 1e9},
        "bucket": {
            "url": "s3://b/runs",
            "uploaded_bytes_per_second": 4e8,
            "downloaded_bytes_per_second": 8e8,
        },
        "data": [{"key": "data.sources.a.path", "path": "/d", "bytes_per_second": 1e9}],
        "devices": [device(2 * index), device(2 * index + 1)],
        "sums": [sums],
    }
    return found | changes


def hosts() -> list[dict]:
    return [report(index) for index in range(4)]


def test_nothing_is_said_of_sound_hosts():
    assert problems(hosts()) == [] and notes(hosts()) == []


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("devices", 1, "bfloat16"), 5e14, "device 5 (NVIDIA H100 80GB HBM3) multiplies bfloat16"),
        (("devices", 1, "float32"), 3e13, "device 5 (NVIDIA H100 80GB HBM3) multiplies float32"),
        (
            ("devices", 1, "memory_bytes_per_second"),
            2.3e12,
            "reads and writes its memory at 2,300 GB/s, and 3,000 are usual",
        ),
        (("devices", 0, "memory_bytes"), 10**10, "device 4 has memory of 10.0 GB, and 64.0 are"),
        (("devices", 0, "wrong"), ["float32 products"], "device 4 has computed wrongly: float32"),
        (("devices", 0, "digest"), [1, 3], "device 4 has other products than 7 devices"),
        (("devices",), [device(4)], "devices is 1 x NVIDIA H100 80GB HBM3, but 2 x"),
        (("versions", "jax"), "2", "jax is 2, but 1 elsewhere. Install"),
        (("clock",), -3.0, "its clock is 3.0 s behind the others. Start its NTP"),
        (("disk",), {"folder": "/", "error": "/: Read-only"}, "can't write to local_dir: /: Read"),
        (("bucket", "error"), "s3://b: no.", "can't keep a run in s3://b/runs: s3://b: no."),
        (("disk", "free_bytes"), 10**8, "has 0.10 GB free in /runs"),
        (("data", 0, "error"), "/d: is not there.", "can't read data.sources.a.path: /d: is not"),
        (("sums", 0, "wrong"), [5], "device 5 has a wrong sum over mesh.fsdp. Take it out"),
        (
            ("sums", 0, "bytes_per_second"),
            2e11,
            "sums over mesh.fsdp, between 2 devices, move 200.0 GB/s, and 360.0 are usual. Look",
        ),
    ],
)
def test_the_host_and_the_device_are_named(place, value, said):
    reports = hosts()
    *above, last = place
    found = reports[2]
    for key in above:
        found = found[key]
    found[last] = value
    (problem,) = problems(reports)
    assert problem.startswith("process 2 on h2") and said in problem


def test_what_is_slow_everywhere_is_held_against_the_data_sheet():
    reports = hosts()
    for found in reports:
        for each in found["devices"]:
            each["bfloat16"] = 3e14
            each["memory_bytes_per_second"] = 1.5e12
        found["sums"][0]["bytes_per_second"] = 1e11
    slow, memory, sums = problems(reports)
    assert slow == (
        f"All {H100} multiply bfloat16 at 300.0 TFLOP/s of 989.5. Look at drivers, limits and heat."
    )
    assert memory == (
        f"All {H100} read and write their memory at 1,500 GB/s of 3,350. Look at drivers and heat."
    )
    assert "Sums over mesh.fsdp, between 2 devices, move 100.0 GB/s of 450. Look at" in sums


def between_hosts(rates: list[float], **changes) -> list[dict]:
    """Hosts of which each two sum with each other, at these rates."""
    reports = hosts()
    for index, (found, rate) in enumerate(zip(reports, rates, strict=True)):
        apart = {"size": 4, "near": 2, "group": index // 2 * 2, "bytes_per_second": rate}
        found["sums"][0] |= apart | changes
    return reports


def test_sums_between_hosts_are_worth_a_look():
    """Two devices of each host send to the other host at once."""
    assert notes(between_hosts([9e10] * 4)) == []
    reports = between_hosts([3e10] * 4)
    assert notes(reports) == [
        "Sums over mesh.fsdp, between 4 devices, move 30.0 GB/s of 100. Look at the network "
        "between hosts (NCCL_DEBUG=INFO), and at what else uses it."
    ]
    assert problems(reports) == []
    # One of a group that came late does not make the group slow.
    assert notes(between_hosts([9e10, 2e10, 9e10, 9e10])) == []
    (slow,) = notes(between_hosts([9e10, 9e10, 2e10, 3e10]))
    assert slow.startswith(
        "processes 2, 3 on h2, h3: sums over mesh.fsdp, between 4 devices, move 30.0 GB/s, and "
        "90.0 are usual. Look at the network"
    )


def test_all_of_a_group_are_named_wherever_they_are():
    reports = [report(index) for index in range(40)]
    for index, found in enumerate(reports):
        apart = {"size": 20, "near": 1, "group": index % 2, "bytes_per_second": 4e10}
        found["sums"][0] |= apart
        if index % 2:
            found["sums"][0]["bytes_per_second"] = 1e10
    (slow,) = notes(reports)
    numbers = ", ".join(str(index) for index in range(1, 33, 2))
    assert slow.startswith(f"processes {numbers} on h1, h3, ") and " h31 and 4 more: sums" in slow


def test_of_two_hosts_the_faster_one_is_usual():
    reports = hosts()[:2]
    reports[1]["sums"][0]["bytes_per_second"] = 2e11
    (slow,) = problems(reports)
    assert slow.startswith("process 1 on h1: sums") and "and 360.0 are usual" in slow
    # Two of four that are slow do not make all of them slow.
    reports = hosts()
    for found in reports[2:]:
        found["sums"][0]["bytes_per_second"] = 1e10
    assert [line[:15] for line in problems(reports)] == ["process 2 on h2", "process 3 on h3"]


def test_sums_of_devices_of_several_kinds_are_not_judged():
    reports = hosts()
    reports[0]["sums"][0]["bytes_per_second"] = 1e9
    for each in reports[3]["devices"]:
        each["kind"] = "NVIDIA H200"
    assert "Devices are of several kinds: how fast they sum is not judged." in notes(reports)
    assert not any("sums" in problem for problem in problems(reports))
    console = Console(record=True, width=200, file=io.StringIO())
    show(reports, [], [], console)
    assert re.search(r"mesh.fsdp +2 +360 +1 +-", console.export_text())


def test_sums_between_slices_whose_network_is_not_known_are_held_against_others_alone():
    reports = between_hosts([1e6] * 4)
    for found in reports:
        for each in found["devices"]:
            each |= {"kind": "TPU7x", "platform": "tpu", "bfloat16": 2e15}
    assert notes(reports) == []
    reports[3]["sums"][0]["bytes_per_second"] = 1e7
    (slow,) = notes(reports)
    assert slow.startswith("processes 0, 1 on h0, h1: sums") and "between slices" in slow


def test_cpus_are_compared_by_their_results_alone():
    reports = hosts()
    for index, found in enumerate(reports):
        for each in found["devices"]:
            each |= {"kind": "cpu", "platform": "cpu", "bfloat16": 1e9 * (index + 1)}
    assert problems(reports) == []
    assert notes(reports) == ["CPU devices share their cores: their speeds are not judged."]
    reports[1]["devices"][0]["digest"] = [0, 0]
    (problem,) = problems(reports)
    assert "process 1 on h1: device 2 has other products" in problem


def test_a_host_that_writes_slowly_is_worth_a_look():
    reports = hosts()
    reports[3]["disk"]["bytes_per_second"] = 1e8
    assert notes(reports) == ["process 3 on h3 writes 100 MB/s, and 1,000 are usual."]
    assert problems(reports) == []


def test_a_bucket_that_is_slow_for_one_host_or_for_all_is_worth_a_look():
    reports = hosts()
    reports[1]["bucket"]["downloaded_bytes_per_second"] = 2e7
    assert notes(reports) == ["process 1 on h1 downloads 20 MB/s, and 800 are usual."]
    for found in reports:
        found["bucket"]["uploaded_bytes_per_second"] = 4e6
    assert notes(reports)[0] == (
        "A host uploads 4.0 MB/s at s3://b/runs: 10 GB of a checkpoint would take 42 minutes. "
        "Look at its network, and at the region of the bucket."
    )
    assert len(notes(reports)) == 2 and problems(reports) == []


def test_runs_on_a_disk_have_no_bucket():
    reports = [report(index, bucket=None) for index in range(2)]
    reports[1]["disk"] = {"folder": "/", "error": "/: Read-only"}
    (problem,) = problems(reports)
    assert "can't write to output_dir: /: Read-only. Give it" in problem and notes(reports) == []
    console = Console(record=True, width=200, file=io.StringIO())
    show(reports, [], [], console)
    assert "bucket" not in console.export_text()


def test_tables_have_every_host_and_the_slowest_devices():
    reports = [report(index) for index in range(40)]
    reports[7]["devices"][1]["bfloat16"] = 1e12
    console = Console(record=True, width=200, file=io.StringIO())
    show(reports, problems(reports), notes(reports), console)
    text = console.export_text()
    assert "the slowest 64 of 80 devices" in text
    assert "broken: process 7 on h7: device 15" in text
    assert "Nothing is broken" not in text and " h39 " in text
    assert re.search(r"slowest group +of the network\n *mesh.fsdp +2 +360 +360 +80%", text), text
    assert "uploaded MB/s" in text and "s3://b/runs          400.0            800.0" in text
