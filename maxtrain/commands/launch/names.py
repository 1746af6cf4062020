"""Checks of words of a command line that are written into a script or a manifest."""

import re

from data_pipeline.base.errors import UsageError

# What a scheduler takes as a name without any quotes: letters, digits and a few signs.
_PLAIN = re.compile(r"[\w.@%/:=,+~-]+", re.ASCII)
# Slurm would expand a % in the name of the log file, and a / is a folder there.
_NOT_IN_JOB_NAME = re.compile(r"[/\\%\"']")
# A label of DNS (RFC 1123), which names of Kubernetes are.
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes,
# days-hours:minutes:seconds, as Slurm writes them.
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<rest>\d+(?::\d{1,2}){0,2})")


def plain(option: str, value: str) -> str:
    """A value that needs no quotes; UsageError: it would."""
    if not _PLAIN.fullmatch(value):
        rule = "may have letters, digits and any of . @ % / : = , + ~ - _"
        raise UsageError(f"{option} {value!r} {rule}. Use another one.")
    return value


def job_name(value: str) -> str:
    """A job name of Slurm as it is written after `#SBATCH --job-name=`.

    Raises:
        UsageError: it cannot be part of the name of the log file, which is NAME-JOB.log.
    """
    if not value.strip() or not value.isprintable() or _NOT_IN_JOB_NAME.search(value):
        rule = "must be printable characters without any of / \\ % \" '"
        fix = f"Use --name {default_label(value, 63)}"
        raise UsageError(f"--name {value!r} {rule}. {fix}.")
    if _PLAIN.fullmatch(value):
        return value
    return f'"{value}"'


def one_line(option: str, value: str) -> str:
    """A line of a script; UsageError: it is more than one."""
    if "\n" in value or "\r" in value or "\0" in value:
        raise UsageError(f"{option} {value!r} must be one line. Give {option} once for each line.")
    return value


def label(option: str, value: str, longest: int = 63) -> str:
    """A name of Kubernetes; UsageError: it is none."""
    if not _LABEL.fullmatch(value) or len(value) > longest:
        rule = f"must be at most {longest} lower-case letters, digits and hyphens"
        fix = f"Set {option} to {_as_label(value, longest) or 'train'}, for example"
        raise UsageError(f"{option} {value!r} {rule}, with a letter or digit at both ends. {fix}.")
    return value


def subdomain(option: str, value: str) -> str:
    """A name of Kubernetes that may have dots, such as that of a volume claim; UsageError: it is
    none."""
    if len(value) > 253 or not all(_LABEL.fullmatch(part) for part in value.split(".")):
        rule = "must be at most 253 lower-case letters, digits, hyphens and dots"
        fix = f"Use for example {_as_label(value, 63) or 'data'}"
        raise UsageError(f"{option} {value!r} {rule}, with a letter or digit at both ends. {fix}.")
    return value


def default_label(run_name: str, longest: int) -> str:
    """The name of a run as Kubernetes takes it."""
    return _as_label(run_name, longest) or "train"


def _as_label(text: str, longest: int) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:longest].strip("-")


def variables(pairs: list[str]) -> dict[str, str]:
    """Return the variables of --env NAME=VALUE ...; UsageError: one has no such form."""
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not _VARIABLE.fullmatch(name):
            raise UsageError(f"--env {pair!r} must be NAME=VALUE. Write for example --env A=1.")
        found[name] = one_line("--env", value)
    return found


def seconds(text: str) -> int:
    """A time as Slurm writes it, such as 90 (minutes), 12:00:00 or 2-00; UsageError: it is none."""
    match = _TIME.fullmatch(text)
    if not match:
        forms = "minutes, hours:minutes:seconds or days-hours"
        raise UsageError(f"--time {text!r} must be {forms}. Write for example --time 12:00:00.")
    parts = [int(part) for part in match["rest"].split(":")]
    if match["days"] is not None:
        # Hours come first.
        parts = [*parts, 0, 0][:3]
    elif len(parts) == 1:
        parts = [0, parts[0], 0]
    elif len(parts) == 2:
        parts = [0, *parts]
    hours, minutes, rest = parts
    total = int(match["days"] or 0) * 86_400 + hours * 3600 + minutes * 60 + rest
    if not total:
        raise UsageError(f"--time {text} is no time at all. Write for example --time 12:00:00.")
    return total
