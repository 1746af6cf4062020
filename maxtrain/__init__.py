"""maxtrain: a JAX/Flax training stack for language models on CPUs, GPUs and TPU pods."""

__version__ = "0.2.0"
# In the environment of a run that is supervised: which attempt this is, from 1; and which of the
# processes that were asked for, from 0, even if others are lost by now.
ATTEMPT = "MAXTRAIN_ATTEMPT"
SLOT = "MAXTRAIN_SLOT"
# In the environment of a process of a job: a folder in which it leaves its exit code, in a file of
# its own, and in which process 0 writes the last completed training step.
ENDS = "MAXTRAIN_ENDS"
