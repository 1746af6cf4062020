"""One file per model family: its block choices, its Hugging Face names and how its configuration
reads. No jax here."""

from maxtrain.models.families.family import Family
from maxtrain.models.families.llama import LLAMA
from maxtrain.models.families.qwen import QWEN3

FAMILIES: dict[str, Family] = {"llama": LLAMA, "qwen3": QWEN3}
