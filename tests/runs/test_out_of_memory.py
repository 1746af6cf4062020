"""A run that needs more memory than there is: refused where that can be known, reported in a
sentence elsewhere."""

import re

import jax
import pytest

from data_pipeline.base.errors import run_command
from maxtrain.checkpoint.listing import saved_steps
from maxtrain.config.load import load_config
from maxtrain.parallel import memory
from maxtrain.parallel.memory import bytes_on_device
from maxtrain.trainer import loop
from maxtrain.trainer.job import open_job
from maxtrain.trainer.run import Run

pytestmark = pytest.mark.usefixtures("this_process")


@pytest.fixture(scope="module")
def config(tmp_path_factory, tiny_run):
    return tiny_run(
        tmp_path_factory.mktemp("memory"),
        steps=4,
        checkpoint_interval=2,
        schedule={"warmup_steps": 0},
    )


def run(config, name):
    return loop.main(load_config([f"config={config}", f"run_name={name}"]))


def test_a_state_that_does_not_fit_is_refused_before_anything_is_made(config, monkeypatch, capfd):
    monkeypatch.setattr(memory, "available_memory", lambda: 80_000)
    assert run(config, "state") == 78
    said = capfd.readouterr().err
    rule = r"the training state \(weights, moments of the optimizer\) needs 0\.\d+ MiB on each device, where 0\.01 MiB of this"
    assert re.search(rule, said) and "Traceback" not in said
    assert (
        "shared by 8 CPU devices. Take a smaller model, set precision.params=bfloat16, or split it over more devices"
        in said
    )
    assert not (config.parent / "runs/state").exists()


@pytest.mark.long
def test_a_step_that_does_not_fit_is_refused_before_it_is_made(config, monkeypatch, capfd):
    job = open_job(load_config([f"config={config}"]), None)
    monkeypatch.setattr(memory, "available_memory", lambda: 8 * bytes_on_device(job.abstract))
    assert run(config, "step") == 78
    said = capfd.readouterr().err
    assert re.search(
        r"a step of 8 rows x 32 tokens, beside the training state, needs [\d.]+ MiB on each device, where",
        said,
    )
    assert (
        "Lower data.batch_size" in said
        and "`maxtrain probe` finds the largest" in said
        and "Traceback" not in said
    )
    assert saved_steps(config.parent / "runs/step/checkpoints") == {}


@pytest.mark.long
@pytest.mark.parametrize(
    "error",
    [
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 123456789 bytes."),
        ValueError("RESOURCE_EXHAUSTED: Out of memory allocating 123456789 bytes."),
        MemoryError("allocating 123456789 bytes"),
    ],
    ids=["runtime", "called", "host"],
)
def test_what_can_not_be_foreseen_says_what_was_asked_and_what_is_free(
    config, monkeypatch, capfd, error, request
):
    name = request.node.callspec.id

    def look(records, write):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Run, "look", look)
        assert run(config, name) == 70
    said = capfd.readouterr().err
    assert re.search(
        r"error: out of memory at step 1, in: step: .*allocating 123456789 bytes\. Now [\d,.]+ [GM]iB",
        said,
    )
    assert "Lower data.batch_size" in said and "Traceback" not in said
    assert run(config, name) == 0, "the run goes on where there is more memory"


def test_python_without_memory_ends_in_a_sentence(capfd):
    def job():
        raise MemoryError

    assert run_command(job) == 70
    assert "error: this machine has no memory left. End what else uses it" in capfd.readouterr().err
