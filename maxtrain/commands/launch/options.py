"""The command line of `maxtrain launch`."""

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

from data_pipeline.base.errors import UsageError
from maxtrain.commands.launch.plan import VERBS
from maxtrain.commands.launch.tpu import TPUS

_ABOUT = """starts a job of one or many processes: writes a batch script of Slurm or a JobSet of
Kubernetes, or runs processes on this machine. The config is checked first."""
_WRITTEN = """What is printed can be read and changed before it is submitted. Restarts follow the
exit codes of a run: 74, 75 and signals are tried again, 64, 65, 70 and 78 are not."""
_HERE = """Nothing is started again; `maxtrain supervise --processes N` does that. The exit code is
that of the first process that failed, which ends the others."""


class _LaunchOption(NamedTuple):
    """An option: its type, default, least value if it is a number, and what --help says of it."""

    name: str
    kind: type
    default: Any
    low: int | None
    metavar: str
    help: str
    repeated: bool = False
    required: bool = False


def _number(name: str, default: int | None, low: int, help: str) -> _LaunchOption:
    return _LaunchOption(name, int, default, low, "N", help)


def _text(name: str, metavar: str, help: str, required: bool = False) -> _LaunchOption:
    return _LaunchOption(name, str, None, None, metavar, help, required=required)


def _texts(name: str, metavar: str, help: str) -> _LaunchOption:
    return _LaunchOption(name, str, [], None, metavar, f"{help}; may be repeated", repeated=True)


_ENV = _texts("--env", "NAME=VALUE", "set this in the environment of each process")
_NAME = _text("--name", "NAME", "of the job; default: run_name")
_RESTARTS = _number(
    "--max-restarts", 20, 0, "restarts before it gives up, in one stay outside the queue (20)"
)
_FILE = _text("--output", "FILE", "write it there instead of printing it")
_NODES = _number("--nodes", 1, 1, "hosts; default: 1")
_GPUS = _number("--gpus-per-node", 0, 0, "GPUs of each host; 0, the default: it trains on CPUs")
_TIME = _text("--time", "TIME", "as Slurm writes it: minutes, 12:00:00, or 2-00")
_CONTAINERS = (
    _text("--image", "IMAGE", "container image; see docker/", required=True),
    _text("--namespace", "NAME", "namespace of the job"),
    _text("--queue", "NAME", "Kueue's local queue"),
    _texts("--volume", "CLAIM:FOLDER", "mount a persistent volume claim"),
    _text("--pod", "FILE", "YAML that is merged into the spec of each pod"),
    _TIME._replace(help=f"limit of each attempt, {_TIME.help}"),
    _RESTARTS._replace(default=100, help="restarts before it gives up (100)"),
)
TARGETS = {
    "local": (
        "run processes on this machine",
        (
            _number("--processes", 1, 1, "how many; default: 1"),
            _LaunchOption(
                "--grace",
                float,
                None,
                0,
                "SECONDS",
                "from a signal until they are killed; default: checkpoint.grace_seconds and 10",
            ),
        ),
    ),
    "slurm": (
        "write a batch script of Slurm",
        (
            _NODES,
            _GPUS,
            _number(
                "--processes-per-node",
                1,
                1,
                "which share its GPUs; default: 1, which takes all of them",
            ),
            _number("--spare-nodes", 0, 0, "more hosts, which stand in for those that go down"),
            _number("--cpus-per-task", None, 1, "CPUs of each process; default: all of the job's"),
            _TIME,
            _text("--partition", "NAME", "partition"),
            _text("--account", "NAME", "account"),
            _text("--image", "IMAGE", "container image, for srun --container-image (pyxis)"),
            _texts("--directive", "OPTION", "a line `#SBATCH OPTION`, as in --constraint=h100"),
            _texts("--setup", "LINE", "a line of bash before the start, as in `module load cuda`"),
            _texts("--srun", "OPTION", "an option of srun, as in --container-mounts=/data"),
            _RESTARTS,
            _number(
                "--crash-loop",
                5,
                1,
                "starts in a row that complete no new training step, before it gives up, also "
                "across requeues (5)",
            ),
        ),
    ),
    "k8s": ("write a JobSet of Kubernetes, of GPUs", (_NODES, _GPUS, *_CONTAINERS)),
    "gke-tpu": (
        "write a JobSet of Google Kubernetes Engine, of TPU slices",
        (
            _text("--accelerator", "|".join(TPUS), "kind of TPU", required=True),
            _text("--topology", "AxB", "chips of a slice, such as 4x4 or 4x4x8", required=True),
            _number("--slices", 1, 1, "slices; default: 1"),
            _number("--chips-per-node", None, 1, "of each host; default: 4, or all of a small one"),
            *_CONTAINERS,
        ),
    ),
}
_COMMON = (_NAME, _ENV)


def parse(argv: Sequence[str], prog: str) -> argparse.Namespace:
    """The options, with `target`, `job`, and `settings` and `job_options` of the job.

    Raises:
        UsageError: a number is too low.
        SystemExit: argparse has printed the reason.
    """
    words = list(argv)
    after: list[str] = []
    if "--" in words:
        at = words.index("--")
        words, after = words[:at], words[at + 1 :]
    options = _parser(prog).parse_args(words[:1])
    if words:
        options = _parser_of(words[0], prog).parse_intermixed_args(words[1:])
        options.target = words[0]
    options.job_options = after
    for option in _options_of(options.target):
        value = getattr(options, option.name.removeprefix("--").replace("-", "_"))
        # NaN is not at least anything.
        if option.low is not None and value is not None and not value >= option.low:
            rule = f"{option.name} {value} must be at least {option.low}"
            raise UsageError(f"{rule}. Set {option.name} to {option.low} or more.")
    return options


def _options_of(target: str) -> tuple[_LaunchOption, ...]:
    _, own = TARGETS[target]
    return (*own, *_COMMON)


def _parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of the first word."""
    lines = [f"  {name:<8} {about}" for name, (about, _) in TARGETS.items()]
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} TARGET [OPTION ...] config=NAME key=value ... [-- OPTION OF THE JOB ...]",
        description=f"{_ABOUT}\n\nTARGET:\n" + "\n".join(lines),
        epilog=f"`{prog} TARGET --help` says more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", choices=TARGETS, help=argparse.SUPPRESS)
    return parser


def _parser_of(target: str, prog: str) -> argparse.ArgumentParser:
    about, _ = TARGETS[target]
    after = _WRITTEN
    if target == "local":
        after = _HERE
    parser = argparse.ArgumentParser(
        prog=f"{prog} {target}",
        usage=f"{prog} {target} [OPTION ...] config=NAME key=value ... [-- OPTION OF THE JOB ...]",
        description=about,
        epilog=after,
    )
    parser.add_argument("settings", nargs="*", metavar="key=value", help="config and its settings")
    parser.add_argument("--job", choices=VERBS, default="train", help="default: train")
    for option in _options_of(target):
        # A default list would be the same one each time.
        action = "append" if option.repeated else "store"
        parser.add_argument(
            option.name,
            type=option.kind,
            default=list(option.default) if option.repeated else option.default,
            metavar=option.metavar,
            required=option.required,
            action=action,
            help=option.help,
        )
    if target != "local":
        parser.add_argument("--output", metavar="FILE", help=_FILE.help)
        parser.add_argument(
            "--submit", action="store_true", help="hand it to the scheduler, by sbatch or kubectl"
        )
    return parser
