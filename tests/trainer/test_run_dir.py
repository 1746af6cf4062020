"""A run's folder is one thing: what is foreign, torn or gone is found, named, and costs nothing."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from data_pipeline.base.errors import UsageError
from data_pipeline.prepare import command as prepare
from maxtrain.checkpoint.listing import saved_digests, saved_steps
from maxtrain.checkpoint.rollback import write_rollbacks
from maxtrain.commands import generate, status
from maxtrain.config import load_config
from maxtrain.observe.metrics import read_metrics
from maxtrain.observe.trackers.mlflow import Mlflow
from maxtrain.trainer.loop import main
from maxtrain.trainer.run_dir import RunFolder, config_owner

pytestmark = pytest.mark.usefixtures("this_process")
STEP = {"step": 5, "kind": "loss_spike", "left_out": [4, 5]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_run) -> Path:
    """A config beside its data; `whole`, a run of 9 steps; `half`, the same up to step 6; and
    `other`, of another seed."""
    folder = tmp_path_factory.mktemp("folders")
    tiny_run(
        folder,
        "--holdout",
        "0.2",
        steps=9,
        checkpoint_interval=3,
        eval_interval=3,
        eval={"sets": {"heldout": {"path": str(folder / "data" / "eval")}}},
        schedule={"name": "constant", "warmup_steps": 1},
        mesh={"data": 1, "fsdp": 8},
        checkpoint={"keep": 3},
    )
    assert train(folder, "whole") == 0
    assert train(folder, "half", "steps=6") == 0
    assert train(folder, "other", "steps=6", "seed=1") == 0
    return folder


def train(folder, run_name, *overrides):
    return main(load_config([f"config={folder / 'tiny.yaml'}", f"run_name={run_name}", *overrides]))


@pytest.fixture
def run(folder, request) -> Path:
    """A copy of `half`, whose name is the test's."""
    name = re.sub(r"\W+", "-", request.node.name)
    shutil.copytree(folder / "runs" / "half", folder / "runs" / name)
    return folder / "runs" / name


def weights(run):
    return saved_digests(run / "checkpoints")[9]


def content(run):
    """Every file but those that any look at a run may touch."""
    return {
        path: path.read_bytes()
        for path in sorted(run.rglob("*"))
        if path.is_file() and path.name != "lock"
    }


def refused(folder, run, capsys, *overrides):
    """The error of a launch that is refused, with exit 74, and changes nothing."""
    before = content(run)
    capsys.readouterr()
    assert train(folder, run.name, *overrides) == 74
    assert content(run) == before
    return capsys.readouterr().err


def goes_on(folder, run, capsys, *overrides):
    """Launch a run that ends at the same weights as one that nobody disturbed. Returns its
    output."""
    capsys.readouterr()
    assert train(folder, run.name, *overrides) == 0
    assert weights(run) == weights(folder / "runs" / "whole")
    return capsys.readouterr().out


@pytest.mark.long
def test_a_first_launch_that_fails_leaves_nothing(folder, capsys):
    assert train(folder, "failed", "checkpoint.init_from=nowhere") != 0
    assert "nowhere" in capsys.readouterr().err
    assert not (folder / "runs" / "failed").exists()


@pytest.mark.long
def test_every_file_carries_the_id_of_its_run(folder):
    run = folder / "runs" / "whole"
    own = json.loads((run / "run.json").read_text())
    assert re.fullmatch(r"[0-9a-f]{16}", own["run"]) and own["saved"] == 9
    lines = [
        (run / name).read_text().splitlines()
        for name in ("metrics.jsonl", "clock.jsonl", "launches.jsonl")
    ]
    assert json.loads(lines[0][0]) == {"kind": "run", "step": 0, "run": own["run"]}
    assert all(json.loads(line)["run"] == own["run"] for line in (*lines[1], *lines[2]))
    assert {record["run"] for _, record in saved_steps(run / "checkpoints").values()} == {
        own["run"]
    }
    assert config_owner(run) == own["run"] == RunFolder(run).id
    assert own["run"] != RunFolder(folder / "runs" / "other").id


@pytest.mark.long
@pytest.mark.parametrize("how", ["of another run", "of no run"])
def test_rollbacks_of_elsewhere_are_refused(folder, run, capsys, how):
    """They would remove good steps."""
    if how == "of no run":
        (run / "rollbacks.json").write_text(json.dumps([STEP]))
    else:
        write_rollbacks(run, [STEP], RunFolder(folder / "runs" / "other").id)
    said = refused(folder, run, capsys)
    assert "holds files of several runs; nothing is changed" in said and "rollbacks.json" in said
    assert "Move away what is not of this run, or set run_name to another name" in said


@pytest.mark.long
def test_records_of_another_run_are_refused(folder, run, capsys):
    shutil.copyfile(folder / "runs" / "other" / "metrics.jsonl", run / "metrics.jsonl")
    assert "metrics.jsonl" in refused(folder, run, capsys)


@pytest.mark.long
def test_a_checkpoint_of_another_run_is_refused(folder, run, capsys):
    shutil.rmtree(run / "checkpoints" / "00000006")
    shutil.copytree(
        folder / "runs" / "other" / "checkpoints" / "00000006", run / "checkpoints" / "00000006"
    )
    said = refused(folder, run, capsys)
    assert (
        str(run / "checkpoints" / "00000006") in said
        and "Move away what is not of this run" in said
    )


BOOKS = ("clock.jsonl", "launches.jsonl", "attempts.jsonl")
ATTEMPT = {
    "attempt": 1,
    "start": 0,
    "reason": "",
    "from_step": 0,
    "reached_step": 0,
    "saved_step": 0,
    "lost_seconds": 0,
}


@pytest.mark.long
@pytest.mark.parametrize(
    "damage", [b'{"torn": ', b"[" * 100_000, b"\xff\x00", b"[]\n", b'{"run": "0000000000000000"}']
)
@pytest.mark.parametrize("name", BOOKS)
def test_a_book_that_can_not_be_read_is_put_aside(folder, run, capsys, name, damage):
    """No training for these: what a launch does first, and what people look at."""
    path = run / name
    path.write_bytes(
        (path.read_bytes() if path.exists() else json.dumps(ATTEMPT).encode() + b"\n")
        + damage
        + b"\n"
    )
    whole = path.read_bytes()
    assert status.main([str(run)], "status") == 0
    assert f"{name}:2 is not a record of {name}" in " ".join(capsys.readouterr().out.split())
    said = []
    RunFolder(run).begin(said.append)
    assert (
        len(said) == 1
        and f"{name}:2 " in said[0]
        and "the run goes on without these lines" in said[0]
    )
    (aside,) = run.glob(f"{name}.damaged-*")
    assert aside.read_bytes() == whole and len(path.read_bytes().splitlines()) == 1
    RunFolder(run).begin(said.append)
    assert len(said) == 1


@pytest.mark.long
def test_lines_of_another_run_are_put_aside(folder, run, capsys):
    other = folder / "runs" / "other"
    for name in ("clock.jsonl", "launches.jsonl", "config.yaml"):
        shutil.copyfile(other / name, run / name)
    (run / "run.json").write_text("{")
    said = goes_on(folder, run, capsys)
    for name in ("clock.jsonl", "launches.jsonl"):
        assert f"{name}:1 is of another run, {RunFolder(other).id}" in said
    assert "config.yaml is of another run" in said and "run.json can't be read" in said
    assert len(list(run.glob("*.damaged-*"))) == 3
    assert (
        json.loads((run / "run.json").read_text())["run"] == RunFolder(folder / "runs" / "half").id
    )


@pytest.mark.long
def test_checkpoints_that_are_gone_do_not_start_the_run_over(folder, run, capsys):
    (run / "checkpoints").rename(run.parent / "elsewhere")
    said = refused(folder, run, capsys)
    assert "has no checkpoint, although step 6 was saved; nothing is changed" in said
    assert "Mount or bring back that folder" in said and "set checkpoint.start_over=true" in said
    (run / "checkpoints").mkdir()  # a mount point, with nothing mounted
    assert "although step 6 was saved" in refused(folder, run, capsys)
    before = (run / "metrics.jsonl").read_bytes()
    write_rollbacks(
        run, [STEP], RunFolder(run).id
    )  # of before: the run that starts over leaves nothing out
    said = goes_on(folder, run, capsys, "checkpoint.start_over=true")
    (kept,) = run.glob("before-*")
    assert f"The run starts over. What is left of it is kept in {kept}" in said
    assert (kept / "metrics.jsonl").read_bytes() == before and (kept / "run.json").exists()
    assert [r["step"] for r in read_metrics(run) if r["kind"] == "train"] == list(range(1, 10))
    assert "Nothing to do" in goes_on(folder, run, capsys, "checkpoint.start_over=true")


@pytest.mark.long
def test_a_run_that_never_saved_begins_again_without_a_word(folder, run, capsys):
    shutil.rmtree(run / "checkpoints")
    own = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(own | {"saved": 0}))
    assert "starts over" not in goes_on(folder, run, capsys)


@pytest.mark.long
@pytest.mark.parametrize("left", [None, 0, 4])
def test_records_that_are_gone_below_the_step_are_told(folder, run, capsys, left):
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    if left is None:
        (run / "metrics.jsonl").unlink()
    else:
        (run / "metrics.jsonl").write_text("".join(lines[: 1 + left]))
    said = goes_on(folder, run, capsys)
    last = "3 are there, the last of step 3" if left == 4 else "none of training is there"
    assert "of 8 records up to step 6, " in said and last.partition(" ")[2] in said
    assert "metrics.jsonl" in said and "the others are lost" in said
    assert "records up to" not in goes_on(folder, run, capsys), "it is told once"


@pytest.mark.long
def test_records_that_are_others_are_told_and_torn_ones_put_aside(folder, run, capsys):
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    lines[2] = lines[2].replace('"step": 2', '"step": 2, "note": 1')
    path.write_text("".join(lines) + '{"step": 6}\n')
    with pytest.raises(
        ValueError, match=r"metrics.jsonl:10 .*kind must be train, eval, end.*Delete that line"
    ):
        read_metrics(run)
    said = goes_on(folder, run, capsys)
    assert "are not those that were there when it was saved" in said
    assert (
        "metrics.jsonl:10 is not a record of metrics" in said
        and len(list(run.glob("metrics.jsonl.damaged-*"))) == 1
    )


@pytest.mark.long
def test_an_evaluation_set_that_was_exchanged_begins_another_series(folder, run, capsys):
    (folder / "text").mkdir(exist_ok=True)
    (folder / "text" / "a.txt").write_text(
        "and that is the other one, as it was for his and they are on " * 9
    )
    other = folder / "other-set"
    if not other.exists():
        assert prepare.main([str(other), "--text", f"{folder}/text/*.txt", "--workers", "1"]) == 0
    said = goes_on(
        folder, run, capsys, f"eval.sets.heldout.path={other}", "checkpoint.keep_best=true"
    )
    assert (
        "eval.sets.heldout was " in said
        and "they can't be compared" in said
        and "its best so far is forgotten" in said
    )
    evals = [record for record in read_metrics(run) if record["kind"] == "eval"]
    assert len({record["data"] for record in evals}) == 2 and evals[-1]["best_step"] == 9


@pytest.mark.long
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[" * 100_000, "deep"),
        (
            '[{"step": 5, "kind": "a", "left_out": [1, 100000000000]}]',
            "must go up from 1 or more, over at most 1,000,000",
        ),
        ('[{"step": 5, "kind": "a", "left_out": [5, 1]}]', "must go up"),
        ('[{"step": 5, "kind": "a", "left_out": [1.5, 2]}]', "must be whole numbers"),
        ('[{"step": 5, "kind": "a", "left_out": "12"}]', "must be whole numbers"),
        ('{"run": "a"}', "rollbacks"),
        ("7", "int"),
        ("", "Expecting value"),
    ],
)
def test_rollbacks_that_nobody_can_mean_are_refused(folder, run, capsys, text, problem):
    (run / "rollbacks.json").write_text(text)
    said = refused(folder, run, capsys)
    assert (
        "rollbacks.json is not a list of rollbacks" in said
        and problem in said
        and "Restore it, or remove it" in said
    )


@pytest.mark.long
def test_a_config_of_another_run_is_not_generated_with(folder, run, capsys):
    shutil.copyfile(folder / "runs" / "other" / "config.yaml", run / "config.yaml")
    assert generate.main([str(run), "--prompt", "the"]) == 74
    assert "config.yaml is of run" in capsys.readouterr().err


@pytest.mark.long
def test_secrets_are_in_no_file_of_a_run_that_goes_on_with_another_one(folder, monkeypatch):
    pytest.importorskip("mlflow")
    words = [f"config={folder / 'tiny.yaml'}", "run_name=secrets", "observe.trackers=[mlflow]"]
    store = f"sqlite:///{folder}/mlflow.db?token="

    def launch(steps, uri):
        monkeypatch.setattr("sys.argv", ["train", *words, f"observe.tracking.mlflow_uri={uri}"])
        return main(load_config([*sys.argv[1:], f"steps={steps}"]))

    run = folder / "runs" / "secrets"
    monkeypatch.setattr("maxtrain.observe.trackers.mlflow.Mlflow._uri", lambda self: store[:-7])
    for steps, secret in ((3, "hunter2"), (6, "renewed2")):
        assert launch(steps, store + secret) == 0
        for path in run.rglob("*"):
            content = path.read_bytes() if path.is_file() else b""
            assert secret.encode() not in content, path
    assert len(saved_steps(run / "checkpoints")) == 2
    for name in ("config.yaml", "launches.jsonl"):
        assert (run / name).stat().st_mode & 0o777 == 0o600 and b"***" in (run / name).read_bytes()
    # What the record has is not taken for the secret.
    monkeypatch.undo()
    with pytest.raises(UsageError, match="secret was masked"):
        Mlflow(load_config([f"config={run / 'config.yaml'}"]).observe)._uri()
