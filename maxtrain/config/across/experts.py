"""Limits of the kernels of expert products, checked against the model, its adapters and the mesh;
and the batch that expert shares are computed over.
"""

from collections.abc import Iterator

from maxtrain.config.schema import ModelConfig, RunConfig
from maxtrain.config.sections.moe import WITH_EXPERTS
from maxtrain.config.words import divisors, nearest

# The smallest matrices that tokamax multiplies with.
_LEAST_DIM = 128


def expert_kernel_problems(config: RunConfig) -> Iterator[str]:
    """Yield what the chosen kernel of expert products does not support."""
    model = config.model
    if model.family not in WITH_EXPERTS or model.routing.kernel != "tokamax":
        return
    key = "model.routing.kernel=tokamax"
    width = model.moe.expert_dim or model.mlp_dim
    tensor = max(config.mesh.tensor, 1)
    if model.embed_dim < _LEAST_DIM:
        yield (
            f"{key} multiplies with matrices of {_LEAST_DIM} inputs and outputs at least, and "
            f"model.embed_dim is {model.embed_dim}. Set model.routing.kernel=blocks."
        )
    if width // tensor < _LEAST_DIM:
        yield (
            f"{key} multiplies with matrices of {_LEAST_DIM} inputs and outputs at least, and a "
            f"device has {width // tensor} units of an expert. Set model.routing.kernel=blocks."
        )
    if model.lora.rank is not None and model.lora.base != "full":
        yield (
            f"{key} multiplies with no adapters beside quantised weights, as "
            f"model.lora.base={model.lora.base} asks for. Set model.routing.kernel=blocks."
        )
    if model.routing.capacity_factor is not None:
        yield (
            f"{key} is not used with "
            f"model.routing.capacity_factor={model.routing.capacity_factor}, "
            "whose products are of one size. Set model.routing.kernel=blocks."
        )


def split_problems(config: RunConfig) -> Iterator[str]:
    """Experts that can't be split over devices; an axis of a size that is not known yet splits
    none."""
    expert = config.mesh.expert
    has_experts = config.model.family in WITH_EXPERTS
    if config.mesh.preset == "moe" and not has_experts:
        yield (
            f"mesh.preset=moe splits experts, and model.family={config.model.family} has none. "
            "Set mesh.preset=fsdp."
        )
    if expert <= 1:
        return
    if not has_experts:
        yield (
            f"mesh.expert={expert} splits experts, and model.family={config.model.family} has "
            f"none. Set mesh.expert=1, and mesh.fsdp higher instead."
        )
        return
    count = config.model.moe.num_experts
    if count % expert:
        valid = nearest(expert, divisors(count))
        yield (
            f"mesh.expert={expert} must divide model.moe.num_experts={count}. "
            f"Set mesh.expert to {valid}."
        )


def balance_scope_problems(config: RunConfig) -> Iterator[str]:
    """Shares over a whole step, whose choices are counted before it is attacked."""
    accumulation = config.optimizer.accumulation
    if not compares_whole_steps(config.model) or accumulation == 1:
        return
    if config.loss.adversarial:
        yield (
            "model.routing.balance_scope=global would compare the shares of attacked embeddings "
            f"with choices before the attack where optimizer.accumulation={accumulation} and "
            f"loss.adversarial={config.loss.adversarial}. "
            "Set model.routing.balance_scope=sequence, or optimizer.accumulation=1."
        )


def compares_whole_steps(model: ModelConfig) -> bool:
    """Return whether shares of experts are compared over all micro-batches of a step together."""
    routing = model.routing
    has_experts = model.family in WITH_EXPERTS
    return has_experts and routing.balance > 0 and routing.balance_scope == "global"
