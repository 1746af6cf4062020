"""Rollouts of two processes are those of one; and what one process alone finds out, both do."""

import re
import shutil

import numpy as np
import pytest

from benchmarks.additions import task
from data_pipeline.prepare import command as prepare
from maxtrain.checkpoint.listing import saved_digests
from maxtrain.observe.metrics import read_metrics
from maxtrain.rl.rollout import load
from tests.runs.test_processes import HostsRun

pytestmark = [pytest.mark.processes, pytest.mark.long]
STEPS = 4


@pytest.fixture(scope="module")
def config(tmp_path_factory, tiny_run):
    """A config file of runs on four devices; a rollout reads 8 of 25 prompts."""
    folder = tmp_path_factory.mktemp("grpo-processes")
    task.write_prompts(folder / "prompts.jsonl")
    prompts = ["--prompts", str(folder / "prompts.jsonl"), "--workers", "1"]
    assert prepare.main([str(folder / "prompts"), *prompts]) == 0
    return tiny_run(
        folder,
        texts=1,
        steps=STEPS,
        checkpoint_interval=2,
        objective="grpo",
        precision={"compute": "float32"},
        optimizer={"learning_rate": 1e-3},
        schedule={"warmup_steps": 0},
        mesh={"data": 2, "fsdp": 2, "simulated_devices": 4},
        data={
            "sources": {"text": {"path": str(folder / "prompts"), "epochs": None}},
            "seq_length": 16,
            "batch_size": 4,
            "packing": "pad",
        },
        grpo={
            "rewards": ["exact", "length(max_tokens=6)"],
            "num_generations": 4,
            "max_completion_length": 6,
            "num_iterations": 2,
            "dynamic_sampling": 1,
            "keep_rollouts": True,
        },
    )


def losses(config, run_name):
    records = read_metrics(config.parent / "runs" / run_name)
    return [record["loss"] for record in records if record["kind"] == "train"]


@pytest.fixture(scope="module")
def trained(config):
    """The same run on one process and on two."""
    for count in (1, 2):
        with HostsRun(config, f"on-{count}", count) as job:
            job.end()


@pytest.mark.usefixtures("trained")
def test_two_processes_learn_from_the_same_completions_as_one(config):
    """The completions may be those of prompts that replace others."""
    runs = config.parent / "runs"
    for name in ("00000001.npz", "00000003.npz"):
        alone, together = [load(runs / f"on-{count}" / "rollouts" / name) for count in (1, 2)]
        for array, values in alone.arrays().items():
            if array in ("sampled", "old"):
                np.testing.assert_allclose(together.arrays()[array], values, atol=1e-4)
            else:
                np.testing.assert_array_equal(together.arrays()[array], values)
        numbers = [rollout.about["numbers"] for rollout in (alone, together)]
        for name in ("reward", "reward/length", "accuracy", "groups_without_signal"):
            assert numbers[0][name] == numbers[1][name]
        assert numbers[0]["further_prompts"] > 0
        assert alone.about["outcomes"] == together.about["outcomes"]
    np.testing.assert_allclose(losses(config, "on-2"), losses(config, "on-1"), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("trained")
def test_what_one_process_alone_finds_out_both_do(config):
    """The findings are a damaged stored rollout, and a damaged reward."""
    run = config.parent / "runs" / "on-2"
    whole = saved_digests(run / "checkpoints")[STEPS]
    shutil.rmtree(run / "checkpoints" / f"{STEPS:08d}")
    path = run / "rollouts" / "00000003.npz"
    content = load(path).content()
    path.write_bytes(path.read_bytes()[:-40])
    with HostsRun(config, "on-2", 2) as job:
        job.end()
    assert f"{path.name}: it can't be read" in job.text
    assert saved_digests(run / "checkpoints")[STEPS] == whole
    assert load(path).content() == content

    # One of the processes has the prompt 0+0= among its own.
    reward = "grpo.rewards=['benchmarks.additions.task:no_number_for_zero']"
    with HostsRun(config, "faulty", 2, reward, "steps=8", "grpo.dynamic_sampling=0") as job:
        outputs = job.end(65)
    for output in outputs:
        assert re.search(r"error: process [01] on .*no_number_for_zero returned 'none'", output)


@pytest.mark.slow
def test_two_processes_train_on_what_they_have_sampled_bit_for_bit(config):
    keys = ("determinism=full", "grpo.dynamic_sampling=0", f"steps={STEPS}")
    with HostsRun(config, "exact", 2, *keys) as job:
        job.end()
    records = read_metrics(config.parent / "runs" / "exact")
    lines = [record for record in records if record["kind"] == "train"]
    assert [line["sampler_gap"] for line in lines] == [0.0] * STEPS
    assert [line["ratio"] == 1.0 for line in lines] == [True, False] * (STEPS // 2)
