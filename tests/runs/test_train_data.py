"""The main job and its data: what the guard remembers, rows of evaluation, and how long a step
waits for its batch."""

from pathlib import Path

import numpy as np
import pytest

from data_pipeline.base.errors import ConfigError
from data_pipeline.prepare import command as prepare
from data_pipeline.shards import Manifest, ShardWriter
from data_pipeline.tokenizer import ByteTokenizer
from maxtrain.config import load_config
from maxtrain.observe.metrics import read_metrics
from maxtrain.trainer.loop import main
from maxtrain.trainer.run import Run

pytestmark = pytest.mark.usefixtures("this_process")


@pytest.fixture(scope="module")
def config(tmp_path_factory, tiny_run) -> Path:
    """A config file beside its data: text, and `ones`, of documents of one token, which are no
    targets."""
    folder = tmp_path_factory.mktemp("train-data")
    tiny = tiny_run(
        folder,
        *("--holdout", "0.1"),
        steps=12,
        model={"max_length": 64},
        eval={"sets": {"heldout": {"path": str(folder / "data" / "eval")}}},
        optimizer={"learning_rate": 1e-2},
        schedule={"warmup_steps": 1},
    )
    (folder / "ones").mkdir()
    writer, tokenizer = ShardWriter(folder / "ones", "tokens-00000", 257), ByteTokenizer()
    writer.append(np.full(600, 65), np.ones(600, np.int64))
    tokenizer.save(folder / "ones")
    described = Manifest.load(folder / "data" / "train").tokenizer
    Manifest(described, "uint16", "none", 600, (writer.close(),)).save(folder / "ones")
    return tiny


def train(config, run_name, *overrides):
    """Exit code of a run in this process, and its records."""
    code = main(load_config([f"config={config}", f"run_name={run_name}", *overrides]))
    return code, read_metrics(config.parent / "runs" / run_name)


@pytest.mark.long
def test_a_run_that_the_guard_has_ended_ends_there_again_with_the_same_words(config, capsys):
    """Little fill over four steps, found one step after the last checkpoint, by what was before it;
    and the same tokens."""
    ones = [f"data.sources.ones.path={config.parent / 'ones'}", "data.sources.ones.epochs=null"]
    stages = "data.stages=[{until: 4, weights: {text: 1}}, {weights: {ones: 1, text: 1}}]"
    keys = [*ones, stages, "data.min_fill=0.7", "data.fill_patience=4", "checkpoint_interval=6"]
    said = []
    for _ in range(3):
        code, records = train(config, "filled", *keys)
        said.append((code, capsys.readouterr().err, [r["step"] for r in records]))
    assert (
        said[0] == said[1] == said[2]
        and said[0][0] == 65
        and "of 4 batches are targets (data.min_fill=0.7)" in said[0][1]
    )
    assert said[0][2] == [1, 2, 3, 4, 5, 6], "it stops at step 7, of which steps 5 to 7 have little"


@pytest.mark.long
def test_evaluation_may_have_rows_of_another_length(config):
    ours, theirs = (
        train(config, f"rows-{n}", f"eval.seq_length={n}", "steps=2")[1][-1] for n in ("64", "null")
    )
    assert (
        ours["kind"] == "eval"
        and ours["tokens"] == theirs["tokens"]
        and ours["nll"] != theirs["nll"]
    )
    with pytest.raises(
        ConfigError,
        match=r"eval\.seq_length=65 must be at most model\.max_length=64\. Set eval\.seq",
    ):
        load_config([f"config={config}", "eval.seq_length=65"])


@pytest.mark.long
def test_records_say_how_long_a_step_waited_for_its_batch(config):
    code, records = train(config, "waits", "eval_interval=4")
    waits = [(r["data_wait_seconds"], r["step_seconds"]) for r in records if r["kind"] == "train"]
    assert code == 0 and len(waits) == 12 and all(0 < wait < step for wait, step in waits)


@pytest.mark.long
def test_the_end_is_written_down_whatever_comes_after_the_last_checkpoint(config, monkeypatch):
    ones = [
        f"data.sources.ones.path={config.parent / 'ones'}",
        "data.sources.ones.epochs=null",
        "data.zero_weight=stop",
    ]
    stages, save = "data.stages=[{until: 3, weights: {text: 1}}, {weights: {ones: 1}}]", Run.save

    def interrupted(run, **options):
        save(run, **options)
        if run.health.ending:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Run, "save", interrupted)
        assert train(config, "late", *ones, stages)[0] == 75
    code, records = train(config, "late", *ones, stages)
    assert code == 0 and [(record["kind"], record["step"]) for record in records][-1] == ("end", 4)
    assert [record["kind"] for record in records].count("end") == 1


@pytest.mark.long
def test_the_character_model_of_the_readme(tmp_path, monkeypatch, capsys):
    """The test has other text, and four steps."""
    monkeypatch.chdir(tmp_path)
    Path("input.txt").write_text(
        "First Citizen:\nBefore we proceed any further, hear me speak.\n\n" * 100
    )
    words = (
        "data/shakespeare_char --text input.txt --tokenizer chars --holdout 0.1 --holdout-by tail"
    )
    assert prepare.main(words.split()) == 0
    short = [
        "steps=4",
        "schedule.warmup_steps=1",
        "eval_interval=0",
        "observe.plot=false",
        "data.batch_size=8",
    ]
    assert main(load_config(["config=shakespeare_char", *short])) == 0
    assert "4 steps" in capsys.readouterr().out


@pytest.mark.long
def test_a_changed_setting_is_named_with_both_values(config, capsys):
    """It was `another data set, seed, batch size, row length or mixture`."""
    keys = ["steps=4", "checkpoint_interval=0"]
    assert train(config, "changed", *keys)[0] == 0
    capsys.readouterr()
    for changes, words in (
        (["data.batch_size=16"], "data.batch_size was 8 and is 16."),
        (["seed=3"], "seed was 0 and is 3."),
        (
            ["data.seed=3", "data.packing=pad", "data.on_long=truncate"],
            "data.seed was 0 and is 3; data.packing was stream",
        ),
        (["data.seq_length=16"], "data.seq_length was 32 and is 16."),
        (
            [f"data.sources.text.path={config.parent / 'ones'}"],
            f"data.sources.text.path={config.parent / 'ones'} holds other tokens than the run has read.",
        ),
        (
            ["data.sources.ones.epochs=null", f"data.sources.ones.path={config.parent / 'ones'}"],
            f"data.sources.ones.path={config.parent / 'ones'} is a source that the run has not read.",
        ),
    ):
        assert train(config, "changed", "steps=6", "checkpoint_interval=0", *changes)[0] == 78
        said = capsys.readouterr().err
        assert (
            f"before step 4 this run has read other data than this config describes: {words}"
            in said
        ), said
        assert (
            "Set these keys back to go on as before" in said
            and "set run_name to a new name to start afresh" in said
        )
        assert "data.accept_changes=true to go on from step 4 in the order" in said
    accepted = ["data.batch_size=16", "data.accept_changes=true"]
    assert train(config, "changed", "steps=6", "checkpoint_interval=0", *accepted)[0] == 0


@pytest.mark.long
def test_data_and_initial_weights_may_have_seeds_of_their_own(config):
    """The root's seed is their default: the same bits as when there was only that one."""
    keys = ["steps=2", "checkpoint_interval=0"]
    runs = {
        name: [
            (record["batch"], record["params_hash"])
            for record in train(config, f"seeds-{name}", *keys, *seeds)[1][:2]
        ]
        for name, seeds in {
            "root": ["seed=5"],
            "both": ["data.seed=5", "init.seed=5"],
            "data": ["data.seed=5"],
            "init": ["init.seed=5"],
            "none": [],
        }.items()
    }
    assert runs["root"] == runs["both"], "without dropout nothing else is random"
    batches = {name: [batch for batch, _ in found] for name, found in runs.items()}
    assert batches["data"] == batches["root"] != batches["none"] == batches["init"]
    assert len({found[0][1] for found in runs.values()}) == 4
