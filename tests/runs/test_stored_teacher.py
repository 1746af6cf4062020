"""Runs that learn from what is stored of a teacher: as from the teacher itself, resumed bit for
bit, and refused where the files do not fit; and the command that makes them, killed and gone on."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.base.errors import ConfigError, DataError
from data_pipeline.shards import TokenShards
from data_pipeline.shards.teacher_logits import StoredTeacher, TeacherRecord
from maxtrain.checkpoint.listing import saved_digests
from maxtrain.commands import replay
from maxtrain.commands.probe.command import learning_rate_trials
from maxtrain.commands.teach import command as teach
from maxtrain.commands.teach import compute
from maxtrain.config import load_config
from maxtrain.config.schema import ModelConfig, PrecisionConfig, RoutingConfig
from maxtrain.observe.metrics import read_metrics
from maxtrain.trainer.job import open_job
from maxtrain.trainer.loop import main
from maxtrain.trainer.reference_model import FrozenModel

pytestmark = pytest.mark.usefixtures("this_process")
STEPS = 4
VOCABULARY = 257
OPTIONS = ("--temperature", "2", "--seq-length", "32")


@pytest.fixture(scope="module")
def config(tmp_path_factory, tiny_run) -> Path:
    """A config file of students beside data and a teacher."""
    folder = tmp_path_factory.mktemp("stored")
    path = tiny_run(
        folder,
        *("--holdout", "0.2"),
        texts=12,
        steps=STEPS,
        checkpoint_interval=2,
        checkpoint={"keep": STEPS},
        precision={"compute": "float32"},
        optimizer={"learning_rate": 1e-2},
        schedule={"warmup_steps": 0},
        eval={"sets": {"heldout": {"path": str(folder / "data" / "eval")}}},
    )
    words = [f"config={path}", "run_name=teacher", "seed=7", "model.mlp_dim=48"]
    assert main(load_config(words)) == 0
    return path


def teach_all(config: Path, *options: str) -> int:
    """Exit code of the command for training data and the held-out set."""
    folder = config.parent
    places = [str(folder / "data" / part) for part in ("train", "eval")]
    return teach.main([str(folder / "runs" / "teacher"), *places, *options])


@pytest.fixture(scope="module")
def stored(config, module_patch) -> Path:
    """The config, with the teacher's four likeliest tokens beside the data (`some`)."""
    module_patch.setattr(teach, "start", lambda mesh, cache: None)
    assert teach_all(config, "--name", "some", "--top", "4", *OPTIONS) == 0
    return config


@pytest.fixture(scope="module")
def module_patch():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def student(config: Path, *overrides: str) -> list[str]:
    words = [
        f"config={config}",
        "objective=distill",
        "distill.temperature=2",
        "distill.weight=0.7",
        "data.packing=bins",
        "data.on_long=truncate",
        "eval_at_start=true",
    ]
    keys = {word.partition("=")[0] for word in overrides}
    return [word for word in words if word.partition("=")[0] not in keys] + list(overrides)


def train(config: Path, run_name: str, *overrides: str) -> int:
    """Exit code of a run in this process."""
    return main(load_config([*student(config, *overrides), f"run_name={run_name}"]))


def numbers(config: Path, run_name: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for record in read_metrics(config.parent / "runs" / run_name):
        if record["kind"] in ("train", "eval"):
            for name in ("objective", "distill", "agreement", "grad_norm"):
                found.setdefault(name, []).append(record.get(name, 0.0))
    return found


@pytest.mark.slow
def test_all_that_a_teacher_says_is_as_good_as_the_teacher(stored):
    """Losses of training and evaluation, and gradients, of steps that follow from each other."""
    assert teach_all(stored, "--name", "whole", "--top", str(VOCABULARY), *OPTIONS) == 0
    teacher = stored.parent / "runs" / "teacher"
    assert train(stored, "live", f"distill.teacher={teacher}") == 0
    assert train(stored, "from-files", "distill.stored=whole", f"distill.top={VOCABULARY}") == 0
    live = numbers(stored, "live")
    found = numbers(stored, "from-files")
    for name, values in live.items():
        np.testing.assert_allclose(found[name], values, rtol=2e-6, err_msg=name)


@pytest.mark.long
def test_a_run_goes_on_bit_for_bit_is_replayed_and_needs_the_same_files(stored, capfd):
    balanced = ("distill.top=3", "data.packing=balanced", "data.balance_rows=8")
    overrides = ("distill.stored=some", *balanced)
    assert train(stored, "straight", *overrides) == 0
    run = stored.parent / "runs" / "straight"
    expected = saved_digests(run / "checkpoints")[STEPS]
    distilled = numbers(stored, "straight")["distill"]
    assert 0 < distilled[-1] < distilled[0]
    record = json.loads((run / "checkpoints" / f"{STEPS:08d}" / "record.json").read_text())
    assert record["teacher"].startswith("stored-")
    shutil.rmtree(run / "checkpoints" / f"{STEPS:08d}")
    for part in ("train", "eval"):
        # The same numbers, as if they came from another teacher.
        folder = stored.parent / "data" / part
        shutil.copytree(folder / "teacher-some", folder / "teacher-other")
        of_other = TeacherRecord.load(folder / "teacher-other")
        dataclasses.replace(of_other, teacher="other").save(folder / "teacher-other")
    assert train(stored, "straight", "distill.stored=other", *balanced) == ConfigError.exit_code
    assert "Bring it back" in capfd.readouterr().err
    assert train(stored, "straight", *overrides) == 0
    assert saved_digests(run / "checkpoints")[STEPS] == expected
    assert replay.main([str(run), "--steps", "2:4"]) == 0
    assert "bit for bit" in capfd.readouterr().out


@pytest.mark.long
def test_a_command_that_was_killed_goes_on_and_makes_the_same_files(stored, monkeypatch, capfd):
    folder = stored.parent / "data" / "train"
    monkeypatch.setattr(compute, "_PIECE_BYTES", 20_000)
    options = ("--top", "4", *OPTIONS)
    assert teach_all(stored, "--name", "straight", *options) == 0
    said = capfd.readouterr().err
    assert "tokens x 28 bytes (4 entries) =" in said
    write = compute.write_atomic
    calls = []

    def dies(path, data):
        calls.append(path)
        if len(calls) == 3:
            raise OSError("killed")
        write(path, data)

    monkeypatch.setattr(compute, "write_atomic", dies)
    with pytest.raises(OSError, match="killed"):
        run_raising(stored, *options)
    unfinished = folder / "teacher-killed"
    assert (unfinished / "unfinished.json").exists() and not (unfinished / "record.json").exists()
    with pytest.raises(DataError, match="was never finished"):
        StoredTeacher.open(unfinished, TokenShards.open(folder))
    monkeypatch.setattr(compute, "write_atomic", write)
    # Other options are refused, and these go on.
    assert teach_all(stored, "--name", "killed", "--top", "5") == ConfigError.exit_code
    assert "was begun with another teacher" in capfd.readouterr().err
    assert teach_all(stored, "--name", "killed", *options) == 0
    assert not (unfinished / "unfinished.json").exists()
    straight = folder / "teacher-straight"
    names = sorted(path.name for path in straight.iterdir())
    assert names == sorted(path.name for path in unfinished.iterdir())
    for name in names:
        assert (straight / name).read_bytes() == (unfinished / name).read_bytes(), name
    # The same command once more has nothing to do; another teacher does not replace it.
    assert teach_all(stored, "--name", "killed", *options) == 0
    assert "is there already" in capfd.readouterr().err
    assert teach_all(stored, "--name", "killed", "--top", "4") == ConfigError.exit_code


def run_raising(config: Path, *options: str) -> None:
    """The command, without `run_command`, so that its error is seen."""
    folder = config.parent / "data" / "train"
    teacher = teach.load_teacher(str(config.parent / "runs" / "teacher"))
    shards = TokenShards.open(folder)
    record = teach.make_record(teacher, shards, 4, 2.0, 32)
    teach.teach(teacher, shards, record, folder / "teacher-killed", lambda line: None)


@pytest.mark.long
@pytest.mark.parametrize(
    ("overrides", "rule"),
    [
        (["distill.stored=absent"], "has no record.json. Make it with `maxtrain teach`"),
        (["distill.top=9"], "Set distill.top=4"),
        (["distill.temperature=1"], "Set distill.temperature=2.0"),
        (["data.seq_length=64"], "Set data.seq_length=32"),
        (["model.vocab_size=300"], "Set model.vocab_size=257"),
        (["data.packing=stream"], "Set data.packing=bins"),
        (["distill.teacher=runs/teacher"], "are two teachers. Keep one of them"),
        (["data.restart_positions=false"], "Set data.restart_positions=true"),
    ],
)
def test_what_does_not_fit_is_refused(stored, overrides, rule):
    words = [word for word in student(stored, *overrides) if "on_long" not in word]
    if overrides != ["data.packing=stream"]:
        words.append("data.on_long=truncate")
    for word in ("distill.stored=some", "distill.top=4"):
        if not any(each.startswith(word.partition("=")[0]) for each in overrides):
            words.append(word)
    with pytest.raises((ConfigError, DataError)) as error:
        open_job(load_config([*words, "run_name=refused"]), None)
    assert rule in str(error.value)


def test_a_teacher_whose_experts_have_a_capacity_is_refused(monkeypatch):
    model = ModelConfig(routing=RoutingConfig(capacity_factor=1.0))
    frozen = FrozenModel("teacher", "large", Path("large"), model, PrecisionConfig())
    monkeypatch.setattr(compute, "find_model", lambda *args: frozen)
    with pytest.raises(ConfigError, match=r"capacity_factor=1\.0 .* Take a teacher without"):
        compute.load_teacher("large")


@pytest.mark.slow
def test_a_learning_rate_is_found_with_what_is_stored(stored):
    asked = load_config(student(stored, "distill.stored=some", "distill.top=4", "steps=40"))
    found = learning_rate_trials(asked, 1e-4, 1.0, 30, 4)
    assert 1e-4 <= found.best.rate <= 1 and len(found.trials) <= 4
