"""Sums of small numbers are learnt from rewards alone, after a start that only knows the form; and
not where advantages are those of other completions.

Each run is a process of its own with one device: eight simulated ones would take minutes.
"""

import pytest

from benchmarks.additions import __main__ as table
from benchmarks.additions import run

pytestmark = pytest.mark.processes


@pytest.mark.long
def test_sums_are_learnt_from_rewards():
    found = table.run(steps=130, seed=0, variant="plain")
    assert table.problems("plain", found) == []
    assert found["sampler_gap"] < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("variant", run.VARIANTS)
def test_every_variant_learns_what_it_should(variant):
    found = table.run(table.STEPS, seed=1, variant=variant)
    assert table.problems(variant, found) == []


def test_a_run_that_learns_too_little_fails():
    found = {"before": 0.2, "after": 0.8, "right": 0.5, "form": 0.9}
    assert table.problems("plain", found) == [
        "a gain of 0.60, not 0.7",
        "50% right, not 60%",
        "90% with the form, not 95%",
    ]
    assert table.problems(run.SHUFFLED, found) == ["a gain of 0.60, where nothing can be learnt"]
