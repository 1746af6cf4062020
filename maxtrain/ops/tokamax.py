"""The one place that knows tokamax: its grouped products for TPUs (v5 and later) and Hopper GPUs,
and its attention for Hopper and Blackwell GPUs, all written in Pallas.

Source: https://pypi.org/project/tokamax, version 0.0.17. Products: implementations `mosaic_tpu`,
which follows Gale et al. 2022, https://arxiv.org/abs/2211.15841, and `mosaic_gpu`. Its second one
for TPUs, and that for Blackwell, make no products of the kind that the gradient of weights is,
except inside their own differentiation.
Attention: implementation `mosaic_gpu`, of which the public function does not take the first key of
each query, so that its inner classes are called.
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
# By the platform of devices.
_IMPLEMENTATIONS = {"tpu": "mosaic_tpu", "gpu": "mosaic_gpu"}
# The one generation of GPUs that has products for the gradient of weights, too.
_HOPPER = (9, 0)
_OF_GPUS = ("bfloat16", "float16")
# Rows come in tiles of so many.
_TILE = 128
_OUTER = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=(0,),
    rhs_group_dimensions=(),
)


def require_products(hardware: Hardware, compute: str) -> None:
    """Raises ConfigError if these devices have no such products of this type, and UsageError if
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
    """Raises UsageError if tokamax is not installed."""
    require_package("tokamax", "tokamax", _ATTENTION_BY)


def grouped_product(
    x: Float[Array, "M I"], w: Float[Array, "E I O"], sizes: Int[Array, " E"], precision: str | None
) -> Float[Array, "M O"]:
    """Each row times the matrix of its group, float32; rows behind the last group are 0.

    Args:
        x, w: I and O are 128 at least.
        sizes: rows of each group; they follow each other.
        precision: as of `jax.lax.dot`.
    """
    tokamax = load_package("tokamax", "tokamax", _WANTED_BY)
    with _quietly(), _refusals(_WANTED_BY, "model.routing.kernel=blocks"):
        out = tokamax.ragged_dot(_in_tiles(x), w, sizes, **_options(precision))
    out = out[: x.shape[0]]
    # What tokamax leaves there may be anything, NaN too, and would spread in sums over rows.
    is_in_a_group = jnp.arange(x.shape[0]) < sizes.sum()
    return jnp.where(is_in_a_group[:, None], out, 0.0)


def grouped_outer_product(
    x: Float[Array, "M I"], g: Float[Array, "M O"], sizes: Int[Array, " E"], precision: str | None
) -> Float[Array, "E I O"]:
    """For each group the sum over its rows, float32; 0 for a group without rows."""
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
    """Causal softmax attention, of each query from its first key on.

    Args:
        q, k, v: bfloat16 or float16; K divides N.
        first: column of the first key that each query sees.

    Returns:
        The output, in the type of q; and of each query the greatest score and the sum of weights,
        float32.

    Raises:
        ConfigError: the kernel has nothing for this device or these shapes.
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
    """The gradients of q, k and v, in their type; each is written by one block of the device, so
    that it has the same bits every time.

    Args:
        out, sums: of `attention_forward`.
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
    """Inside, kernels are written for a GPU that is not here: tokamax asks jax which device it
    would take, and writes another kernel for Hopper than for Blackwell."""
    with jax.default_device(device):
        yield


def _attention_op() -> Any:
    """Hopper's or Blackwell's kernel, whichever jax's first device is."""
    kernels = load_package(_ATTENTION, "tokamax", _ATTENTION_BY)
    return kernels.PallasMosaicGpuFlashAttention()


def _mask(first: Int[Array, "B T"]) -> Any:
    """That of all heads."""
    kernels = load_package(_ATTENTION, "tokamax", _ATTENTION_BY)
    return kernels.Mask(k_start=first[:, None], is_causal=True)


@contextlib.contextmanager
def _refusals(wanted_by: str, instead: str) -> Iterator[None]:
    """What tokamax has no kernel for is said as a problem of the config."""
    try:
        with jax.numpy_dtype_promotion("standard"):
            yield
    except NotImplementedError as error:
        raise ConfigError(
            f"{wanted_by}: tokamax has no kernel for this: {error} Set {instead}."
        ) from error


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without a page for each shape that tokamax has not been tuned for."""

    def is_of_use(record: logging.LogRecord) -> bool:
        return "Autotuning cache miss" not in record.getMessage()

    logger = logging.getLogger("absl")
    logger.addFilter(is_of_use)
    try:
        yield
    finally:
        logger.removeFilter(is_of_use)


def _options(precision: str | None) -> dict[str, Any]:
    """The products are for the devices of the mesh, which need not be those of this machine."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform = jax.default_backend() if device is None else device.platform
    return {
        "implementation": _IMPLEMENTATIONS.get(platform, _IMPLEMENTATIONS["tpu"]),
        "bypass_device_check": True,
        "precision": precision,
        "preferred_element_type": jnp.float32,
    }


def _in_tiles(x: Array) -> Array:
    """x, with rows of zeros up to whole tiles."""
    return jnp.pad(x, ((0, -x.shape[0] % _TILE), (0, 0)))
