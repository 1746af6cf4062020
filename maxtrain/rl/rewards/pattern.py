"""The reward `pattern`: a completion has a format that a regular expression says."""

import re

from data_pipeline.errors import ConfigError

WHERE = ("whole", "begin", "anywhere")


def check_options(regex: str, where: str) -> None:
    """ConfigError: there is no such pattern."""
    if where not in WHERE:
        raise ConfigError(f"pattern.where={where} is not known. Set it to {', '.join(WHERE)}.")
    try:
        re.compile(regex, re.DOTALL)
    except re.error as error:
        raise ConfigError(
            f"pattern.regex={regex!r} is no regular expression ({error}). Mend it; `re` of Python "
            "says how they are written."
        ) from error


def matches(completion: str, regex: str, where: str) -> bool:
    """Whether a completion matches; `.` also matches newlines. It runs in a worker, since an
    expression may take exponential time."""
    pattern = re.compile(regex, re.DOTALL)
    if where == "whole":
        return pattern.fullmatch(completion) is not None
    if where == "begin":
        return pattern.match(completion) is not None
    return pattern.search(completion) is not None
