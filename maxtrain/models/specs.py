"""Data that describes a model: its layers, which may differ, their order, and what comes before and
after them.

A family writes these from its config; models/stack.py builds modules from them. No jax here.
"""

import dataclasses
from typing import Literal

from maxtrain.config.schema import ModelConfig
from maxtrain.ops.quantity import Metric

NORMS = (
    "attention",
    "attention_out",
    "mlp",
    "mlp_out",
    "query",
    "key",
    "all_queries",
    "all_keys",
)
BIASES = ("q", "k", "v", "o", "gate", "up", "down", "router")
Activation = Literal["silu", "gelu_tanh", "clamped_swiglu"]
# [B, S, K, H]
CacheShape = tuple[int, int, int, int]
RopeScaling = Literal["none", "linear", "dynamic", "llama3", "yarn", "longrope"]


def head_dim(config: ModelConfig) -> int:
    """Return H: as configured, or embed_dim / num_heads."""
    return config.head_dim or config.embed_dim // config.num_heads


def expert_dim(config: ModelConfig) -> int:
    """Return the hidden units of an expert: as configured, or those of a dense block."""
    return config.moe.expert_dim or config.mlp_dim


@dataclasses.dataclass(frozen=True)
class NormSpec:
    """A normalisation of activations.

    Args:
        eps: number added to mean squares, or to variances.
        kind: rms: division by the root of the mean square; layer: the mean is subtracted, then
            division by the standard deviation, and a bias is added.
        offset: number added to the scale; with 1, a scale begins at 0.

    Raises:
        ValueError: eps is not above 0.
    """

    eps: float = 1e-6
    kind: Literal["rms", "layer"] = "rms"
    offset: float = 0.0

    def __post_init__(self) -> None:
        if not self.eps > 0:
            raise ValueError(
                f"eps={self.eps} must be above 0: a norm divides by what it is added to. "
                "Set it to 1e-6, for example."
            )


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """A mixer: attention with grouped queries.

    Args:
        num_heads, num_kv_heads, head_dim: N, K and H.
        scale: factor of the scores; None: 1 / sqrt(H).
        softcap: bound of the scores, as in `ops.attention`; None: no bound.
        sinks: each head has a learned logit beside those of the keys.

    Raises:
        ValueError: heads that can't be grouped, or a scale or bound that is not above 0.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False

    def __post_init__(self) -> None:
        if self.num_heads < 1 or self.num_kv_heads < 1 or self.head_dim < 1:
            raise ValueError(
                f"{self}: num_heads, num_kv_heads and head_dim must be at least 1. "
                "Set each to a whole number above 0."
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads} must divide num_heads={self.num_heads}: "
                "each key head serves as many query heads. "
                f"Set num_kv_heads to a divisor of {self.num_heads}."
            )
        _require_positive("scale", self.scale)
        _require_positive("softcap", self.softcap)

    def token_weights(self, embed_dim: int) -> int:
        """Return the number of weights that each token is multiplied with."""
        return 2 * embed_dim * self.head_dim * (self.num_heads + self.num_kv_heads)

    @property
    def rope_dim(self) -> int:
        """The number of entries of a head that rotary positions rotate."""
        return self.head_dim

    @property
    def pair_products(self) -> int:
        """The multiply-adds of a query with a key that it sees, and with its value."""
        return 2 * self.num_heads * self.head_dim

    def cache_shapes(self, rows: int, columns: int) -> tuple[CacheShape, CacheShape]:
        """Return the shapes [B, K, S, H] of the cached keys and values of one layer."""
        shape = (rows, self.num_kv_heads, columns, self.head_dim)
        return shape, shape


@dataclasses.dataclass(frozen=True)
class LatentSpec:
    """A mixer: attention whose keys and values are computed from one short vector of each token,
    its latent, and from one rotated vector that all heads share.

    Args:
        num_heads: N.
        head_dim: H of queries and keys; the last `rope_dim` numbers of a head are rotated.
        rope_dim: rotated numbers of a head.
        value_dim: size of the values of a head.
        kv_rank: size of the latent.
        query_rank: size of the vector from which queries are computed; None: they are computed from
            the token itself.
        scale: factor of the scores.
        interleaved: neighbouring numbers are the pairs that are rotated, instead of the two halves.
        norm_eps: eps of the norms of the latent and of the vector from which queries are computed.

    Raises:
        ValueError: sizes that do not fit together.
    """

    num_heads: int
    head_dim: int
    rope_dim: int
    value_dim: int
    kv_rank: int
    query_rank: int | None
    scale: float
    interleaved: bool = True
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("num_heads", "rope_dim", "value_dim", "kv_rank"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1. Set it to 64.")
        if self.rope_dim >= self.head_dim:
            raise ValueError(
                f"rope_dim={self.rope_dim} must be less than head_dim={self.head_dim}, of which it "
                f"is a part. Set it to {max(self.head_dim // 3, 1)}, for example."
            )
        _require_positive("scale", self.scale)

    @property
    def num_kv_heads(self) -> int:
        """The number of key heads: every head has its own keys."""
        return self.num_heads

    def token_weights(self, embed_dim: int) -> int:
        """Return the number of weights that each token is multiplied with."""
        heads = self.num_heads
        if self.query_rank is None:
            of_queries = embed_dim * heads * self.head_dim
        else:
            of_queries = self.query_rank * (embed_dim + heads * self.head_dim)
        of_latents = embed_dim * (self.kv_rank + self.rope_dim)
        of_heads = self.head_dim - self.rope_dim + self.value_dim
        return (
            of_queries + of_latents + heads * (self.kv_rank * of_heads + self.value_dim * embed_dim)
        )

    @property
    def pair_products(self) -> int:
        """The multiply-adds of a query with a key that it sees, and with its value."""
        return self.num_heads * (self.head_dim + self.value_dim)

    def cache_shapes(self, rows: int, columns: int) -> tuple[CacheShape, CacheShape]:
        """Return the shape of the latents with the rotated vectors, [B, 1, S, R + P], of which the
        values are a part."""
        return (rows, 1, columns, self.kv_rank + self.rope_dim), (rows, 1, columns, 0)


@dataclasses.dataclass(frozen=True)
class MlpSpec:
    """A feed-forward block.

    Args:
        width: F.
        activation: activation of the hidden units, or of their gates.
        gated: each hidden unit has a gate, a product of its own.

    Raises:
        ValueError: a width below 1.
    """

    width: int
    activation: Activation = "silu"
    gated: bool = True

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(
                f"width={self.width} must be at least 1: a feed-forward block has units. "
                "Set it to 4 times the model's width, for example."
            )
        if self.activation == "clamped_swiglu" and not self.gated:
            raise ValueError(
                "activation='clamped_swiglu' is one of gates, and gated=False has none. "
                "Set gated=True."
            )

    def token_weights(self, embed_dim: int) -> int:
        """Return the number of weights that each token is multiplied with."""
        products = 2
        if self.gated:
            products = 3
        return products * embed_dim * self.width


@dataclasses.dataclass(frozen=True)
class RoutingSpec:
    """The balancing of experts in training and the kernel of their products: a run's choice, which
    no weights depend on.

    Args:
        kernel: "eager": every expert for every token, the oracle; the others: kernels of
            `ops.experts.grouped_dot`.
        capacity_factor: number of choices of a row that an expert accepts, as a multiple of an
            equal share; the others are dropped. None: none are dropped.
        balance: factor of the loss term that grows with uneven shares.
        balance_scope: the tokens over which shares are taken.
        z_loss: factor of the mean of logsumexp(router logits)^2.
        correction_rate: change of an expert's correction per step.
        exchange_factor: rows that a device sends to another at a time, as a multiple of an equal
            share, where experts are split over devices; None: all at once.
    """

    kernel: Literal["eager", "blocks", "ragged", "tokamax"] = "blocks"
    capacity_factor: float | None = None
    balance: float = 0.0
    balance_scope: Literal["sequence", "micro_batch", "global"] = "sequence"
    z_loss: float = 0.0
    correction_rate: float = 0.0
    exchange_factor: float | None = 1.5


@dataclasses.dataclass(frozen=True)
class MoeSpec:
    """A feed-forward block of experts, of which each token uses a few, and possibly one that all
    tokens use; routed as in `ops.routing.choose`.

    Args:
        num_experts: E.
        num_choices: number of experts per token.
        width: hidden units of an expert.
        activation: activation of the gates.
        scores: function that turns the router's logits into scores.
        normalize: the weights of a token add up to `scale`.
        scale: factor of the weights of a token.
        num_groups, top_groups, best_of_group: groups of experts.
        corrected: the choice adds a correction for each expert, a buffer that balances the shares.
        shared_width: hidden units of the expert that all tokens use; 0: there is none.
        shared_gate: the output of the shared expert is multiplied with the sigmoid of one more
            product.
        routing: the run's choices.

    Raises:
        ValueError: numbers that do not fit together.
    """

    num_experts: int
    num_choices: int
    width: int
    activation: Activation = "silu"
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    best_of_group: int = 1
    corrected: bool = False
    shared_width: int = 0
    shared_gate: bool = False
    routing: RoutingSpec = RoutingSpec()

    def __post_init__(self) -> None:
        for name in ("num_experts", "num_choices", "width", "num_groups", "top_groups"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1. Set it to 1.")
        if self.num_experts % self.num_groups or self.top_groups > self.num_groups:
            raise ValueError(
                f"num_groups={self.num_groups} must divide num_experts={self.num_experts}, and be "
                f"at least top_groups={self.top_groups}. Set num_groups to a divisor of "
                f"{self.num_experts}."
            )
        group = self.num_experts // self.num_groups
        if self.num_choices > self.top_groups * group:
            raise ValueError(
                f"num_choices={self.num_choices} must be at most {self.top_groups * group}, the "
                f"experts of top_groups={self.top_groups} groups. Set num_choices to less."
            )
        if self.best_of_group > group:
            raise ValueError(
                f"best_of_group={self.best_of_group} must be at most {group}, the experts of a "
                f"group. Set it to {group}."
            )

    def token_weights(self, embed_dim: int) -> int:
        """Return the number of weights that each token is multiplied with: those of its own experts
        only."""
        products = 3 * (self.num_choices * self.width + self.shared_width)
        return embed_dim * (products + self.num_experts + self.shared_gate)

    def quantities(self) -> tuple[Metric, ...]:
        """Return the metrics that the block reports."""
        found = []
        if self.routing.balance:
            found.append(Metric("expert_balance_loss", "nats per token"))
        if self.routing.z_loss:
            found.append(Metric("router_z_loss", "nats per token"))
        if self.routing.capacity_factor is not None:
            found.append(Metric("expert_dropped", "share of choices"))
        return tuple(found)


@dataclasses.dataclass(frozen=True)
class RopeSpec:
    """Rotary positions; see ops/rope.py and ops/rope_scaling.py. Each scaling reads its own subset
    of these numbers, and all but "none" and "linear" read the original length.

    Args:
        head_dim: size of the rotated heads.
        theta: base of the frequencies.
        scaling: method that stretches the frequencies for long contexts.
        factor: stretch factor; read by all scalings but "longrope", which has a factor for each
            pair.
        original_length: context of the unstretched model, in tokens.
        low_freq_factor: read by "llama3".
        high_freq_factor: read by "llama3".
        beta_fast: read by "yarn".
        beta_slow: read by "yarn".
        truncate: read by "yarn".
        attention_factor: factor of cos and sin; read by "yarn" and "longrope".
        short_factors: one factor for each pair, for rows up to the original length; read by
            "longrope".
        long_factors: one factor for each pair, for longer rows; read by "longrope".

    Raises:
        ValueError: the head dim is odd, or a list of factors does not have one for each pair.
    """

    head_dim: int
    theta: float
    scaling: RopeScaling = "none"
    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    @property
    def follows_length(self) -> bool:
        """True if the frequencies of a row depend on its length."""
        return self.scaling in ("dynamic", "longrope")

    def __post_init__(self) -> None:
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim={self.head_dim} must be even: rotary positions turn pairs of numbers. "
                f"Set it to {self.head_dim + 1}, or leave out rope."
            )
        pairs = self.head_dim // 2
        if self.scaling != "longrope":
            return
        for name in ("short_factors", "long_factors"):
            count = len(getattr(self, name))
            if count != pairs:
                raise ValueError(
                    f"{name} has {count} numbers, and must have one for each of the {pairs} pairs "
                    f"of head_dim={self.head_dim}. Set it to {pairs} numbers."
                )


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """One layer: a mixer and a feed-forward block, both added to the residual stream.

    Args:
        mixer: the attention between tokens.
        mlp: the block that is applied to each token.
        window: number of columns that a query sees, including its own as the last; None: all up to
            its own.
        rope: rotary positions of queries and keys; None: they have none.
        norms: the normalised activations: "attention" and "mlp", the inputs of these blocks;
            "attention_out" and "mlp_out", their outputs before they are added; "query" and "key",
            each head before rope; "all_queries" and "all_keys", all heads of a token as one.
        norm: the kind of normalisation.
        biases: the products that have one, of q, k, v, o, gate, up, down and router.
        quantities: the metrics that the layer reports in `aux_losses` and `metrics`, with units.

    Raises:
        ValueError: names that are unknown, and sizes that do not fit.
    """

    mixer: AttentionSpec | LatentSpec
    mlp: MlpSpec | MoeSpec
    window: int | None = None
    rope: RopeSpec | None = None
    norms: tuple[str, ...] = ("attention", "mlp")
    norm: NormSpec = NormSpec()
    biases: tuple[str, ...] = ()
    quantities: tuple[Metric, ...] = ()

    def __post_init__(self) -> None:
        _require_known("norms", self.norms, NORMS)
        _require_known("biases", self.biases, BIASES)
        for one, whole in (("query", "all_queries"), ("key", "all_keys")):
            if one in self.norms and whole in self.norms:
                raise ValueError(
                    f"norms={self.norms} must not have both {one!r} and {whole!r}. "
                    "Leave out one of them."
                )
        if self.window is not None and self.window < 1:
            raise ValueError(
                f"window={self.window} must be at least 1: a query sees its own column. "
                "Set it to 1024, for example, or to None for no window."
            )
        if self.rope is not None and self.rope.head_dim != self.mixer.rope_dim:
            raise ValueError(
                f"rope.head_dim={self.rope.head_dim} must be that of the heads that it turns. "
                f"Set it to mixer.head_dim={self.mixer.rope_dim}."
            )


@dataclasses.dataclass(frozen=True)
class StackSpec:
    """All layers of a model, in order: a prefix, a period that is repeated, and a rest.

    Raises:
        ValueError: no layers, or a period and a number of repeats that do not fit.
    """

    period: tuple[LayerSpec, ...]
    repeats: int
    prefix: tuple[LayerSpec, ...] = ()
    rest: tuple[LayerSpec, ...] = ()

    def __post_init__(self) -> None:
        if not self.period:
            raise ValueError(
                "period=() must have at least one layer. "
                "Name the layers that are repeated; with repeats=1 they occur once."
            )
        if self.repeats < 1:
            raise ValueError(
                f"repeats={self.repeats} must be at least 1: the period occurs at least once. "
                "Set it to the number of layers divided by those of the period."
            )

    @property
    def num_layers(self) -> int:
        return len(self.prefix) + len(self.period) * self.repeats + len(self.rest)

    def layers(self) -> tuple[LayerSpec, ...]:
        """Return every layer, in order."""
        return self.prefix + self.period * self.repeats + self.rest

    def ropes(self) -> tuple[RopeSpec, ...]:
        """Return the different rotary positions, in the order of their first layers."""
        found = [layer.rope for layer in self.layers() if layer.rope is not None]
        return tuple(dict.fromkeys(found))


@dataclasses.dataclass(frozen=True)
class DecoderSpec:
    """A whole decoder: an embedding, layers, a norm, and a head.

    Args:
        stack: the layers.
        norm: norm of the last hidden states.
        embedding_scale: factor of the embedded tokens.
        learned_positions: number of positions with a learned vector, which is added to the embedded
            token; 0: none.
        logit_softcap: bound of the logits, as in `ops.cross_entropy.soft_capped`; None: no bound.

    Raises:
        ValueError: a scale or bound that is not above 0, or a negative number of positions.
    """

    stack: StackSpec
    norm: NormSpec = NormSpec()
    embedding_scale: float = 1.0
    learned_positions: int = 0
    logit_softcap: float | None = None

    def __post_init__(self) -> None:
        _require_positive("embedding_scale", self.embedding_scale)
        _require_positive("logit_softcap", self.logit_softcap)
        if self.learned_positions < 0:
            raise ValueError(
                f"learned_positions={self.learned_positions} must be at least 0. "
                "Set it to the longest sequence, or to 0 for none."
            )


def _require_positive(key: str, value: float | None) -> None:
    """Raise ValueError if the value is set and not above 0."""
    if value is not None and not value > 0:
        raise ValueError(f"{key}={value} must be above 0. Set it to 1, or leave it out.")


def _require_known(key: str, names: tuple[str, ...], known: tuple[str, ...]) -> None:
    """Raise ValueError if a name is unknown or occurs twice."""
    for name in names:
        if name not in known:
            raise ValueError(f"{key}={names}: {name!r} is unknown. Use some of {', '.join(known)}.")
    if len(set(names)) < len(names):
        raise ValueError(f"{key}={names} must have no name twice. Leave out the second one.")
