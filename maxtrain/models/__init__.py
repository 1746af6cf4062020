"""Language models as Flax NNX modules. A family is block choices plus its Hugging Face names; the
decoder is shared."""
