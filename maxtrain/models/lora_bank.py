"""Adapters of several fine-tunings of one product, one per row of a batch.

The weights of the model exist once. Two small products are added for each row, with matrices from a
bank by the number of the row's adapter set; set 0 adds nothing. So rows without adapters and rows
with any of them are computed together.

Source: Sheng et al. 2023, https://arxiv.org/abs/2311.03285.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from maxtrain.ops.dot import MatmulPrecision
from maxtrain.ops.einsum import contract


class BankParam(nnx.Variable):
    """Weights of the adapters in a bank."""


class ChosenAdapters(nnx.Variable):
    """The number of each row's adapter set, [*L, B], or [*L, 1] for all rows; 0: none."""


class AdapterBank(nnx.Module):
    """Bank of adapters for one product.

    Args:
        a, b: matrices of each adapter set; stacked over layers like the kernel.
        scale: factor of the product with both.
        factor: factor of each output afterwards (DoRA); None: there is none.
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
        """Add the adapters of each row to the product.

        Args:
            x: inputs of the product.
            out: the product without adapters.
            recipe: types of the product.
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
    """Set the numbers of the rows' adapter sets in the variables of a model."""
    flat = dict(nnx.to_flat_state(variables))
    for path, variable in flat.items():
        if isinstance(variable, ChosenAdapters):
            stacked = variable.get_value().shape[:-1]
            rows = jnp.broadcast_to(numbers, (*stacked, *numbers.shape))
            flat[path] = variable.replace(rows)
    return nnx.from_flat_state(flat)


def num_sets(variables: nnx.State) -> int:
    """Return the number of adapter sets of a model; 0: none."""
    for path, variable in nnx.to_flat_state(variables):
        if isinstance(variable, BankParam) and path[-1] == "a":
            return variable.get_value().shape[-3] - 1
    return 0
