"""Mappings of the parameters of a decoder to Hugging Face checkpoints, for families with the names
of Llama. No jax here."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from maxtrain.models.hf_mapping import (
    Flatten,
    ParamMapping,
    Ravel,
    StackLayers,
    TensorTransform,
    Transpose,
)
from maxtrain.models.specs import DecoderSpec, LayerSpec, MlpSpec, MoeSpec, StackSpec

# Names of our norms in a checkpoint, in the order of the files. Families differ in the part of a
# layer that a name belongs to.
Norms = Mapping[str, str]
LLAMA_NORMS: Norms = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}


class LayerGroup(NamedTuple):
    """A layer, or the layers at one place of the period."""

    layer: LayerSpec
    # Prefix of our parameters, such as `layers.0`.
    ours: str
    # Its number in the names of a checkpoint; `{}` where each layer of the place has its own.
    number: str
    # The step that splits the layers, if there are several.
    steps: tuple[TensorTransform, ...]


def places(stack: StackSpec) -> list[LayerGroup]:
    """Return all places, in order."""
    found = []
    for index, layer in enumerate(stack.prefix):
        found.append(LayerGroup(layer, f"layers.prefix_{index}", str(index), ()))
    start = len(stack.prefix)
    for index, layer in enumerate(stack.period):
        numbers = StackLayers(start + index, len(stack.period))
        found.append(LayerGroup(layer, f"layers.{index}", "{}", (numbers,)))
    start += len(stack.period) * stack.repeats
    for index, layer in enumerate(stack.rest):
        found.append(LayerGroup(layer, f"layers.rest_{index}", str(start + index), ()))
    return found


class ExpertNames(NamedTuple):
    """The names of experts in a checkpoint."""

    # Name of the block in a layer.
    block: str = "mlp"
    router: str = "gate"
    # Names by our names, in the order of the files.
    products: Mapping[str, str] = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    shared: str = "shared_expert"
    shared_gate: str = "shared_expert_gate"


QWEN_EXPERTS = ExpertNames()


def decoder_table(
    spec: DecoderSpec,
    tied: bool,
    norms: Norms = LLAMA_NORMS,
    attention: Callable[[LayerGroup, str], list[ParamMapping]] | None = None,
    experts: Callable[[LayerGroup, MoeSpec, str], list[ParamMapping]] | None = None,
) -> list[ParamMapping]:
    """Return the mapping of the parameters of a decoder.

    Args:
        spec: the model.
        tied: the head is the embedding.
        norms: names of the norms of a layer.
        attention: (place, name of the block in the checkpoint) -> mapping of its parameters; None:
            as in Llama.
        experts: (place, experts, name of the layer in the checkpoint) -> mapping of its parameters;
            None: as in Qwen.
    """
    attention = attention or attention_entries
    experts = experts or expert_entries
    entries = [ParamMapping(("embedding",), ("model.embed_tokens.weight",))]
    for place in places(spec.stack):
        theirs = f"model.layers.{place.number}"
        entries += attention(place, f"{theirs}.self_attn")
        if isinstance(place.layer.mlp, MoeSpec):
            entries += experts(place, place.layer.mlp, theirs)
        else:
            entries += _of_mlp(place, place.layer.mlp, f"{theirs}.mlp")
        for ours, name in norms.items():
            entries.append(norm(place, ours, f"{theirs}.{name}"))
    entries.append(ParamMapping(("final_norm.scale",), ("model.norm.weight",)))
    if not tied:
        entries.append(
            ParamMapping(("head.kernel",), ("lm_head.weight",), (Flatten(1), Transpose()))
        )
    return entries


def attention_entries(place: LayerGroup, theirs: str) -> list[ParamMapping]:
    """Return the entries of Llama's attention, with biases and norms where the layer has them."""
    layer = place.layer
    entries = []
    for name in "qkvo":
        inputs = 1
        if name == "o":
            inputs = 2
        has_bias = name in layer.biases
        entries += linear(place, f"attention.{name}", f"{theirs}.{name}_proj", inputs, has_bias)
    for name, kinds in (("q_norm", ("query", "all_queries")), ("k_norm", ("key", "all_keys"))):
        if any(kind in layer.norms for kind in kinds):
            entries.append(norm(place, f"attention.{name}", f"{theirs}.{name}"))
    return entries


def _of_mlp(place: LayerGroup, mlp: MlpSpec, theirs: str) -> list[ParamMapping]:
    products = ("gate", "up", "down")
    if not mlp.gated:
        products = ("up", "down")
    entries = []
    for name in products:
        has_bias = name in place.layer.biases
        entries += linear(place, f"mlp.{name}", f"{theirs}.{name}_proj", 1, has_bias)
    return entries


def expert_entries(
    place: LayerGroup, moe: MoeSpec, theirs: str, names: ExpertNames = QWEN_EXPERTS
) -> list[ParamMapping]:
    """Return the entries of experts with a tensor each; `theirs` is the name of the layer in the
    checkpoint."""
    theirs = f"{theirs}.{names.block}"
    entries = linear(place, "mlp.router", f"{theirs}.{names.router}", 1, False)
    for ours, name in names.products.items():
        # One tensor for each expert.
        steps = (*place.steps, StackLayers(), Transpose())
        ours = f"{place.ours}.mlp.{ours}.kernel"
        entries.append(ParamMapping((ours,), (f"{theirs}.experts.{{}}.{name}.weight",), steps))
    if moe.shared_width:
        for name in ("gate", "up", "down"):
            ours = f"mlp.shared.{name}"
            entries += linear(place, ours, f"{theirs}.{names.shared}.{name}_proj", 1, False)
    if moe.shared_gate:
        entries += linear(place, "mlp.shared_gate", f"{theirs}.{names.shared_gate}", 1, False)
    return entries


def linear(
    place: LayerGroup, ours: str, theirs: str, inputs: int, bias: bool
) -> list[ParamMapping]:
    """Return the entries of a product, whose matrix in the checkpoint is [outputs, inputs]; the
    first `inputs` dims of ours are inputs."""
    matrix = (*place.steps, Flatten(inputs), Transpose())
    entries = [ParamMapping((f"{place.ours}.{ours}.kernel",), (f"{theirs}.weight",), matrix)]
    if bias:
        vector = (*place.steps, Ravel())
        entries.append(ParamMapping((f"{place.ours}.{ours}.bias",), (f"{theirs}.bias",), vector))
    return entries


def norm(place: LayerGroup, ours: str, theirs: str) -> ParamMapping:
    """Return the entry of the scale of a norm."""
    return ParamMapping((f"{place.ours}.{ours}.scale",), (f"{theirs}.weight",), place.steps)
