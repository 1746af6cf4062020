"""Divergence of a model's next-token distribution from what is kept of a teacher's: its likeliest K
entries, and the mass of all others.

Both distributions are over K + 1 outcomes: the K tokens, and "another one". With t and s for
teacher and student, and t_o = 1 - sum_k t_k, s_o = 1 - sum_k s_k for the others:

    KL(t || s) = sum_k t_k log(t_k / s_k) + t_o log(t_o / s_o)

and the other kinds in the same way. It is at most the divergence over all V tokens, and equal to it
where K = V (there are no others then) or where both models divide the others alike.

As in divergence.py, the sequence is cut in chunks: each chunk's logits give the divergence and at
once its gradients, and are then freed.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from maxtrain.ops.chunks import join_sequence, split_sequence
from maxtrain.ops.divergence import (
    KINDS,
    LogitFormats,
    Predictor,
    TokenDivergence,
    entropies,
    kl,
    mixture,
    model_logits,
    no_divergence,
    scaled_slopes,
    summed,
    times_loss,
)
from maxtrain.ops.einsum import contract
from maxtrain.ops.head import HeadGradient, gathered


class TopLogProbs(NamedTuple):
    """The stored part of distributions over V tokens."""

    # The likeliest K tokens, in descending order of probability.
    ids: Int[Array, "*b K"]
    # Their log-probabilities, nats.
    log_probs: Float[Array, "*b K"]
    # The log of the mass of all others; -inf: there are none, for K = V.
    tail: Float[Array, "*b"]


class TopDivergenceStaticArgs(NamedTuple):
    """Static parameters; see `top_divergence`."""

    chunks: int
    student: LogitFormats
    temperature: float
    kind: str
    beta: float = 0.5


def top_of(log_probs: Float[Array, "B T V"], k: int) -> TopLogProbs:
    """Return the likeliest k entries of distributions, and the mass of all others."""
    kept, ids = jax.lax.top_k(log_probs, k)
    others = jnp.where(_is_in(ids, log_probs.shape[-1]), -jnp.inf, log_probs)
    return TopLogProbs(ids, kept, jax.nn.logsumexp(others, axis=-1))


def top_divergence(
    student: Predictor,
    teacher: TopLogProbs,
    weights: Float[Array, "B T"],
    mask: Float[Array, "B T"],
    *,
    chunks: int,
    student_numbers: LogitFormats,
    temperature: float = 1.0,
    kind: str = "forward",
    beta: float = 0.5,
) -> TokenDivergence:
    """Return the weighted sum over tokens of the divergence between a model and the stored part of
    a teacher's distributions.

    Args:
        student: the model that learns.
        teacher: stored distributions at the temperature; arbitrary finite numbers where the weight
            and the mask are 0.
        weights: [B, T] weights of the loss; 0 for tokens that are no targets. No gradient flows to
            them.
        mask: [B, T] weights of the metrics.
        chunks: number of chunks of the sequence; divides T.
        student_numbers: number formats of the student's logits.
        temperature, kind, beta: as for `divergence`.
    """
    assert kind in KINDS, kind
    form = TopDivergenceStaticArgs(chunks, student_numbers, temperature, kind, beta)
    return _chunked(student, teacher, weights, mask, form)


def plain_top_divergence(
    student: Predictor,
    teacher: TopLogProbs,
    weights: Array,
    mask: Array,
    form: TopDivergenceStaticArgs,
) -> TokenDivergence:
    """Compute the oracle of `top_divergence`: all logits at once, differentiated by JAX."""
    teacher = jax.lax.stop_gradient(teacher)
    logits = model_logits(student.hidden, student.head, form.student).rounded
    log_s = jax.nn.log_softmax(logits / form.temperature)
    outcomes = _outcomes(log_s, teacher)
    each = _of_outcomes(outcomes, form).divergence
    same = logits.argmax(-1) == teacher.ids[..., 0]
    rows = jax.lax.stop_gradient((each * mask).sum(-1))
    agreement = (same.astype(jnp.float32) * mask).sum(-1)
    entropy = jax.lax.stop_gradient((entropies(log_s) * mask).sum(-1))
    loss = form.temperature**2 * (each * weights).sum()
    return TokenDivergence(loss, rows, agreement, entropy)


class _Outcomes(NamedTuple):
    """Log-probabilities of the K tokens, and of another one if K < V: [B, T, K + 1] or [B, T,
    K]."""

    student: Float[Array, "B T O"]
    teacher: Float[Array, "B T O"]


class _OutcomeDivergence(NamedTuple):
    """Divergence of each token, with its slope with respect to the student's outcomes."""

    divergence: Float[Array, "B T"]
    # The derivative with respect to a token's logit is the slope of the token's outcome, times the
    # student's probability of the token.
    slope: Float[Array, "B T O"]


def _is_in(ids: Int[Array, "B T K"], size: int) -> Bool[Array, "B T V"]:
    """Return which tokens are among the ids."""
    return _spread(ids, jnp.ones(ids.shape, bool), jnp.zeros(ids.shape[:-1], bool), size)


def _spread(ids: Int[Array, "B T K"], values: Array, others: Array, size: int) -> Array:
    """Scatter values to the ids in [B, T, size]; other entries have the value of the others [B,
    T]."""

    def of_token(at: Array, value: Array, other: Array) -> Array:
        return jnp.full(size, other, value.dtype).at[at].set(value)

    return jax.vmap(jax.vmap(of_token))(ids, values, others)


def _outcomes(log_s: Float[Array, "B T V"], teacher: TopLogProbs) -> _Outcomes:
    of_ids = jnp.take_along_axis(log_s, teacher.ids, axis=-1)
    size = log_s.shape[-1]
    if teacher.ids.shape[-1] == size:
        return _Outcomes(of_ids, teacher.log_probs)
    others = jnp.where(_is_in(teacher.ids, size), -jnp.inf, log_s)
    tail = jax.nn.logsumexp(others, axis=-1)
    return _Outcomes(
        jnp.concatenate([of_ids, tail[..., None]], axis=-1),
        jnp.concatenate([teacher.log_probs, teacher.tail[..., None]], axis=-1),
    )


def _of_outcomes(outcomes: _Outcomes, form: TopDivergenceStaticArgs) -> _OutcomeDivergence:
    """Return the divergence of each token, of the form's kind."""
    log_s, log_t = outcomes
    if form.kind == "forward":
        each = kl(log_t, log_s)
        return _OutcomeDivergence(each, 1.0 - jnp.exp(log_t - log_s))
    if form.kind == "reverse":
        each = kl(log_s, log_t)
        return _OutcomeDivergence(each, log_s - log_t - each[..., None])
    if form.kind != "jsd":
        raise AssertionError(f"kind={form.kind} is not known")
    log_m = mixture(log_s, log_t, form.beta)
    from_mixture = kl(log_s, log_m)
    each = form.beta * kl(log_t, log_m) + (1 - form.beta) * from_mixture
    return _OutcomeDivergence(each, (1 - form.beta) * (log_s - log_m - from_mixture[..., None]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _chunked(
    student: Predictor,
    teacher: TopLogProbs,
    weights: Array,
    mask: Array,
    form: TopDivergenceStaticArgs,
) -> TokenDivergence:
    low = gathered(student.head, form.student.compute)

    def one(total: TokenDivergence, part: tuple[Array, ...]) -> tuple[TokenDivergence, None]:
        x, ids, log_probs, tail, weight, of_record = part
        top = TopLogProbs(ids, log_probs, tail)
        here = plain_top_divergence(Predictor(x, low), top, weight, of_record, form)
        return jax.tree.map(jnp.add, total, here), None

    parts = split_sequence(form.chunks, student.hidden, *teacher, weights, mask)
    total, _ = jax.lax.scan(one, no_divergence(weights), parts)
    return total


def _forward(
    student: Predictor,
    teacher: TopLogProbs,
    weights: Array,
    mask: Array,
    form: TopDivergenceStaticArgs,
) -> tuple[TokenDivergence, tuple[Array, Array]]:
    low = gathered(student.head, form.student.compute)
    temperature = form.temperature
    size = low.shape[-1]

    def one(
        carry: tuple[TokenDivergence, HeadGradient], part: tuple[Array, ...]
    ) -> tuple[tuple[TokenDivergence, HeadGradient], Array]:
        total, dhead = carry
        x, ids, log_probs, tail, weight, of_record = part
        logits = model_logits(x, low, form.student)
        log_s = jax.nn.log_softmax(logits.rounded / temperature)
        outcomes = _outcomes(log_s, TopLogProbs(ids, log_probs, tail))
        each, slope = _of_outcomes(outcomes, form)
        # If K = V, no token uses the last slope.
        slopes = _spread(ids, slope[..., : ids.shape[-1]], slope[..., -1], size)
        dlogits = jnp.exp(log_s) * slopes
        dlogits = scaled_slopes(dlogits, weight, logits, form.student, temperature)
        dx = contract("btv,dv->btd", dlogits, low)
        dhead = dhead.add(x.astype(form.student.compute), dlogits)
        same = logits.rounded.argmax(-1) == ids[..., 0]
        here = summed(each, same, log_s, weight, of_record, temperature)
        return (jax.tree.map(jnp.add, total, here), dhead), dx

    start = (no_divergence(weights), HeadGradient.nothing(student.head))
    parts = split_sequence(form.chunks, student.hidden, *teacher, weights, mask)
    (total, dhead), dx = jax.lax.scan(one, start, parts)
    dx = join_sequence(dx)
    return total, (dx.astype(student.hidden.dtype), dhead.total().astype(student.head.dtype))


_chunked.defvjp(_forward, times_loss)
