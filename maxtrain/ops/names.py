"""Checkpoint names of results, so that a rematerialisation policy can choose which of them are
stored for the backward pass (models/remat.py). A name does not change any number."""

from jax.ad_checkpoint import checkpoint_name

# Every product with weights.
PRODUCT = "product"
# The products for queries, keys and values.
QKV = "qkv"
# The results of an attention kernel: its output, and what its backward pass needs beside it.
ATTENTION = "attention"
# The products for the hidden units of a feed-forward block.
GATE_UP = "gate_up"

named = checkpoint_name
