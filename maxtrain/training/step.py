"""One optimizer step as a pure, donated, jitted function of (state, batch).

Targets of all micro-batches are counted before the first gradient, so that each token weighs the same however the batch
is split. Whether the update is applied is decided on the device: a step with a non-finite loss or gradient, or without
any target, leaves parameters, optimizer state and schedule bit for bit as they were.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array

from maxtrain.parallel.hardware import compiler_options
from maxtrain.parallel.sharding import constrain
from maxtrain.training.objective import Batch, Objective, Sum
from maxtrain.training.state import TrainState, shardings

Metrics = dict[str, Array]


def gradients(
    graphdef: nnx.GraphDef, params: nnx.State, batch: Batch, objective: Objective, accumulation: int
) -> tuple[Sum, nnx.State]:
    """Loss as (total, weight) of a batch of [B, T], and the float32 gradient of total / weight.

    The objective's weight must be the sum of the batch's loss mask. `accumulation`, the number of micro-batches, divides B;
    row r goes to micro-batch r mod accumulation, so that no row leaves its device.
    """
    denominator = jnp.maximum(batch["loss_mask"].astype(jnp.float32).sum(), 1.0)

    def loss(params: nnx.State, micro: Batch) -> tuple[Array, Sum]:
        result = objective(nnx.merge(graphdef, params), micro)
        return result.total / denominator, result

    def one(micro: Batch) -> tuple[Sum, nnx.State]:
        (_, result), grads = jax.value_and_grad(loss, has_aux=True)(params, micro)
        return result, jax.tree.map(lambda g: g.astype(jnp.float32), grads)

    if accumulation == 1:
        return one(batch)

    def split(x: Array) -> Array:
        x = x.reshape(x.shape[0] // accumulation, accumulation, *x.shape[1:]).swapaxes(0, 1)
        return constrain(x, None, "activation_batch", *(None,) * (x.ndim - 2))

    def add(carry: tuple[Sum, nnx.State], micro: Batch) -> tuple[tuple[Sum, nnx.State], None]:
        return jax.tree.map(jnp.add, carry, one(micro)), None

    zero = jnp.zeros((), jnp.float32)
    start = (Sum(zero, zero), jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params))
    return jax.lax.scan(add, start, jax.tree.map(split, batch))[0]


def make_train_step(
    abstract: TrainState,
    graphdef: nnx.GraphDef,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    accumulation: int,
) -> jax.stages.Wrapped:
    """(state, batch) -> (state, metrics), jitted: the state is donated, and comes back laid out exactly as it went in.

    The metrics are loss (nats per target), targets, empty_rows (without a target), grad_norm (before clipping), learning_rate,
    skipped (steps of the run that changed nothing), skipped_in_row (of these, non-finite ones up to now without a good one
    between).
    """

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        result, grads = gradients(graphdef, state.params, batch, objective, accumulation)
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(norm) & jnp.isfinite(result.total)
        apply = finite & (result.weight > 0)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)

        def keep(new: Array, old: Array) -> Array:
            return jnp.where(apply, new.astype(old.dtype), old)  # Adam's moments of bfloat16 parameters come out in float32

        skipped = state.skipped + ~apply
        next_state = TrainState(
            jax.tree.map(keep, params, state.params),
            jax.tree.map(keep, opt_state, state.opt_state),
            state.step + 1,
            skipped,
            jnp.where(apply, 0, state.skipped_in_row + ~finite),
        )
        metrics = {
            "loss": result.total / jnp.maximum(result.weight, 1.0),
            "targets": result.weight,
            "empty_rows": (batch["loss_mask"] <= 0).all(axis=1).sum(),
            "grad_norm": norm,
            "learning_rate": schedule(state.step - state.skipped),
            "skipped": skipped,
            "skipped_in_row": next_state.skipped_in_row,
        }
        return next_state, metrics

    options = compiler_options(jax.default_backend())
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings(abstract), None), compiler_options=options)
