"""Low-rank adapters (LoRA) of products with weights.

A product x W becomes x W + s (x A) B, where A has r columns and B has r rows, and s is alpha / r. B
begins at 0, so that a model with new adapters equals the one without them, bit for bit. With
magnitudes (DoRA), the norm of the weights of each output is a parameter of its own, m: the product
is x (W + s A B) m / |W + s A B|, whose norms are constants for gradients. In training, the inputs
of A may have dropout.

Sources: Hu et al. 2021, https://arxiv.org/abs/2106.09685; s = alpha / sqrt(r): Kalajdzievski 2023,
    https://arxiv.org/abs/2312.03732; magnitudes: Liu et al. 2024, https://arxiv.org/abs/2402.09353.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from maxtrain.config.schema import LoraConfig
from maxtrain.models.context import TrainNoise
from maxtrain.models.init import Initializer
from maxtrain.ops.dot import MatmulPrecision, dot
from maxtrain.parallel.sharding import Axes


class AdapterParam(nnx.Param):
    """A parameter of an adapter."""


def scale_of(lora: LoraConfig) -> float:
    """Return s."""
    assert lora.rank is not None
    if lora.scaling == "root":
        return lora.alpha / math.sqrt(lora.rank)
    if lora.scaling != "rank":
        raise AssertionError(f"model.lora.scaling={lora.scaling} is not known")
    return lora.alpha / lora.rank


class Adapter(nnx.Module):
    """The low-rank adapter of one product, or of that product of each expert.

    Args:
        kernel: the weights of the product, [*stacked, *inputs, *outputs].
        axes: their logical axes, without that of stacked layers.
        num_inputs: number of dims that the product sums over.
        lora: rank, scaling and dropout.
        init: draws A.
        key: random key of A.
        place: a number that is unique in its layer, for random keys.
    """

    def __init__(
        self,
        kernel: Float[Array, "..."],
        axes: Axes,
        num_inputs: int,
        lora: LoraConfig,
        init: Initializer,
        key: Key[Array, ""],
        place: int,
    ):
        assert lora.rank is not None
        # Leading dims of experts, if any, and of layers.
        experts = axes[:1] if axes[0] == "exp" else ()
        inputs = axes[len(experts) : len(experts) + num_inputs]
        outputs = axes[len(experts) + num_inputs :]
        stacked = kernel.shape[: kernel.ndim - len(inputs) - len(outputs)]
        input_shape = kernel.shape[len(stacked) : len(stacked) + num_inputs]
        output_shape = kernel.shape[len(stacked) + num_inputs :]
        # The deviation of a uniform distribution between -1 / sqrt(inputs) and 1 / sqrt(inputs).
        deviation = 1 / math.sqrt(3 * math.prod(input_shape))
        shape = (*stacked, *input_shape, lora.rank)
        self.a = AdapterParam(
            init.uniform(key, shape, deviation), axes=(*experts, *inputs, "rank"), role="hidden"
        )
        self.b = AdapterParam(
            jnp.zeros((*stacked, lora.rank, *output_shape), jnp.float32),
            axes=(*experts, "rank", *outputs),
            role="hidden",
        )
        magnitude = None
        if lora.magnitudes and not experts:
            summed = tuple(range(len(stacked), len(stacked) + num_inputs))
            magnitude = AdapterParam(lengths(kernel, summed), axes=outputs, role="bias")
        self.magnitude = magnitude
        self.num_inputs = num_inputs
        self.num_experts_dims = len(experts)
        self.scale = scale_of(lora)
        self.dropout = lora.dropout
        self.place = place

    def seen(self, x: Float[Array, "B *s"], noise: TrainNoise | None) -> Float[Array, "B *s"]:
        """Return the inputs of A: x itself, or in training x after dropout."""
        if noise is None or not self.dropout:
            return x
        return noise.of_adapter(x, self.place, self.dropout)

    def added(
        self, x: Float[Array, "*b i"], out: Float[Array, "*b o"], recipe: MatmulPrecision
    ) -> Float[Array, "*b o"]:
        """Add s (x A) B to a product, float32.

        Args:
            x: inputs of the product, as one dim.
            out: the product without the adapter.
            recipe: types of the product.
        """
        a, b = self._matrices()
        exact = MatmulPrecision.of(recipe.inputs)
        return out.astype(jnp.float32) + self.scale * dot(dot(x, a, exact), b, exact)

    def scaled(
        self, out: Float[Array, "*b o"], kernel: Float[Array, "i o"]
    ) -> Float[Array, "*b o"]:
        """Scale a product to the norms that magnitudes say.

        Args:
            out: the product including s (x A) B.
            kernel: the kernel of the product.
        """
        assert self.magnitude is not None
        changed = jax.lax.stop_gradient(kernel.astype(jnp.float32) + self.change())
        return out * _ratio(self.magnitude[...].reshape(-1), lengths(changed, (0,)))

    def change(self) -> Float[Array, "*e i o"]:
        """Return s A B, float32, of one layer's product."""
        a, b = self._matrices()
        return self.scale * jnp.matmul(a, b, precision="highest")

    def adapted(self, kernel: Array) -> Array:
        """Return the kernel of one layer merged with the adapter, float32, in its shape."""
        changed = kernel.astype(jnp.float32) + self.change().reshape(kernel.shape)
        if self.magnitude is None:
            return changed
        summed = tuple(range(self.num_inputs))
        constant = jax.lax.stop_gradient(lengths(changed, summed))
        return changed * _ratio(self.magnitude[...], constant)

    def _matrices(self) -> tuple[Float[Array, "*e i r"], Float[Array, "*e r o"]]:
        a = self.a[...]
        b = self.b[...]
        experts = a.shape[: self.num_experts_dims]
        rank = a.shape[-1]
        return a.reshape(*experts, -1, rank), b.reshape(*experts, rank, -1)


def _ratio(magnitude: Array, length: Array) -> Array:
    """Return m / |W|; 1 for outputs whose weights are all 0, which no factor changes."""
    is_there = length > 0
    return jnp.where(is_there, magnitude / jnp.where(is_there, length, 1), 1)


def lengths(kernel: Array, summed: tuple[int, ...]) -> Array:
    """Return the Euclidean norm of the weights of each output, float32."""
    return jnp.sqrt(jnp.square(kernel.astype(jnp.float32)).sum(summed))
