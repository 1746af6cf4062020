"""manifest.json: what a directory of token shards holds, with a digest that leads to every byte of it."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any, Self

from data_pipeline.errors import DataError, UserError
from data_pipeline.remote import RemotePath
from data_pipeline.shards.files import num_blocks, write_atomic

VERSION = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"


@dataclasses.dataclass(frozen=True)
class ShardEntry:
    """One shard in the manifest: `path` of the .bin relative to it; bytes and sha256 of the .bin; sha256 of the .crc.

    A shard with a .mask counts its set bits, `targets`, and those of them at documents' first tokens; None: it has no .mask.
    """

    path: str
    tokens: int
    documents: int
    bytes: int
    sha256: str
    max_id: int
    checks_sha256: str
    targets: int | None = None
    first_targets: int | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each file of the shard, by suffix; the .crc, last, has the blocks of the others in this order."""
        sizes = {".bin": self.bytes, ".idx": 8 * (self.documents + 1)}
        sizes |= {} if self.targets is None else {".mask": -(-self.tokens // 8)}
        return sizes | {".crc": 4 * sum(map(num_blocks, sizes.values()))}


@dataclasses.dataclass(frozen=True)
class Manifest:
    """manifest.json. `uid` is the identity of the content: the same for equal tokens, whatever the place or command."""

    tokenizer: dict[str, Any]  # name, sha256, vocab_size, special_ids {"eod": id or None}
    dtype: str  # uint16 | uint32
    eod: str  # append | none
    text_bytes: int  # UTF-8 bytes of all documents, without end-of-document marks
    shards: tuple[ShardEntry, ...]
    sources: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    command: str = ""
    problems: dict[str, Any] = dataclasses.field(default_factory=dict)  # what was left out or mended: counts and examples
    version: int = VERSION

    @property
    def num_tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def num_documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @property
    def num_targets(self) -> int:
        """Tokens that are targets in an epoch; where documents have no end mark, nothing announces their first tokens."""
        targets = sum(s.tokens if s.targets is None else s.targets for s in self.shards)
        first = sum(s.documents if s.first_targets is None else s.first_targets for s in self.shards)
        return targets - (first if self.eod == "none" else 0)

    @property
    def uid(self) -> str:
        """Hex digest over tokens, document borders, loss masks, tokenizer and end-of-document policy."""
        shards = [[s.tokens, s.documents, s.max_id, s.sha256, s.checks_sha256] for s in self.shards]
        for shard, content in zip(self.shards, shards):  # the uid of shards without masks must stay what it always was
            content += [] if shard.targets is None else [shard.targets]
        tokenizer = {name: self.tokenizer[name] for name in ("sha256", "vocab_size", "special_ids")}
        return _digest([self.version, self.dtype, self.eod, self.text_bytes, tokenizer, shards])[:16]

    def save(self, directory: Path | RemotePath) -> None:
        """Write manifest.json; the last thing a builder does."""
        content = dataclasses.asdict(self)
        names = ("num_tokens", "num_documents", "num_targets", "uid")
        content |= {name: getattr(self, name) for name in names}
        content["digest"] = _digest(content)
        write_atomic(directory / MANIFEST, (json.dumps(content, indent=1) + "\n").encode())

    @classmethod
    def load(cls, directory: Path | RemotePath) -> Self:
        """Read and check manifest.json; DataError: missing, not a manifest, of a later version, or changed since written."""
        path = directory / MANIFEST
        try:
            content = json.loads(path.read_bytes())
        except OSError as error:
            if parts := sorted(p.parent.name for p in directory.glob(f"*/{MANIFEST}")):
                message = f"has no {MANIFEST}, but its folders {', '.join(parts)} have. Name one of them."
            else:
                absent = not directory.is_dir()
                what = "is not a directory of token shards" if absent else f"{MANIFEST}: {error.strerror}"
                what += f": {error.strerror}" if absent and isinstance(directory, RemotePath) else ""
                message = f"{what}. Make one with `python -m data_pipeline.prepare {directory} --text 'GLOB'`."
            raise DataError(f"{directory}: {message}") from error
        except UserError:
            raise
        except ValueError as error:
            raise DataError(f"{path}: is not JSON ({error}). {mend()}") from error
        if not isinstance(content, dict) or not {"version", "shards", "digest"} <= content.keys():
            raise DataError(f"{path}: is not a manifest of token shards. Name a directory that `prepare` made.")
        if content["version"] != VERSION:
            raise DataError(
                f"{path}: version={content['version']}, but this program reads version {VERSION}. "
                "Update the program, or build the data again with `prepare --overwrite`."
            )
        expected = content.pop("digest")
        if (found := _digest(content)) != expected:
            raise DataError(f"{path}: expected digest {expected}, found {found}: changed after it was built. {mend()}")
        content["shards"] = tuple(ShardEntry(**shard) for shard in content["shards"])
        return cls(**{field.name: content[field.name] for field in dataclasses.fields(cls)})


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def mend(command: str = "") -> str:
    """What to do about a directory that is not what it was when it was built."""
    return f"Restore it from a copy, or build it again: `{command or 'python -m data_pipeline.prepare ...'} --overwrite`."
