"""One optimizer step as a pure, donated, jitted function of (state, batch).

What each term of the loss is divided by is counted over all micro-batches before the first
gradient, so that each token weighs the same however the batch is split. Whether the update is
applied is decided on the device: a step with a non-finite loss, gradient or result, without any
target, or with an anomaly that says so (see `watch.py`), leaves parameters, optimizer state and
schedule bit for bit as they were. That the result is finite costs one more pass over parameters and
optimizer state.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, PyTree

from maxtrain.config.schema import AnomalyConfig, LossScaleConfig
from maxtrain.objectives.objective import POLICY, Batch, Objective, Result, Scales
from maxtrain.ops.finite import finite_leaves
from maxtrain.parallel.hardware import compiler_options
from maxtrain.parallel.sharding import constrain
from maxtrain.training.loss_scale import after_step
from maxtrain.training.optimizer import apply_updates
from maxtrain.training.state import TrainState, shardings, spread_tree
from maxtrain.training.watch import judge

Metrics = dict[str, Array]
WARNING = AnomalyConfig()
_UPDATE = 2**32 - 1  # no row has this number


def gradients(
    graphdef: nnx.GraphDef,
    params: nnx.State,
    batch: Batch,
    objective: Objective,
    scales: Scales,
    accumulation: int,
    dtype: str = "float32",
    places: PyTree | None = None,
) -> tuple[Result, nnx.State]:
    """The loss of a batch of [B, T] with what is recorded, and the loss's float32 gradient.

    `scales` are the objective's, for the whole batch. `accumulation`, the number of micro-batches,
    divides B; row r goes to micro-batch r mod accumulation, so that no row leaves its device. Their
    gradients are summed up in `dtype`. `places` are shardings of gradients, while they are summed
    up and after; None: those that XLA finds best.
    """

    def loss(params: nnx.State, micro: Batch) -> tuple[Array, Result]:
        result = objective.forward({POLICY: nnx.merge(graphdef, params)}, micro, scales)
        return result.loss, result

    def one(micro: Batch) -> tuple[Result, nnx.State]:
        (_, result), grads = jax.value_and_grad(loss, has_aux=True)(params, micro)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        return result, grads if places is None else jax.lax.with_sharding_constraint(grads, places)

    if accumulation == 1:
        return one(batch)

    def split(x: Array) -> Array:
        x = x.reshape(x.shape[0] // accumulation, accumulation, *x.shape[1:]).swapaxes(0, 1)
        return constrain(x, None, "activation_batch", *(None,) * (x.ndim - 2))

    def add(total: Array, part: Array) -> Array:
        return (total + part.astype(jnp.float32)).astype(total.dtype)

    def step(
        carry: tuple[Result, nnx.State], micro: Batch
    ) -> tuple[tuple[Result, nnx.State], None]:
        return jax.tree.map(add, carry, one(micro)), None

    micros = jax.tree.map(split, batch)
    like = jax.eval_shape(one, jax.tree.map(lambda x: x[0], micros))[0]
    start = (
        jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like),
        jax.tree.map(lambda p: jnp.zeros(p.shape, dtype), params),
    )
    result, grads = jax.lax.scan(step, start, micros)[0]
    return result, jax.tree.map(lambda g: g.astype(jnp.float32), grads)


def make_train_step(
    abstract: TrainState,
    graphdef: nnx.GraphDef,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    accumulation: int,
    *,
    seed: int = 0,
    accumulate: str = "float32",
    loss_scale: LossScaleConfig | None = None,
    stochastic_rounding: bool = False,
    zero: int = 0,
    anomaly: AnomalyConfig = WARNING,
) -> jax.stages.Wrapped:
    """(state, batch) -> (state, metrics), jitted: the state is donated, and comes back laid out
    exactly as it went in.

    Args:
        accumulation, accumulate: number of micro-batches, and the type in which their gradients are
        summed up.
        seed: of what is random. Row r of the batch of step s draws from fold_in(fold_in(seed, s),
            r), however it is split.
        loss_scale: a resolved one, as the state was made with.
        stochastic_rounding, zero: as in the config; with zero from 2 on the gradients are split
        over `data` as well.
        anomaly: what is not well, and what is done about it.

    The metrics are loss (nats per target), objective (what was minimised), the mean of each quantity
    that the objective records, source_nll and source_targets (sums by source) if there are such, targets, empty_rows
    (without a target), grad_norm (before clipping), learning_rate, skipped (steps of the run that
    changed nothing), skipped_in_row (of these, non-finite ones up to now without a good one
    between), bad_leaf (index of the first non-finite gradient, or -1), bad_update (of a finite
    gradient: index of the first array of parameters, then optimizer state, that would not be
        finite, or -1), loss_scale if there is one, weight_norm (before the update) if something
        depends on it, and what `watch.judge` says.
    """
    places = shardings(spread_tree(abstract.params)) if zero >= 2 else None

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        scaled = jnp.float32(1) if state.loss_scale is None else state.loss_scale.scale
        batch = batch | {"keys": row_keys(seed, state.step, batch["targets"].shape[0])}
        result, grads = gradients(
            graphdef,
            state.params,
            batch,
            objective,
            objective.scales(batch, scaled),
            accumulation,
            accumulate,
            places,
        )
        if state.loss_scale is not None:
            grads = jax.tree.map(lambda g: g / scaled, grads)
        squares, nll, sources = (
            _squares(grads),
            result.sums["nll"],
            result.sums.pop("sources", None),
        )
        measured = {"loss": nll.mean(), "grad_norm": jnp.sqrt(squares.sum())}
        if anomaly.weight_drift != "off":
            measured["weight_norm"] = jnp.sqrt(_squares(state.params).sum())
        finite = jnp.isfinite(jnp.stack([result.loss, *measured.values()])).all()
        counts = ~(
            nll.weight <= 0
        )  # a number of targets that is NaN is no batch without targets: it is a bad one
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        key = (
            jax.random.fold_in(step_key(seed, state.step), _UPDATE) if stochastic_rounding else None
        )
        params = apply_updates(state.params, updates, key)
        before = (state.params, state.opt_state)
        # Adam's moments of bfloat16 parameters come out in float32.
        after = jax.tree.map(lambda new, old: new.astype(old.dtype), (params, opt_state), before)
        written = finite_leaves(after)
        sound = finite & written.all()

        next_scale, lost = after_step(state.loss_scale, finite, jnp.isfinite(nll.total), loss_scale)
        lost |= finite & ~sound  # no lower loss scale would mend what is not the gradient's fault
        verdict = judge(state.watch, anomaly, measured, sound & counts, lost & counts)
        apply = sound & counts & ~verdict.reject & ~verdict.halt

        def keep(new: Array, old: Array) -> Array:
            return jnp.where(apply, new, old)

        in_row = jnp.where(apply, 0, state.skipped_in_row + (lost & counts))
        counters = (state.step + 1, state.skipped + ~apply, in_row, verdict.watch, next_scale)
        next_state = TrainState(
            *jax.tree.map(keep, after, before),
            *jax.tree.map(lambda new, old: jnp.where(verdict.halt, old, new), counters, state[2:]),
        )
        next_state = next_state._replace(watch=next_state.watch._replace(halted=verdict.halt))
        recorded = [quantity.name for quantity in objective.recorded]
        metrics = {name: result.sums[name].mean() for name in recorded} | {
            "objective": result.loss / scaled,
            "targets": nll.weight,
            "empty_rows": (batch["loss_mask"] <= 0).all(axis=1).sum(),
            "bad_leaf": _first_false(jnp.isfinite(squares)),
            "bad_update": jnp.where(finite, _first_false(written), -1),
            "learning_rate": schedule(state.step - state.skipped),
            "skipped": next_state.skipped,
            "skipped_in_row": next_state.skipped_in_row,
        }
        metrics |= measured | verdict.metrics
        metrics |= (
            {}
            if sources is None
            else {"source_nll": sources.total, "source_targets": sources.weight}
        )
        metrics |= {} if state.loss_scale is None else {"loss_scale": scaled}
        return next_state, metrics

    (device, *_) = jax.tree.leaves(shardings(abstract))[
        0
    ].device_set  # perhaps only described, and not of this machine
    options = compiler_options(device.platform)
    return jax.jit(
        step, donate_argnums=0, out_shardings=(shardings(abstract), None), compiler_options=options
    )


def _first_false(found: Array) -> Array:
    """The index of the first element that is false, or -1."""
    return jnp.where(found.all(), -1, jnp.argmin(found))


def _squares(tree: nnx.State) -> Array:
    """The sum of squares of each leaf."""
    return jnp.stack([(x.astype(jnp.float32) ** 2).sum() for x in jax.tree.leaves(tree)])


def row_keys(seed: int, step: Array, rows: int) -> Array:
    """A key for each row of the batch of a step, [B]."""
    key = step_key(seed, step)
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(rows, dtype=jnp.uint32))


def step_key(seed: int, step: Array) -> Array:
    """The key that all else random in a step is folded from: rows' numbers, and _UPDATE."""
    return jax.random.fold_in(jax.random.key(seed), step)
