"""Everything that training changes, as one pytree of global arrays.

The state is created in place on the mesh, or described abstractly. Parameter counts, checkpoints
and imported weights all read the same abstract tree.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Int, PyTree

from maxtrain.config.schema import InitConfig, LossScaleConfig, ModelConfig, PrecisionConfig
from maxtrain.models.quantized import (
    axes_on,
    count_weights,
    is_quantized,
    require_blocks_of_experts,
)
from maxtrain.models.registry import build_model, logical_axes
from maxtrain.objectives.objective import POLICY
from maxtrain.parallel.host_memory import described_on_host
from maxtrain.parallel.sharding import RULES, Rules, named_sharding, spread
from maxtrain.train_step.anomaly_state import AnomalyState, new_watch
from maxtrain.train_step.loss_scale import LossScale, initial
from maxtrain.train_step.optimizer import average_or_params, paths
from maxtrain.train_step.trainable import join, nothing, only_policy, split, split_buffers

# Most parameters that a summary names.
_MOST_NAMED = 8


class Control(NamedTuple):
    """Counters of steps, and the state of the checks that decide whether a step is applied."""

    # Steps of the run that changed nothing: without a target, or rejected.
    skipped: Int[Array, ""]
    # Consecutive non-finite steps up to now that a lower loss scale would not have made finite.
    skipped_in_row: Int[Array, ""]
    watch: AnomalyState
    loss_scale: LossScale | None = None


@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a step needs beside the batch, and all that it changes.

    A pytree whose leaf names are those of checkpoints: trainable parameters are
    `params.layers.0...`, and leaves of `control` have no prefix.
    """

    # Finished steps, whether they changed anything or not; int32 of shape [], or abstract.
    step: PyTree
    # Trainable parameters of the policy.
    trainable: nnx.State
    # Parameters that are never updated: the policy's others, and whole models that an objective
    # needs.
    frozen: dict[str, nnx.State]
    # Arrays of the policy that change without a gradient.
    buffers: nnx.State
    opt_state: PyTree
    control: Control


# Keys of the children of a TrainState, in the order of its leaves. The policy's frozen parameters
# have the same prefix as its trainable ones.
_KEYS = tuple(
    jax.tree_util.GetAttrKey(name)
    for name in (
        "params",
        "opt_state",
        "step",
        "skipped",
        "skipped_in_row",
        "watch",
        "loss_scale",
        "buffers",
        "params",
        "frozen",
    )
)


def _children(state: TrainState) -> tuple[tuple[Any, ...], None]:
    control = state.control
    others = {name: params for name, params in state.frozen.items() if name != POLICY}
    children = (
        state.trainable,
        state.opt_state,
        state.step,
        control.skipped,
        control.skipped_in_row,
        control.watch,
        control.loss_scale,
        state.buffers,
        state.frozen[POLICY],
        others,
    )
    return children, None


def _children_with_keys(state: TrainState) -> tuple[tuple[tuple[Any, Any], ...], None]:
    children, _ = _children(state)
    return tuple(zip(_KEYS, children, strict=True)), None


def _from_children(_: None, children: Iterable[Any]) -> TrainState:
    trainable, opt_state, step, skipped, in_row, watch, loss_scale, buffers, *frozen = children
    of_policy, others = frozen
    control = Control(skipped, in_row, watch, loss_scale)
    return TrainState(step, trainable, {POLICY: of_policy, **others}, buffers, opt_state, control)


jax.tree_util.register_pytree_with_keys(TrainState, _children_with_keys, _from_children, _children)


def policy_params(state: TrainState) -> nnx.State:
    """Return all parameters of the policy, trainable and frozen; no buffers."""
    return join(state.trainable, state.frozen[POLICY])


def policy_variables(state: TrainState) -> nnx.State:
    """Return all arrays of the policy: its parameters and its buffers."""
    return join(state.trainable, state.frozen[POLICY], state.buffers)


def with_watch(state: TrainState, watch: AnomalyState) -> TrainState:
    """Return the state with another watch."""
    control = state.control._replace(watch=watch)
    return dataclasses.replace(state, control=control)


def eval_params(state: TrainState) -> nnx.State:
    """Return the weights that the policy is evaluated with: the average of the trainable parameters
    if there is one, else themselves; with frozen parameters and buffers."""
    trainable = average_or_params(state.trainable, state.opt_state)
    return join(trainable, state.frozen[POLICY], state.buffers)


def params_of_models(state: TrainState) -> dict[str, nnx.State]:
    """Return the weights that each model of the objective is evaluated with, by its name."""
    return state.frozen | {POLICY: eval_params(state)}


def saved_part(state: TrainState) -> TrainState:
    """Return the state without the frozen models other than the policy, which are never saved with
    the run."""
    return dataclasses.replace(state, frozen={POLICY: state.frozen[POLICY]})


def changing_part(state: TrainState) -> TrainState:
    """Return the part that steps change, which each checkpoint holds."""
    return dataclasses.replace(state, frozen=only_policy())


def constant_part(state: TrainState) -> dict[str, nnx.State]:
    """Return the part that is saved once per run: the policy's frozen parameters; empty if all
    train."""
    frozen = state.frozen[POLICY]
    if not frozen:
        return {}
    return {"params": frozen}


def with_frozen(state: TrainState, models: Mapping[str, nnx.State]) -> TrainState:
    """Return the state with the parameters of these models added to the frozen ones."""
    return dataclasses.replace(state, frozen=state.frozen | dict(models))


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


def _shard(tree: Any, mesh: Mesh, rules: Rules) -> Any:
    """Add a sharding to every abstract leaf of a tree.

    Parameters and their optimizer state are sharded by their logical axes.
    """

    def place(path: Any, x: Any) -> Any:
        if not _is_variable(x):
            whole = named_sharding(mesh, (None,) * x.ndim)
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole)
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        value = x.get_value()
        axes = logical_axes(x)
        if is_quantized(x):
            own = axes_on(x, mesh.shape, rules)
            axes = axes[: len(axes) - len(own)] + own
        sharding = named_sharding(mesh, axes, value.shape, name, rules)
        return x.replace(jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding))

    return jax.tree_util.tree_map_with_path(place, tree, is_leaf=_is_variable)


def abstract_model(
    model: ModelConfig, precision: PrecisionConfig, mesh: Mesh, rules: Rules = RULES
) -> tuple[nnx.GraphDef, nnx.State]:
    """Return the model's structure, and its parameters and buffers as abstract arrays with
    shardings.

    Args:
        rules: sharding rules of stored parameters (`stored_rules`).

    Raises:
        ConfigError: the mesh does not divide a dim, or two dims of an array would be split over one
            axis.
    """
    graphdef, params = nnx.split(nnx.eval_shape(lambda: build_model(model, precision)))
    require_blocks_of_experts(params, mesh.shape)
    return graphdef, _shard(params, mesh, rules)


def on_hosts(tree: PyTree, only_layers: bool = False) -> PyTree:
    """Move the variables of an abstract tree to host memory.

    Counters stay on devices, and so do vectors of layers, such as those of norms: they are small,
    and the TPU compiler cannot fetch one of several packed 16-bit vectors.

    Args:
        only_layers: whether variables that belong to no stack of layers stay on devices as well.
    """

    def place(leaf: Any) -> Any:
        if not _is_variable(leaf):
            return leaf
        is_stacked = logical_axes(leaf)[:1] == ("layers",)
        is_vector_of_layers = is_stacked and leaf.ndim == 2
        if is_vector_of_layers or (only_layers and not is_stacked):
            return leaf
        return leaf.replace(described_on_host(leaf.get_value()))

    return jax.tree.map(place, tree, is_leaf=_is_variable)


def spread_tree(tree: PyTree) -> PyTree:
    """Shard each leaf of an abstract tree over `data` as well, if one of its dims allows it."""

    def place(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        assert isinstance(x.sharding, NamedSharding)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=spread(x.sharding, x.shape))

    return jax.tree.map(place, tree)


def zero_summary(abstract: TrainState, zero: int) -> str:
    """Describe what ZeRO shards: bytes on a device, and the bytes of these that cannot be
    divided."""

    def megabytes(leaves: list[Any]) -> float:
        sizes = [math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves]
        return sum(sizes) / 1e6

    def is_whole(leaf: Any) -> bool:
        return "data" not in jax.tree.leaves(tuple(leaf.sharding.spec))

    divided: dict[str, Any] = {"optimizer state": abstract.opt_state}
    if zero == 3:
        divided["parameters"] = policy_params(abstract)
    parts = []
    for name, tree in divided.items():
        leaves = jax.tree.leaves(tree)
        whole = [leaf for leaf in leaves if is_whole(leaf)]
        size = f"{megabytes(leaves):,.3f} MB a device"
        parts.append(f"{name} {size}, {megabytes(whole):,.3f} of it not divided")
    return f"zero {zero}: {', '.join(parts)}"


def trained_summary(abstract: TrainState) -> str:
    """Describe which parameters train, if some are frozen."""

    names = []
    for path, variable in paths(abstract.trainable).items():
        axes = logical_axes(variable)
        name = path
        if axes[0] == "layers":
            name = f"{path} (of {variable.get_value().shape[0]} layers)"
        names.append(name)
    listed = ", ".join(names[:_MOST_NAMED])
    if len(names) > _MOST_NAMED:
        listed += f" and {len(names) - _MOST_NAMED:,} more"
    trained = count_weights(abstract.trainable)
    total = count_weights(policy_params(abstract))
    return f"trains {trained:,} of {total:,} parameters: {listed}; the others are frozen"


def _init(
    trainable: nnx.State,
    frozen: nnx.State,
    buffers: nnx.State,
    optimizer: optax.GradientTransformation,
    loss_scale: LossScaleConfig | None,
) -> TrainState:
    control = Control(
        skipped=jnp.zeros((), jnp.int32),
        skipped_in_row=jnp.zeros((), jnp.int32),
        watch=new_watch(),
        loss_scale=initial(loss_scale),
    )
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        trainable=trainable,
        frozen={POLICY: frozen},
        buffers=buffers,
        opt_state=optimizer.init(trainable),
        control=control,
    )


def abstract_state(
    trainable: nnx.State,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    loss_scale: LossScaleConfig | None = None,
    zero: int = 0,
    frozen: nnx.State | None = None,
    buffers: nnx.State | None = None,
    rules: Rules = RULES,
    on_host: bool = False,
    weights_on_host: Literal["none", "frozen", "all"] = "none",
) -> TrainState:
    """Return the state as abstract arrays with shardings, from abstract parameters.

    Args:
        trainable: the trainable parameters, which the optimizer is for.
        loss_scale: a resolved config.
        zero: ZeRO stage. From 1 on, the optimizer's state is sharded over `data`; with 3, also the
            parameters.
        frozen: the policy's other parameters; None: all train.
        buffers: the policy's buffers; None: it has none.
        rules: as for `abstract_model`.
        on_host: whether the optimizer's arrays are in host memory; see `on_hosts`.
        weights_on_host: which of the policy's layer parameters are in host memory.
    """
    if frozen is None:
        frozen = nothing()
    if buffers is None:
        buffers = nothing()

    def init(trainable: nnx.State, frozen: nnx.State, buffers: nnx.State) -> TrainState:
        return _init(trainable, frozen, buffers, optimizer, loss_scale)

    shapes = jax.eval_shape(init, trainable, frozen, buffers)
    state: TrainState = _shard(shapes, mesh, rules)
    if zero >= 1:
        state = dataclasses.replace(state, opt_state=spread_tree(state.opt_state))
    if zero == 3:
        state = dataclasses.replace(
            state,
            trainable=spread_tree(state.trainable),
            frozen={POLICY: spread_tree(state.frozen[POLICY])},
        )
    if on_host:
        state = dataclasses.replace(state, opt_state=on_hosts(state.opt_state))
    if weights_on_host != "none":
        frozen = on_hosts(state.frozen[POLICY], only_layers=True)
        state = dataclasses.replace(state, frozen={POLICY: frozen})
    if weights_on_host == "all":
        state = dataclasses.replace(state, trainable=on_hosts(state.trainable, only_layers=True))
    return state


def shardings(tree: PyTree) -> PyTree:
    """Return the sharding of each leaf of an abstract tree."""
    return jax.tree.map(lambda x: x.sharding, tree)


def create_state(
    abstract: TrainState,
    model: ModelConfig,
    precision: PrecisionConfig,
    optimizer: optax.GradientTransformation,
    seed: int,
    loss_scale: LossScaleConfig | None = None,
    init: InitConfig | None = None,
) -> TrainState:
    """Create random parameters, buffers and a fresh optimizer state, each array in place.

    The bits are the same on every mesh.
    """

    frozen = paths(abstract.frozen[POLICY])

    def create(key: Array) -> TrainState:
        params, buffers = split_buffers(nnx.state(build_model(model, precision, key, init)))
        return _init(*split(params, frozen), buffers, optimizer, loss_scale)

    return jax.jit(create, out_shardings=shardings(abstract))(jax.random.key(seed))


def state_from_variables(
    abstract: TrainState,
    variables: nnx.State,
    optimizer: optax.GradientTransformation,
    loss_scale: LossScaleConfig | None = None,
) -> TrainState:
    """Build a state from all of the policy's parameters and buffers, with a fresh optimizer state.

    The state uses the given arrays themselves. A program that copied them would move arrays from
    hosts to devices.
    """
    params, buffers = split_buffers(variables)
    trainable, frozen = split(params, paths(abstract.frozen[POLICY]))

    def without_params(state: TrainState) -> TrainState:
        return dataclasses.replace(
            state, trainable=nothing(), frozen=only_policy(), buffers=nothing()
        )

    def create(trainable: nnx.State) -> TrainState:
        return without_params(_init(trainable, nothing(), nothing(), optimizer, loss_scale))

    program = jax.jit(create, out_shardings=shardings(without_params(abstract)))
    placed = shardings((abstract.trainable, abstract.frozen[POLICY], abstract.buffers))
    trainable, frozen, buffers = jax.device_put((trainable, frozen, buffers), placed)
    return dataclasses.replace(
        program(trainable), trainable=trainable, frozen={POLICY: frozen}, buffers=buffers
    )
