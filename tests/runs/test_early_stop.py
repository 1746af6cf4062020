"""Evaluations and checkpoints at intervals of epochs, and a run that ends when evaluations get no
better."""

from pathlib import Path

import pytest

from maxtrain import failpoints
from maxtrain.checkpoint.listing import saved_steps
from maxtrain.config import load_config
from maxtrain.observe.metrics import read_metrics
from maxtrain.trainer.loop import main

pytestmark = pytest.mark.usefixtures("this_process")
# So small a rate that nothing changes, and the loss of the set is the same again and again.
STUCK = ("optimizer.learning_rate=1e-30", "eval_interval=2", "eval.stop_patience=2")


@pytest.fixture(scope="module")
def config(tmp_path_factory, tiny_run) -> Path:
    folder = tmp_path_factory.mktemp("early")
    sets = {name: {"path": str(folder / "data" / "eval")} for name in ("heldout", "other")}
    sets["other"]["interval"] = 5
    options = {
        "steps": 20,
        "checkpoint_interval": 0,
        "eval": {"sets": sets},
        "checkpoint": {"keep": 20},
    }
    return tiny_run(
        folder,
        "--holdout",
        "0.2",
        **options,
        schedule={"warmup_steps": 1},
        mesh={"data": 1, "fsdp": 8},
    )


def train(config, run_name, *overrides):
    """Exit code and records of a run in this process."""
    code = main(load_config([f"config={config}", f"run_name={run_name}", *overrides]))
    return code, read_metrics(config.parent / "runs" / run_name)


def evaluated(records, name="heldout"):
    return [
        record["step"] for record in records if record["kind"] == "eval" and record["set"] == name
    ]


def saved(config, run_name):
    return list(saved_steps(config.parent / "runs" / run_name / "checkpoints"))


@pytest.mark.long
def test_a_run_ends_when_evaluations_get_no_better_and_says_so_again(config, capsys):
    code, records = train(config, "stuck", *STUCK)
    said = " ".join(capsys.readouterr().out.split())
    assert code == 0 and evaluated(records) == [2, 4, 6] and saved(config, "stuck") == [6]
    words = r"the last 2 evaluations of eval.sets.heldout brought no lower loss than"
    assert (
        "ENDED EARLY at step 6 of 20" in said
        and words in said
        and "(eval.stop_patience=2). Set eval.stop_patience higher" in said
    )
    assert records[-1]["kind"] == "end" and words in records[-1]["ending"]
    assert train(config, "stuck", *STUCK) == (0, records)
    assert "ended early, and would again: the last 2 evaluations" in " ".join(
        capsys.readouterr().out.split()
    )
    # A fork of it would end at once as well, with nothing saved.
    key = f"checkpoint.fork_from={config.parent}/runs/stuck"
    assert train(config, "fork", *STUCK, key)[0] == 78
    said = " ".join(capsys.readouterr().err.split())
    assert "ended early at step 6" in said and "Set eval.stop_patience higher" in said
    assert not list((config.parent / "runs" / "fork").glob("*"))
    assert train(config, "fork", *STUCK[:2], "steps=7", key)[0] == 0
    assert saved(config, "fork") == [6, 7]
    code, records = train(config, "stuck", *STUCK[:2], "eval.stop_patience=3")
    assert code == 0 and evaluated(records) == [2, 4, 6, 8] and saved(config, "stuck")[-1] == 8
    code, records = train(config, "stuck", *STUCK[:2])
    assert code == 0 and evaluated(records)[-1] == 20 and saved(config, "stuck")[-1] == 20


@pytest.mark.long
def test_a_run_that_is_killed_in_between_ends_at_the_same_step(config, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv(failpoints.VARIABLE, "after_step:nan:5")
        assert train(config, "killed", *STUCK, "checkpoint_interval=3")[0] == 75
    assert saved(config, "killed") == [3]
    code, records = train(config, "killed", *STUCK, "checkpoint_interval=3")
    assert code == 0 and evaluated(records) == [2, 4, 6]


@pytest.mark.long
def test_the_set_may_be_chosen_and_one_that_gets_better_ends_nothing(config):
    code, records = train(
        config, "chosen", *STUCK[:2], "eval.stop_patience=1", "eval.stop_set=other"
    )
    assert code == 0 and evaluated(records, "other") == [5, 10] and records[-1]["step"] == 10
    code, records = train(config, "better", "optimizer.learning_rate=1e-2", *STUCK[1:], "steps=8")
    assert code == 0 and evaluated(records)[-1] == 8 and records[-1]["kind"] != "end"


@pytest.mark.long
def test_what_is_due_every_half_epoch_is_due_after_the_step_that_completes_it(config):
    keys = (
        "steps=auto",
        "data.sources.text.epochs=2",
        "eval_interval=0.5 epochs",
        "checkpoint_interval=1epoch",
    )
    code, records = train(config, "epochs", *keys, "eval.sets.other.interval=.75ep")
    epochs = {
        record["step"]: record["epochs/text"] for record in records if record["kind"] == "train"
    }
    last = max(epochs)

    def first(passes):
        return min(step for step, done in epochs.items() if done >= passes - 1e-9)

    assert code == 0 and evaluated(records) == sorted({first(0.5), first(1), first(1.5), last})
    assert evaluated(records, "other") == sorted({first(0.75), first(1.5), last})
    assert saved(config, "epochs") == [first(1), last]
