"""The small model and its batches, for tests of training."""

from tests.support.tiny import optax_dtypes, tiny

__all__ = ["optax_dtypes", "tiny"]
