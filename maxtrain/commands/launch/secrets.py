"""Passwords and keys must not be written into scripts and manifests, which others can read."""

import re
from collections.abc import Iterable, Mapping

from data_pipeline.base.errors import UsageError
from data_pipeline.base.masking import masked_urls

_NAME = re.compile(
    r"secret|token$|password|passwd|credential|private_?key|api_?key|access_?key", re.IGNORECASE
)


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
        shown = masked_urls(text)
        if shown == text:
            continue
        place = next(
            line.strip()
            for line, original in zip(shown.splitlines(), text.splitlines(), strict=True)
            if line != original
        )
        raise UsageError(f"{place} has a password, which {what} would show. {elsewhere}.")
    for name, value in environment.items():
        if value and _NAME.search(name) and not value.startswith("/"):
            raise UsageError(f"--env {name}=*** is a secret, which {what} would show. {elsewhere}.")
