"""DeepSeek V2 and V3: attention over latents, a few dense layers first, then fine-grained experts
beside one that all tokens use.

Sources: https://arxiv.org/abs/2405.04434; https://arxiv.org/abs/2412.19437.
"""

import dataclasses
from typing import Any

from data_pipeline.base.errors import DataError
from maxtrain.config.schema import LatentConfig, ModelConfig, MoeConfig
from maxtrain.models.families import llama
from maxtrain.models.families.family import Family, HfConfig
from maxtrain.models.families.tables import (
    LLAMA_NORMS,
    ExpertNames,
    LayerGroup,
    decoder_table,
    expert_entries,
    linear,
    norm,
)
from maxtrain.models.hf_mapping import Flatten, Join, ParamMapping, Transpose
from maxtrain.models.specs import (
    DecoderSpec,
    LatentSpec,
    LayerSpec,
    MlpSpec,
    MoeSpec,
    NormSpec,
    StackSpec,
    expert_dim,
)
from maxtrain.ops.rope_scaling import yarn_scale

# Layer 61 of V3, which predicts further tokens ahead, is not read.
_IGNORED = r".*\.rotary_emb\.inv_freq|lm_head\.weight|model\.layers\.61\..*"
_EXPERTS = ExpertNames(shared="shared_experts")
# The eps of DeepSeek's norms inside attention, independent of the config.
_NORM_EPS = 1e-6


def v2_spec(config: ModelConfig) -> DecoderSpec:
    """Return the specification of DeepSeek V2: experts by softmax, whose weights are not
    normalised."""
    moe = llama.experts(
        config,
        scale=config.moe.scale,
        num_groups=config.moe.num_groups,
        top_groups=config.moe.top_groups,
    )
    return _spec(config, dataclasses.replace(moe, normalize=False))


def v3_spec(config: ModelConfig) -> DecoderSpec:
    """Return the specification of DeepSeek V3: experts by sigmoid, with a correction that balances
    shares."""
    group = config.moe.num_experts // config.moe.num_groups
    moe = llama.experts(
        config,
        scores="sigmoid",
        scale=config.moe.scale,
        num_groups=config.moe.num_groups,
        top_groups=config.moe.top_groups,
        best_of_group=min(2, group),
        corrected=True,
    )
    return _spec(config, moe)


def _spec(config: ModelConfig, moe: MoeSpec) -> DecoderSpec:
    dense = _layer(config)
    sparse = dataclasses.replace(dense, mlp=moe, quantities=moe.quantities())
    num_dense = min(config.moe.dense_layers, config.num_layers)
    num_sparse = config.num_layers - num_dense
    if not num_sparse:
        return DecoderSpec(StackSpec((dense,), num_dense), dense.norm)
    stack = StackSpec((sparse,), num_sparse, prefix=(dense,) * num_dense)
    return DecoderSpec(stack, dense.norm)


def _layer(config: ModelConfig) -> LayerSpec:
    """Return the layer without experts."""
    latent = config.latent
    size = config.head_dim
    assert size is not None
    scale = size**-0.5
    if config.rope_scaling == "yarn" and config.rope.mscale_all_dim is not None:
        scale *= yarn_scale(config.rope_factor, config.rope.mscale_all_dim) ** 2
    mixer = LatentSpec(
        num_heads=config.num_heads,
        head_dim=size,
        rope_dim=latent.rope_dim,
        value_dim=latent.value_dim,
        kv_rank=latent.kv_rank,
        query_rank=latent.query_rank,
        scale=scale,
        interleaved=latent.interleaved,
        norm_eps=_NORM_EPS,
    )
    return LayerSpec(
        mixer=mixer,
        mlp=MlpSpec(config.mlp_dim),
        rope=llama.rope(config, size=latent.rope_dim),
        norm=NormSpec(config.norm_eps),
    )


def read_v2(settings: HfConfig) -> ModelConfig:
    """Read the ModelConfig from the config.json of DeepSeek V2."""
    settings = settings.with_defaults(
        first_k_dense_replace=0,
        moe_intermediate_size=1407,
        n_routed_experts=64,
        n_shared_experts=2,
        routed_scaling_factor=1.0,
        topk_method="greedy",
    )
    settings.require("topk_method", "greedy", "group_limited_greedy")
    settings.require("scoring_func", "softmax")
    # This key has no effect in transformers, which does not normalise.
    settings.require("norm_topk_prob", False)
    settings.require("mlp_bias", False)
    groups = (1, 1)
    if settings.values["topk_method"] == "group_limited_greedy":
        groups = (settings.number("n_group"), settings.number("topk_group"))
    return _read(settings, groups, normalize=True, interleaved=True)


def read_v3(settings: HfConfig) -> ModelConfig:
    """Read the ModelConfig from the config.json of DeepSeek V3."""
    settings = settings.where_missing(
        n_group=8,
        num_experts_per_tok=8,
        num_key_value_heads=128,
        topk_group=4,
    )
    settings = settings.with_defaults(
        first_k_dense_replace=3,
        moe_intermediate_size=2048,
        n_routed_experts=256,
        n_shared_experts=1,
        routed_scaling_factor=2.5,
    )
    settings.require("topk_method", "noaux_tc")
    settings.require("scoring_func", "sigmoid")
    groups = (settings.number("n_group"), settings.number("topk_group"))
    normalize = settings.flag("norm_topk_prob", True)
    return _read(settings, groups, normalize, settings.flag("rope_interleave", True))


def _read(
    settings: HfConfig, groups: tuple[int, int], normalize: bool, interleaved: bool
) -> ModelConfig:
    settings = settings.with_defaults(
        kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    )
    settings.require("moe_layer_freq", 1)
    number = settings.number
    heads = number("num_attention_heads")
    if number("num_key_value_heads", heads) != heads:
        raise DataError(
            f"{settings.path}: num_key_value_heads={settings.values['num_key_value_heads']} must "
            f"be num_attention_heads={heads}. Get the file again from where the model is."
        )
    rope_dim = number("qk_rope_head_dim")
    width = number("moe_intermediate_size")
    dense = settings.values["first_k_dense_replace"]
    if dense:
        dense = number("first_k_dense_replace")
    shared = settings.values.get("n_shared_experts") or 0
    if shared:
        shared = number("n_shared_experts")
    moe = MoeConfig(
        num_experts=number("n_routed_experts"),
        experts_per_token=number("num_experts_per_tok"),
        expert_dim=width,
        shared_dim=shared * width,
        normalize=normalize,
        scale=number("routed_scaling_factor", kind=float),
        num_groups=groups[0],
        top_groups=groups[1],
        dense_layers=dense,
    )
    latent = LatentConfig(
        query_rank=settings.number_or_null("q_lora_rank", 1536),
        kv_rank=number("kv_lora_rank"),
        rope_dim=rope_dim,
        value_dim=number("v_head_dim"),
        interleaved=interleaved,
    )
    _require_both_scales(settings)
    # `head_dim` of the file is the size of the rotated part.
    whole = number("qk_nope_head_dim") + rope_dim
    values = {**settings.values, "head_dim": whole}
    settings = dataclasses.replace(settings, values=values)
    return llama.read_decoder(settings, moe=settings.experts(moe), latent=latent)


def _require_both_scales(settings: HfConfig) -> None:
    """Raise DataError if mscale_all_dim stands without mscale: it would count for scores, and not
    for cos and sin."""
    for name in ("rope_parameters", "rope_scaling"):
        given = settings.values.get(name)
        if not isinstance(given, dict) or not given.get("mscale_all_dim"):
            continue
        is_yarn = given.get("rope_type", given.get("type")) == "yarn"
        is_whole = given.get("mscale") and given.get("attention_factor") is None
        if not is_yarn or not is_whole:
            raise DataError(
                f"{settings.path}: {name} has mscale_all_dim={given['mscale_all_dim']}, which is "
                "supported only with rope_type 'yarn', beside mscale, and without "
                "attention_factor. Choose a model with these."
            )


def write_v2(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json of DeepSeek V2 for this ModelConfig."""
    method = "greedy"
    if config.moe.num_groups > 1:
        method = "group_limited_greedy"
    return _write(config) | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "mlp_bias": False,
        "model_type": "deepseek_v2",
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "topk_method": method,
    }


def write_v3(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json of DeepSeek V3 for this ModelConfig."""
    return _write(config) | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "norm_topk_prob": config.moe.normalize,
        "num_nextn_predict_layers": 0,
        "rope_interleave": config.latent.interleaved,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }


def _write(config: ModelConfig) -> dict[str, Any]:
    moe = config.moe
    latent = config.latent
    assert config.head_dim is not None
    width = expert_dim(config)
    if moe.shared_dim % width:
        raise DataError(
            f"model.moe.shared_dim={moe.shared_dim} must be a multiple of the hidden units of an "
            f"expert ({width}): config.json says how many experts it is as large as. "
            f"Set model.moe.shared_dim={width}."
        )
    return llama.write_decoder(config) | {
        "attention_bias": False,
        "first_k_dense_replace": moe.dense_layers,
        "head_dim": latent.rope_dim,
        "kv_lora_rank": latent.kv_rank,
        "moe_intermediate_size": width,
        "n_group": moe.num_groups,
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": moe.shared_dim // width,
        "num_experts_per_tok": moe.experts_per_token,
        "output_router_logits": False,
        "pretraining_tp": 1,
        "q_lora_rank": latent.query_rank,
        "qk_head_dim": config.head_dim,
        "qk_nope_head_dim": config.head_dim - latent.rope_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "routed_scaling_factor": moe.scale,
        "topk_group": moe.top_groups,
        "v_head_dim": latent.value_dim,
    }


def v2_table(config: ModelConfig) -> list[ParamMapping]:
    """Return the mapping of the parameters of DeepSeek V2 to a Hugging Face checkpoint."""
    return _table(config, v2_spec(config))


def v3_table(config: ModelConfig) -> list[ParamMapping]:
    """Return the mapping of the parameters of DeepSeek V3 to a Hugging Face checkpoint."""
    return _table(config, v3_spec(config))


def _table(config: ModelConfig, spec: DecoderSpec) -> list[ParamMapping]:
    return decoder_table(
        spec, config.tie_embeddings, LLAMA_NORMS, _attention_entries, _expert_entries
    )


def _attention_entries(place: LayerGroup, theirs: str) -> list[ParamMapping]:
    mixer = place.layer.mixer
    assert isinstance(mixer, LatentSpec)
    entries = []
    if mixer.query_rank is None:
        entries += linear(place, "attention.q", f"{theirs}.q_proj", 1, False)
    else:
        entries += linear(place, "attention.q_down", f"{theirs}.q_a_proj", 1, False)
        entries.append(norm(place, "attention.q_norm", f"{theirs}.q_a_layernorm"))
        entries += linear(place, "attention.q", f"{theirs}.q_b_proj", 1, False)
    stacked = len(place.steps)
    down = (
        Join(1 + stacked, (mixer.kv_rank, mixer.rope_dim)),
        *place.steps,
        Transpose(),
    )
    ours = f"{place.ours}.attention"
    names = (f"{ours}.kv_down.kernel", f"{ours}.k_rope.kernel")
    entries.append(ParamMapping(names, (f"{theirs}.kv_a_proj_with_mqa.weight",), down))
    entries.append(norm(place, "attention.kv_norm", f"{theirs}.kv_a_layernorm"))
    # For each head, the part of its keys that is not rotated, and then its values.
    up = (
        Join(2 + stacked, (mixer.head_dim - mixer.rope_dim, mixer.value_dim)),
        *place.steps,
        Flatten(1),
        Transpose(),
    )
    names = (f"{ours}.k.kernel", f"{ours}.v.kernel")
    entries.append(ParamMapping(names, (f"{theirs}.kv_b_proj.weight",), up))
    entries += linear(place, "attention.o", f"{theirs}.o_proj", 2, False)
    return entries


def _expert_entries(place: LayerGroup, moe: MoeSpec, theirs: str) -> list[ParamMapping]:
    entries = expert_entries(place, moe, theirs, _EXPERTS)
    if moe.corrected:
        ours = f"{place.ours}.mlp.correction"
        name = f"{theirs}.mlp.gate.e_score_correction_bias"
        # It is float32 in a model that is stored in bfloat16, too.
        entries.append(ParamMapping((ours,), (name,), place.steps, dtype="float32"))
    return entries


_V2_LITE = ModelConfig(
    family="deepseek_v2",
    vocab_size=102_400,
    num_layers=27,
    embed_dim=2048,
    mlp_dim=10_944,
    num_heads=16,
    num_kv_heads=16,
    head_dim=192,
    max_length=163_840,
    norm_eps=1e-6,
    rope_theta=10_000.0,
    rope_scaling="yarn",
    rope_factor=40.0,
    rope_original_length=4096,
    rope=dataclasses.replace(ModelConfig().rope, mscale=0.707, mscale_all_dim=0.707),
    latent=LatentConfig(query_rank=None),
    moe=MoeConfig(64, 6, expert_dim=1408, shared_dim=2 * 1408, dense_layers=1),
)
V2_PRESETS = {
    "deepseek_v2_lite": _V2_LITE,
    "deepseek_v2": dataclasses.replace(
        _V2_LITE,
        num_layers=60,
        embed_dim=5120,
        mlp_dim=12_288,
        num_heads=128,
        num_kv_heads=128,
        latent=LatentConfig(query_rank=1536),
        moe=MoeConfig(
            160,
            6,
            expert_dim=1536,
            shared_dim=2 * 1536,
            scale=16.0,
            num_groups=8,
            top_groups=3,
            dense_layers=1,
        ),
    ),
}
V3_PRESETS = {
    "deepseek_v3": dataclasses.replace(
        _V2_LITE,
        family="deepseek_v3",
        vocab_size=129_280,
        num_layers=61,
        embed_dim=7168,
        mlp_dim=18_432,
        num_heads=128,
        num_kv_heads=128,
        rope=dataclasses.replace(ModelConfig().rope, mscale=1.0, mscale_all_dim=1.0),
        latent=LatentConfig(query_rank=1536),
        moe=MoeConfig(
            256,
            8,
            expert_dim=2048,
            shared_dim=2048,
            scale=2.5,
            num_groups=8,
            top_groups=4,
            dense_layers=3,
        ),
    ),
}

DEEPSEEK_V2 = Family(
    "DeepseekV2ForCausalLM",
    v2_spec,
    read_v2,
    write_v2,
    v2_table,
    ignored=_IGNORED,
    presets=V2_PRESETS,
)
DEEPSEEK_V3 = Family(
    "DeepseekV3ForCausalLM",
    v3_spec,
    read_v3,
    write_v3,
    v3_table,
    ignored=_IGNORED,
    presets=V3_PRESETS,
)
