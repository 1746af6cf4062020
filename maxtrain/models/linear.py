"""Modules of matrix products: a kernel, an optional bias, and the types of the product."""

import math
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from maxtrain.models.context import TrainNoise
from maxtrain.models.expert_bank import ExpertBank
from maxtrain.models.init import Initializer, Role
from maxtrain.models.lora import Adapter
from maxtrain.models.lora_bank import AdapterBank
from maxtrain.models.quantized import Kernel, QuantizedKernel, kernel_of
from maxtrain.ops.dot import MatmulPrecision, dot
from maxtrain.ops.quantized import quantized_dot
from maxtrain.parallel.sharding import Axes


class Linear(nnx.Module):
    """A product x kernel + bias.

    The product itself is two-dimensional ([D, N*H]), which is faster.

    Args:
        key: random key of the kernel.
        inputs: logical names and sizes of the dims that the product sums over.
        outputs: logical names and sizes of the output dims.
        init: draws the kernel; a bias starts at 0.
        recipe: types of the product.
        role: the role of the matrix, for its initial values, muP and groups of the optimizer.
        bias: whether there is a bias.
    """

    def __init__(
        self,
        key: Key[Array, ""],
        inputs: dict[str, int],
        outputs: dict[str, int],
        init: Initializer,
        recipe: MatmulPrecision,
        role: Role = "hidden",
        bias: bool = False,
    ):
        self.kernel_axes: Axes = (*inputs, *outputs)
        self.input_shape = tuple(inputs.values())
        self.output_shape = tuple(outputs.values())
        shape = (*self.input_shape, *self.output_shape)
        self.kernel: Kernel = init.matrix(key, shape, self.kernel_axes, role)
        # Assigned once, because an attribute that is None first is not registered as a parameter.
        vector = None
        if bias:
            vector = init.bias(tuple(outputs.values()), tuple(outputs), role)
        self.bias = vector
        self.num_inputs = len(inputs)
        self.recipe = recipe
        self.adapter: Adapter | AdapterBank | None = nnx.data(None)

    def weights(self) -> Float[Array, "..."]:
        """Return the weights [*inputs, *outputs] of the product, with its adapter."""
        kernel = kernel_of(self.kernel)
        if self.adapter is None:
            return kernel
        assert isinstance(self.adapter, Adapter), "a bank has other weights for each row"
        return self.adapter.adapted(kernel)

    def __call__(
        self, x: Float[Array, "..."], noise: TrainNoise | None = None
    ) -> Float[Array, "..."]:
        """Multiply [..., *inputs] to [..., *outputs], in the recipe's type.

        Args:
            x: [..., *inputs]; [B, ..., *inputs] with noise.
            noise: noise of the layer in a training step, for an adapter's dropout.
        """
        leading = x.shape[: x.ndim - self.num_inputs]
        x = x.reshape(*leading, math.prod(self.input_shape))
        out = self._product(x)
        if isinstance(self.adapter, AdapterBank):
            out = self.adapter(x, out, self.recipe)
        elif self.adapter is not None:
            out = self._adapted(self.adapter, x, out, noise)
        out = out.reshape(*leading, *self.output_shape)
        if self.bias is not None:
            # The sum is float32, so that the gradient of the bias is accumulated in float32.
            out = out.astype(jnp.float32) + self.bias[...].astype(jnp.float32)
        return out.astype(self.recipe.result)

    def _product(self, x: Float[Array, "*b i"]) -> Float[Array, "*b o"]:
        """Multiply x with the weights alone."""
        if isinstance(self.kernel, QuantizedKernel):
            return quantized_dot(x, self.kernel.matrices(), self.recipe)
        return dot(x, self._matrix(), self.recipe)

    def _adapted(
        self,
        adapter: Adapter,
        x: Float[Array, "*b i"],
        out: Float[Array, "*b o"],
        noise: TrainNoise | None,
    ) -> Float[Array, "*b o"]:
        """Add the adapter's change to the product `out`, float32.

        With dropout, magnitudes scale the result of the remaining inputs, as in PEFT.
        """
        seen = adapter.seen(x, noise)
        if adapter.magnitude is None:
            return adapter.added(seen, out, self.recipe)
        if seen is x:
            return adapter.scaled(adapter.added(x, out, self.recipe), self._matrix())
        of_seen = self._product(seen)
        scaled = adapter.scaled(adapter.added(seen, of_seen, self.recipe), self._matrix())
        return out.astype(jnp.float32) + scaled - of_seen.astype(jnp.float32)

    def _matrix(self) -> Float[Array, "i o"]:
        """Return the kernel as a matrix [inputs, outputs]."""
        return kernel_of(self.kernel).reshape(
            math.prod(self.input_shape), math.prod(self.output_shape)
        )


class ExpertPart(NamedTuple):
    """An array of all experts, and its logical axes."""

    value: Array
    axes: Axes


class ExpertLinear(nnx.Module):
    """The weights of one product of every expert; models/moe.py makes the products.

    Args:
        key: random key of the kernel.
        num_experts: E.
        inputs: logical name and size of the dim that the product sums over.
        outputs: logical name and size of the output dim.
        init, recipe, role, bias: as for `Linear`.
    """

    def __init__(
        self,
        key: Key[Array, ""],
        num_experts: int,
        inputs: dict[str, int],
        outputs: dict[str, int],
        init: Initializer,
        recipe: MatmulPrecision,
        role: Role = "hidden",
        bias: bool = False,
    ):
        self.kernel_axes: Axes = ("exp", *inputs, *outputs)
        self.bias_axes: Axes = ("exp", *outputs)
        self.input_shape = tuple(inputs.values())
        shape = (num_experts, *self.input_shape, *outputs.values())
        self.kernel: Kernel = init.matrix(key, shape, self.kernel_axes, role)
        # Assigned once, because an attribute that is None first is not registered as a parameter.
        vectors = None
        if bias:
            vectors = init.bias((num_experts, *outputs.values()), self.bias_axes, role)
        self.bias = vectors
        self.num_inputs = len(inputs)
        self.recipe = recipe
        self.adapter: Adapter | ExpertBank | None = nnx.data(None)

    def weights(self) -> Float[Array, "E ..."]:
        """Return the kernels of all experts, merged with an adapter that all rows share."""
        kernel = kernel_of(self.kernel)
        if not isinstance(self.adapter, Adapter):
            return kernel
        return self.adapter.adapted(kernel)

    def parts(self) -> dict[str, ExpertPart]:
        """Return the arrays of the products, by names that `Moe` interprets.

        A plain kernel includes its adapter. A quantised kernel stays quantised, and its adapter is
        a separate product, whose scale is in b. Adapters of a bank are separate products as well.
        """
        found = {}
        if isinstance(self.kernel, QuantizedKernel):
            assert isinstance(self.adapter, Adapter)
            codes = self.kernel.codes
            scales = self.kernel.scales
            found["codes"] = ExpertPart(codes[...], codes.get_metadata("axes"))
            found["scales"] = ExpertPart(scales[...], scales.get_metadata("axes"))
            a = self.adapter.a
            b = self.adapter.b
            found["a"] = ExpertPart(a[...], a.get_metadata("axes"))
            found["b"] = ExpertPart(self.adapter.scale * b[...], b.get_metadata("axes"))
        else:
            found["kernel"] = ExpertPart(self.weights(), self.kernel_axes)
        if isinstance(self.adapter, ExpertBank):
            experts, inputs, outputs = self.kernel_axes
            found["bank_a"] = ExpertPart(self.adapter.a[...], (experts, None, inputs, None))
            found["bank_b"] = ExpertPart(self.adapter.b[...], (experts, None, None, outputs))
        if self.bias is not None:
            found["bias"] = ExpertPart(self.bias[...], self.bias_axes)
        return found
