"""Where the parameters of a decoder are in checkpoints of Hugging Face, for families with the names
of Llama. No jax here."""

from collections.abc import Mapping
from typing import NamedTuple

from maxtrain.models.specs import DecoderSpec, LayerSpec, StackSpec
from maxtrain.weights.codec import Entry, Flatten, Ravel, Stack, Step, Transpose

# The names there of our norms, in the order of the files. By the part of a layer that a norm
# belongs to, families differ.
Norms = Mapping[str, str]
LLAMA_NORMS: Norms = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}


class Place(NamedTuple):
    """A layer, or the layers at one place of the period."""

    layer: LayerSpec
    # Of our parameters, as in `layers.0`.
    ours: str
    # Its number there; `{}` where each of the place's layers has its own.
    number: str
    # What takes the layers apart, if there are several.
    steps: tuple[Step, ...]


def places(stack: StackSpec) -> list[Place]:
    """All places, in order."""
    found = []
    for index, layer in enumerate(stack.prefix):
        found.append(Place(layer, f"layers.prefix_{index}", str(index), ()))
    start = len(stack.prefix)
    for index, layer in enumerate(stack.period):
        numbers = Stack(start + index, len(stack.period))
        found.append(Place(layer, f"layers.{index}", "{}", (numbers,)))
    start += len(stack.period) * stack.repeats
    for index, layer in enumerate(stack.rest):
        found.append(Place(layer, f"layers.rest_{index}", str(start + index), ()))
    return found


def decoder_table(spec: DecoderSpec, tied: bool, norms: Norms = LLAMA_NORMS) -> list[Entry]:
    """Where the parameters are.

    Args:
        spec: the model.
        tied: the head is the embedding.
        norms: names of the norms of a layer.
    """
    entries = [Entry(("embedding",), ("model.embed_tokens.weight",))]
    for place in places(spec.stack):
        entries += _of_layer(place, norms)
    entries.append(Entry(("final_norm.scale",), ("model.norm.weight",)))
    if not tied:
        entries.append(Entry(("head.kernel",), ("lm_head.weight",), (Flatten(1), Transpose())))
    return entries


def _of_layer(place: Place, norms: Norms) -> list[Entry]:
    layer = place.layer
    theirs = f"model.layers.{place.number}"
    entries = []
    for name in "qkvo":
        inputs = 1
        if name == "o":
            inputs = 2
        entries += linear(
            place,
            f"attention.{name}",
            f"{theirs}.self_attn.{name}_proj",
            inputs,
            name in layer.biases,
        )
    for name, kinds in (("q_norm", ("query", "all_queries")), ("k_norm", ("key", "all_keys"))):
        if any(kind in layer.norms for kind in kinds):
            entries.append(norm(place, f"attention.{name}", f"{theirs}.self_attn.{name}"))
    products = ("gate", "up", "down")
    if not layer.mlp.gated:
        products = ("up", "down")
    for name in products:
        entries += linear(
            place, f"mlp.{name}", f"{theirs}.mlp.{name}_proj", 1, name in layer.biases
        )
    for ours, name in norms.items():
        entries.append(norm(place, ours, f"{theirs}.{name}"))
    return entries


def linear(place: Place, ours: str, theirs: str, inputs: int, bias: bool) -> list[Entry]:
    """A product: its matrix is [outputs, inputs] there; of ours, the first `inputs` dims are
    inputs."""
    matrix = (*place.steps, Flatten(inputs), Transpose())
    entries = [Entry((f"{place.ours}.{ours}.kernel",), (f"{theirs}.weight",), matrix)]
    if bias:
        vector = (*place.steps, Ravel())
        entries.append(Entry((f"{place.ours}.{ours}.bias",), (f"{theirs}.bias",), vector))
    return entries


def norm(place: Place, ours: str, theirs: str) -> Entry:
    """The scale of a norm."""
    return Entry((f"{place.ours}.{ours}.scale",), (f"{theirs}.weight",), place.steps)
