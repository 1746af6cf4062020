"""maxtrain: a JAX/Flax training stack for language models on CPUs, GPUs and TPU pods."""

__version__ = "0.1.0"
