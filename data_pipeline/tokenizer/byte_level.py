"""Byte-level BPE from the files of older tokenizers: vocab.json and merges.txt.

These two files do not say how text is divided into words. That is known by the tokenizer's class.
"""

from collections.abc import Mapping
from typing import Any

import tokenizers

from data_pipeline.tokenizer.base import END_OF_DOCUMENT, check_ids

# How Qwen2's tokenizer divides text into words.
# Source: https://github.com/huggingface/transformers, models/qwen2/tokenization_qwen2.py.
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The class of tokenizers by the model_type of config.json.
_CLASSES = {"gpt2": "GPT2Tokenizer", "qwen2": "Qwen2Tokenizer"}
# Tokens that a class has where the settings do not name others.
_DEFAULTS = {
    "GPT2Tokenizer": ("bos_token", "eos_token", "unk_token"),
    "Qwen2Tokenizer": ("eos_token", "unk_token", "pad_token"),
}


def byte_level_bpe(
    vocabulary: Any, merges: bytes, settings: Mapping[str, Any], model_type: Any
) -> tuple[bytes, dict[str, Any]]:
    """The tokenizer.json of a vocab.json with a merges.txt, and the settings that its class has by
    default.

    Args:
        vocabulary: content of vocab.json, ids by tokens.
        merges: content of merges.txt.
        settings: of `read_settings`; tokenizer_class says how text is divided.
        model_type: of config.json, where there is no tokenizer_class; None: it is not known.

    Raises:
        ValueError: the files are misshapen, or the class is none that is known here.
    """
    kind = settings.get("tokenizer_class") or _CLASSES.get(str(model_type))
    kind = str(kind).removesuffix("Fast")
    if kind not in _DEFAULTS:
        rule = f"the tokenizer_class must be {' or '.join(_DEFAULTS)}, and it is {kind}"
        raise ValueError(
            f"of vocab.json with merges.txt, {rule}. Write a tokenizer.json: transformers does, "
            "with AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        )
    if not isinstance(vocabulary, dict):
        raise ValueError("vocab.json is not an object of ids by tokens")
    check_ids(vocabulary)
    pairs = []
    for number, line in enumerate(merges.decode().splitlines(), 1):
        if line.startswith("#version") or not line:
            continue
        left, _, right = line.partition(" ")
        missing = [token for token in (left, right, left + right) if token not in vocabulary]
        if not right or " " in right or missing:
            raise ValueError(
                f"line {number} of merges.txt is {line[:80]!r}, not two tokens to merge"
            )
        pairs.append((left, right))
    inner = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab=vocabulary, merges=pairs, continuing_subword_prefix="", end_of_word_suffix=""
        )
    )
    prefix = bool(settings.get("add_prefix_space"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    if kind == "Qwen2Tokenizer":
        inner.normalizer = tokenizers.normalizers.NFC()
        inner.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
            [
                tokenizers.pre_tokenizers.Split(tokenizers.Regex(_QWEN2), behavior="isolated"),
                tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False),
            ]
        )
    inner.decoder = tokenizers.decoders.ByteLevel()
    return inner.to_str().encode(), dict.fromkeys(_DEFAULTS[kind], END_OF_DOCUMENT)
