"""Llama 2, 3, 3.1, 3.2 and whatever shares their blocks. Source: https://arxiv.org/abs/2407.21783."""

from maxtrain.models.families.family import Family
from maxtrain.models.layers import BlockChoices

LLAMA = Family(architecture="LlamaForCausalLM", block=BlockChoices())
