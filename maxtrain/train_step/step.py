"""One optimizer step as a pure, donated, jitted function of (state, batch).

The divisor of each loss term is counted over all micro-batches before the first gradient, so that
each token weighs the same however the batch is split.

The device decides whether the update is applied. A step with a non-finite loss, gradient or result,
without any target, or with an anomaly whose policy rejects it (see `anomaly_state.py`), leaves
parameters, optimizer state and schedule bit for bit unchanged. The check of the result costs one
more pass over parameters and optimizer state.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, PyTree

from maxtrain.config.schema import AnomalyConfig, LossScaleConfig
from maxtrain.models.summary import summarise
from maxtrain.models.whole_load import compares_whole_batches, loads_of, with_loads
from maxtrain.objectives.objective import (
    POLICY,
    Batch,
    FirstPass,
    Models,
    Objective,
    ObjectiveOutput,
    Scales,
    means_of_rows,
)
from maxtrain.ops.finite import finite_leaves
from maxtrain.ops.micro_batches import micro_batches
from maxtrain.ops.quantity import Metric
from maxtrain.ops.sums import WeightedSum, added
from maxtrain.parallel.hardware import compiler_options
from maxtrain.parallel.host_memory import by_layer, described_on_device, is_on_host, on_device
from maxtrain.parallel.sharding import stages
from maxtrain.train_step.anomaly_state import StepVerdict, judge
from maxtrain.train_step.layer_updates import LayerUpdates, PendingUpdate
from maxtrain.train_step.loss_scale import LossScale, after_step
from maxtrain.train_step.norms import is_stacked, measure_norms, no_norms
from maxtrain.train_step.optimizer import apply_updates
from maxtrain.train_step.pipeline_1f1b import staged_gradients
from maxtrain.train_step.state import Control, TrainState, shardings, spread_tree
from maxtrain.train_step.trainable import models_from, updated

Metrics = dict[str, Array]
WARNING = AnomalyConfig()
# The random key of the update is folded from this number, which no row has.
_UPDATE = 2**32 - 1


def gradients(
    models: Callable[[nnx.State], Models],
    params: nnx.State,
    batch: Batch,
    objective: Objective,
    scales: Scales,
    accumulation: int,
    dtype: str = "float32",
    places: PyTree | None = None,
) -> tuple[ObjectiveOutput, nnx.State]:
    """Compute the loss of a batch [B, T] with its metrics, and the float32 gradient of the loss.

    Row r goes to micro-batch r mod accumulation, so that no row leaves its device. If the objective
    has a first pass, or an auxiliary loss needs the expert choices of the whole batch, another pass
    over all micro-batches, without gradients, comes first.

    Args:
        models: maps the trainable parameters to all models (`trainable.models_from`).
        params: the trainable parameters.
        scales: from `objective.scales`, for the whole batch.
        accumulation: the number of micro-batches; it divides B.
        dtype: type in which gradients of micro-batches are accumulated.
        places: shardings of the gradients, while they are accumulated and afterwards; None: XLA
            chooses. With the 1F1B schedule, stages accumulate their gradients before.
    """

    def loss(
        params: nnx.State, micro: Batch, models: Callable[[nnx.State], Models]
    ) -> tuple[Array, ObjectiveOutput]:
        result = objective.forward(models(params), micro, scales)
        return result.loss, result

    def one(
        micro: Batch, models: Callable[[nnx.State], Models]
    ) -> tuple[ObjectiveOutput, nnx.State]:
        if takes_turns:
            result, grads = staged_gradients(models, params, micro, objective, scales, dtype)
        else:
            (_, result), grads = jax.value_and_grad(loss, has_aux=True)(params, micro, models)
        # Gradients of weights on hosts are on hosts as well.
        grads = jax.tree.map(lambda g: on_device(g).astype(jnp.float32), grads)
        if places is not None:
            grads = jax.lax.with_sharding_constraint(grads, places)
        return result, grads

    if objective.first_pass is not None:
        sums = _sums_of_batch(models(params), batch, objective.first_pass, accumulation)
        batch = batch | means_of_rows(sums, batch["inputs"].shape[0])
    whole = models(params)
    needs_loads = compares_whole_batches(whole[POLICY])
    takes_turns = stages() > 1 and whole[POLICY].config.pipeline.schedule == "1f1b"
    # Pipeline stages split a batch further.
    if accumulation == 1 and not (needs_loads and stages() > 1):
        return one(batch, models)

    micros = micro_batches(batch, accumulation)
    like = jax.eval_shape(lambda micro: one(micro, models), jax.tree.map(lambda x: x[0], micros))[0]
    start = (
        jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like),
        jax.tree.map(lambda p: jnp.zeros(p.shape, dtype), params),
    )
    of_parts = models
    if needs_loads:
        nothing = loads_of(start[0].buffer_inputs)
        loads = _whole_loads(whole, micros, objective, scales, nothing)
        of_parts = _that_know(models, loads)

    def step(
        carry: tuple[ObjectiveOutput, nnx.State], micro: Batch
    ) -> tuple[tuple[ObjectiveOutput, nnx.State], None]:
        return jax.tree.map(added, carry, one(micro, of_parts)), None

    result, grads = jax.lax.scan(step, start, micros)[0]
    return result, jax.tree.map(lambda g: g.astype(jnp.float32), grads)


def _sums_of_batch(
    models: Models, batch: Batch, first_pass: FirstPass, accumulation: int
) -> dict[str, WeightedSum]:
    """Compute the sums of an objective's first pass over all micro-batches."""
    rows = first_pass.rows(batch)
    if accumulation == 1:
        return first_pass.measure(models, rows)
    micros = micro_batches(rows, accumulation)

    def add(sums: dict[str, WeightedSum], micro: Batch) -> tuple[dict[str, WeightedSum], None]:
        return jax.tree.map(jnp.add, sums, first_pass.measure(models, micro)), None

    like = jax.eval_shape(
        lambda micro: first_pass.measure(models, micro), jax.tree.map(lambda x: x[0], micros)
    )
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    return jax.lax.scan(add, nothing, micros)[0]


def _whole_loads(
    models: Models,
    micros: Batch,
    objective: Objective,
    scales: Scales,
    nothing: dict[str, Array],
) -> dict[str, Array]:
    """Count the choices of all micro-batches that fall on each expert, as for `loads_of`.

    Args:
        micros: micro-batches, [accumulation, ...] each.
        nothing: counts of the same shape, all 0.
    """

    def count(loads: dict[str, Array], micro: Batch) -> tuple[dict[str, Array], None]:
        # The compiler removes everything else that the pass computes.
        observed = objective.forward(models, micro, scales).buffer_inputs
        return jax.tree.map(jnp.add, loads, loads_of(observed)), None

    return jax.lax.scan(count, nothing, micros)[0]


def _that_know(
    models: Callable[[nnx.State], Models], loads: Mapping[str, Array]
) -> Callable[[nnx.State], Models]:
    """Return the models, with the expert choices of the whole batch given to the policy."""

    def of_params(params: nnx.State) -> Models:
        made = models(params)
        return {**made, POLICY: with_loads(made[POLICY], loads)}

    return of_params


def make_train_step(
    abstract: TrainState,
    graphdefs: Mapping[str, nnx.GraphDef | None],
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
    norms_interval: int = 0,
    layer_updates: LayerUpdates | None = None,
) -> jax.stages.Wrapped:
    """Build the jitted step (state, batch) -> (state, metrics). The state is donated, and the new
    state has exactly the same layout.

    Args:
        graphdefs: the structure of each model of the objective; see `models_from`.
        accumulation, accumulate: number of micro-batches, and the type in which their gradients are
            accumulated.
        seed: random seed. Row r of the batch of step s draws from fold_in(fold_in(seed, s), r),
            however the batch is split.
        loss_scale: the resolved config that the state was made with.
        stochastic_rounding, zero: as in the config; with zero from 2 on, gradients are sharded over
            `data` as well.
        anomaly: limits and policies of the anomalies.
        norms_interval: steps between norms of each layer; 0: never. Other steps skip that branch of
            the program.
        layer_updates: the optimizer in two parts, if its arrays are on hosts; else None.

    The metrics are loss (the mean that the objective names), loss_weight (of how many targets, or
    what else it is a mean of), objective (what was minimised), each quantity that the
    objective records, and those of layers, source_nll and source_targets (sums by source) if there
    are such, targets, empty_rows (without a target), grad_norm (before clipping), learning_rate,
    skipped (steps of the run that changed nothing), skipped_in_row (of these, non-finite ones up to
    now without a good one between), bad_leaf (index of the first non-finite gradient, or -1),
    bad_update (of a finite gradient: index of the first array of parameters that train, then
    optimizer state, then buffers, that would not be finite, or -1), loss_scale if there is one,
    weight_norm (of parameters that train, before the update), norms if there is an interval (see
    `measure_norms`; zeros where not due), and what `watch.judge` says.

    Raises:
        ValueError: when it is traced: two numbers have one name, or layers say something that the
            objective does not pass on.
    """
    places = None
    if zero >= 2:
        of_grads = jax.tree.map(described_on_device, abstract.trainable)
        places = shardings(spread_tree(of_grads))
    stacked = is_stacked(abstract.trainable)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        scale = _scale_of_loss(state)
        rows, _ = batch["targets"].shape
        batch = batch | {
            "keys": row_keys(seed, state.step, rows),
            "steps": jnp.broadcast_to(state.step, (rows,)),
        }
        models = models_from(graphdefs, state.frozen, state.buffers)
        scales = objective.scales(batch, scale)
        result, grads = gradients(
            models, state.trainable, batch, objective, scales, accumulation, accumulate, places
        )
        if state.control.loss_scale is not None:
            grads = jax.tree.map(lambda g: g / scale, grads)
        policy = models(state.trainable)[POLICY]
        summarised = summarise(policy.summaries(), result.buffer_inputs)
        result = result._replace(buffer_inputs=summarised.of_buffers)
        loss = result.sums[objective.loss.name]
        measured = _measure(loss.mean(), grads, state, anomaly)
        key = None
        if stochastic_rounding:
            key = jax.random.fold_in(step_key(seed, state.step), _UPDATE)
        if layer_updates is None:
            update = _update(optimizer, grads, result.buffer_inputs, state, key)
        else:
            update = _update_in_layers(layer_updates, grads, result.buffer_inputs, state)
        counted = result.sums[objective.counted]
        decision = _decide(state, result, counted, measured, update, anomaly, loss_scale)
        next_state = _keep(state, update, decision)
        metrics = _described(result, counted, batch, scale)
        metrics["loss_weight"] = loss.weight
        metrics["bad_leaf"] = _first_false(jnp.isfinite(measured.squares))
        metrics["bad_update"] = jnp.where(decision.finite, _first_false(update.written), -1)
        applied = state.step - state.control.skipped
        metrics["learning_rate"] = jnp.asarray(schedule(applied))
        metrics["skipped"] = next_state.control.skipped
        metrics["skipped_in_row"] = next_state.control.skipped_in_row
        if state.control.loss_scale is not None:
            metrics["loss_scale"] = scale
        metrics["weight_norm"] = measured.weight_norm
        if norms_interval:
            due = (state.step + 1) % norms_interval == 0

            def measure() -> Array:
                before = state.trainable
                return measure_norms(stacked, grads, before, next_state.trainable, decision.apply)

            def skip() -> Array:
                return no_norms(stacked, state.trainable)

            metrics["norms"] = jax.lax.cond(due, measure, skip)
        metrics |= measured.values | decision.verdict.metrics
        metrics = _with_quantities(metrics, objective.recorded, policy.quantities(), result)
        return next_state, metrics | summarised.numbers

    where = shardings(abstract)
    # The device may be a description of a device elsewhere.
    device = next(iter(jax.tree.leaves(where)[0].device_set))
    options = compiler_options(device.platform)
    return jax.jit(step, donate_argnums=0, out_shardings=(where, None), compiler_options=options)


class _StepMeasurements(NamedTuple):
    """Measurements of a step before its update."""

    # loss, grad_norm, and weight_norm if drift is checked.
    values: Metrics
    # The sum of squares of each gradient.
    squares: Float[Array, " leaves"]
    # The norm of the trainable parameters. It rejects no step unless it is among the values.
    weight_norm: Float[Array, ""]


class _Update(NamedTuple):
    """The parameters, optimizer state and buffers that a step would produce."""

    # For each of these arrays, whether it is finite.
    written: Bool[Array, " leaves"]
    # Maps whether the step is applied to the arrays after it.
    if_applied: Callable[[Bool[Array, ""]], tuple[nnx.State, PyTree, nnx.State]]


class _Decision(NamedTuple):
    """The decision whether a step is applied."""

    # Whether loss and gradient are finite.
    finite: Bool[Array, ""]
    # Whether the update is applied.
    apply: Bool[Array, ""]
    # Whether the step is not finite, and a lower loss scale would not make it finite.
    lost: Bool[Array, ""]
    verdict: StepVerdict
    loss_scale: LossScale | None


def _scale_of_loss(state: TrainState) -> Array:
    """Return the current loss scale; 1 if there is none."""
    loss_scale = state.control.loss_scale
    if loss_scale is None:
        return jnp.float32(1)
    return loss_scale.scale


def _measure(
    loss: Array, grads: nnx.State, state: TrainState, anomaly: AnomalyConfig
) -> _StepMeasurements:
    """Measure the numbers that a step is judged by."""
    squares = _squares(grads)
    values = {"loss": loss, "grad_norm": jnp.sqrt(squares.sum())}
    weight_norm = norm_of(state.trainable)
    if anomaly.weight_drift != "off":
        values["weight_norm"] = weight_norm
    return _StepMeasurements(values, squares, weight_norm)


def _update(
    optimizer: optax.GradientTransformation,
    grads: nnx.State,
    observed: Mapping[str, Array],
    state: TrainState,
    key: Array | None,
) -> _Update:
    """Compute parameters, optimizer state and buffers after the step, in their own types."""
    before = (state.trainable, state.opt_state)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.trainable)
    trainable = apply_updates(state.trainable, updates, key)
    # Adam's moments of bfloat16 parameters come out in float32.
    after = jax.tree.map(lambda new, old: new.astype(old.dtype), (trainable, opt_state), before)
    trainable, opt_state = after
    buffers = updated(state.buffers, observed)
    new = (trainable, opt_state, buffers)

    def if_applied(apply: Array) -> tuple[nnx.State, PyTree, nnx.State]:
        old = (*before, state.buffers)
        return jax.tree.map(lambda new, old: jnp.where(apply, new, old), new, old)

    return _Update(finite_leaves(new), if_applied)


def _update_in_layers(
    rule: LayerUpdates, grads: nnx.State, observed: Mapping[str, Array], state: TrainState
) -> _Update:
    """Compute the update with an optimizer whose arrays are on hosts, layer by layer."""
    pending = PendingUpdate(rule, grads, state.trainable, state.opt_state)
    buffers = updated(state.buffers, observed)
    written = jnp.concatenate([pending.finite(), finite_leaves(buffers)])

    def if_applied(apply: Array) -> tuple[nnx.State, PyTree, nnx.State]:
        kept = jax.tree.map(lambda new, old: jnp.where(apply, new, old), buffers, state.buffers)
        return (*pending.written_if(apply), kept)

    return _Update(written, if_applied)


def _decide(
    state: TrainState,
    result: ObjectiveOutput,
    counted: WeightedSum,
    measured: _StepMeasurements,
    update: _Update,
    anomaly: AnomalyConfig,
    loss_scale: LossScaleConfig | None,
) -> _Decision:
    """Decide whether the update is applied, and advance the loss scale and the watch."""
    control = state.control
    finite = jnp.isfinite(jnp.stack([result.loss, *measured.values.values()])).all()
    # A NaN count of targets is a damaged batch, not a batch without targets.
    counts = ~(counted.weight <= 0)
    sound = finite & update.written.all()
    loss_finite = jnp.isfinite(counted.total)
    next_scale, lost = after_step(control.loss_scale, finite, loss_finite, loss_scale)
    # A lower loss scale does not help if loss and gradient are finite and the result is not.
    lost |= finite & ~sound
    lost &= counts
    verdict = judge(control.watch, anomaly, measured.values, sound & counts, lost)
    apply = sound & counts & ~verdict.reject & ~verdict.halt
    return _Decision(finite, apply, lost, verdict, next_scale)


def _keep(state: TrainState, update: _Update, decision: _Decision) -> TrainState:
    """Return the state after the step. A step that is not applied changes counters only, and one
    that halts not even these."""
    control = state.control
    halt = decision.verdict.halt

    def unless_halted(new: Array, old: Array) -> Array:
        return jnp.where(halt, old, new)

    trainable, opt_state, buffers = update.if_applied(decision.apply)
    in_row = jnp.where(decision.apply, 0, control.skipped_in_row + decision.lost)
    counted = Control(
        skipped=control.skipped + ~decision.apply,
        skipped_in_row=in_row,
        watch=decision.verdict.watch,
        loss_scale=decision.loss_scale,
    )
    counted = jax.tree.map(unless_halted, counted, control)
    watch = counted.watch._replace(halted=halt)
    return TrainState(
        step=unless_halted(state.step + 1, state.step),
        trainable=trainable,
        frozen=state.frozen,
        buffers=buffers,
        opt_state=opt_state,
        control=counted._replace(watch=watch),
    )


def _described(
    result: ObjectiveOutput, counted: WeightedSum, batch: Batch, scale: Array
) -> Metrics:
    """Return the metrics of the loss and of the batch."""
    metrics = {
        "objective": result.loss / scale,
        "targets": counted.weight,
        "empty_rows": (batch["loss_mask"] <= 0).all(axis=1).sum(),
    }
    sources = result.sums.get("sources")
    if sources is not None:
        metrics["source_nll"] = sources.total
        metrics["source_targets"] = sources.weight
    return metrics


def _with_quantities(
    metrics: Metrics,
    recorded: Sequence[Metric],
    of_layers: Sequence[Metric],
    result: ObjectiveOutput,
) -> Metrics:
    """Return the metrics of a step, with those of the objective and of the policy's layers.

    Raises a ValueError if two metrics have one name, one is missing, or layers return an undeclared
    one.
    """
    metrics = dict(metrics)
    unnamed = result.of_layers.keys() - {quantity.name for quantity in of_layers}
    if unnamed:
        raise ValueError(
            f"layers say {sorted(unnamed)}, which nobody would record. "
            "Name them in `LayerSpec.quantities`, with their units."
        )
    for quantities, sums in ((recorded, result.sums), (of_layers, result.of_layers)):
        for quantity in quantities:
            if quantity.name in metrics:
                raise ValueError(
                    f"{quantity.name} names two numbers of a step. Give the quantity another name."
                )
            if quantity.name not in sums:
                raise ValueError(
                    f"{quantity} is not among the sums {sorted(sums)} of the objective's result. "
                    "Return it, or end with `with_layers` if it is one of the layers."
                )
            metrics[quantity.name] = sums[quantity.name].reduced(quantity.reduction)
    return metrics


def _first_false(found: Array) -> Array:
    """Return the index of the first element that is false, or -1."""
    return jnp.where(found.all(), -1, jnp.argmin(found))


def norm_of(params: nnx.State) -> Array:
    """Return the Euclidean norm of all parameters together, in float32."""
    return jnp.sqrt(_squares(params).sum())


def _squares(tree: nnx.State) -> Array:
    """Return the sum of squares of each leaf; for a leaf on hosts, layer by layer."""
    squares = []
    for leaf in jax.tree.leaves(tree):
        if is_on_host(leaf):
            squares.append(by_layer(_sum_of_squares, leaf).sum())
        else:
            squares.append(_sum_of_squares(leaf))
    return jnp.stack(squares)


def _sum_of_squares(x: Array) -> Array:
    return (x.astype(jnp.float32) ** 2).sum()


def row_keys(seed: int, step: Array, rows: int) -> Array:
    """Return a random key for each row of the batch of a step, [B]."""
    key = step_key(seed, step)
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(rows, dtype=jnp.uint32))


def step_key(seed: int, step: Array) -> Array:
    """Return the random key of a step, from which the keys of rows and of the update are folded."""
    return jax.random.fold_in(jax.random.key(seed), step)
