"""The gradient of a batch with the 1F1B pipeline schedule (one forward, one backward).

A micro-batch begins its backward pass as soon as the last stage has processed it. So a stage keeps
the inputs of at most 2 S - 1 micro-batches, for any number of micro-batches. The schedule of
`models/pipeline.py` keeps all of them; both have the same bubble.

All stages run one program, in ticks of the same length. In tick t, stage s of S takes micro-batch t
- s forward, and micro-batch t - 2 (S - 1) + s backward. For the last stage these are the same, with
the loss between them. So there are three loops of ticks for M micro-batches: S - 1 that only go
forward, M that do both, and S - 1 that only go backward. A stage is idle in S - 1 of M + S - 1
forward parts, and in as many backward parts; its results there are discarded.

A backward part recomputes the forward pass of its stage from its input. What `model.remat` keeps is
kept for one micro-batch, during one backward part; the rest is computed once more. So `none`
computes as much as `full` does in `models/pipeline.py`, and `full` computes each layer forward
three times.

In each tick with both parts, a stage sends its result to the next stage and a gradient to the one
before. Each is b T D numbers of the activation type for each device, where b is the rows of a
device in a micro-batch. The result of the last stage and the gradient of the first go to all
stages, because each stage holds a part of the vocabulary: all compute the loss together, between
the two parts. Gradients of weights are reduce-scattered over `fsdp` in each tick. XLA moves sums
over `data` out of the two loops that go backward, except for the head when it compiles for GPUs.

Source: Narayanan et al. 2019, https://dl.acm.org/doi/10.1145/3341301.3359646, section 3.2; without
    stale weights: https://arxiv.org/abs/2104.04473, section 2.2.1.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from maxtrain.models.context import Context
from maxtrain.models.decoder import Decoder
from maxtrain.models.pipeline import (
    Block,
    form_for,
    in_blocks,
    of_stage,
    on_stages,
    rows_of,
    split_as_used,
    with_rows,
    with_stage,
)
from maxtrain.models.scan_layers import LayerInputs, ScannedLayerOut, aux_of_period
from maxtrain.objectives.objective import (
    POLICY,
    Batch,
    Models,
    Objective,
    ObjectiveOutput,
    Scales,
    with_layer_aux,
    with_terms,
)
from maxtrain.ops.micro_batches import micro_batches
from maxtrain.ops.sums import added
from maxtrain.parallel.sharding import STAGE, constrain_weight
from maxtrain.train_step.optimizer import map_variables
from maxtrain.train_step.trainable import join

# A function that passes rows through the period of layers, as `Stack.run_period` does.
RunPeriod = Callable[[Block, Array, Context, list[LayerInputs]], Array]

# The logical axes of tables whose rows are looked up by number.
_TABLES = (("vocab", "embed"), ("positions", "embed"))


class _StageParams(NamedTuple):
    """The trainable parameters: those of layers that stages share out, stacked, and the rest."""

    layers: nnx.State
    rest: nnx.State


class _Period(NamedTuple):
    """The inputs of the period of layers in a forward pass."""

    block: Block
    x: Float[Array, "B T D"]
    context: Context
    inputs: list[LayerInputs]


class _Carry(NamedTuple):
    """The state between two ticks; S is the number of stages, K is 2 S - 1."""

    # The next input of each stage, except the first.
    given: Float[Array, "S b T D"]
    # The gradient of the output of each stage, except the last.
    returned: Float[Array, "S b T D"]
    # The inputs of each stage in the last K ticks, by tick mod K.
    went_in: Float[Array, "S K b T D"]
    # Sums over micro-batches.
    kept: Any
    result: ObjectiveOutput
    grads: _StageParams


def staged_gradients(
    models: Callable[[nnx.State], Models],
    params: nnx.State,
    batch: Batch,
    objective: Objective,
    scales: Scales,
    dtype: str,
) -> tuple[ObjectiveOutput, nnx.State]:
    """Compute the loss of a batch [B, T] with its metrics, and the gradient of the loss.

    Args:
        models, params, objective, scales: as for `step.gradients`. The objective passes its rows
            once through the policy, and through no other model.
        batch: the whole batch, or a micro-batch of gradient accumulation.
        dtype: type in which gradients of micro-batches are accumulated.
    """
    assert objective.models == (POLICY,), f"there is no second pass behind stages: {objective}"
    schedule = _OneForwardOneBackward(models, params, batch, objective, scales)
    return schedule.run(dtype)


class _OneForwardOneBackward:
    """The parts of a batch's gradient, and the order in which stages compute them."""

    def __init__(
        self,
        models: Callable[[nnx.State], Models],
        params: nnx.State,
        batch: Batch,
        objective: Objective,
        scales: Scales,
    ):
        self._models = models
        self._objective = objective
        self._scales = scales
        policy = models(params)[POLICY]
        self._names = policy.layers.period_names()
        self._form = form_for(batch["inputs"].shape[0], policy.config.pipeline)
        self._micros = micro_batches(batch, self._form.micro_batches)
        self._params = _parted(params, self._names)
        # XLA removes everything else that this pass computes.
        period = self._into_layers(self._params.rest, batch)
        self._block = period.block
        self._context = period.context
        self._rows = micro_batches(rows_of(period.context), self._form.micro_batches)
        self._inputs = self._in_blocks(period.inputs)
        self._weights = self._in_blocks(self._params.layers)
        self._places = jnp.arange(self._form.stages)

    def run(self, dtype: str) -> tuple[ObjectiveOutput, nnx.State]:
        """Run all ticks; gradients are accumulated in this type."""
        S = self._form.stages
        M = self._form.micro_batches
        carry = self._start(dtype)
        ticks = jnp.arange(M + 2 * (S - 1))
        carry = self._loop(carry, ticks[: S - 1], forward=True, backward=False)
        carry = self._loop(carry, ticks[S - 1 : S - 1 + M], forward=True, backward=True)
        carry = self._loop(carry, ticks[S - 1 + M :], forward=False, backward=True)
        aux = aux_of_period(self._names, carry.kept)
        result = with_layer_aux(carry.result, aux, self._scales)
        return result, join(carry.grads.layers, carry.grads.rest)

    def _loop(
        self, carry: _Carry, ticks: Int[Array, " n"], forward: bool, backward: bool
    ) -> _Carry:
        def tick(carry: _Carry, number: Int[Array, ""]) -> tuple[_Carry, None]:
            out = None
            if forward:
                carry, out = self._forward(carry, number)
            if backward:
                carry = self._backward(carry, number, out)
            return carry, None

        return jax.lax.scan(tick, carry, ticks)[0]

    def _forward(self, carry: _Carry, number: Int[Array, ""]) -> tuple[_Carry, Array]:
        """Compute the forward part of a tick, and return the output of each stage."""
        S, _, M = self._form
        items = number - self._places
        first = self._into_layers(self._params.rest, self._micro(number)).x
        x = on_stages(with_stage(carry.given, 0, first))
        slot = number % (2 * S - 1)
        went_in = jax.lax.dynamic_update_index_in_dim(carry.went_in, x, slot, axis=1)

        def stage(x: Array, item: Array, weights: nnx.State, inputs: Any) -> tuple[Array, Any]:
            out, (_, kept) = self._stage(x, weights, item, inputs)
            return out, kept

        out, kept = jax.vmap(stage, spmd_axis_name=STAGE)(x, items, self._weights, self._inputs)
        is_there = (items >= 0) & (items < M)
        kept = jax.tree.map(_sum_of(is_there), carry.kept, kept)
        given = on_stages(jnp.roll(out, 1, axis=0))
        return carry._replace(given=given, went_in=on_stages(went_in), kept=kept), out

    def _backward(self, carry: _Carry, number: Int[Array, ""], out: Array | None) -> _Carry:
        """Compute the backward part of a tick.

        `out`: the outputs of each stage's forward part, whose loss is computed next; None: there
        was no forward part, and all losses are known.
        """
        S, _, M = self._form
        gradient = carry.returned
        result = carry.result
        of_loss = None
        if out is not None:
            last = of_stage(out, S - 1)
            micro = self._micro(number - (S - 1))
            more, of_loss, of_last = self._loss(last, micro)
            gradient = on_stages(with_stage(gradient, S - 1, of_last))
            result = jax.tree.map(added, result, more)
        items = number - 2 * (S - 1) + self._places
        is_there = (items >= 0) & (items < M)
        slots = (number - 2 * (S - 1 - self._places)) % (2 * S - 1)

        def stage(
            went_in: Array,
            slot: Array,
            gradient: Array,
            item: Array,
            weights: nnx.State,
            inputs: Any,
        ) -> tuple[Array, nnx.State]:
            x = jax.lax.dynamic_index_in_dim(went_in, slot, keepdims=False)

            def through(x: Array, weights: nnx.State) -> tuple[Array, Array]:
                out, (loss, _) = self._stage(x, weights, item, inputs)
                return out, loss

            pull = jax.vjp(through, x, weights)[1]
            return pull((gradient, jnp.float32(1)))

        of_x, of_weights = jax.vmap(stage, spmd_axis_name=STAGE)(
            carry.went_in, slots, gradient, items, self._weights, self._inputs
        )
        of_x = on_stages(of_x)
        of_layers = jax.tree.map(_sum_of(is_there), carry.grads.layers, of_weights)
        of_rest = self._gradient_before_layers(of_stage(of_x, 0), number - 2 * (S - 1))
        of_rest = jax.tree.map(lambda part: jnp.where(is_there[0], part, 0), of_rest)
        if of_loss is not None:
            of_rest = jax.tree.map(jnp.add, of_rest, of_loss)
        rest = _as_summed(jax.tree.map(added, carry.grads.rest, of_rest))
        returned = on_stages(jnp.roll(of_x, -1, axis=0))
        return carry._replace(returned=returned, result=result, grads=_StageParams(of_layers, rest))

    def _start(self, dtype: str) -> _Carry:
        """Return the state before the first tick."""
        S = self._form.stages
        first = self._micro(jnp.int32(0))
        x = self._into_layers(self._params.rest, first).x
        nothing = on_stages(jnp.zeros((S, *x.shape), x.dtype))
        went_in = on_stages(jnp.zeros((S, 2 * S - 1, *x.shape), x.dtype))
        kept = jax.eval_shape(
            lambda: self._stage(
                x, self._of_first(self._weights), jnp.int32(0), self._of_first(self._inputs)
            )[1][1]
        )
        kept = jax.tree.map(lambda k: jnp.zeros((S * k.shape[0], *k.shape[1:]), k.dtype), kept)
        result = jax.eval_shape(lambda: self._loss(x, first)[0])
        result = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), result)
        grads = jax.tree.map(lambda p: jnp.zeros(p.shape, dtype), self._params)
        return _Carry(nothing, nothing, went_in, kept, result, grads)

    def _stage(
        self, x: Float[Array, "b T D"], weights: nnx.State, item: Int[Array, ""], inputs: Any
    ) -> tuple[Array, tuple[Float[Array, ""], list[ScannedLayerOut]]]:
        """Run a stage's layers, and return their output, what they add to the loss, and their kept
        values.

        Args:
            x: the input of the first of these layers.
            weights: the trainable parameters, [L, ...].
            item: the number of the micro-batch.
            inputs: all inputs of the layers, [L, ...]; `weights` replace the trainable parameters
                in them.
        """
        rows = jax.tree.map(lambda leaf: leaf[self._index(item)], self._rows)
        inputs = _with_weights(inputs, self._names, weights)
        context = with_rows(self._context, rows)
        out, kept = self._block(x, context, split_as_used(inputs))
        terms = aux_of_period(self._names, kept).aux_losses
        return out, (with_terms(jnp.float32(0), terms, self._scales), kept)

    def _into_layers(self, rest: nnx.State, batch: Batch) -> _Period:
        """Return the inputs of the period of layers for some rows."""
        reached = []

        def run(block: Block, x: Array, context: Context, inputs: list[LayerInputs]) -> Array:
            reached.append(_Period(block, x, context, inputs))
            return x

        self._pass(rest, batch, run)
        assert len(reached) == 1, f"an objective passes rows once through stages: {len(reached)}"
        return reached[0]

    def _loss(
        self, x: Float[Array, "b T D"], batch: Batch
    ) -> tuple[ObjectiveOutput, nnx.State, Float[Array, "b T D"]]:
        """Compute the loss from the output of the period.

        Returns:
            the result without the layers' part, and the gradients with respect to the rest of the
                parameters and to the output of the period.
        """

        def loss(rest: nnx.State, x: Array) -> tuple[Array, ObjectiveOutput]:
            result = self._pass(_as_summed(rest), batch, lambda *_: x)
            return result.loss, result

        of_both = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        (_, result), (of_rest, of_x) = of_both(self._params.rest, x)
        return result, of_rest, of_x

    def _gradient_before_layers(
        self, gradient: Float[Array, "b T D"], number: Int[Array, ""]
    ) -> nnx.State:
        """Return the gradient with respect to the rest of the parameters, given the gradient with
        respect to the period's input for a micro-batch."""
        micro = self._micro(number)

        def reaches(rest: nnx.State) -> Array:
            return self._into_layers(_as_summed(rest), micro).x

        pull = jax.vjp(reaches, self._params.rest)[1]
        return pull(gradient)[0]

    def _pass(self, rest: nnx.State, batch: Batch, run: RunPeriod) -> ObjectiveOutput:
        """Run the objective's forward pass with a policy whose period is run by `run`."""
        models = self._models(join(self._params.layers, rest))
        policy = _with_run(models[POLICY], run)
        return self._objective.forward({POLICY: policy}, batch, self._scales)

    def _micro(self, number: Int[Array, ""]) -> Batch:
        """Return a micro-batch; an arbitrary one if the number is out of range."""
        return jax.tree.map(lambda leaf: leaf[self._index(number)], self._micros)

    def _index(self, item: Int[Array, ""]) -> Int[Array, ""]:
        return jnp.clip(item, 0, self._form.micro_batches - 1)

    def _in_blocks(self, tree: Any) -> Any:
        """Split arrays by stage, [S, L, ...]."""
        return jax.tree.map(lambda leaf: in_blocks(leaf, self._form)[:, 0], tree)

    def _of_first(self, tree: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf[0], tree)


def _parted(params: nnx.State, names: list[str]) -> _StageParams:
    """Split the trainable parameters into those of the period's places with these names, and the
    rest."""

    def is_in_period(path: tuple[Any, ...], _: Any) -> bool:
        return str(path[0]) == "layers" and str(path[1]) in names

    layers, rest = nnx.split_state(params, is_in_period, ...)
    return _StageParams(layers, rest)


def _with_weights(
    inputs: list[LayerInputs], names: list[str], weights: nnx.State
) -> list[LayerInputs]:
    """Replace the parameters in the inputs of layers by these.

    Args:
        inputs: the inputs of each place in the period.
        names: the names of the places.
        weights: parameters by their paths in the model, such as `layers.0.mlp.up.kernel`.
    """
    found = nnx.to_flat_state(weights)
    changed = []
    for name, part in zip(names, inputs, strict=True):
        params = dict(nnx.to_flat_state(part.params))
        for (_, place, *path), variable in found:
            if str(place) == name:
                params[tuple(path)] = variable
        changed.append(part._replace(params=nnx.from_flat_state(params)))
    return changed


def _with_run(model: Decoder, run: RunPeriod) -> Decoder:
    """Return the model with another function that runs its period. The weights are shared."""
    graphdef, variables = nnx.split(model)
    model = nnx.merge(graphdef, variables)
    model.layers.run_period = run
    return model


def _as_summed(rest: nnx.State) -> nnx.State:
    """Shard parameters or gradients as gradients are accumulated: as the weights are used, but
    tables of tokens or positions are not split over their width.

    XLA scatters into the gradient of a table while it is whole. Kept whole from one micro-batch to
    the next, it is summed over devices once, after the loop.
    """

    def split(_: str, variable: nnx.Variable) -> nnx.Variable:
        axes = variable.get_metadata("axes")
        if axes not in _TABLES:
            return split_as_used(variable)
        return variable.replace(constrain_weight(variable.get_value(), axes[0], None))

    return map_variables(split, rest)


def _sum_of(is_there: Bool[Array, " S"]) -> Callable[[Array, Array], Array]:
    """Return a function that adds the results of stages, [S, L, ...], to a total, [S L, ...], for
    the stages that worked on an existing micro-batch."""

    def add(total: Array, part: Array) -> Array:
        counts = is_there.reshape(-1, *(1,) * (part.ndim - 1))
        return added(total, jnp.where(counts, part, 0).reshape(total.shape))

    return add
