"""A model that sees a part of a batch, and knows how many choices of the whole batch fall on each
of
its experts: what `balance_scope=global` compares shares over.

The loss of uneven shares is linear in shares, and choices have no gradient. So the parts of a batch
add up to the loss and the gradient of the whole, once its choices are known.
"""

from collections.abc import Mapping

from flax import nnx
from jaxtyping import Array

from maxtrain.models.decoder import Decoder
from maxtrain.models.moe import LOAD
from maxtrain.models.specs import MoeSpec


class WholeLoad(nnx.Variable):
    """The choices of a whole batch that fall on each expert, [E]; of no model that is kept."""


def compares_whole_batches(model: Decoder) -> bool:
    """Whether a term of the loss needs the choices of the whole batch."""
    routings = [
        layer.mlp.routing for layer in model.spec.stack.layers() if isinstance(layer.mlp, MoeSpec)
    ]
    return any(routing.balance and routing.balance_scope == "global" for routing in routings)


def loads_of(observed: Mapping[str, Array]) -> dict[str, Array]:
    """The choices that fall on experts, by path, of all that layers observed."""
    return {path: value for path, value in observed.items() if path.endswith(f".{LOAD.name}")}


def with_loads(model: Decoder, loads: Mapping[str, Array]) -> Decoder:
    """The model with the choices of a whole batch, as of `loads_of`. Its weights are the same."""
    graphdef, variables = nnx.split(model)
    model = nnx.merge(graphdef, variables)
    for path, load in loads.items():
        _, layer, block, _ = path.split(".")
        getattr(getattr(model.layers, layer), block).whole_load = nnx.data(WholeLoad(load))
    return model
