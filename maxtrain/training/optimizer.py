"""From the config to one optax transformation: clipping, weight decay, direction, learning rate,
average of weights.

Parameters are known by their paths, such as `layers.0.attention.q.kernel`, and seen as what they are in one
layer: a vector, or a matrix [in, out]. Stacking over layers makes neither a matrix of a vector nor
    one matrix of many.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree

from data_pipeline.errors import ConfigError
from maxtrain.config.schema import OptimizerConfig, ScheduleConfig
from maxtrain.models.registry import logical_axes
from maxtrain.training.schedule import make_schedule

COUPLED = (
    "sgd",
    "momentum",
    "nesterov",
    "adam",
)  # their weight decay is part of the gradient; the others' is not
_RMS = 0.2  # of Muon's updates, as AdamW's have it: https://arxiv.org/abs/2502.16982, section 2.2
_BATCH_AXES = ("layers", "exp")


class Averaged(NamedTuple):
    """The state of an optimizer, and an average of the weights."""

    inner: PyTree
    average: PyTree[Float[Array, "..."]]  # float32, shaped and laid out like the parameters
    count: Int[Array, ""]  # updates in it


def make_optimizer(
    config: OptimizerConfig,
    schedule: ScheduleConfig,
    num_steps: int,
    params: nnx.State,
    factors: PyTree | None = None,
) -> optax.GradientTransformation:
    """The transformation of gradients to updates.

    Args:
        params: the parameters, which may be abstract: paths, logical axes and shapes are read.
        factors: a number for each variable, which multiplies its learning rate but not its decay
            (models.init.learning_rate_factors); a group's own factor multiplies both.

    Raises:
        ConfigError: a pattern that matches nothing, parameters in two groups, pieces of a schedule
            that do not fit.
    """
    groups = _groups(config, params)
    decay = _decay(config, params, groups)
    rates = dict.fromkeys(decay, 1.0) | {
        path: config.groups[name].lr_factor for path, name in groups.items()
    }
    decays = [
        optax.add_decayed_weights(rate, mask=_where(decay, rate))
        for rate in sorted({*decay.values()} - {0.0})
    ]
    parts = [
        optax.masked(optax.scale(rate), _where(rates, rate))
        for rate in sorted({*rates.values()} - {1.0})
    ]
    direction = (
        [_direction(config)] if factors is None else [_direction(config), scale_by_factors(factors)]
    )
    parts = (
        [*decays, *direction, *parts] if config.name in COUPLED else [*direction, *decays, *parts]
    )
    learning_rate = make_schedule(schedule, config.learning_rate, num_steps)
    optimizer = optax.chain(*_clipping(config), *parts, optax.scale_by_learning_rate(learning_rate))
    return optimizer if config.ema_decay is None else _averaged(optimizer, config.ema_decay)


def scale_by_factors(factors: PyTree) -> optax.GradientTransformation:
    """Multiplies the update of each parameter by its factor; `factors` has a number where the
    parameters have a variable."""

    def scale(updates: PyTree, _: PyTree) -> PyTree:
        return jax.tree.map(
            lambda factor, update: jax.tree.map(lambda x: x * factor, update), factors, updates
        )

    return optax.stateless(scale)


def eval_params(state: Any) -> nnx.State:
    """What a training state is judged by: the average of its weights if there is one, else its
    parameters."""
    if not isinstance(state.opt_state, Averaged):
        return state.params
    return jax.tree.map(
        lambda average, p: average.astype(p.dtype), state.opt_state.average, state.params
    )


def apply_updates(params: PyTree, updates: PyTree, key: Array | None = None) -> PyTree:
    """params + updates in the parameters' type.

    With a key, sums in bfloat16 are rounded up or down at random, so that they are right on
    average: what is smaller than half a step of the type is not lost. Leaf number i draws from
        fold_in(key, i): the same bits on every mesh.
    """
    if key is None:
        return optax.apply_updates(params, updates)

    def add(i: int, p: Array, u: Array) -> Array:
        total = p.astype(jnp.float32) + u.astype(jnp.float32)
        return (
            stochastic_round(total, jax.random.fold_in(key, i))
            if p.dtype == jnp.bfloat16
            else total.astype(p.dtype)
        )

    leaves, tree = jax.tree.flatten(params)
    return jax.tree.unflatten(
        tree, [add(i, p, u) for i, (p, u) in enumerate(zip(leaves, jax.tree.leaves(updates)))]
    )


def stochastic_round(x: Float[Array, "..."], key: Array) -> Float[Array, "..."]:
    """float32 to one of the two neighbours in bfloat16, each with the probability that makes the
    mean x."""
    random = jax.random.bits(key, x.shape, jnp.uint16).astype(
        jnp.uint32
    )  # of the 16 bits that bfloat16 has not
    kept = (jax.lax.bitcast_convert_type(x, jnp.uint32) + random) & jnp.uint32(0xFFFF0000)
    return jnp.where(jnp.isfinite(x), jax.lax.bitcast_convert_type(kept, jnp.float32), x).astype(
        jnp.bfloat16
    )


def paths(params: PyTree) -> dict[str, nnx.Variable]:
    """The variables by path."""
    flat, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=_is_variable)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): variable for path, variable in flat
    }


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


def _map(fn: Callable[[str, Any], Any], tree: PyTree) -> PyTree:
    """A tree with fn(path, variable) in place of each variable."""
    named = iter(paths(tree).items())
    return jax.tree.map(lambda _: fn(*next(named)), tree, is_leaf=_is_variable)


def _where(values: Mapping[str, float], value: float) -> Callable[[PyTree], PyTree]:
    """The mask of parameters that have this value."""
    return lambda tree: _map(lambda path, _: values[path] == value, tree)


def _matching(key: str, pattern: str, names: Mapping[str, Any]) -> list[str]:
    found = [path for path in names if re.search(pattern, path)]
    if not found:
        raise ConfigError(
            f"{key}={pattern} matches no parameter. Set it to a part of one of these: {', '.join(names)}."
        )
    return found


def _groups(config: OptimizerConfig, params: PyTree) -> dict[str, str]:
    """The group's name for each path that is in one."""
    groups: dict[str, str] = {}
    for name, group in config.groups.items():
        for path in _matching(f"optimizer.groups.{name}.pattern", group.pattern, paths(params)):
            if path in groups:
                both = f"optimizer.groups.{groups[path]} and optimizer.groups.{name}"
                raise ConfigError(
                    f"{path} is in {both}, by their patterns. Set one of these so that it does not match {path}."
                )
            groups[path] = name
    return groups


def _decay(config: OptimizerConfig, params: PyTree, groups: Mapping[str, str]) -> dict[str, float]:
    """The weight decay of each path: of matrices only, not of norms and biases, unless a group says
    otherwise."""
    decay = {
        path: config.weight_decay if _is_matrix(v.get_metadata("axes")) else 0.0
        for path, v in paths(params).items()
    }
    decay |= {
        path: d
        for path, name in groups.items()
        if (d := config.groups[name].weight_decay) is not None
    }
    off = [
        path
        for pattern in config.no_decay
        for path in _matching("optimizer.no_decay", pattern, decay)
    ]
    return decay | dict.fromkeys(off, 0.0)


def _clipping(config: OptimizerConfig) -> list[optax.GradientTransformation]:
    parts = []
    if config.clip_value is not None:
        parts.append(optax.clip(config.clip_value))
    if config.clip_adaptive is not None:
        parts.append(_each_matrix(optax.adaptive_grad_clip(config.clip_adaptive)))
    if config.clip_norm is not None:
        parts.append(optax.clip_by_global_norm(config.clip_norm))
    return parts


def _direction(config: OptimizerConfig) -> optax.GradientTransformation:
    """What is multiplied by the learning rate."""
    c = config
    adam = optax.scale_by_adam(b1=c.beta1, b2=c.beta2, eps=c.eps)
    match c.name:
        case "adam" | "adamw":
            return adam
        case "momentum" | "nesterov":
            return optax.trace(c.momentum, nesterov=c.name == "nesterov")
        case "lion":
            return optax.scale_by_lion(b1=c.beta1, b2=c.beta2)
        case "adafactor":
            return _each_matrix(
                optax.chain(
                    optax.scale_by_factored_rms(min_dim_size_to_factor=2),
                    optax.clip_by_block_rms(1.0),
                )
            )
        case "muon":
            muon = optax.contrib.scale_by_muon(
                beta=c.momentum, weight_dimension_numbers=_dimension_numbers
            )
            matrices = optax.chain(
                muon, optax.stateless(lambda updates, _: _map(_rescaled, updates))
            )
            return optax.partition(
                {"muon": matrices, "adam": adam}, lambda tree: _map(_label, tree)
            )
    return optax.identity()


def _split(axes: tuple[str | None, ...]) -> tuple[int, int]:
    """Number of dims that are stacked, and the dim at which a matrix's outputs begin; all of them
    for a vector."""
    batch = sum(axis in _BATCH_AXES for axis in axes)
    first = 2 if axes[batch : batch + 2] in (("heads", "head_dim"), ("kv_heads", "head_dim")) else 1
    return batch, batch + first


def _is_matrix(axes: tuple[str | None, ...]) -> bool:
    """Whether there are inputs and outputs; the bias of heads has two dims and is a vector."""
    _, first_output = _split(axes)
    return first_output < len(axes)


def _label(path: str, variable: nnx.Variable) -> str:
    axes = logical_axes(variable)
    return "muon" if _is_matrix(axes) and "vocab" not in axes else "adam"


def _dimension_numbers(tree: PyTree) -> PyTree:
    def of(path: str, variable: Any) -> Any:
        if not _is_variable(variable):
            return variable  # masked
        axes = logical_axes(variable)
        batch, first = _split(axes)
        dims = optax.contrib.MuonDimensionNumbers(
            tuple(range(batch, first)), tuple(range(first, len(axes)))
        )
        return variable.replace(dims)

    return _map(of, tree)


def _rescaled(path: str, variable: nnx.Variable) -> nnx.Variable:
    """An orthogonal matrix, scaled to root mean square _RMS."""
    batch, first = _split(logical_axes(variable))
    shape = variable.shape
    return variable.replace(
        variable[...]
        * (_RMS * math.sqrt(max(math.prod(shape[batch:first]), math.prod(shape[first:]))))
    )


def _each_matrix(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """A transformation that looks at one array, on every layer's vectors and matrices [in, out] by
    themselves.

    Its state is plain arrays by path, stacked over layers, and float32: Adafactor's decay comes so
    near to 1 that averages in bfloat16 would stay as they are after a thousand steps.
    """

    def views(tree: PyTree) -> dict[str, Array]:
        def view(variable: Any) -> Array:
            batch, first = _split(logical_axes(variable))
            sizes = [
                math.prod(part) for part in (variable.shape[:batch], variable.shape[batch:first])
            ]
            outputs = [math.prod(variable.shape[first:])] if variable.ndim > first else []
            return variable[...].astype(jnp.float32).reshape(*sizes, *outputs)

        return {path: view(variable) for path, variable in paths(tree).items()}

    def init(params: PyTree) -> PyTree:
        return {path: jax.vmap(inner.init)(x) for path, x in views(params).items()}

    def update(
        updates: PyTree, state: PyTree, params: PyTree | None = None
    ) -> tuple[PyTree, PyTree]:
        grads, weights = views(updates), views(params)
        out: dict[str, Any] = {
            path: jax.vmap(inner.update)(grads[path], state[path], weights[path]) for path in grads
        }
        made = _map(lambda path, v: v.replace(out[path][0].reshape(v.shape)), updates)
        return made, {path: new for path, (_, new) in out.items()}

    return optax.GradientTransformation(init, update)


def _averaged(inner: optax.GradientTransformation, decay: float) -> optax.GradientTransformation:
    """With an average of the weights after each update, which starts short, so that the first
    weights are soon forgotten."""

    def init(params: PyTree) -> Averaged:
        return Averaged(
            inner.init(params),
            jax.tree.map(lambda p: p.astype(jnp.float32), params),
            jnp.zeros((), jnp.int32),
        )

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None
    ) -> tuple[PyTree, Averaged]:
        updates, new = inner.update(updates, state.inner, params)
        count = state.count.astype(jnp.float32)
        share = 1 - jnp.minimum(decay, (1 + count) / (10 + count))
        after = jax.tree.map(
            lambda p, u: p.astype(jnp.float32) + u.astype(jnp.float32), params, updates
        )
        return updates, Averaged(
            new, optax.incremental_update(after, state.average, share), state.count + 1
        )

    return optax.GradientTransformation(init, update)
