"""The feed-forward block of a layer."""

import functools
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxtrain.models.context import Context
from maxtrain.models.init import Initializer, Role
from maxtrain.models.linear import Linear
from maxtrain.models.specs import Activation, LayerSpec, MlpSpec
from maxtrain.models.summary import Summary
from maxtrain.ops.dot import MatmulPrecision
from maxtrain.ops.names import GATE_UP, named
from maxtrain.ops.recompute import elementwise
from maxtrain.ops.sums import WeightedSum
from maxtrain.parallel.sharding import constrain


class MlpOut(NamedTuple):
    """The result of a feed-forward block."""

    x: Float[Array, "B T D"]
    # Auxiliary losses, each times its factor, summed over tokens. The sum over layers is divided by
    # the number of the batch's tokens.
    aux_losses: dict[str, WeightedSum]
    # Metrics of the block.
    metrics: dict[str, WeightedSum]
    # Inputs of buffers, by their path in the block, and of summaries, by their names; summed over
    # tokens.
    buffer_inputs: dict[str, Array]


# GELU in the form with tanh: Hendrycks and Gimpel 2016, https://arxiv.org/abs/1606.08415.
_ACTIVATIONS: dict[Activation, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}
# Constants of clamped_swiglu, as in gpt-oss.
SWIGLU_LIMIT = 7.0
SWIGLU_ALPHA = 1.702


def _activated(activation: Activation, x: Array) -> Array:
    """Return activation(x), float32."""
    return _ACTIVATIONS[activation](x.astype(jnp.float32))


def gated(activation: Activation, gate: Array, up: Array) -> Array:
    """Return activation(gate) * up, float32; clamped_swiglu clamps both, and uses up + 1."""
    up = up.astype(jnp.float32)
    if activation == "clamped_swiglu":
        gate = jnp.minimum(gate.astype(jnp.float32), SWIGLU_LIMIT)
        up = jnp.clip(up, -SWIGLU_LIMIT, SWIGLU_LIMIT)
        return gate * jax.nn.sigmoid(SWIGLU_ALPHA * gate) * (up + 1.0)
    return _activated(activation, gate) * up


class Mlp(nnx.Module):
    """Feed-forward block: (activation(x gate) * (x up)) down, or without gates activation(x up)
    down.

    Source: Shazeer 2020, https://arxiv.org/abs/2002.05202.
    """

    summaries: ClassVar[tuple[Summary, ...]] = ()

    def __init__(
        self,
        spec: LayerSpec,
        embed_dim: int,
        init: Initializer,
        recipe: MatmulPrecision,
        rngs: nnx.Rngs,
    ):
        mlp = spec.mlp
        assert isinstance(mlp, MlpSpec)
        width = {"embed": embed_dim}
        units = {"mlp": mlp.width}
        biases = spec.biases
        gate = None
        if mlp.gated:
            gate = Linear(rngs.params(), width, units, init, recipe, bias="gate" in biases)
        self.gate = gate
        self.activation: Activation = mlp.activation
        self.up = Linear(rngs.params(), width, units, init, recipe, bias="up" in biases)
        out_role: Role = "residual"
        if "mlp_out" in spec.norms:
            out_role = "hidden"
        self.down = Linear(rngs.params(), units, width, init, recipe, out_role, "down" in biases)

    def __call__(self, x: Float[Array, "B T D"], context: Context) -> MlpOut:
        noise = context.noise
        if self.gate is None:
            activated = functools.partial(_activated, self.activation)
            hidden = elementwise(activated, named(self.up(x, noise), GATE_UP))
        else:
            activated = functools.partial(gated, self.activation)
            gate = named(self.gate(x, noise), GATE_UP)
            hidden = elementwise(activated, gate, named(self.up(x, noise), GATE_UP))
        hidden = constrain(hidden, "activation_batch", "activation_length", "mlp")
        return MlpOut(self.down(hidden, noise), {}, {}, {})
