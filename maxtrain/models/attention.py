"""The attention block of a layer, with its KV cache."""

from flax import nnx
from jaxtyping import Array, Float

from maxtrain.models.cache import KVCache
from maxtrain.models.context import WEIGHTS, Context, TrainNoise
from maxtrain.models.init import Initializer, Role
from maxtrain.models.linear import Linear
from maxtrain.models.norm import head_norm, normalised
from maxtrain.models.specs import AttentionSpec, LayerSpec
from maxtrain.ops.attention import Dropout, attention, with_cache
from maxtrain.ops.dot import MatmulPrecision
from maxtrain.ops.dropout import fold
from maxtrain.ops.names import QKV, named
from maxtrain.ops.rope import apply_rope
from maxtrain.parallel.sharding import constrain


def dropout_of(noise: TrainNoise | None) -> Dropout | None:
    """Return the dropout of attention weights, if a step has it."""
    if noise is None or not noise.config.attention_dropout:
        return None
    return Dropout(fold(noise.keys, WEIGHTS), noise.config.attention_dropout)


class Attention(nnx.Module):
    """Grouped-query attention, with rotary positions if the layer has them.

    Args:
        spec: heads, window, positions, norms and biases.
        embed_dim: D.
        kernel: a kernel of ops.attention.
        init: draws the weights.
        recipe: types of the products; its result type is that of all activations.
        rngs: random stream `params`.
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
        mixer = spec.mixer
        assert isinstance(mixer, AttentionSpec)
        size = mixer.head_dim
        width = {"embed": embed_dim}
        heads = {"heads": mixer.num_heads, "head_dim": size}
        kv_heads = {"kv_heads": mixer.num_kv_heads, "head_dim": size}
        # The scale of muP is folded into the last factor of the scores.
        query_role: Role = "query"
        if "query" in spec.norms or "all_queries" in spec.norms:
            query_role = "hidden"
        biases = spec.biases
        self.q = Linear(rngs.params(), width, heads, init, recipe, query_role, "q" in biases)
        self.k = Linear(rngs.params(), width, kv_heads, init, recipe, bias="k" in biases)
        self.v = Linear(rngs.params(), width, kv_heads, init, recipe, bias="v" in biases)
        # If the output is normalised, the norm's scale determines the residual stream.
        out_role: Role = "residual"
        if "attention_out" in spec.norms:
            out_role = "hidden"
        self.o = Linear(rngs.params(), heads, width, init, recipe, out_role, "o" in biases)
        num_heads = mixer.num_heads
        num_kv_heads = mixer.num_kv_heads
        self.q_norm = head_norm(spec, "query", "all_queries", num_heads, init, "query_norm")
        self.k_norm = head_norm(spec, "key", "all_keys", num_kv_heads, init)
        sinks = None
        if mixer.sinks:
            sinks = init.bias((num_heads,), ("heads",), "hidden")
        self.sinks = sinks
        self.mixer = mixer
        self.rope = spec.rope
        self.window = spec.window
        self.kernel = kernel
        self.recipe = recipe

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, cache: KVCache | None
    ) -> tuple[Float[Array, "B T D"], KVCache | None]:
        noise = context.noise
        q = constrain(
            self.q(x, noise), "activation_batch", "activation_length", "heads", "head_dim"
        )
        k = constrain(
            self.k(x, noise), "activation_batch", "activation_length", "kv_heads", "head_dim"
        )
        v = constrain(
            self.v(x, noise), "activation_batch", "activation_length", "kv_heads", "head_dim"
        )
        q = named(q, QKV)
        k = named(k, QKV)
        v = named(v, QKV)
        q = normalised(self.q_norm, q)
        k = normalised(self.k_norm, k)
        if self.rope is not None:
            rotation = context.rotations[self.rope]
            q = apply_rope(q, rotation.cos, rotation.sin)
            k = apply_rope(k, rotation.cos, rotation.sin)
        kernel = self.kernel
        mask = context.mask
        if cache is not None:
            extension = context.extension
            assert extension is not None
            kernel = with_cache(kernel)
            keys = extension.write(cache.k, k, self.window)
            values = extension.write(cache.v, v, self.window)
            cache = KVCache(keys, values)
            if not extension.from_start:
                k = extension.read(keys, self.window)
                v = extension.read(values, self.window)
                mask = extension.mask(k.shape[1])
        sinks = None
        if self.sinks is not None:
            sinks = self.sinks[...]
        dtype = self.recipe.inputs
        out = attention(
            q,
            k,
            v,
            mask.within(self.window),
            kernel=kernel,
            dtype=dtype,
            scale=self.mixer.scale,
            softcap=self.mixer.softcap,
            sinks=sinks,
            dropout=dropout_of(noise),
        )
        out = constrain(out, "activation_batch", "activation_length", "heads", "head_dim")
        return self.o(out.astype(self.recipe.result), noise), cache
