"""Experts are busy alike with each kind of balance, and are not without one."""

import pytest

from benchmarks.experts import KINDS, train

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("optax_dtypes")]


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_of_balance_keeps_experts_busy(name):
    run = train(KINDS[name], steps=300)
    most = run.max_load[-50:].mean()
    assert run.loss[-50:].mean() < 0.5 * run.loss[0]
    if name.startswith("nothing"):
        assert most > 2
    else:
        assert most < 1.3
        assert run.entropy[-50:].mean() > 0.98
