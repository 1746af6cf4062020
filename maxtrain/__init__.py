"""maxtrain: a JAX/Flax training stack for language models on CPUs, GPUs and TPU pods."""

__version__ = "0.2.0"
# Environment variables of a supervised run: the number of the attempt, from 1; and the number of
# this process among those that were requested, from 0, even if others are lost by now.
ATTEMPT = "MAXTRAIN_ATTEMPT"
SLOT = "MAXTRAIN_SLOT"
# Environment variable of a process of a job: the folder in which it leaves its exit code, in a file
# of its own, and in which process 0 writes the last completed training step.
ENDS = "MAXTRAIN_ENDS"
