"""Runs that learn from rewards of their own completions: stopped anywhere they go on bit for bit,
what they read is stored, and what can't work is refused."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from benchmarks.additions import task
from data_pipeline.base.errors import ConfigError, DataError
from data_pipeline.prepare import command as prepare
from maxtrain import cli
from maxtrain.checkpoint.listing import saved_digests
from maxtrain.commands import replay
from maxtrain.config import load_config
from maxtrain.observe.metrics import read_metrics
from maxtrain.rl.rollout import load
from maxtrain.trainer.loop import main

pytestmark = pytest.mark.usefixtures("this_process")
STEPS = 4
# Of times, and what follows from them.
NOT_REPEATED = ("seconds", "per_second", "bytes", "mfu")


@pytest.fixture(scope="module")
def config(tmp_path_factory, tiny_run) -> Path:
    """A config file beside prompts, and a text that is none."""
    folder = tmp_path_factory.mktemp("grpo")
    task.write_prompts(folder / "prompts.jsonl")
    prompts = ["--prompts", str(folder / "prompts.jsonl"), "--workers", "1"]
    assert prepare.main([str(folder / "prompts"), *prompts]) == 0
    return tiny_run(
        folder,
        texts=10,
        steps=STEPS,
        checkpoint_interval=1,
        checkpoint={"keep": STEPS},
        objective="grpo",
        precision={"compute": "float32"},
        optimizer={"learning_rate": 1e-2},
        schedule={"warmup_steps": 0},
        data={
            "sources": {"text": {"path": str(folder / "prompts"), "epochs": None}},
            "seq_length": 16,
            "batch_size": 8,
            "packing": "pad",
        },
        grpo={
            "rewards": ["length(max_tokens=6)"],
            "num_generations": 4,
            "max_completion_length": 6,
            "num_iterations": 2,
        },
    )


def train(config: Path, run_name: str, *overrides: str) -> int:
    """Exit code of a run in this process; it has a reward that needs no other process."""
    return main(load_config([f"config={config}", f"run_name={run_name}", *overrides]))


def final(config: Path, run_name: str) -> dict:
    return saved_digests(config.parent / "runs" / run_name / "checkpoints")[STEPS]


def records(config: Path, run_name: str) -> list[dict]:
    """Return the training records, without the values that depend on the machine."""
    found = []
    for record in read_metrics(config.parent / "runs" / run_name):
        if record["kind"] == "train":
            found.append({k: v for k, v in record.items() if not _is_of_the_machine(k)})
    return found


def _is_of_the_machine(name: str) -> bool:
    return any(part in name for part in NOT_REPEATED)


def rollouts(config: Path, run_name: str) -> dict[str, str]:
    folder = config.parent / "runs" / run_name / "rollouts"
    return {path.name: load(path).content() for path in sorted(folder.glob("*.npz"))}


@pytest.fixture(scope="module")
def straight(config) -> dict:
    """The last state of a run that nobody stopped."""
    assert train(config, "straight") == 0
    return final(config, "straight")


@pytest.mark.long
def test_weights_on_hosts_sample_and_learn_the_same(config, straight):
    settings = ("train.on_host=all", "optimizer.on_host=true", "model.remat=full")
    assert train(config, "on-hosts", *settings, "observe.num_samples=2") == 0
    for ours, theirs in zip(records(config, "on-hosts"), records(config, "straight"), strict=True):
        for name in ("reward", "completion_length", "loss", "grad_norm"):
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-3, atol=1e-6, err_msg=name)


@pytest.mark.long
def test_what_is_recorded(config, straight):
    assert straight
    lines = records(config, "straight")
    first = lines[0]
    # Each completion has 1 to 6 tokens, of which the reward is a sixth.
    assert first["reward"] == first["reward/length"]
    np.testing.assert_allclose(first["completion_length"], -6 * first["reward"], rtol=1e-6)
    assert first["reward_outcomes/length/ok"] == 2 * 8 * 4
    assert 0 < first["truncated"] <= 1
    assert first["groups_without_signal"] < 1
    assert 1 <= first["longest_completion"] <= 6
    assert [line["ratio"] == 1.0 for line in lines] == [True, False, True, False]
    assert max(line["sampler_gap"] for line in lines) < 1e-5
    times = read_metrics(config.parent / "runs" / "straight")[0]
    for name in ("sampling_seconds", "reward_seconds", "scoring_seconds"):
        assert times[name] > 0
    assert times["sampled_tokens_per_second"] > 0


@pytest.mark.long
@pytest.mark.parametrize("stopped_at", [2, 3])
def test_a_run_that_was_stopped_goes_on_bit_for_bit(config, straight, stopped_at):
    """It is stopped between two rollouts, and within one, where the stored one is read."""
    name = f"stopped{stopped_at}"
    shutil.copytree(config.parent / "runs" / "straight", config.parent / "runs" / name)
    run = config.parent / "runs" / name
    for step in range(stopped_at + 1, STEPS + 1):
        shutil.rmtree(run / "checkpoints" / f"{step:08d}")
    made = rollouts(config, "straight")
    assert list(made) == ["00000001.npz", "00000003.npz"]
    if stopped_at == 2:
        # Nothing of the next rollout is there, and no checkpoint needs the first one.
        (run / "rollouts" / "00000003.npz").unlink()
        shutil.rmtree(run / "checkpoints" / "00000001")
    assert train(config, name) == 0
    assert final(config, name) == straight
    assert records(config, name) == records(config, "straight")
    if stopped_at == 2:
        del made["00000001.npz"]
    assert rollouts(config, name) == made


@pytest.mark.long
def test_a_damaged_rollout_is_named_and_made_again(config, straight, capfd):
    """It is made at its first step by the same weights, so that it is the same."""
    run = config.parent / "runs" / "damaged"
    shutil.copytree(config.parent / "runs" / "straight", run)
    for step in (3, 4):
        shutil.rmtree(run / "checkpoints" / f"{step:08d}")
    path = run / "rollouts" / "00000003.npz"
    path.write_bytes(path.read_bytes()[:-40])
    capfd.readouterr()
    assert train(config, "damaged") == 0
    told = "".join(capfd.readouterr())
    assert f"{path.name}: it can't be read" in told
    assert "It is made again." in told
    assert final(config, "damaged") == straight


@pytest.mark.long
def test_adapters_are_compared_with_the_model_without_them(config, straight):
    """At the beginning they are equal, so that the divergence is 0; a run that was stopped within a
    rollout goes on bit for bit."""
    begins = f"checkpoint.init_from={config.parent / 'runs' / 'straight'}"
    options = [begins, "model.lora.rank=2", "grpo.beta=0.1", "optimizer.learning_rate=0.1"]
    assert train(config, "adapters", *options) == 0
    lines = records(config, "adapters")
    np.testing.assert_allclose(lines[0]["kl"], 0.0, atol=1e-6)
    assert lines[-1]["kl"] > 1e-4
    whole = final(config, "adapters")
    shutil.rmtree(config.parent / "runs" / "adapters" / "checkpoints" / "00000004")
    assert train(config, "adapters", *options) == 0
    assert final(config, "adapters") == whole


AHEAD = ["steps=6", "grpo.staleness=1", "grpo.importance_sampling_cap=2", "checkpoint.keep=6"]


@pytest.fixture(scope="module")
def ahead(config) -> Path:
    """A run whose rollouts are sampled one ahead of those that are learnt from."""
    assert train(config, "ahead", *AHEAD) == 0
    return config.parent / "runs" / "ahead"


@pytest.mark.long
def test_rollouts_are_sampled_by_the_weights_before_the_steps_that_read_the_last_one(config, ahead):
    made = [load(ahead / "rollouts" / f"{step:08d}.npz").about for step in (1, 3, 5)]
    assert [about["sampled_after"] for about in made] == [0, 0, 2]
    assert made[0]["weights"] == made[1]["weights"] == made[0]["scored_by"]
    assert made[2]["weights"] == made[1]["scored_by"] != made[0]["scored_by"]
    lines = records(config, "ahead")
    assert [line["steps_behind"] for line in lines] == [0, 0, 2, 2, 2, 2]
    # Nothing has changed when the first is read; afterwards both policies are apart.
    np.testing.assert_allclose(lines[0]["importance_weight"], 1.0, atol=1e-5)
    assert max(line["sampler_gap"] for line in lines[2:]) > 1e-3
    assert all(abs(line["importance_weight"] - 1) > 1e-6 for line in lines[2:])
    assert [line["ratio"] == 1.0 for line in lines] == [True, False] * 3


@pytest.mark.long
@pytest.mark.parametrize("stopped_at", [3, 4])
def test_what_was_sampled_ahead_is_read_by_a_run_that_goes_on(config, ahead, capfd, stopped_at):
    """Within the steps that read a rollout, and behind them, where the weights that have sampled
    the next one are gone."""
    name = f"ahead{stopped_at}"
    run = config.parent / "runs" / name
    shutil.copytree(ahead, run)
    for step in range(stopped_at + 1, 7):
        shutil.rmtree(run / "checkpoints" / f"{step:08d}")
    (run / "rollouts" / "00000005.npz").unlink()
    made = rollouts(config, "ahead")
    whole = saved_digests(ahead / "checkpoints")[6]
    capfd.readouterr()
    assert train(config, name, *AHEAD) == 0
    assert "made again" not in "".join(capfd.readouterr())
    assert saved_digests(run / "checkpoints")[6] == whole
    assert records(config, name) == records(config, "ahead")
    again = rollouts(config, name)
    assert "00000005.npz" in again
    assert again.items() <= made.items()


@pytest.mark.long
def test_a_replay_reads_what_is_stored_or_makes_it_again(config, ahead, capfd):
    capfd.readouterr()
    assert replay.main([str(ahead), "--steps", "0:6", "--rollouts", "again"]) == 0
    told = capfd.readouterr().out
    assert "steps 1 to 6 again" in told
    assert "all the same bit for bit" in told
    assert "not made again" not in told
    run = config.parent / "runs" / "altered"
    shutil.copytree(ahead, run)
    path = run / "rollouts" / "00000005.npz"
    stored = load(path)
    stored._replace(advantages=stored.advantages + 1).save(path)
    assert replay.main([str(run), "--steps", "3:6"]) == 70
    told = capfd.readouterr().err
    assert "step 5 is the first that differs" in told
    assert "the stored rollout is not the one that the run has read" in told


@pytest.mark.slow
def test_groups_are_replaced_in_what_was_sampled_ahead(config, capfd):
    """The replacements are sampled with the weights that are about to train: a run that was stopped
    where the weights of the first samples are gone goes on bit for bit, and a replay makes the
    same."""
    options = [*AHEAD, "grpo.dynamic_sampling=2", "grpo.keep_rollouts=true"]
    assert train(config, "filled", *options) == 0
    run = config.parent / "runs" / "filled"
    lines = records(config, "filled")
    assert [line["steps_behind"] for line in lines] == [0, 0, 2, 2, 2, 2]
    assert all(line["further_prompts"] > 0 for line in lines)
    assert any(line["groups_replaced"] > 0 for line in lines[2:])
    made = rollouts(config, "filled")
    whole = saved_digests(run / "checkpoints")[6]
    for step in (5, 6):
        shutil.rmtree(run / "checkpoints" / f"{step:08d}")
    (run / "rollouts" / "00000005.npz").unlink()
    capfd.readouterr()
    assert train(config, "filled", *options) == 0
    assert "made again" not in "".join(capfd.readouterr())
    assert saved_digests(run / "checkpoints")[6] == whole
    assert rollouts(config, "filled") == made
    assert replay.main([str(run), "--steps", "0:6", "--rollouts", "again"]) == 0
    told = capfd.readouterr().out
    assert "all the same bit for bit" in told
    assert "not made again" not in told


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["grpo.staleness=1"], "Set grpo.importance_sampling_cap=2"),
        (["grpo.rewards=[]"], "objective=grpo needs a reward"),
        (["data.packing=bins"], "Set data.packing=pad"),
        (["data.seq_length=9"], "prompt 0 has 5 tokens"),
        (["grpo.rewards=[lenght]"], "there is no reward 'lenght'"),
        (["grpo.rewards=['length(6)']"], "whose options can't be read"),
        (
            ["data.sources.text.path={data}", "data.on_long=truncate"],
            "holds documents, and objective=grpo completes prompts",
        ),
        (["grpo.beta=0.1"], "compares the policy with a reference, and there is none"),
    ],
)
def test_what_can_not_work_is_refused(config, capfd, overrides, told):
    overrides = [text.replace("{data}", str(config.parent / "data")) for text in overrides]
    capfd.readouterr()
    try:
        code = train(config, "refused", *overrides)
    except ConfigError as error:
        # The config itself is refused before a run begins.
        assert told in str(error)
        return
    assert code == 78
    assert told in capfd.readouterr().err


FUNCTIONS = "tests.rl.rewards.functions"


@pytest.mark.long
@pytest.mark.parametrize("name", ["always_raises", "always_none"])
def test_a_run_whose_rewards_never_apply_ends_with_an_error(config, name, capfd):
    assert train(config, name, f"grpo.rewards=['{FUNCTIONS}:{name}']") == DataError.exit_code
    assert f"{FUNCTIONS}:{name}" in capfd.readouterr().err
    assert not saved_digests(config.parent / "runs" / name / "checkpoints")


@pytest.mark.long
def test_the_first_failure_of_a_reward_is_printed(config, capfd):
    rewards = f"grpo.rewards=['{FUNCTIONS}:always_raises','length(max_tokens=6)']"
    assert train(config, "one-fails", rewards, "steps=2") == 0
    said = capfd.readouterr()
    assert (said.out + said.err).count("no such judge") == 1


@pytest.mark.long
def test_what_a_step_read_can_be_shown(config, straight, capsys):
    run = str(config.parent / "runs" / "straight")
    for step in (1, STEPS):
        assert cli.main(["plan", run, "--step", str(step)]) == 0
        assert "Prompts of the step" in capsys.readouterr().out
    assert cli.main(["plan", run]) == 0
