"""Storage form of the weights of a Hugging Face directory with fewer bits: `quantization_config` of
its config.json. No jax here."""

import dataclasses
from typing import Any, Literal

from data_pipeline.base.errors import DataError
from maxtrain.config.words import show
from maxtrain.models.families.family import HfConfig


@dataclasses.dataclass(frozen=True)
class Quantization:
    """A storage form of weights.

    Attributes:
        method: "mxfp4", numbers of 4 bits with a power of two for each 32, as in GPT-OSS; or "fp8",
            numbers of 8 bits (e4m3) with a scale for each block of a matrix, as in DeepSeek V3 and
            Qwen 3.
        block: rows and columns of a block of "fp8".
    """

    method: Literal["mxfp4", "fp8"]
    block: tuple[int, int] = (128, 128)

    def words(self) -> str:
        """Describe the form in words."""
        if self.method == "mxfp4":
            return "MXFP4"
        rows, columns = self.block
        return f"FP8 (e4m3, blocks of {rows}x{columns})"


def read_quantization(settings: HfConfig) -> Quantization | None:
    """Return the storage form of the weights; None: plain floats.

    Raises:
        DataError: the form is not supported.
    """
    given = settings.values.get("quantization_config")
    if given is None:
        return None
    if not isinstance(given, dict):
        raise _not_read(settings, show(given))
    method = given.get("quant_method")
    if method == "mxfp4":
        return Quantization("mxfp4")
    if method != "fp8":
        raise _not_read(settings, f"quant_method={method!r}")
    if given.get("fmt", "e4m3") != "e4m3":
        raise _not_read(settings, f"quant_method='fp8' with fmt={given['fmt']!r}")
    size = given.get("weight_block_size")
    block = _block(size)
    if block is None:
        raise _not_read(settings, f"quant_method='fp8' with weight_block_size={show(size)}")
    return Quantization("fp8", block)


def _block(size: Any) -> tuple[int, int] | None:
    """Return rows and columns, or None if the size is not a pair of valid numbers."""
    if not isinstance(size, list) or len(size) != 2:
        return None
    rows, columns = size
    # Python counts True as an int.
    if (
        type(rows) is not int
        or type(columns) is not int
        or not 1 <= min(size) <= max(size) <= 1 << 20
    ):
        return None
    return rows, columns


def _not_read(settings: HfConfig, what: str) -> DataError:
    return DataError(
        f"{settings.path}: quantization_config has {what}, and weights are read that are stored "
        "plainly, as 'mxfp4', or as 'fp8' with fmt 'e4m3' and a weight_block_size such as "
        "[128, 128]. Take the release in bfloat16, or let the package that made these weights "
        "dequantise them (in transformers model.dequantize(), then save_pretrained())."
    )
