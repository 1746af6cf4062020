"""Records of launches: written, read, found by step, and compared."""

import dataclasses
import importlib.metadata
import json
import subprocess

import jax
import pytest
import yaml

import maxtrain
from maxtrain.config import to_yaml
from maxtrain.config.across.attention_choice import KernelChoice
from maxtrain.config.schema import (
    MeshConfig,
    ModelConfig,
    ObserveConfig,
    OptimizerConfig,
    RoutingConfig,
    RunConfig,
)
from maxtrain.observe.launches import (
    append_launch,
    describe_launch,
    git_revision,
    launch_changes,
    launch_differences,
    launch_of,
    launch_record,
    read_launches,
    version_of,
)
from maxtrain.parallel.mesh import make_mesh

CHOICE = KernelChoice("xla", "since devices are CPUs")


@pytest.fixture
def record(monkeypatch):
    patience = (
        "--xla_cpu_collective_call_terminate_timeout_seconds=86400"  # says nothing about numbers
    )
    monkeypatch.setenv("XLA_FLAGS", f"--xla_cpu_enable_fast_math=false {patience}")
    monkeypatch.setenv("JAX_PROCESS_ID", "3")
    monkeypatch.setattr("sys.argv", ["train.py", "config=a b"])
    mesh = make_mesh(MeshConfig(data=2, fsdp=4))
    config = to_yaml(RunConfig(seed=7, determinism="full"))
    return launch_record(config, CHOICE, mesh, "abc", 20)


def test_a_record_says_what_makes_numbers(record):
    assert record["versions"]["jax"] == jax.__version__ and record["versions"]["python"].startswith(
        "3."
    )
    assert record["command"] == "train.py 'config=a b'" and (record["step"], record["data"]) == (
        20,
        "abc",
    )
    assert (
        record["flags"].get("XLA_FLAGS") == "--xla_cpu_enable_fast_math=false"
        and "JAX_PROCESS_ID" not in record["flags"]
    )
    assert (
        record["devices"]["count"] == 8 and record["mesh"]["fsdp"] == 4 and record["processes"] == 1
    )
    assert (record["determinism"], record["seed"], record["kernels"]) == (
        "full",
        7,
        {"attention": "xla"},
    )
    assert yaml.safe_load(record["config"])["model"]["attention"] == "auto"
    assert record["reasons"] == {"attention": "since devices are CPUs"}
    assert record["devices"]["kind"] in describe_launch(
        record
    ) and "determinism full" in describe_launch(record)


def test_the_kernel_of_experts_is_recorded_where_there_are_some():
    config = RunConfig(model=ModelConfig(family="mixtral", routing=RoutingConfig(kernel="ragged")))
    mesh = make_mesh(MeshConfig(data=2, fsdp=4))
    record = launch_record(to_yaml(config), CHOICE, mesh, "abc", 0)
    assert record["kernels"] == {"attention": "xla", "experts": "ragged"}
    before = record | {"kernels": {"attention": "xla"}}
    assert launch_differences(before, record) == {}


def test_a_kernel_of_attention_is_the_same_whether_it_was_named_or_chosen(record):
    named = RunConfig(seed=7, determinism="full", model=ModelConfig(attention="xla"))
    said = record | {
        "config": to_yaml(named),
        "reasons": {"attention": "as model.attention says"},
    }
    assert launch_changes(record, said) == launch_differences(record, said) == {}
    older = {name: value for name, value in said.items() if name not in ("kernels", "reasons")}
    assert set(launch_differences(older, said)) == {"kernels.attention"}
    other = record | {"kernels": {"attention": "flash"}}
    different = {"kernels.attention", "config.model.attention"}
    assert set(launch_differences(record, other)) == different
    assert launch_differences(record, other)["config.model.attention"] == ("xla", "flash")


def test_maxtrain_has_a_version_where_it_is_run_from_its_folder(monkeypatch):
    installed = version_of("jax")
    assert installed == jax.__version__

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert version_of("maxtrain") == maxtrain.__version__


def test_launches_are_appended_and_found_by_the_steps_they_did(record, tmp_path):
    assert read_launches(tmp_path) == [] and launch_of([], 5) is None
    for step in (
        0,
        20,
        8,
    ):  # killed after a checkpoint at 20, and later somebody removed all but that of step 8
        append_launch(tmp_path, record | {"step": step})
    with open(tmp_path / "launches.jsonl", "a") as file:
        file.write('{"torn')
    launches = read_launches(tmp_path)
    assert launches[1] == json.loads(json.dumps(record))
    assert [launches.index(launch_of(launches, step)) for step in (1, 8, 9, 21, 99)] == [
        0,
        0,
        2,
        2,
        2,
    ]


def test_differences_are_those_that_may_change_numbers(record):
    assert (
        launch_differences(record, record | {"time": "later", "command": "other", "step": 3}) == {}
        and launch_differences(record, record | {"units": {"z": "nats"}}) == {}
        and launch_changes(record, record | {"device_bytes": {"parameters": 1}}) == {}
    )
    other = record | {
        "versions": record["versions"] | {"jax": "0.0.1"},
        "flags": {**record["flags"], "XLA_FLAGS": ""},
        "git": "other",
    }
    config = RunConfig(
        seed=7, determinism="full", run_name="b", log_interval=3, observe=ObserveConfig(plot=False)
    )
    other["config"] = to_yaml(dataclasses.replace(config, optimizer=OptimizerConfig(beta1=0.5)))
    found = launch_differences(record, other)
    assert set(found) == {"versions.jax", "flags.XLA_FLAGS", "git", "config.optimizer.beta1"}
    assert found["versions.jax"] == (jax.__version__, "0.0.1") and found["flags.XLA_FLAGS"][1] == ""
    assert launch_differences(record, {})["seed"] == ("7", "nothing")


def test_the_revision_is_that_of_a_checkout_of_ours(tmp_path):
    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        return subprocess.run(
            ["git", "-C", str(tmp_path), *identity, *arguments],
            check=True,
            capture_output=True,
            text=True,
        )

    assert git_revision(tmp_path) is None
    git("init", "-q")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "a.py").write_text("a = 1")
    assert git_revision(tmp_path) is None, "nothing is committed yet"
    git("add", "-A")
    git("commit", "-qm", "one")
    revision = git("rev-parse", "HEAD").stdout.strip()
    assert git_revision(tmp_path) == revision
    assert git_revision(tmp_path / "package") is None, (
        "installed inside a repository of somebody else"
    )
    (tmp_path / "package" / "a.py").write_text("a = 2")
    assert git_revision(tmp_path) == f"{revision}+changes"


def test_a_launch_after_a_torn_line_is_a_line_of_its_own(record, tmp_path):
    append_launch(tmp_path, record | {"step": 0})
    with open(tmp_path / "launches.jsonl", "a") as file:
        file.write('{"step": 7, "ver')
    append_launch(tmp_path, record | {"step": 8})
    assert [launch["step"] for launch in read_launches(tmp_path)] == [0, 8]


@pytest.mark.parametrize("config", ["bomb", "model: 3", "[]", "", 5, None])
def test_launches_are_compared_whatever_their_config_is(record, config):
    if config == "bomb":
        config = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
            f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 20)
        )
    assert launch_changes(record, record | {"config": config})


def test_a_run_without_git_has_no_revision(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_revision(tmp_path) is None
    assert dataclasses.asdict(RunConfig())["determinism"] == "seeded"
