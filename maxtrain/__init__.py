"""maxtrain: a JAX/Flax training stack for language models on CPUs, GPUs and TPU pods."""

__version__ = "0.1.0"
ATTEMPT = "MAXTRAIN_ATTEMPT"  # in the environment of a run that is supervised: which attempt this is, from 1
SLOT = "MAXTRAIN_SLOT"  # and which of the processes that were asked for, from 0, even if others are lost by now
