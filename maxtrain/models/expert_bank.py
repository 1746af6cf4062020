"""Adapters of several fine-tunings of the products of experts, of which each row of a batch has its
own; see `lora_bank`.

Tokens of one expert are sorted by the set of their row's adapters, so that each block of tokens has
one expert and one set: the product with the expert's weights does not see the difference, and those
with A and B have a matrix for each expert and set.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from maxtrain.models.lora_bank import BankParam, ChosenAdapters
from maxtrain.ops.dot import MatmulPrecision
from maxtrain.ops.experts import Kernel, SortedChoices, expert_dot, grouped_dot


class ExpertBank(nnx.Module):
    """What is added to one product of every expert. Set 0 adds nothing.

    Args:
        a: of each expert and set of adapters; stacked over layers as the kernel is.
        b: likewise, with the scale of each set.
    """

    def __init__(self, a: Float[Array, "*L E S I R"], b: Float[Array, "*L E S R O"]):
        self.a = BankParam(a)
        self.b = BankParam(b)
        self.chosen = ChosenAdapters(jnp.zeros((*a.shape[:-4], 1), jnp.int32))

    def of_rows(self, num_rows: int) -> Int[Array, " B"]:
        """The number of each row's set."""
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
    """What rows get from the adapters of their pair of expert and set, float32.

    Args:
        x: rows in the order of pairs.
        pairs: the order, as `order_by_pair` gives it.
        block, kernel: as of `grouped_dot`.
        recipe: of the product.
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
    """The same where all experts have as many rows: the adapters of every set for all rows, of
    which those of other sets are left out.

    Args:
        numbers: of each row's set.
    """
    exact = MatmulPrecision.of(recipe.inputs)
    out = jnp.zeros((*x.shape[:2], b.shape[-1]), jnp.float32)
    for number in range(1, a.shape[1]):
        low = expert_dot(x, a[:, number], exact)
        added = expert_dot(low, b[:, number], exact)
        out = out + jnp.where((numbers == number)[:, None], added, 0)
    return out
