"""Attention with a choice of kernels: `attention(..., kernel=...)`. A kernel that does not support
a request raises an error; none falls back to another."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array, Float, Key

from data_pipeline.base.errors import ConfigError
from maxtrain.config.kernels import ATTENTION
from maxtrain.ops.attention.all_to_all import all_to_all_attention
from maxtrain.ops.attention.cudnn import cudnn_attention
from maxtrain.ops.attention.eager import eager_attention
from maxtrain.ops.attention.flash import flash_attention, flash_on_one_device
from maxtrain.ops.attention.mask import Mask
from maxtrain.ops.attention.mosaic import mosaic_attention, mosaic_on_one_device
from maxtrain.ops.attention.ring import ring_attention
from maxtrain.ops.attention.triton import triton_attention, triton_on_one_device
from maxtrain.ops.attention.xla import xla_attention

KERNELS: dict[str, Callable[..., Array]] = {
    "eager": eager_attention,
    "xla": xla_attention,
    "cudnn": cudnn_attention,
    "triton": triton_attention,
    "mosaic": mosaic_attention,
    "flash": flash_attention,
    "ring": ring_attention,
}
# For kernels that split over devices by themselves: the part for one device.
ON_ONE_DEVICE: dict[str, Callable[..., Array]] = {
    "triton": triton_on_one_device,
    "mosaic": mosaic_on_one_device,
    "flash": flash_on_one_device,
}


def with_cache(kernel: str) -> str:
    """Return the kernel that reads the KV cache for a model that was trained with this kernel."""
    if ATTENTION[kernel].caches:
        return kernel
    return "xla"


class Dropout(NamedTuple):
    """Dropout of attention weights with probability `rate`, with a random key for each row."""

    keys: Key[Array, " B"]
    rate: float


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    mask: Mask,
    *,
    kernel: str,
    dtype: str,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    dropout: Dropout | None = None,
) -> Float[Array, "B T N Hv"]:
    """Softmax attention with grouped queries.

    Args:
        q: queries [B, T, N, H].
        k: keys [B, S, K, H]; K divides N.
        v: values [B, S, K, Hv]; only the eager and xla kernels support another size than that of
            keys.
        mask: which queries [B, T] see which keys [B, S].
        kernel: "eager" (the oracle: all scores at once), "xla" (blocks of queries, backward without
            stored scores), "cudnn" (GPUs; ignores segments, which config/across checks), "triton"
            (GPUs), "mosaic" (GPUs since Hopper), "flash" (TPUs), or "ring" (rows sharded over
            devices). If rows are sharded, XLA gathers whole rows for "eager", and other kernels get
            whole rows of some heads.
        dtype: inputs of the matrix products; scores, softmax and sums are float32.
        scale: factor of the scores; None: 1 / sqrt(H).
        softcap: scaled scores become softcap * tanh(score / softcap), which lies between -softcap
            and softcap; None: no softcap. cuDNN's kernel does not support it.
        sinks: [N] learned logit of each head (attention sink). It takes part in the softmax like
            the score of an additional key that every query sees and that has no value, so weights
            sum to less than 1. None: there are none. Only the eager and xla kernels support it.
        dropout: dropout of the weights after the softmax; only the eager kernel supports it.

    Returns:
        [B, T, N, Hv] float32.

    Raises:
        ConfigError: the kernel does not support the request.

    Source: softcap: Gemma Team 2024, https://arxiv.org/abs/2408.00118, section 2; sinks: Xiao et
        al. 2023, https://arxiv.org/abs/2309.17453; learned ones: OpenAI 2025, gpt-oss,
        https://arxiv.org/abs/2508.10925.
    """
    if scale is None:
        scale = q.shape[-1] ** -0.5
    options: dict[str, Any] = {"scale": scale}
    if softcap is not None:
        if not ATTENTION[kernel].softcap:
            raise ConfigError(
                f"model.attention={kernel} can't bound scores, which this model needs "
                f"(softcap={softcap}). Set model.attention=xla."
            )
        options["softcap"] = softcap
    if v.shape[-1] != q.shape[-1] and not ATTENTION[kernel].values:
        raise ConfigError(
            f"model.attention={kernel} needs values of the size of keys, and this model has "
            f"values of {v.shape[-1]} and keys of {q.shape[-1]}. Set model.attention=xla."
        )
    if sinks is not None:
        if not ATTENTION[kernel].sinks:
            raise ConfigError(
                f"model.attention={kernel} has no attention sinks, which this model needs. "
                "Set model.attention=xla."
            )
        options["sinks"] = sinks
    if dropout is not None:
        if kernel != "eager":
            raise ConfigError(
                f"regularization.attention_dropout={dropout.rate} needs an attention kernel that "
                f"can drop weights, and model.attention={kernel} can't. Set model.attention=eager."
            )
        options["dropout"] = dropout
    if mask.exchange == "heads":
        local = ON_ONE_DEVICE.get(kernel, KERNELS[kernel])
        return all_to_all_attention(q, k, v, mask, kernel=local, dtype=dtype, **options)
    return KERNELS[kernel](q, k, v, mask, dtype=dtype, **options)
