"""Construction of one optax transformation from the config.

It clips, decays weights, finds the direction, applies the learning rate, and averages weights.

Parameters are identified by their paths, such as `layers.0.attention.q.kernel`, and treated by
their shape in one layer: a vector, or a matrix [in, out]. Stacking over layers makes neither a
matrix of a vector nor one matrix of many.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree

from data_pipeline.base.errors import ConfigError
from maxtrain.config.schema import OptimizerConfig, ScheduleConfig
from maxtrain.models.registry import logical_axes
from maxtrain.parallel.host_memory import is_on_host, on_device, where_it_was
from maxtrain.train_step.schedule import make_schedule

# Optimizers whose weight decay is added to the gradient (not decoupled).
COUPLED = ("sgd", "momentum", "nesterov", "adam")
# Root mean square of Muon's updates, to match AdamW's: https://arxiv.org/abs/2502.16982, section
# 2.2.
_RMS = 0.2
_BATCH_AXES = ("layers", "exp")


class AveragedState(NamedTuple):
    """The state of an optimizer, with an exponential moving average of the weights."""

    inner: PyTree
    # The average in float32, shaped and laid out like the parameters.
    average: PyTree[Float[Array, "..."]]
    # Number of updates in the average.
    count: Int[Array, ""]


def make_optimizer(
    config: OptimizerConfig,
    schedule: ScheduleConfig,
    num_steps: int,
    params: nnx.State,
    factors: PyTree | None = None,
    clips: bool = True,
) -> optax.GradientTransformation:
    """Build the transformation of gradients to updates.

    Args:
        params: the parameters, which may be abstract: paths, logical axes and shapes are read.
        factors: a number for each variable, which multiplies its learning rate but not its decay
            (models.init.learning_rate_factors); a group's own factor multiplies both.
        clips: whether it clips gradients; false: they are clipped before (`make_clipping`). Both
            forms have the same state.

    Raises:
        ConfigError: a pattern matches nothing, a parameter is in two groups, or the pieces of a
            schedule do not fit.
    """
    groups = _groups(config, params)
    decay = _decay(config, params, groups)
    rates = dict.fromkeys(decay, 1.0)
    for path, name in groups.items():
        rates[path] = config.groups[name].lr_factor
    decays = [
        optax.add_decayed_weights(rate, mask=_where(decay, rate))
        for rate in sorted(set(decay.values()) - {0.0})
    ]
    scales = [
        optax.masked(optax.scale(rate), _where(rates, rate))
        for rate in sorted(set(rates.values()) - {1.0})
    ]
    before = _clipping(config)
    if not clips:
        # The same number of parts as with clipping, so that the structure of the state is the same.
        before = [optax.identity() for _ in before]
    after = []
    if factors is not None:
        after.append(scale_by_factors(factors))
    if config.name in COUPLED:
        before += decays
    else:
        after += decays
    after += scales
    learning_rate = make_schedule(schedule, config.learning_rate, num_steps)
    # There are always four parts. Those with a state have the same place and name in checkpoints
    # with any clipping and decay, so that a run may resume with other such settings.
    optimizer = optax.chain(
        _stateless_chain(before),
        _direction(config),
        _stateless_chain(after),
        optax.scale_by_learning_rate(learning_rate),
    )
    if config.ema_decay is None:
        return optimizer
    return _averaged(optimizer, config.ema_decay)


def make_clipping(config: OptimizerConfig) -> optax.GradientTransformation:
    """Return the clipping part of `make_optimizer`, which has no state."""
    return _stateless_chain(_clipping(config))


def _stateless_chain(
    parts: Sequence[optax.GradientTransformation],
) -> optax.GradientTransformation:
    """Chain transformations that have no state; there may be none."""
    return optax.chain(optax.identity(), *parts)


def scale_by_factors(factors: PyTree) -> optax.GradientTransformation:
    """Multiply the update of each parameter by its factor.

    Args:
        factors: a tree with a number where the parameters have a variable.
    """

    def scale_one(factor: float, update: PyTree) -> PyTree:
        return jax.tree.map(lambda x: x * factor, update)

    def scale(updates: PyTree, _: PyTree) -> PyTree:
        return jax.tree.map(scale_one, factors, updates)

    return optax.stateless(scale)


def average_or_params(params: PyTree, opt_state: PyTree) -> PyTree:
    """Return the average of the weights in the parameters' types and memory, or the parameters if
    there is no average."""
    if not isinstance(opt_state, AveragedState):
        return params

    def as_parameter(average: Array, parameter: Array) -> Array:
        if average.dtype == parameter.dtype and is_on_host(parameter):
            return average
        return where_it_was(on_device(average).astype(parameter.dtype), parameter)

    return jax.tree.map(as_parameter, opt_state.average, params)


def apply_updates(params: PyTree, updates: PyTree, key: Array | None = None) -> PyTree:
    """Return params + updates in the parameters' type.

    With a key, sums in bfloat16 are rounded stochastically, so that they are right on average and
    small updates are not lost. Leaf number i uses fold_in(key, i), so the bits are the same on
    every mesh.
    """
    if key is None:
        return optax.apply_updates(params, updates)
    leaves, tree = jax.tree.flatten(params)
    added = []
    for i, (parameter, update) in enumerate(zip(leaves, jax.tree.leaves(updates))):
        total = parameter.astype(jnp.float32) + update.astype(jnp.float32)
        if parameter.dtype == jnp.bfloat16:
            added.append(stochastic_round(total, jax.random.fold_in(key, i)))
        else:
            added.append(total.astype(parameter.dtype))
    return jax.tree.unflatten(tree, added)


def stochastic_round(x: Float[Array, "..."], key: Array) -> Float[Array, "..."]:
    """Round float32 to one of the two neighbours in bfloat16, at random, so that the mean is x."""
    # bfloat16 lacks the 16 lower bits of float32. A random 16-bit number is added to these, and
    # then they are cut off.
    random = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    kept = (bits + random) & jnp.uint32(0xFFFF0000)
    rounded = jax.lax.bitcast_convert_type(kept, jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)


def paths(params: PyTree) -> dict[str, nnx.Variable]:
    """Return the variables by path."""
    flat, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=_is_variable)
    named = {}
    for path, variable in flat:
        named[jax.tree_util.keystr(path, simple=True, separator=".")] = variable
    return named


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


def map_variables(fn: Callable[[str, Any], Any], tree: PyTree) -> PyTree:
    """Replace each variable of a tree by fn(path, variable)."""
    named = iter(paths(tree).items())
    return jax.tree.map(lambda _: fn(*next(named)), tree, is_leaf=_is_variable)


def _where(values: Mapping[str, float], value: float) -> Callable[[PyTree], PyTree]:
    """Return the mask of the parameters that have this value."""
    return lambda tree: map_variables(lambda path, _: values[path] == value, tree)


def _matching(key: str, pattern: str, names: Mapping[str, Any]) -> list[str]:
    """Return the paths that a pattern matches. Raise a ConfigError if it matches none."""
    found = [path for path in names if re.search(pattern, path)]
    if not found:
        fix = f"Set it to a part of one of these: {', '.join(names)}"
        raise ConfigError(f"{key}={pattern} matches no parameter. {fix}.")
    return found


def _groups(config: OptimizerConfig, params: PyTree) -> dict[str, str]:
    """Return the group's name for each path that is in a group."""
    groups: dict[str, str] = {}
    for name, group in config.groups.items():
        for path in _matching(f"optimizer.groups.{name}.pattern", group.pattern, paths(params)):
            if path in groups:
                both = f"optimizer.groups.{groups[path]} and optimizer.groups.{name}"
                fix = f"Set one of these so that it does not match {path}"
                raise ConfigError(f"{path} is in {both}, by their patterns. {fix}.")
            groups[path] = name
    return groups


def _decay(config: OptimizerConfig, params: PyTree, groups: Mapping[str, str]) -> dict[str, float]:
    """Return the weight decay of each path: matrices decay, norms and biases do not, unless a group
    says otherwise."""
    decay = {}
    for path, variable in paths(params).items():
        is_matrix = _is_matrix(variable.get_metadata("axes"))
        decay[path] = config.weight_decay if is_matrix else 0.0
    for path, name in groups.items():
        of_group = config.groups[name].weight_decay
        if of_group is not None:
            decay[path] = of_group
    for pattern in config.no_decay:
        for path in _matching("optimizer.no_decay", pattern, decay):
            decay[path] = 0.0
    return decay


def _clipping(config: OptimizerConfig) -> list[optax.GradientTransformation]:
    """Return the clipping transformations of the config."""
    parts = []
    if config.clip_value is not None:
        parts.append(optax.clip(config.clip_value))
    if config.clip_adaptive is not None:
        parts.append(_each_matrix(optax.adaptive_grad_clip(config.clip_adaptive)))
    if config.clip_norm is not None:
        parts.append(optax.clip_by_global_norm(config.clip_norm))
    return parts


def _direction(config: OptimizerConfig) -> optax.GradientTransformation:
    """Return the transformation whose result is multiplied by the learning rate."""
    match config.name:
        case "adam" | "adamw":
            return _adam(config)
        case "momentum" | "nesterov":
            return optax.trace(config.momentum, nesterov=config.name == "nesterov")
        case "lion":
            return optax.scale_by_lion(b1=config.beta1, b2=config.beta2)
        case "adafactor":
            factored = optax.scale_by_factored_rms(min_dim_size_to_factor=2)
            return _each_matrix(optax.chain(factored, optax.clip_by_block_rms(1.0)))
        case "muon":
            return _muon(config)
        case "sgd":
            return optax.identity()
    raise AssertionError(f"optimizer.name={config.name} has no direction")


def _adam(config: OptimizerConfig) -> optax.GradientTransformation:
    """Return Adam's direction."""
    return optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.eps)


def _muon(config: OptimizerConfig) -> optax.GradientTransformation:
    """Return Muon for matrices, and Adam for the rest."""

    def rescale(updates: PyTree, _: PyTree) -> PyTree:
        return map_variables(_rescaled, updates)

    def labels(tree: PyTree) -> PyTree:
        return map_variables(_label, tree)

    muon = optax.contrib.scale_by_muon(
        beta=config.momentum, weight_dimension_numbers=_dimension_numbers
    )
    matrices = optax.chain(muon, optax.stateless(rescale))
    return optax.partition({"muon": matrices, "adam": _adam(config)}, labels)


def _split(axes: tuple[str | None, ...]) -> tuple[int, int]:
    """Return the number of stacked dims, and the dim at which a matrix's outputs begin.

    For a vector, the second is the number of all its dims.
    """
    batch = sum(axis in _BATCH_AXES for axis in axes)
    inputs = 1
    if axes[batch : batch + 2] in (("heads", "head_dim"), ("kv_heads", "head_dim")):
        inputs = 2
    return batch, batch + inputs


def _is_matrix(axes: tuple[str | None, ...]) -> bool:
    """Return whether a parameter has inputs and outputs; the bias of heads has two dims and is a
    vector."""
    _, first_output = _split(axes)
    return first_output < len(axes)


def _label(path: str, variable: nnx.Variable) -> str:
    """Return which part of Muon a parameter belongs to."""
    axes = logical_axes(variable)
    if _is_matrix(axes) and "vocab" not in axes:
        return "muon"
    return "adam"


def _dimension_numbers(tree: PyTree) -> PyTree:
    def of(path: str, variable: Any) -> Any:
        # Masked leaves are no variables.
        if not _is_variable(variable):
            return variable
        axes = logical_axes(variable)
        batch, first = _split(axes)
        inputs = tuple(range(batch, first))
        outputs = tuple(range(first, len(axes)))
        return variable.replace(optax.contrib.MuonDimensionNumbers(inputs, outputs))

    return map_variables(of, tree)


def _rescaled(path: str, variable: nnx.Variable) -> nnx.Variable:
    """Scale an orthogonal matrix to root mean square _RMS."""
    batch, first = _split(logical_axes(variable))
    inputs = math.prod(variable.shape[batch:first])
    outputs = math.prod(variable.shape[first:])
    return variable.replace(variable[...] * (_RMS * math.sqrt(max(inputs, outputs))))


def _each_matrix(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Apply a transformation of one array to every layer's vectors and matrices [in, out].

    Its state has float32 arrays by path, stacked over layers. Adafactor's decay approaches 1, so
    that averages in bfloat16 would stop changing after a thousand steps.
    """

    def views(tree: PyTree) -> dict[str, Array]:
        def view(variable: Any) -> Array:
            batch, first = _split(logical_axes(variable))
            shape = variable.shape
            sizes = [math.prod(shape[:batch]), math.prod(shape[batch:first])]
            if variable.ndim > first:
                sizes.append(math.prod(shape[first:]))
            return variable[...].astype(jnp.float32).reshape(*sizes)

        return {path: view(variable) for path, variable in paths(tree).items()}

    def init(params: PyTree) -> PyTree:
        return {path: jax.vmap(inner.init)(x) for path, x in views(params).items()}

    def update(
        updates: PyTree, state: PyTree, params: PyTree | None = None
    ) -> tuple[PyTree, PyTree]:
        grads = views(updates)
        weights = views(params)
        changes = {}
        new_state = {}
        for path, grad in grads.items():
            made = jax.vmap(inner.update)(grad, state[path], weights[path])
            changes[path], new_state[path] = made

        def replaced(path: str, variable: Any) -> Any:
            return variable.replace(changes[path].reshape(variable.shape))

        return map_variables(replaced, updates), new_state

    return optax.GradientTransformation(init, update)


def _averaged(inner: optax.GradientTransformation, decay: float) -> optax.GradientTransformation:
    """Add an exponential moving average of the weights after each update.

    The decay starts low, so that the first weights are soon forgotten.
    """

    def init(params: PyTree) -> AveragedState:
        average = jax.tree.map(lambda p: p.astype(jnp.float32), params)
        return AveragedState(inner.init(params), average, jnp.zeros((), jnp.int32))

    def updated(parameter: Array, update: Array) -> Array:
        return parameter.astype(jnp.float32) + update.astype(jnp.float32)

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None
    ) -> tuple[PyTree, AveragedState]:
        updates, new = inner.update(updates, state.inner, params)
        count = state.count.astype(jnp.float32)
        share = 1 - jnp.minimum(decay, (1 + count) / (10 + count))
        after = jax.tree.map(updated, params, updates)
        average = optax.incremental_update(after, state.average, share)
        return updates, AveragedState(new, average, state.count + 1)

    return optax.GradientTransformation(init, update)
