"""Sampling of the next token of each row, with settings of its own."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from data_pipeline.base.errors import UsageError
from maxtrain.ops.gumbel_sample import draw

# Logits are divided by the temperature; a much lower one gives infinities in float32.
LOWEST_TEMPERATURE = 1e-6
# Positions are int32.
_MOST_TOKENS = 1 << 31
# The limit of OpenAI's API.
MOST_TOP_LOGPROBS = 20


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Sampling settings of one text, applied in this order: penalties, logit_bias, temperature,
    top_k, top_p, min_p.

    Args:
        temperature: divisor of the logits, at least 1e-6; 0: always the likeliest token (greedy).
        top_k: number of likeliest tokens to choose from; None: all.
        top_p: of these, keep the likeliest tokens that together have this probability (nucleus).
        min_p: of these, keep tokens with at least this share of the likeliest token's probability.
        repetition_penalty: for tokens that the text has already, prompt included: divisor of
            positive logits, and factor of negative ones.
        presence_penalty: subtracted from the logits of all tokens that were generated already.
        frequency_penalty: subtracted from the logit of each token once for each time that it was
            generated.
        logit_bias: pairs of a token and the number added to its logit.
        top_logprobs: number of likeliest tokens that are reported beside each chosen one.

    Raises:
        UsageError: a setting is out of range.

    Source: Holtzman et al. 2019, https://arxiv.org/abs/1904.09751 (top_p); Nguyen et al. 2024,
        https://arxiv.org/abs/2407.01082 (min_p); Keskar et al. 2019,
        https://arxiv.org/abs/1909.05858 (repetition_penalty, as in transformers);
        https://platform.openai.com/docs/advanced-usage (presence_penalty, frequency_penalty).
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        temperature = self.temperature
        # NaN fails the comparison as well.
        if temperature != 0 and not LOWEST_TEMPERATURE <= temperature < float("inf"):
            rule = f"must be 0 or a number of at least {LOWEST_TEMPERATURE}"
            fix = "Set 0 (the likeliest token) or 0.8"
            raise UsageError(f"temperature={temperature} {rule}. {fix}.")
        if self.top_k is not None and not self.top_k >= 1:
            fix = "Set 40, for example, or leave it out"
            raise UsageError(f"top_k={self.top_k} must be at least 1. {fix}.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            fix = "Set 0.95, or leave it out"
            raise UsageError(f"top_p={self.top_p} must be above 0 and at most 1. {fix}.")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            fix = "Set 0.05, or leave it out"
            raise UsageError(f"min_p={self.min_p} must be at least 0 and at most 1. {fix}.")
        penalty = self.repetition_penalty
        if not 1e-3 <= penalty <= 1e6:
            rule = "must be from 0.001 to 1,000,000"
            fix = "Set 1.1, or leave it out"
            raise UsageError(f"repetition_penalty={penalty} {rule}. {fix}.")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not -2 <= value <= 2:
                raise UsageError(f"{name}={value} must be from -2 to 2. Set 0.5, or leave it out.")
        for token, bias in self.logit_bias:
            if not -100 <= bias <= 100:
                raise UsageError(
                    f"logit_bias={bias} of token {token} must be from -100 to 100. Set 100 for a "
                    "token that must come, and -100 for one that must not."
                )
        if not 0 <= self.top_logprobs <= MOST_TOP_LOGPROBS:
            raise UsageError(
                f"top_logprobs={self.top_logprobs} must be from 0 to {MOST_TOP_LOGPROBS}. Set 5, "
                "for example."
            )

    @property
    def penalises(self) -> bool:
        """Return whether a penalty changes the logits of tokens that the text has already."""
        by_count = self.presence_penalty != 0 or self.frequency_penalty != 0
        return by_count or self.repetition_penalty != 1

    @property
    def filters(self) -> bool:
        """Return whether some tokens cannot be chosen."""
        by_probability = self.top_p not in (None, 1.0) or self.min_p not in (None, 0.0)
        return self.top_k is not None or by_probability


def check_length(max_tokens: int, seed: int) -> None:
    """Raise a UsageError if the number of new tokens or the seed is out of range."""
    if not max_tokens >= 1:
        raise UsageError(f"max_tokens={max_tokens} must be at least 1. Set 64, for example.")
    if not max_tokens < _MOST_TOKENS:
        rule = f"must be below {_MOST_TOKENS}"
        raise UsageError(f"max_tokens={max_tokens} {rule}. Set 64, for example.")
    if not 0 <= seed < 1 << 32:
        raise UsageError(f"seed={seed} must be in [0, 4294967295]. Set 0, for example.")


class SamplingArrays(NamedTuple):
    """Sampling settings of all rows, as arrays; disabled settings have a value without effect."""

    temperature: Float[np.ndarray, " B"]
    top_k: Int[np.ndarray, " B"]
    top_p: Float[np.ndarray, " B"]
    min_p: Float[np.ndarray, " B"]
    penalty: Float[np.ndarray, " B"]
    presence: Float[np.ndarray, " B"]
    frequency: Float[np.ndarray, " B"]

    @classmethod
    def of(cls, rows: list[Sampling], vocab_size: int) -> "SamplingArrays":
        """Convert the settings of these rows."""
        count = len(rows)
        settings = cls(
            np.array([row.temperature for row in rows], np.float32),
            np.full(count, vocab_size, np.int32),
            # Sums of rounded probabilities may be above 1.
            np.full(count, np.inf, np.float32),
            np.zeros(count, np.float32),
            np.array([row.repetition_penalty for row in rows], np.float32),
            np.array([row.presence_penalty for row in rows], np.float32),
            np.array([row.frequency_penalty for row in rows], np.float32),
        )
        for i, row in enumerate(rows):
            if row.top_k is not None:
                settings.top_k[i] = min(row.top_k, vocab_size)
            if row.top_p not in (None, 1.0):
                settings.top_p[i] = row.top_p
            if row.min_p is not None:
                settings.min_p[i] = row.min_p
        return settings


class SamplingProgram(NamedTuple):
    """The parts that a decoding program has compiled in; parts that no row needs are left out."""

    # Whether some row is not greedy.
    samples: bool
    # Number of likeliest tokens that are sorted; 0: no row filters tokens.
    num_sorted: int
    # Whether some row has a penalty.
    penalises: bool
    # Number of likeliest tokens that are reported.
    num_top: int = 0

    @classmethod
    def for_rows(cls, rows: list[Sampling], vocab_size: int) -> "SamplingProgram":
        """Return the smallest program that serves these rows."""
        random = [row for row in rows if row.temperature > 0]
        num_sorted = 0
        for row in random:
            if row.filters:
                num_sorted = max(num_sorted, row.top_k or vocab_size)
        if num_sorted:
            # Sizes are powers of two, so that few programs are compiled.
            num_sorted = min(1 << (num_sorted - 1).bit_length(), vocab_size)
        num_top = 0
        if any(row.top_logprobs for row in rows):
            # There is one size only, so that few programs are compiled.
            num_top = min(MOST_TOP_LOGPROBS, vocab_size)
        penalises = any(row.penalises for row in rows)
        return cls(bool(random), num_sorted, penalises, num_top)


def row_keys(seeds: UInt32[Array, "B 2"]) -> Key[Array, " B"]:
    """Return the random key of each row, from its seed and its number."""

    def key(pair: Array) -> Array:
        return jax.random.fold_in(jax.random.key(pair[0]), pair[1])

    return jax.vmap(key)(seeds)


def token_keys(rows: Key[Array, " B"], numbers: Int[Array, " B"]) -> Key[Array, " B"]:
    """Return the random key for a token of each row, from the keys of the rows and the tokens'
    numbers in them."""
    return jax.vmap(jax.random.fold_in)(rows, numbers)


class TopTokens(NamedTuple):
    """The likeliest tokens of each row, and their log-probabilities, the likeliest first."""

    tokens: Int[Array, "B K"]
    logprobs: Float[Array, "B K"]


class SampledTokens(NamedTuple):
    """The chosen token of each row.

    Attributes:
        tokens: the tokens.
        logprobs: their log-probabilities in the distribution that they were drawn from; for greedy
            rows, in the distribution of temperature 1. Penalties and biases count.
        top: the likeliest tokens of the same distribution; None: the program reports none.
    """

    tokens: Int[Array, " B"]
    logprobs: Float[Array, " B"]
    top: TopTokens | None


class History(NamedTuple):
    """The tokens that each row has.

    Args:
        seen: whether each token is in the prompt or was generated.
        counts: how often each token was generated.
    """

    seen: Bool[Array, "B V"]
    counts: Int[Array, "B V"]

    def with_tokens(self, tokens: Int[Array, " B"]) -> "History":
        """Return the history with one more new token of each row."""
        rows = jnp.arange(len(tokens))
        return History(self.seen.at[rows, tokens].set(True), self.counts.at[rows, tokens].add(1))


def choose(
    logits: Float[Array, "B V"],
    settings: SamplingArrays,
    keys: Key[Array, " B"],
    program: SamplingProgram,
    history: History | None = None,
    bias: Float[Array, "B V"] | None = None,
) -> SampledTokens:
    """Choose the next token of each row, independently of the settings of other rows.

    Args:
        logits: logits of the next token, float32.
        settings: settings of the rows.
        keys: random keys of the rows.
        program: the parts needed for these settings.
        history: which tokens each row has; None: the program penalises none.
        bias: added to the logits; minus infinity for tokens that must not come. None: zero.
    """
    if program.penalises:
        assert history is not None
        logits = _penalised(logits, settings, history)
    if bias is not None:
        logits = logits + bias
    is_greedy = jnp.asarray(settings.temperature) == 0
    likeliest = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    tokens = likeliest
    if program.samples:
        temperature = jnp.where(is_greedy, 1.0, settings.temperature)
        logits = logits / temperature[:, None]
        if program.num_sorted:
            limited = _filtered(logits, settings, program.num_sorted)
            logits = jnp.where(is_greedy[:, None], logits, limited)
        tokens = jnp.where(is_greedy, likeliest, draw(logits, keys))
    top = None
    if program.num_top:
        top = top_tokens(logits, program.num_top)
    return SampledTokens(tokens, token_logprobs(logits, tokens), top)


def _penalised(
    logits: Float[Array, "B V"], settings: SamplingArrays, history: History
) -> Float[Array, "B V"]:
    """Apply the penalties to the logits."""
    penalty = settings.penalty[:, None]
    repeated = jnp.where(logits > 0, logits / penalty, logits * penalty)
    logits = jnp.where(history.seen, repeated, logits)
    counts = history.counts.astype(jnp.float32)
    presence = jnp.where(counts > 0, settings.presence[:, None], 0.0)
    return logits - presence - settings.frequency[:, None] * counts


def token_logprobs(logits: Float[Array, "*B V"], tokens: Int[Array, "*B"]) -> Float[Array, "*B"]:
    """Return the log-probability of one token in each distribution."""
    picked = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return picked - jax.nn.logsumexp(logits, axis=-1)


def top_tokens(logits: Float[Array, "*B V"], count: int) -> Any:
    """Return the likeliest tokens of each distribution as `TopTokens`."""
    values, tokens = jax.lax.top_k(logits, count)
    whole = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    return TopTokens(tokens.astype(jnp.int32), values - whole)


def _filtered(
    logits: Float[Array, "B V"], settings: SamplingArrays, num_sorted: int
) -> Float[Array, "B V"]:
    """Set the logits of tokens that top_k, top_p or min_p exclude to -inf. Rows without these
    settings are unchanged."""
    likeliest, ids = jax.lax.top_k(logits, num_sorted)
    rank = jnp.arange(num_sorted)
    kept = rank < jnp.asarray(settings.top_k)[:, None]
    weights = jax.nn.softmax(jnp.where(kept, likeliest, -jnp.inf), axis=-1)
    before = jnp.cumsum(weights, axis=-1) - weights
    kept &= before < jnp.asarray(settings.top_p)[:, None]
    kept &= weights >= jnp.asarray(settings.min_p)[:, None] * weights[:, :1]
    # The likeliest token always stays, even if top_p is rounded to 0.
    kept = kept.at[:, 0].set(True)
    rows = jnp.arange(logits.shape[0])[:, None]
    limited = jnp.full_like(logits, -jnp.inf)
    limited = limited.at[rows, ids].set(jnp.where(kept, likeliest, -jnp.inf), unique_indices=True)
    vocab_size = logits.shape[-1]
    free = (
        (jnp.asarray(settings.top_k) >= vocab_size)
        & (jnp.asarray(settings.top_p) > 1)
        & (jnp.asarray(settings.min_p) <= 0)
    )
    return jnp.where(free[:, None], logits, limited)
