"""manifest.json: what a directory of token shards holds, with a digest that leads to every byte of
it."""

import dataclasses
import hashlib
import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

from data_pipeline.base.errors import DataError, UserError
from data_pipeline.base.inner_names import is_file_name
from data_pipeline.base.limited_files import MAX_MANIFEST_BYTES, read_limited
from data_pipeline.base.masking import masked_values
from data_pipeline.base.remote import RemotePath
from data_pipeline.base.strict_json import loads
from data_pipeline.shards.files import num_blocks, write_atomic

VERSION = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
PARTS = ("train", "eval")  # folders that prepare makes, if something is held out
_DERIVED = ("num_tokens", "num_documents", "num_targets", "uid")
# Bytes or tokens of one directory: sums of such numbers and offsets into them fit into int64.
_MOST = 1 << 48
# Documents that belong together.
_MOST_GROUP = 64
# Batches have ids as int32.
_MOST_IDS = 1 << 31
# A check of a value, and a description of valid values.
_Rule = tuple[Callable[[Any], bool], str]


@dataclasses.dataclass(frozen=True)
class ShardEntry:
    """One shard in the manifest: `path` of the .bin relative to it; bytes and sha256 of the .bin;
    sha256 of the .crc.

    A shard with a .mask counts its set bits, `targets`, and those of them at documents' first
    tokens; None: it has no .mask. `has_values`: it has a .val. `column_bytes`: of its .cols; None:
    it has none.
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
    has_values: bool = False
    column_bytes: int | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each file of the shard, by suffix; the .crc, last, has the blocks of the others
        in this order."""
        sizes = {".bin": self.bytes, ".idx": 8 * (self.documents + 1)}
        if self.targets is not None:
            sizes[".mask"] = -(-self.tokens // 8)
        if self.has_values:
            sizes[".val"] = 4 * self.documents
        if self.column_bytes is not None:
            sizes[".cols"] = self.column_bytes
        sizes[".crc"] = 4 * sum(map(num_blocks, sizes.values()))
        return sizes


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
    )  # documents left out or repaired: counts and examples
    version: int = VERSION
    group: int = (
        1  # number of consecutive documents that belong together; 2: pairs, the chosen first
    )

    @property
    def num_tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def num_documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @property
    def num_groups(self) -> int:
        """Documents, or where some belong together, such groups: what is counted and ordered."""
        return self.num_documents // self.group

    @property
    def unit(self) -> str:
        """Name of a group in messages."""
        return {1: "document", 2: "pair"}.get(self.group, "group")

    @property
    def num_targets(self) -> int:
        """Tokens that are targets in an epoch; where documents have no end mark, nothing announces
        their first tokens."""
        count = 0
        for shard in self.shards:
            targets = shard.targets
            first_targets = shard.first_targets
            if targets is None:
                targets = shard.tokens
            if first_targets is None:
                first_targets = shard.documents
            count += targets
            if self.eod == "none":
                count -= first_targets
        return count

    @property
    def uid(self) -> str:
        """Hex digest over tokens, document borders, loss masks, numbers and columns of documents,
        tokenizer and end-of-document policy."""
        shards = []
        for s in self.shards:
            entry = [s.tokens, s.documents, s.max_id, s.sha256, s.checks_sha256]
            # The uid of shards without masks must stay what it always was.
            if s.targets is not None:
                entry.append(s.targets)
            if s.has_values:
                entry.append("values")
            if s.column_bytes is not None:
                entry.append("columns")
            shards.append(entry)
        tokenizer = {name: self.tokenizer[name] for name in ("sha256", "vocab_size", "special_ids")}
        content = [self.version, self.dtype, self.eod, self.text_bytes, tokenizer, shards]
        # Nor may that of documents which stand alone change.
        if self.group != 1:
            content.append(self.group)
        return digest_of(content)[:16]

    def save(self, directory: Path | RemotePath) -> None:
        """Write manifest.json; the last thing a builder does."""
        content = masked_values(dataclasses.asdict(self))
        # What only some data has is not written for the other, whose bytes stay what they were.
        if self.group == 1:
            del content["group"]
        for shard in content["shards"]:
            if not shard["has_values"]:
                del shard["has_values"]
            if shard["column_bytes"] is None:
                del shard["column_bytes"]
        content |= {name: getattr(self, name) for name in _DERIVED}
        content["digest"] = digest_of(content)
        write_atomic(directory / MANIFEST, (json.dumps(content, indent=1) + "\n").encode())

    @classmethod
    def load(cls, directory: Path | RemotePath) -> Self:
        """Read and check manifest.json; DataError: missing, not a manifest, of a later version, or
        changed since written."""
        path = directory / MANIFEST
        try:
            content = loads(read_limited(path, MAX_MANIFEST_BYTES))
        except OSError as error:
            raise DataError(f"{directory}: {_why_absent(directory, error)}") from error
        except UserError:
            raise
        except ValueError as error:
            raise DataError(f"{path}: is not JSON ({error}). {fix()}") from error
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
        found = digest_of(content)
        if found != expected:
            what = f"expected digest {expected}, found {found}: changed after it was built"
            raise DataError(f"{path}: {what}. {fix()}")
        content.setdefault("group", 1)
        # The digest holds, so whoever wrote the manifest wrote it so.
        for place, value, rule in _violations(content):
            found = json.dumps(value)
            if len(found) > 80:
                found = f"{found[:80]} ..."
            raise DataError(f"{path}: {place}={found} must be {rule}. {fix()}")
        content["shards"] = tuple(ShardEntry(**shard) for shard in content["shards"])
        manifest = cls(**{field.name: content[field.name] for field in dataclasses.fields(cls)})
        for name in _DERIVED:
            expected = getattr(manifest, name)
            if content.get(name, expected) != expected:
                rule = f"must be {expected}, by its shards"
                raise DataError(f"{path}: {name}={content[name]} {rule}. {fix()}")
        return manifest


def _why_absent(directory: Path | RemotePath, error: OSError) -> str:
    """Why a directory has no manifest that can be read, and what to do about it."""
    parts = sorted(path.parent.name for path in directory.glob(f"*/{MANIFEST}"))
    if parts:
        names = ", ".join(parts)
        listed = " and ".join(str(directory / part) for part in parts)
        return f"has no {MANIFEST}, but its folders {names} have. Name one of them: {listed}."
    if directory.is_dir():
        what = f"{MANIFEST}: {error.strerror}"
    else:
        what = "is not a directory of token shards"
        if isinstance(directory, RemotePath):
            what += f": {error.strerror}"
    program = "python -m data_pipeline.prepare"
    if directory.name not in PARTS:
        quoted = shlex.quote(str(directory))
        return f"{what}. Make one with `{program} {quoted} --text 'GLOB'`."
    # prepare takes the folder above: it makes both parts itself.
    above = directory.parent
    if (above / MANIFEST).exists():
        fix = "Name that, or make both parts by `prepare --holdout`"
        return f"{what}, but {above} is, made without --holdout. {fix}."
    command = f"{program} {shlex.quote(str(above))} --text 'GLOB' --holdout 0.05"
    return f"{what}. Make one with `{command}`, which makes {' and '.join(PARTS)} in it."


def _violations(content: dict[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Yield where a manifest differs from what `Manifest.save` writes: dotted path, value, rule.
    The first one counts.

    What follows one was not written to be read by it: a caller stops there.
    """
    yield from _differing("", content, _MANIFEST)
    yield from _differing("tokenizer.", content["tokenizer"], _TOKENIZER)
    vocab_size = content["tokenizer"]["vocab_size"]
    id_rule = _integer(0, vocab_size - 1)
    eod = content["tokenizer"]["special_ids"].get("eod", "")
    if eod is not None and not id_rule[0](eod):
        yield "tokenizer.special_ids.eod", eod, f"null or {id_rule[1]}"
    group = content["group"]
    for kind, entry in content["problems"].items():
        if not isinstance(entry, dict):
            yield f"problems.{kind}", entry, "an object"
        yield from _differing(f"problems.{kind}.", {"left_out": 0} | entry, _PROBLEM)
    for number, shard in enumerate(content["shards"]):
        place = f"shards[{number}]"
        if not isinstance(shard, dict):
            yield place, shard, "an object"
        yield from _differing(f"{place}.", _OPTIONAL | shard, _SHARD)
        if unknown := shard.keys() - _SHARD.keys():
            yield place, sorted(unknown), f"without keys other than {', '.join(_SHARD)}"
        yield from _companion_violations(place, shard, content["shards"][0])
        targets = shard.get("targets")
        first_targets = shard.get("first_targets")
        if (targets is None) != (first_targets is None):
            rule = "an integer where targets is one, and else null"
            yield f"{place}.first_targets", first_targets, rule
        if targets is not None and targets > shard["tokens"]:
            yield f"{place}.targets", targets, f"at most {shard['tokens']}, its tokens"
        if shard["documents"] % group:
            rule = f"a multiple of {group}, for documents that belong together share a shard"
            yield f"{place}.documents", shard["documents"], rule
        if not id_rule[0](shard["max_id"]):
            yield f"{place}.max_id", shard["max_id"], id_rule[1]
        token_bytes = {"uint16": 2, "uint32": 4}[content["dtype"]]
        size = shard["tokens"] * token_bytes
        if shard["bytes"] != size:
            rule = f"{size}, for {shard['tokens']} tokens of {content['dtype']}"
            yield f"{place}.bytes", shard["bytes"], rule


def _companion_violations(
    place: str, shard: dict[str, Any], first: dict[str, Any]
) -> Iterator[tuple[str, Any, str]]:
    """Files that some shards have, and others not."""
    has_values = shard.get("has_values", False)
    if has_values != first.get("has_values", False):
        yield f"{place}.has_values", has_values, "as in the first shard"
    column_bytes = shard.get("column_bytes")
    if (column_bytes is None) != (first.get("column_bytes") is None):
        yield f"{place}.column_bytes", column_bytes, "an integer in all shards, or in none"


def _differing(
    place: str, content: dict[str, Any], rules: dict[str, _Rule]
) -> Iterator[tuple[str, Any, str]]:
    """The values of an object that break its rules."""
    for name, (is_good, rule) in rules.items():
        # A value that is not there is never good, whatever the rule: `object()` is of no type.
        if not is_good(content.get(name, _ABSENT)):
            yield f"{place}{name}", content.get(name), rule


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
    "group": _integer(1, _MOST_GROUP),
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
        lambda value: is_file_name(value) and _FILE.fullmatch(value) is not None,
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
    "has_values": (lambda value: isinstance(value, bool), "true or false"),
    "column_bytes": _optional_integer(),
}
# What a shard need not say.
_OPTIONAL = {"targets": None, "first_targets": None, "has_values": False, "column_bytes": None}


def digest_of(value: Any) -> str:
    """Hex sha256 of a value, by its JSON with sorted keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def fix(command: str = "") -> str:
    """Return the advice for a directory that has changed since it was built."""
    command = command or "python -m data_pipeline.prepare ..."
    return f"Restore it from a copy, or build it again: `{command} --overwrite`."
