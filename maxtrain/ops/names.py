"""What results are called, so that a policy can say which of them the backward pass finds stored
(models/remat.py). A name changes no number."""

from jax.ad_checkpoint import checkpoint_name

# Of every product with weights.
PRODUCT = "product"
# Of the products that make queries, keys and values.
QKV = "qkv"
# Of the kernel of attention: the mean of values, and what its backward pass needs beside it.
ATTENTION = "attention"
# Of the products that make the hidden units of a feed-forward block.
GATE_UP = "gate_up"

named = checkpoint_name
