"""Launch records in RUN/launches.jsonl, which identify what made the numbers of a run, and
comparison of two of them. Without jax.
"""

import datetime
import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import maxtrain
from data_pipeline.base import strict_yaml
from data_pipeline.base.masking import masked
from data_pipeline.shards import write_atomic
from maxtrain.config import RunConfig, to_yaml
from maxtrain.config.across.attention_choice import KernelChoice
from maxtrain.config.kernels import ATTENTION
from maxtrain.config.sections.moe import WITH_EXPERTS
from maxtrain.observe.jsonl_logs import JsonlLog, encode

FILE_NAME = "launches.jsonl"
LAUNCHES = JsonlLog(
    FILE_NAME,
    {
        "time": str,
        "step": int,
        "config": str,
        "versions.jax": str,
        "devices.kind": str,
        "devices.count": int,
        "processes": int,
        "determinism": str,
    },
)
_PACKAGES = ("maxtrain", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "grain")
# What in the environment changes what is computed; not which process this is, and where it keeps
# its cache.
_FLAGS = re.compile(
    r"XLA_FLAGS|LIBTPU_INIT_ARGS|NVIDIA_TF32_OVERRIDE|TF_CUDNN_\w+|NCCL_(ALGO|PROTO)"
    r"|JAX_(?!COORDINATOR|NUM_PROCESSES|PROCESS_ID|COMPILATION_CACHE|PERSISTENT_CACHE)\w+"
)
# How long devices wait for each other; the program sets it itself, see parallel/distributed.py.
_PATIENCE = re.compile(r"\s*--xla_cpu_collective_call_\w+_seconds=\S+")
# What does not change the numbers of training, or stands in the config, too.
_APART = re.compile(
    r"time|step|command|run|folder|forked_from\..*|inputs\..*|units\..*"
    r"|kernels\.experts|reasons\..*|config\."
    r"(run_name|output_dir|local_dir|log_interval|(eval|checkpoint)_interval|eval_steps"
    r"|(eval|observe|watchdog|integrity)\..*"
    r"|checkpoint\.(?!init_).*"
    r"|mesh\.(coordinator|num_processes|process_id|min_processes|planned_processes"
    r"|connect_seconds|heartbeat_seconds)"
    r"|data\.(workers|prefetch|accept_changes|cache|cache_bytes))"
)


def launch_record(
    config: str, attention: KernelChoice, mesh: Any, data: str, step: int
) -> dict[str, Any]:
    """Return the record of a launch, as JSON: what runs, on which devices, with which versions.

    Args:
        config: the requested config of the run, as YAML.
        attention: the kernel, which the config need not name.
        mesh: a jax.sharding.Mesh of all processes' devices, which are started by now.
        data: identity of the data.
        step: the number of finished steps that the launch begins with.
    """
    devices = mesh.devices.flatten().tolist()
    kind = devices[0].device_kind
    if devices[0].platform == "cpu":
        kind = _cpu()
    settings = strict_yaml.loads(config)
    kernels = {"attention": attention.kernel}
    if settings["model"]["family"] in WITH_EXPERTS:
        kernels["experts"] = settings["model"]["routing"]["kernel"]
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        versions[name] = version_of(name)
    if attention.kernel == "mosaic" or kernels.get("experts") == "tokamax":
        versions["tokamax"] = version_of("tokamax")
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "step": step,
        "command": masked(shlex.join(sys.argv)),
        "versions": versions,
        "git": git_revision(Path(maxtrain.__file__).parents[1]),
        "flags": _flags(),
        "kernels": kernels,
        "reasons": {"attention": attention.reason},
        "devices": {"platform": devices[0].platform, "kind": kind, "count": len(devices)},
        "mesh": dict(mesh.shape),
        "processes": len({device.process_index for device in devices}),
        "determinism": settings["determinism"],
        "seed": settings["seed"],
        "data": data,
        "config": config,
    }


def version_of(package: str) -> str:
    """Return the version of an installed package; of maxtrain, also if it runs from its folder."""
    if package == maxtrain.__name__:
        return maxtrain.__version__
    return importlib.metadata.version(package)


def _flags() -> dict[str, str]:
    """Variables of the environment that change what is computed."""
    flags = {name: value for name, value in sorted(os.environ.items()) if _FLAGS.fullmatch(name)}
    xla = _PATIENCE.sub("", flags.pop("XLA_FLAGS", "")).strip()
    if xla:
        flags["XLA_FLAGS"] = xla
    return flags


def append_launch(run_dir: Path, record: Mapping[str, Any]) -> None:
    """Adds a line to RUN/launches.jsonl."""
    write_launches(run_dir, [*read_launches(run_dir), record])


def write_launches(run_dir: Path, launches: Sequence[Mapping[str, Any]]) -> None:
    """Write RUN/launches.jsonl, which its user alone may read."""
    text = "".join(encode(launch) for launch in launches)
    write_atomic(run_dir / FILE_NAME, text.encode(), private=True)


def read_launches(run_dir: Path) -> list[dict[str, Any]]:
    """The launches of a run in order, as far as they can be read; empty if none was recorded."""
    return LAUNCHES.read(run_dir)


def usual_devices(run_dir: Path, simulated: int | None) -> int:
    """Devices of each process: as many as are simulated, or else as the run's last launch had; 1 if
    there was none."""
    if simulated:
        return simulated
    launches = read_launches(run_dir)
    usual = 1
    if launches:
        last = launches[-1]
        usual = last["devices"]["count"] // max(1, last["processes"])
    return usual


def attention_of(launch: Mapping[str, Any]) -> str | None:
    """The kernel of attention that a launch had; None: it does not say."""
    kernels = launch.get("kernels")
    if not isinstance(kernels, dict):
        return None
    kernel = kernels.get("attention")
    if not isinstance(kernel, str) or kernel not in ATTENTION:
        return None
    return kernel


def launch_of(launches: list[dict[str, Any]], step: int) -> dict[str, Any] | None:
    """The launch that did the step with this number (from 1) last; None if none is known."""
    return next((launch for launch in reversed(launches) if launch["step"] < step), None)


def launch_differences(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Return what differs between two launches and may change numbers: both values by dotted
    path.
    """
    changes = launch_changes(ours, theirs)
    return {name: pair for name, pair in changes.items() if not _APART.fullmatch(name)}


def launch_changes(before: dict[str, Any], after: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Everything that differs between two launches, except when and how they were started, and what
    follows from the rest: both values by dotted path. An empty launch has no values."""
    values_before = {}
    if before:
        values_before = _flat_launch(before)
    values_after = {}
    if after:
        values_after = _flat_launch(after)
    changes = {}
    for name in values_before | values_after:
        if name in ("time", "step", "command", "run"):
            continue
        if name.startswith(("device_bytes.", "reasons.", "forked_from.")):
            continue
        old = values_before.get(name, "nothing")
        new = values_after.get(name, "nothing")
        if old != new:
            changes[name] = (old, new)
    return changes


def _flat_launch(launch: dict[str, Any]) -> dict[str, str]:
    """A launch by dotted path. Config keys that did not exist yet in its version have their
    defaults."""
    flat = _flat(launch | {"config": _settings(launch)})
    if isinstance(flat.get("config"), str):
        return flat
    return _flat({"config": strict_yaml.loads(to_yaml(RunConfig()))}) | flat


def _settings(launch: Mapping[str, Any]) -> Any:
    """The config of a launch as plain values, with the kernel of attention that it had, whether
    auto chose that or not; or its text if that is not valid YAML."""
    if not isinstance(launch.get("config"), str):
        return str(launch.get("config"))
    try:
        settings = strict_yaml.loads(launch["config"])
    except ValueError:
        return launch["config"]
    kernel = attention_of(launch)
    if kernel is not None and isinstance(settings, dict):
        model = settings.get("model")
        if not isinstance(model, dict):
            model = {}
        settings["model"] = model | {"attention": kernel}
    return settings


def describe_launch(launch: Mapping[str, Any]) -> str:
    """A line for people."""
    devices = launch["devices"]
    words = [f"{devices['count']} x {devices['kind']}", f"jax {launch['versions']['jax']}"]
    git = launch.get("git")
    if git:
        # The first digits of the revision, and "+changes" behind its 40.
        words.append(f"git {git[:12]}{git[40:]}")
    words.append(f"determinism {launch['determinism']}")
    return ", ".join(words)


def git_revision(folder: Path) -> str | None:
    """The revision of a checkout whose root is this folder, with "+changes" if files differ from
    it; None: the folder is not the root of a checkout."""
    root = _git(folder, "rev-parse", "--show-toplevel")
    if not root or Path(root).resolve() != folder.resolve():
        return None
    revision, is_dirty = revision_around(folder)
    if not revision:
        return None
    if is_dirty:
        return f"{revision}+changes"
    return revision


def revision_around(folder: Path) -> tuple[str, bool]:
    """The revision of the repository that a folder is in, empty if it is in none, and whether
    files there differ from it."""
    revision = _git(folder, "rev-parse", "HEAD")
    if not revision:
        return "", False
    return revision, bool(_git(folder, "status", "--porcelain"))


def _git(folder: Path, *arguments: str) -> str | None:
    """Return the output of git; None: it refuses, is not there, or its file system does not
    answer.
    """
    command = ["git", "-C", str(folder), *arguments]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if result.returncode != 0:
        return None
    return result.stdout.strip()


def _cpu() -> str:
    """The model of this machine's CPU: what is compiled for one need not give the bits of
    another."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        found = re.search(r"^model name\s*: (.*)", info.read_text(), re.MULTILINE)
        if found:
            return found.group(1)
    return platform.processor() or platform.machine()


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """The values of nested mappings by dotted path, as text."""
    flat = {}
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{path}.")
        else:
            flat[path] = str(value)
    return flat
