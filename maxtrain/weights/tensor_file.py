"""Reads files of tensors (safetensors) with few copies, in the order of the disk.

The numbers of a tensor are read directly into their final memory if they have the same layout in
the file; a part that is transposed, cut or of another type goes through a small buffer that stays
in the processor's cache. Nothing is mapped into memory: pages of the file would count as the
process's own.
"""

import concurrent.futures
import contextlib
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from data_pipeline.base import strict_json
from data_pipeline.base.errors import DataError, blame_storage
from maxtrain.models.families.directory import AGAIN
from maxtrain.models.hf_mapping import Part, Shape
from maxtrain.weights.memory_order import copy_numbers

# Types by their names in a file.
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Types of codes, by their names in a file.
_CODES = {"U8": "uint8", "F8_E4M3": "float8_e4m3fn"}
# Bytes that one thread reads at a time: few, so that the requests of all threads look like one long
# read to the kernel, which reads ahead; and enough rows of a wide matrix to fill a tile of
# memory_order.
_BLOCK_BYTES = 1 << 22


class StoredTensor(NamedTuple):
    """A tensor in an open file.

    Attributes:
        path: path of the file.
        descriptor: descriptor of the file.
        kind: name of the type in the file.
        shape: shape of the tensor.
        offset: offset in bytes of the first number in the file.
        dequantize: reads a part of the tensor into memory, if the file holds codes of it; `kind`
            and `shape` are then those that a plain file would have.
    """

    path: Path
    descriptor: int
    kind: str
    shape: Shape
    offset: int
    dequantize: Callable[[Part, np.ndarray], None] | None = None


class TensorRead(NamedTuple):
    """A request to read a part of a tensor into memory of the same shape, rounded to its type."""

    tensor: StoredTensor
    part: Part
    out: np.ndarray


def open_tensors(path: Path, held: contextlib.ExitStack) -> dict[str, StoredTensor]:
    """Return the tensors of a file by name; `held` closes the file.

    Raises:
        DataError: the file is missing or broken.
    """
    try:
        # `safe_open` refuses a file of another format, or one that is not complete.
        with safe_open(path, "numpy"):
            pass
        file = held.enter_context(path.open("rb", buffering=0))
        length = int.from_bytes(file.read(8), "little")
        header = strict_json.loads(file.read(length))
    except (OSError, ValueError, SafetensorError) as error:
        what = f"can't be read ({error})"
        if isinstance(error, FileNotFoundError):
            what = "is missing"
        raise DataError(
            f"{path}: {what}. {AGAIN}; save_pretrained(..., safe_serialization=True) of "
            "transformers makes it of weights in another format."
        ) from error
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        offset = 8 + length + entry["data_offsets"][0]
        shape = tuple(entry["shape"])
        tensors[name] = StoredTensor(path, file.fileno(), entry["dtype"], shape, offset)
    return tensors


def read_all(reads: Sequence[TensorRead], threads: concurrent.futures.Executor) -> None:
    """Execute read requests in the order of the files, with several threads.

    Raises:
        DataError: a file has become shorter.
        StorageError: the disk fails.
    """
    blocks = [block for read in reads for block in _blocks(read)]
    blocks.sort(key=_place)
    for _ in threads.map(_read_block, blocks):
        pass


def _place(read: TensorRead) -> tuple[Path, int]:
    """Return the file and the offset at which a read begins."""
    at = read.tensor.offset
    if read.part and read.tensor.dequantize is None:
        at += read.part[0].start * _row_bytes(read.tensor)
    return read.tensor.path, at


def _row_bytes(tensor: StoredTensor) -> int:
    return math.prod(tensor.shape[1:]) * _dtype(tensor).itemsize


def _dtype(tensor: StoredTensor) -> np.dtype:
    return jnp.dtype((DTYPES | _CODES)[tensor.kind])


def stored_numbers(tensor: StoredTensor, part: Part) -> np.ndarray:
    """Return a part of a tensor in the type of the file; read by the calling thread."""
    out = np.empty([len(indices) for indices in part], _dtype(tensor))
    _read(tensor, part, out)
    return out


def _blocks(read: TensorRead) -> list[TensorRead]:
    """Split a read into parts of about as many bytes as one thread reads at a time."""
    if not read.part:
        return [read]
    rows, *rest = read.part
    at_once = max(1, _BLOCK_BYTES // max(1, _row_bytes(read.tensor)))
    blocks = []
    for start in range(0, len(rows), at_once):
        here = rows[start : start + at_once]
        blocks.append(TensorRead(read.tensor, (here, *rest), read.out[start : start + at_once]))
    return blocks


def _read_block(read: TensorRead) -> None:
    if read.tensor.dequantize is None:
        _read(read.tensor, read.part, read.out)
    else:
        read.tensor.dequantize(read.part, read.out)


def _read(tensor: StoredTensor, part: Part, out: np.ndarray) -> None:
    """Read a part of a tensor."""
    if len(tensor.shape) > 2:
        row_bytes = _row_bytes(tensor)
        for place, i in enumerate(part[0]):
            offset = tensor.offset + i * row_bytes
            one = tensor._replace(shape=tensor.shape[1:], offset=offset)
            _read(one, part[1:], out[place, ...])
        return
    # Treat it as two dims; a vector is one row.
    missing = 2 - len(tensor.shape)
    rows, columns = (range(1),) * missing + part
    matrix = tensor._replace(shape=(1,) * missing + tensor.shape)
    target = out.reshape(len(rows), len(columns), copy=False)
    whole_rows = len(columns) == matrix.shape[1]
    if whole_rows and target.dtype == _dtype(tensor) and target.flags.c_contiguous:
        begin = matrix.offset + rows.start * _row_bytes(matrix)
        _fill(matrix, target.reshape(-1).view(np.uint8), begin)
        return
    _read_by_buffer(matrix, rows, columns, target)


def _read_by_buffer(tensor: StoredTensor, rows: range, columns: range, out: np.ndarray) -> None:
    """Read rows of a matrix, a few at a time, and copy their columns to the output."""
    row_bytes = _row_bytes(tensor)
    at_once = min(max(1, _BLOCK_BYTES // max(1, row_bytes)), len(rows))
    buffer = np.empty((at_once, tensor.shape[1]), _dtype(tensor))
    for start in range(0, len(rows), at_once):
        few = buffer[: len(rows) - start]
        _fill(
            tensor, few.reshape(-1).view(np.uint8), tensor.offset + (rows.start + start) * row_bytes
        )
        copy_numbers(few[:, columns.start : columns.stop], out[start : start + at_once])


def _fill(tensor: StoredTensor, memory: np.ndarray, offset: int) -> None:
    """Fill memory with the bytes of a file from `offset` on."""
    left = memoryview(memory)
    while left:
        try:
            count = os.preadv(tensor.descriptor, [left], offset)
        except OSError as error:
            blame_storage(str(tensor.path), error)
            raise
        if not count:
            raise DataError(f"{tensor.path}: ends in the middle of a tensor. {AGAIN}.")
        offset += count
        left = left[count:]


def read_part(
    stored: StoredTensor, dtype: Any, threads: concurrent.futures.Executor, part: Part
) -> np.ndarray:
    """Return a part of a tensor in a file, rounded to `dtype`."""
    out = np.empty([len(indices) for indices in part], dtype)
    read_all([TensorRead(stored, part, out)], threads)
    return out
