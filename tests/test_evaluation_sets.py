"""Evaluation sets that come to a run late, and evaluation before the first step."""

import shutil

import pytest

from maxtrain import train
from maxtrain.checkpoint.listing import saved_steps
from maxtrain.config.load import load_config
from maxtrain.observe.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("this_process")
STEPS = 4


@pytest.fixture(scope="module")
def config(tmp_path_factory, tiny_run):
    folder = tmp_path_factory.mktemp("sets")
    (folder / "more").mkdir()
    tiny_run(folder / "more", "--holdout", "0.2", texts=30)
    sets = {"val": {"path": str(folder / "data/eval")}}
    options = {"steps": STEPS, "checkpoint_interval": 2, "schedule": {"warmup_steps": 0}, "eval": {"sets": sets}}
    return tiny_run(folder, "--holdout", "0.2", **options)


@pytest.fixture(scope="module")
def finished(config, this_process):
    assert run(config, "finished") == 0
    return config.parent / "runs/finished"


@pytest.fixture
def again(config, finished, capsys):
    """Goes on with a copy of the finished run: (what it said, its evaluations in their order)."""
    folder = config.parent / "runs/again"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(finished, folder)

    def go(*overrides):
        capsys.readouterr()
        assert run(config, "again", *overrides) == 0
        said = " ".join(capsys.readouterr().out.split())
        return said, [(r["set"], r["step"]) for r in read_metrics(folder) if r["kind"] == "eval"]

    return go


def run(config, name, *overrides):
    return train.main(load_config([f"config={config}", f"run_name={name}", *overrides]))


def test_a_set_that_is_new_to_a_finished_run_is_read_once(config, finished, again):
    other = f"eval.sets.other.path={config.parent}/more/data/eval"
    steps = saved_steps(finished / "checkpoints")
    said, evaluations = again(other)
    assert f"Evaluates other, which step {STEPS}, the run's last, was not evaluated on." in said and "lost" not in said
    assert evaluations == [("val", STEPS), ("other", STEPS)]
    assert saved_steps(config.parent / "runs/again/checkpoints").keys() == steps.keys(), "no step is made"
    said, evaluations = again(other)
    assert "Nothing to do" in said and len(evaluations) == 2


def test_a_set_that_is_another_text_now_is_read_as_that(config, again):
    said, evaluations = again(f"eval.sets.val.path={config.parent}/more/data/eval")
    assert "eval.sets.val was" in said and f"Evaluates val, which step {STEPS}" in said and "lost" not in said
    assert evaluations == [("val", STEPS)] * 2
    said, evaluations = again(f"eval.sets.val.path={config.parent}/more/data/eval")
    assert "Nothing to do" in said and len(evaluations) == 2


def test_evaluation_before_the_first_step(config, capsys):
    assert run(config, "start", "eval_at_start=true", "eval_interval=2") == 0
    records = read_metrics(config.parent / "runs/start")
    assert [(r["kind"], r["step"]) for r in records][:2] == [("eval", 0), ("train", 1)]
    losses = {r["step"]: r["nll"] for r in records if r["kind"] == "eval"}
    assert list(losses) == [0, 2, 4] and losses[0] > losses[4]
    assert run(config, "start", "eval_at_start=true", "eval_interval=2", "steps=6") == 0
    assert [r["step"] for r in read_metrics(config.parent / "runs/start") if r["kind"] == "eval"] == [0, 2, 4, 6]
