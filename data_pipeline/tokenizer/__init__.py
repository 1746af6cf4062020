"""Tokenizers: text to ids and back. Bytes, characters, a Hugging Face `tokenizer.json`, given or
trained here, a SentencePiece model, or a tiktoken file of ranks.

Each is saved as one `tokenizer.json`, whose sha256 is its identity; `load_tokenizer` reads any of
them back. Text is only ever text: a document that spells out a special token does not produce its
id, so no document can forge the end of a document. Only in what a chat template wrote
(`encode_spans`) do special tokens become their ids.
"""

import base64
from pathlib import Path
from typing import Any

from data_pipeline.errors import DataError, UserError, blame_storage
from data_pipeline.hub import download_hint
from data_pipeline.remote import RemotePath, place
from data_pipeline.shards import MANIFEST, PARTS, TOKENIZER, Manifest
from data_pipeline.strict_json import loads
from data_pipeline.tokenizer.base import END_OF_DOCUMENT, MAX_VOCABULARY, Tokenizer
from data_pipeline.tokenizer.carried import CHAT_TEMPLATE, Carried, carry_data, carry_imported
from data_pipeline.tokenizer.carried import FILE_NAME as CARRIED
from data_pipeline.tokenizer.huggingface import JsonTokenizer, bpe_entries, train_bpe
from data_pipeline.tokenizer.plain import ByteTokenizer, CharTokenizer
from data_pipeline.tokenizer.sentencepiece import SentencePieceTokenizer
from data_pipeline.tokenizer.tiktoken import TiktokenTokenizer, is_ranks, ranks_settings

__all__ = [
    "CARRIED", "CHAT_TEMPLATE", "END_OF_DOCUMENT", "MAX_VOCABULARY", "ByteTokenizer", "Carried",
    "CharTokenizer", "JsonTokenizer", "SentencePieceTokenizer", "TiktokenTokenizer", "Tokenizer",
    "bpe_entries", "carry_data", "carry_imported", "load_tokenizer", "train_bpe",
]  # fmt: skip
SETTINGS = "tokenizer_config.json"
# The folder of a run that carries its tokenizer.
TOKENIZER_FOLDER = "tokenizer"
# Says, among other things, which tokens end an answer.
GENERATION = "generation_config.json"
# What transformers keeps beside a tokenizer.json.
BESIDE = (SETTINGS, CHAT_TEMPLATE, GENERATION, "special_tokens_map.json")
_MODEL = "tokenizer.model"


def load_tokenizer(spec: str | Path | RemotePath) -> Tokenizer:
    """A tokenizer: "bytes"; a tokenizer.json, a SentencePiece .model or a .tiktoken file; or a
    directory that has one of them as tokenizer.json or tokenizer.model: prepared data or a Hugging
    Face model.

    A tokenizer_config.json beside it names the token that ends documents and, for SentencePiece,
    the special tokens. A file of ranks holds neither pattern nor special tokens: those of
    r50k_base, p50k_base, cl100k_base and o200k_base are known by the file's name; any other FILE
    needs a FILE.json beside it: {"pattern": "cl100k", "special_tokens": {"<|endoftext|>": 1000}},
    where the pattern is r50k, cl100k, o200k or a regular expression.

    Raises:
        DataError: missing, unusable, or not the manifest's.
        StorageError: it can't be read now.
        UsageError: the package that reads it is not installed.
    """
    if spec == "bytes":
        return ByteTokenizer()
    path = tokenizer_path(spec)
    carried = None
    if path.name == TOKENIZER and path.with_name(CARRIED).exists():
        # Before the file is read, so that damage is named as such.
        carried = Carried.load(path.parent)
    mend = "Name a tokenizer.json, a SentencePiece .model, a .tiktoken file, "
    mend += "a directory that has one, or `bytes`."
    try:
        tokenizer = _read(path, path.read_bytes())
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            blame_storage(str(path), error)
        mend += download_hint(spec)
        raise DataError(f"tokenizer={spec}: can't be read ({error.strerror}). {mend}") from error
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        # The last three: JSON of another shape.
        raise DataError(f"tokenizer={spec}: is not usable ({error}). {mend}") from error
    if path.name == TOKENIZER and path.with_name(MANIFEST).exists():
        entry = Manifest.load(path.parent).tokenizer
        if entry["sha256"] != tokenizer.sha256:
            what = f"expected sha256 {entry['sha256']}, found {tokenizer.sha256}"
            raise DataError(
                f"{path}: {what}: not the tokenizer that this data was built with. "
                "Restore the file, or build the data again with `prepare --overwrite`."
            )
        tokenizer.name = entry["name"]
        tokenizer.eod_id = entry["special_ids"]["eod"]
    elif carried is not None:
        tokenizer.name = carried.name
        tokenizer.eod_id = carried.eod_id
    if isinstance(tokenizer, JsonTokenizer):
        tokenizer.beside = _files_beside(path)
    return tokenizer


def _files_beside(path: Path | RemotePath) -> dict[str, bytes]:
    """What lies beside a tokenizer.json and goes with it. StorageError: it can't be read now."""
    found = {}
    try:
        for name in BESIDE:
            file = path.with_name(name)
            if file.exists():
                found[name] = file.read_bytes()
    except OSError as error:
        blame_storage(str(path.parent), error)
        raise
    return found


def tokenizer_path(spec: str | Path | RemotePath) -> Any:
    """The file that holds a tokenizer: the one given, or that of a directory, or of the part train
    in it, or the one that a run carries."""
    path = place(spec)
    if not path.is_dir():
        return path
    if (path / TOKENIZER).exists():
        return path / TOKENIZER
    if (path / _MODEL).exists():
        return path / _MODEL
    # What prepare made with --holdout has one in each part.
    train = path / PARTS[0] / TOKENIZER
    if train.exists():
        return train
    if (path / TOKENIZER_FOLDER / CARRIED).exists():
        return path / TOKENIZER_FOLDER / TOKENIZER
    return path / TOKENIZER


def read_settings(path: Path | RemotePath) -> dict[str, Any]:
    """The tokenizer_config.json beside a tokenizer, empty if there is none. ValueError: it is not a
    JSON object."""
    beside = path.with_name(SETTINGS)
    if not beside.exists():
        return {}
    content = beside.read_bytes()
    try:
        settings = loads(content)
    except ValueError as error:
        raise ValueError(f"{SETTINGS} beside it is not JSON: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{SETTINGS} beside it is not a JSON object")
    return settings


def named_token(settings: dict[str, Any], key: str) -> str | None:
    """The token that a tokenizer_config.json gives for "eos_token" and the like; None: none.
    ValueError: not a token."""
    token = settings.get(key)
    if isinstance(token, dict):
        token = token.get("content", token)
    if token is not None and not isinstance(token, str):
        raise ValueError(f"{key} of {SETTINGS} is {token!r}, not a token")
    return token


def _read(path: Path | RemotePath, content: bytes) -> Tokenizer:
    """The tokenizer of a file. ValueError, KeyError, TypeError, AttributeError: it is not
    usable."""
    name = path.parent.name or path.stem
    if content.lstrip(b" \t\r\n")[:1] in (b"{", b"["):
        record = loads(content)
        kind = None
        if isinstance(record, dict):
            kind = record.get("type")
        if kind == "bytes":
            return ByteTokenizer()
        if kind == "chars":
            if not isinstance(record["characters"], str):
                raise ValueError("characters is not a string")
            return CharTokenizer(record["characters"], record["eod"])
        if kind == "sentencepiece":
            return SentencePieceTokenizer(
                base64.b64decode(record["model"]), name, record["special"], record["eod"]
            )
        if kind == "tiktoken":
            ranks = base64.b64decode(record["ranks"])
            return TiktokenTokenizer(
                ranks, name, record["pattern"], record["special"], record["eod"]
            )
        return JsonTokenizer(content, name, named_token(read_settings(path), "eos_token"))
    settings = read_settings(path)
    if path.name != _MODEL:
        name = path.stem
    eod = named_token(settings, "eos_token")
    if is_ranks(content):
        pattern, special = ranks_settings(path)
        return TiktokenTokenizer(content, name, pattern, special, eod)
    special = _added_tokens(settings, special=True)
    tokenizer = SentencePieceTokenizer(content, name, special, eod)
    size = tokenizer.inner.piece_size()
    for token, i in _added_tokens(settings, special=False).items():
        if i >= size:
            rule = "to be found in text, which only a tokenizer.json can do"
            raise ValueError(f"{SETTINGS} adds {token!r} {rule}")
    return tokenizer


def _added_tokens(settings: dict[str, Any], special: bool) -> dict[str, int]:
    """Tokens that a tokenizer_config.json lists, the special ones or the others: ids by
    spelling."""
    added = settings.get("added_tokens_decoder", {})
    if not isinstance(added, dict):
        raise ValueError(f"added_tokens_decoder of {SETTINGS} is not an object")
    return {
        entry["content"]: int(i)
        for i, entry in added.items()
        if bool(entry.get("special")) == special
    }
