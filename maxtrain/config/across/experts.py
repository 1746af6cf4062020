"""What the kernel of experts' products can do, and what the model, its adapters and the mesh ask of
it."""

from collections.abc import Iterator

from maxtrain.config.schema import RunConfig
from maxtrain.config.sections.moe import WITH_EXPERTS

# The smallest matrices that tokamax multiplies with.
_LEAST_DIM = 128


def expert_kernel_problems(config: RunConfig) -> Iterator[str]:
    """What the kernel can't do."""
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
            f"{key} is not used with model.routing.capacity_factor={model.routing.capacity_factor}, "
            "whose products are of one size. Set model.routing.kernel=blocks."
        )
