"""The adapter for tokamax: its grouped products for TPUs (v5 and later) and Hopper GPUs, and its
attention for Hopper and Blackwell GPUs, all written in Pallas.

Source: https://pypi.org/project/tokamax, version 0.0.17. Products: implementations `mosaic_tpu`,
which follows Gale et al. 2022, https://arxiv.org/abs/2211.15841, and `mosaic_gpu`. Its second
implementation for TPUs, and that for Blackwell, do not provide the products for the gradient of
weights, except inside their own differentiation.

Attention: implementation `mosaic_gpu`. Its public function does not accept the first key of each
query, so its inner classes are called.
"""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from data_pipeline.base.errors import ConfigError
from data_pipeline.base.extras import load_package, require_package
from maxtrain.config.across.attention_choice import Hardware
from maxtrain.config.words import choices

_WANTED_BY = "model.routing.kernel=tokamax"
_ATTENTION_BY = "model.attention=mosaic"
_ATTENTION = "tokamax._src.ops.attention.pallas_mosaic_gpu"
# Implementations by the platform of devices.
_IMPLEMENTATIONS = {"tpu": "mosaic_tpu", "gpu": "mosaic_gpu"}
# The only GPU generation that also has products for the gradient of weights.
_HOPPER = (9, 0)
_OF_GPUS = ("bfloat16", "float16")
# Rows of a tile.
_TILE = 128
_OUTER = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=(0,),
    rhs_group_dimensions=(),
)


def require_products(hardware: Hardware, compute: str) -> None:
    """Raise a ConfigError if these devices have no such products of this type, and a UsageError if
    tokamax is not installed.

    Args:
        hardware: the devices of the run.
        compute: type of the inputs of products.
    """
    is_hopper = hardware.platform == "gpu" and hardware.capability == _HOPPER
    if hardware.platform != "tpu" and not is_hopper:
        raise ConfigError(
            f"{_WANTED_BY} is for TPUs and for Hopper GPUs (compute capability 9.0), and the "
            f"devices here are {hardware.kind}. Set model.routing.kernel=blocks."
        )
    if is_hopper and compute not in _OF_GPUS:
        raise ConfigError(
            f"{_WANTED_BY} has no products of precision.compute={compute} on GPUs. Set "
            f"precision.compute to {choices(_OF_GPUS)}, or model.routing.kernel=blocks."
        )
    require_package("tokamax", "tokamax", _WANTED_BY)


def require_attention() -> None:
    """Raise a UsageError if tokamax is not installed."""
    require_package("tokamax", "tokamax", _ATTENTION_BY)


def grouped_product(
    x: Float[Array, "M I"], w: Float[Array, "E I O"], sizes: Int[Array, " E"], precision: str | None
) -> Float[Array, "M O"]:
    """Multiply each row with the matrix of its group, float32; rows after the last group are 0.

    Args:
        x, w: rows and matrices; I and O are at least 128.
        sizes: rows of each group; groups are consecutive.
        precision: as for `jax.lax.dot`.
    """
    tokamax = load_package("tokamax", "tokamax", _WANTED_BY)
    with _quietly(), _refusals(_WANTED_BY, "model.routing.kernel=blocks"):
        out = tokamax.ragged_dot(_in_tiles(x), w, sizes, **_options(precision))
    out = out[: x.shape[0]]
    # tokamax leaves arbitrary values there, even NaN, which would spread in sums over rows.
    is_in_a_group = jnp.arange(x.shape[0]) < sizes.sum()
    return jnp.where(is_in_a_group[:, None], out, 0.0)


def grouped_outer_product(
    x: Float[Array, "M I"], g: Float[Array, "M O"], sizes: Int[Array, " E"], precision: str | None
) -> Float[Array, "E I O"]:
    """Return for each group the sum of outer products over its rows, float32; 0 for a group without
    rows."""
    tokamax = load_package("tokamax", "tokamax", _WANTED_BY)
    options = _options(precision)
    with _quietly(), _refusals(_WANTED_BY, "model.routing.kernel=blocks"):
        return tokamax.ragged_dot_general(_in_tiles(x), _in_tiles(g), sizes, _OUTER, **options)


def attention_forward(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    first: Int[Array, "B T"],
    scale: float,
) -> tuple[Float[Array, "B T N H"], tuple[Float[Array, "B N T"], Float[Array, "B N T"]]]:
    """Compute causal softmax attention, for each query from its first key on.

    Args:
        q, k, v: bfloat16 or float16; K divides N.
        first: column of the first key that each query sees.

    Returns:
        the output, in the type of q; and for each query the largest score and the sum of weights,
        float32.

    Raises:
        ConfigError: the kernel does not support this device or these shapes.
    """
    with _quietly(), _refusals(_ATTENTION_BY, "model.attention=triton, or xla"):
        op = _attention_op()
        mask = _mask(first)
        return op(q, k, v, mask=mask, logits_scale=scale, return_residuals=True)


def attention_backward(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    first: Int[Array, "B T"],
    scale: float,
    out: Float[Array, "B T N H"],
    sums: tuple[Float[Array, "B N T"], Float[Array, "B N T"]],
    g: Float[Array, "B T N H"],
) -> tuple[Array, Array, Array]:
    """Return the gradients of q, k and v, in their type; each is written by one block of the
    device, so that its bits are always the same.

    Args:
        out, sums: from `attention_forward`.
        g: gradient of the output, in the type of q.
    """
    with _quietly(), _refusals(_ATTENTION_BY, "model.attention=triton, or xla"):
        op = _attention_op()
        bound = op.bind(q, k, v, mask=_mask(first), logits_scale=scale)
        options = dict(bound.kwargs)
        options.pop("return_residuals")
        gradients = op.vjp(sums, out, g, *bound.args, **options)
        return gradients["q"], gradients["k"], gradients["v"]


@contextlib.contextmanager
def lowered_for(device: Any) -> Iterator[None]:
    """Generate kernels for a GPU that is not present: tokamax queries jax's default device, and
    generates other kernels for Hopper than for Blackwell."""
    with jax.default_device(device):
        yield


def _attention_op() -> Any:
    """Return Hopper's or Blackwell's kernel, according to jax's first device."""
    kernels = load_package(_ATTENTION, "tokamax", _ATTENTION_BY)
    return kernels.PallasMosaicGpuFlashAttention()


def _mask(first: Int[Array, "B T"]) -> Any:
    """Return the mask of all heads."""
    kernels = load_package(_ATTENTION, "tokamax", _ATTENTION_BY)
    return kernels.Mask(k_start=first[:, None], is_causal=True)


@contextlib.contextmanager
def _refusals(wanted_by: str, instead: str) -> Iterator[None]:
    """Convert tokamax's error for a missing kernel to a problem of the config."""
    try:
        with jax.numpy_dtype_promotion("standard"):
            yield
    except NotImplementedError as error:
        raise ConfigError(
            f"{wanted_by}: tokamax has no kernel for this: {error} Set {instead}."
        ) from error


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Suppress the log messages about shapes that tokamax has not been tuned for."""

    def is_of_use(record: logging.LogRecord) -> bool:
        return "Autotuning cache miss" not in record.getMessage()

    logger = logging.getLogger("absl")
    logger.addFilter(is_of_use)
    try:
        yield
    finally:
        logger.removeFilter(is_of_use)


def _options(precision: str | None) -> dict[str, Any]:
    """Return options of the products for the devices of the mesh, which need not be those of this
    machine."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform = jax.default_backend() if device is None else device.platform
    return {
        "implementation": _IMPLEMENTATIONS.get(platform, _IMPLEMENTATIONS["tpu"]),
        "bypass_device_check": True,
        "precision": precision,
        "preferred_element_type": jnp.float32,
    }


def _in_tiles(x: Array) -> Array:
    """Pad x with rows of zeros to complete tiles."""
    return jnp.pad(x, ((0, -x.shape[0] % _TILE), (0, 0)))
