"""Next-token cross-entropy that never holds the logits of more than a few tokens.

The head is the largest matrix of a small model and its logits the largest array of any. The sequence is cut in chunks;
each chunk's logits give its loss and, at once, its gradients, and are gone. So there are three products with the head,
not four, and no logits wait for the backward pass.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maxtrain.ops.einsum import contract, matmul


def plain_cross_entropy(hidden: Array, head: Array, targets: Array, weights: Array, dtype: str) -> Array:
    """The oracle: all logits at once. Arguments and result as in `cross_entropy`."""
    return (token_nll(matmul(hidden, head, dtype), targets) * weights).sum()


def token_nll(logits: Float[Array, "*b V"], targets: Int[Array, "*b"]) -> Float[Array, "*b"]:
    """-log softmax(logits)[target], nats, float32; a target outside [0, V) is never looked up (see data_pipeline/guard.py)."""
    picked = jnp.where(jnp.arange(logits.shape[-1]) == targets[..., None], logits, 0).sum(-1)
    return jax.nn.logsumexp(logits, axis=-1) - picked


def num_chunks(length: int, rows: int, chunk: int) -> int:
    """Smallest number of equal parts of `length` columns with at most `chunk` tokens each (0: no bound), in a device's rows."""
    if chunk == 0:
        return 1
    return next(n for n in range(1, length + 1) if length % n == 0 and (rows * length // n <= chunk or n == length))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def cross_entropy(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "D V"],
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    chunks: int,
    dtype: str,
) -> Float[Array, ""]:
    """Sum over tokens of weight times negative log-likelihood.

    Args:
        hidden: last hidden states [B, T, D].
        head: output matrix [D, V].
        targets: token ids [B, T].
        weights: [B, T]; 0 for what is no target. Divide them by the number of targets beforehand to get a mean.
        chunks: parts that the sequence is cut in; divides T.
        dtype: inputs of the matrix products; logits, softmax and sums are float32.

    Returns:
        Weighted sum in nats, scalar float32. No gradient flows to `weights`.
    """

    def one(total: Array, part: tuple[Array, ...]) -> tuple[Array, None]:
        x, target, weight = part
        return total + plain_cross_entropy(x, head, target, weight, dtype), None

    return jax.lax.scan(one, jnp.zeros((), jnp.float32), _split(chunks, hidden, targets, weights))[0]


def _split(chunks: int, *arrays: Array) -> tuple[Array, ...]:
    """Each [B, T, ...] as [chunks, B, T / chunks, ...]; rows stay on their devices, only the sequence is cut."""
    return tuple(x.reshape(x.shape[0], chunks, -1, *x.shape[2:]).swapaxes(0, 1) for x in arrays)


def _forward(
    hidden: Array, head: Array, targets: Array, weights: Array, chunks: int, dtype: str
) -> tuple[Array, tuple[Array, Array]]:
    low = head.astype(dtype)

    def one(carry: tuple[Array, Array], part: tuple[Array, ...]) -> tuple[tuple[Array, Array], Array]:
        total, dhead = carry
        x, target, weight = part
        x = x.astype(dtype)
        logits = contract("btd,dv->btv", x, low)
        hit = (jnp.arange(logits.shape[-1]) == target[..., None]).astype(jnp.float32)
        lse = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        nll = lse[..., 0] - jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
        dlogits = ((jnp.exp(logits - lse) - hit) * weight[..., None]).astype(dtype)
        dx = contract("btv,dv->btd", dlogits, low)
        return (total + (nll * weight).sum(), dhead + contract("btd,btv->dv", x, dlogits)), dx

    start = (jnp.zeros((), jnp.float32), jnp.zeros(head.shape, jnp.float32))
    (total, dhead), dx = jax.lax.scan(one, start, _split(chunks, hidden, targets, weights))
    dx = dx.swapaxes(0, 1).reshape(hidden.shape)
    return total, (dx.astype(hidden.dtype), dhead.astype(head.dtype))


def _backward(chunks: int, dtype: str, saved: tuple[Array, Array], g: Array) -> tuple:
    return *((d.astype(jnp.float32) * g).astype(d.dtype) for d in saved), None, None


cross_entropy.defvjp(_forward, _backward)
