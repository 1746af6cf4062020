"""Verdict of `maxtrain doctor`: what is broken, and what deserves attention, from the reports of
all processes. Pure functions.
"""

import collections
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from maxtrain.commands.doctor.devices import DTYPES
from maxtrain.commands.doctor.sums import possible, rates_of_groups
from maxtrain.parallel.agreement import differences
from maxtrain.parallel.hardware import memory_bandwidth, peak_from_table

# A device is an outlier if it has less than these shares of what is usual for its kind.
_LEAST_SPEED = 0.8
_LEAST_MEMORY = 0.9
# Less of what the maker says is too little, whatever others have.
_LEAST_OF_PEAK = 0.4
# Of what the maker says of memory, which a kernel that reads and writes comes near.
_LEAST_OF_BANDWIDTH = 0.5
# Of the speed of all links of a device in one direction. An axis of a mesh may use the links of one
# dimension of a TPU's torus, a sixth of them where it does not close.
_LEAST_OF_LINKS = {"gpu": 0.4, "tpu": 0.1}
# Groups of hosts that sum over the same axis are outliers below this share of what is usual.
_LEAST_OF_SUMS = 0.7
# Number of processes of a group that are named.
_MOST_NAMED = 16
# By platform, within a host or slice and between them.
_LOOK_AT_LINKS = {
    "gpu": "Look at the links (nvidia-smi topo -m, nvidia-smi nvlink -s)",
    "tpu": "Look at maintenance of the slice, or get another one",
}
_LOOK_AT_NETWORK = {
    "gpu": "Look at the network between hosts (NCCL_DEBUG=INFO), and at what else uses it",
    "tpu": "Look at the network between slices, and at what else uses it",
}
_MOST_CLOCK_SECONDS = 1.0
_LEAST_FREE_BYTES = 1 << 30
# A host is worth a look if it writes at less than this share of what is usual.
_LEAST_WRITING = 0.2
# Bytes per second: what most hosts reach at a bucket is worth a look below.
_LEAST_OF_BUCKET = 1e7

_Report = Mapping[str, Any]


def problems(reports: Sequence[_Report]) -> list[str]:
    """Return what is broken, a sentence each, with the process, host and device that it is about.

    Args:
        reports: of each process, in their order: `host`, `versions`, `clock` (seconds ahead of
            process 0), `disk` and `data` as `host.py` says, `bucket` as `bucket.py` says (None:
            runs are on a disk), `devices` as `devices.measure` says, and `sums`, `AllReduceCheck`
            as mappings.
    """
    return [
        *_unlike_versions(reports),
        *_unlike_devices(reports),
        *_wrong_results(reports),
        *_slow_devices(reports),
        *_slow_memory(reports),
        *_small_devices(reports),
        *_clocks(reports),
        *_disks(reports),
        *_buckets(reports),
        *_sums(reports),
    ]


def notes(reports: Sequence[_Report]) -> list[str]:
    """Return what is worth a look, and may be as it should."""
    written = [report["disk"].get("bytes_per_second") for report in reports]
    found = [*_slower(reports, written, "writes"), *_slow_buckets(reports)]
    found += _slow_sums(reports, is_near=False)
    kinds = sorted({device["kind"] for _, device in _devices(reports)})
    for kind in kinds:
        if peak_from_table(kind) is None and not _is_cpu(reports, kind):
            found.append(f"No peak is known for {kind!r}: its speed is compared with others only.")
    if reports[0]["sums"] and len(kinds) > 1:
        found.append("Devices are of several kinds: how fast they sum is not judged.")
    if any(device["platform"] == "cpu" for _, device in _devices(reports)):
        found.append("CPU devices share their cores: their speeds are not judged.")
    return found


def _slower(reports: Sequence[_Report], rates: Sequence[float | None], verb: str) -> Iterator[str]:
    """Yield hosts with a far lower rate than others, from the bytes per second of each process
    (None: not known).
    """
    known = [rate for rate in rates if rate]
    for index, rate in enumerate(rates):
        if rate and rate < _LEAST_WRITING * statistics.median(known):
            usual = statistics.median(known) / 1e6
            speeds = f"{rate / 1e6:,.0f} MB/s, and {usual:,.0f} are usual"
            yield f"{_who(reports, index)} {verb} {speeds}."


def _slow_buckets(reports: Sequence[_Report]) -> Iterator[str]:
    if reports[0]["bucket"] is None:
        return
    for verb, key in (
        ("uploads", "uploaded_bytes_per_second"),
        ("downloads", "downloaded_bytes_per_second"),
    ):
        rates = [report["bucket"].get(key) for report in reports]
        known = [rate for rate in rates if rate]
        if known and statistics.median(known) < _LEAST_OF_BUCKET:
            url = reports[0]["bucket"]["url"]
            rate = statistics.median(known)
            minutes = 1e10 / rate / 60
            yield (
                f"A host {verb} {rate / 1e6:,.1f} MB/s at {url}: 10 GB of a checkpoint would take "
                f"{minutes:,.0f} minutes. Look at its network, and at the region of the bucket."
            )
        yield from _slower(reports, rates, verb)


def _who(reports: Sequence[_Report], index: int) -> str:
    return f"process {index} on {reports[index]['host']}"


def _devices(reports: Sequence[_Report]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Every device, with the process that it is of."""
    for index, report in enumerate(reports):
        for device in report["devices"]:
            yield index, device


def _is_cpu(reports: Sequence[_Report], kind: str) -> bool:
    found = {device["platform"] for _, device in _devices(reports) if device["kind"] == kind}
    return found == {"cpu"}


def _accelerators(
    reports: Sequence[_Report],
) -> Iterator[tuple[str, list[tuple[int, Mapping[str, Any]]]]]:
    """Kinds of devices that share no cores with others, and those of each, as of `_devices`."""
    for kind in sorted({device["kind"] for _, device in _devices(reports)}):
        if not _is_cpu(reports, kind):
            alike = [found for found in _devices(reports) if found[1]["kind"] == kind]
            yield kind, alike


def _unlike_versions(reports: Sequence[_Report]) -> Iterator[str]:
    said = {i: (report["host"], report["versions"]) for i, report in enumerate(reports)}
    for line in differences(said):
        yield f"{line}. Install the same versions everywhere."


def _unlike_devices(reports: Sequence[_Report]) -> Iterator[str]:
    said = {}
    for index, report in enumerate(reports):
        kinds = collections.Counter(device["kind"] for device in report["devices"])
        words = " and ".join(f"{count} x {kind}" for kind, count in sorted(kinds.items()))
        said[index] = (report["host"], {"devices": words})
    for line in differences(said):
        yield f"{line}. Leave that host out, or look at what it has lost."


def _wrong_results(reports: Sequence[_Report]) -> Iterator[str]:
    fix = "Take it out of service"
    digests = collections.defaultdict(collections.Counter)
    for _, device in _devices(reports):
        digests[device["kind"]][tuple(device["digest"])] += 1
    for index, device in _devices(reports):
        who = f"{_who(reports, index)}: device {device['id']}"
        for what in device["wrong"]:
            yield f"{who} has computed wrongly: {what}. {fix}."
        (usual, count), *_ = digests[device["kind"]].most_common(1)
        if tuple(device["digest"]) != usual and count > 1:
            yield f"{who} has other products than {count} devices of its kind. {fix}."


def _slow_devices(reports: Sequence[_Report]) -> Iterator[str]:
    """Yield accelerators that are slower than others of their kind; CPU devices share the cores of
    their host.
    """
    for kind, alike in _accelerators(reports):
        for dtype in DTYPES:
            usual = statistics.median(device[dtype] for _, device in alike)
            for index, device in alike:
                if device[dtype] < _LEAST_SPEED * usual:
                    speeds = f"{device[dtype] / 1e12:.1f} TFLOP/s, and {usual / 1e12:.1f} are usual"
                    who = f"{_who(reports, index)}: device {device['id']} ({kind})"
                    yield f"{who} multiplies {dtype} at {speeds}. Look at its clock and heat."
        peak = peak_from_table(kind)
        usual = statistics.median(device["bfloat16"] for _, device in alike)
        if peak and usual < _LEAST_OF_PEAK * peak:
            speeds = f"{usual / 1e12:.1f} TFLOP/s of {peak / 1e12:.1f}"
            yield f"All {kind} multiply bfloat16 at {speeds}. Look at drivers, limits and heat."


def _slow_memory(reports: Sequence[_Report]) -> Iterator[str]:
    key = "memory_bytes_per_second"
    for kind, alike in _accelerators(reports):
        usual = statistics.median(device[key] for _, device in alike)
        for index, device in alike:
            if device[key] < _LEAST_SPEED * usual:
                rates = f"{device[key] / 1e9:,.0f} GB/s, and {usual / 1e9:,.0f} are usual"
                who = f"{_who(reports, index)}: device {device['id']} ({kind})"
                yield f"{who} reads and writes its memory at {rates}. Look at its clock and heat."
        known = memory_bandwidth(kind)
        if known and usual < _LEAST_OF_BANDWIDTH * known:
            rates = f"{usual / 1e9:,.0f} GB/s of {known / 1e9:,.0f}"
            yield f"All {kind} read and write their memory at {rates}. Look at drivers and heat."


def _small_devices(reports: Sequence[_Report]) -> Iterator[str]:
    for _, alike in _accelerators(reports):
        usual = statistics.median(device["memory_bytes"] for _, device in alike)
        for index, device in alike:
            if device["memory_bytes"] < _LEAST_MEMORY * usual:
                there = f"{device['memory_bytes'] / 1e9:.1f} GB, and {usual / 1e9:.1f} are usual"
                who = f"{_who(reports, index)}: device {device['id']}"
                yield f"{who} has memory of {there}. End what else uses it."


def _clocks(reports: Sequence[_Report]) -> Iterator[str]:
    usual = statistics.median(report["clock"] for report in reports)
    for index, report in enumerate(reports):
        ahead = report["clock"] - usual
        if abs(ahead) > _MOST_CLOCK_SECONDS:
            word = "ahead of"
            if ahead < 0:
                word = "behind"
            who = _who(reports, index)
            yield f"{who}: its clock is {abs(ahead):.1f} s {word} the others. Start its NTP."


def _disks(reports: Sequence[_Report]) -> Iterator[str]:
    for index, report in enumerate(reports):
        who = _who(reports, index)
        disk = report["disk"]
        if "error" in disk:
            key = "output_dir"
            if report["bucket"] is not None:
                key = "local_dir"
            fix = "Give it write access, or name another folder"
            yield f"{who} can't write to {key}: {disk['error']}. {fix}."
        elif disk["free_bytes"] < _LEAST_FREE_BYTES:
            free = f"{disk['free_bytes'] / 1e9:.2f} GB free"
            yield f"{who} has {free} in {disk['folder']}, less than 1 GiB. Free space there."
        for found in report["data"]:
            if "error" in found:
                yield f"{who} can't read {found['key']}: {found['error']}"


def _buckets(reports: Sequence[_Report]) -> Iterator[str]:
    for index, report in enumerate(reports):
        found = report["bucket"]
        if found is not None and "error" in found:
            yield f"{_who(reports, index)} can't keep a run in {found['url']}: {found['error']}"


def _sums(reports: Sequence[_Report]) -> Iterator[str]:
    for index, report in enumerate(reports):
        for found in report["sums"]:
            for number in found["wrong"]:
                what = f"a wrong sum over mesh.{found['axis']}"
                yield f"{_who(reports, index)}: device {number} has {what}. Take it out of service."
    yield from _slow_sums(reports, is_near=True)


def _slow_sums(reports: Sequence[_Report], is_near: bool) -> Iterator[str]:
    """Yield groups of accelerator hosts that sum more slowly than others, or all together more
    slowly than their network allows. Either within hosts of GPUs or slices of TPUs, or between
    them.
    """
    kinds = {(device["kind"], device["platform"]) for _, device in _devices(reports)}
    if len(kinds) != 1:
        return
    ((kind, platform),) = kinds
    if platform not in _LEAST_OF_LINKS:
        return
    fix = _LOOK_AT_NETWORK[platform]
    if is_near:
        fix = _LOOK_AT_LINKS[platform]
    for position, found in enumerate(reports[0]["sums"]):
        if (found["near"] == found["size"]) != is_near:
            continue
        what = f"over mesh.{found['axis']}, between {found['size']} devices"
        of_groups = rates_of_groups(reports, position)
        # Of two groups, the faster one.
        usual = statistics.median_high(of_groups.values())
        for indices, rate in of_groups.items():
            if rate < _LEAST_OF_SUMS * usual:
                speeds = f"{rate / 1e9:.1f} GB/s, and {usual / 1e9:.1f} are usual"
                yield f"{_all_who(reports, indices)}: sums {what}, move {speeds}. {fix}."
        most = possible(found, kind)
        if most and usual < _LEAST_OF_LINKS[platform] * most:
            speeds = f"{usual / 1e9:.1f} GB/s of {most / 1e9:.0f}"
            yield f"Sums {what}, move {speeds}. {fix}."


def _all_who(reports: Sequence[_Report], indices: Sequence[int]) -> str:
    """The processes of a group, with their hosts."""
    if len(indices) == 1:
        return _who(reports, indices[0])
    numbers = ", ".join(map(str, indices[:_MOST_NAMED]))
    hosts = ", ".join(reports[index]["host"] for index in indices[:_MOST_NAMED])
    more = ""
    if len(indices) > _MOST_NAMED:
        more = f" and {len(indices) - _MOST_NAMED:,} more"
    return f"processes {numbers} on {hosts}{more}"
