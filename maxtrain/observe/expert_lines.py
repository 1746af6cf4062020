"""Launch messages about a model's experts. Without jax."""

from maxtrain.config.across.experts import compares_whole_steps
from maxtrain.config.schema import ModelConfig
from maxtrain.config.sections.moe import WITH_EXPERTS


def expert_summary(model: ModelConfig) -> str:
    """Return how many experts there are, what they take, and how their products are made; empty if
    the model has none.
    """
    if model.family not in WITH_EXPERTS:
        return ""
    moe = model.moe
    routing = model.routing
    taken = "none is dropped"
    products = f"model.routing.kernel={routing.kernel}"
    if routing.capacity_factor is not None:
        taken = (
            f"an expert takes {routing.capacity_factor:g} equal shares of a row, and the rest is "
            "dropped"
        )
        if routing.kernel != "eager":
            products += ", whose products are of one size then"
    return (
        f"experts: {moe.num_experts:,} in a layer, {moe.experts_per_token:,} for each token, "
        f"{taken}; {products}"
    )


def expert_warning(model: ModelConfig, platform: str) -> str:
    """Return a warning that the chosen kernel of expert products is slow on this platform; empty if
    it is not.
    """
    kernel = model.routing.kernel
    if model.family not in WITH_EXPERTS:
        return ""
    has_own = kernel in ("blocks", "tokamax") or (platform == "tpu" and kernel == "ragged")
    # With a capacity, only the oracle makes other products.
    if has_own or (model.routing.capacity_factor is not None and kernel != "eager"):
        return ""
    return (
        f"model.routing.kernel={kernel} multiplies every token with every expert on devices of "
        f"platform {platform}, {model.moe.num_experts:,} products in the place of "
        f"{model.moe.experts_per_token:,}. Set model.routing.kernel=blocks, which makes only "
        "those that count."
    )


def counting_note(model: ModelConfig, accumulation: int) -> str:
    """Return a note that a step has one more forward pass, and why; empty if it does not."""
    if accumulation == 1 or not compares_whole_steps(model):
        return ""
    return (
        f"model.routing.balance_scope=global with optimizer.accumulation={accumulation}: each step "
        "first counts the choices of all its micro-batches, in one forward pass more"
    )
