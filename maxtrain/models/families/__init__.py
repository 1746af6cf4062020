"""One file for each model family: its layers, and how its configuration and its weights are named
at Hugging Face. No jax here."""

from maxtrain.models.families.family import Family
from maxtrain.models.families.llama import LLAMA
from maxtrain.models.families.qwen import QWEN3

FAMILIES: dict[str, Family] = {"llama": LLAMA, "qwen3": QWEN3}
