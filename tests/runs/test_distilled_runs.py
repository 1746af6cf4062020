"""Runs that learn from a teacher: closer to it than others, resumed bit for bit, replayed, and
refused where the teacher does not fit."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from data_pipeline.base.errors import ConfigError, DamagedError, StorageError
from maxtrain.checkpoint.manager import Checkpoints
from maxtrain.commands import replay
from maxtrain.commands.evaluate import command as evaluate
from maxtrain.config import load_config
from maxtrain.config.schema import CheckpointConfig, MeshConfig
from maxtrain.objectives.distill import TEACHER
from maxtrain.observe.metrics import TAKEN, read_metrics
from maxtrain.ops.digest import digests, hash_text
from maxtrain.parallel.mesh import make_mesh
from maxtrain.trainer import reference_model
from maxtrain.trainer.loop import main
from maxtrain.trainer.reference_model import find_model
from maxtrain.trainer.saved_run import load_run
from maxtrain.weights.hf_export import write_config, write_weights
from tests.support.preference_runs import assert_planned_batches

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("this_process")]


def train(config: Path, run_name: str, *overrides: str) -> int:
    """Exit code of a run in this process."""
    return main(load_config([f"config={config}", f"run_name={run_name}", *overrides]))


def distillation(config: Path, *overrides: str) -> list[str]:
    """Overrides of a run that learns from the teacher's distributions alone."""
    return [
        "objective=distill",
        f"distill.teacher={config.parent / 'runs' / 'teacher' / 'checkpoints' / '00000006'}",
        "distill.weight=1",
        *overrides,
    ]


@pytest.fixture(scope="module")
def config(tmp_path_factory, tiny_run) -> Path:
    """A config file beside its data and the runs of a teacher, a student, and one that learns from
    the data alone. The teacher is a wide model that has hardly trained, so that whoever learns from
    the data goes another way."""
    folder = tmp_path_factory.mktemp("distill")
    path = tiny_run(
        folder,
        *("--holdout", "0.2"),
        steps=24,
        checkpoint_interval=12,
        optimizer={"learning_rate": 1e-2},
        schedule={"warmup_steps": 2},
        eval={"sets": {"heldout": {"path": str(folder / "data" / "eval")}}},
    )
    wide = ["steps=6", "model.embed_dim=32", "model.mlp_dim=48", "precision.compute=float32"]
    assert train(path, "teacher", *wide) == 0
    assert train(path, "student", *distillation(path, "eval_at_start=true")) == 0
    assert train(path, "alone") == 0
    return path


def final_state(folder: Path) -> dict[str, bytes]:
    """Bits of every array of the newest checkpoint."""
    checkpoints = Checkpoints(folder / "checkpoints", CheckpointConfig())
    commit = folder / "checkpoints" / f"{checkpoints.latest():08d}" / "commit.json"
    saved = json.loads(commit.read_text())["arrays"]
    tree = {name: jax.ShapeDtypeStruct(tuple(x["shape"]), x["dtype"]) for name, x in saved.items()}
    state, _ = checkpoints.restore(tree)
    checkpoints.close()
    return {name: np.asarray(x).tobytes() for name, x in state.items()}


@pytest.mark.slow
def test_a_student_is_closer_to_its_teacher_than_who_learns_from_the_data(config, capfd):
    runs = config.parent / "runs"
    records = [r for r in read_metrics(runs / "student") if r["kind"] == "eval"]
    assert [record["step"] for record in records] == [0, 24]
    before, after = records
    assert after["distill"] < 0.5 * before["distill"]
    launch = json.loads((runs / "student" / "launches.jsonl").read_text().splitlines()[-1])
    assert launch["units"] == {"distill": "nats per target", "agreement": "share of targets"}
    steps = [r for r in read_metrics(runs / "student") if r["kind"] == "train"]
    assert all(0 <= record["agreement"] <= 1 for record in steps)
    for record in read_metrics(runs / "student"):
        plain = {key for key in record if "/" not in key and not key.endswith("_hash")}
        assert plain <= TAKEN | launch["units"].keys(), "names that others could take"
    assert steps[-1]["objective"] == pytest.approx(steps[-1]["distill"], rel=1e-5)

    def compared(run: str) -> dict[str, float]:
        capfd.readouterr()
        place = str(runs / "teacher")
        assert evaluate.main([str(runs / run), "--teacher", place, "--json"]) == 0
        return json.loads(capfd.readouterr().out)["sets"]["heldout"]

    student = compared("student")
    alone = compared("alone")
    assert student["distill"] < 0.5 * alone["distill"]
    assert alone["nll"] < student["nll"]
    assert student["distill"] == pytest.approx(after["distill"], rel=1e-3)


def test_plan_shows_the_rows_that_a_step_has_read(config, capsys):
    assert_planned_batches(config.parent / "runs" / "student", capsys)


def test_no_checkpoint_holds_the_teacher_and_each_says_which_it_is(config):
    student = config.parent / "runs" / "student" / "checkpoints" / "00000024"
    arrays = json.loads((student / "commit.json").read_text())["arrays"]
    assert not any("teacher" in name or name.startswith("frozen") for name in arrays)
    record = json.loads((student / "record.json").read_text())
    assert [len(part) for part in record["teacher"].split("-")] == [16, 16]
    alone = config.parent / "runs" / "alone" / "checkpoints" / "00000024"
    assert "teacher" not in json.loads((alone / "record.json").read_text())


def test_a_resumed_run_is_as_never_stopped_and_needs_the_same_teacher(config, capfd):
    folder = config.parent / "runs" / "student"
    overrides = distillation(config, "eval_at_start=true")
    expected = final_state(folder)
    shutil.rmtree(folder / "checkpoints" / "00000024")
    # Another teacher: the same run, longer trained.
    other = [
        f"distill.teacher={config.parent / 'runs' / 'alone'}" if "teacher=" in word else word
        for word in overrides
    ]
    assert train(config, "student", *other) == 78
    told = capfd.readouterr().err
    assert "has other weights" in told and "Set distill.teacher to that one" in told
    assert train(config, "student", *overrides) == 0
    assert final_state(folder) == expected
    capfd.readouterr()
    assert replay.main([str(folder), "--steps", "12:24"]) == 0
    # Nothing else differs, such as what the launch says of units.
    assert "although" not in capfd.readouterr().out


def test_the_same_weights_in_another_function_are_another_teacher(config, capfd):
    runs = config.parent / "runs"
    teacher_config = runs / "teacher" / "config.yaml"
    kept = teacher_config.read_text()
    changed = kept.replace("rope_theta: 500000.0", "rope_theta: 10000.0")
    assert changed != kept
    shutil.rmtree(runs / "student" / "checkpoints" / "00000024")
    teacher_config.write_text(changed)
    try:
        assert train(config, "student", *distillation(config, "eval_at_start=true")) == 78
    finally:
        teacher_config.write_text(kept)
    told = capfd.readouterr().err
    assert "has other settings of `model` or `precision` in its config" in told
    before = find_model(TEACHER, str(runs / "teacher"), "distill.teacher=").function()
    teacher_config.write_text(kept.replace("scan_layers: true", "scan_layers: false"))
    try:
        assert find_model(TEACHER, str(runs / "teacher"), "distill.teacher=").function() == before
    finally:
        teacher_config.write_text(kept)
    assert train(config, "student", *distillation(config, "eval_at_start=true")) == 0


def test_a_run_that_learns_from_the_data_meanwhile_remembers_its_teacher(config):
    runs = config.parent / "runs"
    both = distillation(config, "checkpoint_interval=2")
    assert train(config, "changing", *both, "steps=2") == 0
    assert train(config, "changing", "checkpoint_interval=2", "steps=4") == 0
    record = json.loads((runs / "changing/checkpoints/00000004/record.json").read_text())
    assert len(record["teacher"]) == 33
    other = [word.replace("/teacher", "/alone") for word in both]
    assert train(config, "changing", *other, "steps=6") == 78
    assert train(config, "changing", *both, "steps=6") == 0


def test_a_divergence_that_is_not_finite_fails(config, tmp_path, capfd):
    run = config.parent / "runs" / "teacher"
    model, tokenizer = load_run(run)
    params = nnx.split(model)[1]
    params["head"]["kernel"].set_value(params["head"]["kernel"].get_value() * 1e38)
    write_config(tmp_path, model.config, "float32", tokenizer)
    write_weights(tmp_path, params, model.config, "float32", 10**9, print)
    tokenizer.save(tmp_path)
    capfd.readouterr()
    student = str(config.parent / "runs" / "student")
    assert evaluate.main([student, "--teacher", str(tmp_path), "--json"]) == 70
    told = capfd.readouterr()
    assert "distill on heldout is nan" in told.err
    assert json.loads(told.out)["sets"]["heldout"]["distill"] == "nan"


def test_a_hugging_face_directory_is_the_same_teacher_in_its_own_precision(config, tmp_path):
    run = config.parent / "runs" / "teacher"
    model, tokenizer = load_run(run)
    write_config(tmp_path, model.config, "float32", tokenizer)
    write_weights(tmp_path, nnx.split(model)[1], model.config, "float32", 10**9, print)
    mesh = make_mesh(MeshConfig(fsdp=2), jax.devices()[:2])
    hashes = []
    with jax.set_mesh(mesh):
        for directory in (run, tmp_path):
            found = find_model(TEACHER, str(directory), "distill.teacher=")
            assert found.precision.compute == "float32"
            _, params = found.abstract(mesh)
            hashes.append(hash_text(digests(found.load(params))))
    assert hashes[0] == hashes[1]
    write_config(tmp_path, model.config, "bfloat16", tokenizer)
    assert find_model(TEACHER, str(tmp_path), "distill.teacher=").precision.params == "bfloat16"


def test_a_teacher_with_other_tokens_or_shorter_rows_is_refused(config):
    place = str(config.parent / "runs" / "teacher")
    found = find_model(TEACHER, place, "distill.teacher=")
    vocabulary = found.model.vocab_size
    with pytest.raises(ConfigError, match=f"Set model.vocab_size={vocabulary} if the data's"):
        found.require_same_tokens(vocabulary + 8)
    with pytest.raises(ConfigError, match="Prepare the data with `--tokenizer "):
        found.require_same_tokenizer("0" * 64)
    with pytest.raises(ConfigError, match=r"Set data\.seq_length=32 or less"):
        found.require_length(33)


def test_what_is_no_teacher_is_refused(config, tmp_path):
    with pytest.raises(ConfigError, match=r"Name a directory with config\.yaml or config\.json"):
        find_model(TEACHER, str(tmp_path / "missing"), "distill.teacher=")
    step = config.parent / "runs" / "teacher" / "checkpoints" / "00000005"
    with pytest.raises(ConfigError, match="Wait for one, or name another step"):
        find_model(TEACHER, str(step), "distill.teacher=")


def test_a_damaged_teacher_is_not_put_aside(config, monkeypatch):
    """It is of another run: only the checkpoints of one's own are renamed."""
    place = config.parent / "runs" / "teacher"

    def damaged(*_):
        raise DamagedError(place, "a file of it is cut off")

    monkeypatch.setattr(reference_model, "restore_variables", damaged)
    found = find_model(TEACHER, str(place), "distill.teacher=")
    _, params = found.abstract(make_mesh(MeshConfig(fsdp=1), jax.devices()[:1]))
    with pytest.raises(StorageError, match=r"is cut off\. Name another step of it"):
        found.load(params)
