"""Runs behind a URL: killed anywhere, they go on bit for bit from an empty disk."""

import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
import yaml

from benchmarks.faulty_s3 import RequestFault, flipped, names_below
from data_pipeline.base.remote import RemotePath
from maxtrain import failpoints
from maxtrain.checkpoint.listing import saved_digests
from maxtrain.commands import checkpoint, compare, generate, replay, status
from maxtrain.commands.export import command as export
from maxtrain.commands.merge import command as merge
from maxtrain.observe.metrics import read_metrics
from maxtrain.storage.reading import readable
from tests.support.url_runs import (
    ROOT,
    STEPS,
    assert_same,
    in_a_process,
    numbers,
    on_two_hosts,
    options,
    steps_at,
    train,
    undisturbed,  # noqa: F401 (the fixture `folder`)
    url_of,
)

pytestmark = pytest.mark.usefixtures("this_process")


@pytest.mark.long
def test_a_run_at_a_url_goes_on_from_an_empty_disk_as_if_on_a_disk(folder, store, capsys):
    assert train(folder, "plain", "steps=6", disk="disk", bucket=store.url) == 0
    shutil.rmtree(folder / "disk")
    assert train(folder, "plain", disk="disk", bucket=store.url) == 0
    assert "Goes on from step 6" in capsys.readouterr().out
    assert_same(folder, "plain", store.url)
    names = names_below(RemotePath(url_of("plain", store.url)))
    assert {"run.json", "config.yaml", "metrics.jsonl", "launches.jsonl", "clock.jsonl"} <= {*names}
    assert any(name.startswith("tensorboard/") for name in names)
    assert steps_at("plain", store.url) == [6, 9]
    # On this host the newest step is whole, and of others there are small files.
    here = folder / "disk" / store.url[:2] / "faulty" / "runs" / "plain" / "checkpoints"
    assert (here / "00000009" / "arrays").exists() and not (here / "00000006" / "arrays").exists()


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.usefixtures("gs_server")
def test_killed_in_an_upload_to_gs_it_goes_on_from_an_empty_disk_bit_for_bit(folder, capsys):
    gs = "gs://bucket"
    assert train(folder, "google", "steps=3", disk="google", bucket=gs) == 0
    code, said = in_a_process(folder, "google", "google", "during_upload:kill:6", bucket=gs)
    assert code == -signal.SIGKILL, said
    shutil.rmtree(folder / "google")
    assert train(folder, "google", disk="google", bucket=gs) == 0
    assert "Goes on from step 3" in capsys.readouterr().out
    assert_same(folder, "google", gs)


@pytest.mark.slow
def test_a_run_begins_with_the_weights_of_one_at_a_url_and_learns_from_it(
    folder, s3, capsys, tmp_path
):
    """The result is that of the same run on a disk, bit for bit."""
    assert train(folder, "begun", disk="disk") == 0
    url = url_of("begun")
    whole = folder / "runs" / "whole"
    capsys.readouterr()
    for name, place in (("from-disk", whole), ("from-url", url)):
        assert train(folder, name, "steps=2", f"checkpoint.init_from={place}") == 0
    assert f"weights of {url}/checkpoints/00000009" in capsys.readouterr().out
    assert numbers(folder / "runs" / "from-url") == numbers(folder / "runs" / "from-disk")
    for name, place in (("from-disk", whole), ("from-url", url)):
        words = [f"checkpoint.init_from={place}/checkpoints/00000006", "objective=distill"]
        assert train(folder, f"six-{name}", "steps=2", *words, f"distill.teacher={place}") == 0
    assert numbers(folder / "runs" / "six-from-url") == numbers(folder / "runs" / "six-from-disk")
    assert train(folder, "nothing", "checkpoint.init_from=s3://faulty/runs/nobody") != 0
    assert "s3://faulty/runs/nobody: nothing is there" in capsys.readouterr().err
    made = []
    for name, places in (("disk", [whole, f"{whole}@6"]), ("url", [url, f"{url}@6"])):
        models = [{"model": str(place), "parameters": {"weight": 0.5}} for place in places]
        recipe = tmp_path / f"{name}.yml"
        recipe.write_text(yaml.safe_dump({"merge_method": "linear", "models": models}))
        assert merge.main([str(recipe), str(tmp_path / name)]) == 0, capsys.readouterr().err
        made.append((tmp_path / name / "model.safetensors").read_bytes())
    assert made[0] == made[1]
    assert merge.main([str(recipe), "s3://faulty/merged"]) == 64
    assert "OUT=s3:/faulty/merged: is a URL" in capsys.readouterr().err


@pytest.mark.slow
def test_all_commands_read_a_run_at_a_url(folder, s3, capsys, tmp_path):
    assert train(folder, "read", disk="disk") == 0
    capsys.readouterr()
    url = url_of("read")
    assert train(folder, "read", disk="elsewhere") == 0
    assert f"Nothing to do: {url} has all 9 steps" in capsys.readouterr().out
    assert status.main([url], "status") == 0
    assert f"{url}: step 9 on record, step 9 saved" in capsys.readouterr().out
    assert compare.main([url, str(folder / "runs" / "whole")]) == 0
    assert "The same bit for bit" in capsys.readouterr().out
    assert replay.main([url, "--steps", "6:9"]) == 0
    assert "all the same bit for bit" in capsys.readouterr().out
    assert checkpoint.main(["verify", url]) == 0
    assert checkpoint.main(["list", url]) == 0
    assert "2 whole of 2" in capsys.readouterr().out
    assert checkpoint.main(["copy", url, str(tmp_path / "copy"), "--step", "6"]) == 0
    assert checkpoint.main(["verify", str(tmp_path / "copy")]) == 0
    capsys.readouterr()
    texts = []
    for run in (url, str(folder / "runs" / "whole")):
        assert generate.main([run, "--prompt", "the", "--max-tokens", "8"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert export.main([url, str(tmp_path / "hf")]) == 0
    assert (tmp_path / "hf" / "model.safetensors").exists()
    assert export.main([str(folder / "runs" / "whole"), "s3://faulty/hf"]) == 64
    assert "OUT=s3:/faulty/hf: is a URL" in capsys.readouterr().err
    assert checkpoint.main(["prune", url, "--keep", "1", "--apply"]) == 0
    assert steps_at("read") == [9]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("place", "left"),
    [
        pytest.param("during_upload:kill:6", [3], marks=pytest.mark.long),
        pytest.param("before_upload_counts:kill:6", [3], marks=pytest.mark.slow),
        pytest.param("after_upload:kill:6", [3, 6], marks=pytest.mark.slow),
        pytest.param("during_removal:kill:3", [6, 9], marks=pytest.mark.slow),
        # Whether step 6 is there by then is a matter of time.
        pytest.param("before_step:kill:8", None, marks=pytest.mark.slow),
        pytest.param("during_upload:kill:3", [], marks=pytest.mark.slow),
    ],
)
def test_killed_in_an_upload_it_goes_on_from_an_empty_disk_bit_for_bit(folder, s3, place, left):
    run = f"killed-{place.replace(':', '-')}"
    code, said = in_a_process(folder, run, "first", place)
    assert code == -signal.SIGKILL, said
    there = steps_at(run)
    assert there == left or (left is None and there in ([3], [3, 6]))
    shutil.rmtree(folder / "first")
    code, said = in_a_process(folder, run, "second")
    assert code == 0, said
    if there:
        assert f"Goes on from step {there[-1]}" in said
    assert_same(folder, run)
    assert steps_at(run) == [6, 9]


@pytest.mark.slow
def test_damage_at_the_url_is_put_aside_there_and_damage_here_is_fetched_again(
    folder, store, capsys
):
    assert train(folder, "damaged", "steps=6", disk="one", bucket=store.url) == 0
    home = RemotePath(url_of("damaged", store.url)) / "checkpoints"
    here = (
        folder / "one" / store.url[:2] / "faulty" / "runs" / "damaged" / "checkpoints" / "00000006"
    )
    (name, *_) = here.glob("arrays/params.*kernel/[0-9]*")
    name.write_bytes(flipped(name.read_bytes()))
    capsys.readouterr()
    assert train(folder, "damaged", "steps=7", disk="one", bucket=store.url) == 0
    said = capsys.readouterr()
    assert "are fetched again" in said.err and "Goes on from step 6" in said.out
    assert train(folder, "damaged", "steps=6", disk="one", bucket=store.url) == 0
    bad = home / "00000007" / name.relative_to(here).as_posix()
    bad.write_bytes(flipped(bad.read_bytes()))
    shutil.rmtree(folder / "one")
    assert train(folder, "damaged", disk="two", bucket=store.url) == 0
    said = capsys.readouterr()
    assert f"At {store.url}/runs/damaged/checkpoints/00000007 it is put aside" in said.err
    assert "Goes on from step 6" in said.out
    assert_same(folder, "damaged", store.url)
    aside = [name for name in names_below(home) if ".damaged-" in name]
    assert any(name.endswith("/commit.json") for name in aside)


@pytest.mark.slow
def test_a_store_that_refuses_ends_the_run_and_the_same_command_goes_on(
    folder, store, capsys, monkeypatch
):
    monkeypatch.setattr("data_pipeline.base.remote._PAUSE", 0.01)
    place = r"PUT /faulty/runs/refused/checkpoints/00000006/.*"
    store.faults.append(RequestFault(place, status=403, code="AccessDenied"))
    assert train(folder, "refused", disk="three", bucket=store.url) == 74
    assert "writing is not allowed" in capsys.readouterr().err
    store.faults.clear()
    assert steps_at("refused", store.url) == [3]
    assert train(folder, "refused", disk="four", bucket=store.url) == 0
    assert_same(folder, "refused", store.url)


@pytest.mark.slow
def test_frozen_parameters_are_saved_once_and_fetched_from_the_url(folder, s3, capsys):
    words = ["train.freeze=[embedding]"]
    assert train(folder, "frozen", *words) == 0
    assert train(folder, "frozen", *words, "steps=6", disk="six") == 0
    assert train(folder, "frozen", *words, disk="seven") == 0
    assert "Goes on from step 6" in capsys.readouterr().out
    names = names_below(RemotePath(url_of("frozen")) / "checkpoints" / "frozen")
    assert len([name for name in names if name.endswith("commit.json")]) == 1
    ours = readable(url_of("frozen"))
    theirs = folder / "runs" / "frozen"
    assert numbers(ours) == numbers(theirs)
    assert saved_digests(ours / "checkpoints") == saved_digests(theirs / "checkpoints")
    assert checkpoint.main(["verify", url_of("frozen")]) == 0


@pytest.mark.slow
def test_a_rollback_takes_back_what_is_at_the_url(folder, s3, monkeypatch, capsys):
    """The anomaly comes before step 6 is made; the run goes back to step 3."""
    monkeypatch.setenv(failpoints.VARIABLE, "data:nan:5")
    words = ["anomaly.non_finite=rollback"]
    for disk in (None, "five"):
        assert train(folder, "back", *words, disk=disk) == 0
    assert (RemotePath(url_of("back")) / "rollbacks.json").exists()
    ours = readable(url_of("back"))
    assert numbers(ours) == numbers(folder / "runs" / "back")


@pytest.mark.slow
@pytest.mark.processes
def test_a_supervisor_restarts_a_run_at_a_url(folder, s3):
    """The lock of the process that was killed is not waited for."""
    train_words = [sys.executable, "-m", "maxtrain.train", *options(folder, "kept", disk="nine")]
    command = [sys.executable, "-m", "maxtrain.cli", "supervise", "--backoff", "0"]
    environment = os.environ | {failpoints.VARIABLE: "after_upload:kill:6:1"}
    done = subprocess.run(
        [*command, "--", *train_words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0 and "ended with SIGKILL" in said, said
    assert "Goes on from step 6" in said and "heartbeat" not in said
    assert_same(folder, "kept")


@pytest.mark.processes
@pytest.mark.parametrize(
    "lost",
    [
        # It has a kill in an upload as well.
        pytest.param(
            ("left", "right"), id="both", marks=[pytest.mark.long, pytest.mark.every_dose]
        ),
        pytest.param(("right",), id="one", marks=pytest.mark.slow),
    ],
)
def test_hosts_that_share_no_disk_go_on_from_empty_disks_bit_for_bit(folder, s3, lost):
    run = f"pair-{len(lost)}"
    codes, said = on_two_hosts(folder, run, ())
    assert codes == [0, 0], said
    codes, said = on_two_hosts(folder, run, ("left", "right"), "during_upload:kill:6::1")
    assert codes[1] == -signal.SIGKILL and codes[0] != 0, said
    assert steps_at(run) == [3]
    for disk in lost:
        shutil.rmtree(folder / disk)
    codes, said = on_two_hosts(folder, run, ("left", "right"))
    assert codes == [0, 0] and said.count("Goes on from step 3") == 1, said
    ours = readable(url_of(run))
    shared = folder / "runs" / run
    assert numbers(ours) == numbers(shared) and steps_at(run) == [6, 9]
    digests = saved_digests(ours / "checkpoints")
    assert digests == saved_digests(shared / "checkpoints")
    # No host has all of a step, and one process reads what two have written.
    right = folder / "right" / "s3" / "faulty" / "runs" / f"{run}.process-1" / "checkpoints"
    assert (right / "00000009" / "commit.json").exists()
    assert checkpoint.main(["verify", url_of(run)]) == 0
    assert generate.main([url_of(run), "--prompt", "the", "--max-tokens", "4"]) == 0


@pytest.mark.slow
@pytest.mark.processes
def test_another_number_of_processes_goes_on_from_a_bucket(folder, s3, capsys):
    """Two hosts have saved a part each, and one reads all."""
    run = "fewer"
    codes, said = on_two_hosts(folder, run, ("first", "second"), overrides=["steps=6"])
    assert codes == [0, 0] and steps_at(run) == [3, 6], said
    for disk in ("first", "second"):
        shutil.rmtree(folder / disk)
    capsys.readouterr()
    assert train(folder, run, disk="alone") == 0
    assert "Goes on from step 6" in capsys.readouterr().out and steps_at(run) == [6, 9]
    ours = read_metrics(readable(url_of(run)))
    whole = read_metrics(folder / "runs" / "whole")
    assert [record["step"] for record in ours] == [record["step"] for record in whole]
    losses = [record["loss"] for record in whole]
    assert [record["loss"] for record in ours] == pytest.approx(losses, rel=1e-5)
    assert checkpoint.main(["verify", url_of(run)]) == 0


def between_uploads(folder, name="fast", every=4):
    """Overrides of a run that saves each step, and uploads few."""
    return [
        "checkpoint_interval=1",
        f"checkpoint.local={folder / name}",
        f"checkpoint.upload_every={every}",
    ]


@pytest.mark.long
@pytest.mark.processes
def test_killed_between_uploads_it_goes_on_from_the_disk_of_its_host(folder, s3, capsys):
    words = between_uploads(folder)
    code, said = in_a_process(folder, "fast", "ten", "before_commit:kill:7", words)
    assert code == -signal.SIGKILL and steps_at("fast") == [4], said
    assert not any("0000006" in name for name in names_below(RemotePath(url_of("fast"))))
    assert train(folder, "fast", *words, disk="ten") == 0
    assert f"Goes on from step 6 in {folder / 'fast'}" in capsys.readouterr().out
    assert_same(folder, "fast")
    # 5 and 6 stayed there; of 7 and 8, the second is the fourth in a row. The end is uploaded.
    assert steps_at("fast") == [8, 9]
    assert not list((folder / "fast").rglob("commit.json"))


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("place", "begun_at"),
    [
        ("during_save:kill:6", 5),
        ("before_commit:kill:6", 5),
        ("after_commit:kill:6", 6),
        ("during_upload:kill:4", 3),
        ("before_upload_counts:kill:4", 3),
        ("after_upload:kill:4", 4),
        ("during_save:kill:1", None),
        ("after_commit:kill:1", 1),
    ],
)
def test_killed_anywhere_it_goes_on_from_the_newest_step_bit_for_bit(folder, s3, place, begun_at):
    run = f"between-{place.replace(':', '-')}"
    words = between_uploads(folder)
    code, said = in_a_process(folder, run, "eleven", place, words)
    assert code == -signal.SIGKILL, said
    code, said = in_a_process(folder, run, "eleven", "", words)
    assert code == 0, said
    if begun_at is not None:
        assert f"Goes on from step {begun_at} " in said
    assert_same(folder, run)


@pytest.mark.slow
@pytest.mark.processes
def test_without_its_disk_or_with_damage_there_it_goes_on_from_what_is_whole(folder, s3, capsys):
    for what, begun_at in (("lost", 4), ("damaged", 6), ("left", 5)):
        words = between_uploads(folder, what)
        code, said = in_a_process(folder, what, "twelve", "before_commit:kill:8", words)
        assert code == -signal.SIGKILL and steps_at(what) == [4], said
        capsys.readouterr()
        place = folder / what / "s3" / "faulty" / "runs" / what
        if what == "lost":
            shutil.rmtree(folder / what)
        if what == "damaged":
            (file, *_) = place.glob("0/00000007/arrays/params.*kernel/[0-9]*")
            file.write_bytes(flipped(file.read_bytes()))
        if what == "left":
            # The run goes on without this host, which is there again later.
            place.rename(place.with_name("away"))
            code, said = in_a_process(folder, what, "twelve", "before_commit:kill:6", words)
            assert "Goes on from step 4 in" in said and code == -signal.SIGKILL
            shutil.move(place.with_name("away") / "0" / "00000007", place / "0")
        assert train(folder, what, *words, disk="twelve") == 0
        told = capsys.readouterr()
        assert f"Goes on from step {begun_at} in" in told.out
        assert ("00000007 is damaged" in told.err) == (what == "damaged")
        assert ("the run has gone on without it" in told.out) == (what == "left")
        assert_same(folder, what)


@pytest.mark.slow
@pytest.mark.processes
def test_a_run_that_is_to_have_no_more_steps_than_its_disk_has_uploads_them(folder, s3, capsys):
    words = between_uploads(folder, "fewer")
    code, said = in_a_process(folder, "fewer", "fourteen", "before_commit:kill:7", words)
    assert code == -signal.SIGKILL and steps_at("fewer") == [4], said
    capsys.readouterr()
    assert train(folder, "fewer", *words, "steps=5", disk="fourteen") == 0
    assert "has 6 steps, more than the 5" in capsys.readouterr().out
    assert steps_at("fewer") == [4, 6] and not list((folder / "fewer").rglob("commit.json"))
    assert train(folder, "fewer", *words, disk="fifteen") == 0
    assert_same(folder, "fewer")


@pytest.mark.slow
def test_a_stop_is_uploaded_and_a_rollback_goes_back_to_a_disk(folder, s3, monkeypatch, capsys):
    words = between_uploads(folder, "stopped")
    monkeypatch.setenv(failpoints.VARIABLE, "before_step:term:6")
    assert train(folder, "stopped", *words, disk="thirteen") == 75
    assert steps_at("stopped") == [4, 6]
    monkeypatch.setenv(failpoints.VARIABLE, "data:nan:8")
    back = ["anomaly.non_finite=rollback", "anomaly.leave_out=1"]
    assert train(folder, "stopped", *words, *back, disk="thirteen") == 0
    said = capsys.readouterr().out
    assert "goes back to step 7" in said and f"Goes on from step 7 in {folder / 'stopped'}" in said
    assert train(folder, "rolled", *back, "checkpoint_interval=1") == 0
    ours = readable(url_of("stopped"))
    assert numbers(ours) == numbers(folder / "runs" / "rolled")


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("mesh", [("mesh.data=1",), ("mesh.data=2", "mesh.fsdp=4")])
@pytest.mark.parametrize("lost", ["none", "first", "second", "swapped"])
def test_hosts_go_on_from_what_their_disks_have_together(folder, s3, mesh, lost):
    """With parameters split over both hosts, each has a half; with a copy on each, both have all,
    and one may be lost."""
    run = f"together-{len(mesh)}-{lost}"
    shared = f"together-{len(mesh)}"
    if not (folder / "runs" / shared).exists():
        codes, said = on_two_hosts(folder, shared, (), overrides=mesh)
        assert codes == [0, 0], said
    words = [*between_uploads(folder, f"{run}-{{index}}"), *mesh]
    # Whether step 7 is whole by then is a matter of time.
    codes, said = on_two_hosts(folder, run, ("left", "right"), "before_step:kill:8", words)
    assert codes == [-signal.SIGKILL] * 2 and steps_at(run) == [4], said
    places = [folder / f"{run}-{index}" for index in range(2)]
    begun_at = "[67]"
    if lost in ("first", "second"):
        shutil.rmtree(places[lost == "second"])
        if len(mesh) == 1:
            begun_at = "4"
    if lost == "swapped":
        places[0].rename(folder / "aside")
        places[1].rename(places[0])
        (folder / "aside").rename(places[1])
    codes, said = on_two_hosts(folder, run, ("left", "right"), "", words)
    assert codes == [0, 0], said
    assert len(re.findall(rf"Goes on from step {begun_at} in", said)) == 1, said
    if begun_at == "4":
        assert re.search(r"Step 6 in checkpoint.local is passed over: \d+ of its", said), said
    ours = readable(url_of(run))
    assert numbers(ours) == numbers(folder / "runs" / shared)
    digests = saved_digests(ours / "checkpoints")
    assert digests[STEPS] == saved_digests(folder / "runs" / shared / "checkpoints")[STEPS]
    assert not [path for place in places for path in place.rglob("commit.json")]
