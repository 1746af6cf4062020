"""The layers of a decoder: attention and a feed-forward block around the residual stream.

Parameters have their logical axes as metadata `axes`; stacked layers add a leading dim. Every
matrix product with a weight is a Linear, so that one place decides its precision. Activations
between blocks, and the results of products, have the recipe's type; norms, rope, softmax and silu
are float32 inside.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from flax import nnx
from jaxtyping import Array, Float

from maxtrain.models.attention import Attention
from maxtrain.models.cache import KVCache
from maxtrain.models.context import Context
from maxtrain.models.init import Initializer
from maxtrain.models.mla import LatentAttention
from maxtrain.models.mlp import Mlp, MlpOut
from maxtrain.models.moe import Moe
from maxtrain.models.norm import norm_of
from maxtrain.models.specs import AttentionSpec, LatentSpec, LayerSpec, MlpSpec, MoeSpec
from maxtrain.models.summary import Summary
from maxtrain.ops.dot import MatmulPrecision
from maxtrain.ops.sums import WeightedSum
from maxtrain.parallel.sharding import constrain_residual, gather_residual


class LayerOut(NamedTuple):
    """The result of a layer; `aux_losses`, `metrics` and `buffer_inputs` as for its blocks."""

    x: Float[Array, "B T D"]
    cache: KVCache | None
    aux_losses: dict[str, WeightedSum]
    metrics: dict[str, WeightedSum]
    buffer_inputs: dict[str, Array]


# The module of a mixer, by the type of `LayerSpec.mixer`.
MIXERS = {AttentionSpec: Attention, LatentSpec: LatentAttention}


class FeedForward(Protocol):
    """Interface of the module classes of feed-forward blocks."""

    # Summaries computed from the inputs that its blocks record for buffers.
    summaries: tuple[Summary, ...]

    def __call__(
        self,
        spec: LayerSpec,
        embed_dim: int,
        init: Initializer,
        recipe: MatmulPrecision,
        rngs: nnx.Rngs,
    ) -> Callable[[Array, Context], MlpOut]: ...


# The module of a feed-forward block, by the type of `LayerSpec.mlp`; called like Mlp.
FEED_FORWARDS: dict[type, FeedForward] = {MlpSpec: Mlp, MoeSpec: Moe}


class DecoderLayer(nnx.Module):
    """A decoder layer: attention and feed-forward, each normalised before or after, and added to
    the residual stream.

    Args:
        as for `Attention`.
    """

    def __init__(
        self,
        spec: LayerSpec,
        embed_dim: int,
        kernel: str,
        init: Initializer,
        recipe: MatmulPrecision,
        rngs: nnx.Rngs,
    ):
        self.attention_norm = norm_of(spec, "attention", embed_dim, init)
        self.attention_out_norm = norm_of(spec, "attention_out", embed_dim, init, "residual_norm")
        self.mlp_norm = norm_of(spec, "mlp", embed_dim, init)
        self.mlp_out_norm = norm_of(spec, "mlp_out", embed_dim, init, "residual_norm")
        self.attention = MIXERS[type(spec.mixer)](spec, embed_dim, kernel, init, recipe, rngs)
        self.mlp = FEED_FORWARDS[type(spec.mlp)](spec, embed_dim, init, recipe, rngs)

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, cache: KVCache | None
    ) -> LayerOut:
        noise = context.noise
        inputs = x
        if self.attention_norm is not None:
            inputs = constrain_residual(self.attention_norm(x))
        out, cache = self.attention(gather_residual(inputs), context, cache)
        out = constrain_residual(out)
        if self.attention_out_norm is not None:
            out = self.attention_out_norm(out)
        if noise is not None:
            out = noise.added(out, 0)
        x = x + out
        inputs = x
        if self.mlp_norm is not None:
            inputs = constrain_residual(self.mlp_norm(x))
        block = self.mlp(gather_residual(inputs), context)
        out = constrain_residual(block.x)
        if self.mlp_out_norm is not None:
            out = self.mlp_out_norm(out)
        if noise is not None:
            out = noise.added(out, 1)
        x = constrain_residual(x + out)
        buffer_inputs = {f"mlp.{path}": value for path, value in block.buffer_inputs.items()}
        return LayerOut(x, cache, block.aux_losses, block.metrics, buffer_inputs)
