"""Starting: the platform, the processes of a job, and the host's memory. Called once, before the
first device is used."""

import ctypes
import functools
import importlib.metadata
import importlib.util
import math
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import jax

from data_pipeline.errors import ConfigError, LostProcessError
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
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8  # names of glibc's mallopt(3)


def start(
    config: MeshConfig,
    compilation_cache: str | None,
    deterministic: bool = False,
    suffices: Callable[[int, int], bool] = lambda asked, count: False,
) -> int:
    """Selects the platform, connects the processes, and turns on the cache of compiled programs.

    Returns how many processes were asked for. There are fewer if some did not come, and at least
    mesh.min_processes did.

    Args:
        config: the `mesh` section; what is null there comes from JAX_COORDINATOR_ADDRESS,
            JAX_NUM_PROCESSES and JAX_PROCESS_ID, and then from the cluster itself; see cluster.py.
        compilation_cache: directory, or None.
        deterministic: only programs that give the same bits every time, with products in full
            precision.
        suffices: of processes asked for and of those that came: whether the job can do with these.

    Raises:
        ConfigError: the platform asked for is not there, or only part of a multi-process job is
            described.
        LostProcessError: another process connected, and then did not start its devices.
    """
    if config.platform != "auto":
        jax.config.update("jax_platforms", {"gpu": "cuda"}.get(config.platform, config.platform))
    elif jax.config.jax_platforms is None and only_cpu_possible():
        jax.config.update("jax_platforms", "cpu")
    if config.simulated_devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", config.simulated_devices)
    if compilation_cache:
        folder = Path(compilation_cache).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    if deterministic:
        be_deterministic(config)
    if not accelerator_present() or config.platform == "cpu" or config.simulated_devices:
        keep_host_memory()
        wait_for_slow_devices()
    asked = _connect(config, suffices)
    try:
        jax.devices()
    except (
        RuntimeError,
        AssertionError,
    ) as error:  # jax only asserts that a device exists when its plugin is not installed
        # A CPU is always there: where that is missing, jax has only logged why.
        no_cpu = isinstance(error, AssertionError) and config.platform in ("auto", "cpu")
        if jax.distributed.is_initialized() and (no_cpu or LOST.search(str(error))):
            what = (str(error).strip() or "jax waits for two minutes").splitlines()[0][:300]
            rule = f"the devices of another process of this job did not come ({what})"
            raise LostProcessError(
                f"{rule}. See the others' logs, then run the same command again."
            ) from error
        told = str(error) and "Unable to initialize backend" not in str(error)
        found = str(error) if told else "JAX found no such device"
        raise ConfigError(
            f"mesh.platform={config.platform}: {found}. Install maxtrain[gpu] or maxtrain[tpu] on a machine that has one, or "
            "set mesh.platform=auto."
        ) from error
    if jax.process_count() > 1 and jax.default_backend() == "cpu":
        # Only process 0 would find its programs there, and would then wait for the others, who
        # compile.
        jax.config.update("jax_enable_compilation_cache", False)
    return asked or jax.process_count()


def be_deterministic(config: MeshConfig) -> None:
    """Asks each compiler for programs that repeat bit for bit; those for CPUs and TPUs have no
    others.

    XLA ends the process if it does not know a flag, so a platform's flags are set only where it is
    used.
    """
    jax.config.update("jax_default_matmul_precision", "highest")
    if config.platform == "gpu" or (
        config.platform == "auto" and not config.simulated_devices and accelerator_present("nvidia")
    ):
        flags = os.environ.get("XLA_FLAGS", "").split()
        os.environ["XLA_FLAGS"] = " ".join(
            [*(flag for flag in flags if flag not in GPU_FLAGS), *GPU_FLAGS]
        )


def wait_for_slow_devices() -> None:
    """Lets the devices of a CPU wait for each other for a day; to be called before the first device
    is used.

    They are threads. On a busy machine one of them may get no time for a minute, after which XLA
    would abort the process without a word about the run. If they never meet, the watchdog says
    where the run stands still, and ends it. A limit that XLA_FLAGS already has is kept.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    names_a_file = flags != "" and not flags.lstrip().startswith("-")
    if PATIENCE_FLAG in flags or names_a_file or not xla_knows(PATIENCE_FLAG):
        return
    os.environ["XLA_FLAGS"] = f"{flags} --{PATIENCE_FLAG}={_PATIENCE_SECONDS}".strip()


@functools.cache
def xla_knows(flag: str) -> bool:
    """Whether the installed XLA has a flag of this name: it would end the process at one that it
    does not know.

    Only its own parser could say so, and that ends the process; so the library is searched for the
    name, which takes 10 ms.
    """
    name = b"\0" + flag.encode() + b"\0"
    package = importlib.util.find_spec("jaxlib")
    if package is None or package.origin is None:
        return False
    folder = Path(package.origin).parent
    libraries = [
        path for path in folder.iterdir() if path.suffix in (".so", ".dylib", ".dll", ".pyd")
    ]
    for path in sorted(libraries, key=lambda path: path.stat().st_size, reverse=True):
        with (
            open(path, "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            if content.find(name) >= 0:
                return True
    return False


def _connect(config: MeshConfig, suffices: Callable[[int, int], bool]) -> int | None:
    """Connects the processes; how many were asked for, if that is known here."""
    jax.config.update(
        "jax_enable_preemption_service", False
    )  # it would take SIGTERM for itself; see signals.py
    coordinator = config.coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS") or None
    count = config.num_processes or _whole_number("JAX_NUM_PROCESSES", example=2)
    index = (
        config.process_id
        if config.process_id is not None
        else _whole_number("JAX_PROCESS_ID", example=0)
    )
    if jax.distributed.is_initialized():
        return count  # a run that begins again, from an older checkpoint
    if count == 1:
        return None
    given = {"mesh.coordinator": coordinator, "mesh.num_processes": count, "mesh.process_id": index}
    missing = [name for name, value in given.items() if value is None]
    place = (
        find_place(config.connect_seconds, config.platform in ("auto", "tpu")) if missing else None
    )
    if place is None and len(missing) == 3:
        return None
    if place is None and missing:
        raise ConfigError(
            f"{', '.join(f'{k}={v}' for k, v in given.items() if v is not None)} describe only part of a job; "
            f"{' and '.join(missing)} must be known too. Set {' and '.join(missing)}, or none of the three."
        )
    if place is not None:
        if place.is_tpu and config.min_processes:
            rule = f"mesh.min_processes={config.min_processes}: a slice of TPUs starts with all of its hosts, or not at all"
            raise ConfigError(f"{rule}. Leave it out.")
        coordinator = coordinator or place.coordinator
        count = count or place.count
        index = place.index if index is None else index
    begin = time.monotonic()
    asked, least = int(count or 0), config.min_processes or math.inf
    count, index = meet(
        str(coordinator),
        asked,
        int(index or 0),
        config.connect_seconds,
        lambda count: count >= least and suffices(asked, count),
    )
    left = max(10, math.ceil(config.connect_seconds - (time.monotonic() - begin)))
    jax.distributed.initialize(
        coordinator,
        count,
        index,
        local_gpus(place, os.environ),
        cluster_detection_method="deactivate",  # all is known by now
        initialization_timeout=left,
        heartbeat_timeout_seconds=config.heartbeat_seconds,
    )
    return asked


def leave(code: int, lost: bool = False, seconds: float = 15.0) -> None:
    """Takes leave of the other processes of a job after an error; ends this one with this code if
    they do not come by then.

    They may never: what one process alone finds out leaves them in a collective until it has gone,
    and jax would wait for them for five minutes. Processes that all have the error meet here, and
    end in good order. If one is `lost`, this one ends within a second in any case: a thread that
    waits for what is lost would be waited for.
    """
    if not jax.distributed.is_initialized():
        return
    goodbye = threading.Thread(target=jax.distributed.shutdown, daemon=True)
    goodbye.start()
    goodbye.join(min(seconds, 1.0) if lost else seconds)
    if lost or goodbye.is_alive():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _whole_number(name: str, example: int) -> int | None:
    """The value of an environment variable; None if it is unset or empty."""
    text = os.environ.get(name, "")
    if text and not text.isdecimal():
        raise ConfigError(
            f"{name}={text} must be a whole number. Set it to {example}, for example, or unset it."
        )
    return int(text) if text else None


def accelerator_present(kind: str = "") -> bool:
    """Whether the system has device files of a GPU or TPU, of this `kind` if given; known without
    starting any device."""
    patterns = ("nvidia[0-9]*", "accel*", "vfio/[0-9]*", "kfd")
    return any(any(Path("/dev").glob(pattern)) for pattern in patterns if pattern.startswith(kind))


def only_cpu_possible() -> bool:
    """Whether libtpu is all that jax could try here beside the CPU, and there is no device for it.

    Trying it would not find anything, and libtpu prints lines of its own source code when it does
    not. Other plugins, for GPUs, are left to look for their devices themselves: they may find some
    that have no usual device file.
    """
    others = importlib.metadata.entry_points(group="jax_plugins") or importlib.util.find_spec(
        "jax_plugins"
    )
    return (
        importlib.util.find_spec("libtpu") is not None and not others and not accelerator_present()
    )


def keep_host_memory() -> None:
    """Makes glibc, where it is, keep the memory it has got from the system; for a process that
    computes on the CPU.

    To be called before the CPU device is started: its threads would already have arenas of their
    own, which go on as before.

    XLA frees and takes its temporary memory, gigabytes, in every step. By default the system maps
    and zeroes new pages each time, which took a fifth to a third of a training step. With this the
    process keeps the size of its peak, as it would on an accelerator.
    """
    libc = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    if libc and hasattr(libc, "gnu_get_libc_version"):
        for name, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_ARENA_MAX, 1)):
            libc.mallopt(name, value)
