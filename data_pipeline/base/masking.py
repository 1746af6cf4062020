"""Secrets in texts that are kept or shown: passwords and tokens in URLs, and keys of services in
commands.

A URL may hold a password (`https://user:password@host`), a token (`https://token@host`), or a
signature in its query. Records, messages and trackers get `masked` texts. The mask is the same for
every secret, so a run whose token was renewed compares equal to its record. A masked URL is never
opened: see `is_masked`.
"""

import re
from typing import Any

MASK = "***"
_USER = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,40})://([^/\s'\"?#<>]{0,2000})@")
_QUERY = re.compile(
    r"([?&][\w.%-]*(?:sig|token|secret|passw|pwd|key|credential|auth)[\w.%-]*=)[^&\s'\"#<>]+",
    re.IGNORECASE,
)
# Variables of the environment, as a command for another machine gives them.
_VARIABLE = re.compile(
    r"\b([A-Z][A-Z0-9_]*(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)=)[^\s'\"]+"
)
_MASKED = re.compile(r"://[^/\s]*\*\*\*@|[?&][\w.%-]+=\*\*\*(?:[&#\s]|$)")


def masked(text: str) -> str:
    """A text with a mask in the place of each secret."""
    return _VARIABLE.sub(rf"\1{MASK}", masked_urls(text))


def masked_urls(text: str) -> str:
    """A text with a mask in the place of each secret of a URL."""
    return _QUERY.sub(rf"\1{MASK}", _USER.sub(_without_user, text))


def _without_user(found: re.Match[str]) -> str:
    scheme, user = found[1], found[2]
    # `abfs://CONTAINER@ACCOUNT` holds no secret, but a token may stand alone before a web host.
    if ":" in user or scheme.lower().startswith(("http", "git+http")):
        return f"{scheme}://{MASK}@"
    return found[0]


def masked_values(value: Any) -> Any:
    """Values as JSON has them, with a mask in the place of each secret in a text."""
    if isinstance(value, str):
        return masked(value)
    if isinstance(value, dict):
        return {masked_values(name): masked_values(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [masked_values(inner) for inner in value]
    return value


def is_masked(text: str) -> bool:
    """Return whether a text is a URL from a record, whose secret was masked there."""
    return _MASKED.search(text) is not None
