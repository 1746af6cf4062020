"""Sliding windows by layer: `layer_types` of config.json, and the resulting stack of layers. No jax
here."""

import dataclasses
from collections.abc import Sequence

from data_pipeline.base.errors import DataError
from maxtrain.config.schema import ModelConfig
from maxtrain.config.sections.model import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    LayerType,
    layer_period,
    usual_period,
)
from maxtrain.config.words import show
from maxtrain.models.families.family import HfConfig
from maxtrain.models.specs import LayerSpec, StackSpec

AGAIN = "Get the file again from where the model is."


def windowed_stack(config: ModelConfig, narrow: LayerSpec, wide: LayerSpec) -> StackSpec:
    """Return a stack of layers of two alternating kinds.

    Args:
        config: configuration of the model.
        narrow: the layer of the kind `sliding_attention`.
        wide: the layer of the kind `full_attention`.
    """
    layers = {SLIDING_ATTENTION: narrow, FULL_ATTENTION: wide}
    period = tuple(layers[kind] for kind in layer_period(config))
    repeats, left = divmod(config.num_layers, len(period))
    if repeats:
        return StackSpec(period, repeats, rest=period[:left])
    return StackSpec(period[:left], 1)


def with_window(config: ModelConfig, wide: LayerSpec) -> StackSpec:
    """Return a stack of layers whose two kinds differ in the window alone."""
    return windowed_stack(config, dataclasses.replace(wide, window=config.window), wide)


def layer_types(config: ModelConfig) -> list[str]:
    """Return the kind of each layer, as config.json names it."""
    period = layer_period(config)
    return [period[index % len(period)] for index in range(config.num_layers)]


def read_window(
    settings: HfConfig, family: str, window: int | None, usual: Sequence[LayerType] | None = None
) -> dict[str, int | tuple[LayerType, ...] | None]:
    """Read the keys `window` and `layer_types` of a ModelConfig.

    Args:
        settings: settings of config.json.
        family: family of the model.
        window: number of tokens that layers with a window see; None: there is no window.
        usual: the kind of each layer if config.json does not specify it; None: the kinds of the
            family, or without a window `full_attention`.

    Raises:
        DataError: `layer_types` has not one known kind for each layer, or names layers with a
            window although there is none.
    """
    count = settings.number("num_hidden_layers")
    period = usual_period(family)
    kinds = _given_kinds(settings, count)
    if kinds is None:
        kinds = list(usual or _repeated(period, count))
        if window is None and usual is None and family != "gemma3":
            kinds = [FULL_ATTENTION] * count
    # In Gemma 3, layers with a window have rotary positions of their own.
    elif window is None and SLIDING_ATTENTION in kinds and family != "gemma3":
        raise DataError(
            f"{settings.path}: layer_types has layers of the kind 'sliding_attention', but there "
            f"is no sliding window (sliding_window, use_sliding_window). {AGAIN}"
        )
    if SLIDING_ATTENTION not in kinds and family != "gemma3":
        return {"window": None, "layer_types": ()}
    if kinds == _repeated(period, count):
        return {"window": window, "layer_types": ()}
    return {"window": window, "layer_types": _shortest_period(kinds)}


def require_equal_layers(settings: HfConfig, window: int | None) -> None:
    """Raise DataError if `layer_types` has more than one kind, for families of which transformers
    does not read it: the window is in all layers, or in none."""
    count = settings.number("num_hidden_layers")
    kinds = _given_kinds(settings, count)
    kind = FULL_ATTENTION if window is None else SLIDING_ATTENTION
    if kinds is not None and kinds != [kind] * count:
        raise DataError(
            f"{settings.path}: layer_types={show(kinds)} is not supported with "
            f"sliding_window={show(window)}: all {count} layers of this family are of the kind "
            f"{kind!r} then. Choose a model whose layers are."
        )


def _given_kinds(settings: HfConfig, count: int) -> list[LayerType] | None:
    """Return `layer_types` of a config.json; None if it is missing or null.

    Raises:
        DataError: it is not a list of known kinds, one for each layer.
    """
    given = settings.values.get("layer_types")
    if given is None:
        return None
    known = (SLIDING_ATTENTION, FULL_ATTENTION)
    if not isinstance(given, list) or any(kind not in known for kind in given):
        raise DataError(
            f"{settings.path}: layer_types={show(given)} must be a list of "
            f"{' and '.join(map(repr, known))}. Choose a model with such layers."
        )
    if len(given) != count:
        raise DataError(
            f"{settings.path}: layer_types has {len(given):,} entries, and must have one for each "
            f"of num_hidden_layers={count:,}. {AGAIN}"
        )
    return given


def _repeated(period: Sequence[LayerType], count: int) -> list[LayerType]:
    return [period[index % len(period)] for index in range(count)]


def _shortest_period(kinds: Sequence[LayerType]) -> tuple[LayerType, ...]:
    """Return the shortest prefix of which these kinds are a repetition; the last repetition may be
    cut off."""
    for length in range(1, len(kinds)):
        if list(kinds) == _repeated(kinds[:length], len(kinds)):
            return tuple(kinds[:length])
    return tuple(kinds)
