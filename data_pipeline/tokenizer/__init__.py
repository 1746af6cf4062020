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

from data_pipeline.base.errors import DataError, UserError, blame_storage
from data_pipeline.base.hub import download_hint
from data_pipeline.base.limited_files import MAX_TOKENIZER_BYTES, read_limited
from data_pipeline.base.remote import RemotePath, place
from data_pipeline.base.strict_json import loads
from data_pipeline.shards import MANIFEST, PARTS, TOKENIZER, Manifest
from data_pipeline.tokenizer.base import END_OF_DOCUMENT, MAX_VOCABULARY, Tokenizer
from data_pipeline.tokenizer.beside import (
    BESIDE,
    CHAT_TEMPLATE,
    GENERATION,
    MORE_TEMPLATES,
    PROCESSOR_TEMPLATE,
    SETTINGS,
    SPECIAL_TOKENS,
    declared_tokens,
    files_beside,
    more_templates,
    named_token,
    named_tokens,
    read_beside,
    read_settings,
)
from data_pipeline.tokenizer.byte_level import byte_level_bpe
from data_pipeline.tokenizer.carried import FILE_NAME as CARRIED
from data_pipeline.tokenizer.carried import TokenizerRecord, carry_data, carry_imported
from data_pipeline.tokenizer.huggingface import JsonTokenizer, bpe_entries, train_bpe
from data_pipeline.tokenizer.plain import ByteTokenizer, CharTokenizer
from data_pipeline.tokenizer.sentencepiece import SentencePieceTokenizer
from data_pipeline.tokenizer.tiktoken import TiktokenTokenizer, is_ranks, ranks_settings

__all__ = [
    "BESIDE",
    "CARRIED",
    "CHAT_TEMPLATE",
    "END_OF_DOCUMENT",
    "GENERATION",
    "MAX_VOCABULARY",
    "MORE_TEMPLATES",
    "PROCESSOR_TEMPLATE",
    "SETTINGS",
    "SPECIAL_TOKENS",
    "TOKENIZER_FOLDER",
    "ByteTokenizer",
    "CharTokenizer",
    "JsonTokenizer",
    "SentencePieceTokenizer",
    "TiktokenTokenizer",
    "Tokenizer",
    "TokenizerRecord",
    "bpe_entries",
    "carry_data",
    "carry_imported",
    "files_beside",
    "load_tokenizer",
    "more_templates",
    "named_token",
    "named_tokens",
    "read_beside",
    "read_settings",
    "tokenizer_path",
    "train_bpe",
    "unused_tokenizers",
]  # fmt: skip
# The folder of a run that carries its tokenizer.
TOKENIZER_FOLDER = "tokenizer"
_MODEL = "tokenizer.model"
_VOCABULARY = "vocab.json"
_MERGES = "merges.txt"
_TEKKEN = "tekken.json"
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


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
        carried = TokenizerRecord.load(path.parent)
    fix = "Name a tokenizer.json, a SentencePiece .model, a .tiktoken file, "
    fix += "a directory that has one, or `bytes`."
    try:
        tokenizer = _read(path, read_limited(path, MAX_TOKENIZER_BYTES))
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            blame_storage(str(path), error)
        fix += download_hint(spec)
        raise DataError(f"tokenizer={spec}: can't be read ({error.strerror}). {fix}") from error
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        # The last three: JSON of another shape.
        raise DataError(f"tokenizer={spec}: is not usable ({error}). {fix}") from error
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
        tokenizer.beside = files_beside(path)
    return tokenizer


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
    if (path / _VOCABULARY).exists() and (path / _MERGES).exists():
        return path / _VOCABULARY
    # What prepare made with --holdout has one in each part.
    train = path / PARTS[0] / TOKENIZER
    if train.exists():
        return train
    if (path / TOKENIZER_FOLDER / CARRIED).exists():
        return path / TOKENIZER_FOLDER / TOKENIZER
    if (path / _TEKKEN).exists():
        return path / _TEKKEN
    return path / TOKENIZER


def unused_tokenizers(spec: str | Path | RemotePath) -> list[str]:
    """The files in a directory that hold a tokenizer of another kind than the one that is used."""
    directory = place(spec)
    if not directory.is_dir():
        return []
    used = tokenizer_path(spec)
    kinds = (TOKENIZER, _MODEL, _VOCABULARY, _TEKKEN)
    return [name for name in kinds if name != used.name and used.with_name(name).exists()]


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
        return _read_json(path, content, record, name)
    settings = read_settings(path)
    if path.name != _MODEL:
        name = path.stem
    eod = named_token(settings, "eos_token")
    if is_ranks(content):
        pattern, special = ranks_settings(path)
        return TiktokenTokenizer(content, name, pattern, special, eod)
    if content.startswith(_LFS_POINTER):
        raise ValueError("is a pointer of Git LFS, not the file itself. Run `git lfs pull` there")
    declared = declared_tokens(path, settings)
    special = {
        token.content: token.id
        for token in declared
        if token.id is not None and token.flags.get("special")
    }
    tokenizer = SentencePieceTokenizer(content, name, special, eod)
    size = tokenizer.inner.piece_size()
    for token in declared:
        if token.id is not None and token.id >= size and token.content not in special:
            rule = "to be found in text, which only a tokenizer.json can do"
            raise ValueError(f"a file beside it adds {token.content!r} {rule}")
    return tokenizer


def _read_json(path: Path | RemotePath, content: bytes, record: Any, name: str) -> JsonTokenizer:
    """The tokenizer of a tokenizer.json, or of a vocab.json with merges.txt beside it, and of the
    tokens that files beside it declare. ValueError: it is not usable."""
    settings = read_settings(path)
    if path.name == _TEKKEN or (isinstance(record, dict) and {"config", "vocab"} <= record.keys()):
        convert = "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        raise ValueError(
            "it is Mistral's tekken.json, which is not supported. Use the tokenizer.json of the "
            f"same repository, or write one: transformers does, with {convert}"
        )
    if path.name == _VOCABULARY:
        merges = path.with_name(_MERGES)
        if not merges.exists():
            raise ValueError(f"{_VOCABULARY} needs {_MERGES} beside it")
        model = read_beside(path, "config.json").get("model_type")
        content, defaults = byte_level_bpe(
            record, read_limited(merges, MAX_TOKENIZER_BYTES), settings, model
        )
        settings = defaults | settings
    declared = declared_tokens(path, settings)
    return JsonTokenizer(content, name, named_token(settings, "eos_token"), declared)
