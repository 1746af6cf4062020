"""A family of models whose layers say everything that a layer can say: a term of the loss, a number
to record, and what a buffer is updated from."""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from maxtrain.config.schema import ModelConfig
from maxtrain.models.buffer import Buffer
from maxtrain.models.families import FAMILIES
from maxtrain.models.layers import FEED_FORWARDS
from maxtrain.models.mlp import Mlp, MlpOut
from maxtrain.models.specs import DecoderSpec, MlpSpec, StackSpec
from maxtrain.ops.quantity import Metric
from maxtrain.ops.sums import WeightedSum

RATE = 0.01
FACTOR = 0.5
QUANTITIES = (
    Metric("size", "mean square per token and layer"),
    Metric("positive", "numbers", "sum"),
)


class CentredSpec(MlpSpec):
    """A feed-forward block whose inputs are moved towards a mean of 0."""


def towards(shift, signs):
    """One step along the signs that most tokens have."""
    return shift + RATE * jnp.sign(signs)


class Centred(nnx.Module):
    """SwiGLU of inputs less a shift, which no gradient changes."""

    summaries = ()

    def __init__(self, spec, embed_dim, init, recipe, rngs):
        self.inner = Mlp(spec, embed_dim, init, recipe, rngs)
        self.shift = Buffer(jnp.zeros(embed_dim), axes=("embed",), update=towards)

    def __call__(self, x, context):
        real = (context.mask.q_segments > 0)[..., None].astype(jnp.float32)
        moved = x - self.shift[...]
        out = self.inner(moved, context)
        squares = (out.x.astype(jnp.float32) ** 2).mean(-1, keepdims=True) * real
        tokens = real.sum()
        positive = ((moved > 0) * real).sum()
        return MlpOut(
            out.x,
            aux_losses={"size": WeightedSum(FACTOR * squares.sum(), tokens)},
            metrics={"positive": WeightedSum(positive, tokens)},
            buffer_inputs={"shift": (jnp.sign(moved) * real).sum((0, 1))},
        )


def spec(config: ModelConfig) -> DecoderSpec:
    """A spec with one layer before the period, one in it, and one after."""
    plain = _LLAMA.spec(config)
    (layer,) = plain.stack.period
    layer = dataclasses.replace(layer, mlp=CentredSpec(config.mlp_dim), quantities=QUANTITIES)
    stack = StackSpec(
        prefix=(layer,), period=(layer,), repeats=config.num_layers - 2, rest=(layer,)
    )
    return dataclasses.replace(plain, stack=stack)


_LLAMA = FAMILIES["llama"]


@pytest.fixture(scope="module")
def centred() -> Iterator[None]:
    """While a test runs, models of the family llama are of this one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FEED_FORWARDS, CentredSpec, Centred)
        patch.setitem(FAMILIES, "llama", _LLAMA._replace(spec=spec))
        jax.clear_caches()
        yield
    jax.clear_caches()
