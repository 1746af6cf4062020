"""The weights of matrix products: a kernel, perhaps a bias, and the recipe of the product."""

import math

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from maxtrain.models.init import Initializer, Role
from maxtrain.models.lora import Adapter
from maxtrain.models.lora_bank import AdapterBank
from maxtrain.ops.dot import Recipe, dot
from maxtrain.parallel.sharding import Axes


class Linear(nnx.Module):
    """x kernel + bias.

    The product itself is two-dimensional ([D, N*H]), which is faster.

    Args:
        key: that the kernel is drawn from.
        inputs: logical names and sizes of the dims that the product sums over.
        outputs: those of the dims that it makes.
        init: draws the kernel; a bias starts at 0.
        recipe: types of the product.
        role: what the matrix does, for its initial values, muP and groups of the optimizer.
        bias: whether there is one.
    """

    def __init__(
        self,
        key: Key[Array, ""],
        inputs: dict[str, int],
        outputs: dict[str, int],
        init: Initializer,
        recipe: Recipe,
        role: Role = "hidden",
        bias: bool = False,
    ):
        axes: Axes = (*inputs, *outputs)
        shape = (*inputs.values(), *outputs.values())
        self.kernel = init.matrix(key, shape, axes, role)
        # Assigned once: what is first None stays out of the module's parameters.
        vector = None
        if bias:
            vector = init.bias(tuple(outputs.values()), tuple(outputs), role)
        self.bias = vector
        self.num_inputs = len(inputs)
        self.recipe = recipe
        self.adapter: Adapter | AdapterBank | None = nnx.data(None)

    def weights(self) -> Float[Array, "..."]:
        """[*inputs, *outputs] of what the product is with, for whoever makes it in another way."""
        if self.adapter is None:
            return self.kernel[...]
        assert isinstance(self.adapter, Adapter), "a bank has other weights for each row"
        return self.adapter.adapted(self.kernel[...])

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """[..., *inputs] -> [..., *outputs], of the recipe's type."""
        input_shape = self.kernel.shape[: self.num_inputs]
        output_shape = self.kernel.shape[self.num_inputs :]
        num_inputs = math.prod(input_shape)
        leading = x.shape[: x.ndim - self.num_inputs]
        matrix = self.kernel[...].reshape(num_inputs, math.prod(output_shape))
        x = x.reshape(*leading, num_inputs)
        out = dot(x, matrix, self.recipe)
        if isinstance(self.adapter, AdapterBank):
            out = self.adapter(x, out, self.recipe)
        elif self.adapter is not None:
            out = self.adapter(x, out, matrix, self.recipe)
        out = out.reshape(*leading, *output_shape)
        if self.bias is not None:
            # In float32, so that the gradient of the bias is summed in it.
            out = out.astype(jnp.float32) + self.bias[...].astype(jnp.float32)
        return out.astype(self.recipe.result)


class ExpertLinear(nnx.Module):
    """The weights of one product of every expert; models/moe.py makes the products.

    Args:
        key: that the kernel is drawn from.
        num_experts: E.
        inputs: logical name and size of the dim that the product sums over.
        outputs: those of the dim that it makes.
        init, recipe, role, bias: as of `Linear`.
    """

    def __init__(
        self,
        key: Key[Array, ""],
        num_experts: int,
        inputs: dict[str, int],
        outputs: dict[str, int],
        init: Initializer,
        recipe: Recipe,
        role: Role = "hidden",
        bias: bool = False,
    ):
        self.kernel_axes: Axes = ("exp", *inputs, *outputs)
        self.bias_axes: Axes = ("exp", *outputs)
        shape = (num_experts, *inputs.values(), *outputs.values())
        self.kernel = init.matrix(key, shape, self.kernel_axes, role)
        # Assigned once: what is first None stays out of the module's parameters.
        vectors = None
        if bias:
            vectors = init.bias((num_experts, *outputs.values()), self.bias_axes, role)
        self.bias = vectors
        self.num_inputs = len(inputs)
        self.recipe = recipe
        self.adapter: Adapter | None = nnx.data(None)

    def weights(self) -> Float[Array, "E ..."]:
        """Of all experts' products, with what adapters do to them."""
        if self.adapter is None:
            return self.kernel[...]
        return self.adapter.adapted(self.kernel[...])
