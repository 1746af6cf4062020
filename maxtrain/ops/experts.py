"""Products of tokens with the weights of their experts: tokens sorted by expert, in blocks.

Choices of tokens are brought into the order of their experts, those of each expert beginning a new
block, so that every block has one expert. What moves rows there and back is a gather in the
backward pass, too: no sum is scattered, so nothing depends on the order in which threads add.

Cost: N C rows of products for N tokens with C choices each, and at most one block more for each
expert that gets any. Memory: [N C + E block, D] and as much of hidden units.
"""

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maxtrain.ops.dot import MatmulPrecision
from maxtrain.ops.einsum import contract
from maxtrain.ops.names import PRODUCT, named
from maxtrain.ops.quantized import QuantizedArray, again, dequantize
from maxtrain.ops.tokamax import grouped_outer_product, grouped_product

Kernel = Literal["blocks", "ragged", "tokamax"]


class SortedChoices(NamedTuple):
    """Where the choices of tokens lie when they are sorted by expert. Rows that are there to fill a
    block have no choice.

    Attributes:
        rows: of each choice; M, the number of rows, where it goes to no expert.
        choices: of each row, token * C + choice; N C where it has none.
        starts: the first row of each expert.
        blocks: how many blocks each expert has.
    """

    rows: Int[Array, "N C"]
    choices: Int[Array, " M"]
    starts: Int[Array, " E"]
    blocks: Int[Array, " E"]


def block_size(num_choices: int, num_experts: int) -> int:
    """Rows of a block: an eighth of an equal share, as a power of 2 from 8 to 256, so that filling
    blocks adds a sixteenth to the products."""
    wanted = max(num_choices // (8 * num_experts), 1)
    return min(max(1 << (wanted.bit_length() - 1), 8), 256)


def order_by_expert(experts: Int[Array, "N C"], num_experts: int, block: int) -> SortedChoices:
    """The order of choices by expert, and for one expert as they come.

    Args:
        experts: of each choice; `num_experts` or more where it goes to none.
        num_experts: E.
        block: rows of a block.
    """
    num_tokens, num_choices = experts.shape
    count = num_tokens * num_choices
    # Of those that get a choice, each may leave the better part of a block empty.
    num_rows = -(-count // block) * block + min(num_experts, count) * block
    flat = experts.reshape(count)
    by_expert = jnp.argsort(flat, stable=True)
    bounds = jnp.searchsorted(flat[by_expert], jnp.arange(num_experts + 1))
    blocks = -(-(bounds[1:] - bounds[:-1]) // block)
    starts = (jnp.cumsum(blocks) - blocks) * block
    # Of choice number i in the sorted order, where it lies once blocks are filled.
    expert = jnp.minimum(flat[by_expert], num_experts - 1)
    rows = starts[expert] + jnp.arange(count) - bounds[expert]
    rows = jnp.where(flat[by_expert] < num_experts, rows, num_rows)
    choices = jnp.full(num_rows, count).at[rows].set(by_expert, mode="drop")
    rows_of_choices = jnp.zeros(count, rows.dtype).at[by_expert].set(rows, unique_indices=True)
    return SortedChoices(rows_of_choices.reshape(experts.shape), choices, starts, blocks)


def order_by_pair(
    experts: Int[Array, "N C"],
    sets: Int[Array, " N"],
    num_experts: int,
    num_sets: int,
    block: int,
) -> tuple[SortedChoices, SortedChoices]:
    """The order of choices by expert, and for one expert by a number of their token.

    Args:
        experts, num_experts, block: as of `order_by_expert`.
        sets: of each token, a number below `num_sets`.

    Returns:
        The order of experts; and that of pairs, expert * num_sets + number, with the same rows.
    """
    pairs = experts * num_sets + sets[:, None]
    of_pairs = order_by_expert(pairs, num_experts * num_sets, block)
    # The pairs of an expert are neighbours.
    starts = of_pairs.starts[::num_sets]
    blocks = of_pairs.blocks.reshape(num_experts, num_sets).sum(1)
    return of_pairs._replace(starts=starts, blocks=blocks), of_pairs


def order_by_place(
    experts: Int[Array, "B T C"], places: Int[Array, "B T C"], num_experts: int, capacity: int
) -> SortedChoices:
    """The order of choices where each expert has a row for each place of each row of the batch:
    [E, B, capacity]; arguments as of `routing.within_capacity`."""
    num_rows = num_experts * experts.shape[0] * capacity
    row = jnp.arange(experts.shape[0])[:, None, None]
    rows = (experts * experts.shape[0] + row) * capacity + places
    rows = jnp.where(experts < num_experts, rows, num_rows)
    rows = rows.reshape(-1, experts.shape[-1])
    choices = jnp.full(num_rows, rows.size)
    choices = choices.at[rows.reshape(-1)].set(jnp.arange(rows.size), mode="drop")
    starts = jnp.arange(num_experts) * experts.shape[0] * capacity
    # One block for each row of the batch.
    blocks = jnp.full(num_experts, experts.shape[0])
    return SortedChoices(rows, choices, starts, blocks)


def _rows_of(x: Float[Array, "N D"], index: Int[Array, "*s"]) -> Float[Array, "*s D"]:
    """Rows by index; zeros where there is none."""
    return jnp.take(x, index, axis=0, mode="fill", fill_value=0)


@jax.custom_vjp
def dispatch(x: Float[Array, "N D"], order: SortedChoices) -> Float[Array, "M D"]:
    """The inputs of all choices, sorted by expert; zeros in rows without a choice."""
    num_choices = order.rows.shape[1]
    return _rows_of(x, order.choices // num_choices)


def _dispatch_forward(x: Array, order: SortedChoices) -> tuple[Array, tuple]:
    return dispatch(x, order), (order, jnp.zeros((), x.dtype))


def _dispatch_backward(saved: tuple, g: Array) -> tuple[Array, None]:
    order, like_x = saved
    dx = _rows_of(g, order.rows).astype(jnp.float32).sum(1)
    return dx.astype(like_x.dtype), None


dispatch.defvjp(_dispatch_forward, _dispatch_backward)


@jax.custom_vjp
def combine(
    y: Float[Array, "M D"], weights: Float[Array, "N C"], order: SortedChoices
) -> Float[Array, "N D"]:
    """What each token gets: the outputs of its choices times their weights, summed in float32."""
    rows = _rows_of(y, order.rows).astype(jnp.float32)
    return (rows * weights[..., None]).sum(1)


def _combine_forward(y: Array, weights: Array, order: SortedChoices) -> tuple[Array, tuple]:
    return combine(y, weights, order), (y, weights, order)


def _combine_backward(saved: tuple, g: Array) -> tuple[Array, Array, None]:
    y, weights, order = saved
    num_choices = order.rows.shape[1]
    of_row = jnp.take(weights.reshape(-1), order.choices, mode="fill", fill_value=0)
    dy = _rows_of(g, order.choices // num_choices) * of_row[:, None]
    dweights = (_rows_of(y, order.rows).astype(jnp.float32) * g[:, None, :]).sum(-1)
    return dy.astype(y.dtype), dweights, None


combine.defvjp(_combine_forward, _combine_backward)


def expert_of_rows(order: SortedChoices, block: int) -> Int[Array, " M"]:
    """The expert of each row; E for rows behind those of the last one."""
    ends = order.starts + order.blocks * block
    return jnp.searchsorted(ends, jnp.arange(order.choices.size), side="right")


def add_bias(
    y: Float[Array, "M O"], bias: Float[Array, "E O"], experts: Int[Array, " M"]
) -> Float[Array, "M O"]:
    """y and the bias of each row's expert, float32. The gradient of a bias is a product, so that
    its sum has one order."""
    is_expert = jax.nn.one_hot(experts, bias.shape[0], dtype=jnp.float32)
    return y.astype(jnp.float32) + contract("me,eo->mo", is_expert, bias.astype(jnp.float32))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def grouped_dot(
    x: Float[Array, "M I"],
    w: Float[Array, "E I O"],
    order: SortedChoices,
    block: int,
    kernel: Kernel,
    recipe: MatmulPrecision,
) -> Float[Array, "M O"]:
    """Each row times the matrix of its expert; rows behind those of the last expert are 0.

    Args:
        x: as of `dispatch`.
        w: of each expert.
        order: of the rows.
        block: rows of a block.
        kernel: "blocks": a loop over experts and their blocks; "ragged": `lax.ragged_dot`, which
            has kernels on TPUs, and elsewhere multiplies every row with every expert; "tokamax":
            that package's kernels for TPUs and Hopper GPUs, for I and O from 128 on.
        recipe: what is rounded to which type, as in `ops.dot`.

    Returns:
        Of the recipe's type.
    """
    out = _product(x.astype(recipe.inputs), w.astype(recipe.inputs), order, block, kernel)
    return out.astype(recipe.result)


def _forward(
    x: Array, w: Array, order: SortedChoices, block: int, kernel: Kernel, recipe: MatmulPrecision
) -> tuple[Array, tuple]:
    rounded = x.astype(recipe.inputs)
    out = grouped_dot(rounded, w, order, block, kernel, recipe)
    out = named(out, PRODUCT)
    return out, (rounded, w, order, jnp.zeros((), x.dtype))


def _backward(
    block: int, kernel: Kernel, recipe: MatmulPrecision, saved: tuple, g: Array
) -> tuple[Array, Array, None]:
    x, w, order, like_x = saved
    g = g.astype(recipe.gradient)
    turned = w.astype(recipe.gradient).swapaxes(1, 2)
    dx = _product(g, turned, order, block, kernel)
    dw = _outer_product(x.astype(recipe.gradient), g, order, block, kernel)
    return dx.astype(like_x.dtype), dw.astype(w.dtype), None


grouped_dot.defvjp(_forward, _backward)


def _product(x: Array, w: Array, order: SortedChoices, block: int, kernel: Kernel) -> Array:
    """[M, I] and [E, I, O] to [M, O], float32."""
    if kernel == "tokamax":
        return grouped_product(x, w, order.blocks * block, _precision(x))
    if kernel == "ragged":
        return jax.lax.ragged_dot(
            x,
            w,
            order.blocks * block,
            precision=_precision(x),
            preferred_element_type=jnp.float32,
        )
    if kernel != "blocks":
        raise AssertionError(f"model.routing.kernel={kernel} has no product")

    def matrix_of(expert: Array) -> Array:
        return w[expert]

    return _by_blocks(x, matrix_of, w.shape[2], order, block)


def _by_blocks(
    x: Array,
    matrix_of: Callable[[Array], Array],
    num_outputs: int,
    order: SortedChoices,
    block: int,
) -> Array:
    """[M, I] to [M, O], float32, with the matrix [I, O] of each expert when its turn comes."""
    num_inputs = x.shape[1]

    def of_expert(expert: Array, out: Array) -> Array:
        matrix = matrix_of(expert)

        def of_block(number: Array, out: Array) -> Array:
            row = order.starts[expert] + number * block
            inputs = jax.lax.dynamic_slice(x, (row, 0), (block, num_inputs))
            made = contract("bi,io->bo", inputs, matrix)
            return jax.lax.dynamic_update_slice(out, made, (row, 0))

        return jax.lax.fori_loop(0, order.blocks[expert], of_block, out)

    out = jnp.zeros((x.shape[0], num_outputs), jnp.float32)
    return jax.lax.fori_loop(0, order.starts.size, of_expert, out)


def _outer_product(x: Array, g: Array, order: SortedChoices, block: int, kernel: Kernel) -> Array:
    """[M, I] and [M, O] to [E, I, O], float32: for each expert the sum over its rows."""
    num_experts = order.starts.size
    if kernel == "tokamax":
        return grouped_outer_product(x, g, order.blocks * block, _precision(x))
    if kernel == "ragged":
        numbers = jax.lax.RaggedDotDimensionNumbers(
            dot_dimension_numbers=(((0,), (0,)), ((), ())),
            lhs_ragged_dimensions=[0],
            rhs_group_dimensions=[],
        )
        return jax.lax.ragged_dot_general(
            x,
            g,
            order.blocks * block,
            numbers,
            precision=_precision(x),
            preferred_element_type=jnp.float32,
        )
    num_inputs = x.shape[1]
    num_outputs = g.shape[1]

    def of_expert(expert: Array, out: Array) -> Array:
        def of_block(number: Array, total: Array) -> Array:
            row = order.starts[expert] + number * block
            inputs = jax.lax.dynamic_slice(x, (row, 0), (block, num_inputs))
            outputs = jax.lax.dynamic_slice(g, (row, 0), (block, num_outputs))
            return total + contract("bi,bo->io", inputs, outputs)

        zeros = jnp.zeros((num_inputs, num_outputs), jnp.float32)
        total = jax.lax.fori_loop(0, order.blocks[expert], of_block, zeros)
        return jax.lax.dynamic_update_index_in_dim(out, total, expert, 0)

    out = jnp.zeros((num_experts, num_inputs, num_outputs), jnp.float32)
    return jax.lax.fori_loop(0, num_experts, of_expert, out)


def _precision(x: Array) -> str | None:
    """As `contract`: exact products of float32."""
    if x.dtype == jnp.float32:
        return "highest"
    return None


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def expert_dot(
    x: Float[Array, "E R I"], w: Float[Array, "E I O"], recipe: MatmulPrecision
) -> Float[Array, "E R O"]:
    """Each expert's rows times its matrix, where all experts have as many; types as in
    `ops.dot`."""
    out = contract("eri,eio->ero", x.astype(recipe.inputs), w.astype(recipe.inputs))
    return out.astype(recipe.result)


def _expert_forward(x: Array, w: Array, recipe: MatmulPrecision) -> tuple[Array, tuple]:
    rounded = x.astype(recipe.inputs)
    out = named(expert_dot(rounded, w, recipe), PRODUCT)
    return out, (rounded, w, jnp.zeros((), x.dtype))


def _expert_backward(recipe: MatmulPrecision, saved: tuple, g: Array) -> tuple[Array, Array]:
    x, w, like_x = saved
    g = g.astype(recipe.gradient)
    dx = contract("ero,eio->eri", g, w.astype(recipe.gradient))
    dw = contract("eri,ero->eio", x.astype(recipe.gradient), g)
    return dx.astype(like_x.dtype), dw.astype(w.dtype)


expert_dot.defvjp(_expert_forward, _expert_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def quantized_grouped_dot(
    x: Float[Array, "M I"],
    weights: QuantizedArray,
    order: SortedChoices,
    block: int,
    kernel: Kernel,
    recipe: MatmulPrecision,
) -> Float[Array, "M O"]:
    """`grouped_dot` with quantised weights [E, I, O], which have no gradient. With "blocks" those
    of one expert at a time are there in full."""
    out = _quantized_product(x.astype(recipe.inputs), weights, order, block, kernel, False)
    return out.astype(recipe.result)


def _quantized_forward(
    x: Array,
    weights: QuantizedArray,
    order: SortedChoices,
    block: int,
    kernel: Kernel,
    recipe: MatmulPrecision,
) -> tuple[Array, tuple]:
    out = quantized_grouped_dot(x, weights, order, block, kernel, recipe)
    return named(out, PRODUCT), (weights, order, jnp.zeros((), x.dtype))


def _quantized_backward(
    block: int, kernel: Kernel, recipe: MatmulPrecision, saved: tuple, g: Array
) -> tuple[Array, None, None]:
    weights, order, like_x = saved
    weights, g = again(weights, g.astype(recipe.gradient))
    dx = _quantized_product(g, weights, order, block, kernel, True)
    return dx.astype(like_x.dtype), None, None


quantized_grouped_dot.defvjp(_quantized_forward, _quantized_backward)


def _quantized_product(
    x: Array,
    weights: QuantizedArray,
    order: SortedChoices,
    block: int,
    kernel: Kernel,
    is_turned: bool,
) -> Array:
    """`_product` with quantised weights, or with each expert's matrix turned around."""

    def matrix_of(expert: Array) -> Array:
        one = QuantizedArray(weights.codes[expert], weights.scales[expert])
        matrix = dequantize(one, x.dtype)
        if is_turned:
            matrix = matrix.T
        return matrix

    if kernel != "blocks":
        matrices = dequantize(weights, x.dtype)
        if is_turned:
            matrices = matrices.swapaxes(1, 2)
        return _product(x, matrices, order, block, kernel)
    num_outputs = weights.scales.shape[-1]
    if is_turned:
        num_outputs = weights.num_inputs
    return _by_blocks(x, matrix_of, num_outputs, order, block)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def quantized_expert_dot(
    x: Float[Array, "E R I"], weights: QuantizedArray, recipe: MatmulPrecision
) -> Float[Array, "E R O"]:
    """`expert_dot` with quantised weights, which have no gradient."""
    matrices = dequantize(weights, recipe.inputs)
    out = contract("eri,eio->ero", x.astype(recipe.inputs), matrices)
    return out.astype(recipe.result)


def _quantized_expert_forward(
    x: Array, weights: QuantizedArray, recipe: MatmulPrecision
) -> tuple[Array, tuple]:
    out = named(quantized_expert_dot(x, weights, recipe), PRODUCT)
    return out, (weights, jnp.zeros((), x.dtype))


def _quantized_expert_backward(
    recipe: MatmulPrecision, saved: tuple, g: Array
) -> tuple[Array, None]:
    weights, like_x = saved
    weights, g = again(weights, g)
    matrices = dequantize(weights, recipe.gradient)
    dx = contract("ero,eio->eri", g.astype(recipe.gradient), matrices)
    return dx.astype(like_x.dtype), None


quantized_expert_dot.defvjp(_quantized_expert_forward, _quantized_expert_backward)
