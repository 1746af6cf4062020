"""Adapters of several fine-tunings for the products of experts, one per row of a batch; see
`lora_bank`.

Tokens of one expert are sorted by the adapter set of their row, so that each block of tokens has
one expert and one set. The product with the expert's weights is unaffected, and the products with A
and B have a matrix for each expert and set.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from maxtrain.models.lora_bank import BankParam, ChosenAdapters
from maxtrain.ops.dot import MatmulPrecision
from maxtrain.ops.experts import Kernel, SortedChoices, expert_dot, grouped_dot


class ExpertBank(nnx.Module):
    """Bank of adapters for one product of every expert. Set 0 adds nothing.

    Args:
        a: matrices A of each expert and set; stacked over layers like the kernel.
        b: matrices B of each expert and set, times the scale of the set.
    """

    def __init__(self, a: Float[Array, "*L E S I R"], b: Float[Array, "*L E S R O"]):
        self.a = BankParam(a)
        self.b = BankParam(b)
        self.chosen = ChosenAdapters(jnp.zeros((*a.shape[:-4], 1), jnp.int32))

    def of_rows(self, num_rows: int) -> Int[Array, " B"]:
        """Return the number of each row's set."""
        return jnp.broadcast_to(self.chosen[...], (num_rows,))


def added_by_pairs(
    x: Float[Array, "M I"],
    a: Float[Array, "E S I R"],
    b: Float[Array, "E S R O"],
    pairs: SortedChoices,
    block: int,
    kernel: Kernel,
    recipe: MatmulPrecision,
) -> Float[Array, "M O"]:
    """Return the adapters' contribution to rows sorted by pairs of expert and set, float32.

    Args:
        x: rows in the order of pairs.
        pairs: the order from `order_by_pair`.
        block, kernel: as for `grouped_dot`.
        recipe: types of the product.
    """
    exact = MatmulPrecision.of(recipe.inputs)
    low = grouped_dot(x, a.reshape(-1, *a.shape[2:]), pairs, block, kernel, exact)
    return grouped_dot(low, b.reshape(-1, *b.shape[2:]), pairs, block, kernel, exact)


def added_by_sets(
    x: Float[Array, "E M I"],
    a: Float[Array, "E S I R"],
    b: Float[Array, "E S R O"],
    numbers: Int[Array, " M"],
    recipe: MatmulPrecision,
) -> Float[Array, "E M O"]:
    """Return the adapters' contribution if all experts have the same number of rows: every set is
    applied to all rows, and only the row's own set is kept.

    Args:
        numbers: number of each row's set.
    """
    exact = MatmulPrecision.of(recipe.inputs)
    out = jnp.zeros((*x.shape[:2], b.shape[-1]), jnp.float32)
    for number in range(1, a.shape[1]):
        low = expert_dot(x, a[:, number], exact)
        added = expert_dot(low, b[:, number], exact)
        out = out + jnp.where((numbers == number)[:, None], added, 0)
    return out
