"""Runs that learn by PPO: stopped within a rollout they go on bit for bit, what they read is stored
and made again alike, and what is exported is the model of text."""

import shutil

import numpy as np
import pytest
from flax import nnx

from maxtrain.commands import replay
from maxtrain.rl.rollout import load
from maxtrain.trainer.saved_run import load_run
from tests.runs.test_grpo_runs import STEPS, config, final, records, rollouts, train
from tests.support.preference_runs import planned

__all__ = ["config"]

pytestmark = [pytest.mark.usefixtures("this_process"), pytest.mark.long]
PPO = ["objective=ppo", "model.value=true", "grpo.num_generations=1", "ppo.vf_coef=0.5"]
PPO += ["ppo.missing_eos_penalty=0.5", "model.lora.rank=2", "optimizer.learning_rate=0.05"]


@pytest.fixture(scope="module")
def learnt(config):
    """A run with adapters, whose reference is the model without them."""
    run = config.parent / "runs" / "ppo"
    assert train(config, "ppo", *PPO) == 0
    return run


def test_a_run_goes_on_and_is_replayed_bit_for_bit(config, learnt, capfd):
    lines = records(config, "ppo")
    first = lines[0]
    assert [line["ratio"] == 1.0 for line in lines] == [True, False, True, False]
    # Nothing is expected at the beginning, and then something is.
    assert first["value"] == 0.0
    assert lines[-1]["value"] < -0.01
    np.testing.assert_allclose(first["kl"], 0.0, atol=1e-6)
    assert max(line["sampler_gap"] for line in lines) < 1e-5
    # Without a divergence yet, a completion has its reward and, if it was cut, the penalty.
    np.testing.assert_allclose(
        first["score"], first["reward"] - 0.5 * first["truncated"], atol=1e-6
    )
    assert first["explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert "groups_without_signal" not in first
    whole = final(config, "ppo")
    assert any(name.endswith("value.kernel") for name in whole)
    made = rollouts(config, "ppo")
    killed = config.parent / "runs" / "killed"
    shutil.copytree(learnt, killed)
    shutil.rmtree(killed / "checkpoints" / f"{STEPS:08d}")
    assert train(config, "killed", *PPO) == 0
    assert final(config, "killed") == whole
    assert records(config, "killed") == lines
    assert rollouts(config, "killed") == made
    capfd.readouterr()
    assert replay.main([str(learnt), "--steps", "0:4", "--rollouts", "again"]) == 0
    told = capfd.readouterr().out
    assert "all the same bit for bit" in told
    assert "not made again" not in told
    second = load(learnt / "rollouts" / "00000003.npz")
    assert np.abs(second.values).max() > 0
    np.testing.assert_allclose(second.token_advantages.mean(), 0.0, atol=1e-9)


def test_plan_shows_the_prompts_of_a_step(learnt, capsys):
    for step in (1, STEPS):
        shown = planned(learnt, step, capsys)
        assert shown.startswith(f"step {step} of {STEPS}:")
        assert shown.endswith("as the launch that made it has them on record.\n")


def test_the_value_is_no_part_of_the_model_of_text(learnt, tmp_path):
    """A run that begins with its weights has a new value."""
    model, _ = load_run(learnt)
    assert model.value is None
    assert not model.config.value

    names = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model))]
    assert not any(name.split(".")[0] == "value" for name in names)
