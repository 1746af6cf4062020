"""The decoder: embedding, layers, final norm, head.

Layers run as one scanned loop or unrolled: the parameters, and so the checkpoints, are the same.
"""

from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from maxtrain.config.kernels import kernel_of_model
from maxtrain.config.schema import InitConfig, ModelConfig, PrecisionConfig
from maxtrain.models.adapt import attach
from maxtrain.models.cache import Caches, Extension
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
    """What one pass through a decoder gives.

    Attributes:
        hidden: normalised last hidden states, of the type of activations.
        aux_losses: of the loss, each times its factor; summed over tokens and layers.
        metrics: what is recorded; summed over layers.
        buffer_inputs: what each buffer is updated from, by its path, such as `layers.0.mlp.bias`;
            and what summaries are made of.
    """

    hidden: Float[Array, "B T D"]
    aux_losses: dict[str, WeightedSum]
    metrics: dict[str, WeightedSum]
    buffer_inputs: dict[str, Array]


class Decoder(nnx.Module):
    """A decoder-only transformer.

    Args:
        config: sizes; vocab_size must be known by now.
        spec: its layers, and what is before and behind them.
        precision: number formats.
        init: how the weights are drawn.
        rngs: stream `params`; the same seed gives the same bits on every mesh.
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
        # Last, so that all other weights are drawn as without them.
        if config.lora.rank is not None:
            attach(self.layers, config.lora, draw, rngs.params())
        value = None
        if config.value:
            value = Linear(rngs.params(), {"embed": D}, {"score": 1}, draw, of_logits, "head")
            # Before it has learnt anything, it says that nothing is to be expected.
            assert isinstance(value.kernel, nnx.Param)
            value.kernel[...] = jnp.zeros_like(value.kernel[...])
        self.value = value

    def output_matrix(self) -> Float[Array, "D V"]:
        """The head, or the embedding table turned around."""
        assert self.score is None, "a model with a score has no logits"
        if self.head is None:
            return self.embedding[...].T
        return self.head.weights()

    def __call__(
        self, tokens: Ids, segment_ids: Ids | None = None, positions: Ids | None = None
    ) -> Float[Array, "B T V"]:
        """Logits of the next token, rounded to the output type. Training uses `hidden` and a
        chunked loss instead. Of a model with a score that alone, float32: V is 1."""
        return self.logits(self.hidden(tokens, segment_ids, positions))

    def scores(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T"]:
        """The score of the text up to each token, of a model that has one."""
        assert self.score is not None, "a model without a score"
        return self.score(hidden)[..., 0].astype(jnp.float32)

    def values(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T"]:
        """What rewards are to be expected after each token, of a model with a value; float32."""
        assert self.value is not None, "a model without a value"
        weights = self.value.weights()[:, 0].astype(jnp.float32)
        return (hidden.astype(jnp.float32) * weights).sum(-1)

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
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
        """Normalised last hidden states, of the type of activations; as of `forward`."""
        return self.forward(tokens, segment_ids, positions, offset, noise).hidden

    def forward(
        self,
        tokens: Ids,
        segment_ids: Ids | None = None,
        positions: Ids | None = None,
        offset: Float[Array, "B T D"] | None = None,
        noise: TrainNoise | None = None,
    ) -> DecoderOut:
        """Last hidden states, and what the layers say.

        Args:
            tokens: [B, T] ids.
            segment_ids: [B, T] document of each token inside its row, 0 for padding; None: one
                document a row.
            positions: [B, T] position of each token in its document; None: 0, 1, 2, ...
            offset: [B, T, D] added to the embeddings; None: nothing.
            noise: what is random in a training step; None: nothing.
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
        """What the layers say in `aux_losses` and `metrics`, each name once.

        ValueError: two layers mean different numbers by one name.
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
        """All numbers of the layers that a step records."""
        of_summaries = [number for summary in self.summaries() for number in summary.quantities]
        return (*self.quantities(), *of_summaries)

    def summaries(self) -> tuple[Summary, ...]:
        """What is made of what the layers observe, each once."""
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
        """Hidden states of up to T more tokens of each row, and the caches with them in it.

        Keys in the caches keep the rotation that they were written with.

        Args:
            tokens: [B, T] ids.
            counts: [B] how many of them the row has; what is behind them is padding, which is not
                kept.
            lengths: [B] how many tokens of the row are in the caches; 0 with `from_start`.
            caches: as made by `new_caches`. What they hold beyond `lengths` is not seen.
            from_start: the rows begin with these tokens, so that the caches need not be read.
            whole_lengths: [B] what rotary positions that depend on the length of a row take for it,
                such as that of a prompt that is read in pieces; None: how long it is with these
                tokens.
            pages: [B, M] of each row, where caches have pages.
        """
        places = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        columns = lengths[:, None] + places
        is_token = places < counts[:, None]
        # Learned positions have no vector for what is behind the end.
        positions = jnp.where(is_token, columns, 0)
        if whole_lengths is None:
            whole_lengths = row_lengths(positions, is_token)
        rotations = self._rotations(positions, whole_lengths)
        mask = Mask.of_rows(is_token.astype(jnp.int32))
        extension = Extension(columns, is_token, from_start, pages)
        context = Context(rotations, mask, extension=extension)
        out = self._run(self._embed(tokens, positions), context, caches)
        assert out.caches is not None
        return self.final_norm(out.x), out.caches

    def new_caches(
        self, rows: int, columns: int, most_tokens: int, pages: int | None = None
    ) -> Caches:
        """Empty caches in the compute type; as of `LayerStack.new_caches`."""
        dtype = self.precision.compute
        return self.layers.new_caches(rows, columns, most_tokens, dtype, pages)

    def _rotations(self, positions: Array, lengths: Array) -> dict[RopeSpec, Rotation]:
        """One for each kind of positions that some layer has."""
        ropes = self.layers.spec.ropes()
        return {rope: rotation_of(rope, positions, lengths) for rope in ropes}

    def _run(self, x: Array, context: Context, cache: Caches | None) -> StackOut:
        return run_layers(self.layers, constrain_residual(x), context, cache, self.config)

    def _embed(self, tokens: Array, positions: Array) -> Array:
        # Split over the vocabulary only: a table that is split over its width as well would be
        # gathered whole.
        table = constrain(self.embedding[...], "vocab", None)
        x = jnp.take(table, tokens, axis=0)
        # Each device looks for all tokens in its part: else the table would be gathered.
        x = constrain(x, "activation_batch", "activation_length", "activation_embed")
        if self.spec.embedding_scale != 1.0:
            # Rounded to the table's type, as in the models that have it.
            x = x * jnp.asarray(self.spec.embedding_scale, x.dtype)
        if self.position_embedding is not None:
            # A position without a vector gives NaN.
            vectors = jnp.take(self.position_embedding[...], positions, axis=0, mode="fill")
            x = x.astype(jnp.float32) + vectors.astype(jnp.float32)
        return x.astype(self.precision.activations)
