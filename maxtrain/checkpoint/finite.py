"""Check that the arrays of a checkpoint are finite: intact bytes can still be worthless weights.

Needs no device.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.base import strict_json

# By numpy's name of a type in zarr's metadata: the unsigned type of its size, and the bits of its
# exponent. All of these are set in NaN and infinity alone.
_EXPONENTS: dict[str, tuple[type[np.unsignedinteger], int]] = {
    "<f8": (np.uint64, 0x7FF0_0000_0000_0000),
    "<f4": (np.uint32, 0x7F80_0000),
    "<f2": (np.uint16, 0x7C00),
    "bfloat16": (np.uint16, 0x7F80),
}
_CHUNK_BYTES = 1 << 24


def must_be_finite(name: str) -> bool:
    """Return whether an array of a training state, such as `params.layers.0.mlp.up.kernel`, is
    worthless with a NaN or infinity in it.

    Weights, their averages, moments and buffers are. What judges steps is not: it holds infinity
    where it has not seen anything yet.
    """
    return name.startswith(("params.", "opt_state.", "buffers."))


def find_non_finite(path: Path, commit: dict[str, Any]) -> str:
    """Return what of a step directory's arrays must be finite and is not; empty if nothing.

    Numbers are read from plain files. Those of several processes' steps lie in another format:
    there, what was seen when they were saved counts. OSError: a file can't be read.
    """
    for name, array in commit["arrays"].items():
        if not must_be_finite(name):
            continue
        if array.get("finite") is False:
            return f"array {name} was not finite when it was saved"
        for file, numbers in _plain_numbers(path, commit, name):
            if numbers.any():
                count = int(numbers.sum())
                what = f"{file} holds {count:,} NaN or infinite numbers"
                return f"array {name} is not finite: {what}"
    return ""


def _plain_numbers(
    path: Path, commit: dict[str, Any], name: str
) -> Iterator[tuple[str, np.ndarray]]:
    """The plain files of an array, piece by piece; of each number, whether it is not finite."""
    header = f"arrays/{name}/.zarray"
    if header not in commit["files"]:
        return
    zarr = strict_json.read(path / header)
    if not isinstance(zarr, dict):
        return
    if zarr.get("compressor") or zarr.get("filters") or str(zarr.get("dtype")) not in _EXPONENTS:
        return
    bits, exponent = _EXPONENTS[zarr["dtype"]]
    pattern = re.compile(re.escape(f"arrays/{name}/") + r"\d[\d.]*")
    for file in commit["files"]:
        if not pattern.fullmatch(file):
            continue
        with (path / file).open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                numbers = np.frombuffer(chunk, bits)
                yield file, (numbers & bits(exponent)) == bits(exponent)
