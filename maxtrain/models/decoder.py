"""The decoder: embedding, layers, final norm, head.

Layers are stacked on a leading dim [L, ...] and run as one scanned loop or unrolled: the
parameters, and so the checkpoints, are the same.

Remat policies (`model.remat`), by what the backward pass finds stored instead of computing it
again:
    none           everything
    dots           results of all matrix products
    dots_no_batch  results of products with weights, not those of attention's scores
    full           the input of each layer only
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from maxtrain.config.schema import InitConfig, ModelConfig, PrecisionConfig
from maxtrain.models.init import Initializer, head_dim
from maxtrain.models.layers import Context, DecoderLayer, KVCache, Noise, RMSNorm
from maxtrain.ops.attention.mask import Mask
from maxtrain.ops.einsum import matmul
from maxtrain.ops.rope import llama3_frequencies, rope_frequencies, rope_tables
from maxtrain.parallel.sharding import constrain

Ids = Int[Array, "B T"]

REMAT: dict[str, Callable[..., Any] | None] = {
    "full": None,
    "dots": jax.checkpoint_policies.checkpoint_dots,
    "dots_no_batch": jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims,
}


class Decoder(nnx.Module):
    """A decoder-only transformer.

    Args:
        config: sizes; vocab_size must be known by now.
        qk_norm: whether each query and key head is normalised before rope.
        precision: number formats.
        init: how the weights are drawn.
        rngs: stream `params`; the same seed gives the same bits on every mesh.
    """

    def __init__(
        self,
        config: ModelConfig,
        qk_norm: bool,
        precision: PrecisionConfig,
        init: InitConfig,
        rngs: nnx.Rngs,
    ):
        assert config.vocab_size is not None
        V, D, tied = config.vocab_size, config.embed_dim, config.tie_embeddings
        draw = Initializer(init, config, precision.params)
        self.config, self.precision = config, precision
        self.embedding = draw.matrix(rngs.params(), (V, D), ("vocab", "embed"), "embedding")

        @nnx.vmap(in_axes=0, out_axes=0)
        def stacked(key: Array) -> DecoderLayer:
            return DecoderLayer(config, qk_norm, draw, precision.compute, nnx.Rngs(params=key))

        self.layers = stacked(jax.random.split(rngs.params(), config.num_layers))
        self.final_norm = RMSNorm(D, config.norm_eps, draw, "tied_norm" if tied else "norm")
        self.head = None if tied else draw.matrix(rngs.params(), (D, V), ("embed", "vocab"), "head")

    def output_matrix(self) -> Float[Array, "D V"]:
        """The head, or the embedding table turned around."""
        return self.embedding[...].T if self.head is None else self.head[...]

    def __call__(
        self, tokens: Ids, segment_ids: Ids | None = None, positions: Ids | None = None
    ) -> Float[Array, "B T V"]:
        """Logits of the next token, rounded to the output type. Training uses `hidden` and a
        chunked loss instead."""
        return self.logits(self.hidden(tokens, segment_ids, positions))

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        logits = matmul(hidden, self.output_matrix(), self.precision.compute)
        return logits.astype(self.precision.output).astype(jnp.float32)

    def hidden(
        self,
        tokens: Ids,
        segment_ids: Ids | None = None,
        positions: Ids | None = None,
        offset: Float[Array, "B T D"] | None = None,
        noise: Noise | None = None,
    ) -> Float[Array, "B T D"]:
        """Normalised last hidden states, float32.

        Args:
            tokens: [B, T] ids.
            segment_ids: [B, T] document of each token inside its row, 0 for padding; None: one
                document a row.
            positions: [B, T] position of each token for rope; None: 0, 1, 2, ...
            offset: [B, T, D] added to the embeddings; None: nothing.
            noise: what is random in a training step; None: nothing.
        """
        if segment_ids is None:
            segment_ids = jnp.ones_like(tokens)
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        x = self._embed(tokens)
        x = x if offset is None else x + offset
        x = x if noise is None else noise.embedded(x)
        context = Context(*self._rope(positions), Mask.of_rows(segment_ids), noise)
        return self.final_norm(self._run(x, context, None)[0])

    def extend(
        self,
        tokens: Ids,
        segment_ids: Int[Array, "B S"],
        positions: Ids,
        offset: Int[Array, ""] | int,
        cache: KVCache,
    ) -> tuple[Float[Array, "B T D"], KVCache]:
        """Hidden states of T more columns, and the cache with them in it.

        Args:
            tokens: [B, T] ids that stand at columns offset ... offset + T - 1.
            segment_ids: [B, S] of all columns of the cache; negative where there is nothing yet.
            positions: [B, T] for rope.
            offset: number of columns already in the cache.
            cache: as made by `new_cache`.
        """
        mask = Mask.of_cache(segment_ids, offset, tokens.shape[1])
        context = Context(*self._rope(positions), mask, cached=offset)
        x, extended = self._run(self._embed(tokens), context, cache)
        assert extended is not None
        return self.final_norm(x), extended

    def new_cache(self, rows: int, columns: int) -> KVCache:
        """An empty cache [L, B, S, K, H] in the compute type."""
        shape = (
            self.config.num_layers,
            rows,
            columns,
            self.config.num_kv_heads,
            head_dim(self.config),
        )
        return KVCache(
            jnp.zeros(shape, self.precision.compute), jnp.zeros(shape, self.precision.compute)
        )

    def _rope(self, positions: Array) -> tuple[Array, Array]:
        c = self.config
        frequencies = rope_frequencies(head_dim(c), c.rope_theta)
        if c.rope_scaling == "llama3":
            frequencies = llama3_frequencies(
                frequencies,
                c.rope_factor,
                c.rope_low_freq_factor,
                c.rope_high_freq_factor,
                c.rope_original_length,
            )
        return rope_tables(positions, frequencies)

    def _embed(self, tokens: Array) -> Array:
        # Split over the vocabulary only: a table that is split over its width as well would be
        # gathered whole.
        table = constrain(self.embedding[...], "vocab", None)
        x = jnp.take(table, tokens, axis=0).astype(jnp.float32)
        return constrain(x, "activation_batch", "activation_length", "activation_embed")

    def _run(
        self, x: Array, context: Context, cache: KVCache | None
    ) -> tuple[Array, KVCache | None]:
        graphdef, stacked = nnx.split(self.layers)

        L = self.config.num_layers

        def layer(x: Array, parts: tuple[Any, KVCache | None, Any]) -> tuple[Array, KVCache | None]:
            params, cache, index = parts
            own = (
                context
                if context.noise is None
                else context._replace(noise=context.noise.layer(index, L))
            )
            return nnx.merge(graphdef, params)(x, own, cache)

        if self.config.remat != "none" and cache is None:
            layer = jax.checkpoint(layer, policy=REMAT[self.config.remat])
        index = None if context.noise is None else jnp.arange(L)
        if self.config.scan_layers:
            return jax.lax.scan(layer, x, (stacked, cache, index))
        caches = []
        for parts in _unstack((stacked, cache, index), L):
            x, new = layer(x, parts)
            caches.append(new)
        return x, cache and jax.tree.map(lambda *leaves: jnp.stack(leaves), *caches)


def _unstack(tree: Any, num_layers: int) -> list[Any]:
    """Splits the leading dim of every leaf. By `lax.split`, whose gradient is one concatenation:
    indexing layer by layer would add num_layers arrays of the full size."""
    leaves, structure = jax.tree.flatten(tree)
    columns = [[x[0] for x in jax.lax.split(leaf, (1,) * num_layers)] for leaf in leaves]
    return [jax.tree.unflatten(structure, row) for row in zip(*columns, strict=True)]
