"""Steps of older formats, as this version reads them; what is on the disk stays as it is.

Whoever changes what a commit record or a caller's record says raises FORMAT in integrity.py by one
and adds to MIGRATIONS a function of the format before: (commit, record) -> (commit, record),
without side effects. An array that has another name now is moved in `commit["arrays"]`, and says
under `stored` by which name the files have it.
"""

import re
from collections.abc import Callable
from typing import Any

from maxtrain.checkpoint.integrity import FORMAT

Entries = dict[str, Any]


def _without_hashes(commit: Entries, record: Entries) -> tuple[Entries, Entries]:
    """Format 1 had no hashes of files, and digests of arrays, if any, in the record.

    What is not there is not checked.
    """
    digests = record.get("digests", {})
    arrays = {}
    for name, array in commit.get("arrays", {}).items():
        arrays[name] = dict(array)
        if name in digests:
            arrays[name]["digest"] = digests[name]
    return commit | {"arrays": arrays}, record


def _of_no_run(commit: Entries, record: Entries) -> tuple[Entries, Entries]:
    """Format 2 did not say of which run a step is, and whether arrays are finite.

    What is not there is not checked.
    """
    return commit, record


def rename_arrays(commit: Entries, names: dict[str, str]) -> Entries:
    """For migrations: the commit record with its arrays under new names.

    Args:
        names: the new name of each old one; an array that is not among them keeps its name.
    """
    moved = {}
    for name, array in commit["arrays"].items():
        moved[names.get(name, name)] = {"stored": name} | array
    return commit | {"arrays": moved}


_LAYER = re.compile(r"(^|\.)layers\.(?=(attention|mlp)(_norm)?\.)")
_LAYER_MATRIX = re.compile(r"((^|\.)layers\.0\.(attention\.[qkvo]|mlp\.(gate|up|down)))(?=\.|$)")
_HEAD = re.compile(r"(^|\.)head(?=\.|$)")


def _plain_names(commit: Entries, record: Entries) -> tuple[Entries, Entries]:
    """Format 3 had `layers.attention.q` for `layers.0.attention.q.kernel`, and `head` for
    `head.kernel`; so had whatever the optimizer keeps of each."""
    names = {}
    for name in commit.get("arrays", {}):
        new = _LAYER.sub(r"\1layers.0.", name)
        new = _LAYER_MATRIX.sub(r"\1.kernel", new)
        names[name] = _HEAD.sub(r"\1head.kernel", new)
    return rename_arrays(commit, names), record


# From n to n + 1.
MIGRATIONS: dict[int, Callable[[Entries, Entries], tuple[Entries, Entries]]] = {
    1: _without_hashes,
    2: _of_no_run,
    3: _plain_names,
}


def migrate(commit: Entries, record: Entries) -> tuple[Entries, Entries]:
    """Both as this version would have written them; those of a newer format as they are."""
    for number in range(commit["format"], FORMAT):
        commit, record = MIGRATIONS[number](commit, record)
        commit = commit | {"format": number + 1}
    return commit, record
