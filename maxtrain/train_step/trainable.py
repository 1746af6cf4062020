"""Partition of a model's arrays: those that train, those that are frozen, and those that change
without a gradient.

The step takes gradients of one part of the parameters. Every other user of a model gets the parts
joined.
"""

import re
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array

from data_pipeline.base.errors import ConfigError
from maxtrain.config.schema import TrainConfig
from maxtrain.models.adapt import is_adapter
from maxtrain.models.buffer import Buffer
from maxtrain.models.decoder import Decoder
from maxtrain.models.merged import adapters_off
from maxtrain.models.quantized import is_quantized
from maxtrain.objectives.objective import POLICY, Models
from maxtrain.train_step.optimizer import map_variables, paths


def nothing() -> nnx.State:
    """Return a part without any array."""
    return nnx.State({})


def only_policy() -> dict[str, nnx.State]:
    """Return the frozen part of a policy whose parameters all train."""
    return {POLICY: nothing()}


def frozen_paths(config: TrainConfig, params: nnx.State) -> frozenset[str]:
    """Return the paths of the parameters that the config does not train, such as
    `layers.0.mlp.up.kernel`.

    In a model with adapters, the adapters train, its score or value head, and the parameters that
    `only` names. In a model without adapters, all parameters train unless `only` names some.

    Args:
        config: patterns of trainable and of frozen parameters.
        params: all parameters of the policy; only their paths are read.

    Raises:
        ConfigError: a pattern matches no path, quantised weights would train, or nothing is left to
            train.
    """
    named = paths(params)
    names = list(named)
    adapters = {name for name, variable in named.items() if is_adapter(variable)}
    frozen: set[str] = set()
    if config.only or adapters:
        frozen.update(names)
        frozen -= adapters
        if adapters:
            # Score and value heads are new, like adapters.
            frozen -= {name for name in names if name.startswith(("score.", "value."))}
        frozen -= _matching("train.only", config.only, names)
    frozen |= _matching("train.freeze", config.freeze, names)
    quantized = [name for name in names if is_quantized(named[name]) and name not in frozen]
    if quantized:
        form = named[quantized[0]].get_metadata("stands_for").form
        raise ConfigError(
            f"train.only={list(config.only)} names {quantized[0]}, and weights that are kept as "
            f"{form} do not train. Name other parameters, or set model.lora.base=full."
        )
    if len(frozen) == len(names):
        raise ConfigError(
            f"train.only={list(config.only)} and train.freeze={list(config.freeze)} leave no "
            f"parameter to train. The parameters are {', '.join(names)}. "
            "Name fewer of them in train.freeze, or more in train.only."
        )
    return frozenset(frozen)


def _matching(key: str, patterns: Iterable[str], names: list[str]) -> set[str]:
    """Return the names that one of the patterns matches. Raise a ConfigError for a pattern that
    matches none."""
    matching: set[str] = set()
    for pattern in patterns:
        found = [name for name in names if re.search(pattern, name)]
        if not found:
            raise ConfigError(
                f"{key}: {pattern} is found in the path of no parameter. "
                f"Set it to a part of one of these: {', '.join(names)}."
            )
        matching.update(found)
    return matching


def split_buffers(variables: nnx.State) -> tuple[nnx.State, nnx.State]:
    """Split the variables of a model into parameters and buffers."""
    buffers, params = nnx.split_state(variables, Buffer, ...)
    if not buffers:
        return variables, nothing()
    return params, buffers


def updated(buffers: nnx.State, observed: Mapping[str, Array]) -> nnx.State:
    """Return the buffers after a step, given what their layers observed, by the path of each
    buffer.

    Raises a ValueError if observations and buffers do not correspond.
    """
    named = paths(buffers)
    if named.keys() != observed.keys():
        raise ValueError(
            f"layers observed {sorted(observed)}, but the buffers are {sorted(named)}. "
            "Give `observed` of each layer an entry for each of its buffers, and no other."
        )

    def after(path: str, buffer: nnx.Variable) -> nnx.Variable:
        value = buffer.get_value()
        update = buffer.get_metadata("update")
        stacked = value.ndim - len(buffer.get_metadata("axes"))
        for _ in range(stacked):
            update = jax.vmap(update)
        return buffer.replace(update(value, observed[path]).astype(value.dtype))

    return map_variables(after, buffers)


def split(params: nnx.State, frozen: Container[str]) -> tuple[nnx.State, nnx.State]:
    """Split parameters into the trainable ones, and those whose paths are frozen."""

    def is_frozen(path: tuple[Any, ...], _: Any) -> bool:
        return ".".join(map(str, path)) in frozen

    apart, trainable = nnx.split_state(params, is_frozen, ...)
    if not apart:
        return params, nothing()
    return trainable, apart


def join(*parts: nnx.State) -> nnx.State:
    """Join several parts without common entries into one state."""
    filled = [part for part in parts if part]
    if len(filled) == 1:
        return filled[0]
    return nnx.merge_state(nothing(), *filled)


def models_from(
    graphdefs: Mapping[str, nnx.GraphDef | None],
    frozen: Mapping[str, nnx.State] | None = None,
    buffers: nnx.State | None = None,
) -> Callable[[nnx.State], Models]:
    """Return a function from the trainable parameters to all models of an objective.

    Args:
        graphdefs: the structure of each model; None: it is the policy without its adapters.
        frozen: the frozen parameters of the policy, and all parameters of every other model; None:
            there are none.
        buffers: the policy's buffers; None: it has none.
    """
    if frozen is None:
        frozen = only_policy()
    if buffers is None:
        buffers = nothing()

    def models(trainable: nnx.State) -> Models:
        policy = join(trainable, frozen[POLICY], buffers)
        others = {name: params for name, params in frozen.items() if name != POLICY}
        return merged_models(graphdefs, {POLICY: policy, **others})

    return models


def merged_models(
    graphdefs: Mapping[str, nnx.GraphDef | None], params: Mapping[str, nnx.State]
) -> dict[str, Decoder]:
    """Build all models of an objective.

    Args:
        graphdefs: the structure of each model; None: it is the policy without its adapters.
        params: the variables of each model that has a structure.
    """
    models = {}
    for name, graphdef in graphdefs.items():
        if graphdef is not None:
            models[name] = nnx.merge(graphdef, params[name])
    for name in graphdefs.keys() - models.keys():
        models[name] = adapters_off(models[POLICY])
    return models
