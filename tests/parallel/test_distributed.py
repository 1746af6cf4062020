"""Starting: the platform, and jobs of several processes."""

import importlib.metadata
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from data_pipeline.base.errors import ConfigError, LostProcessError
from maxtrain.config.schema import MeshConfig
from maxtrain.parallel import distributed as module
from maxtrain.parallel.cluster import ProcessInfo
from maxtrain.parallel.distributed import (
    GPU_FLAGS,
    PATIENCE_FLAG,
    be_deterministic,
    leave,
    start,
    wait_for_slow_devices,
    xla_knows,
)
from maxtrain.parallel.lobby import JobMembership

ROOT = Path(__file__).parents[2]
JOB = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
CLUSTERS = (
    "SLURM_JOB_NUM_NODES",
    "SLURM_NTASKS",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "JOB_COMPLETION_INDEX",
)


@pytest.fixture
def bare(monkeypatch):
    """No job in the environment, none that is started by mistake, and malloc as it was."""
    for name in (*JOB, *CLUSTERS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(
        jax.distributed, "initialize", lambda *args, **_: pytest.fail(f"initialize{args}")
    )
    monkeypatch.setattr("maxtrain.parallel.distributed.keep_host_memory", lambda: True)
    return monkeypatch


def test_a_job_of_one_process_connects_to_nothing(bare):
    start(MeshConfig(), None)
    assert jax.process_count() == 1


@pytest.mark.parametrize(
    ("config", "environment", "message"),
    [
        (
            MeshConfig(coordinator="10.0.0.1:8476"),
            {},
            r"mesh\.coordinator=10\.0\.0\.1:8476 describe.* part of a job; mesh\.num_processes and mesh\.process_id must be "
            r"known too\. Set mesh\.num_processes and mesh\.process_id, or none of the three",
        ),
        (
            MeshConfig(num_processes=2, process_id=0),
            {},
            r"mesh\.num_processes=2, mesh\.process_id=0 .*\. Set mesh\.coordinator, or",
        ),
        (
            MeshConfig(),
            {"JAX_COORDINATOR_ADDRESS": "host:1", "JAX_NUM_PROCESSES": "4"},
            r"mesh\.coordinator=host:1, mesh\.num_processes=4 .*\. Set mesh\.process_id, or",
        ),
        (
            MeshConfig(),
            {"JAX_PROCESS_ID": "0"},
            r"Set mesh\.coordinator and mesh\.num_processes, or none of the three",
        ),
        (
            MeshConfig(),
            {"JAX_NUM_PROCESSES": "two"},
            r"JAX_NUM_PROCESSES=two must be a whole number.*Set it to 2, for example",
        ),
        (
            MeshConfig(),
            {"JAX_PROCESS_ID": "x"},
            r"JAX_PROCESS_ID=x must be a whole number.*Set it to 0, for example",
        ),
    ],
)
def test_part_of_a_job_is_refused_with_what_is_missing(bare, config, environment, message):
    for name, value in environment.items():
        bare.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        start(config, None)


@pytest.mark.parametrize(
    ("config", "environment", "address", "count", "index"),
    [
        (MeshConfig(), {}, "head:1", 4, 2),
        (MeshConfig(coordinator="other:9", num_processes=3), {}, "other:9", 3, 2),
        (MeshConfig(process_id=0), {"JAX_COORDINATOR_ADDRESS": "env:5"}, "env:5", 4, 0),
    ],
)
def test_a_cluster_says_what_keys_and_environment_do_not(
    bare, config, environment, address, count, index
):
    place, calls = ProcessInfo("slurm", "head:1", 4, 2, local_count=2, local_index=1), []
    bare.setattr("maxtrain.parallel.distributed.find_place", lambda *_: place)
    bare.setattr(
        "maxtrain.parallel.distributed.local_gpus", lambda found, _: [5] if found is place else None
    )
    bare.setattr(
        "maxtrain.parallel.distributed.meet",
        lambda address, count, index, *_: JobMembership(count, index, address),
    )
    bare.setattr(
        jax.distributed, "initialize", lambda *args, **options: calls.append((args, options))
    )
    for name, value in environment.items():
        bare.setenv(name, value)
    start(config, None)
    ((args, options),) = calls
    assert (
        args == (address, count, index, [5]) and options["cluster_detection_method"] == "deactivate"
    )


def test_who_says_that_it_is_alone_is(bare):
    bare.setenv("SLURM_NTASKS", "4")
    with pytest.raises(ConfigError, match="srun"):
        start(MeshConfig(), None)
    start(MeshConfig(num_processes=1), None)


@pytest.mark.parametrize("environment", [{}, {"JAX_NUM_PROCESSES": "1"}])
def test_who_is_alone_and_should_not_be_is_told(bare, environment):
    for name, value in environment.items():
        bare.setenv(name, value)
    with pytest.raises(ConfigError, match=r"mesh\.min_processes=2, and this process is the only"):
        start(MeshConfig(min_processes=2), None, suffices=lambda had, count: True)
    start(MeshConfig(min_processes=1), None, suffices=lambda had, count: True)
    # Such as doctor, which measures what is there.
    start(MeshConfig(min_processes=2), None)


def test_a_slice_of_tpus_is_never_smaller(bare):
    bare.setattr(
        "maxtrain.parallel.distributed.find_place", lambda *_: ProcessInfo("gcetpu", "head:1", 4, 2)
    )
    with pytest.raises(
        ConfigError,
        match=r"mesh\.min_processes=2: a job of TPUs starts with all hosts of all its slices",
    ):
        start(MeshConfig(min_processes=2), None)


@pytest.mark.parametrize(
    ("config", "accelerator", "kept"),
    [
        (MeshConfig(), False, True),
        (MeshConfig(), True, False),
        (MeshConfig(platform="cpu"), True, True),
    ],
)
def test_host_memory_is_kept_where_the_cpu_computes(bare, config, accelerator, kept):
    calls = []
    bare.setattr("maxtrain.parallel.distributed.accelerator_present", lambda: accelerator)
    bare.setattr("maxtrain.parallel.distributed.keep_host_memory", lambda: calls.append(True))
    start(config, None)
    assert bool(calls) == kept


COMPILES = """
import os
import sys

import jax
import jax.numpy as jnp

from maxtrain.config.schema import MeshConfig
from maxtrain.parallel.distributed import start

start(MeshConfig(simulated_devices=int(sys.argv[1])), sys.argv[2])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.jit(lambda x: x @ x)(jnp.ones((3, 3))).block_until_ready()
print(len(os.listdir(sys.argv[2])))
"""


@pytest.mark.every_dose
@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("devices", [1, 2])
def test_programs_are_kept_for_one_cpu_and_not_for_several(tmp_path, devices):
    command = [sys.executable, "-c", COMPILES, str(devices), str(tmp_path)]
    kept = int(subprocess.check_output(command, text=True))
    assert (kept > 0) == (devices == 1)


PROGRAM = """
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import distributed

from maxtrain.config.schema import MeshConfig
from maxtrain.parallel.agreement import connect_peers
from maxtrain.parallel.distributed import start
from maxtrain.parallel.mesh import make_mesh
from maxtrain.parallel.sharding import named_sharding

described, cache = {}, sys.argv[1]
if len(sys.argv) > 2:
    described = {"coordinator": sys.argv[2], "num_processes": 2, "process_id": int(sys.argv[3])}
start(MeshConfig(simulated_devices=2, **described), cache)
assert jax.config.jax_compilation_cache_dir == cache and not jax.config.jax_enable_compilation_cache
mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=1))

def connected():
    return {key for key, _ in distributed.global_state.client.key_value_dir_get_bytes("cpu:gloo")}

connect_peers(mesh)
groups = connected()
rows = named_sharding(mesh, ("activation_batch", None), (4, 3))
mine = np.full((2, 3), 10.0 ** jax.process_index(), np.float32)
x = jax.make_array_from_process_local_data(rows, mine, (4, 3))
total = jax.jit(jnp.sum, out_shardings=named_sharding(mesh, ()))(x)
jax.jit(lambda x: x.sum(0), out_shardings=named_sharding(mesh, (None,)))(x).block_until_ready()
jax.jit(lambda x: x @ x.T, out_shardings=named_sharding(mesh, ()))(x).block_until_ready()
assert groups and connected() == groups, "a later program would fail if one process compiled 30 s longer than another"
print(jax.process_index(), jax.process_count(), jax.device_count(), jax.local_device_count(), float(total))
"""


def launch(*args, **environment):
    kept = {name: value for name, value in os.environ.items() if name not in (*JOB, *CLUSTERS)}
    command = [sys.executable, "-c", PROGRAM, *map(str, args)]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=kept | environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.mark.long
@pytest.mark.processes
def test_two_processes_make_one_mesh(tmp_path):
    """The first process is described by its config, the second by Slurm; both compute one sum over
    four devices."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address, port = f"localhost:{free.getsockname()[1]}", str(free.getsockname()[1])
    step = {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_NODEID": "0",
    }
    task = {
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "1",
        "JAX_COORDINATOR_PORT": port,
    }
    processes = [launch(tmp_path / "cache", address, 0), launch(tmp_path / "cache", **step, **task)]
    try:
        results = [process.communicate(timeout=700) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for index, (process, (out, err)) in enumerate(
        zip(processes, results)
    ):  # gloo prints too, before our line
        assert process.returncode == 0, err
        assert out.splitlines()[-1].split() == [str(index), "2", "4", "2", "66.0"]


@pytest.mark.long
@pytest.mark.every_dose
@pytest.mark.processes
@pytest.mark.skipif(
    os.environ["JAX_PLATFORMS"] != "cpu", reason="needs a machine without the device"
)
def test_a_platform_that_is_not_there_is_named_with_its_mend():
    program = (
        "from maxtrain.parallel.distributed import start\nfrom maxtrain.config.schema import MeshConfig\n"
        "try:\n    start(MeshConfig(platform='gpu'), None)\nexcept Exception as error:\n    print(type(error).__name__, error)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=700
    )
    assert result.stdout.startswith(
        "ConfigError 1 problem in the config:\n  * mesh.platform=gpu: JAX found no such device. "
    )
    assert (
        "Install maxtrain[gpu] or maxtrain[tpu] on a machine that has one, or set mesh.platform=auto."
        in result.stdout
    )


@pytest.mark.parametrize(
    ("platform", "present", "asked"),
    [("gpu", True, True), ("auto", True, True), ("auto", False, False), ("cpu", True, False)],
)
def test_only_gpus_are_asked_for_programs_that_repeat(bare, platform, present, asked):
    """The others have none that do not; XLA would end the process at a flag that it does not
    know."""
    bare.setattr(
        "maxtrain.parallel.distributed.accelerator_present",
        lambda kind="": present and kind == "nvidia",
    )
    bare.setenv("XLA_FLAGS", f"--xla_cpu_enable_fast_math=false {GPU_FLAGS[0]}")
    before = jax.config.jax_default_matmul_precision
    try:
        be_deterministic(MeshConfig(platform=platform))
        assert jax.config.jax_default_matmul_precision == "highest"
    finally:
        jax.config.update("jax_default_matmul_precision", before)
    flags = os.environ["XLA_FLAGS"].split()
    assert flags == (
        ["--xla_cpu_enable_fast_math=false", *GPU_FLAGS]
        if asked
        else ["--xla_cpu_enable_fast_math=false", GPU_FLAGS[0]]
    )


@pytest.mark.every_dose
@pytest.mark.long
@pytest.mark.processes
def test_xla_knows_the_flags_of_gpus():
    code = "import jax; jax.devices()"
    environment = os.environ | {"XLA_FLAGS": " ".join(GPU_FLAGS), "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert (result.returncode, result.stderr) == (0, "")


STALLS = """
import functools, sys, time
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from maxtrain.config.schema import MeshConfig
from maxtrain.parallel.distributed import start

def late(index, x):
    time.sleep(4 if index == 0 else 0)
    return x

start(MeshConfig(simulated_devices=2), None)
mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

@jax.jit
@functools.partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False)
def total(x):
    x = jax.pure_callback(late, jax.ShapeDtypeStruct(x.shape, x.dtype), jax.lax.axis_index("data"), x)
    return jax.lax.psum(x, "data")

print(total(jnp.ones(2)))
"""


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.skipif(os.environ["JAX_PLATFORMS"] != "cpu", reason="of CPUs")
@pytest.mark.parametrize(("seconds", "code"), [(1, -signal.SIGABRT), (None, 0)])
def test_devices_wait_for_a_slow_one_unless_the_user_says_how_long(seconds, code):
    """The other device joins the collective four seconds late; XLA begins to count when it has
    waited for one second."""
    flags = "--xla_cpu_collective_call_warn_stuck_timeout_seconds=1"
    flags += f" --{PATIENCE_FLAG}={seconds}" if seconds else ""
    environment = os.environ | {"XLA_FLAGS": flags}
    result = subprocess.run(
        [sys.executable, "-c", STALLS], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert result.returncode == code, result.stderr
    assert ("Termination timeout for `all reduce" in result.stderr) == bool(code)
    assert result.stdout == ("" if code else "[2.]\n")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", f"--{PATIENCE_FLAG}=86400"),
        (
            "--xla_cpu_enable_fast_math=false",
            f"--xla_cpu_enable_fast_math=false --{PATIENCE_FLAG}=86400",
        ),
        (f"--{PATIENCE_FLAG}=7", f"--{PATIENCE_FLAG}=7"),
        ("/etc/xla.flags", "/etc/xla.flags"),
    ],
)
def test_the_limit_of_waiting_is_added_to_the_users_flags(bare, flags, expected):
    bare.setenv("XLA_FLAGS", flags)
    wait_for_slow_devices()
    assert os.environ["XLA_FLAGS"] == expected


@pytest.mark.parametrize(
    ("installed", "plugins", "device", "possible"),
    [
        ({"libtpu"}, [], False, True),
        (set(), [], False, False),  # nothing that would be tried, so nothing to leave out
        ({"libtpu"}, [], True, False),
        ({"libtpu"}, ["cuda"], False, False),  # it may know a device that has no file
        ({"xla_cuda13"}, ["xla_cuda13"], False, True),  # it compiles, and can't do more
        ({"xla_cuda13", "nvidia"}, ["xla_cuda13"], False, False),
        ({"libtpu", "metal"}, [], False, False),
    ],
)
def test_compilers_are_left_alone_where_they_are_all_and_have_no_device(
    monkeypatch, tmp_path, installed, plugins, device, possible
):
    folder = tmp_path / "jax_plugins"
    for name in installed - {"libtpu", "nvidia"}:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").touch()

    def find_spec(name):
        if name == "jax_plugins" and folder.exists():
            return SimpleNamespace(submodule_search_locations=[str(folder)])
        return name if name in installed else None

    named = [SimpleNamespace(name=name) for name in plugins]
    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: named)
    monkeypatch.setattr(module, "accelerator_present", lambda: device)
    assert module.only_cpu_possible() == possible


@pytest.mark.parametrize(
    ("config", "asked", "possible", "platforms"),
    [
        (MeshConfig(), None, True, "cpu"),
        (MeshConfig(), None, False, None),
        (MeshConfig(), "tpu", True, "tpu"),  # JAX_PLATFORMS says it
        (MeshConfig(platform="tpu"), None, True, "tpu"),
    ],
)
def test_the_cpu_is_chosen_where_nothing_else_is_possible_and_nobody_asked_for_it(
    bare, config, asked, possible, platforms
):
    bare.setattr(module, "only_cpu_possible", lambda: possible)
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", asked)
    try:
        start(config, None)
        assert jax.config.jax_platforms == platforms
    finally:
        jax.config.update("jax_platforms", before)


def test_a_flag_that_xla_does_not_know_is_not_set(bare):
    bare.setenv("XLA_FLAGS", "")
    bare.setattr("maxtrain.parallel.distributed.PATIENCE_FLAG", "xla_cpu_not_a_flag")
    wait_for_slow_devices()
    assert os.environ["XLA_FLAGS"] == ""
    assert xla_knows("xla_cpu_enable_fast_math") and not xla_knows("xla_cpu_enable_fast")


def test_an_error_of_one_process_alone_does_not_wait_for_the_others(monkeypatch):
    ended, comes = [], threading.Event()
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(jax.distributed, "shutdown", lambda: comes.wait(60))
    leave(70, seconds=0.01)
    assert ended == []  # of a job of one process
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    leave(75, seconds=0.01)
    assert ended == [75]
    comes.set()
    leave(65, seconds=60)
    assert ended == [75], "the others have come"
    leave(75, lost=True)
    assert ended == [75, 75], "what is left of a save may still wait for the one that is lost"


@pytest.mark.parametrize(
    ("platform", "error", "said"),
    [
        (
            "auto",
            RuntimeError(
                "Unable to initialize backend 'cuda': INTERNAL: Getting local topologies failed"
            ),
            "topologies failed",
        ),
        ("cpu", AssertionError(), "jax waits for two minutes"),
    ],
)
def test_a_process_that_stands_still_before_it_has_devices_is_no_error_of_the_config(
    bare, platform, error, said
):
    """The error is jax's after two minutes; for a CPU it only logs that."""

    def devices():
        raise error

    bare.setattr(jax.distributed, "is_initialized", lambda: True)
    bare.setattr(jax, "devices", devices)
    with pytest.raises(
        LostProcessError, match=rf"did not come \(.*{said}\).*run the same command again"
    ) as caught:
        start(MeshConfig(platform=platform), None)
    assert caught.value.exit_code == 75
