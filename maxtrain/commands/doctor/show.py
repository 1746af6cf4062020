"""Output of `maxtrain doctor`."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from maxtrain.commands.doctor.sums import possible, rates_of_groups
from maxtrain.parallel.hardware import memory_bandwidth, peak_from_table

# Devices that are shown; of more, the slowest.
_MOST = 64


def show(
    reports: Sequence[Mapping[str, Any]],
    problems: Sequence[str],
    notes: Sequence[str],
    console: Console,
) -> None:
    """Prints tables of hosts, buckets, devices and sums; what is worth a look; what is broken."""
    console.print(_table_of_hosts(reports))
    if reports[0]["bucket"]:
        console.print(_table_of_buckets(reports))
    console.print(_table_of_devices(reports))
    if reports[0]["sums"]:
        console.print(_table_of_sums(reports))
    versions = reports[0]["versions"]
    words = ", ".join(f"{name} {version}" for name, version in versions.items())
    console.print(Text(words, "dim"), soft_wrap=True)
    for note in notes:
        console.print(Text(note), soft_wrap=True)
    for problem in problems:
        console.print(Text(f"broken: {problem}", "red"), soft_wrap=True)
    if not problems:
        console.print(Text("Nothing is broken.", "green"))


def _new_table(left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _table_of_hosts(reports: Sequence[Mapping[str, Any]]) -> Table:
    table = _new_table(
        ("process", "host"), ("clock s", "free GB", "written MB/s", "data read MB/s")
    )
    for index, report in enumerate(reports):
        disk = report["disk"]
        read = [found.get("bytes_per_second") for found in report["data"]]
        slowest = min((rate for rate in read if rate is not None), default=None)
        table.add_row(
            str(index),
            Text(report["host"]),
            f"{report['clock']:+.3f}",
            _scaled(disk.get("free_bytes"), 1e9),
            _scaled(disk.get("bytes_per_second"), 1e6),
            _scaled(slowest, 1e6),
        )
    return table


def _table_of_buckets(reports: Sequence[Mapping[str, Any]]) -> Table:
    table = _new_table(("process", "bucket"), ("uploaded MB/s", "downloaded MB/s"))
    for index, report in enumerate(reports):
        found = report["bucket"]
        table.add_row(
            str(index),
            Text(found["url"]),
            _scaled(found.get("uploaded_bytes_per_second"), 1e6),
            _scaled(found.get("downloaded_bytes_per_second"), 1e6),
        )
    return table


def _table_of_devices(reports: Sequence[Mapping[str, Any]]) -> Table:
    table = _new_table(
        ("process", "id", "device"),
        ("bf16\nTFLOP/s", "of\npeak", "f32\nTFLOP/s", "memory\nGB", "GB/s", "of\npeak"),
    )
    rows = []
    for index, report in enumerate(reports):
        for device in report["devices"]:
            rows.append((index, device))
    if len(rows) > _MOST:
        table.title = f"the slowest {_MOST} of {len(rows):,} devices"
        rows = sorted(rows, key=lambda row: row[1]["bfloat16"])[:_MOST]
    for index, device in rows:
        rate = device["memory_bytes_per_second"]
        table.add_row(
            str(index),
            str(device["id"]),
            Text(device["kind"]),
            f"{device['bfloat16'] / 1e12:.3g}",
            _share(device["bfloat16"], peak_from_table(device["kind"])),
            f"{device['float32'] / 1e12:.3g}",
            _scaled(device["memory_bytes"], 1e9),
            f"{rate / 1e9:,.0f}",
            _share(rate, memory_bandwidth(device["kind"])),
        )
    return table


def _table_of_sums(reports: Sequence[Mapping[str, Any]]) -> Table:
    right = ("devices", "GB/s of each", "slowest group", "of the network")
    table = _new_table(("sums over",), right)
    kinds = {device["kind"] for report in reports for device in report["devices"]}
    for position, found in enumerate(reports[0]["sums"]):
        of_groups = rates_of_groups(reports, position).values()
        usual = statistics.median_high(of_groups)
        slowest = "-"
        if len(of_groups) > 1:
            slowest = f"{min(of_groups) / 1e9:.3g}"
        share = "-"
        if len(kinds) == 1:
            share = _share(usual, possible(found, *kinds))
        cells = [str(found["size"]), f"{usual / 1e9:.3g}", slowest, share]
        table.add_row(f"mesh.{found['axis']}", *cells)
    return table


def _share(value: float, whole: float | None) -> str:
    if not whole:
        return "-"
    return f"{value / whole:.0%}"


def _scaled(value: float | None, unit: float) -> str:
    if value is None:
        return "-"
    return f"{value / unit:,.1f}"
