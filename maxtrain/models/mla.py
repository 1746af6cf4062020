"""Multi-head latent attention (MLA): keys and values are computed from one short vector of each
token."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxtrain.models.attention import dropout_of
from maxtrain.models.cache import CacheExtension, KVCache
from maxtrain.models.context import Context
from maxtrain.models.init import Initializer, Role
from maxtrain.models.linear import Linear
from maxtrain.models.norm import Norm
from maxtrain.models.specs import LatentSpec, LayerSpec, NormSpec
from maxtrain.ops.attention import attention, with_cache
from maxtrain.ops.dot import MatmulPrecision
from maxtrain.ops.einsum import contract
from maxtrain.ops.names import QKV, named
from maxtrain.ops.rope import apply_rope
from maxtrain.parallel.sharding import constrain


class LatentAttention(nnx.Module):
    """A multi-head latent attention block.

    In training, keys and values of all heads are computed from the latents. In generation only
    latents are cached. Instead of computing keys, queries are projected into the latent space: (q
    up_k) latent = q (up_k latent). So all heads share one key, which is also the value.

    Args:
        as for `Attention`.

    Source: DeepSeek-AI 2024, https://arxiv.org/abs/2405.04434, section 2.1.
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
        assert isinstance(mixer, LatentSpec)
        width = {"embed": embed_dim}
        queries = {"heads": mixer.num_heads, "head_dim": mixer.head_dim}
        keys = {"heads": mixer.num_heads, "head_dim": mixer.head_dim - mixer.rope_dim}
        values = {"heads": mixer.num_heads, "head_dim": mixer.value_dim}
        norm = NormSpec(mixer.norm_eps)
        query_rank = mixer.query_rank
        query_down = None
        query_norm = None
        query_role: Role = "query"
        inputs = width
        if query_rank is not None:
            inputs = {"latent": query_rank}
            query_down = Linear(rngs.params(), width, {"rank": query_rank}, init, recipe)
            query_norm = Norm(query_rank, norm, init)
        self.q_down = query_down
        self.q_norm = query_norm
        self.q = Linear(rngs.params(), inputs, queries, init, recipe, query_role)
        self.kv_down = Linear(rngs.params(), width, {"rank": mixer.kv_rank}, init, recipe)
        self.k_rope = Linear(rngs.params(), width, {"head_dim": mixer.rope_dim}, init, recipe)
        self.kv_norm = Norm(mixer.kv_rank, norm, init)
        latent = {"latent": mixer.kv_rank}
        self.k = Linear(rngs.params(), latent, keys, init, recipe)
        self.v = Linear(rngs.params(), latent, values, init, recipe)
        out_role: Role = "residual"
        if "attention_out" in spec.norms:
            out_role = "hidden"
        self.o = Linear(rngs.params(), values, width, init, recipe, out_role)
        self.mixer = mixer
        self.rope = spec.rope
        self.window = spec.window
        self.kernel = kernel
        self.recipe = recipe

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, cache: KVCache | None
    ) -> tuple[Float[Array, "B T D"], KVCache | None]:
        noise = context.noise
        of_queries = x
        if self.q_down is not None:
            assert self.q_norm is not None
            of_queries = self.q_norm(self.q_down(x, noise))
        q = constrain(
            self.q(of_queries, noise), "activation_batch", "activation_length", "heads", "head_dim"
        )
        q = named(q, QKV)
        plain, turned = jnp.split(q, [self.mixer.head_dim - self.mixer.rope_dim], axis=-1)
        turned = self._rotated(turned, context)
        latent = self.kv_norm(self.kv_down(x, noise))
        shared = self._rotated(self.k_rope(x, noise)[:, :, None], context)
        extension = context.extension
        if cache is not None:
            assert extension is not None
            new = jnp.concatenate([latent[:, :, None].astype(jnp.float32), shared], axis=-1)
            cache = cache._replace(k=extension.write(cache.k, new, self.window))
        if cache is None or extension is None or extension.from_start:
            kernel = self.kernel
            if cache is not None:
                kernel = with_cache(kernel)
            out = self._of_tokens(plain, turned, latent, shared, context, kernel)
        else:
            keys = extension.read(cache.k, self.window)
            out = self._of_latents(plain, turned, keys, extension)
        out = constrain(out, "activation_batch", "activation_length", "heads", "head_dim")
        return self.o(out.astype(self.recipe.result), noise), cache

    def _rotated(self, heads: Float[Array, "B T N P"], context: Context) -> Float[Array, "B T N P"]:
        """Rotate heads by their positions, float32. Interleaved heads are reordered with even dims
        first, for queries and keys alike, which changes no score."""
        if self.rope is None:
            return heads.astype(jnp.float32)
        if self.mixer.interleaved:
            heads = jnp.concatenate([heads[..., 0::2], heads[..., 1::2]], axis=-1)
        rotation = context.rotations[self.rope]
        return apply_rope(heads, rotation.cos, rotation.sin)

    def _of_tokens(
        self,
        plain: Float[Array, "B T N Hp"],
        turned: Float[Array, "B T N P"],
        latent: Float[Array, "B T R"],
        shared: Float[Array, "B T 1 P"],
        context: Context,
        kernel: str,
    ) -> Float[Array, "B T N Hv"]:
        """Attend with keys and values of every head."""
        q = jnp.concatenate([plain.astype(jnp.float32), turned], axis=-1)
        keys = named(self.k(latent, context.noise), QKV).astype(jnp.float32)
        shared = jnp.broadcast_to(shared, (*keys.shape[:-1], shared.shape[-1]))
        k = jnp.concatenate([keys, shared], axis=-1)
        k = constrain(k, "activation_batch", "activation_length", "heads", "head_dim")
        v = named(self.v(latent, context.noise), QKV)
        v = constrain(v, "activation_batch", "activation_length", "heads", "head_dim")
        return attention(
            q,
            k,
            v,
            context.mask.within(self.window),
            kernel=kernel,
            dtype=self.recipe.inputs,
            scale=self.mixer.scale,
            dropout=dropout_of(context.noise),
        )

    def _of_latents(
        self,
        plain: Float[Array, "B T N Hp"],
        turned: Float[Array, "B T N P"],
        keys: Float[Array, "B S 1 RP"],
        extension: CacheExtension,
    ) -> Float[Array, "B T N Hv"]:
        """Attend with the cache as the one key of all heads, and its latents as their value."""
        dtype = self.recipe.inputs
        to_latents = self.k.weights().astype(dtype)
        of_latents = self.v.weights().astype(dtype)
        q = contract("btnh,rnh->btnr", plain.astype(dtype), to_latents)
        q = jnp.concatenate([q, turned], axis=-1)
        out = attention(
            q,
            keys,
            keys[..., : self.mixer.kv_rank],
            extension.mask(keys.shape[1]).within(self.window),
            kernel=with_cache(self.kernel),
            dtype=dtype,
            scale=self.mixer.scale,
        )
        return contract("btnr,rnh->btnh", out.astype(dtype), of_latents)
