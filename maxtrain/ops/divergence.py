"""Divergence of a model's next-token distribution from a teacher's, for a few tokens' logits at a
time.

As in cross_entropy.py, the sequence is cut in chunks: each chunk's logits, of both models, give the
divergence and at once its gradients, and are then freed. No gradient flows to the teacher.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from maxtrain.ops.chunks import join_sequence, split_sequence
from maxtrain.ops.cross_entropy import soft_capped, soft_capped_slope
from maxtrain.ops.dot import MatmulPrecision, dot
from maxtrain.ops.einsum import contract
from maxtrain.ops.head import HeadGradient, gathered

KINDS = ("forward", "reverse", "jsd")


class Predictor(NamedTuple):
    """The inputs of a model's logits."""

    # Last hidden states [B, T, D]; D is the model's own.
    hidden: Float[Array, "B T D"]
    # Output matrix [D, V].
    head: Float[Array, "D V"]


class LogitFormats(NamedTuple):
    """Number formats of a model's logits."""

    # Inputs of the product with the head.
    compute: str
    # Type that logits are rounded to; later computations are float32.
    logits: str = "float32"
    # Softcap of the logits, as for `soft_capped`; None: there is none.
    softcap: float | None = None


class TokenDivergence(NamedTuple):
    """The divergence of a batch. Only `loss` is differentiated; the other sums are metrics without
    gradients."""

    # The sum of weight * temperature^2 * divergence.
    loss: Float[Array, ""]
    # For each row, the sum of mask * divergence, nats.
    divergence: Float[Array, " B"]
    # For each row, the sum of mask where both models have the same likeliest token.
    agreement: Float[Array, " B"]
    # For each row, the sum of mask * entropy of the student at the temperature, nats.
    entropy: Float[Array, " B"]


class DivergenceStaticArgs(NamedTuple):
    """Static parameters; see `divergence`."""

    chunks: int
    student: LogitFormats
    teacher: LogitFormats
    temperature: float
    kind: str
    beta: float = 0.5


def divergence(
    student: Predictor,
    teacher: Predictor,
    weights: Float[Array, "B T"],
    mask: Float[Array, "B T"],
    *,
    chunks: int,
    student_numbers: LogitFormats,
    teacher_numbers: LogitFormats,
    temperature: float = 1.0,
    kind: str = "forward",
    beta: float = 0.5,
) -> TokenDivergence:
    """Return the weighted sum over tokens of a divergence between two models: Kullback-Leibler, or
    the generalised Jensen-Shannon divergence.

    Args:
        student: the model that learns.
        teacher: the model that it is compared with, with the same V.
        weights: [B, T] weights of the loss; 0 for tokens that are no targets. No gradient flows to
            them.
        mask: [B, T] weights of the metrics.
        chunks: number of chunks of the sequence; divides T.
        student_numbers, teacher_numbers: number formats of each model's logits.
        temperature: divisor of the logits of both models. The loss is multiplied by its square, so
            that the size of the gradient does not depend on it.
        kind: `forward`: KL(teacher || student); `reverse`: KL(student || teacher); `jsd`:
            beta KL(teacher || m) + (1 - beta) KL(student || m), where the mixture m is
            beta teacher + (1 - beta) student.
        beta: weight of the teacher in `jsd`, between 0 and 1. Divided by beta (1 - beta), `jsd`
            tends to `forward` for beta to 0, and to `reverse` for beta to 1.

    Source: Hinton et al., https://arxiv.org/abs/1503.02531, section 2; for `reverse` Gu et al.,
        https://arxiv.org/abs/2306.08543; for `jsd` Agarwal et al.,
        https://arxiv.org/abs/2306.13649, section 2.
    """
    assert kind in KINDS, kind
    form = DivergenceStaticArgs(chunks, student_numbers, teacher_numbers, temperature, kind, beta)
    return _chunked(student, teacher, weights, mask, form)


def _require_mixture(kind: str) -> None:
    """Raise an AssertionError if the kind is not that of a mixture."""
    if kind != "jsd":
        raise AssertionError(f"kind={kind} is not known")


def plain_divergence(
    student: Predictor, teacher: Predictor, weights: Array, mask: Array, form: DivergenceStaticArgs
) -> TokenDivergence:
    """Compute the oracle of `divergence`: all logits at once, differentiated by JAX."""
    teacher = jax.lax.stop_gradient(teacher)
    of_student = model_logits(student.hidden, student.head, form.student).rounded
    of_teacher = model_logits(teacher.hidden, teacher.head, form.teacher).rounded
    log_s = jax.nn.log_softmax(of_student / form.temperature)
    log_t = jax.nn.log_softmax(of_teacher / form.temperature)
    if form.kind == "forward":
        each = kl(log_t, log_s)
    elif form.kind == "reverse":
        each = kl(log_s, log_t)
    else:
        _require_mixture(form.kind)
        log_m = mixture(log_s, log_t, form.beta)
        each = form.beta * kl(log_t, log_m) + (1 - form.beta) * kl(log_s, log_m)
    same = of_student.argmax(-1) == of_teacher.argmax(-1)
    loss = form.temperature**2 * (each * weights).sum()
    rows = (each * mask).sum(-1)
    entropy = (entropies(log_s) * mask).sum(-1)
    agreement = (same.astype(jnp.float32) * mask).sum(-1)
    return TokenDivergence(
        loss, jax.lax.stop_gradient(rows), agreement, jax.lax.stop_gradient(entropy)
    )


def kl(log_p: Float[Array, "B T V"], log_q: Float[Array, "B T V"]) -> Float[Array, "B T"]:
    """KL(p || q) of each token, nats."""
    return (jnp.exp(log_p) * (log_p - log_q)).sum(-1)


def entropies(log_p: Float[Array, "B T V"]) -> Float[Array, "B T"]:
    """Return the entropy of each token's distribution, nats."""
    return -(jnp.exp(log_p) * log_p).sum(-1)


def mixture(
    log_s: Float[Array, "B T V"], log_t: Float[Array, "B T V"], beta: float
) -> Float[Array, "B T V"]:
    """Return log(beta t + (1 - beta) s)."""
    return jnp.logaddexp(log_t + math.log(beta), log_s + math.log1p(-beta))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _chunked(
    student: Predictor, teacher: Predictor, weights: Array, mask: Array, form: DivergenceStaticArgs
) -> TokenDivergence:
    low = gathered(student.head, form.student.compute)
    low_of_teacher = gathered(teacher.head, form.teacher.compute)

    def one(total: TokenDivergence, part: tuple[Array, ...]) -> tuple[TokenDivergence, None]:
        x, y, weight, of_record = part
        here = plain_divergence(
            Predictor(x, low), Predictor(y, low_of_teacher), weight, of_record, form
        )
        return jax.tree.map(jnp.add, total, here), None

    parts = split_sequence(form.chunks, student.hidden, teacher.hidden, weights, mask)
    total, _ = jax.lax.scan(one, no_divergence(weights), parts)
    return total


def no_divergence(weights: Array) -> TokenDivergence:
    """Return the sums of no tokens, for as many rows as the weights have."""
    rows = jnp.zeros(weights.shape[:1], jnp.float32)
    return TokenDivergence(jnp.zeros((), jnp.float32), rows, rows, rows)


class RoundedLogits(NamedTuple):
    """A model's logits, rounded for comparison, and exact."""

    rounded: Float[Array, "B T V"]
    exact: Float[Array, "B T V"]


def model_logits(hidden: Array, head: Array, numbers: LogitFormats) -> RoundedLogits:
    """Compute the logits of a model from its last hidden states and its output matrix."""
    exact = dot(hidden, head, MatmulPrecision.of(numbers.compute))
    exact = soft_capped(exact, numbers.softcap)
    return RoundedLogits(exact.astype(numbers.logits).astype(jnp.float32), exact)


def scaled_slopes(
    slopes: Float[Array, "B T V"],
    weights: Float[Array, "B T"],
    logits: RoundedLogits,
    numbers: LogitFormats,
    temperature: float,
) -> Float[Array, "B T V"]:
    """Return the gradient of the loss with respect to a model's logits, in the type of products.

    Args:
        slopes: derivative of each token's divergence with respect to its logits, without the
            temperature's division.
        weights: weights of the loss.
        logits: logits of the model.
        numbers: number formats of the logits.
        temperature: divisor of the logits.
    """
    # temperature^2, divided by the temperature that divides the logits.
    dlogits = temperature * weights[..., None] * slopes
    if numbers.softcap is not None:
        dlogits *= soft_capped_slope(logits.exact, numbers.softcap)
    return dlogits.astype(numbers.compute)


def summed(
    each: Float[Array, "B T"],
    same: Bool[Array, "B T"],
    log_s: Float[Array, "B T V"],
    weights: Float[Array, "B T"],
    mask: Float[Array, "B T"],
    temperature: float,
) -> TokenDivergence:
    """Sum the divergence and the metrics of some tokens.

    Args:
        each: divergence of each token.
        same: whether both models have the same likeliest token.
        log_s: the student's distribution.
        weights: weights of the loss.
        mask: weights of the metrics.
        temperature: its square is a factor of the loss.
    """
    return TokenDivergence(
        temperature**2 * (each * weights).sum(),
        (each * mask).sum(-1),
        (same.astype(jnp.float32) * mask).sum(-1),
        (entropies(log_s) * mask).sum(-1),
    )


def _forward(
    student: Predictor, teacher: Predictor, weights: Array, mask: Array, form: DivergenceStaticArgs
) -> tuple[TokenDivergence, tuple[Array, Array]]:
    low = gathered(student.head, form.student.compute)
    low_of_teacher = gathered(teacher.head, form.teacher.compute)
    temperature = form.temperature

    def one(
        carry: tuple[TokenDivergence, HeadGradient], part: tuple[Array, ...]
    ) -> tuple[tuple[TokenDivergence, HeadGradient], Array]:
        total, dhead = carry
        x, y, weight, of_record = part
        logits = model_logits(x, low, form.student)
        of_student = logits.rounded
        of_teacher = model_logits(y, low_of_teacher, form.teacher).rounded
        log_s = jax.nn.log_softmax(of_student / temperature)
        log_t = jax.nn.log_softmax(of_teacher / temperature)
        probability = jnp.exp(log_s)
        if form.kind == "forward":
            each = kl(log_t, log_s)
            dlogits = probability - jnp.exp(log_t)
        elif form.kind == "reverse":
            each = kl(log_s, log_t)
            dlogits = probability * (log_s - log_t - each[..., None])
        else:
            _require_mixture(form.kind)
            log_m = mixture(log_s, log_t, form.beta)
            from_mixture = kl(log_s, log_m)
            each = form.beta * kl(log_t, log_m) + (1 - form.beta) * from_mixture
            # The student's share of the mixture contributes nothing: its terms sum to 0.
            dlogits = probability * (log_s - log_m - from_mixture[..., None])
            dlogits = (1 - form.beta) * dlogits
        dlogits = scaled_slopes(dlogits, weight, logits, form.student, temperature)
        dx = contract("btv,dv->btd", dlogits, low)
        dhead = dhead.add(x.astype(form.student.compute), dlogits)
        same = of_student.argmax(-1) == of_teacher.argmax(-1)
        here = summed(each, same, log_s, weight, of_record, temperature)
        return (jax.tree.map(jnp.add, total, here), dhead), dx

    start = (no_divergence(weights), HeadGradient.nothing(student.head))
    parts = split_sequence(form.chunks, student.hidden, teacher.hidden, weights, mask)
    (total, dhead), dx = jax.lax.scan(one, start, parts)
    dx = join_sequence(dx)
    return total, (dx.astype(student.hidden.dtype), dhead.total().astype(student.head.dtype))


def times_loss(
    form: Any, saved: tuple[Array, Array], g: TokenDivergence
) -> tuple[Predictor, None, None, None]:
    """Return the gradients that the forward pass computed, times the gradient of the loss."""
    del form
    dx, dhead = saved
    dx = (dx.astype(jnp.float32) * g.loss).astype(dx.dtype)
    dhead = (dhead.astype(jnp.float32) * g.loss).astype(dhead.dtype)
    return Predictor(dx, dhead), None, None, None


_chunked.defvjp(_forward, times_loss)
