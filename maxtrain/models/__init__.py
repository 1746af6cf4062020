"""Language models as Flax NNX modules. A family is a choice of blocks plus its Hugging Face names;
the decoder is shared."""
