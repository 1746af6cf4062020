"""Names of models on the Hugging Face Hub, where the path of a directory is expected."""

import os
import re

_NAME = re.compile(r"(?:[A-Za-z0-9][\w.-]*)/(?P<name>[A-Za-z0-9][\w.-]*)")
# The first folder of paths that are common here, and of no model on the Hub.
_USUAL_FOLDERS = ("checkpoints", "data", "exported", "models", "runs")


def download_hint(place: object) -> str:
    """A sentence about downloading a model, behind a message that `place` is not there.

    Args:
        place: what was given as the directory of a model.

    Returns:
        The sentence, with a space before it. Empty if `place` does not look like OWNER/NAME, or if
        it may be a path: it exists, or the folder that it would be in does.
    """
    text = str(place)
    found = _NAME.fullmatch(text)
    owner = text.partition("/")[0]
    if found is None or owner in _USUAL_FOLDERS or os.path.lexists(owner):
        return ""
    folder = f"models/{found['name']}"
    return (
        f" If {text} is a model on the Hugging Face Hub, download it with `hf download {text} "
        f"--local-dir {folder}`, and use {folder} in its place."
    )
