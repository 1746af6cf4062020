"""The decoder: embedding, layers, final norm, head.

Layers run as one scanned loop or unrolled, with the same parameters and checkpoints.
"""

from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from maxtrain.config.kernels import kernel_of_model
from maxtrain.config.schema import InitConfig, ModelConfig, PrecisionConfig
from maxtrain.models.adapt import attach
from maxtrain.models.cache import CacheExtension, Caches
from maxtrain.models.context import Context, Rotation, TrainNoise
from maxtrain.models.init import Initializer
from maxtrain.models.layers import FEED_FORWARDS
from maxtrain.models.linear import Linear
from maxtrain.models.norm import Norm
from maxtrain.models.rotation import rotation_of
from maxtrain.models.scan_layers import StackOut, run_layers
from maxtrain.models.specs import DecoderSpec, RopeSpec
from maxtrain.models.stack import LayerStack
from maxtrain.models.summary import Summary
from maxtrain.ops.attention.context_split import ContextSplit
from maxtrain.ops.attention.mask import Mask
from maxtrain.ops.cross_entropy import soft_capped
from maxtrain.ops.dot import MatmulPrecision, dot
from maxtrain.ops.quantity import Metric
from maxtrain.ops.rope import row_lengths
from maxtrain.ops.sums import WeightedSum
from maxtrain.parallel.sharding import constrain, constrain_residual, gather_residual

Ids = Int[Array, "B T"]


class DecoderOut(NamedTuple):
    """The result of one forward pass through a decoder.

    Attributes:
        hidden: normalised last hidden states, in the type of activations.
        aux_losses: auxiliary losses, each times its factor; summed over tokens and layers.
        metrics: metrics of the layers, summed over layers.
        buffer_inputs: the input of each buffer's update, by its path, such as `layers.0.mlp.bias`;
            and the inputs of summaries.
    """

    hidden: Float[Array, "B T D"]
    aux_losses: dict[str, WeightedSum]
    metrics: dict[str, WeightedSum]
    buffer_inputs: dict[str, Array]


class Decoder(nnx.Module):
    """A decoder-only transformer.

    Args:
        config: sizes; vocab_size must be known by now.
        spec: the layers, and the parts before and after them.
        precision: number formats.
        init: settings of the random weights.
        rngs: random stream `params`; the same seed gives the same bits on every mesh.
    """

    def __init__(
        self,
        config: ModelConfig,
        spec: DecoderSpec,
        precision: PrecisionConfig,
        init: InitConfig,
        rngs: nnx.Rngs,
    ):
        assert config.vocab_size is not None
        V = config.vocab_size
        D = config.embed_dim
        tied = config.tie_embeddings and not config.score
        draw = Initializer(init, config, precision.params)
        recipe = MatmulPrecision.of(precision.compute, precision.activations)
        self.config = config
        self.spec = spec
        self.precision = precision
        self.embedding = draw.matrix(rngs.params(), (V, D), ("vocab", "embed"), "embedding")
        positions = None
        if spec.learned_positions:
            shape = (spec.learned_positions, D)
            positions = draw.matrix(rngs.params(), shape, ("positions", "embed"), "embedding")
        self.position_embedding = positions
        self.kernel = kernel_of_model(config.attention)
        self.layers = LayerStack(spec.stack, D, self.kernel, draw, recipe, rngs.params())
        norm_role = "tied_norm" if tied else "norm"
        self.final_norm = Norm(D, spec.norm, draw, norm_role)
        # Logits are rounded to a type of their own.
        of_logits = MatmulPrecision.of(precision.compute)
        head = None
        score = None
        if config.score:
            score = Linear(rngs.params(), {"embed": D}, {"score": 1}, draw, of_logits, "head")
        elif not tied:
            head = Linear(rngs.params(), {"embed": D}, {"vocab": V}, draw, of_logits, "head")
        self.head = head
        self.score = score
        # Adapters come last, so that all other weights are drawn as without them.
        if config.lora.rank is not None:
            attach(self.layers, config.lora, draw, rngs.params())
        value = None
        if config.value:
            value = Linear(rngs.params(), {"embed": D}, {"score": 1}, draw, of_logits, "head")
            # A new value head predicts 0.
            assert isinstance(value.kernel, nnx.Param)
            value.kernel[...] = jnp.zeros_like(value.kernel[...])
        self.value = value

    def output_matrix(self) -> Float[Array, "D V"]:
        """Return the head, or the transposed embedding table."""
        assert self.score is None, "a model with a score has no logits"
        if self.head is None:
            return self.embedding[...].T
        return self.head.weights()

    def __call__(
        self, tokens: Ids, segment_ids: Ids | None = None, positions: Ids | None = None
    ) -> Float[Array, "B T V"]:
        """Compute logits of the next token, rounded to the output type. Training uses `hidden` and
        a chunked loss instead. For a model with a score, return only the score, float32: V is 1."""
        return self.logits(self.hidden(tokens, segment_ids, positions))

    def scores(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T"]:
        """Return the score of the text up to each token, for a model with a score head."""
        assert self.score is not None, "a model without a score"
        return self.score(hidden)[..., 0].astype(jnp.float32)

    def values(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T"]:
        """Return the expected rewards after each token, float32, for a model with a value head."""
        assert self.value is not None, "a model without a value"
        weights = self.value.weights()[:, 0].astype(jnp.float32)
        return (hidden.astype(jnp.float32) * weights).sum(-1)

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Compute logits, or scores, from hidden states."""
        if self.score is not None:
            return self.scores(hidden)[..., None]
        if self.head is None:
            logits = dot(hidden, self.output_matrix(), MatmulPrecision.of(self.precision.compute))
        else:
            logits = self.head(hidden)
        logits = soft_capped(logits, self.spec.logit_softcap)
        return logits.astype(self.precision.output).astype(jnp.float32)

    def hidden(
        self,
        tokens: Ids,
        segment_ids: Ids | None = None,
        positions: Ids | None = None,
        offset: Float[Array, "B T D"] | None = None,
        noise: TrainNoise | None = None,
    ) -> Float[Array, "B T D"]:
        """Return normalised last hidden states, in the type of activations; arguments as for
        `forward`."""
        return self.forward(tokens, segment_ids, positions, offset, noise).hidden

    def forward(
        self,
        tokens: Ids,
        segment_ids: Ids | None = None,
        positions: Ids | None = None,
        offset: Float[Array, "B T D"] | None = None,
        noise: TrainNoise | None = None,
    ) -> DecoderOut:
        """Compute the last hidden states, with auxiliary losses and metrics of the layers.

        Args:
            tokens: [B, T] ids.
            segment_ids: [B, T] document of each token inside its row, 0 for padding; None: one
                document a row.
            positions: [B, T] position of each token in its document; None: 0, 1, 2, ...
            offset: [B, T, D] added to the embeddings; None: no offset.
            noise: random operations of a training step; None: there are none.
        """
        if segment_ids is None:
            segment_ids = jnp.ones_like(tokens)
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        x = self._embed(tokens, positions)
        if offset is not None:
            x = (x.astype(jnp.float32) + offset).astype(x.dtype)
        if noise is not None:
            x = noise.embedded(x)
        split = ContextSplit.of_rows(tokens.shape[1], self.kernel)
        x = split.enter(x)
        positions = split.enter(positions)
        mask = split.mask(split.enter(segment_ids))
        rotations = self._rotations(positions, row_lengths(positions, mask.q_segments > 0))
        context = Context(rotations, mask, noise)
        out = self._run(x, context, None)
        buffer_inputs = out.aux.buffer_inputs_in_model()
        hidden = gather_residual(constrain_residual(self.final_norm(out.x)))
        hidden = split.leave(hidden)
        return DecoderOut(hidden, out.aux.aux_losses, out.aux.metrics, buffer_inputs)

    def quantities(self) -> tuple[Metric, ...]:
        """Return the descriptions of the layers' `aux_losses` and `metrics`, each name once.

        Raises a ValueError if two layers have different metrics with one name.
        """
        named = {}
        for layer in self.layers.spec.layers():
            for quantity in layer.quantities:
                before = named.setdefault(quantity.name, quantity)
                if before != quantity:
                    raise ValueError(
                        f"layers say both {before} and {quantity}. Give one of them another name."
                    )
        return tuple(named.values())

    def recorded(self) -> tuple[Metric, ...]:
        """Return all metrics of the layers that a step records."""
        of_summaries = [number for summary in self.summaries() for number in summary.quantities]
        return (*self.quantities(), *of_summaries)

    def summaries(self) -> tuple[Summary, ...]:
        """Return the summaries of the layers' observations, each once."""
        found: dict[str, Summary] = {}
        for layer in self.layers.spec.layers():
            for summary in FEED_FORWARDS[type(layer.mlp)].summaries:
                found[summary.name] = summary
        return tuple(found.values())

    def extend(
        self,
        tokens: Ids,
        counts: Int[Array, " B"],
        lengths: Int[Array, " B"],
        caches: Caches,
        from_start: bool = False,
        whole_lengths: Int[Array, " B"] | None = None,
        pages: Int[Array, "B M"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Caches]:
        """Compute hidden states of up to T more tokens of each row, and add these tokens to the KV
        caches.

        Keys in the caches keep the rotation that they were written with.

        Args:
            tokens: [B, T] ids.
            counts: [B] number of tokens of each row; later columns are padding, which is not
                stored.
            lengths: [B] number of the row's tokens in the caches; 0 with `from_start`.
            caches: from `new_caches`. Columns beyond `lengths` are masked.
            from_start: whether the rows begin with these tokens, so that the caches need not be
                read.
            whole_lengths: [B] length of each row for rotary positions that depend on it, such as
                that of a prompt read in pieces; None: the length with these tokens.
            pages: [B, M] pages of each row, if caches have pages.
        """
        places = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        columns = lengths[:, None] + places
        is_token = places < counts[:, None]
        # Learned positions have no vector for padding after the end.
        positions = jnp.where(is_token, columns, 0)
        if whole_lengths is None:
            whole_lengths = row_lengths(positions, is_token)
        rotations = self._rotations(positions, whole_lengths)
        mask = Mask.of_rows(is_token.astype(jnp.int32))
        extension = CacheExtension(columns, is_token, from_start, pages)
        context = Context(rotations, mask, extension=extension)
        out = self._run(self._embed(tokens, positions), context, caches)
        assert out.caches is not None
        return self.final_norm(out.x), out.caches

    def new_caches(
        self, rows: int, columns: int, most_tokens: int, pages: int | None = None
    ) -> Caches:
        """Create empty caches in the compute type; arguments as for the layers' `new_caches`."""
        dtype = self.precision.compute
        return self.layers.new_caches(rows, columns, most_tokens, dtype, pages)

    def _rotations(self, positions: Array, lengths: Array) -> dict[RopeSpec, Rotation]:
        """Return one rotation for each kind of positions that some layer has."""
        ropes = self.layers.spec.ropes()
        return {rope: rotation_of(rope, positions, lengths) for rope in ropes}

    def _run(self, x: Array, context: Context, cache: Caches | None) -> StackOut:
        return run_layers(self.layers, constrain_residual(x), context, cache, self.config)

    def _embed(self, tokens: Array, positions: Array) -> Array:
        # The table is sharded over the vocabulary only. If its width were sharded as well, it would
        # be gathered whole.
        table = constrain(self.embedding[...], "vocab", None)
        x = jnp.take(table, tokens, axis=0)
        # Each device looks up all tokens in its part. Otherwise the table would be gathered.
        x = constrain(x, "activation_batch", "activation_length", "activation_embed")
        if self.spec.embedding_scale != 1.0:
            # The scale is rounded to the table's type, as in the models that have it.
            x = x * jnp.asarray(self.spec.embedding_scale, x.dtype)
        if self.position_embedding is not None:
            # A position without a vector gives NaN.
            vectors = jnp.take(self.position_embedding[...], positions, axis=0, mode="fill")
            x = x.astype(jnp.float32) + vectors.astype(jnp.float32)
        return x.astype(self.precision.activations)
