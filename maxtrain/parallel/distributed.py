"""Starting: the platform, the processes of a job, and the host's memory.

Called once, before the first device is used.
"""

import contextlib
import ctypes
import functools
import importlib.metadata
import importlib.util
import math
import mmap
import os
import pkgutil
import platform
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import jax

from data_pipeline.base.errors import ConfigError, LostProcessError
from maxtrain import ENDS
from maxtrain.config.schema import MeshConfig
from maxtrain.parallel.agreement import LOST
from maxtrain.parallel.cluster import find_place, local_gpus
from maxtrain.parallel.rendezvous import meet

# No atomic additions in any order, no algorithm chosen by a race.
# https://openxla.org/xla/determinism
GPU_FLAGS = ("--xla_gpu_deterministic_ops=true", "--xla_gpu_exclude_nondeterministic_ops=true")
# In each collective, XLA waits for all devices of a CPU for 20 s, says so, and ends the process
# another 40 s later.
PATIENCE_FLAG = "xla_cpu_collective_call_terminate_timeout_seconds"
_PATIENCE_SECONDS = 86_400
# Names of glibc's mallopt(3).
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_M_ARENA_MAX = -8


def start(
    config: MeshConfig,
    compilation_cache: str | None,
    deterministic: bool = False,
    suffices: Callable[[int, int], bool] | None = None,
) -> int:
    """Selects the platform, connects the processes, and turns on the cache of compiled programs,
    which several CPU devices go without.

    Returns how many processes were requested, by the cluster or by mesh.planned_processes. There
    are fewer if some did not come, and at least mesh.min_processes did.

    Args:
        config: the `mesh` section; what is null there comes from JAX_COORDINATOR_ADDRESS,
            JAX_NUM_PROCESSES and JAX_PROCESS_ID, and then from the cluster itself; see cluster.py.
        compilation_cache: directory, or None.
        deterministic: only programs that give the same bits every time, with products in full
            precision.
        suffices: whether the job can run, given the requested processes and those that came;
            None: with all only.

    Raises:
        ConfigError: the requested platform is not there, or only part of a multi-process job is
            described.
        LostProcessError: another process connected, and then did not start its devices.
    """
    _select_platform(config)
    if compilation_cache:
        _keep_programs(Path(compilation_cache).expanduser())
    if deterministic:
        be_deterministic(config)
    if not accelerator_present() or config.platform == "cpu" or config.simulated_devices:
        keep_host_memory()
        wait_for_slow_devices()
    num_processes = _connect(config, suffices)
    _start_devices(config)
    if jax.device_count() > 1 and jax.default_backend() == "cpu":
        # XLA forgets, of a program for CPUs that it reads, in which order loops communicate and
        # what is around them, so that devices wait for each other forever. And of several
        # processes only process 0 would find a program there, and wait for others, who compile.
        jax.config.update("jax_enable_compilation_cache", False)
    return max(num_processes or jax.process_count(), config.planned_processes or 0)


def _select_platform(config: MeshConfig) -> None:
    if config.platform == "gpu":
        jax.config.update("jax_platforms", "cuda")
    elif config.platform != "auto":
        jax.config.update("jax_platforms", config.platform)
    elif jax.config.jax_platforms is None and only_cpu_possible():
        jax.config.update("jax_platforms", "cpu")
    if config.simulated_devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", config.simulated_devices)


def _keep_programs(folder: Path) -> None:
    """Turns on the cache of compiled programs."""
    folder.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def _start_devices(config: MeshConfig) -> None:
    try:
        jax.devices()
    # jax only asserts that a device exists when its plugin is not installed.
    except (RuntimeError, AssertionError) as error:
        # A CPU is always there: where that is missing, jax has only logged why.
        no_cpu = isinstance(error, AssertionError) and config.platform in ("auto", "cpu")
        if jax.distributed.is_initialized() and (no_cpu or LOST.search(str(error))):
            what = (str(error).strip() or "jax waits for two minutes").splitlines()[0][:300]
            rule = f"the devices of another process of this job did not come ({what})"
            raise LostProcessError(
                f"{rule}. See the others' logs, then run the same command again."
            ) from error
        found = str(error)
        if not found or "Unable to initialize backend" in found:
            found = "JAX found no such device"
        fix = "Install maxtrain[gpu] or maxtrain[tpu] on a machine that has one"
        raise ConfigError(
            f"mesh.platform={config.platform}: {found}. {fix}, or set mesh.platform=auto."
        ) from error


def be_deterministic(config: MeshConfig) -> None:
    """Asks the compiler for programs that repeat bit for bit.

    Compilers for CPUs and TPUs make no others. XLA ends the process if it does not know a flag, so
    a platform's flags are set only where it is used.
    """
    jax.config.update("jax_default_matmul_precision", "highest")
    uses_gpu = config.platform == "gpu"
    if config.platform == "auto" and not config.simulated_devices:
        uses_gpu = accelerator_present("nvidia")
    if uses_gpu:
        flags = os.environ.get("XLA_FLAGS", "").split()
        others = [flag for flag in flags if flag not in GPU_FLAGS]
        os.environ["XLA_FLAGS"] = " ".join([*others, *GPU_FLAGS])


def wait_for_slow_devices() -> None:
    """Lets the devices of a CPU wait for each other for a day.

    To be called before the first device is used. They are threads. On a busy machine one of them
    may get no time for a minute, after which XLA would abort the process without a word about the
    run. If they never meet, the watchdog says where the run stands still, and ends it. A limit that
    XLA_FLAGS already has is kept.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    names_a_file = flags != "" and not flags.lstrip().startswith("-")
    if PATIENCE_FLAG in flags or names_a_file or not xla_knows(PATIENCE_FLAG):
        return
    os.environ["XLA_FLAGS"] = f"{flags} --{PATIENCE_FLAG}={_PATIENCE_SECONDS}".strip()


@functools.cache
def xla_knows(flag: str) -> bool:
    """Return whether the installed XLA has a flag of this name.

    It would end the process at one that it does not know. Only its own parser could say so, and
    that ends the process; so the library is searched for the name, which takes 10 ms.
    """
    name = b"\0" + flag.encode() + b"\0"
    package = importlib.util.find_spec("jaxlib")
    if package is None or package.origin is None:
        return False
    folder = Path(package.origin).parent
    suffixes = (".so", ".dylib", ".dll", ".pyd")
    libraries = [path for path in folder.iterdir() if path.suffix in suffixes]
    for path in sorted(libraries, key=lambda path: path.stat().st_size, reverse=True):
        with (
            open(path, "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            if content.find(name) >= 0:
                return True
    return False


def _connect(config: MeshConfig, suffices: Callable[[int, int], bool] | None = None) -> int | None:
    """Connect the processes; return how many were requested, if that is known here."""
    # jax's service would take SIGTERM for itself; see trainer/signals.py.
    jax.config.update("jax_enable_preemption_service", False)
    coordinator = config.coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS") or None
    count = config.num_processes or _whole_number("JAX_NUM_PROCESSES", example=2)
    index = config.process_id
    if index is None:
        index = _whole_number("JAX_PROCESS_ID", example=0)
    # That is so in a run that begins again, from an older checkpoint.
    if jax.distributed.is_initialized():
        return count
    if count == 1:
        _require_least(config, 1, suffices)
        return None
    given = {"mesh.coordinator": coordinator, "mesh.num_processes": count, "mesh.process_id": index}
    missing = [name for name, value in given.items() if value is None]
    place = None
    if missing:
        place = find_place(config.connect_seconds, config.platform in ("auto", "tpu"))
    if place is None and len(missing) == 3:
        _require_least(config, 1, suffices)
        return None
    if place is None and missing:
        known = ", ".join(f"{name}={value}" for name, value in given.items() if value is not None)
        names = " and ".join(missing)
        verb = "describes"
        if len(missing) == 1:
            verb = "describe"
        raise ConfigError(
            f"{known} {verb} only part of a job; {names} must be known too. "
            f"Set {names}, or none of the three."
        )
    if place is not None:
        if place.is_tpu and config.min_processes:
            raise ConfigError(
                f"mesh.min_processes={config.min_processes}: a job of TPUs starts with all hosts "
                "of all its slices, or not at all. Leave it out."
            )
        coordinator = coordinator or place.coordinator
        count = count or place.count
        if index is None:
            index = place.index
    num_processes = int(count or 0)
    _require_least(config, num_processes, suffices)
    least = config.min_processes
    planned = max(num_processes, config.planned_processes or 0)

    def can_do_with(count: int) -> bool:
        return count >= (least or math.inf) and suffices is not None and suffices(planned, count)

    begin = time.monotonic()
    met = meet(
        str(coordinator),
        num_processes,
        int(index or 0),
        config.connect_seconds,
        can_do_with if least else None,
    )
    left = max(10, math.ceil(config.connect_seconds - (time.monotonic() - begin)))
    # No cluster is to be detected: all is known by now.
    jax.distributed.initialize(
        met.address,
        met.count,
        met.index,
        local_gpus(place, os.environ),
        cluster_detection_method="deactivate",
        initialization_timeout=left,
        heartbeat_timeout_seconds=config.heartbeat_seconds,
    )
    return num_processes


def _require_least(
    config: MeshConfig, count: int, suffices: Callable[[int, int], bool] | None
) -> None:
    """ConfigError: mesh.min_processes is more than the job has, and it is a job to which that
    matters.

    A process that did not find the others would train alone, and nobody would know.
    """
    least = config.min_processes
    if suffices is None or least is None or least <= count:
        return
    job = f"this job has {count} processes"
    if count == 1:
        job = "this process is the only one of its job, or has not found the others"
    raise ConfigError(
        f"mesh.min_processes={least}, and {job}. Set mesh.min_processes to at most {count}, or "
        "start all processes of the job."
    )


def announce_end(code: int) -> None:
    """Write the exit code of this process where the script that started the job looks for it.

    Slurm reports the highest exit code of all processes, but a lower one may explain why the job
    ended. Nothing is written if MAXTRAIN_ENDS is not set, or if its folder can't be written.
    """
    folder = os.environ.get(ENDS)
    if folder:
        with contextlib.suppress(OSError):
            Path(folder, f"{platform.node()}-{os.getpid()}").write_text(f"{code}\n")


def report_step(step: int) -> None:
    """Write the last completed training step of the run where the script that started the job
    reads it.

    Process 0 calls it. A script stops starting a job that completes no step. Nothing is written if
    MAXTRAIN_ENDS is not set, or if its folder cannot be written.
    """
    folder = os.environ.get(ENDS)
    if folder:
        with contextlib.suppress(OSError):
            Path(folder, "step").write_text(f"{step}\n")


def leave(code: int, lost: bool = False, seconds: float = 15.0) -> None:
    """Takes leave of the other processes of a job after an error.

    If they do not come in time, this one is ended with this code. They may never: what one process
    alone finds out leaves them in a collective until it has gone, and jax would wait for them for
    five minutes. Processes that all have the error meet here, and end in good order. If one is
    `lost`, this one ends within a second in any case: a thread that waits for what is lost would be
    waited for.
    """
    if not jax.distributed.is_initialized():
        return
    goodbye = threading.Thread(target=jax.distributed.shutdown, daemon=True)
    goodbye.start()
    if lost:
        seconds = min(seconds, 1.0)
    goodbye.join(seconds)
    if lost or goodbye.is_alive():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _whole_number(name: str, example: int) -> int | None:
    """The value of an environment variable; None if it is unset or empty."""
    text = os.environ.get(name, "")
    if not text:
        return None
    if not text.isdecimal():
        fix = f"Set it to {example}, for example, or unset it"
        raise ConfigError(f"{name}={text} must be a whole number. {fix}.")
    return int(text)


def accelerator_present(kind: str = "") -> bool:
    """Return whether the system has device files of a GPU or TPU, of this `kind` if given.

    That is known without starting any device.
    """
    patterns = ("nvidia[0-9]*", "accel*", "vfio/[0-9]*", "kfd")
    globs = [pattern for pattern in patterns if pattern.startswith(kind)]
    return any(any(Path("/dev").glob(pattern)) for pattern in globs)


def only_cpu_possible() -> bool:
    """Return whether there is no device for any compiler that jax could try here beside the CPU's.

    Trying libtpu, or a plugin for GPUs without NVIDIA's libraries (the extra compile-gpu), would
    not find anything, and both print lines of their own source code when they do not. Other
    plugins are left to look for their devices themselves: they may find some that have no usual
    device file.
    """
    if accelerator_present() or Path("/dev/dxg").exists():
        return False
    plugins = {plugin.name for plugin in importlib.metadata.entry_points(group="jax_plugins")}
    folders = importlib.util.find_spec("jax_plugins")
    if folders is not None:
        found = pkgutil.iter_modules(folders.submodule_search_locations)
        plugins |= {module.name for module in found}
    has_libtpu = importlib.util.find_spec("libtpu") is not None
    if not plugins:
        return has_libtpu
    return plugins == {"xla_cuda13"} and importlib.util.find_spec("nvidia") is None


def keep_host_memory() -> None:
    """Makes glibc, where it is, keep the memory that it has got from the system.

    That is for a process that computes on the CPU. To be called before the CPU device is started:
    its threads would already have arenas of their own, which go on as before.

    XLA frees and takes its temporary memory, gigabytes, in every step. By default the system maps
    and zeroes new pages each time, which took a fifth to a third of a training step. With this the
    process keeps the size of its peak, as it would on an accelerator.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, -1)
        libc.mallopt(_M_ARENA_MAX, 1)
