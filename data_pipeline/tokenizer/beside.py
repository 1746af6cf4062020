"""Files beside a tokenizer: settings, the tokens that they declare, and chat templates.

Precedence is that of transformers. A tokenizer_config.json with `added_tokens_decoder` says all
about tokens. Without it, special_tokens_map.json replaces the names in tokenizer_config.json, and
added_tokens.json lists tokens with their ids.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from data_pipeline.base.errors import blame_storage
from data_pipeline.base.limited_files import read_limited
from data_pipeline.base.remote import RemotePath
from data_pipeline.base.strict_json import MAX_FILE_BYTES, loads

SETTINGS = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
CHAT_TEMPLATE = "chat_template.jinja"
# A folder of chat templates, each named for its file.
MORE_TEMPLATES = "additional_chat_templates"
# Where processors of older versions of transformers keep a chat template.
PROCESSOR_TEMPLATE = "chat_template.json"
# Says, among other things, which tokens end an answer.
GENERATION = "generation_config.json"
# What transformers keeps beside a tokenizer.json, but for `MORE_TEMPLATES`.
BESIDE = (
    SETTINGS,
    CHAT_TEMPLATE,
    PROCESSOR_TEMPLATE,
    GENERATION,
    SPECIAL_TOKENS,
    ADDED_TOKENS,
)
DECODER = "added_tokens_decoder"
# The order in which transformers adds tokens that only have a name.
_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
# Special tokens without a name; the second is what older versions of transformers call them.
_EXTRA = "extra_special_tokens"
_ADDITIONAL = "additional_special_tokens"
_SPECIFIC = "model_specific_special_tokens"
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")


class DeclaredToken(NamedTuple):
    """A token that a file beside a tokenizer.json declares.

    Attributes:
        content: its text.
        id: None if the file only has its text.
        flags: of tokenizers.AddedToken.
        is_named: whether it is the eos_token or the like, which is special whatever flags say.
    """

    content: str
    id: int | None
    flags: dict[str, bool]
    is_named: bool = False


def read_beside(path: Path | RemotePath, name: str) -> dict[str, Any]:
    """The JSON object in a file beside a tokenizer; empty if there is no such file.

    ValueError: it is not a JSON object.
    """
    beside = path.with_name(name)
    if not beside.exists():
        return {}
    content = read_limited(beside, MAX_FILE_BYTES)
    try:
        found = loads(content)
    except ValueError as error:
        raise ValueError(f"{name} beside it is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{name} beside it is not a JSON object")
    return found


def read_settings(path: Path | RemotePath) -> dict[str, Any]:
    """The tokenizer_config.json beside a tokenizer, with what special_tokens_map.json adds.

    Tokens with names of the model's own kind, such as image_token, are in
    `model_specific_special_tokens`; `extra_special_tokens` is a list or missing.

    ValueError: one of the files is not a JSON object.
    """
    settings = read_beside(path, SETTINGS)
    more = {}
    if DECODER not in settings:
        more = read_beside(path, SPECIAL_TOKENS)
    specific = dict(_mapping(settings.get(_SPECIFIC)))
    for key, value in settings.items():
        if key.endswith("_token") and key not in _NAMES and isinstance(value, str):
            specific[key] = value
    for found in (settings, more):
        if isinstance(found.get(_EXTRA), dict):
            specific |= found.pop(_EXTRA)
    has_extra = _EXTRA in settings or _ADDITIONAL in settings
    extra = settings.get(_EXTRA) or settings.get(_ADDITIONAL)
    for key, value in more.items():
        if key == _EXTRA and isinstance(value, list) and isinstance(extra, list):
            value = extra + [token for token in value if token not in extra]
        if key != _ADDITIONAL or not has_extra:
            settings[key] = value
    if specific:
        settings[_SPECIFIC] = specific
    return settings


def named_token(settings: Mapping[str, Any], key: str) -> str | None:
    """The token that a tokenizer's settings give for "eos_token" and the like; None: none.

    ValueError: not a token.
    """
    token = settings.get(key)
    if isinstance(token, dict):
        token = token.get("content", token)
    if token is not None and not isinstance(token, str):
        raise ValueError(f"{key} of {SETTINGS} is {token!r}, not a token")
    return token


def named_tokens(settings: Mapping[str, Any]) -> dict[str, str | None]:
    """All tokens that settings of `read_settings` name.

    ValueError: one is not a token.
    """
    named = _named(settings)
    return {key: named_token(named, key) for key in named}


def _named(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of settings that name a token."""
    named: dict[str, Any] = {}
    for key, value in settings.items():
        # add_bos_token and the like say whether, not which.
        if key in _NAMES or (key.endswith("_token") and not isinstance(value, bool)):
            named[key] = value
    return named | _mapping(settings.get(_SPECIFIC))


def declared_tokens(path: Path | RemotePath, settings: Mapping[str, Any]) -> list[DeclaredToken]:
    """The tokens that the files beside a tokenizer declare, in the order in which they are added.

    Args:
        path: of the tokenizer.
        settings: of `read_settings`.

    Raises:
        ValueError: a declaration is not a token.
    """
    entries = _named(settings)
    named = named_tokens(settings)
    extra = list(_extra_tokens(settings))
    found = list(_with_ids(path, settings, {*named.values(), *(token.content for token in extra)}))
    for key in [*_NAMES, *(key for key in named if key not in _NAMES)]:
        content = named.get(key)
        if content:
            flags = _flags(entries[key], key) | {"special": True}
            found.append(DeclaredToken(content, None, flags, is_named=True))
    return [*found, *extra]


def _mapping(value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    return {}


def _with_ids(
    path: Path | RemotePath, settings: Mapping[str, Any], special: set[str | None]
) -> Iterator[DeclaredToken]:
    """The tokens that are declared with ids, by their ids; `special`: those of other keys."""
    if DECODER in settings:
        decoder = settings[DECODER]
        if not isinstance(decoder, dict):
            raise ValueError(f"{DECODER} of {SETTINGS} is not an object")
        declared = [(_id(i, DECODER), token) for i, token in decoder.items()]
        for i, token in sorted(declared, key=lambda pair: pair[0]):
            if not isinstance(token, dict):
                raise ValueError(f"{DECODER} of {SETTINGS}: {i} is {token!r}, not an object")
            content = token.get("content")
            if not isinstance(content, str) or not content:
                raise ValueError(f"{DECODER} of {SETTINGS}: {i} has the content {content!r}")
            yield DeclaredToken(content, i, _flags(token, f"{DECODER}.{i}"))
        return
    added = [
        (_id(i, ADDED_TOKENS), content) for content, i in read_beside(path, ADDED_TOKENS).items()
    ]
    for i, content in sorted(added):
        is_special = content in special
        yield DeclaredToken(content, i, {"special": is_special, "normalized": not is_special})


def _id(value: Any, where: str) -> int:
    """An id of a token, which is a key of `added_tokens_decoder` or a number."""
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 10:
        return int(value)
    if type(value) is int and value >= 0:
        return value
    raise ValueError(f"{where}: {str(value)[:80]!r} is not an id. Write a number from 0 on")


def _extra_tokens(settings: Mapping[str, Any]) -> Iterator[DeclaredToken]:
    """Special tokens without a name."""
    key = _EXTRA
    if not settings.get(_EXTRA):
        key = _ADDITIONAL
    extra = settings.get(key) or []
    if not isinstance(extra, list):
        raise ValueError(f"{key} is {extra!r}, neither a list nor an object of tokens")
    for token in extra:
        content = named_token({key: token}, key)
        if content:
            flags = {"special": True} | _flags(token, key)
            yield DeclaredToken(content, None, flags)


def _flags(token: Any, where: str) -> dict[str, bool]:
    """The flags that an entry gives, for tokenizers.AddedToken."""
    flags = {}
    for flag in _FLAGS:
        if isinstance(token, dict) and flag in token:
            if not isinstance(token[flag], bool):
                raise ValueError(f"{where}: {flag} is {token[flag]!r}, neither true nor false")
            flags[flag] = token[flag]
    return flags


def files_beside(path: Path | RemotePath) -> dict[str, bytes]:
    """The files that lie beside a tokenizer and go with it, by their names; those in a folder by
    FOLDER/NAME. StorageError: one can't be read now."""
    found = {}
    try:
        for name in BESIDE:
            file = path.with_name(name)
            if file.exists():
                found[name] = read_limited(file, MAX_FILE_BYTES)
        for file in more_templates(path):
            found[f"{MORE_TEMPLATES}/{file.name}"] = read_limited(file, MAX_FILE_BYTES)
    except OSError as error:
        blame_storage(str(path.parent), error)
        raise
    return found


def more_templates(path: Path | RemotePath) -> list[Any]:
    """The files of additional chat templates beside a tokenizer, in the order of their names."""
    folder = path.with_name(MORE_TEMPLATES)
    if not folder.is_dir():
        return []
    return sorted(folder.glob("*.jinja"), key=lambda file: file.name)
