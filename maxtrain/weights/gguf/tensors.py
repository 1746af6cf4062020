"""Mapping of the parameters of a decoder to the tensors of a GGUF file, in the steps of
models/hf_mapping.py.

Source: llama.cpp, conversion and gguf-py's tensor_mapping.
"""

from maxtrain.config.schema import ModelConfig
from maxtrain.models.families import FAMILIES
from maxtrain.models.families.tables import LayerGroup, places
from maxtrain.models.hf_mapping import (
    Flatten,
    Offset,
    ParamMapping,
    Permute,
    Ravel,
    TensorTransform,
    Transpose,
)
from maxtrain.models.specs import AttentionSpec, MoeSpec, NormSpec
from maxtrain.weights.gguf.architecture import TURNS_NEIGHBOURS, architecture_of

# Names in the file by our names of a layer's norms.
_NORMS = {
    "attention_norm": "attn_norm",
    "attention_out_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "mlp_out_norm": "post_ffw_norm",
}
_PRODUCTS = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output"}
# A tensor without a parameter: the divisors of rotary frequencies.
ROPE_FACTORS = "rope_freqs.weight"


def gguf_table(config: ModelConfig) -> list[ParamMapping]:
    """Return the mapping of the parameters. Entries with a `dtype` have it in any file."""
    spec = FAMILIES[config.family].spec(config)
    turns_neighbours = architecture_of(config) == TURNS_NEIGHBOURS
    entries = [ParamMapping(("embedding",), ("token_embd.weight",))]
    for place in places(spec.stack):
        entries += _attention(place, turns_neighbours)
        theirs = f"blk.{place.number}"
        for ours, name in _NORMS.items():
            if ours.removesuffix("_norm") in place.layer.norms:
                entries.append(_norm(f"{place.ours}.{ours}", f"{theirs}.{name}", place))
        if isinstance(place.layer.mlp, MoeSpec):
            entries += _experts(place)
        else:
            for name in ("gate", "up", "down"):
                has_bias = name in place.layer.biases
                entries += _product(place, f"mlp.{name}", f"{theirs}.ffn_{name}", 1, has_bias)
    entries.append(_scale("final_norm", "output_norm", spec.norm, ()))
    if not config.tie_embeddings:
        entries.append(
            ParamMapping(("head.kernel",), ("output.weight",), (Flatten(1), Transpose()))
        )
    return entries


def _attention(place: LayerGroup, turns_neighbours: bool) -> list[ParamMapping]:
    layer = place.layer
    mixer = layer.mixer
    assert isinstance(mixer, AttentionSpec)
    heads = {"q": mixer.num_heads, "k": mixer.num_kv_heads}
    entries = []
    for name, theirs in _PRODUCTS.items():
        inputs = 1
        if name == "o":
            inputs = 2
        order: tuple[TensorTransform, ...] = ()
        if turns_neighbours and name in heads:
            # Pairs half a head apart there become neighbours.
            order = (Permute(0, (heads[name], 2, mixer.head_dim // 2), (0, 2, 1)),)
        ours = f"attention.{name}"
        theirs = f"blk.{place.number}.{theirs}"
        entries += _product(place, ours, theirs, inputs, name in layer.biases, order)
    for ours, kind, theirs in (
        ("q_norm", "query", "attn_q_norm"),
        ("k_norm", "key", "attn_k_norm"),
    ):
        if kind in layer.norms:
            theirs = f"blk.{place.number}.{theirs}"
            entries.append(_norm(f"{place.ours}.attention.{ours}", theirs, place))
    return entries


def _experts(place: LayerGroup) -> list[ParamMapping]:
    """Return the entries of experts: one tensor for all, [experts, outputs, inputs]. The router is
    never rounded."""
    theirs = f"blk.{place.number}"
    router = (*place.steps, Transpose())
    name = f"{place.ours}.mlp.router.kernel"
    entries = [ParamMapping((name,), (f"{theirs}.ffn_gate_inp.weight",), router, "float32")]
    for name in ("gate", "up", "down"):
        steps = (*place.steps, Transpose())
        ours = f"{place.ours}.mlp.{name}.kernel"
        entries.append(ParamMapping((ours,), (f"{theirs}.ffn_{name}_exps.weight",), steps))
    return entries


def _product(
    place: LayerGroup,
    ours: str,
    theirs: str,
    inputs: int,
    bias: bool,
    order: tuple[TensorTransform, ...] = (),
) -> list[ParamMapping]:
    """Return the entries of a matrix, [outputs, inputs] in the file; `order` rearranges its
    outputs."""
    ours = f"{place.ours}.{ours}"
    matrix = (*place.steps, Flatten(inputs), Transpose(), *order)
    entries = [ParamMapping((f"{ours}.kernel",), (f"{theirs}.weight",), matrix)]
    if bias:
        vector = (*place.steps, Ravel(), *order)
        entries.append(ParamMapping((f"{ours}.bias",), (f"{theirs}.bias",), vector, "float32"))
    return entries


def _norm(ours: str, theirs: str, place: LayerGroup) -> ParamMapping:
    return _scale(ours, theirs, place.layer.norm, place.steps)


def _scale(
    ours: str, theirs: str, norm: NormSpec, steps: tuple[TensorTransform, ...]
) -> ParamMapping:
    """Return the entry of the scale of a norm. Scales of the file count from 0."""
    if norm.offset:
        steps = (*steps, Offset(norm.offset))
    return ParamMapping((f"{ours}.scale",), (f"{theirs}.weight",), steps, "float32")
