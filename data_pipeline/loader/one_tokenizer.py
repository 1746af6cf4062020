"""The check that all data of one model has one tokenizer, and the command that makes it so."""

import shlex

from data_pipeline.base.errors import ConfigError
from data_pipeline.shards import PARTS, Manifest, TokenShards
from data_pipeline.sources import TOKEN_FORMATS
from data_pipeline.tokenizer.base import describe_tokenizer

# How the command of a manifest begins.
_PROGRAM = ["python", "-m", "data_pipeline.prepare", "OUT"]


def require_one_tokenizer(data: dict[str, TokenShards]) -> None:
    """ConfigError, if data that meets one model, by the config key that names it, was not all made
    with one tokenizer."""
    (first, ours), *others = data.items()
    for where, theirs in others:
        if theirs.manifest.tokenizer["sha256"] == ours.manifest.tokenizer["sha256"]:
            continue
        rule = (
            f"{where} was made with tokenizer {tokenizer_of_data(theirs)}, but {first} with "
            f"{tokenizer_of_data(ours)}, so that ids would mean different text"
        )
        if _keep_rank(where, theirs) > _keep_rank(first, ours):
            again = first
            command = remake_command(ours, theirs)
        else:
            again = where
            command = remake_command(theirs, ours)
        if not command:
            raise ConfigError(f"{rule}. Prepare one of them again with the tokenizer of the other.")
        fix = f"Make {again} again, in its place, with the tokenizer of the other"
        raise ConfigError(f"{rule}. {fix}: `{command}`")


def tokenizer_of_data(shards: TokenShards) -> str:
    """Return the name, the size and the identity of the tokenizer of data, for messages."""
    tokenizer = shards.manifest.tokenizer
    return describe_tokenizer(tokenizer["name"], tokenizer["vocab_size"], tokenizer["sha256"])


def _keep_rank(key: str, shards: TokenShards) -> tuple[int, bool, bool]:
    """Return how much a source depends on its own tokenizer: token ids need it, chats need its
    special tokens.

    Otherwise what is trained on keeps it before what is held out, and one that somebody trained or
    chose before plain bytes.
    """
    kinds = _kinds(shards.manifest)
    need = 0
    if kinds & TOKEN_FORMATS:
        need = 2
    elif kinds & {"chat", "preferences"}:
        need = 1
    return need, key.startswith("data.sources."), shards.manifest.tokenizer["name"] != "bytes"


def _kinds(manifest: Manifest) -> set[str]:
    return {source.get("kind", "") for source in manifest.sources}


def remake_command(shards: TokenShards, like: TokenShards) -> str:
    """The command that makes data again in its place, with the tokenizer of other data; empty: none
    is known."""
    words = shlex.split(shards.manifest.command)
    if words[: len(_PROGRAM)] != _PROGRAM or _kinds(shards.manifest) & TOKEN_FORMATS:
        return ""
    options = words[len(_PROGRAM) :]
    if "--tokenizer" in options:
        at = options.index("--tokenizer")
        del options[at : at + 2]
    if like.manifest.tokenizer["special_ids"]["eod"] is None and "--eod" not in options:
        options += ["--eod", "none"]
    out = shards.path
    if "--holdout" in options and shards.path.name in PARTS:
        out = shards.path.parent
    program = _PROGRAM[:-1]
    return shlex.join([*program, str(out), *options, "--tokenizer", str(like.path), "--overwrite"])
