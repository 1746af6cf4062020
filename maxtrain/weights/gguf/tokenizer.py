"""Tokenizer metadata of a GGUF file.

llama.cpp has its own code for tokenizers, in two kinds: "gpt2", byte-level BPE, which first splits
text into words by rules that are fixed in its code and have names; and "llama", SentencePiece's
BPE, which joins the pair of pieces whose union has the highest score. A tokenizer.json of another
kind, and rules without a name, are refused: the same text must give the same ids.

Source: llama.cpp, src/llama-vocab.cpp and conversion/base.py.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tokenizers

from data_pipeline.base.errors import UsageError
from data_pipeline.base.strict_json import loads
from data_pipeline.tokenizer import JsonTokenizer, Tokenizer, named_token
from maxtrain.weights.gguf.field import GgufField

# Types of tokens.
_NORMAL = 1
_UNKNOWN = 2
_CONTROL = 3
_FOUND_IN_TEXT = 4
_UNUSED = 5
_BYTE = 6
# Names of llama.cpp's rules for words, by the regular expressions of the steps and by whether a
# word that is a token stays whole independent of the merges.
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT_FORMS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT_4O = (
    f"{_UPPER}*{_LOWER}+{_SHORT_FORMS}|{_UPPER}+{_LOWER}*{_SHORT_FORMS}"
    rf"|\p{{N}}{{1,3}}|{_OTHERS}"
)
_TEKKEN = rf"{_UPPER}*{_LOWER}+|{_UPPER}+{_LOWER}*|\p{{N}}|{_OTHERS}"
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_RULES = {
    ((_LLAMA3,), True): "llama-bpe",
    ((_LLAMA3,), False): "dbrx",
    ((_LLAMA3.replace("{1,3}", ""),), False): "qwen2",
    ((_GPT_4O,), False): "gpt-4o",
    ((_TEKKEN,), True): "tekken",
    (_DEEPSEEK_V3, False): "deepseek-v3",
}
# For these rules, llama.cpp distinguishes capital and small letters only in ASCII, and does not
# treat marks as parts of a word: https://github.com/ggml-org/llama.cpp/issues/21675 and /27783.
_ASCII_CAPITALS = ("gpt-4o", "tekken")
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
_SPACE = "\u2581"
_INSTEAD = "Export with --format hf"


class UnsupportedTokenizerError(UsageError):
    """A tokenizer that llama.cpp has no code for."""

    def __init__(self, name: str, reason: str, advice: str = _INSTEAD):
        super().__init__(f"--format gguf: the tokenizer {name} {reason}. {advice}.")


def describe_tokenizer(
    tokenizer: Tokenizer,
    settings: Mapping[str, Any],
    vocab_size: int,
    template: str | None = None,
    end_of_turn: int | None = None,
    rule: str | None = None,
) -> tuple[list[GgufField], list[str]]:
    """Return the keys of a tokenizer, and notes for the user.

    Args:
        tokenizer: tokenizer of the model.
        settings: its tokenizer_config.json.
        vocab_size: vocabulary of the model; ids without a token are marked as unused, and special
            tokens beyond it are left out.
        template: chat template.
        end_of_turn: the token that ends an answer, if the template writes one.
        rule: llama.cpp's name of the rules for words; None: it is detected.

    Raises:
        UnsupportedTokenizerError: no code of llama.cpp gives the same ids.
    """
    name = tokenizer.name
    if not isinstance(tokenizer, JsonTokenizer):
        raise UnsupportedTokenizerError(
            name, "is no tokenizer.json, and llama.cpp reads nothing else"
        )
    if not tokenizer.fits(vocab_size):
        raise UnsupportedTokenizerError(
            name, f"has {tokenizer.vocab_size:,} tokens, and the model {vocab_size:,}"
        )
    record: Any = loads(tokenizer.content)
    if record["model"]["type"] != "BPE":
        raise UnsupportedTokenizerError(
            name, f"is of type {record['model']['type']}, and only BPE can be written"
        )
    notes = []
    if record["model"].get("byte_fallback"):
        fields = _sentencepiece(name, record, tokenizer, vocab_size)
    else:
        if rule is None:
            rule = _rule(name, record, tokenizer)
        if rule in _ASCII_CAPITALS:
            notes.append(
                f"llama.cpp's rules for words of {rule} know capital letters of ASCII alone, and "
                "no accents apart from their letters: words such as \u201caÉb\u201d, with a "
                "capital letter of another alphabet inside, and those of scripts with marks, as "
                "Devanagari and Thai, may have other ids there."
            )
        fields = _byte_level(name, record, tokenizer, vocab_size, rule)
        if record.get("normalizer"):
            kind = record["normalizer"]["type"]
            if kind != "NFC":
                raise UnsupportedTokenizerError(
                    name, f"changes texts by {kind}, which llama.cpp does not"
                )
            notes.append(
                "Its tokenizer composes characters (NFC) before it looks for words; llama.cpp "
                "doesn't, so letters with separate accents have other ids there."
            )
    fields += _ends(tokenizer, record, settings, template, end_of_turn)
    if template is not None:
        fields.append(GgufField("tokenizer.chat_template", "string", template))
    return fields, notes


def _byte_level(
    name: str, record: Any, tokenizer: JsonTokenizer, vocab_size: int, rule: str
) -> list[GgufField]:
    """Return the keys of byte-level BPE; `rule` is llama.cpp's name of the rules for words."""
    model = record["model"]
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise UnsupportedTokenizerError(
                name, f"has {key}={model[key]!r}, which llama.cpp does not know"
            )
    alphabet = set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    if not alphabet <= model["vocab"].keys():
        raise UnsupportedTokenizerError(
            name, "has no token for some bytes, and is not byte-level BPE"
        )
    merges = [_joined(merge) for merge in model["merges"]]
    return [
        GgufField("tokenizer.ggml.model", "string", "gpt2"),
        GgufField("tokenizer.ggml.pre", "string", rule),
        *_vocabulary(tokenizer, record, vocab_size),
        GgufField("tokenizer.ggml.merges", "strings", merges),
    ]


def _rule(name: str, record: Any, tokenizer: JsonTokenizer) -> str:
    """Return llama.cpp's name of a tokenizer's rules for words."""
    unknown = UnsupportedTokenizerError(
        name,
        "finds words by rules that have no known name in llama.cpp",
        "If you know it, give it with --pre-tokenizer NAME (tokenizer.ggml.pre there); otherwise "
        "export with --format hf",
    )
    before: Any = record.get("pre_tokenizer") or {"type": None}
    steps = [before]
    if before["type"] == "Sequence":
        steps = before["pretokenizers"]
    *first, last = steps
    if last["type"] != "ByteLevel" or last.get("add_prefix_space"):
        raise unknown
    whole_words = bool(record["model"].get("ignore_merges"))
    if last.get("use_regex", True):
        kept_whole = False
        if not first:
            found = "gpt-2"
        elif len(first) == 1 and first[0] == {"type": "Digits", "individual_digits": True}:
            found = "smollm"
        else:
            raise unknown
    else:
        patterns = _patterns(first)
        rules = {kept: found for (known, kept), found in _RULES.items() if known == patterns}
        if not rules:
            raise unknown
        # Prefer the rule that treats whole words the same.
        kept_whole = whole_words if whole_words in rules else not whole_words
        found = rules[kept_whole]
    if kept_whole != whole_words and not _merges_reach_all(tokenizer, record):
        raise unknown
    return found


def _patterns(steps: Sequence[Mapping[str, Any]]) -> tuple[str, ...] | None:
    """Return the regular expressions of steps that each split a text at all matches; None if one
    step is of another kind."""
    found = []
    for step in steps:
        if step["type"] != "Split" or step["behavior"] != "Isolated" or step["invert"]:
            return None
        pattern = step["pattern"].get("Regex")
        if pattern is None:
            return None
        found.append(pattern)
    return tuple(found)


def _merges_reach_all(tokenizer: JsonTokenizer, record: Any) -> bool:
    """Return True if the merges turn the text of each token into that token, so that it does not
    matter whether words that are tokens are merged."""
    merges = [tuple(_joined(merge).split(" ")) for merge in record["model"]["merges"]]
    plain = tokenizers.models.BPE(record["model"]["vocab"], merges, ignore_merges=False)
    added = {token.content for token in tokenizer.inner.get_added_tokens_decoder().values()}
    texts = record["model"]["vocab"].keys() - added
    return all(len(plain.tokenize(text)) == 1 for text in texts)


def _joined(merge: Any) -> str:
    """Return a merge in the form of older files: both parts in one string."""
    if isinstance(merge, str):
        return merge
    return " ".join(merge)


def _sentencepiece(
    name: str, record: Any, tokenizer: JsonTokenizer, vocab_size: int
) -> list[GgufField]:
    """Return the keys of SentencePiece's BPE for a tokenizer.json."""
    model = record["model"]
    bytes_of = [f"<0x{byte:02X}>" for byte in range(256)]
    if not model["vocab"].keys() >= set(bytes_of):
        raise UnsupportedTokenizerError(name, "has no token for some bytes")
    if model.get("ignore_merges"):
        raise UnsupportedTokenizerError(
            name, "has ignore_merges with byte_fallback, which llama.cpp does not know"
        )
    prefix = _has_prefix(name, record)
    scores = _scores(name, record)
    by_id = {i: text for text, i in model["vocab"].items()}
    listed = [scores.get(by_id.get(i, ""), 0.0) for i in range(vocab_size)]
    return [
        GgufField("tokenizer.ggml.model", "string", "llama"),
        GgufField("tokenizer.ggml.pre", "string", "default"),
        *_vocabulary(tokenizer, record, vocab_size),
        GgufField("tokenizer.ggml.scores", "float32s", listed),
        GgufField("tokenizer.ggml.add_space_prefix", "bool", prefix),
        GgufField("tokenizer.ggml.remove_extra_whitespaces", "bool", False),
    ]


def _has_prefix(name: str, record: Any) -> bool:
    """Return True if a space is put before a text. Raise an error for any other change of the
    text."""
    steps = []
    for part in (record.get("normalizer"), record.get("pre_tokenizer")):
        if part is None:
            continue
        if part["type"] == "Sequence":
            steps += part.get("normalizers") or part.get("pretokenizers") or []
        else:
            steps.append(part)
    prefix = False
    spaces = False
    for step in steps:
        match step:
            case {"type": "Prepend", "prepend": "\u2581"}:
                prefix = True
            case {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}:
                spaces = True
            case {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme}:
                spaces = True
                prefix = scheme != "never"
                if step.get("split", True):
                    raise UnsupportedTokenizerError(
                        name, "divides texts at spaces before it merges, as none there"
                    )
            case {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious"}:
                # Gemma's: no space is left to divide at.
                pass
            case _:
                raise UnsupportedTokenizerError(
                    name, f"does {step['type']} to texts, which llama.cpp does not"
                )
    if not spaces:
        raise UnsupportedTokenizerError(
            name, f"has byte_fallback and does not write spaces as {_SPACE}"
        )
    return prefix


def _scores(name: str, record: Any) -> dict[str, float]:
    """Return the score of each token that merges create: the earlier its merges, the higher.

    llama.cpp joins any two pieces whose union is a token, in the order of its score; a
    tokenizer.json has a list of pairs, in order. Both are the same if the list has all pairs of a
    token, one after the other.
    """
    vocabulary = record["model"]["vocab"]
    pairs = [tuple(_joined(merge).split(" ")) for merge in record["model"]["merges"]]
    scores: dict[str, float] = {}
    last = ""
    for place, pair in enumerate(pairs):
        text = "".join(pair)
        if text in scores and text != last:
            raise UnsupportedTokenizerError(
                name, f"has merges that make {text!r} in different places of its list"
            )
        last = text
        scores.setdefault(text, -float(place))
    listed = set(pairs)
    added = {token["content"] for token in record["added_tokens"]}
    for text in vocabulary.keys() - added:
        for cut in range(1, len(text)):
            pair = (text[:cut], text[cut:])
            if pair[0] in vocabulary and pair[1] in vocabulary and pair not in listed:
                raise UnsupportedTokenizerError(
                    name, f"does not merge {pair[0]!r} with {pair[1]!r}, as llama.cpp would"
                )
    return scores


def _vocabulary(tokenizer: JsonTokenizer, record: Any, vocab_size: int) -> Iterator[GgufField]:
    """Yield the tokens of a model, with their types."""
    added = tokenizer.inner.get_added_tokens_decoder()
    by_id = {i: text for text, i in record["model"]["vocab"].items()}
    unknown = record["model"].get("unk_token")
    texts = []
    types = []
    for i in range(vocab_size):
        text = by_id.get(i)
        kind = _NORMAL
        if i in added:
            text = added[i].content
            kind = _FOUND_IN_TEXT
            if added[i].special:
                kind = _CONTROL
        elif text is None:
            text = f"[PAD{i}]"
            kind = _UNUSED
        elif record["model"].get("byte_fallback") and _BYTE_TOKEN.fullmatch(text):
            kind = _BYTE
        if text == unknown:
            kind = _UNKNOWN
        texts.append(text)
        types.append(kind)
    yield GgufField("tokenizer.ggml.tokens", "strings", texts)
    yield GgufField("tokenizer.ggml.token_type", "int32s", types)


def _ends(
    tokenizer: JsonTokenizer,
    record: Any,
    settings: Mapping[str, Any],
    template: str | None,
    end_of_turn: int | None,
) -> Iterator[GgufField]:
    """Yield the tokens around texts, and whether llama.cpp puts one before each."""
    begin = _put_before(tokenizer)
    adds = begin is not None
    if begin is None:
        begin = tokenizer.special.get(named_token(dict(settings), "bos_token") or "")
        adds = bool(settings.get("add_bos_token"))
    if begin is None or (not adds and template is None and "add_bos_token" not in settings):
        # `maxtrain generate` begins this way: a document follows the end of another.
        begin = tokenizer.eod_id
        adds = template is None and begin is not None
    if begin is not None:
        yield GgufField("tokenizer.ggml.bos_token_id", "uint32", begin)
    if tokenizer.eod_id is not None:
        yield GgufField("tokenizer.ggml.eos_token_id", "uint32", tokenizer.eod_id)
    if end_of_turn is not None:
        yield GgufField("tokenizer.ggml.eot_token_id", "uint32", end_of_turn)
    unknown = record["model"].get("unk_token")
    if unknown in record["model"]["vocab"]:
        yield GgufField(
            "tokenizer.ggml.unknown_token_id", "uint32", record["model"]["vocab"][unknown]
        )
    yield GgufField("tokenizer.ggml.add_bos_token", "bool", adds)
    yield GgufField("tokenizer.ggml.add_eos_token", "bool", False)


def _put_before(tokenizer: JsonTokenizer) -> int | None:
    """Return the token that the tokenizer.json itself puts before a text, or None."""
    inner = tokenizers.Tokenizer.from_str(tokenizer.content.decode())
    ids = inner.encode("", add_special_tokens=True).ids
    return ids[0] if ids else None
