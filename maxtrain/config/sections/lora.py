"""The section `model.lora`, and what must hold inside it."""

import dataclasses
import re
from collections.abc import Iterator
from typing import Literal

from data_pipeline.base.config_key import AnyValueExcept, UsedBy, key
from maxtrain.config.limits import as_float32

_ADAPTED = UsedBy(
    {"model.lora.rank": AnyValueExcept(None)},
    "{key}={value} is not used with {cause}. Set model.lora.rank=16, or leave it out.",
)
_QUANTIZED = UsedBy({"model.lora.base": ("int8", "nf4")})


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters of products with weights, which train in the place of the weights."""

    rank: int | None = key(
        None,
        "rank of the LoRA adapters, which train instead of all weights but those of "
        "train.only; null: no adapters",
        low=1,
        high=1 << 16,
    )
    alpha: float = key(
        16.0,
        "LoRA alpha: the output of adapters is multiplied by alpha / rank",
        above=0,
        high=1e6,
        used_by=_ADAPTED,
    )
    scaling: Literal["rank", "root"] = key(
        "rank",
        "rank: scale by alpha / rank; root: by alpha / sqrt(rank), which suits high ranks (rsLoRA)",
        used_by=_ADAPTED,
    )
    targets: tuple[str, ...] = key(
        (r"attention\.", r"mlp\.(shared\.)?(gate|up|down)"),
        "regular expressions: weight matrices whose parameter path contains a match get adapters",
        used_by=_ADAPTED,
    )
    magnitudes: bool = key(
        False,
        "also train the magnitude of each output's weights, apart from their direction (DoRA)",
        used_by=_ADAPTED,
    )
    dropout: float = key(
        0.0,
        "dropout of the inputs of adapters during training; adapters of experts have none",
        low=0,
        used_by=_ADAPTED,
    )
    base: Literal["full", "int8", "nf4"] = key(
        "full",
        "storage of the weights below adapters: full: as precision.params; int8: 8 bits; nf4:"
        " 4 bits (QLoRA)",
        used_by=_ADAPTED,
    )
    base_block: int = key(
        64,
        "quantization block: number of inputs whose quantized weights share one scale",
        low=1,
        high=1 << 16,
        used_by=(_ADAPTED, _QUANTIZED),
    )


def lora_problems(lora: LoraConfig) -> Iterator[str]:
    """Patterns that are none, a rate that drops everything, and blocks that do not fill bytes."""
    if lora.rank is None:
        return
    if as_float32(lora.dropout) >= 1:
        yield (
            f"model.lora.dropout={lora.dropout} must be less than 1. "
            "Set model.lora.dropout=0.1, for example."
        )
    if not lora.targets:
        yield (
            "model.lora.targets=[] names no product, and model.lora.rank is set. "
            "Name some, such as model.lora.targets='[attention]', or set model.lora.rank=null."
        )
    if lora.base == "nf4" and lora.base_block % 2:
        yield (
            f"model.lora.base_block={lora.base_block} must be even with model.lora.base=nf4, which "
            f"stores two weights in a byte. Set model.lora.base_block={lora.base_block + 1}."
        )
    for pattern in lora.targets:
        try:
            re.compile(pattern)
        except re.error as error:
            yield (
                f"model.lora.targets: {pattern} is no regular expression ({error}). "
                "Set it to a part of a path, such as attention."
            )
