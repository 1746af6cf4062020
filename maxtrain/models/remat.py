"""Activation checkpointing: the intermediate results that are stored for the backward pass, and
those that are recomputed (`model.remat`).

    none           everything is stored
    dots           results of all matrix products
    dots_no_batch  results of products with weights, not those of attention's scores
    named          what `model.kept` names, on the device or in the memory of its host
    full           the input of each layer only

All of these are stored in the type of activations; the results that attention stores itself, such
as the scores under dots, stay float32.
"""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import DTypeLike

from maxtrain.config.schema import RematNamesConfig
from maxtrain.ops.dot import PRODUCT

Policy = Callable[..., Any]
_POLICIES = jax.checkpoint_policies


def _is_product_of_attention(primitive: Any, *arrays: Any, **options: Any) -> bool:
    """Policy that stores the products of activations with each other, which are those with batch
    dims."""
    if _POLICIES.checkpoint_dots_with_no_batch_dims(primitive, *arrays, **options):
        return False
    return _POLICIES.checkpoint_dots(primitive, *arrays, **options)


_POLICY: dict[str, Policy | None] = {
    "full": None,
    "dots": _POLICIES.checkpoint_dots,
    "dots_no_batch": _POLICIES.checkpoint_dots_with_no_batch_dims,
}
# Products accumulate in float32. Where activations have fewer bits, the rounded results are kept.
_ROUNDED = _POLICIES.save_only_these_names(PRODUCT)
_POLICY_OF_ROUNDED: dict[str, Policy | None] = {
    "full": None,
    "dots": _POLICIES.save_from_both_policies(_ROUNDED, _is_product_of_attention),
    "dots_no_batch": _ROUNDED,
}


def rematerialized[**P, R](
    layer: Callable[P, R], remat: str, kept: RematNamesConfig, dtype: DTypeLike
) -> Callable[P, R]:
    """Return the layer with a backward pass that recomputes the results that are not stored.

    Args:
        layer: a function of arrays.
        remat: a name of the table above.
        kept: the names that are stored if `remat` is `named`.
        dtype: type of activations.
    """
    if remat == "none":
        return layer
    return jax.checkpoint(layer, policy=_policy(remat, kept, dtype))


def _policy(remat: str, kept: RematNamesConfig, dtype: DTypeLike) -> Policy | None:
    if remat == "named":
        return _POLICIES.save_and_offload_only_these_names(
            names_which_can_be_saved=list(kept.on_device),
            names_which_can_be_offloaded=list(kept.on_host),
            offload_src="device",
            offload_dst="pinned_host",
        )
    if dtype == "float32":
        return _POLICY[remat]
    return _POLICY_OF_ROUNDED[remat]
