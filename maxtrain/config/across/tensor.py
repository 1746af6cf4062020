"""Sizes that tensor parallelism splits inside layers, and the axes that must divide them."""

import math
from collections.abc import Iterator

from maxtrain.config.schema import RunConfig
from maxtrain.config.words import divisors, nearest

_SPLIT_OVER_TENSOR = ("num_heads", "num_kv_heads", "mlp_dim", "vocab_size")


def tensor_problems(config: RunConfig) -> Iterator[str]:
    """Sizes that mesh.tensor does not divide; an axis of a size that is not known yet divides
    nothing."""
    tensor = config.mesh.tensor
    if tensor <= 1:
        return
    dims: dict[str, int] = {}
    for name in _SPLIT_OVER_TENSOR:
        size = getattr(config.model, name)
        if size is not None:
            dims[f"model.{name}"] = size
    for name in ("expert_dim", "shared_dim"):
        size = getattr(config.model.moe, name)
        if size:
            dims[f"model.moe.{name}"] = size
    wrong = [f"{key}={size}" for key, size in dims.items() if size % tensor]
    if wrong:
        valid = nearest(tensor, divisors(math.gcd(*dims.values())))
        yield (
            f"mesh.tensor={tensor} must divide {' and '.join(wrong)} (split over tensor). "
            f"Set mesh.tensor to {valid}."
        )
