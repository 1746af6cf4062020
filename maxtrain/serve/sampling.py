"""How the next token of each row is chosen, with settings of its own."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from data_pipeline.errors import UsageError
from maxtrain.ops.draw import draw

# Logits are divided by the temperature; a much lower one gives infinities in float32.
LOWEST_TEMPERATURE = 1e-6
# Positions are int32.
_MOST_TOKENS = 1 << 31


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Settings of one text. Applied in this order: penalty, temperature, top_k, top_p, min_p.

    Args:
        temperature: that logits are divided by, at least 1e-6; 0: always the likeliest token.
        top_k: choose among so many of the likeliest tokens; None: among all.
        top_p: and of these among the likeliest that together have this probability.
        min_p: and of these among those with at least this part of the probability of the likeliest.
        repetition_penalty: logits of tokens that the text has already, prompt included, are divided
            by it where they are positive, and multiplied with it where they are negative.

    Raises:
        UsageError: a setting outside its range.

    Source: Holtzman et al. 2019, https://arxiv.org/abs/1904.09751 (top_p); Nguyen et al. 2024,
        https://arxiv.org/abs/2407.01082 (min_p); Keskar et al. 2019,
        https://arxiv.org/abs/1909.05858 (repetition_penalty).
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        temperature = self.temperature
        # NaN fails the comparison, too.
        if temperature != 0 and not LOWEST_TEMPERATURE <= temperature < float("inf"):
            rule = f"must be 0 or a number of at least {LOWEST_TEMPERATURE}"
            mend = "Set 0 (the likeliest token) or 0.8"
            raise UsageError(f"temperature={temperature} {rule}. {mend}.")
        if self.top_k is not None and not self.top_k >= 1:
            mend = "Set 40, for example, or leave it out"
            raise UsageError(f"top_k={self.top_k} must be at least 1. {mend}.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            mend = "Set 0.95, or leave it out"
            raise UsageError(f"top_p={self.top_p} must be above 0 and at most 1. {mend}.")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            mend = "Set 0.05, or leave it out"
            raise UsageError(f"min_p={self.min_p} must be at least 0 and at most 1. {mend}.")
        penalty = self.repetition_penalty
        if not 1e-3 <= penalty <= 1e6:
            rule = "must be from 0.001 to 1,000,000"
            mend = "Set 1.1, or leave it out"
            raise UsageError(f"repetition_penalty={penalty} {rule}. {mend}.")

    @property
    def filters(self) -> bool:
        """Whether some tokens can't be chosen."""
        by_probability = self.top_p not in (None, 1.0) or self.min_p not in (None, 0.0)
        return self.top_k is not None or by_probability


def check_length(max_tokens: int, seed: int) -> None:
    """UsageError: no such number of new tokens, or no such seed."""
    if not max_tokens >= 1:
        raise UsageError(f"max_tokens={max_tokens} must be at least 1. Set 64, for example.")
    if not max_tokens < _MOST_TOKENS:
        rule = f"must be below {_MOST_TOKENS}"
        raise UsageError(f"max_tokens={max_tokens} {rule}. Set 64, for example.")
    if not 0 <= seed < 1 << 32:
        raise UsageError(f"seed={seed} must be in [0, 4294967295]. Set 0, for example.")


class Settings(NamedTuple):
    """Those of all rows, as arrays; what does not limit a row has a value that limits nothing."""

    temperature: Float[np.ndarray, " B"]
    top_k: Int[np.ndarray, " B"]
    top_p: Float[np.ndarray, " B"]
    min_p: Float[np.ndarray, " B"]
    penalty: Float[np.ndarray, " B"]

    @classmethod
    def of(cls, rows: list[Sampling], vocab_size: int) -> "Settings":
        """Of these rows."""
        count = len(rows)
        settings = cls(
            np.array([row.temperature for row in rows], np.float32),
            np.full(count, vocab_size, np.int32),
            # Sums of rounded probabilities may be above 1.
            np.full(count, np.inf, np.float32),
            np.zeros(count, np.float32),
            np.array([row.repetition_penalty for row in rows], np.float32),
        )
        for i, row in enumerate(rows):
            if row.top_k is not None:
                settings.top_k[i] = min(row.top_k, vocab_size)
            if row.top_p not in (None, 1.0):
                settings.top_p[i] = row.top_p
            if row.min_p is not None:
                settings.min_p[i] = row.min_p
        return settings


class Program(NamedTuple):
    """What is compiled in: work that no row asks for is not done."""

    # Some row is not greedy.
    samples: bool
    # As many of the likeliest tokens are sorted; 0: no row leaves any out.
    num_sorted: int
    # Some row has a penalty.
    penalises: bool

    @classmethod
    def for_rows(cls, rows: list[Sampling], vocab_size: int) -> "Program":
        """The least that serves these rows."""
        random = [row for row in rows if row.temperature > 0]
        num_sorted = 0
        for row in random:
            if row.filters:
                num_sorted = max(num_sorted, row.top_k or vocab_size)
        if num_sorted:
            # A few sizes, so that a few programs serve all.
            num_sorted = min(1 << (num_sorted - 1).bit_length(), vocab_size)
        penalises = any(row.repetition_penalty != 1.0 for row in rows)
        return cls(bool(random), num_sorted, penalises)


def row_keys(seeds: UInt32[Array, "B 2"]) -> Key[Array, " B"]:
    """The key of each row, of its seed and its number."""

    def key(pair: Array) -> Array:
        return jax.random.fold_in(jax.random.key(pair[0]), pair[1])

    return jax.vmap(key)(seeds)


def token_keys(rows: Key[Array, " B"], numbers: Int[Array, " B"]) -> Key[Array, " B"]:
    """The key that a token of each row is drawn by, from the keys of the rows and the tokens'
    numbers in them."""
    return jax.vmap(jax.random.fold_in)(rows, numbers)


class Chosen(NamedTuple):
    """The token of each row, and its log-probability in the distribution that it was drawn from;
    of the likeliest token, in that of temperature 1. Penalties count."""

    tokens: Int[Array, " B"]
    logprobs: Float[Array, " B"]


def choose(
    logits: Float[Array, "B V"],
    settings: Settings,
    keys: Key[Array, " B"],
    seen: Bool[Array, "B V"] | None,
    program: Program,
) -> Chosen:
    """The next token of each row. A row's does not depend on the settings of others.

    Args:
        logits: of the next token, float32.
        settings: of the rows.
        keys: that random choices depend on.
        seen: which tokens each row has; None: the program penalises none.
        program: made for settings of these kinds.
    """
    if program.penalises:
        assert seen is not None
        penalty = settings.penalty[:, None]
        logits = jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    is_greedy = jnp.asarray(settings.temperature) == 0
    likeliest = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if not program.samples:
        return Chosen(likeliest, _logprobs(logits, likeliest))
    temperature = jnp.where(is_greedy, 1.0, settings.temperature)
    logits = logits / temperature[:, None]
    if program.num_sorted:
        limited = _filtered(logits, settings, program.num_sorted)
        logits = jnp.where(is_greedy[:, None], logits, limited)
    tokens = jnp.where(is_greedy, likeliest, draw(logits, keys))
    return Chosen(tokens, _logprobs(logits, tokens))


def _logprobs(logits: Float[Array, "B V"], tokens: Int[Array, " B"]) -> Float[Array, " B"]:
    picked = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return picked - jax.nn.logsumexp(logits, axis=-1)


def _filtered(
    logits: Float[Array, "B V"], settings: Settings, num_sorted: int
) -> Float[Array, "B V"]:
    """Logits, with -inf where a row leaves a token out. Rows that leave out none are as they
    were."""
    likeliest, ids = jax.lax.top_k(logits, num_sorted)
    rank = jnp.arange(num_sorted)
    kept = rank < jnp.asarray(settings.top_k)[:, None]
    weights = jax.nn.softmax(jnp.where(kept, likeliest, -jnp.inf), axis=-1)
    before = jnp.cumsum(weights, axis=-1) - weights
    kept &= before < jnp.asarray(settings.top_p)[:, None]
    kept &= weights >= jnp.asarray(settings.min_p)[:, None] * weights[:, :1]
    # The likeliest token stays, also where top_p is rounded to 0.
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
