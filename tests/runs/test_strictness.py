"""The world of tests is as strict as conftest.py says, and the parts that tests rely on cannot be
switched off unnoticed."""

import os
import warnings

import jax
import jax.numpy as jnp
import jaxtyping
import pytest

from maxtrain.ops.norm import rms_norm


@pytest.mark.skipif(
    os.environ["JAX_PLATFORMS"] != "cpu", reason="real devices are as many as there are"
)
def test_there_are_eight_devices():
    assert jax.device_count() == 8


def test_dtypes_are_not_promoted_silently():
    with pytest.raises(ValueError, match="no available implicit dtype promotion path"):
        jnp.ones(2, jnp.bfloat16) + jnp.ones(2, jnp.float32)


def test_warnings_are_errors():
    with pytest.raises(UserWarning, match="look here"):
        warnings.warn("look here", stacklevel=1)


def test_shapes_in_signatures_are_checked():
    assert rms_norm(jnp.ones((2, 8)), jnp.ones(8), 1e-6).shape == (2, 8)
    with pytest.raises(jaxtyping.TypeCheckError, match="parameter 'scale'"):
        rms_norm(jnp.ones((2, 8)), jnp.ones(4), 1e-6)


def test_types_in_signatures_are_checked_and_an_int_is_a_float():
    assert rms_norm(jnp.ones((2, 8)), jnp.ones(8), 1).shape == (2, 8)
    with pytest.raises(jaxtyping.TypeCheckError, match="parameter 'eps'"):
        rms_norm(jnp.ones((2, 8)), jnp.ones(8), "1e-6")  # pyright: ignore[reportArgumentType]
