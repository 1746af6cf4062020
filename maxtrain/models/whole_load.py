"""Expert loads of a whole batch for a model that sees a part of it: `balance_scope=global` compares
shares over the whole batch.

The loss of uneven shares is linear in the shares, and choices have no gradient. The parts of a
batch therefore add up to the loss and the gradient of the whole batch, once its choices are known.
"""

from collections.abc import Mapping

from flax import nnx
from jaxtyping import Array

from maxtrain.models.decoder import Decoder
from maxtrain.models.moe import LOAD
from maxtrain.models.specs import MoeSpec


class WholeLoad(nnx.Variable):
    """The number of choices of a whole batch for each expert, [E]; part of no saved model."""


def compares_whole_batches(model: Decoder) -> bool:
    """Return True if a term of the loss needs the choices of the whole batch."""
    routings = [
        layer.mlp.routing for layer in model.spec.stack.layers() if isinstance(layer.mlp, MoeSpec)
    ]
    return any(routing.balance and routing.balance_scope == "global" for routing in routings)


def loads_of(observed: Mapping[str, Array]) -> dict[str, Array]:
    """Return the number of choices for each expert, by path, among all observations of the
    layers."""
    return {path: value for path, value in observed.items() if path.endswith(f".{LOAD.name}")}


def with_loads(model: Decoder, loads: Mapping[str, Array]) -> Decoder:
    """Return the model with the choices of a whole batch, from `loads_of`. Its weights are the
    same."""
    graphdef, variables = nnx.split(model)
    model = nnx.merge(graphdef, variables)
    for path, load in loads.items():
        _, layer, block, _ = path.split(".")
        getattr(getattr(model.layers, layer), block).whole_load = nnx.data(WholeLoad(load))
    return model
