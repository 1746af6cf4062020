"""Runs behind a URL meet faults that are not the store's: two launches, a hang, wrong arithmetic."""

import os
import platform
import re

import pytest

from benchmarks.faulty_s3 import names_below
from data_pipeline.base.remote import RemotePath
from maxtrain import failpoints
from maxtrain.checkpoint.listing import saved_digests
from maxtrain.storage.lease import Lease
from maxtrain.storage.reading import readable
from tests.support.url_runs import (
    assert_same,
    in_a_process,
    numbers,
    on_two_hosts,
    steps_at,
    train,
    undisturbed,  # noqa: F401 (the fixture `folder`)
    url_of,
)

pytestmark = pytest.mark.usefixtures("this_process")


@pytest.mark.long
@pytest.mark.processes
def test_a_second_launch_on_another_disk_is_refused_and_told_who_writes(folder, s3):
    url = RemotePath(url_of("taken"))
    lease = Lease(url, print)
    try:
        code, said = in_a_process(folder, "taken", "elsewhere")
        assert code == 74, said
        who = f"process {os.getpid()} on {platform.node()}"
        assert f"{url} is being written by {who}" in said
        assert "Wait for it or end it, or set run_name to another name." in said
        assert all(name.startswith("lock/") for name in names_below(url)), "nothing was written"
    finally:
        lease.free()
    assert train(folder, "taken", disk="elsewhere") == 0
    assert_same(folder, "taken")


@pytest.mark.long
def test_wrong_arithmetic_is_found_before_anything_of_it_is_uploaded(
    folder, s3, monkeypatch, capsys
):
    """A bit of one copy of the parameters changes after step 4; that is looked for at step 5."""
    words = ["mesh.data=8", "mesh.fsdp=1", "integrity.replicas_interval=5"]
    assert train(folder, "right", *words) == 0
    monkeypatch.setenv(failpoints.VARIABLE, "after_step:bitflip:4")
    assert train(folder, "flipped", *words, disk="flipped") == 75
    assert "copies of arrays differ between devices after step 5" in capsys.readouterr().err
    assert steps_at("flipped") == [3]
    monkeypatch.delenv(failpoints.VARIABLE)
    failpoints._armed.clear()
    assert train(folder, "flipped", *words, disk="empty") == 0
    assert "Goes on from step 3" in capsys.readouterr().out
    ours = readable(url_of("flipped"))
    right = folder / "runs" / "right"
    assert numbers(ours) == numbers(right)
    assert saved_digests(ours / "checkpoints") == saved_digests(right / "checkpoints")


@pytest.mark.processes
@pytest.mark.parametrize(
    "hung",
    [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.long)],
)
def test_if_a_host_hangs_all_end_with_its_name_and_go_on_from_the_last_upload(folder, s3, hung):
    run = f"hung-{hung}"
    codes, said = on_two_hosts(folder, run, ())
    assert codes == [0, 0], said
    limits = ["watchdog.step_seconds=8", "watchdog.factor=1", "watchdog.compile_seconds=120"]
    disks = (f"{run}-left", f"{run}-right")
    codes, said = on_two_hosts(folder, run, disks, f"before_step:hang:6::{hung}", limits)
    assert codes == [75, 75], said
    assert re.search(rf"process {hung} .*is alive; it was after 5 steps", said), said
    assert steps_at(run) == [3]
    codes, said = on_two_hosts(folder, run, disks)
    assert codes == [0, 0] and said.count("Goes on from step 3") == 1, said
    ours = readable(url_of(run))
    shared = folder / "runs" / run
    assert numbers(ours) == numbers(shared)
    assert saved_digests(ours / "checkpoints") == saved_digests(shared / "checkpoints")
