"""Check of a model's numbers on a few tokens, to see that files read back as the same model."""

import functools
import gc

import jax
import numpy as np
from flax import nnx

from maxtrain.config.schema import ModelConfig
from maxtrain.models.decoder import Decoder

# Of the tokens on which logits are compared.
_ROWS = 2
_LENGTH = 64


def some_tokens(config: ModelConfig) -> np.ndarray:
    """Tokens [B, T] to compare logits on, always the same."""
    assert config.vocab_size is not None
    size = (_ROWS, min(_LENGTH, config.max_length))
    return np.random.default_rng(0).integers(0, config.vocab_size, size).astype(np.int32)


@functools.partial(jax.jit, static_argnums=0)
def logits(graphdef: nnx.GraphDef, params: nnx.State, tokens: jax.Array) -> jax.Array:
    """Logits [B, T, V] of tokens [B, T]."""
    model: Decoder = nnx.merge(graphdef, params)
    return model(tokens)


def forget_arrays(params: nnx.State) -> None:
    """Frees the memory of arrays that nobody uses any more."""
    for leaf in jax.tree.leaves(params):
        leaf.delete()
    # Memory of numpy that a CPU device had taken as it is comes free when Python collects garbage.
    gc.collect()
