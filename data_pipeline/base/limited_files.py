"""Files of strangers that are read whole, up to a number of bytes."""

from pathlib import Path

from data_pipeline.base.errors import DataError
from data_pipeline.base.remote import RemotePath

# A tokenizer with its merges. Those of large models have 10 to 35 MB.
MAX_TOKENIZER_BYTES = 1 << 28
# A manifest has some 400 bytes for each shard.
MAX_MANIFEST_BYTES = 1 << 28


def read_limited(path: Path | RemotePath, most: int) -> bytes:
    """Return the content of a file.

    Args:
        path: of the file, here or behind a URL.
        most: bytes that it may have.

    Raises:
        OSError: it can't be read.
        DataError: it is longer.
    """
    if isinstance(path, RemotePath):
        if path.found().size > most:
            raise _too_long(path, most)
        return path.read_bytes()
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise _too_long(path, most)
    return content


def _too_long(path: Path | RemotePath, most: int) -> DataError:
    return DataError(
        f"{path}: has more than {most:,} bytes, which is the most that is read of such a file. "
        "Get the file again from where it is from."
    )
