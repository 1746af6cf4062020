"""Normalisers that blow a text up are refused before they run."""

import json

import pytest
import tokenizers

from data_pipeline.base.errors import DataError
from data_pipeline.tokenizer import growth, huggingface, load_tokenizer
from data_pipeline.tokenizer.growth import MAX_GROWTH, check_growth


def replace(pattern, content):
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(*steps):
    return {"type": "Sequence", "normalizers": list(steps)}


DOUBLE = replace({"String": "a"}, "aa")


@pytest.mark.parametrize(
    "normalizer",
    [
        None,
        {"type": "NFC"},
        sequence(),
        # As ALBERT, XLM-RoBERTa and Gemma have them.
        sequence(replace({"String": "``"}, '"'), {"type": "NFKD"}, {"type": "StripAccents"}),
        sequence({"type": "Precompiled"}, replace({"Regex": " {2,}"}, "\u2581")),
        sequence({"type": "Prepend", "prepend": "\u2581"}, replace({"String": " "}, "\u2581")),
    ],
)
def test_usual_normalizers_are_within_the_bound(normalizer):
    assert 1 <= check_growth(normalizer) < MAX_GROWTH / 4


@pytest.mark.parametrize(
    "normalizer",
    [
        sequence(*[DOUBLE] * 30),
        sequence(sequence(*[DOUBLE] * 15), sequence(*[DOUBLE] * 15)),
        replace({"String": "a"}, "b" * 2000),
        replace({"Regex": "x*"}, "b" * 2000),
        replace({"String": ""}, "b" * 2000),
        sequence(*[{"type": "NFKD"}] * 4),
        sequence(*[DOUBLE] * 5000),
    ],
    ids=lambda normalizer: str(normalizer)[:60],
)
def test_bombs_are_refused(normalizer):
    with pytest.raises(ValueError, match="times as long"):
        check_growth(normalizer)


def save(path, normalizer):
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "<|endoftext|>": 1}, []))
    record = json.loads(inner.to_str()) | {"normalizer": normalizer}
    path.write_text(json.dumps(record))
    return str(path)


def test_a_tokenizer_with_a_bomb_is_refused(tmp_path):
    file = save(tmp_path / "tokenizer.json", sequence(*[DOUBLE] * 30))
    with pytest.raises(DataError, match="times as long"):
        load_tokenizer(file)


def test_a_text_that_may_become_too_long_is_refused(tmp_path, monkeypatch):
    file = save(tmp_path / "tokenizer.json", sequence(*[DOUBLE] * 9))
    tokenizer = load_tokenizer(file)
    assert len(tokenizer.encode("aa")) == 1024
    monkeypatch.setattr(huggingface, "MAX_NORMALIZED_BYTES", 1000)
    with pytest.raises(DataError, match="Divide the text"):
        tokenizer.encode("aa")
    assert growth.MAX_NORMALIZED_BYTES > 1 << 30
