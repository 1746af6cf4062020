"""Slices of TPUs on Google Kubernetes Engine: what a topology is made of.

Source: https://docs.cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus
"""

import math
import re
from typing import NamedTuple

from data_pipeline.base.errors import UsageError


class Tpu(NamedTuple):
    """A kind of TPU."""

    # The value of the node label cloud.google.com/gke-tpu-accelerator.
    accelerator: str
    # Numbers in a topology: a torus of two or three dimensions.
    dims: int
    # Topologies of one host, and the chips of that host; hosts of all others have 4 chips.
    single_hosts: tuple[str, ...]
    # What jax counts as devices.
    devices_per_chip: int = 1


TPUS = {
    "v4": Tpu("tpu-v4-podslice", 3, ("2x2x1",)),
    "v5e": Tpu("tpu-v5-lite-podslice", 2, ("1x1", "2x2", "2x4")),
    "v5p": Tpu("tpu-v5p-slice", 3, ("2x2x1",)),
    "v6e": Tpu("tpu-v6e-slice", 2, ("1x1", "2x2", "2x4")),
    "7x": Tpu("tpu7x", 3, ("1x1x1", "2x2x1"), devices_per_chip=2),
}
_CHIPS_OF_MANY_HOSTS = 4


class Slice(NamedTuple):
    """A slice: chips with a network of their own."""

    accelerator: str
    topology: str
    hosts: int
    chips_per_host: int
    devices_per_host: int


def make_slice(kind: str, topology: str, chips_per_host: int | None = None) -> Slice:
    """The hosts and chips of a topology.

    Args:
        kind: a key of `TPUS`.
        topology: such as 4x4, or 4x4x8.
        chips_per_host: of the machines of the node pool; None: as most node pools have it.

    Raises:
        UsageError: there is no such topology, or its chips can't be dealt out so.
    """
    tpu = TPUS[kind]
    example = "x".join(["4"] * tpu.dims)
    if not re.fullmatch(r"[1-9]\d{0,3}(x[1-9]\d{0,3})*", topology) or (
        topology.count("x") + 1 != tpu.dims
    ):
        rule = f"must be {tpu.dims} numbers with x between them, the chips along each dimension"
        raise UsageError(
            f"--topology {topology!r} of a {kind} {rule}. Write for example --topology {example}."
        )
    chips = math.prod(int(part) for part in topology.split("x"))
    if chips_per_host is None:
        chips_per_host = _CHIPS_OF_MANY_HOSTS
        if topology in tpu.single_hosts:
            chips_per_host = chips
    if chips % chips_per_host:
        rule = f"has {chips} chips, which hosts of {chips_per_host} can't share"
        fix = f"Use a topology such as {example}, or set --chips-per-node"
        raise UsageError(f"--topology {topology} {rule}. {fix}.")
    return Slice(
        tpu.accelerator,
        topology,
        chips // chips_per_host,
        chips_per_host,
        chips_per_host * tpu.devices_per_chip,
    )
