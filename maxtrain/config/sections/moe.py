"""The sections `model.moe`, of weights, and `model.routing`, of a run: experts, and how tokens come
to them."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from data_pipeline.base.config_key import AnyValueExcept, UsedBy, key
from maxtrain.config.words import divisors, nearest

# Families whose layers have experts.
WITH_EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss")
EXPERTS = UsedBy({"model.family": WITH_EXPERTS})
# Families whose attention is over latents.
DEEPSEEK = ("deepseek_v2", "deepseek_v3")
OF_DEEPSEEK = UsedBy({"model.family": DEEPSEEK})
_BALANCED = UsedBy(
    {"model.routing.balance": AnyValueExcept(0.0)},
    "{key}={value} is not used with {cause}. Set model.routing.balance=0.01, or leave it out.",
)

_SPLIT = UsedBy(
    {"mesh.expert": AnyValueExcept(1), "mesh.preset": ("moe",)},
    "{key}={value} is for experts that are split over devices, and {cause}. "
    "Set mesh.expert=2 or more, or leave it out.",
    cause="mesh.expert={config.mesh.expert}",
)


@dataclasses.dataclass(frozen=True)
class MoeConfig:
    """Experts of feed-forward blocks: what the weights decide."""

    num_experts: int = key(8, "E, experts per layer", low=1, high=4096, used_by=EXPERTS)
    experts_per_token: int = key(
        2, "top-k: experts that each token is routed to", low=1, high=4096, used_by=EXPERTS
    )
    expert_dim: int | None = key(
        None, "hidden units of an expert; null: model.mlp_dim", low=1, high=1 << 22, used_by=EXPERTS
    )
    shared_dim: int = key(
        0,
        "hidden units of the shared expert, which every token goes through; 0: no shared expert",
        low=0,
        high=1 << 22,
        used_by=UsedBy({"model.family": ("qwen2_moe", *DEEPSEEK)}),
    )
    normalize: bool = key(
        True,
        "divide the router weights of a token's experts by their sum",
        used_by=UsedBy({"model.family": ("qwen2_moe", "qwen3_moe", "deepseek_v3")}),
    )
    scale: float = key(
        1.0,
        "factor of the router weights of a token's experts",
        above=0,
        high=1e6,
        used_by=OF_DEEPSEEK,
    )
    num_groups: int = key(
        1,
        "group-limited routing: number of groups of experts",
        low=1,
        high=4096,
        used_by=OF_DEEPSEEK,
    )
    top_groups: int = key(
        1,
        "group-limited routing: number of groups that a token's experts may come from",
        low=1,
        high=4096,
        used_by=OF_DEEPSEEK,
    )
    dense_layers: int = key(
        0,
        "number of first layers with a dense feed-forward block of model.mlp_dim units",
        low=0,
        used_by=OF_DEEPSEEK,
    )


@dataclasses.dataclass(frozen=True)
class RoutingConfig:
    """Run-time settings of experts: load balancing, and the kernel of their products."""

    kernel: Literal["blocks", "ragged", "tokamax", "eager"] = key(
        "blocks",
        "kernel of expert products: blocks: tokens of each expert in blocks; ragged: "
        "lax.ragged_dot, for TPUs; tokamax: TPUs and Hopper GPUs; eager: slow reference",
        used_by=EXPERTS,
    )
    capacity_factor: float | None = key(
        None,
        "expert capacity in a row, as a multiple of tokens x experts_per_token / num_experts;"
        " choices beyond it are dropped; null: no limit (dropless)",
        above=0,
        high=4096,
        used_by=EXPERTS,
    )
    balance: float = key(
        0.01,
        "weight of the load-balancing loss, which is 1 if experts get equal shares of the tokens",
        low=0,
        high=1000,
        used_by=EXPERTS,
    )
    balance_scope: Literal["sequence", "micro_batch", "global"] = key(
        "sequence",
        "tokens over which expert load is balanced: a row, a micro-batch, or the whole step "
        "(which needs one more forward pass)",
        used_by=(EXPERTS, _BALANCED),
    )
    z_loss: float = key(
        0.0,
        "weight of the router z-loss, the mean of logsumexp(router logits)^2; usual: 1e-3",
        low=0,
        high=1000,
        used_by=EXPERTS,
    )
    correction_rate: float = key(
        0.001,
        "bias update rate of loss-free load balancing: how much a step changes the bias of an"
        " expert's router score",
        low=0,
        high=1,
        used_by=UsedBy({"model.family": ("deepseek_v3",)}),
    )
    exchange_factor: float | None = key(
        1.5,
        "most choices that a device sends to another one at a time, as a multiple of an equal"
        " share; more are sent in further rounds; null: all at once",
        above=0,
        high=4096,
        used_by=(EXPERTS, _SPLIT),
    )


def expert_problems(moe: MoeConfig) -> Iterator[str]:
    """Numbers of experts and groups that do not fit together."""
    experts = f"model.moe.num_experts={moe.num_experts}"
    if moe.experts_per_token > moe.num_experts:
        yield (
            f"model.moe.experts_per_token={moe.experts_per_token} must be at most {experts}. "
            f"Set model.moe.experts_per_token={moe.num_experts}."
        )
        return
    if moe.num_experts % moe.num_groups:
        valid = nearest(moe.num_groups, divisors(moe.num_experts))
        yield (
            f"model.moe.num_groups={moe.num_groups} must divide {experts}. "
            f"Set model.moe.num_groups to {valid}."
        )
        return
    if moe.top_groups > moe.num_groups:
        yield (
            f"model.moe.top_groups={moe.top_groups} must be at most "
            f"model.moe.num_groups={moe.num_groups}. Set model.moe.top_groups={moe.num_groups}."
        )
        return
    there = moe.top_groups * (moe.num_experts // moe.num_groups)
    if moe.experts_per_token > there:
        yield (
            f"model.moe.experts_per_token={moe.experts_per_token} must be at most {there}, the "
            f"experts in model.moe.top_groups={moe.top_groups} of {moe.num_groups} groups. "
            f"Set model.moe.experts_per_token={there}, or model.moe.top_groups to more."
        )
