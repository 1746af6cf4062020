"""The trial at the start finds what a program can do."""

import pytest

from maxtrain.rl.rewards.sandbox import confinement, probe


@pytest.mark.long
def test_it_finds_that_programs_without_isolation_get_out():
    worked = set(probe.attack(confinement.NOTHING))
    names = {"write_outside", "change_outside", "read_secret", "connect_path", "connect_tcp"}
    assert names | {"start_process", "send_signal"} <= worked


@pytest.mark.long
@pytest.mark.every_dose
def test_it_finds_confinement_here():
    found = probe.find_confinement()
    assert found.kind in (confinement.NAMESPACES, confinement.LANDLOCK), found.why_not
