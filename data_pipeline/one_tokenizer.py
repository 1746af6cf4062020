"""Data that meets one model must be of one tokenizer: the check, and the command that mends it."""

import shlex

from data_pipeline.errors import ConfigError
from data_pipeline.shards import PARTS, Manifest, TokenShards
from data_pipeline.sources import TOKEN_FORMATS

_PROGRAM = ["python", "-m", "data_pipeline.prepare", "OUT"]  # how the command of a manifest begins


def require_one_tokenizer(data: dict[str, TokenShards]) -> None:
    """ConfigError, if data that meets one model, by the config key that names it, was not all made
    with one tokenizer."""
    (first, ours), *others = data.items()
    for where, theirs in others:
        if theirs.manifest.tokenizer["sha256"] == ours.manifest.tokenizer["sha256"]:
            continue
        names = " but ".join([f"with tokenizer {_name(theirs)},", f"{first} with {_name(ours)}"])
        rule = f"{where} was made {names}, so that ids would mean different text"
        keeps, remade = (
            (theirs, ours)
            if _keep_rank(where, theirs) > _keep_rank(first, ours)
            else (ours, theirs)
        )
        command = remake_command(remade, keeps)
        if not command:
            raise ConfigError(f"{rule}. Prepare one of them again with the tokenizer of the other.")
        again = where if remade is theirs else first
        raise ConfigError(
            f"{rule}. Make {again} again, in its place, with the tokenizer of the other: `{command}`"
        )


def _name(shards: TokenShards) -> str:
    tokenizer = shards.manifest.tokenizer
    return f"{tokenizer['name']} ({tokenizer['vocab_size']:,} entries, sha256 {tokenizer['sha256'][:12]})"


def _keep_rank(key: str, shards: TokenShards) -> tuple[int, bool, bool]:
    """How little data can do without its own tokenizer: ids need it, chats its special tokens.

    Otherwise what is trained on keeps it before what is held out, and one that somebody trained or
    chose before plain bytes.
    """
    kinds = _kinds(shards.manifest)
    need = 2 if kinds & TOKEN_FORMATS else int("chat" in kinds)
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
    in_parts = "--holdout" in options and shards.path.name in PARTS
    out = shards.path.parent if in_parts else shards.path
    return shlex.join(
        [*_PROGRAM[:-1], str(out), *options, "--tokenizer", str(like.path), "--overwrite"]
    )
