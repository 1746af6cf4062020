"""Differentiable log-probabilities of given tokens, without all logits at once.

These are for losses that are functions of token log-probabilities, such as preference and policy
losses. For a weighted sum with known weights, cross_entropy.py is cheaper: it has three products
with the head, and this module has four, because the gradient of a token is known only after all
tokens have been scored.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maxtrain.ops.chunks import join_sequence, split_sequence
from maxtrain.ops.cross_entropy import soft_capped, soft_capped_slope
from maxtrain.ops.dot import MatmulPrecision, dot
from maxtrain.ops.einsum import contract
from maxtrain.ops.head import HeadGradient, gathered


class TokenLogProbs(NamedTuple):
    """Log-probability and entropy of each token, nats, float32; both are differentiable."""

    # log p(target).
    log_probs: Float[Array, "B T"]
    # -sum p log p over the whole distribution.
    entropy: Float[Array, "B T"]


class LogProbsStaticArgs(NamedTuple):
    """Static parameters; see `token_log_probs`."""

    chunks: int
    dtype: str
    logits: str = "float32"
    softcap: float | None = None
    temperature: float = 1.0


def token_log_probs(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "D V"],
    targets: Int[Array, "B T"],
    *,
    chunks: int,
    dtype: str,
    logits: str = "float32",
    softcap: float | None = None,
    temperature: float = 1.0,
) -> TokenLogProbs:
    """Return the log-probability of each target, and the entropy of its distribution.

    Args:
        hidden: last hidden states [B, T, D].
        head: output matrix [D, V].
        targets: token ids [B, T].
        chunks: number of chunks of the sequence; divides T.
        dtype: inputs of the matrix products; softmax and sums are float32.
        logits: type that logits are rounded to before the softmax.
        softcap: softcap of the logits, as for `soft_capped`; None: there is none.
        temperature: divisor of the logits, as used in sampling.
    """
    form = LogProbsStaticArgs(chunks, dtype, logits, softcap, temperature)
    return _chunked(hidden, head, targets, form)


def plain_token_log_probs(
    hidden: Array, head: Array, targets: Array, form: LogProbsStaticArgs
) -> TokenLogProbs:
    """Compute the oracle of `token_log_probs`: all logits at once, differentiated by JAX."""
    return _looked_up(jax.nn.log_softmax(tempered_logits(hidden, head, form)), targets)


def tempered_logits(
    hidden: Float[Array, "B T D"], head: Float[Array, "D V"], form: LogProbsStaticArgs
) -> Float[Array, "B T V"]:
    """Return the input of the softmax."""
    return _logits(hidden, head, form).tempered


def _looked_up(log_p: Float[Array, "B T V"], targets: Int[Array, "B T"]) -> TokenLogProbs:
    is_target = jnp.arange(log_p.shape[-1]) == targets[..., None]
    of_target = jnp.where(is_target, log_p, 0).sum(-1)
    entropy = -(jnp.exp(log_p) * log_p).sum(-1)
    return TokenLogProbs(of_target, entropy)


class _TemperedLogits(NamedTuple):
    """Logits before rounding, which the slope of a softcap needs, and the input of the softmax."""

    exact: Float[Array, "B T V"]
    tempered: Float[Array, "B T V"]


def _logits(x: Array, low_head: Array, form: LogProbsStaticArgs) -> _TemperedLogits:
    exact = soft_capped(dot(x, low_head, MatmulPrecision.of(form.dtype)), form.softcap)
    rounded = exact.astype(form.logits).astype(jnp.float32)
    return _TemperedLogits(exact, rounded / form.temperature)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _chunked(hidden: Array, head: Array, targets: Array, form: LogProbsStaticArgs) -> TokenLogProbs:
    low = gathered(head, form.dtype)

    def one(part: tuple[Array, Array]) -> TokenLogProbs:
        x, target = part
        return plain_token_log_probs(x, low, target, form)

    found = jax.lax.map(one, split_sequence(form.chunks, hidden, targets))
    return jax.tree.map(join_sequence, found)


def _forward(
    hidden: Array, head: Array, targets: Array, form: LogProbsStaticArgs
) -> tuple[TokenLogProbs, tuple[Array, Array, Array]]:
    return _chunked(hidden, head, targets, form), (hidden, head, targets)


def _backward(
    form: LogProbsStaticArgs, saved: tuple[Array, Array, Array], g: TokenLogProbs
) -> tuple:
    """Compute the gradients. Logits are recomputed, because storing them is what chunks avoid."""
    hidden, head, targets = saved
    low = gathered(head, form.dtype)

    def one(dhead: HeadGradient, part: tuple[Array, ...]) -> tuple[HeadGradient, Array]:
        x, target, of_log_probs, of_entropy = part
        logits = _logits(x, low, form)
        log_p = jax.nn.log_softmax(logits.tempered)
        p = jnp.exp(log_p)
        hit = (jnp.arange(log_p.shape[-1]) == target[..., None]).astype(jnp.float32)
        entropy = -(p * log_p).sum(-1, keepdims=True)
        dlogits = of_log_probs[..., None] * (hit - p)
        dlogits -= of_entropy[..., None] * p * (log_p + entropy)
        dlogits /= form.temperature
        if form.softcap is not None:
            dlogits *= soft_capped_slope(logits.exact, form.softcap)
        dlogits = dlogits.astype(form.dtype)
        dx = contract("btv,dv->btd", dlogits, low).astype(hidden.dtype)
        return dhead.add(x.astype(form.dtype), dlogits), dx

    parts = split_sequence(form.chunks, hidden, targets, g.log_probs, g.entropy)
    dhead, dx = jax.lax.scan(one, HeadGradient.nothing(head), parts)
    return join_sequence(dx), dhead.total().astype(head.dtype), None


_chunked.defvjp(_forward, _backward)
