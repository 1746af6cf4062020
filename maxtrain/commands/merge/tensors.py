"""One tensor of several models, merged as a recipe says."""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from data_pipeline.base.errors import DataError, UserError
from maxtrain.commands.merge import methods
from maxtrain.commands.merge.recipe import OF_DIFFERENCES, MergeRecipe, MergeSource, rescale_of

_SPARSIFY: dict[str, methods.Sparsify] = {
    "ties": "magnitude",
    "dare_linear": "random",
    "dare_ties": "random",
    "breadcrumbs": "outliers",
    "breadcrumbs_ties": "outliers",
    "della_linear": "della",
    "della": "della",
}
_BY_CONSENSUS = ("ties", "dare_ties", "breadcrumbs_ties", "della")


def merged(
    recipe: MergeRecipe, tensor: str, arrays: Mapping[str, np.ndarray], num_layers: int
) -> np.ndarray:
    """The tensor of the merged model, float32.

    Args:
        recipe: how.
        tensor: its name.
        arrays: of each model, by its place; float32, of one shape.
        num_layers: of the model.

    Raises:
        ConfigError: a parameter has no value.
        DataError: the method can't be applied to these numbers.
    """
    try:
        result = _merged(recipe, tensor, arrays, num_layers)
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise DataError(f"{tensor}: {error}") from error
    if not np.isfinite(result).all():
        raise DataError(
            f"{tensor}: merging gives NaN or infinity. Look at the weights and parameters of the "
            "recipe."
        )
    return result


def _merged(
    recipe: MergeRecipe, tensor: str, arrays: Mapping[str, np.ndarray], num_layers: int
) -> np.ndarray:
    def value(name: str, source: MergeSource | None = None) -> Any:
        return recipe.value(name, tensor, num_layers, source)

    base = None
    if recipe.base is not None:
        base = arrays[recipe.base]
    others = [source for source in recipe.models if source.place != recipe.base]
    own = [arrays[source.place] for source in others]
    match recipe.method:
        case "linear":
            weights = [value("weight", source) for source in others]
            return methods.linear(own, weights, value("normalize"))
        case "soup":
            return methods.linear(own, [1.0] * len(own))
        case "ema":
            return methods.moving_average(own, value("decay"))
        case "slerp":
            assert base is not None
            return methods.slerp(base, own[0], value("t"))
        case "nuslerp":
            weights = [value("weight", source) for source in others]
            flatten = value("nuslerp_flatten")
            row_wise = value("nuslerp_row_wise")
            return methods.nuslerp(own[0], own[1], weights, base, flatten, row_wise)
        case "model_stock":
            assert base is not None
            return methods.model_stock(base, own, value("filter_wise"))
    assert recipe.method in OF_DIFFERENCES
    assert base is not None
    return _with_differences(recipe, tensor, base, others, arrays, num_layers)


def _with_differences(
    recipe: MergeRecipe,
    tensor: str,
    base: np.ndarray,
    others: list[MergeSource],
    arrays: Mapping[str, np.ndarray],
    num_layers: int,
) -> np.ndarray:
    def value(name: str, source: MergeSource | None = None) -> Any:
        return recipe.value(name, tensor, num_layers, source)

    how = _SPARSIFY.get(recipe.method, "none")
    deltas = []
    for number, source in enumerate(others):
        delta = arrays[source.place] - base
        if how != "none":
            more = {}
            if how == "outliers":
                more["gamma"] = value("gamma", source)
            if how == "della":
                more["epsilon"] = value("epsilon", source)
            delta = methods.sparse(
                delta,
                how,
                value("density", source),
                rescale=rescale_of(value("rescale")),
                draw=draw_of(recipe.seed, tensor, number),
                **more,
            )
        deltas.append(delta)
    return methods.task_vectors(
        base,
        deltas,
        [value("weight", source) for source in others],
        consensus=recipe.method in _BY_CONSENSUS,
        normalize=value("normalize"),
        factor=value("lambda"),
    )


def draw_of(seed: int, tensor: str, number: int) -> np.random.Generator:
    """Random numbers for one tensor of the model of this number beside the base, whatever is merged
    before it and wherever the model lies."""
    text = f"{seed}/{tensor}/{number}".encode()
    key = int.from_bytes(hashlib.sha256(text).digest()[:16], "little")
    return np.random.Generator(np.random.Philox(key=key))
