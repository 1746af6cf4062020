"""Distillation on two processes is that of one: on own completions, and from files."""

import numpy as np
import pytest

from benchmarks.additions import task
from data_pipeline.prepare import command as prepare
from maxtrain.commands.teach import command as teach
from maxtrain.observe.metrics import read_metrics
from maxtrain.rl.rollout import load
from tests.runs.test_processes import HostsRun

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.usefixtures("this_process")]


def losses(config, run_name):
    records = read_metrics(config.parent / "runs" / run_name)
    return [
        record["distill"]
        for record in records
        if record["kind"] in ("train", "eval") and "distill" in record
    ]


def test_two_processes_learn_what_one_learns(tmp_path, tiny_run, monkeypatch):
    task.write_prompts(tmp_path / "prompts.jsonl")
    prompts = ["--prompts", str(tmp_path / "prompts.jsonl"), "--workers", "1", "--holdout", "0.2"]
    assert prepare.main([str(tmp_path / "prompts"), *prompts]) == 0
    config = tiny_run(
        tmp_path,
        texts=10,
        steps=4,
        checkpoint_interval=4,
        precision={"compute": "float32"},
        optimizer={"learning_rate": 1e-3},
        schedule={"warmup_steps": 0},
        mesh={"data": 2, "fsdp": 2, "simulated_devices": 4},
    )
    with HostsRun(config, "teacher", 1, "seed=7") as job:
        job.end()
    teacher = tmp_path / "runs" / "teacher"
    monkeypatch.setattr(teach, "start", lambda mesh, cache: None)
    assert teach.main([str(teacher), str(tmp_path / "data"), "--top", "4"]) == 0
    on_policy = [
        "objective=distill",
        f"distill.teacher={teacher}",
        "distill.on_policy=true",
        "distill.weight=1",
        "distill.kind=reverse",
        "distill.max_completion_length=6",
        "distill.num_generations=4",
        "distill.keep_rollouts=true",
        f"data.sources.text.path={tmp_path / 'prompts' / 'train'}",
        "data.packing=pad",
        "data.seq_length=16",
        "data.batch_size=4",
        f"eval.sets.held_out.path={tmp_path / 'prompts' / 'eval'}",
        "eval_at_start=true",
    ]
    stored = [
        "objective=distill",
        "distill.stored=teacher",
        "distill.top=4",
        "data.packing=bins",
        "data.on_long=truncate",
    ]
    for name, words in (("own", on_policy), ("files", stored)):
        for count in (1, 2):
            with HostsRun(config, f"{name}-{count}", count, *words) as job:
                job.end()
        together = losses(config, f"{name}-2")
        assert len(together) >= 4
        np.testing.assert_allclose(together, losses(config, f"{name}-1"), rtol=1e-3, atol=1e-4)
    for step in range(1, 5):
        path = f"rollouts/{step:08d}.npz"
        of_one, of_two = [load(tmp_path / "runs" / f"own-{n}" / path) for n in (1, 2)]
        np.testing.assert_array_equal(of_two.tokens, of_one.tokens)
