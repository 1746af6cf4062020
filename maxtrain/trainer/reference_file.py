"""Files beside prepared data with the reference log-probability of each document: the sum over its
targets.

`reference-IDENTITY.logprobs` is a line of JSON, followed by little-endian float32 numbers for all
documents of the directory, in their order, in nats; NaN: not computed yet. The JSON line, `about`,
names the data and the reference, and has a digest over the whole file. IDENTITY is a digest of
`about`, so another reference or other data use another file. No jax.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from data_pipeline.base.errors import DataError
from data_pipeline.base.strict_json import loads
from data_pipeline.shards import write_atomic

_VERSION = 1
_DIGEST = "digest"


class ReferenceFile:
    """File with the reference log-probabilities of the documents in a directory.

    Args:
        about: JSON values that determine the numbers: the uid of the data, the digest of the
            reference, and the length at which documents are cut.
        num_documents: number of documents in the directory.
        folders: possible places of the file. A new file goes to the first writable one.
    """

    def __init__(self, about: Mapping[str, Any], num_documents: int, folders: list[Path]):
        self._about = {"version": _VERSION, **about}
        self._num_documents = num_documents
        text = json.dumps(self._about, sort_keys=True).encode()
        identity = hashlib.blake2b(text, digest_size=8).hexdigest()
        self._paths = [folder / f"reference-{identity}.logprobs" for folder in folders]

    def found(self) -> Path | None:
        """Return the path of the existing file; None: there is none yet."""
        for path in self._paths:
            if path.exists():
                return path
        return None

    def parsed(self, path: Path, content: bytes) -> Float[np.ndarray, " documents"]:
        """Parse the content of a file.

        Returns:
            the log-probabilities as an array that can be written to.

        Raises:
            DataError: the file is damaged, or of other data or another reference.
        """
        line, _, body = content.partition(b"\n")
        try:
            record = loads(line)
            digest = record.pop(_DIGEST)
        except (ValueError, LookupError, TypeError, AttributeError):
            raise _unusable(path, "is damaged: it does not begin as it was written") from None
        found = _digest(record, body)
        if found != digest:
            raise _unusable(path, f"is damaged: expected digest {digest}, found {found}")
        for name in self._about.keys() | record.keys():
            expected = self._about.get(name)
            if record.get(name) != expected:
                raise _unusable(path, f"has {name}={record.get(name)}, and not {expected}")
        numbers = np.frombuffer(body, "<f4").astype(np.float32)
        if len(numbers) != self._num_documents:
            rule = f"has {len(numbers):,} numbers, and there are {self._num_documents:,} documents"
            raise _unusable(path, rule)
        if np.isinf(numbers).any():
            raise _unusable(path, "has numbers that are infinite")
        return numbers

    def save(self, numbers: Float[np.ndarray, " documents"]) -> Path:
        """Write the file atomically, and return its path. Raise a StorageError if there is no
        room."""
        path = self.found() or self._place()
        path.parent.mkdir(parents=True, exist_ok=True)
        body = numbers.astype("<f4").tobytes()
        record = {**self._about, _DIGEST: _digest(self._about, body)}
        write_atomic(path, json.dumps(record).encode() + b"\n" + body)
        return path

    def _place(self) -> Path:
        """Return where a new file is written."""
        for path in self._paths[:-1]:
            if os.access(path.parent, os.W_OK):
                return path
        return self._paths[-1]


def _digest(about: Mapping[str, Any], body: bytes) -> str:
    """Return the digest of a whole file from its JSON line and its numbers."""
    text = json.dumps(about, sort_keys=True).encode()
    return hashlib.sha256(text + b"\n" + body).hexdigest()


def _unusable(path: Path, what: str) -> DataError:
    """Return the error for a file that cannot be used."""
    return DataError(f"{path}: {what}. Delete it: it is made again when it is next needed.")
