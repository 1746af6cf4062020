"""Runs that learn from preferences: what they learn, resumed bit for bit, replayed, with adapters,
and refused where there is nothing to compare."""

import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from data_pipeline.base.errors import ConfigError, UserError
from data_pipeline.prepare import command as prepare
from maxtrain.commands import replay
from maxtrain.commands.evaluate import command as evaluate
from maxtrain.commands.probe.command import StepMemory, learning_rate_trials, measured_speeds
from maxtrain.config import load_config
from maxtrain.observe.metrics import read_metrics
from tests.runs.test_distilled_runs import final_state
from tests.support.preference_runs import (
    STEPS,
    assert_planned_batches,
    evaluations,
    planned,
    prepared_labels,
    prepared_pairs,
    train,
)

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("this_process")]


def preferences(config: Path, *overrides: str) -> list[str]:
    """Overrides of a run that learns which answers are preferred."""
    return ["objective=dpo", f"checkpoint.init_from={config.parent / 'runs' / 'base'}", *overrides]


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    """A config file beside pairs of which the chosen answers are alike, a run that has read them,
    and one that has learnt from them."""
    path = prepared_pairs(tmp_path_factory.mktemp("preferences"))
    assert train(path, "base", "eval_at_start=false") == 0
    assert train(path, "dpo", *preferences(path)) == 0
    return path


def test_the_chosen_answers_win_and_everything_is_on_record(config):
    folder = config.parent / "runs" / "dpo"
    before, after = evaluations(folder)
    assert before["preference"] == pytest.approx(np.log(2), rel=1e-4)
    assert before["reward_margin"] == pytest.approx(0, abs=1e-4)
    assert after["preference"] < 0.9 * before["preference"]
    assert after["reward_accuracy"] > 0.9
    assert after["reward_chosen"] > after["reward_rejected"]
    launch = json.loads((folder / "launches.jsonl").read_text().splitlines()[-1])
    assert launch["units"]["reward_margin"] == "nats per pair"
    steps = [record for record in read_metrics(folder) if record["kind"] == "train"]
    # Two sums of the same terms, one in float32 alone: they may differ in the last bit.
    for record in steps:
        assert record["preference"] == pytest.approx(record["objective"], rel=2e-7)


def test_the_loss_of_a_run_is_what_it_minimises(config):
    """The same loss is used in its curves, for anomalies, and for the best evaluation."""
    folder = config.parent / "runs" / "dpo"
    steps = [record for record in read_metrics(folder) if record["kind"] == "train"]
    assert all(record["step_loss"] == record["preference"] for record in steps)
    best = [record["best_step"] for record in evaluations(folder)]
    assert best == [0, STEPS]


def test_a_resumed_run_is_as_never_stopped_and_needs_the_same_reference(config, capfd):
    folder = config.parent / "runs" / "dpo"
    expected = final_state(folder)
    shutil.rmtree(folder / "checkpoints" / f"{STEPS:08d}")
    other = preferences(config, f"dpo.reference={folder}")
    assert train(config, "dpo", *other) == 78
    assert "Set dpo.reference to that one" in capfd.readouterr().err
    assert train(config, "dpo", *preferences(config)) == 0
    assert final_state(folder) == expected
    capfd.readouterr()
    assert replay.main([str(folder), "--steps", "4:12"]) == 0


def test_plan_shows_the_pairs_that_a_step_has_read(config, capsys):
    folder = config.parent / "runs" / "dpo"
    assert_planned_batches(folder, capsys)
    assert "  pairs: 8 rows" in planned(folder, 1, capsys)


def test_with_adapters_the_reference_is_the_model_without_them(config, capfd):
    overrides = preferences(config, "model.lora.rank=2", "optimizer.learning_rate=0.02")
    assert train(config, "adapters", *overrides) == 0
    assert "reference: the model without its adapters" in capfd.readouterr().out
    before, after = evaluations(config.parent / "runs" / "adapters")
    assert before["preference"] == pytest.approx(np.log(2), rel=1e-4)
    assert after["reward_accuracy"] > 0.9


@pytest.fixture(scope="module")
def labelled(config) -> list[str]:
    """Overrides of a run that learns from single answers with a label."""
    of_labels = prepared_labels(config.parent)
    return preferences(config, "dpo.loss_type=kto", *of_labels, "optimizer.learning_rate=6e-3")


def test_answers_with_a_label_are_learnt_and_the_run_goes_on_bit_for_bit(config, labelled):
    overrides = [*labelled, "optimizer.accumulation=2", "data.batch_size=16"]
    assert train(config, "kto", *overrides) == 0
    folder = config.parent / "runs" / "kto"
    before, after = evaluations(folder)
    assert before["preference"] == pytest.approx(0.5, abs=1e-4)
    assert before["kl"] == pytest.approx(0, abs=1e-4)
    assert after["preference"] < 0.9 * before["preference"]
    assert after["reward_chosen"] > after["reward_rejected"]
    expected = final_state(folder)
    shutil.rmtree(folder / "checkpoints" / f"{STEPS:08d}")
    assert train(config, "kto", *overrides) == 0
    assert final_state(folder) == expected


def test_labels_and_pairs_are_not_taken_for_each_other(config, labelled, capfd):
    labels_wanted = preferences(config, "dpo.loss_type=kto")
    with pytest.raises(ConfigError, match=r"set dpo\.loss_type=sigmoid for pairs"):
        learning_rate_trials(load_config([f"config={config}", *labels_wanted]), 1e-5, 1.0, 16, 1)
    assert train(config, "refused", *preferences(config, "dpo.loss_type=kto")) == 78
    assert "set dpo.loss_type=sigmoid for pairs" in capfd.readouterr().err
    pairs_wanted = [text for text in labelled if "dpo.loss_type" not in text]
    assert train(config, "refused", *pairs_wanted) == 78
    assert "dpo.loss_type=kto for answers with a label" in capfd.readouterr().err
    of_pairs = preferences(config, f"eval.sets.heldout.path={config.parent / 'labelled' / 'eval'}")
    assert train(config, "refused", *of_pairs) == 78
    assert "eval.sets.heldout.path" in capfd.readouterr().err


def test_evaluate_gives_the_loss_of_the_text(config, capsys):
    """A run's reference is not needed to read a set."""
    assert evaluate.main([str(config.parent / "runs" / "dpo"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["sets"]["heldout"]
    assert found["nll"] == pytest.approx(
        evaluations(config.parent / "runs" / "dpo")[-1]["nll"], rel=1e-4
    )


def test_a_step_is_probed_beside_the_reference_that_the_run_begins_with(config):
    vocabulary = "model.vocab_size=257"
    asked = load_config([f"config={config}", vocabulary, *preferences(config)])
    memory = StepMemory(asked, jax.devices()[:1])
    parts = memory.parts
    assert parts.frozen_model is not None and parts.config.checkpoint.init_from is None
    trained = sum(x.size for x in jax.tree.leaves(parts.abstract.trainable))
    frozen = sum(x.size for x in jax.tree.leaves(parts.abstract.frozen["reference"]))
    assert trained == frozen
    (speed,) = measured_speeds(memory, memory.unit, 96).values()
    assert speed > 0
    without = load_config([f"config={config}", vocabulary, "objective=dpo"])
    with pytest.raises(ConfigError, match=r"there is none\. Set model=DIR"):
        StepMemory(without, jax.devices()[:1])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["objective=dpo"], "there is none. Set model=DIR or checkpoint.init_from"),
        (
            [
                "objective=dpo",
                "model.lora.rank=2",
                "train.only=[norm]",
                "checkpoint.init_from={base}",
            ],
            "trains more than adapters, .* Set dpo.reference",
        ),
        (
            ["objective=dpo", "checkpoint.init_from={base}", "data.packing=stream"],
            "Set data.packing=bins",
        ),
        (["objective=dpo", "dpo.loss_type=exo_pair"], "Set dpo.label_smoothing=0.001"),
        (["dpo.beta=0.3"], "dpo.beta=0.3 is not used with objective=next_token"),
        (
            ["objective=dpo", "dpo.loss_type=simpo", "dpo.reference={base}"],
            "dpo.loss_type=simpo, which is free of a reference. Leave it out",
        ),
        (
            ["objective=dpo", "dpo.loss_type=kto", "dpo.sft_weight=1"],
            "dpo.sft_weight=1.0 is not used with dpo.loss_type=kto",
        ),
        (
            ["objective=dpo", "dpo.loss_type=kto", "data.restart_positions=false"],
            "data.restart_positions=False begins an answer",
        ),
    ],
)
def test_what_can_not_be_compared_is_refused(config, capfd, overrides, message):
    base = config.parent / "runs" / "base"
    given = [text.format(base=base) for text in overrides]
    try:
        code = train(config, "refused", *given)
        told = capfd.readouterr().err
    except UserError as error:
        code = error.exit_code
        told = str(error)
    assert code == 78
    assert re.search(message, told)


def test_text_without_pairs_is_refused(config, capfd, tmp_path):
    (tmp_path / "text.jsonl").write_text('{"text": "green apple, green apple"}\n' * 60)
    options = ["--jsonl", f"{tmp_path}/text.jsonl", "--tokenizer", "bytes", "--workers", "1"]
    assert prepare.main([str(tmp_path / "text"), *options]) == 0
    plain = [
        "data.sources.pairs.path=" + str(tmp_path / "text"),
        "eval.sets={}",
        "eval_at_start=false",
    ]
    assert train(config, "refused", *preferences(config, *plain)) == 78
    assert "Make pairs with `prepare --preferences`" in capfd.readouterr().err
