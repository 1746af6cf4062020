"""Pipeline parallelism (GPipe): each part of the mesh axis `stage` has some of the layers, and rows
go through all parts in micro-batches.

The layers are cut into blocks, which stages have in turn: with R rounds, stage s of S has the
blocks s, s + S, ..., s + (R - 1) S, and a micro-batch goes around R times. Stage s works on the
n-th piece of work of stage 0, s iterations later. So M micro-batches take R M + S - 1 iterations,
of which a stage idles in S - 1. During these it repeats other micro-batches, and the results are
discarded.

After each iteration, each stage sends its result to the next one: B T D / M numbers of the type of
activations for each device forward, and the same number backward. At the end all stages get the
result of the last one. With more than one round, the parameters of a block are stored on other
devices than they are used on, and are sent there in each pass.

Source: Huang et al. 2019, https://arxiv.org/abs/1811.06965; rounds: Narayanan et al. 2021,
    https://arxiv.org/abs/2104.04473, section 2.2.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Shaped

from maxtrain.config.schema import PipelineConfig
from maxtrain.models.context import Context, Rotation, TrainNoise
from maxtrain.ops.attention.mask import Mask
from maxtrain.ops.micro_batches import micro_batches, whole_batch
from maxtrain.parallel.sharding import (
    STAGE,
    batch_shards,
    constrain_residual,
    constrain_weight,
    stages,
)

# Maps x [B, T, D] through some layers, whose inputs are stacked, [L, ...], to the result and the
# kept values of each layer.
Block = Callable[[Array, Context, Any], tuple[Array, Any]]


class PipelineLayout(NamedTuple):
    """The pipeline layout of rows.

    Attributes:
        stages: S.
        rounds: R.
        micro_batches: M.
    """

    stages: int
    rounds: int
    micro_batches: int

    def iterations(self) -> int:
        return self.rounds * self.micro_batches + self.stages - 1

    def waiting(self) -> float:
        """Return the bubble: the share of iterations in which a stage does no useful work."""
        return (self.stages - 1) / self.iterations()


def micro_batches_of(rows: int, requested: int | None) -> int:
    """Return M for this number of rows per device.

    Args:
        rows: rows of each device.
        requested: number of micro-batches; None: one row of each device per micro-batch. A number
            that does not divide the rows, such as those of an evaluation, is lowered to a divisor.
    """
    if requested is None:
        return rows
    return max(count for count in range(1, rows + 1) if rows % count == 0 and count <= requested)


def pipelined(
    block: Block, x: Float[Array, "B T D"], context: Context, inputs: Any, form: PipelineLayout
) -> tuple[Float[Array, "B T D"], Any]:
    """Pass x through all blocks, and return the kept values of each layer, [N, ...], summed over
    micro-batches.

    Args:
        block: runs the layers of one block.
        x: the input of the first layer.
        context: the context of all rows.
        inputs: inputs of the N layers, or periods of layers, [N, ...]; S R divides N.
    """
    S, R, M = form
    rows = micro_batches(rows_of(context), M)
    weights = jax.tree.map(lambda leaf: in_blocks(leaf, form), inputs)
    # The inputs of stage 0, by micro-batch; those of other stages are not used.
    waiting = micro_batches(x, M)
    waiting = on_stages(jnp.broadcast_to(waiting, (S, *waiting.shape)))
    places = jnp.arange(S)

    def at_stage(x: Array, item: Array, weights: Any) -> tuple[Array, Any]:
        """Run a block for the n-th piece of work."""
        micro = item % M
        number = jnp.clip(item // M, 0, R - 1)
        of_rows = jax.tree.map(lambda leaf: leaf[micro], rows)
        own = split_as_used(jax.tree.map(lambda leaf: leaf[number], weights))
        return block(x, with_rows(context, of_rows), own)

    def iterate(
        carry: tuple[Array, Array], number: Int[Array, ""]
    ) -> tuple[tuple[Array, Array], Any]:
        given, waiting = carry
        own = jax.lax.dynamic_index_in_dim(waiting, number % M, axis=1, keepdims=False)
        x = on_stages(with_stage(given, 0, own))
        out, kept = jax.vmap(at_stage, spmd_axis_name=STAGE)(x, number - places, weights)
        # The last stage sends to the first one.
        given = on_stages(jnp.roll(out, 1, axis=0))
        place = (number - S + 1) % M
        before = jax.lax.dynamic_index_in_dim(waiting, place, axis=1, keepdims=False)
        arrived = jnp.where(number >= S - 1, given, before)
        waiting = jax.lax.dynamic_update_index_in_dim(waiting, arrived, place, axis=1)
        return (given, on_stages(waiting)), kept

    start = (waiting[:, 0], waiting)
    (_, waiting), kept = jax.lax.scan(iterate, start, jnp.arange(form.iterations()))
    out = whole_batch(of_stage(waiting, 0))
    return constrain_residual(out), jax.tree.map(lambda leaf: _of_layers(leaf, form), kept)


def on_stages(x: Array) -> Array:
    """Shard [S, ..., b, T, D] over stages, and otherwise like activations."""
    between = (None,) * (x.ndim - 4)
    return constrain_residual(x, "layers", *between)


def with_stage(x: Shaped[Array, "S *s"], number: int, own: Array) -> Shaped[Array, "S *s"]:
    """Replace the part of one stage."""
    return jnp.where(_is_of_stage(x, number), own, x)


def of_stage(x: Shaped[Array, "S *s"], number: int) -> Shaped[Array, "*s"]:
    """Broadcast the part of one stage to all: the sum with zeros is exact."""
    return jnp.where(_is_of_stage(x, number), x, 0).sum(0, dtype=x.dtype)


def _is_of_stage(x: Shaped[Array, "S *s"], number: int) -> Array:
    """Return whether elements belong to a stage, in a shape that broadcasts."""
    is_it = jnp.arange(x.shape[0]) == number
    return is_it.reshape(-1, *(1,) * (x.ndim - 1))


def in_blocks(leaf: Shaped[Array, "N *s"], form: PipelineLayout) -> Shaped[Array, "S R L *s"]:
    """Split layers by stage and round."""
    S, R, _ = form
    N = leaf.shape[0]
    assert N % (S * R) == 0, f"{N} layers or periods in {R} rounds of {S} stages"
    length = N // (S * R)
    by_round = leaf.reshape(R, S, length, *leaf.shape[1:])
    return by_round.swapaxes(0, 1)


def split_as_used(weights: Any) -> Any:
    """Shard the layers of a block, so that their gradients for each micro-batch are sharded as
    well. XLA would accumulate them whole on all devices."""

    def split(variable: Any) -> Any:
        # Inputs of layers for a single pass have no logical axes, and no gradient.
        if not isinstance(variable, nnx.Variable) or "axes" not in variable.get_metadata():
            return variable
        axes = variable.get_metadata("axes")
        stacked = (None,) * (variable.ndim - len(axes))
        return variable.replace(constrain_weight(variable.get_value(), *stacked, *axes))

    return jax.tree.map(split, weights, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def _of_layers(leaf: Shaped[Array, "I S L *s"], form: PipelineLayout) -> Shaped[Array, "N *s"]:
    """Sum the kept values of each layer over iterations, without those of idle stages."""
    S, R, M = form
    used = jnp.stack([leaf[stage : stage + R * M, stage] for stage in range(S)], axis=1)
    by_round = used.reshape(R, M, *used.shape[1:])
    # [R, S, L, ...], in the order of the layers.
    of_blocks = by_round.sum(1, dtype=leaf.dtype)
    return of_blocks.reshape(-1, *leaf.shape[3:])


class RowInputs(NamedTuple):
    """The inputs that differ between rows in a pass, [B, ...]."""

    rotations: list[Rotation]
    segments: Int[Array, "B T"]
    keys: Array | None
    router_noise: Array | None


def rows_of(context: Context) -> RowInputs:
    """Return the row inputs of a context."""
    mask = context.mask
    assert context.extension is None, "nothing is generated in stages"
    assert mask.q_columns.ndim == 1, "columns are those of all rows"
    keys = None
    router_noise = None
    noise = context.noise
    if noise is not None:
        keys = noise.keys
        router_noise = jnp.broadcast_to(jnp.asarray(noise.router_noise), keys.shape)
    return RowInputs(list(context.rotations.values()), mask.q_segments, keys, router_noise)


def with_rows(context: Context, rows: RowInputs) -> Context:
    """Return the context of some rows."""
    mask = context.mask
    some = Mask(
        mask.q_columns,
        mask.kv_columns,
        rows.segments,
        rows.segments,
        mask.window,
        mask.in_order,
        mask.exchange,
    )
    noise: TrainNoise | None = context.noise
    if noise is not None:
        assert rows.keys is not None
        assert rows.router_noise is not None
        noise = noise._replace(keys=rows.keys, router_noise=rows.router_noise)
    rotations = dict(zip(context.rotations, rows.rotations, strict=True))
    return Context(rotations, some, noise)


def form_for(rows: int, config: PipelineConfig) -> PipelineLayout:
    """Return the pipeline layout on the current mesh, for batches of this number of rows.

    If devices cannot have equal numbers of rows, as for a prompt, each device has all of them.
    """
    shards = batch_shards()
    of_device = rows
    if rows % shards == 0:
        of_device = rows // shards
    return PipelineLayout(
        stages(), config.rounds, micro_batches_of(of_device, config.micro_batches)
    )
