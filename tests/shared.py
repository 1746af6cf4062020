"""What tests of several rooms are made of: words of made-up texts, and a model that trains in a
moment."""

WORDS = "the of and to in is that it was for on are as with his they".split()
TINY_MODEL = {
    "num_layers": 1,
    "embed_dim": 16,
    "mlp_dim": 32,
    "num_heads": 2,
    "num_kv_heads": 2,
    "max_length": 32,
}
