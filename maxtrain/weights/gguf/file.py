"""Writes GGUF files tensor by tensor, and reads them back."""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import zlib_ng.zlib_ng as zlib

from data_pipeline.base.errors import DataError, StorageError, UsageError
from data_pipeline.base.extras import load_package
from maxtrain.models.hf_mapping import LazyArray, Part, slices
from maxtrain.weights.gguf.field import GgufField
from maxtrain.weights.memory_order import in_c_order

# Storage forms, with llama.cpp's number for a file that mostly has this form.
QUANTS = {
    "f32": 0,
    "f16": 1,
    "bf16": 32,
    "q8_0": 7,
    "q5_1": 9,
    "q5_0": 8,
    "q4_1": 3,
    "q4_0": 2,
}
# Number of entries of the last dim that share a scale.
_BLOCK = 32
# Number of entries that are rounded at a time.
_AT_ONCE = 1 << 24


class GgufTensor(NamedTuple):
    """A tensor of the file.

    Args:
        tensor: its numbers.
        quant: storage form, one of `QUANTS`.
    """

    tensor: LazyArray
    quant: str


def library() -> Any:
    """Return the package `gguf`. Raise UsageError if it is not installed."""
    return load_package("gguf", "gguf", "--format gguf")


def plan_tensors(
    tensors: Mapping[str, LazyArray], exact: set[str], quant: str
) -> dict[str, GgufTensor]:
    """Return the storage form of each tensor: `quant` for matrices, float32 for vectors and for
    those named in `exact`.

    Raises:
        UsageError: the rows of a matrix are not a whole number of blocks.
    """
    plans = {}
    for name, tensor in tensors.items():
        kind = quant
        if len(tensor.shape) == 1 or name in exact:
            kind = "f32"
        if kind.startswith("q") and tensor.shape[-1] % _BLOCK:
            raise UsageError(
                f"--quant {quant}: rounds {_BLOCK} numbers together, and rows of {name} have "
                f"{tensor.shape[-1]}. Use --quant f16, bf16 or f32."
            )
        plans[name] = GgufTensor(tensor, kind)
    return plans


def write_gguf(
    path: Path, architecture: str, fields: list[GgufField], plans: Mapping[str, GgufTensor]
) -> dict[str, int]:
    """Write a file and sync it to disk; one tensor is in memory at a time.

    Returns:
        A checksum of each tensor's bytes.

    Raises:
        DataError: a number is not finite in its storage form.
    """
    gguf = library()
    writer = gguf.GGUFWriter(path, architecture)
    for field in fields:
        writer.add_key_value(field.key, field.value, *_types(gguf, field))
    for name, plan in plans.items():
        kind = gguf.GGMLQuantizationType[plan.quant.upper()]
        per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        shape = plan.tensor.shape
        size = math.prod(shape) // per_block * block_bytes
        writer.add_tensor_info(name, shape, np.dtype(np.float32), size, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    sums = {}
    with path.open("ab") as file:
        _pad(file, gguf.GGUF_DEFAULT_ALIGNMENT)
        for name, plan in plans.items():
            sums[name] = _write_tensor(file, name, plan)
            _pad(file, gguf.GGUF_DEFAULT_ALIGNMENT)
        file.flush()
        os.fsync(file.fileno())
    return sums


def _types(gguf: Any, field: GgufField) -> tuple[Any, Any]:
    """Return the type of a field, and that of its entries."""
    kinds = gguf.GGUFValueType
    if field.kind.endswith("s"):
        return kinds.ARRAY, kinds[field.kind.removesuffix("s").upper()]
    return kinds[field.kind.upper()], None


def _pad(file: Any, alignment: int) -> None:
    file.write(b"\0" * (-file.tell() % alignment))


def _write_tensor(file: Any, name: str, plan: GgufTensor) -> int:
    """Write the numbers of a tensor, some rows at a time, and return a checksum of the bytes."""
    numbers = plan.tensor.whole()
    rows = numbers.reshape(-1, numbers.shape[-1])
    count = max(1, _AT_ONCE // rows.shape[1])
    total = 0
    for start in range(0, len(rows), count):
        stored = _stored(name, rows[start : start + count], plan.quant)
        content = stored.reshape(-1).view(np.uint8).data
        file.write(content)
        total = zlib.crc32(content, total)
    return total


def _stored(name: str, rows: np.ndarray, quant: str) -> np.ndarray:
    """Return rows in their storage form. Raise DataError if a number is not finite in it."""
    rows = in_c_order(rows, np.dtype(np.float32))
    with np.errstate(over="ignore"):
        if quant == "bf16":
            rounded = rows.astype(jnp.dtype("bfloat16"))
        elif quant == "f16":
            rounded = rows.astype(np.float16)
        else:
            rounded = rows
    if not np.isfinite(rounded).all() or (quant.startswith("q") and not _scales_fit(rows)):
        raise DataError(
            f"{name} holds NaN or infinity as {quant}, so nobody could use it. Take another "
            "checkpoint with --step, or --quant f32."
        )
    if not quant.startswith("q"):
        return rounded
    gguf = library()
    return gguf.quants.quantize(rows, gguf.GGMLQuantizationType[quant.upper()])


def round_trip(name: str, numbers: np.ndarray, quant: str) -> np.ndarray:
    """Return the numbers in float32 that a file of this type would give back, without writing it.
    Raise DataError if one is not finite in it."""
    rows = numbers.reshape(-1, numbers.shape[-1])
    out = np.empty(rows.shape, np.float32)
    count = max(1, _AT_ONCE // max(1, rows.shape[1]))
    for start in range(0, len(rows), count):
        stored = _stored(name, rows[start : start + count], quant)
        if quant.startswith("q"):
            gguf = library()
            kind = gguf.GGMLQuantizationType[quant.upper()]
            stored = gguf.quants.dequantize(stored, kind)
        out[start : start + count] = stored
    return out.reshape(numbers.shape)


def _scales_fit(rows: np.ndarray) -> bool:
    """Return True if all numbers are in the range of float16, the type of scales."""
    return rows.size == 0 or float(np.abs(rows).max()) <= float(np.finfo(np.float16).max)


def read_gguf(path: Path, sums: Mapping[str, int], fields: list[GgufField]) -> dict[str, LazyArray]:
    """Return the tensors of a file that was just written, as float32; only the parts that are read
    are in memory.

    Raises:
        StorageError: the content differs from what was written.
    """
    gguf = library()
    try:
        reader = gguf.GGUFReader(path)
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        found = {
            name: zlib.crc32(tensor.data.reshape(-1).view(np.uint8).data)
            for name, tensor in tensors.items()
        }
        different = [name for name in sums if found.get(name) != sums[name]]
        different += [field.key for field in fields if not _says(reader, field)]
    except (ValueError, IndexError, KeyError) as error:
        different = [f"it can't be read: {error}"]
        tensors = {}
    if different or tensors.keys() != sums.keys():
        raise StorageError(
            f"{path.name}: what is read back is not what was written ({', '.join(different[:3])}). "
            "Nothing was exported. Look at the disk that it is on, then run the same command again."
        )
    return {name: _in_file(tensor) for name, tensor in tensors.items()}


def _in_file(tensor: Any) -> LazyArray:
    """Return the numbers of a tensor of an open file."""
    gguf = library()
    # The file lists dims from the last to the first.
    shape = tuple(int(size) for size in reversed(tensor.shape))

    def read(part: Part) -> np.ndarray:
        first, *others = slices(part)
        if not others:
            return gguf.quants.dequantize(tensor.data, tensor.tensor_type)[first]
        # Numbers that share a scale are neighbours in the last dim.
        numbers = gguf.quants.dequantize(tensor.data[first], tensor.tensor_type)
        return numbers[:, *others]

    return LazyArray(shape, read)


def _says(reader: Any, field: GgufField) -> bool:
    """Return True if a file has a field with its value."""
    found = reader.get_field(field.key)
    if found is None:
        return False
    value = found.contents()
    if field.kind in ("float32", "float32s"):
        return np.array_equal(np.float32(value), np.float32(field.value))
    return value == field.value
