"""Tokens drawn from distributions, each by a key of its own."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from maxtrain.ops.chunks import join_sequence, split_sequence
from maxtrain.ops.head import gathered
from maxtrain.ops.log_probs import LogProbsStaticArgs, tempered_logits


def draw(logits: Float[Array, "*s V"], keys: Key[Array, "*s"]) -> Int[Array, "*s"]:
    """One token of each distribution, which depends on nothing but its logits and its key.

    The largest of logit + noise, with Gumbel's noise, over the whole vocabulary in the order of
    ids: so logits that are nearly the same give the same token but for ties.
    """
    flat = keys.reshape(-1)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[-1:]))(flat)
    return jnp.argmax(logits + noise.reshape(logits.shape), axis=-1).astype(jnp.int32)


def drawn_tokens(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "D V"],
    keys: Key[Array, "B T"],
    form: LogProbsStaticArgs,
) -> Int[Array, "B T"]:
    """The token that each key draws from the distribution behind each token, without all logits at
    once; of the same logits as `token_log_probs` with this form.

    Args:
        hidden: last hidden states.
        head: output matrix.
        keys: one for each token.
        form: as of `token_log_probs`.
    """
    low = gathered(head, form.dtype)

    def one(part: tuple[Array, Array]) -> Array:
        x, of_tokens = part
        return draw(tempered_logits(x, low, form), of_tokens)

    return join_sequence(jax.lax.map(one, split_sequence(form.chunks, hidden, keys)))
