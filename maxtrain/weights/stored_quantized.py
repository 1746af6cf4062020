"""Reads the quantised weights of a Hugging Face directory as plain tensors: each has the name, the
shape and the numbers that it would have in a plain file.

A part is dequantised when it is read, some rows at a time, straight to where it is needed.

* MXFP4, as GPT-OSS: `NAME_blocks` uint8 [E, outputs, groups, 16] holds two numbers of 4 bits (e2m1)
  a byte, the first one in the lower half; `NAME_scales` uint8 [E, outputs, groups] holds the power
  of two of each group of 32, plus 127. NAME is [E, inputs, outputs]: the other way round. All of
  its numbers are numbers of bfloat16.
* FP8, as DeepSeek V3 and Qwen 3: `NAME` is of 8 bits (e4m3) [outputs, inputs], and `NAME_scale_inv`
  is what each block of 128x128 is multiplied by, the last ones of which may be smaller. Products
  are those of float32, rounded once to the requested type.

Sources: https://arxiv.org/abs/2310.10537 (MXFP4); https://arxiv.org/abs/2412.19437, section 3.3
    (FP8).
"""

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from data_pipeline.base.errors import DataError
from maxtrain.models.families.directory import AGAIN
from maxtrain.models.families.quantization import Quantization
from maxtrain.models.hf_mapping import Part
from maxtrain.weights.memory_order import copy_numbers
from maxtrain.weights.tensor_file import DTYPES, StoredTensor, stored_numbers

# Number of entries that share a scale in MXFP4, and the bytes that they take.
_GROUP = 32
_GROUP_BYTES = 16
_BLOCKS = "_blocks"
_SCALES = "_scales"
_BLOCK_SCALES = "_scale_inv"
# Number of entries that are dequantised at a time; they fit in the L2 cache of a core.
_AT_ONCE = 1 << 18


def _fp4_pairs() -> np.ndarray:
    """Return the two numbers of each byte, as one 64-bit number."""
    sizes = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
    numbers = np.concatenate([sizes, -sizes])
    code = np.arange(256)
    return np.stack([numbers[code & 15], numbers[code >> 4]], axis=1).view(np.uint64).ravel()


_FP4_PAIRS = _fp4_pairs()
_FP8 = np.arange(256, dtype=np.uint8).view(jnp.dtype("float8_e4m3fn")).astype(np.float32)


def plain_tensors(
    stored: Mapping[str, StoredTensor], how: Quantization, directory: Path
) -> dict[str, StoredTensor]:
    """Return the plain tensors of a directory; the quantised ones are dequantised when they are
    read.

    Args:
        stored: tensors of the files, by name.
        how: storage form.
        directory: directory of the files, for messages.

    Raises:
        DataError: scales are missing or of another shape or type than the weights need.
    """
    if how.method == "mxfp4":
        return _of_mxfp4(stored, directory)
    return _of_fp8(stored, how, directory)


def _of_mxfp4(stored: Mapping[str, StoredTensor], directory: Path) -> dict[str, StoredTensor]:
    plain = dict(stored)
    for name, blocks in stored.items():
        weight = name.removesuffix(_BLOCKS)
        if weight == name:
            continue
        scales = _scales_of(name, f"{weight}{_SCALES}", stored, directory)
        if blocks.kind != "U8" or len(blocks.shape) != 4 or blocks.shape[-1] != _GROUP_BYTES:
            raise DataError(
                f"{directory}: {name} is {blocks.kind}{list(blocks.shape)}, and must be U8 with "
                f"four dims, of which the last has {_GROUP_BYTES} bytes. {AGAIN}."
            )
        _require_form(scales, f"{weight}{_SCALES}", ("U8",), blocks.shape[:-1], directory)
        del plain[name], plain[f"{weight}{_SCALES}"]
        experts, outputs, groups, _ = blocks.shape
        codes = blocks._replace(shape=(experts, outputs, groups * _GROUP_BYTES))
        plain[weight] = blocks._replace(
            kind="BF16",
            shape=(experts, groups * _GROUP, outputs),
            dequantize=functools.partial(_read_mxfp4, codes, scales),
        )
    return plain


def _of_fp8(
    stored: Mapping[str, StoredTensor], how: Quantization, directory: Path
) -> dict[str, StoredTensor]:
    plain = dict(stored)
    for name, codes in stored.items():
        if codes.kind != "F8_E4M3" or len(codes.shape) != 2:
            continue
        scales = _scales_of(name, f"{name}{_BLOCK_SCALES}", stored, directory)
        shape = tuple(-(-size // block) for size, block in zip(codes.shape, how.block, strict=True))
        _require_form(scales, f"{name}{_BLOCK_SCALES}", tuple(DTYPES), shape, directory)
        del plain[f"{name}{_BLOCK_SCALES}"]
        read = functools.partial(_read_fp8, codes, scales, how.block)
        plain[name] = codes._replace(kind="F32", dequantize=read)
    return plain


def _scales_of(
    name: str, scales: str, stored: Mapping[str, StoredTensor], directory: Path
) -> StoredTensor:
    if scales not in stored:
        raise DataError(
            f"{directory}: {name} is quantised, and its scales, {scales}, are missing. {AGAIN}."
        )
    return stored[scales]


def _require_form(
    scales: StoredTensor,
    name: str,
    kinds: tuple[str, ...],
    shape: tuple[int, ...],
    directory: Path,
) -> None:
    """Raise DataError if scales are not of this shape and one of these types."""
    if scales.kind not in kinds or scales.shape != shape:
        raise DataError(
            f"{directory}: {name} is {scales.kind}{list(scales.shape)}, and must be "
            f"{' or '.join(kinds)} of shape {list(shape)}, a scale for each block of the weights. "
            f"{AGAIN}."
        )


def _read_mxfp4(codes: StoredTensor, scales: StoredTensor, part: Part, out: np.ndarray) -> None:
    """Read a part [experts, inputs, outputs] into memory.

    Args:
        codes: uint8 [experts, outputs, bytes].
        scales: uint8 [experts, outputs, groups].
    """
    experts, inputs, outputs = part
    groups = range(inputs.start // _GROUP, -(-inputs.stop // _GROUP))
    first = groups.start * _GROUP
    wanted = slice(inputs.start - first, inputs.stop - first)
    in_bytes = range(groups.start * _GROUP_BYTES, groups.stop * _GROUP_BYTES)
    at_once = max(1, _AT_ONCE // (len(groups) * _GROUP))
    for place, expert in enumerate(experts):
        one = range(expert, expert + 1)
        for start in range(0, len(outputs), at_once):
            rows = outputs[start : start + at_once]
            bytes_there = stored_numbers(codes, (one, rows, in_bytes))[0]
            powers = stored_numbers(scales, (one, rows, groups))[0]
            numbers = np.take(_FP4_PAIRS, bytes_there).view(np.float32)
            numbers = numbers.reshape(len(rows), len(groups), _GROUP)
            # The code 255 is NaN in this format.
            factors = powers.view(jnp.dtype("float8_e8m0fnu")).astype(np.float32)
            _scale(numbers, factors[:, :, None])
            numbers = numbers.reshape(len(rows), len(groups) * _GROUP)
            copy_numbers(numbers[:, wanted], out[place, :, start : start + len(rows)].T)


def _read_fp8(
    codes: StoredTensor, scales: StoredTensor, block: tuple[int, int], part: Part, out: np.ndarray
) -> None:
    """Read a part [outputs, inputs] into memory.

    Args:
        codes: e4m3 [outputs, inputs].
        scales: scales [blocks of outputs, blocks of inputs].
        block: outputs and inputs of a block.
    """
    rows, columns = part
    height, width = block
    across = range(columns.start // width, -(-columns.stop // width))
    wanted = slice(columns.start - across.start * width, columns.stop - across.start * width)
    for here in _within_blocks(rows, height, max(1, _AT_ONCE // max(1, codes.shape[1]))):
        down = here.start // height
        factors = stored_numbers(scales, (range(down, down + 1), across))[0].astype(np.float32)
        numbers = np.take(_FP8, stored_numbers(codes, (here, columns)).view(np.uint8))
        where = slice(here.start - rows.start, here.stop - rows.start)
        _scale(numbers, np.repeat(factors, width)[wanted])
        copy_numbers(numbers, out[where])


def _within_blocks(rows: range, height: int, at_once: int) -> Iterator[range]:
    """Yield the rows in pieces that lie in one block each, and have at most `at_once` rows."""
    start = rows.start
    while start < rows.stop:
        end_of_block = (start // height + 1) * height
        stop = min(start + at_once, end_of_block, rows.stop)
        yield range(start, stop)
        start = stop


def _scale(numbers: np.ndarray, factors: np.ndarray) -> None:
    """Multiply numbers by their factors, in place; overflow becomes infinity, which the check of
    all weights finds."""
    with np.errstate(over="ignore", invalid="ignore"):
        np.multiply(numbers, factors, out=numbers)
