"""Products of tokens with the weights of their experts (grouped matrix products): tokens sorted by
expert, in blocks.

Choices of tokens are sorted by expert. Those of each expert begin a new block, so that every block
has one expert. Rows are moved there and back by gathers, in the backward pass as well. No sum is
scattered, so results do not depend on the order of threads.

Cost: N C rows of products for N tokens with C choices each, and at most one additional block for
each expert that gets any. Memory: [N C + E block, D] and the same number of hidden units.
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
    """The order of the tokens' choices, sorted by expert. Rows that pad a block have no choice.

    Attributes:
        rows: the row of each choice; M, the number of rows, for no expert.
        choices: the choice of each row, token * C + choice; N C for padding.
        starts: the first row of each expert.
        blocks: the number of blocks of each expert.
    """

    rows: Int[Array, "N C"]
    choices: Int[Array, " M"]
    starts: Int[Array, " E"]
    blocks: Int[Array, " E"]


def block_size(num_choices: int, num_experts: int) -> int:
    """Return the rows of a block: an eighth of an equal share, as a power of 2 from 8 to 256, so
    that padding adds about a sixteenth to the products."""
    wanted = max(num_choices // (8 * num_experts), 1)
    return min(max(1 << (wanted.bit_length() - 1), 8), 256)


def order_by_expert(experts: Int[Array, "N C"], num_experts: int, block: int) -> SortedChoices:
    """Sort choices by expert; the choices of one expert keep their order.

    Args:
        experts: the expert of each choice; `num_experts` or more for no expert.
        num_experts: E.
        block: rows of a block.
    """
    num_tokens, num_choices = experts.shape
    count = num_tokens * num_choices
    # Each expert with a choice may leave most of one block empty.
    num_rows = -(-count // block) * block + min(num_experts, count) * block
    flat = experts.reshape(count)
    by_expert = jnp.argsort(flat, stable=True)
    bounds = jnp.searchsorted(flat[by_expert], jnp.arange(num_experts + 1))
    blocks = -(-(bounds[1:] - bounds[:-1]) // block)
    starts = (jnp.cumsum(blocks) - blocks) * block
    # The row of choice number i in the sorted order, with padding of blocks.
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
    """Sort choices by expert, and within an expert by the set of their token.

    Args:
        experts, num_experts, block: as for `order_by_expert`.
        sets: the set of each token, a number below `num_sets`.

    Returns:
        the order of experts; and that of pairs, expert * num_sets + set, with the same rows.
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
    """Return the order in which each expert has a row for each place of each row of the batch: [E,
    B, capacity]; arguments as for `routing.within_capacity`."""
    num_rows = num_experts * experts.shape[0] * capacity
    row = jnp.arange(experts.shape[0])[:, None, None]
    rows = (experts * experts.shape[0] + row) * capacity + places
    rows = jnp.where(experts < num_experts, rows, num_rows)
    rows = rows.reshape(-1, experts.shape[-1])
    choices = jnp.full(num_rows, rows.size)
    choices = choices.at[rows.reshape(-1)].set(jnp.arange(rows.size), mode="drop")
    starts = jnp.arange(num_experts) * experts.shape[0] * capacity
    # There is one block for each row of the batch.
    blocks = jnp.full(num_experts, experts.shape[0])
    return SortedChoices(rows, choices, starts, blocks)


def _rows_of(x: Float[Array, "N D"], index: Int[Array, "*s"]) -> Float[Array, "*s D"]:
    """Gather rows by index; zeros for indices out of range."""
    return jnp.take(x, index, axis=0, mode="fill", fill_value=0)


@jax.custom_vjp
def dispatch(x: Float[Array, "N D"], order: SortedChoices) -> Float[Array, "M D"]:
    """Return the inputs of all choices, sorted by expert; zeros in padding rows."""
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
    """Return the sum of each token's expert outputs times their weights, in float32."""
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
    """Return the expert of each row; E for rows after the last expert's."""
    ends = order.starts + order.blocks * block
    return jnp.searchsorted(ends, jnp.arange(order.choices.size), side="right")


def add_bias(
    y: Float[Array, "M O"], bias: Float[Array, "E O"], experts: Int[Array, " M"]
) -> Float[Array, "M O"]:
    """Add the bias of each row's expert to y, in float32. The gradient of a bias is a product, so
    that the order of its sum is fixed."""
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
    """Multiply each row with the matrix of its expert; rows after the last expert's are 0.

    Args:
        x: rows from `dispatch`.
        w: the matrix of each expert.
        order: the order of the rows.
        block: rows of a block.
        kernel: "blocks": a loop over experts and their blocks; "ragged": `lax.ragged_dot`, which
            has kernels on TPUs, and elsewhere multiplies every row with every expert; "tokamax":
            that package's kernels for TPUs and Hopper GPUs, for I and O from 128 on.
        recipe: types of the product, as in `ops.dot`.

    Returns:
        the products, in the recipe's type.
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
    """Multiply [M, I] and [E, I, O] to [M, O], float32."""
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
    """Multiply [M, I] to [M, O], float32, with the matrix [I, O] of each expert in turn."""
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
    """Multiply [M, I] and [M, O] to [E, I, O], float32: for each expert the sum over its rows."""
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
    """Return the precision of `contract`: exact products of float32."""
    if x.dtype == jnp.float32:
        return "highest"
    return None


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def expert_dot(
    x: Float[Array, "E R I"], w: Float[Array, "E I O"], recipe: MatmulPrecision
) -> Float[Array, "E R O"]:
    """Multiply each expert's rows with its matrix, if all experts have the same number of rows;
    types as in `ops.dot`."""
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
    """Compute `grouped_dot` with quantised weights [E, I, O], which have no gradient. With
    "blocks", one expert's weights at a time are dequantised."""
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
    """Compute `_product` with quantised weights, or with each expert's matrix transposed."""

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
    """Compute `expert_dot` with quantised weights, which have no gradient."""
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
