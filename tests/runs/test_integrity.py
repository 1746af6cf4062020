"""A run in which a device gets a bit wrong says so before anything of it is saved, and ends well
when it is started again."""

import jax
import pytest

from maxtrain import failpoints
from maxtrain.checkpoint.listing import saved_digests
from maxtrain.config import load_config
from maxtrain.trainer.loop import main

pytestmark = pytest.mark.usefixtures("this_process")


@pytest.fixture(scope="module")
def config(tmp_path_factory, tiny_run):
    """7 steps of a tiny model on eight devices, all of which hold all of it; saved every 3."""
    checked = {"replicas_interval": 4, "repeat_interval": 5}
    sections = {
        "steps": 7,
        "checkpoint_interval": 3,
        "determinism": "full",
        "mesh": {"data": 8, "fsdp": 1},
    }
    return tiny_run(
        tmp_path_factory.mktemp("integrity"),
        **sections,
        schedule={"warmup_steps": 2},
        integrity=checked,
        precision={"compute": "float32"},
    )


def train(config, monkeypatch, run_name, faults):
    """Exit code of a run in this process, and its saved steps."""
    monkeypatch.setenv(failpoints.VARIABLE, faults)
    code = main(load_config([f"config={config}", f"run_name={run_name}"]))
    failpoints._armed.clear()
    return code, saved_digests(config.parent / "runs" / run_name / "checkpoints")


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "said", "saved"),
    [
        ("before_step:bitflip:2", "copies of arrays differ between devices after step 3", []),
        ("after_step:bitflip:4", "copies of arrays differ between devices after step 4", [3]),
        (
            "after_step:bitflip:5",
            "step 5, made twice from the same state, gave different bits",
            [3],
        ),
    ],
)
def test_the_device_is_named_and_the_next_launch_ends_as_if_nothing_had_been(
    config, monkeypatch, capsys, fault, said, saved
):
    code, undisturbed = train(config, monkeypatch, "undisturbed", "")
    assert code == 0 and list(undisturbed) == [3, 6, 7]
    capsys.readouterr()
    code, digests = train(config, monkeypatch, fault, fault)
    told = capsys.readouterr().err
    assert (
        code == 75 and list(digests) == saved and f"{said}: wrong arithmetic or memory.\n" in told
    )
    assert (
        "\n  * params." in told
        and f" on {jax.devices()[0]} of process 0 on " in told
        and str(jax.devices()[1]) not in told
    )
    assert "it goes on from the last checkpoint" in told
    code, digests = train(config, monkeypatch, fault, "")
    assert code == 0 and digests[7] == undisturbed[7]
