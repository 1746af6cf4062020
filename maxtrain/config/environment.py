"""Environment variables with which a run would fail: they are checked before jax is imported, which
would end without a helpful message.
"""

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping

from data_pipeline.base.errors import ConfigError

_TRUE = ("y", "yes", "t", "true", "on", "1")  # as jax reads its variables
_PARSE_FLAGS = "from jaxlib import _jax; _jax.CompileOptions()"
_SECONDS = 60.0


def check_environment(environ: Mapping[str, str]) -> None:
    """Refuses variables with which no run can be right.

    Raises:
        ConfigError: with every one of them.
    """
    problems = [*_wide_types(environ), *_xla_flags(environ)]
    if problems:
        raise ConfigError(problems)


def _wide_types(environ: Mapping[str, str]) -> Iterator[str]:
    value = environ.get("JAX_ENABLE_X64", "")
    if value.lower() in _TRUE:
        rule = (
            "makes 64 bits wide what this program lays out in 32: counters, keys, digests of arrays"
        )
        fix = "Unset it: `env -u JAX_ENABLE_X64 ...`."
        yield f"JAX_ENABLE_X64={value} in the environment {rule}. {fix}"


def _xla_flags(environ: Mapping[str, str]) -> Iterator[str]:
    """XLA ends the process that it finds a wrong flag in, so another process parses them: 0.2 s, if
    there are any."""
    flags = environ.get("XLA_FLAGS", "")
    if not flags.strip():
        return
    command = [sys.executable, "-c", _PARSE_FLAGS]
    try:
        done = subprocess.run(
            command,
            env={**environ},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):  # not about the flags; jax will find out
        return
    if done.returncode and "parse_flags_from_env" in done.stderr:
        message = re.sub(r"^.*?\] ", "", done.stderr.strip().splitlines()[0])
        rule = f"must be flags of this XLA, but: {message.rstrip('.')[:300]}"
        yield f"XLA_FLAGS={flags} in the environment {rule}. Correct or unset it."
