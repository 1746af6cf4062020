"""A cheap hash of the weights on a disk, to check whether hosts have the same."""

import hashlib
from pathlib import Path

import numpy as np

from maxtrain.weights.hf import INDEX, tensor_files

_BLOCK = 4096
_MOST_BLOCKS = 64


def sampled_hash(directory: str | Path) -> str:
    """Return 16 hex digits that identify the weight files of a Hugging Face directory.

    It covers the size of each file and up to 64 blocks of 4 KiB, the first and the last ones among
    them: other weights have another hash. Weights that differ in a few numbers may have the same.
    """
    folder = Path(directory).expanduser()
    found = hashlib.blake2b(digest_size=8)
    index = folder / INDEX
    files = [folder / "config.json", *tensor_files(folder)]
    # The file that a tensor is read from is a property of the weights, too.
    if index.exists():
        files.append(index)
    for path in files:
        size = path.stat().st_size
        found.update(f"{path.name} {size}\n".encode())
        blocks = -(-size // _BLOCK)
        numbers = np.linspace(0, max(0, blocks - 1), min(blocks, _MOST_BLOCKS))
        with path.open("rb") as file:
            for number in numbers.astype(np.int64).tolist():
                file.seek(number * _BLOCK)
                found.update(file.read(_BLOCK))
    return found.hexdigest()
