"""The one place that knows tokamax: its grouped products for TPUs (v5 and later), written in
Pallas.

Source: https://pypi.org/project/tokamax, version 0.0.17, implementation `mosaic_tpu`, which follows
Gale et al. 2022, https://arxiv.org/abs/2211.15841. Its second one for TPUs makes no products of the
kind that the gradient of weights is, except inside its own differentiation.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from data_pipeline.errors import ConfigError
from data_pipeline.extras import load_package, require_package

_WANTED_BY = "model.routing.kernel=tokamax"
_IMPLEMENTATION = "mosaic_tpu"
# Rows come in tiles of so many.
_TILE = 128
_OUTER = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=(0,),
    rhs_group_dimensions=(),
)


def require_tokamax(platform: str) -> None:
    """Raises ConfigError if devices of this platform have no such products, and UsageError if
    tokamax is not installed."""
    if platform != "tpu":
        raise ConfigError(
            f"{_WANTED_BY} is for TPUs only, and the devices here are of platform {platform}. "
            "Set model.routing.kernel=blocks."
        )
    require_package("tokamax", "tokamax", _WANTED_BY)


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
    with jax.numpy_dtype_promotion("standard"):
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
    with jax.numpy_dtype_promotion("standard"):
        return tokamax.ragged_dot_general(_in_tiles(x), _in_tiles(g), sizes, _OUTER, **options)


def _options(precision: str | None) -> dict[str, Any]:
    """The products are for the devices of the mesh, which need not be those of this machine."""
    return {
        "implementation": _IMPLEMENTATION,
        "bypass_device_check": True,
        "precision": precision,
        "preferred_element_type": jnp.float32,
    }


def _in_tiles(x: Array) -> Array:
    """x, with rows of zeros up to whole tiles."""
    return jnp.pad(x, ((0, -x.shape[0] % _TILE), (0, 0)))
