"""Everything that training changes, as one pytree of global arrays.

It is made in place on the mesh, or described abstractly. Parameter counts, checkpoints and imported
weights all read the same abstract tree.
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
from maxtrain.train_step.anomaly_state import Watch, new_watch
from maxtrain.train_step.loss_scale import LossScale, initial
from maxtrain.train_step.optimizer import average_or_params, paths
from maxtrain.train_step.trainable import join, nothing, only_policy, split, split_buffers

# Parameters that a summary names.
_MOST_NAMED = 8


class Control(NamedTuple):
    """What decides on steps, and counts them."""

    # Steps of the run that changed nothing: without a target, or rejected.
    skipped: Int[Array, ""]
    # Non-finite steps in a row, up to now, that no lower loss scale would have mended.
    skipped_in_row: Int[Array, ""]
    watch: Watch
    loss_scale: LossScale | None = None


@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a step needs beside the batch, and all that it changes.

    A pytree whose leaves are called what checkpoints call them: `params.layers.0...` are those that
    train, and what is in `control` has no name in front.
    """

    # Finished steps, whether they changed anything or not; int32 of shape [], or its description.
    step: PyTree
    # Parameters of the policy that have a gradient.
    trainable: nnx.State
    # Never updated: the policy's other parameters, and whole models that an objective needs.
    frozen: dict[str, nnx.State]
    # Arrays of the policy that change without a gradient.
    buffers: nnx.State
    opt_state: PyTree
    control: Control


# Of the children of a TrainState, in the order of its leaves. The policy's frozen parameters have
# the same kind of names as those that train.
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
    """All parameters of the policy, those that train and those that don't; no buffers."""
    return join(state.trainable, state.frozen[POLICY])


def policy_variables(state: TrainState) -> nnx.State:
    """All arrays of the policy: its parameters and its buffers."""
    return join(state.trainable, state.frozen[POLICY], state.buffers)


def with_watch(state: TrainState, watch: Watch) -> TrainState:
    """The state with another watch."""
    control = state.control._replace(watch=watch)
    return dataclasses.replace(state, control=control)


def eval_params(state: TrainState) -> nnx.State:
    """What the policy is judged by: the average of its weights, or else its parameters; and all of
    it that does not train."""
    trainable = average_or_params(state.trainable, state.opt_state)
    return join(trainable, state.frozen[POLICY], state.buffers)


def params_of_models(state: TrainState) -> dict[str, nnx.State]:
    """What each model that an objective sees is judged by, by its name."""
    return state.frozen | {POLICY: eval_params(state)}


def saved_part(state: TrainState) -> TrainState:
    """The state without what is never saved with the run: frozen models other than the policy."""
    return dataclasses.replace(state, frozen={POLICY: state.frozen[POLICY]})


def changing_part(state: TrainState) -> TrainState:
    """What each checkpoint holds: all that steps change."""
    return dataclasses.replace(state, frozen=only_policy())


def constant_part(state: TrainState) -> dict[str, nnx.State]:
    """What is saved once per run: the policy's frozen parameters; empty if all train."""
    frozen = state.frozen[POLICY]
    if not frozen:
        return {}
    return {"params": frozen}


def with_frozen(state: TrainState, models: Mapping[str, nnx.State]) -> TrainState:
    """The state with the parameters of these whole models among the frozen ones."""
    return dataclasses.replace(state, frozen=state.frozen | dict(models))


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


def _shard(tree: Any, mesh: Mesh, rules: Rules) -> Any:
    """The tree with a sharding on every abstract leaf.

    A parameter's, and its optimizer state's, is from its logical axes.
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
    """The model's structure, and its parameters and buffers as shapes with shardings.

    Args:
        rules: where they are stored (`stored_rules`).

    Raises:
        ConfigError: a dim that the mesh does not divide, or two of an array that would be split
            over one axis.
    """
    graphdef, params = nnx.split(nnx.eval_shape(lambda: build_model(model, precision)))
    require_blocks_of_experts(params, mesh.shape)
    return graphdef, _shard(params, mesh, rules)


def on_hosts(tree: PyTree, only_layers: bool = False) -> PyTree:
    """An abstract tree whose variables lie in the memory of hosts.

    Counters stay on devices, and so do vectors of layers, such as those of norms: they are small,
    and TPU's compiler can't fetch one of several that lie side by side in 16 bits.

    Args:
        only_layers: those that belong to no stack of layers stay on devices, too.
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
    """An abstract tree with each leaf split over `data` as well, where one of its dims can be."""

    def place(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        assert isinstance(x.sharding, NamedSharding)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=spread(x.sharding, x.shape))

    return jax.tree.map(place, tree)


def zero_summary(abstract: TrainState, zero: int) -> str:
    """What ZeRO splits, in words: bytes on a device, and of these, what can't be divided."""

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
    """Which parameters train, in words, where some are frozen."""

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
    """The state as shapes with shardings, from abstract parameters.

    Args:
        trainable: the parameters that train; the optimizer is for these.
        loss_scale: a resolved one.
        zero: from 1 on the optimizer's state is split over `data` as well, with 3 the parameters,
            too.
        frozen: the policy's other parameters; None: all train.
        buffers: the policy's; None: it has none.
        rules: as of `abstract_model`.
        on_host: the optimizer's arrays lie in the memory of hosts; see `on_hosts`.
        weights_on_host: which of the policy's parameters of layers lie there.
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
    """The sharding of each leaf of an abstract tree."""
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
    """Random parameters, buffers and a fresh optimizer, each array made where it lives.

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
    """All of the policy's parameters and buffers, as they are, and a fresh optimizer.

    Arrays of the variables are those of the state: a program that copies them would bring to
    devices what lies on hosts.
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
