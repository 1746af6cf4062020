"""The dtypes of updates, for tests of steps on meshes."""

from tests.support.tiny import optax_dtypes

__all__ = ["optax_dtypes"]
