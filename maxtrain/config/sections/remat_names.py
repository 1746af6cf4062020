"""The section `model.kept`, and what must hold inside it."""

import dataclasses
from collections.abc import Iterator

from data_pipeline.base.config_key import UsedBy, key
from maxtrain.config.words import choices

# In the order in which a layer makes them.
NAMES = ("qkv", "attention", "gate_up", "product")
# What `product` has among others.
PRODUCTS = ("qkv", "gate_up")
_NAMED = UsedBy(
    {"model.remat": ("named",)},
    "{key}={value} is not used with {cause}. Set model.remat=named, or leave it out.",
)


@dataclasses.dataclass(frozen=True)
class RematNamesConfig:
    """Activations of each layer that the backward pass finds stored, by name: qkv, attention,
    gate_up, or product, which is the result of every product with weights.
    """

    on_device: tuple[str, ...] = key(
        ("attention",),
        "activations kept in device memory: qkv, attention, gate_up or product",
        used_by=_NAMED,
    )
    on_host: tuple[str, ...] = key(
        (),
        "activations kept in host memory and copied back for the backward pass, on TPUs and GPUs",
        used_by=_NAMED,
    )


def kept_problems(kept: RematNamesConfig) -> Iterator[str]:
    """Names of nothing, or of what is named twice."""
    given = {"model.kept.on_device": kept.on_device, "model.kept.on_host": kept.on_host}
    for place, names in given.items():
        for name in names:
            if name not in NAMES:
                yield (
                    f"{place}: nothing in a layer is called {name!r}. Set it to names among "
                    f"{choices(NAMES)}."
                )
    everything = [*kept.on_device, *kept.on_host]
    for name in NAMES:
        if everything.count(name) > 1:
            yield (
                f"model.kept: {name} is named twice, and stored once. "
                "Set model.kept.on_device or model.kept.on_host without it."
            )
    if "product" in everything:
        for name in PRODUCTS:
            if name in everything:
                yield (
                    f"model.kept: product has {name} among others, which would be stored twice. "
                    f"Set both without {name}."
                )
