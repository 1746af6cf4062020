"""Qwen 3, dense: Llama with RMSNorm on query and key heads. Source: https://arxiv.org/abs/2505.09388."""

from maxtrain.models.families.family import Family
from maxtrain.models.layers import BlockChoices

QWEN3 = Family(architecture="Qwen3ForCausalLM", block=BlockChoices(qk_norm=True))
