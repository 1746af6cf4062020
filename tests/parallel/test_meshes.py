"""Steps on every mesh of eight devices are those of one device."""

import pytest

from benchmarks.meshes import CASES, TOLERANCE, apart


@pytest.mark.slow
@pytest.mark.usefixtures("optax_dtypes")
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_ten_steps_and_all_gradients_are_those_of_one_device(case):
    found = apart(case)
    assert found.losses <= TOLERANCE
    assert found.norms <= TOLERANCE
    assert found.gradients <= TOLERANCE
