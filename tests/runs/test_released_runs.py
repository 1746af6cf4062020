"""A run that a released version began goes on, bit for bit from its checkpoint, and its weights begin
another. The fixture of each release is made by tests/data/releases/make.py."""

import json
import shutil
import tarfile
from pathlib import Path

import jax
import pytest

from maxtrain import failpoints
from maxtrain.checkpoint.listing import latest_state, saved_digests
from maxtrain.checkpoint.manager import Checkpoints
from maxtrain.config import load_config
from maxtrain.observe.metrics import read_metrics
from maxtrain.ops.digest import digests, hash_text, tree_digests
from maxtrain.train_step.state import changing_part, policy_variables, saved_part
from maxtrain.trainer.job import open_job
from maxtrain.trainer.loop import main
from tests.data.releases.make import HERE, OPTIONS

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("this_process")]
RELEASES = sorted(path.name for path in HERE.glob("run-of-*.tar.gz"))


@pytest.fixture(params=RELEASES)
def release(request, tmp_path, monkeypatch) -> Path:
    """Three runs of three steps, beside their data, and the numbers of all six steps as the version
    that began them made them, on another machine."""
    with tarfile.open(HERE / request.param) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def words_of(name):
    return ["config=tiny.yaml", f"run_name={name}", *OPTIONS[name]]


def go_on(name, *overrides):
    return main(load_config([*words_of(name), *overrides]))


def restored_arrays(name):
    """Digests of the state of step 3 as it is restored, by the names of now; and the one of all
    parameters."""
    folder = Path("runs", name, "checkpoints")
    opened = open_job(load_config(words_of(name)), latest_state(folder))
    checkpoints = Checkpoints(folder, opened.config.checkpoint)
    with jax.set_mesh(opened.mesh):
        state, _ = checkpoints.restore(saved_part(opened.abstract), 3)
        checkpoints.close()
        return tree_digests(changing_part(state)), hash_text(digests(policy_variables(state)))


@pytest.mark.parametrize("name", list(OPTIONS))
def test_a_run_is_restored_bit_for_bit_and_goes_on(release, name, monkeypatch):
    """Bits of later steps are those of this machine: a run that is stopped once more makes them,
    too. What the other machine computed is near."""
    then = json.loads((release / "numbers.json").read_text())[name]
    runs = release / "runs"
    saved = saved_digests(runs / name / "checkpoints")[3]
    restored, of_params = restored_arrays(name)
    assert restored.items() <= saved.items() and "params.layers.0.attention.q.kernel" in restored
    assert any(array.startswith("opt_state.") for array in restored)
    _, _, _, params_hash = then[2]
    assert of_params == params_hash

    shutil.copytree(runs / name, release / "begun")
    assert go_on(name) == 0
    made = []
    for record in read_metrics(runs / name):
        if record["kind"] == "train":
            made.append([record["step"], record["loss"], record["grad_norm"]])
    for (step, loss, norm), (then_step, then_loss, then_norm, _) in zip(made, then, strict=True):
        assert step == then_step
        assert loss == pytest.approx(float.fromhex(then_loss), rel=1e-3)
        assert norm == pytest.approx(float.fromhex(then_norm), rel=1e-2)
    whole = saved_digests(runs / name / "checkpoints")
    assert whole[3].keys() == whole[6].keys()

    shutil.move(runs / name, release / "whole")
    shutil.move(release / "begun", runs / name)
    with monkeypatch.context() as patch:
        patch.setenv(failpoints.VARIABLE, "after_step:nan:6")
        assert go_on(name, "checkpoint_interval=1") == 75
    assert go_on(name) == 0
    assert saved_digests(runs / name / "checkpoints")[6] == whole[6]


def test_weights_of_a_run_begin_another(release, capsys):
    begun = ("run_name=next", "checkpoint.init_from=runs/adamw", "steps=1")
    assert main(load_config(["config=tiny.yaml", *begun, "schedule.warmup_steps=0"])) == 0
    assert "12 of 12 parameters loaded" in capsys.readouterr().out
