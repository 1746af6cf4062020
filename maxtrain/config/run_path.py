"""Place of a run: a folder of this machine, or a URL with a working folder on this host."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from data_pipeline.base.remote import is_url
from maxtrain.config.schema import MeshConfig, RunConfig

# Of these it is known that an object can be created only if it is not there, which locks need.
_SCHEMES = ("s3", "s3a", "gs", "gcs", "file")
_DEFAULT = RunConfig.local_dir


def run_url(config: RunConfig) -> str | None:
    """The URL of a run; None: it is in a folder of this machine."""
    if not is_url(config.output_dir):
        return None
    return f"{config.output_dir.rstrip('/')}/{config.run_name}"


def run_path(config: RunConfig) -> Path:
    """The folder of a run on this machine: the run itself, or where this process works on a run
    that is behind a URL."""
    url = run_url(config)
    if url is None:
        return Path(config.output_dir, config.run_name)
    return working_folder(url, config.local_dir, process_number(config.mesh))


def working_folder(url: str, local_dir: str, process: int) -> Path:
    """Return the folder where a process works on the run behind a URL.

    Several processes of one host have a folder each.
    """
    scheme, _, rest = url.partition("://")
    folder = Path(local_dir, scheme, rest.strip("/")).expanduser()
    if process:
        folder = folder.with_name(f"{folder.name}.process-{process}")
    return folder


def local_folder(config: RunConfig) -> Path | None:
    """Return the folder for steps that are not uploaded, which processes of this host share; None
    if all steps are uploaded.
    """
    url = run_url(config)
    if url is None or config.checkpoint.local is None:
        return None
    return working_folder(url, config.checkpoint.local, 0)


def process_number(mesh: MeshConfig) -> int:
    """Return the number of this process in its job, as far as it is known before the job has met; 0
    for the first process, or the only one on its host.
    """
    number = (
        mesh.process_id
        or os.environ.get("JAX_PROCESS_ID")
        or os.environ.get("SLURM_PROCID")
        or os.environ.get("OMPI_COMM_WORLD_RANK")
        or 0
    )
    return int(number)


def url_problems(config: RunConfig) -> Iterator[str]:
    """Yield the settings that a run behind a URL cannot have, and a working folder that no run
    needs.
    """
    yield from _local_problems(config)
    if not is_url(config.output_dir):
        if config.local_dir != os.path.expanduser(_DEFAULT):
            yield (
                f"local_dir={config.local_dir} is for runs behind a URL, and output_dir="
                f"{config.output_dir} is a path. Set output_dir to a URL, or leave local_dir out."
            )
        return
    scheme, _, rest = config.output_dir.partition("://")
    if scheme not in _SCHEMES:
        yield (
            f"output_dir={config.output_dir}: a run needs locks, and {scheme}:// is not known to "
            f"have them. Set output_dir to a path, or to a URL of {', '.join(_SCHEMES)}."
        )
    if not rest.strip("/") or re.search(r"[?#\x00-\x1f]|(^|/)\.\.?(/|$)", rest):
        yield (
            f"output_dir={config.output_dir} must be a bucket and folders in it. "
            "Set output_dir=s3://BUCKET/FOLDER, for example."
        )
    if config.checkpoint.copy_to is not None:
        yield (
            f"checkpoint.copy_to={config.checkpoint.copy_to} is for runs on a disk of their own, "
            f"and output_dir={config.output_dir} is a URL. Leave it out."
        )
    if "mlflow" in config.observe.trackers and config.observe.tracking.mlflow_uri is None:
        yield (
            f"observe.trackers has mlflow, whose file would be in output_dir={config.output_dir}, "
            "which is a URL. Set observe.tracking.mlflow_uri to a server or a store."
        )


def _local_problems(config: RunConfig) -> Iterator[str]:
    """Steps that are not uploaded, where no run has such, or where a launch removes them."""
    local = config.checkpoint.local
    if local is None or "\0" in local + config.local_dir + config.output_dir or is_url(local):
        return
    if not is_url(config.output_dir):
        yield (
            f"checkpoint.local={local} is for runs behind a URL, and output_dir="
            f"{config.output_dir} is a path, so every save is on a disk anyway. "
            "Set output_dir to a URL, or leave it out."
        )
        return
    place = os.path.realpath(local)
    scheme, _, rest = config.output_dir.partition("://")
    others = {"local_dir": config.local_dir}
    if scheme == "file":
        others["output_dir"] = rest
    for key, other in others.items():
        above = os.path.realpath(os.path.expanduser(other))
        if os.path.commonpath([place, above]) == above:
            yield (
                f"checkpoint.local={local} is in {key}={getattr(config, key)}, where a launch has "
                "only what is at the URL. Set checkpoint.local to a directory of its own."
            )
