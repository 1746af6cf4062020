"""What tests of several rooms are made of: words of made-up texts, a model that trains in a moment,
and the small models of other families in tests/data/parity."""

WORDS = "the of and to in is that it was for on are as with his they".split()
TINY_MODEL = {
    "num_layers": 1,
    "embed_dim": 16,
    "mlp_dim": 32,
    "num_heads": 2,
    "num_kv_heads": 2,
    "max_length": 32,
}
# Of Llama and Qwen 3, the first families.
FIRST_PARITY_CASES = ("llama3", "llama_tied_mha", "qwen3")
MORE_PARITY_CASES = (
    "mistral",
    "qwen2",
    "olmo2",
    "gemma2",
    "gemma3",
    "mixtral",
    "qwen3_moe",
    "qwen3_moe_unnormalised",
    "deepseek_v3",
    "gpt_oss",
)
PARITY_CASES = FIRST_PARITY_CASES + MORE_PARITY_CASES
