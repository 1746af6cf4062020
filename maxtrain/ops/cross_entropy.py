"""Next-token cross-entropy that never holds the logits of more than a few tokens.

The head is the largest matrix of a small model, and its logits are the largest array of any model.
The sequence is cut in chunks. Each chunk's logits give its loss and, at once, its gradients, and
are then freed. So there are three products with the head, not four, and no logits wait for the
backward pass.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maxtrain.ops.chunks import join_sequence, split_sequence
from maxtrain.ops.dot import MatmulPrecision, dot
from maxtrain.ops.einsum import contract
from maxtrain.ops.head import HeadGradient, gathered


class TokenLoss(NamedTuple):
    """The cross-entropy of a batch. Only `loss` is differentiated; the other sums are metrics
    without gradients."""

    # The sum of weight * smoothed nll, plus z_scale times the sum of mask * z.
    loss: Float[Array, ""]
    # For each row, the sum of mask * negative log-likelihood, nats.
    nll: Float[Array, " B"]
    # For each row, the sum of mask * logsumexp(logits)^2.
    z: Float[Array, " B"]


class CrossEntropyStaticArgs(NamedTuple):
    """Static parameters; see `cross_entropy`."""

    chunks: int
    dtype: str
    logits: str
    smoothing: float
    softcap: float | None = None


def cross_entropy(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "D V"],
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    *,
    chunks: int,
    dtype: str,
    mask: Float[Array, "B T"] | None = None,
    z_scale: Float[Array, ""] | None = None,
    smoothing: float = 0.0,
    logits: str = "float32",
    softcap: float | None = None,
) -> TokenLoss:
    """Return the weighted sum over tokens of the cross-entropy, and of the z-loss if there is a
    `z_scale`.

    Args:
        hidden: last hidden states [B, T, D].
        head: output matrix [D, V].
        targets: token ids [B, T].
        weights: [B, T]; 0 for tokens that are no targets. Divide them beforehand to get a mean. No
            gradient flows to them.
        chunks: number of chunks of the sequence; divides T.
        dtype: inputs of the matrix products; softmax and sums are float32.
        mask: [B, T] weights of the metrics and of the z-loss; None: `weights`.
        z_scale: factor of the z-loss, which keeps logsumexp near 0. Source: PaLM,
            https://arxiv.org/abs/2204.02311, section 5.
        smoothing: label smoothing: the share of the target's probability that is spread over all
            entries. `nll` is recorded without it. Source: Szegedy et al.,
            https://arxiv.org/abs/1512.00567, section 7.
        logits: type that logits are rounded to before the softmax.
        softcap: softcap of the logits, as for `soft_capped`; None: there is none.
    """
    if mask is None:
        mask = weights
    form = CrossEntropyStaticArgs(chunks, dtype, logits, smoothing, softcap)
    return _chunked(hidden, head, targets, weights, mask, z_scale, form)


def plain_cross_entropy(
    hidden: Array,
    head: Array,
    targets: Array,
    weights: Array,
    mask: Array,
    z_scale: Array | None,
    form: CrossEntropyStaticArgs,
) -> TokenLoss:
    """Compute the oracle of `cross_entropy`: all logits at once, differentiated by JAX."""
    logits = soft_capped(dot(hidden, head, MatmulPrecision.of(form.dtype)), form.softcap)
    logits = logits.astype(form.logits).astype(jnp.float32)
    nll = token_nll(logits, targets)
    lse = jax.nn.logsumexp(logits, axis=-1)
    smoothed = (1 - form.smoothing) * nll + form.smoothing * (lse - logits.mean(-1))
    nll_rows = (nll * mask).sum(-1)
    z_rows = (lse * lse * mask).sum(-1)
    loss = (smoothed * weights).sum()
    if z_scale is not None:
        loss += z_scale * z_rows.sum()
    return TokenLoss(loss, jax.lax.stop_gradient(nll_rows), jax.lax.stop_gradient(z_rows))


def soft_capped(logits: Float[Array, "*b V"], softcap: float | None) -> Float[Array, "*b V"]:
    """Return softcap * tanh(logits / softcap), which lies between -softcap and softcap; None: the
    logits unchanged.

    Source: Gemma Team 2024, https://arxiv.org/abs/2408.00118, section 2.
    """
    if softcap is None:
        return logits
    return softcap * jnp.tanh(logits / softcap)


def soft_capped_slope(logits: Float[Array, "*b V"], softcap: float) -> Float[Array, "*b V"]:
    """Return the derivative of `soft_capped`, from its result."""
    bounded = logits / softcap
    return 1.0 - bounded * bounded


def token_nll(logits: Float[Array, "*b V"], targets: Int[Array, "*b"]) -> Float[Array, "*b"]:
    """Return -log softmax(logits)[target], nats, float32. A target outside [0, V) is never looked
    up (see data_pipeline/loader/batch_checks.py)."""
    is_target = jnp.arange(logits.shape[-1]) == targets[..., None]
    picked = jnp.where(is_target, logits, 0).sum(-1)
    return jax.nn.logsumexp(logits, axis=-1) - picked


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _chunked(
    hidden: Array,
    head: Array,
    targets: Array,
    weights: Array,
    mask: Array,
    z_scale: Array | None,
    form: CrossEntropyStaticArgs,
) -> TokenLoss:
    low = gathered(head, form.dtype)

    def one(total: TokenLoss, part: tuple[Array, ...]) -> tuple[TokenLoss, None]:
        x, target, weight, weight_of_z = part
        loss = plain_cross_entropy(x, low, target, weight, weight_of_z, z_scale, form)
        return jax.tree.map(jnp.add, total, loss), None

    parts = split_sequence(form.chunks, hidden, targets, weights, mask)
    total, _ = jax.lax.scan(one, _zero(hidden), parts)
    return total


def _zero(hidden: Array) -> TokenLoss:
    rows = jnp.zeros(hidden.shape[:1], jnp.float32)
    return TokenLoss(jnp.zeros((), jnp.float32), rows, rows)


def _forward(
    hidden: Array,
    head: Array,
    targets: Array,
    weights: Array,
    mask: Array,
    z_scale: Array | None,
    form: CrossEntropyStaticArgs,
) -> tuple[TokenLoss, tuple[Array, Array]]:
    low = gathered(head, form.dtype)
    smoothing = form.smoothing

    def one(
        carry: tuple[TokenLoss, HeadGradient], part: tuple[Array, ...]
    ) -> tuple[tuple[TokenLoss, HeadGradient], Array]:
        total, dhead = carry
        x, target, weight, weight_of_z = part
        x = x.astype(form.dtype)
        logits = soft_capped(dot(x, low, MatmulPrecision.of(form.dtype)), form.softcap)
        capped = logits
        logits = logits.astype(form.logits).astype(jnp.float32)
        hit = (jnp.arange(logits.shape[-1]) == target[..., None]).astype(jnp.float32)
        lse = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        nll = lse[..., 0] - jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
        smoothed = nll
        target_probability = hit
        if smoothing:
            smoothed = (1 - smoothing) * nll + smoothing * (lse[..., 0] - logits.mean(-1))
            target_probability = (1 - smoothing) * hit + smoothing / logits.shape[-1]
        probability = jnp.exp(logits - lse)
        dlogits = (probability - target_probability) * weight[..., None]
        z = lse[..., 0] ** 2 * weight_of_z
        loss = (smoothed * weight).sum()
        if z_scale is not None:
            dlogits += probability * (2 * z_scale * lse * weight_of_z[..., None])
            loss += z_scale * z.sum()
        if form.softcap is not None:
            dlogits *= soft_capped_slope(capped, form.softcap)
        dlogits = dlogits.astype(form.dtype)
        dx = contract("btv,dv->btd", dlogits, low).astype(hidden.dtype)
        part_of_total = TokenLoss(loss, (nll * weight_of_z).sum(-1), z.sum(-1))
        total = jax.tree.map(jnp.add, total, part_of_total)
        return (total, dhead.add(x, dlogits)), dx

    start = (_zero(hidden), HeadGradient.nothing(head))
    parts = split_sequence(form.chunks, hidden, targets, weights, mask)
    (total, dhead), dx = jax.lax.scan(one, start, parts)
    return total, (join_sequence(dx), dhead.total().astype(head.dtype))


def _backward(form: CrossEntropyStaticArgs, saved: tuple[Array, Array], g: TokenLoss) -> tuple:
    dx, dhead = saved
    dx = (dx.astype(jnp.float32) * g.loss).astype(dx.dtype)
    dhead = (dhead.astype(jnp.float32) * g.loss).astype(dhead.dtype)
    return dx, dhead, None, None, None, None


_chunked.defvjp(_forward, _backward)
