"""libtpu on a machine without a TPU, where it compiles for TPUs elsewhere. No jax here."""

import os

# It looks for the TPU of this machine, and complains: any answer will do.
_ANSWERS = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
# Warnings of its compiler are read (`topologies.compiler_warnings`): they come at these levels.
_WARNINGS = {"TPU_MIN_LOG_LEVEL": "1", "TPU_STDERR_LOG_LEVEL": "1"}


def answer_libtpu() -> None:
    """Set the variables that libtpu would otherwise look for and complain about; before jax has
    started, and only if no TPU of this machine is to be used. Existing values stay, except those
    that would hide warnings.
    """
    for name, value in _ANSWERS.items():
        os.environ.setdefault(name, value)
    os.environ.update(_WARNINGS)
