"""Sampling of tokens from distributions with the Gumbel-max trick, each with a key of its own."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from maxtrain.ops.chunks import join_sequence, split_sequence
from maxtrain.ops.head import gathered
from maxtrain.ops.log_probs import LogProbsStaticArgs, tempered_logits


def draw(logits: Float[Array, "*s V"], keys: Key[Array, "*s"]) -> Int[Array, "*s"]:
    """Draw one token from each distribution, which depends only on its logits and its key.

    The draw is the argmax of logit + Gumbel noise over the whole vocabulary in the order of ids. So
    nearly equal logits give the same token, except near ties.
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
    """Draw a token with each key at each position, without all logits at once; from the same logits
    as `token_log_probs` with this form.

    Args:
        hidden: last hidden states.
        head: output matrix.
        keys: one for each token.
        form: as for `token_log_probs`.
    """
    low = gathered(head, form.dtype)

    def one(part: tuple[Array, Array]) -> Array:
        x, of_tokens = part
        return draw(tempered_logits(x, low, form), of_tokens)

    return join_sequence(jax.lax.map(one, split_sequence(form.chunks, hidden, keys)))
