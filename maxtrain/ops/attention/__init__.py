"""Attention behind one door: `attention(..., kernel=...)`. A kernel that can't do what is asked
raises; none falls back."""

from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Array, Float, Int, Key

from data_pipeline.errors import ConfigError
from maxtrain.config.kernels import ATTENTION
from maxtrain.ops.attention.cudnn import cudnn_attention
from maxtrain.ops.attention.eager import eager_attention
from maxtrain.ops.attention.flash import flash_attention
from maxtrain.ops.attention.xla import xla_attention

KERNELS: dict[str, Callable[..., Array]] = {
    "eager": eager_attention,
    "xla": xla_attention,
    "cudnn": cudnn_attention,
    "flash": flash_attention,
}


def require_platform(kernel: str, platform: str) -> None:
    """Raises ConfigError if devices of this platform do not have the kernel."""
    if ATTENTION[kernel].platform not in (None, platform):
        rule = f"is for {str(ATTENTION[kernel].platform).upper()}s only, and the devices here are of platform {platform}"
        raise ConfigError(f"model.attention={kernel} {rule}. Set model.attention=xla.")


def with_cache(kernel: str) -> str:
    """The kernel that reads the caches of generation for a model that was trained with this one."""
    return kernel if ATTENTION[kernel].caches else "xla"


class Dropout(NamedTuple):
    """Drops attention weights with probability `rate`, by a key of each row."""

    keys: Key[Array, " B"]
    rate: float


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    q_segments: Int[Array, "B T"],
    kv_segments: Int[Array, "B S"],
    *,
    offset: Int[Array, ""] | int = 0,
    kernel: str,
    dtype: str,
    dropout: Dropout | None = None,
) -> Float[Array, "B T N H"]:
    """Causal softmax attention inside segments, grouped queries.

    Args:
        q: queries [B, T, N, H]; query t stands at column offset + t of the keys.
        k: keys [B, S, K, H]; K divides N.
        v: values [B, S, K, H].
        q_segments: [B, T]; a query sees the keys of its own segment only, padding (0) sees padding.
        kv_segments: [B, S]; negative where a cache holds nothing yet.
        offset: column of the first query: 0 in training, the number of cached columns in
            generation.
        kernel: "eager" (the oracle: all scores at once), "xla" (blocks of queries, backward without
            stored scores), or "cudnn" (GPUs; does not look at segments, which config/across asks
            about), or "flash" (TPUs).
        dtype: inputs of the matrix products; scores, softmax and sums are float32.
        dropout: of the weights after the softmax; only the eager kernel can.

    Returns:
        [B, T, N, H] float32.
    """
    if dropout is not None:
        if kernel != "eager":
            rule = f"needs an attention kernel that can drop weights, and model.attention={kernel} can't"
            raise ConfigError(
                f"regularization.attention_dropout={dropout.rate} {rule}. Set model.attention=eager."
            )
        return eager_attention(
            q, k, v, q_segments, kv_segments, offset=offset, dtype=dtype, dropout=dropout
        )
    return KERNELS[kernel](q, k, v, q_segments, kv_segments, offset=offset, dtype=dtype)
