"""Passwords and keys must not be written into scripts and manifests, which others can read."""

import re
from collections.abc import Iterable, Mapping

from data_pipeline.errors import UsageError

# The password in SCHEME://USER:PASSWORD@HOST.
_IN_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://[^/\s:@'\"]*):[^/\s@'\"]+@")
# A signature or token in the query of a URL.
_IN_QUERY = re.compile(
    r"(://[^\s'\"]*[?&][\w-]*(?:signature|token|secret|password|sig|api_?key)=)[^&\s'\"]+",
    re.IGNORECASE,
)
_NAME = re.compile(
    r"secret|token$|password|passwd|credential|private_?key|api_?key|access_?key", re.IGNORECASE
)


def mask(text: str) -> str:
    """A text with the passwords and tokens of its URLs replaced by ***."""
    return _IN_QUERY.sub(r"\1***", _IN_URL.sub(r"\1:***@", text))


def require_no_secrets(
    texts: Iterable[str], environment: Mapping[str, str], what: str, elsewhere: str
) -> None:
    """Refuses words with a secret in them.

    Args:
        texts: what is written.
        environment: variables that are written.
        what: into what they are written, such as "a manifest".
        elsewhere: what to do instead.

    Raises:
        UsageError: there is a secret. Its message does not show it.
    """
    for text in texts:
        masked = mask(text)
        if masked == text:
            continue
        place = next(
            line.strip()
            for line, original in zip(masked.splitlines(), text.splitlines(), strict=True)
            if line != original
        )
        raise UsageError(f"{place} has a password, which {what} would show. {elsewhere}.")
    for name, value in environment.items():
        if value and _NAME.search(name) and not value.startswith("/"):
            raise UsageError(f"--env {name}=*** is a secret, which {what} would show. {elsewhere}.")
