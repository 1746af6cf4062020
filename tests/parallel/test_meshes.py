"""Steps on every mesh of eight devices are those of one device."""

import functools

import pytest

from benchmarks.meshes import CASES, SEVERAL, TOLERANCE, MeshResult, apart, computed, on_processes

SHARED = [case for case in CASES if case.is_shared]
# The one that has most at once runs with every change, the others by -m slow.
OFTEN = "stage2-fsdp2-tensor2-accumulation2"


def by_name(case):
    marks = [pytest.mark.slow]
    if case.name == OFTEN:
        marks = [pytest.mark.long, pytest.mark.every_dose]
    return pytest.param(case, id=case.name, marks=marks)


def assert_close(found):
    assert found.losses <= TOLERANCE
    assert found.norms <= TOLERANCE
    assert found.gradients <= TOLERANCE


@pytest.mark.usefixtures("optax_dtypes")
@pytest.mark.parametrize("case", [by_name(case) for case in CASES])
def test_ten_steps_and_all_gradients_are_those_of_one_device(case):
    assert_close(apart(case, computed(case)))


@functools.cache
def found_by(count: int) -> dict[str, MeshResult]:
    """Return the findings of several processes for each mesh that they share."""
    found = on_processes(SHARED, count)
    return {case.name: of_case for case, of_case in zip(SHARED, found, strict=True)}


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.usefixtures("optax_dtypes")
@pytest.mark.parametrize("case", SHARED, ids=[case.name for case in SHARED])
@pytest.mark.parametrize("count", SEVERAL)
def test_they_are_too_where_several_processes_share_the_devices(case, count):
    assert_close(apart(case, found_by(count)[case.name]))
