"""Bound of how much longer the normaliser of a tokenizer.json can make a text.

A chain of replacements such as a -> aa doubles the text at each step: thirty of them make gigabytes
of one letter. The bound is computed from the file, without running it.
"""

from typing import Any

# Bytes in UTF-8 that a byte of the text can become, for steps with fixed rules. U+FDFA has 3 bytes,
# and 33 after NFKC.
_GROWTH = {
    "NFC": 3.0,
    "NFD": 4.0,
    "NFKC": 11.0,
    "NFKD": 11.0,
    "Precompiled": 20.0,
    "Lowercase": 2.0,
    "BertNormalizer": 12.0,
    "ByteLevel": 2.0,
}
# Far above what normalisers of released models can do, which is about 250.
MAX_GROWTH = 1024.0
# Of one text after normalisation, at most.
MAX_NORMALIZED_BYTES = 1 << 33


def check_growth(normalizer: Any) -> float:
    """Return an upper bound of the growth of a text in bytes.

    Args:
        normalizer: the value of `normalizer` in a tokenizer.json.

    Raises:
        ValueError: the bound is above MAX_GROWTH.
    """
    growth = _growth(normalizer)
    if growth > MAX_GROWTH:
        rule = f"can make a text more than {MAX_GROWTH:,.0f} times as long"
        raise ValueError(f"its normalizer {rule}; remove replacements that add text")
    return growth


def _growth(step: Any) -> float:
    if not isinstance(step, dict):
        return 1.0
    kind = step.get("type")
    if kind == "Sequence":
        steps = step.get("normalizers")
        growth = 1.0
        for inner in steps if isinstance(steps, list) else []:
            # Infinity is above the limit, and no error here.
            growth *= _growth(inner)
        return growth
    if kind == "Replace":
        return _replace_growth(step.get("pattern"), step.get("content"))
    if kind == "Prepend":
        return 1.0 + _num_bytes(step.get("prepend"))
    return _GROWTH.get(str(kind), 1.0)


def _replace_growth(pattern: Any, content: Any) -> float:
    """The growth by a replacement. A regular expression may match one byte, or between bytes."""
    added = _num_bytes(content)
    text = pattern.get("String") if isinstance(pattern, dict) else None
    if isinstance(text, str) and text:
        return max(1.0, added / _num_bytes(text))
    if added <= 1 and text is None:
        return 1.0
    return 1.0 + added


def _num_bytes(text: Any) -> int:
    if not isinstance(text, str):
        return 0
    return len(text.encode(errors="surrogatepass"))
