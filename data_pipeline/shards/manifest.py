"""manifest.json: what a directory of token shards holds, with a digest that leads to every byte of
it."""

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

from data_pipeline.errors import DataError, UserError
from data_pipeline.remote import RemotePath
from data_pipeline.shards.files import num_blocks, write_atomic
from data_pipeline.strict_json import loads

VERSION = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
PARTS = ("train", "eval")  # folders that prepare makes, if something is held out
_DERIVED = ("num_tokens", "num_documents", "num_targets", "uid")
_MOST = (
    1 << 48
)  # bytes or tokens of one directory: sums of such numbers and offsets into them fit into int64
_MOST_IDS = 1 << 31  # batches have ids as int32
_Rule = tuple[
    Callable[[Any], bool], str
]  # whether a value is good, and what a good one is, in words


@dataclasses.dataclass(frozen=True)
class ShardEntry:
    """One shard in the manifest: `path` of the .bin relative to it; bytes and sha256 of the .bin;
    sha256 of the .crc.

    A shard with a .mask counts its set bits, `targets`, and those of them at documents' first
    tokens; None: it has no .mask.
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
        """Bytes of each file of the shard, by suffix; the .crc, last, has the blocks of the others
        in this order."""
        sizes = {".bin": self.bytes, ".idx": 8 * (self.documents + 1)}
        sizes |= {} if self.targets is None else {".mask": -(-self.tokens // 8)}
        return sizes | {".crc": 4 * sum(map(num_blocks, sizes.values()))}


@dataclasses.dataclass(frozen=True)
class Manifest:
    """manifest.json. `uid` is the identity of the content: the same for equal tokens, whatever the
    place or command."""

    tokenizer: dict[str, Any]  # name, sha256, vocab_size, special_ids {"eod": id or None}
    dtype: str  # uint16 | uint32
    eod: str  # append | none
    text_bytes: int  # UTF-8 bytes of all documents, without end-of-document marks
    shards: tuple[ShardEntry, ...]
    sources: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    command: str = ""
    problems: dict[str, Any] = dataclasses.field(
        default_factory=dict
    )  # what was left out or mended: counts and examples
    version: int = VERSION

    @property
    def num_tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def num_documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @property
    def num_targets(self) -> int:
        """Tokens that are targets in an epoch; where documents have no end mark, nothing announces
        their first tokens."""
        targets = sum(s.tokens if s.targets is None else s.targets for s in self.shards)
        first = sum(
            s.documents if s.first_targets is None else s.first_targets for s in self.shards
        )
        return targets - (first if self.eod == "none" else 0)

    @property
    def uid(self) -> str:
        """Hex digest over tokens, document borders, loss masks, tokenizer and end-of-document
        policy."""
        shards = [[s.tokens, s.documents, s.max_id, s.sha256, s.checks_sha256] for s in self.shards]
        for shard, content in zip(
            self.shards, shards
        ):  # the uid of shards without masks must stay what it always was
            content += [] if shard.targets is None else [shard.targets]
        tokenizer = {name: self.tokenizer[name] for name in ("sha256", "vocab_size", "special_ids")}
        return digest_of([self.version, self.dtype, self.eod, self.text_bytes, tokenizer, shards])[
            :16
        ]

    def save(self, directory: Path | RemotePath) -> None:
        """Write manifest.json; the last thing a builder does."""
        content = dataclasses.asdict(self)
        content |= {name: getattr(self, name) for name in _DERIVED}
        content["digest"] = digest_of(content)
        write_atomic(directory / MANIFEST, (json.dumps(content, indent=1) + "\n").encode())

    @classmethod
    def load(cls, directory: Path | RemotePath) -> Self:
        """Read and check manifest.json; DataError: missing, not a manifest, of a later version, or
        changed since written."""
        path = directory / MANIFEST
        try:
            content = loads(path.read_bytes())
        except OSError as error:
            raise DataError(f"{directory}: {_why_absent(directory, error)}") from error
        except UserError:
            raise
        except ValueError as error:
            raise DataError(f"{path}: is not JSON ({error}). {mend()}") from error
        if not isinstance(content, dict) or not {"version", "shards", "digest"} <= content.keys():
            raise DataError(
                f"{path}: is not a manifest of token shards. Name a directory that `prepare` made."
            )
        if content["version"] != VERSION:
            raise DataError(
                f"{path}: version={content['version']}, but this program reads version {VERSION}. "
                "Update the program, or build the data again with `prepare --overwrite`."
            )
        expected = content.pop("digest")
        if (found := digest_of(content)) != expected:
            raise DataError(
                f"{path}: expected digest {expected}, found {found}: changed after it was built. {mend()}"
            )
        for place, value, rule in _violations(
            content
        ):  # the digest holds, so whoever wrote it wrote it so
            found = json.dumps(value)
            found = found if len(found) <= 80 else f"{found[:80]} ..."
            raise DataError(f"{path}: {place}={found} must be {rule}. {mend()}")
        content["shards"] = tuple(ShardEntry(**shard) for shard in content["shards"])
        manifest = cls(**{field.name: content[field.name] for field in dataclasses.fields(cls)})
        for name in _DERIVED:
            expected = getattr(manifest, name)
            if content.get(name, expected) != expected:
                raise DataError(
                    f"{path}: {name}={content[name]} must be {expected}, by its shards. {mend()}"
                )
        return manifest


def _why_absent(directory: Path | RemotePath, error: OSError) -> str:
    """Why a directory has no manifest that can be read, and what to do about it."""
    if parts := sorted(path.parent.name for path in directory.glob(f"*/{MANIFEST}")):
        listed = " and ".join(str(directory / part) for part in parts)
        return f"has no {MANIFEST}, but its folders {', '.join(parts)} have. Name one of them: {listed}."
    if directory.is_dir():
        what = f"{MANIFEST}: {error.strerror}"
    else:
        what = "is not a directory of token shards"
        what += f": {error.strerror}" if isinstance(directory, RemotePath) else ""
    program = "python -m data_pipeline.prepare"
    if directory.name not in PARTS:
        return f"{what}. Make one with `{program} {directory} --text 'GLOB'`."
    above = directory.parent  # what prepare is to be told: it makes both parts itself
    if (above / MANIFEST).exists():
        return f"{what}, but {above} is, made without --holdout. Name that, or make both parts by `prepare --holdout`."
    parts = " and ".join(PARTS)
    return f"{what}. Make one with `{program} {above} --text 'GLOB' --holdout 0.05`, which makes {parts} in it."


def _violations(content: dict[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Where a manifest differs from what `Manifest.save` writes: dotted path, value, rule. The
    first one counts.

    What follows one was not written to be read by it: a caller stops there.
    """
    yield from _differing("", content, _MANIFEST)
    yield from _differing("tokenizer.", content["tokenizer"], _TOKENIZER)
    vocab_size = content["tokenizer"]["vocab_size"]
    id_rule = _integer(0, vocab_size - 1)
    eod = content["tokenizer"]["special_ids"].get("eod", "")
    if eod is not None and not id_rule[0](eod):
        yield "tokenizer.special_ids.eod", eod, f"null or {id_rule[1]}"
    for kind, entry in content["problems"].items():
        if not isinstance(entry, dict):
            yield f"problems.{kind}", entry, "an object"
        yield from _differing(f"problems.{kind}.", {"left_out": 0} | entry, _PROBLEM)
    for number, shard in enumerate(content["shards"]):
        place = f"shards[{number}]"
        if not isinstance(shard, dict):
            yield place, shard, "an object"
        yield from _differing(f"{place}.", {"targets": None, "first_targets": None} | shard, _SHARD)
        if unknown := shard.keys() - _SHARD.keys():
            yield place, sorted(unknown), f"without keys other than {', '.join(_SHARD)}"
        targets, first_targets = shard.get("targets"), shard.get("first_targets")
        if (targets is None) != (first_targets is None):
            yield (
                f"{place}.first_targets",
                first_targets,
                "an integer where targets is one, and else null",
            )
        if targets is not None and targets > shard["tokens"]:
            yield f"{place}.targets", targets, f"at most {shard['tokens']}, its tokens"
        if not id_rule[0](shard["max_id"]):
            yield f"{place}.max_id", shard["max_id"], id_rule[1]
        size = shard["tokens"] * (2 if content["dtype"] == "uint16" else 4)
        if shard["bytes"] != size:
            yield (
                f"{place}.bytes",
                shard["bytes"],
                f"{size}, for {shard['tokens']} tokens of {content['dtype']}",
            )


def _differing(
    place: str, content: dict[str, Any], rules: dict[str, _Rule]
) -> Iterator[tuple[str, Any, str]]:
    """The values of an object that break its rules."""
    for name, (is_good, rule) in rules.items():
        value = content.get(name, _ABSENT)
        if not is_good(value):
            yield f"{place}{name}", None if value is _ABSENT else value, rule


_ABSENT = object()


def _integer(low: int, high: int = _MOST) -> _Rule:
    return (
        lambda value: type(value) is int and low <= value <= high,
        f"an integer in [{low}, {high}]",
    )


def _optional_integer() -> _Rule:
    is_integer, rule = _integer(0)
    return lambda value: value is None or is_integer(value), f"null or {rule}"


def _one_of(*values: str) -> _Rule:
    return lambda value: isinstance(value, str) and value in values, " or ".join(map(repr, values))


def _a(kind: type, rule: str) -> _Rule:
    return lambda value: isinstance(value, kind), rule


def _list_of(kind: type, rule: str) -> _Rule:
    return (
        lambda value: isinstance(value, list) and all(isinstance(item, kind) for item in value),
        rule,
    )


_TEXT = _a(str, "a string")
_OBJECT = _a(dict, "an object")
_FILE = re.compile(r"[\w-][\w.-]*\.bin")
_MANIFEST: dict[str, _Rule] = {
    "tokenizer": _OBJECT,
    "dtype": _one_of("uint16", "uint32"),
    "eod": _one_of("append", "none"),
    "text_bytes": _integer(0),
    "shards": _a(list, "a list"),
    "sources": _list_of(dict, "a list of objects"),
    "settings": _OBJECT,
    "command": _TEXT,
    "problems": _OBJECT,
    "version": _integer(VERSION, VERSION),
}
_TOKENIZER: dict[str, _Rule] = {
    "name": _TEXT,
    "sha256": _TEXT,
    "vocab_size": _integer(1, _MOST_IDS),
    "special_ids": _OBJECT,
}
_PROBLEM: dict[str, _Rule] = {
    "count": _integer(0),
    "left_out": _integer(0),
    "examples": _list_of(str, "a list of strings"),
}
_SHARD: dict[str, _Rule] = {
    "path": (
        lambda value: isinstance(value, str) and _FILE.fullmatch(value) is not None,
        "the name of a .bin file beside the manifest",
    ),
    "tokens": _integer(1),
    "documents": _integer(1),
    "bytes": _integer(1),
    "sha256": _TEXT,
    "max_id": _integer(0),
    "checks_sha256": _TEXT,
    "targets": _optional_integer(),
    "first_targets": _optional_integer(),
}


def digest_of(value: Any) -> str:
    """Hex sha256 of a value, by its JSON with sorted keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def mend(command: str = "") -> str:
    """What to do about a directory that is not what it was when it was built."""
    return f"Restore it from a copy, or build it again: `{command or 'python -m data_pipeline.prepare ...'} --overwrite`."
