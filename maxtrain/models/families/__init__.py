"""One file for each model family: its layers, and its names for configuration and weights at
Hugging Face. No jax here."""

from maxtrain.config.schema import ModelConfig
from maxtrain.models.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from maxtrain.models.families.family import Family
from maxtrain.models.families.gemma import GEMMA2, GEMMA3
from maxtrain.models.families.gpt2 import GPT2
from maxtrain.models.families.gpt_oss import GPT_OSS
from maxtrain.models.families.llama import LLAMA, MISTRAL, MIXTRAL
from maxtrain.models.families.olmo import OLMO2
from maxtrain.models.families.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE

FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "mixtral": MIXTRAL,
    "qwen2": QWEN2,
    "qwen2_moe": QWEN2_MOE,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "olmo2": OLMO2,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v3": DEEPSEEK_V3,
    "gpt_oss": GPT_OSS,
    "gpt2": GPT2,
}
# Presets of all families, by the names of released models.
PRESETS: dict[str, ModelConfig] = {}
for _family in FAMILIES.values():
    assert not PRESETS.keys() & _family.presets.keys()
    PRESETS |= _family.presets
