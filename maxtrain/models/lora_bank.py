"""Adapters of several fine-tunings of one product, of which each row of a batch has its own.

The weights of a model are there once. To the product of a row, two small ones are added, with
matrices that are taken from a bank by the number of the row's adapters; number 0 adds nothing. So
rows without adapters and rows with any of them are made together.

Source: Sheng et al. 2023, https://arxiv.org/abs/2311.03285.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from maxtrain.ops.dot import MatmulPrecision
from maxtrain.ops.einsum import contract


class BankParam(nnx.Variable):
    """Weights of adapters."""


class ChosenAdapters(nnx.Variable):
    """The number of each row's adapters, [*L, B], or [*L, 1] for all of them; 0: none."""


class AdapterBank(nnx.Module):
    """What is added to one product.

    Args:
        a, b: of each set of adapters; stacked over layers as the kernel is.
        scale: that the product with both is multiplied with.
        factor: that each output is multiplied with then (DoRA); None: none.
    """

    def __init__(
        self,
        a: Float[Array, "*L C I R"],
        b: Float[Array, "*L C R O"],
        scale: Float[Array, "*L C"],
        factor: Float[Array, "*L C O"] | None,
    ):
        self.a = BankParam(a)
        self.b = BankParam(b)
        self.scale = BankParam(scale)
        of_outputs = None
        if factor is not None:
            of_outputs = BankParam(factor)
        self.factor = of_outputs
        self.chosen = ChosenAdapters(jnp.zeros((*scale.shape[:-1], 1), jnp.int32))

    def __call__(
        self, x: Float[Array, "B T I"], out: Float[Array, "B T O"], recipe: MatmulPrecision
    ) -> Float[Array, "B T O"]:
        """The product with the adapters of each row.

        Args:
            x: what is multiplied.
            out: the product without adapters.
            recipe: of the product.
        """
        chosen = jnp.broadcast_to(self.chosen[...], x.shape[:1])
        dtype = recipe.inputs
        a = self.a[...][chosen].astype(dtype)
        b = self.b[...][chosen].astype(dtype)
        scale = self.scale[...][chosen]
        inner = contract("bti,bir->btr", x.astype(dtype), a)
        change = contract("btr,bro->bto", inner.astype(dtype), b)
        out = out.astype(jnp.float32) + scale[:, None, None] * change
        if self.factor is None:
            return out
        return out * self.factor[...][chosen][:, None]


def with_chosen(variables: nnx.State, numbers: Int[Array, " B"]) -> nnx.State:
    """The variables of a model, in which these are the numbers of the rows' adapters."""
    flat = dict(nnx.to_flat_state(variables))
    for path, variable in flat.items():
        if isinstance(variable, ChosenAdapters):
            stacked = variable.get_value().shape[:-1]
            rows = jnp.broadcast_to(numbers, (*stacked, *numbers.shape))
            flat[path] = variable.replace(rows)
    return nnx.from_flat_state(flat)


def num_sets(variables: nnx.State) -> int:
    """How many sets of adapters a model has side by side; 0: none."""
    for path, variable in nnx.to_flat_state(variables):
        if isinstance(variable, BankParam) and path[-1] == "a":
            return variable.get_value().shape[-3] - 1
    return 0
