"""Tokenizers: round trips, identity, and errors a user can act on."""

import concurrent.futures
import json
import re

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.base.errors import DataError, UsageError
from data_pipeline.shards import Manifest
from data_pipeline.tokenizer import (
    ByteTokenizer,
    CharTokenizer,
    JsonTokenizer,
    base,
    huggingface,
    load_tokenizer,
    train_bpe,
)

TEXTS = [
    "def main(argv):\n    return 0\n",
    "the cat sat on the mat, the dog didn't\r\n\tsit",
    "naïve 東京 🙂\x00",
    "",
] * 20


BPE = train_bpe(TEXTS, 300)


@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_round_trip_of_any_text(text):
    for tokenizer in (BPE, ByteTokenizer(), CharTokenizer(text)):
        ids = tokenizer.encode(text)
        assert ids.dtype == np.int32 and ((ids >= 0) & (ids < tokenizer.vocab_size)).all()
        assert tokenizer.decode(ids) == text
        assert tokenizer.eod_id is None or tokenizer.eod_id not in ids


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.sampled_from("aZé1 \n\r\t.'s_\u3000\x1c"), max_size=200))
def test_long_text_in_pieces_has_the_ids_of_the_whole(text):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "_PIECE_CHARACTERS", 3)
        patch.setattr(huggingface, "_PIECES_AT_ONCE", 4)
        assert BPE.encode(text).tolist() == BPE.inner.encode(text).ids


LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.sampled_from("aZé1 \n\r\t.'s_\u3000"), max_size=200))
def test_other_tokenizers_are_cut_only_where_they_split(text):
    before = tokenizers.pre_tokenizers
    split = before.Split(tokenizers.Regex(LLAMA3), "isolated")
    layouts = [
        (before.Sequence([split, before.ByteLevel(add_prefix_space=False, use_regex=False)]), True)
    ]
    layouts += [(before.Metaspace(), False), (before.ByteLevel(add_prefix_space=True), False)]
    for layout, divisible in layouts:
        inner = tokenizers.Tokenizer.from_str(BPE.content.decode())
        inner.pre_tokenizer = layout
        tokenizer = JsonTokenizer(inner.to_str().encode(), "other")
        assert tokenizer._divisible == divisible
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(base, "_PIECE_CHARACTERS", 3)
            assert tokenizer.encode(text).tolist() == inner.encode(text).ids


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(st.sampled_from("abSTdlrve1239 \n\r\t\v\x1c.'_-é\u3000"), max_size=120),
    digits=st.sampled_from(["", "{1,3}", None]),
)
def test_words_that_came_before_have_the_ids_of_the_library(text, digits):
    """Patterns of the library, of Llama 3 and of Qwen; words of text that is all ASCII, in parts of
    text that is not."""
    before = tokenizers.pre_tokenizers
    inner = tokenizers.Tokenizer.from_str(BPE.content.decode())
    if digits is not None:
        split = before.Split(tokenizers.Regex(LLAMA3.replace("{1,3}", digits)), "isolated")
        inner.pre_tokenizer = before.Sequence(
            [split, before.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    tokenizer = JsonTokenizer(inner.to_str().encode(), "other")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            ("_CHUNK_CHARACTERS", 3),
            ("_WORDS", 5),
            ("_LONGEST_WORD", 4),
            ("_LARGE", 60),
        ):
            patch.setattr(huggingface, name, value)
        ids = inner.encode(text).ids
        assert tokenizer.encode(text).tolist() == tokenizer.encode(text).tolist() == ids
        ascii = text.encode("ascii", "replace").decode()
        assert tokenizer.encode(ascii).tolist() == inner.encode(ascii).ids
    assert tokenizer._words is not None and len(tokenizer._words) <= 5
    assert (
        len(ascii) >= 60
        or len(tokenizer._words) > 0
        or not any(len(word) <= 4 for word in tokenizer._words.pattern.findall(ascii))
    )


def test_several_threads_encode_with_one_tokenizer(monkeypatch):
    """They do so while earlier words are evicted from its cache."""
    monkeypatch.setattr(huggingface, "_WORDS", 3)
    texts = [" ".join(f"w{i % n}x{i * n}" for i in range(200)) for n in range(2, 10)]
    expected = [BPE.encode(text).tolist() for text in texts]

    def encode_all(_):
        return [BPE.encode(text).tolist() for text in texts]

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        assert list(threads.map(encode_all, range(8))) == [expected] * 8


def test_an_id_within_a_text_stands_for_bytes():
    ids = BPE.encode(" the été 🦜").tolist()
    found = [BPE.token_bytes(i) for i in ids]
    assert b"".join(found) == " the été 🦜".encode()
    assert BPE.token_bytes(BPE.eod_id) == BPE.token_bytes(BPE.vocab_size) == b""


def test_ways_to_divide_that_are_not_known_are_left_to_the_library():
    before = tokenizers.pre_tokenizers
    level, inner = (
        before.ByteLevel(add_prefix_space=False),
        tokenizers.Tokenizer.from_str(BPE.content.decode()),
    )
    split = before.Split(tokenizers.Regex(LLAMA3), "isolated")
    for layout in (
        before.ByteLevel(add_prefix_space=True),
        before.Sequence([split, level]),
        before.Sequence([before.Digits(), level]),
        before.Sequence([level, level]),
        before.Sequence(
            [
                before.Split("a", "isolated"),
                before.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        ),
        before.Split(tokenizers.Regex(LLAMA3), "isolated"),
    ):
        inner.pre_tokenizer = layout
        assert JsonTokenizer(inner.to_str().encode(), "other")._words is None
    inner.pre_tokenizer = level
    assert JsonTokenizer(inner.to_str().encode(), "other")._words is not None
    inner.add_tokens(["main"])  # found in text, not by the pattern
    tokenizer = JsonTokenizer(inner.to_str().encode(), "other")
    assert (
        tokenizer._words is None
        and tokenizer.encode("a main").tolist() == inner.encode("a main").ids
    )


def test_training_is_deterministic_and_the_file_is_the_identity(tmp_path):
    again = train_bpe(iter(TEXTS), 300)
    assert again.content == BPE.content and again.sha256 == BPE.sha256 and BPE.vocab_size == 300
    for tokenizer in (BPE, ByteTokenizer(), CharTokenizer("bca", eod=True), CharTokenizer("x\n")):
        tokenizer.save(tmp_path)
        loaded = load_tokenizer(tmp_path)
        assert (loaded.sha256, loaded.vocab_size, loaded.eod_id) == (
            tokenizer.sha256,
            tokenizer.vocab_size,
            tokenizer.eod_id,
        )


def test_text_cannot_forge_the_end_of_a_document():
    ids = BPE.encode("a<|endoftext|>b")
    assert BPE.eod_id not in ids and BPE.decode(ids) == "a<|endoftext|>b"
    assert BPE.decode([*ids, BPE.eod_id]) == "a<|endoftext|>b"


def test_characters():
    tokenizer = CharTokenizer("hello")
    assert (tokenizer.characters, tokenizer.vocab_size, tokenizer.eod_id) == ("ehlo", 4, None)
    assert tokenizer.encode("hole").tolist() == [1, 3, 2, 0]
    with pytest.raises(DataError, match=r"'é' \(U\+00E9\) is not in the tokenizer's vocabulary"):
        tokenizer.encode("hé")
    assert tokenizer.unknown("hé lo") == " é"


def test_given_tokenizer_and_its_end_of_document(tmp_path):
    inner = tokenizers.Tokenizer.from_str(BPE.content.decode())
    inner.add_special_tokens(["<stop>"])
    inner.enable_truncation(2)
    (tmp_path / "tokenizer.json").write_text(inner.to_str())
    assert load_tokenizer(tmp_path).eod_id == BPE.eod_id
    assert len(load_tokenizer(tmp_path).encode("the cat sat on the mat")) > 2
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<stop>"}})
    )
    assert load_tokenizer(tmp_path).eod_id == 300 and load_tokenizer(tmp_path).vocab_size == 301
    assert load_tokenizer(tmp_path / "tokenizer.json").eod_id == 300
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</absent>"}))
    # As in transformers, a token that only has a name is added.
    assert load_tokenizer(tmp_path).eod_id == 301 and load_tokenizer(tmp_path).vocab_size == 302


def test_bad_tokenizers_say_what_to_do(tmp_path):
    with pytest.raises(DataError, match=r"tokenizer=.*absent.*No such file.*or `bytes`"):
        load_tokenizer(tmp_path / "absent")
    for content in ("{", "[]", '{"model": {}}', '{"type": "chars"}'):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(DataError, match=r"is not usable.*Name a tokenizer.json"):
            load_tokenizer(tmp_path)
    content = json.loads(BPE.content) | {
        "model": json.loads(BPE.content)["model"] | {"dropout": 0.1}
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(
        DataError,
        match=r"is not usable \(its dropout=0\.1 draws .* anew each time; set it to null in the file\)",
    ):
        load_tokenizer(tmp_path)
    with pytest.raises(UsageError, match=r"bpe:100 must have at least 257"):
        train_bpe([], 100)
    with pytest.raises(
        UsageError, match=r"bpe:100000000 must have .* at most 16,777,216. Give bpe:4096"
    ):
        train_bpe([], 100_000_000)


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"type": "chars", "characters": {"ab": 1}, "eod": true}', "characters is not a string"),
        ('{"type": "chars", "characters": "ab", "eod": 5}', "eod is 5, neither true nor false"),
        ('{"type": "chars", "characters": "\\ud800", "eod": true}', "surrogates not allowed"),
        (
            '{"type": "chars", "characters": "ab", "characters": "abc", "eod": true}',
            "a key occurs twice: 'characters'",
        ),
        (
            '{"type": "chars", "characters": "ab", "eod": NaN}',
            "NaN or Infinity, which JSON does not have",
        ),
        (DEEP, "lists or objects are more than 200 deep"),
        ('{"type": ' + DEEP, "lists or objects are more than 200 deep"),
        ('{"type": "chars", "eod": ' + "1" * 5000 + "}", "a number has too many digits"),
    ],
)
def test_tokenizers_in_json_that_means_nothing_or_two_things(tmp_path, content, message):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(DataError, match=re.escape(message)) as caught:
        load_tokenizer(tmp_path)
    assert "Name a tokenizer.json" in str(caught.value) and len(str(caught.value)) < 600


def test_what_the_library_can_not_encode_is_a_matter_of_the_tokenizer(tmp_path):
    inner = tokenizers.Tokenizer(tokenizers.models.WordPiece({"a": 0, "[U]": 1}, unk_token="[U]"))
    content = json.loads(inner.to_str())
    del content["model"]["vocab"]["[U]"]
    with pytest.raises(
        DataError, match=r"tokenizer x: can't encode a text: .*Correct its tokenizer.json"
    ):
        JsonTokenizer(json.dumps(content).encode(), "x").encode("b")


def test_a_panic_of_the_library_is_an_error():
    content = json.loads(BPE.content)
    content["model"]["continuing_subword_prefix"] = "a prefix that is longer than the tokens"
    with pytest.raises(ValueError, match=r"out of range.*Correct its tokenizer.json"):
        JsonTokenizer(json.dumps(content).encode(), "x")


def test_ids_that_no_table_can_have_are_refused(tmp_path):
    content = json.loads(BPE.content)
    content["model"]["vocab"]["the"] = 1 << 31
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(
        DataError, match=r"'the' has the id 2147483648, not an integer in \[0, 16,777,216\)"
    ):
        load_tokenizer(tmp_path)


def test_tokenizer_beside_a_manifest_must_be_its_own(tmp_path):
    entry = {"name": "mine", "sha256": BPE.sha256, "vocab_size": 300, "special_ids": {"eod": 5}}
    Manifest(entry, "uint16", "append", 0, ()).save(tmp_path)
    BPE.save(tmp_path)
    assert (load_tokenizer(tmp_path).name, load_tokenizer(tmp_path).eod_id) == ("mine", 5)
    JsonTokenizer(BPE.content + b"\n", "other").save(tmp_path)
    with pytest.raises(DataError, match=r"expected sha256 .* Restore the file"):
        load_tokenizer(tmp_path)


@settings(max_examples=60, deadline=None)
@given(
    spans=st.lists(
        st.tuples(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), st.booleans()),
        max_size=5,
    )
)
def test_spans_have_the_ids_of_their_text_and_a_mask_by_characters(spans):
    text = "".join(part for part, _ in spans)
    for tokenizer in (BPE, ByteTokenizer(), CharTokenizer(text)):
        ids, mask = tokenizer.encode_spans(spans)
        assert (ids.dtype, mask.dtype, mask.shape) == (np.int32, bool, ids.shape)
        assert ids.tolist() == tokenizer.encode(text).tolist()
        assert mask.any() == any(target for part, target in spans if part)
        assert mask.all() == all(target for part, target in spans if part) or tokenizer is BPE
    byte_mask = [target for part, target in spans for _ in part.encode()]
    assert ByteTokenizer().encode_spans(spans)[1].tolist() == byte_mask


def test_templates_write_special_tokens_and_libraries_their_prefixes():
    inner = tokenizers.Tokenizer.from_str(BPE.content.decode())
    inner.add_special_tokens(["<|im_end|>", tokenizers.AddedToken("<|end|>", rstrip=True)])
    inner.add_tokens(["<think>"])
    plain = JsonTokenizer(inner.to_str().encode(), "plain")
    assert plain.special == {"<|endoftext|>": BPE.eod_id, "<|im_end|>": 300, "<|end|>": 301}
    ids, mask = plain.encode_spans(
        [("the<think>", False), (" cat<|im_end|>", True), ("<|end|>\n", False), ("on", True)]
    )
    assert ids[mask].tolist() == [*plain.encode(" cat"), 300, *plain.encode("on")]
    assert ids[~mask].tolist() == [*plain.encode("the"), 302, 301]  # the newline is the token's
    assert plain.encode("<think>").tolist() == [302] and 300 not in plain.encode("<|im_end|>")
    # a prefix comes once, not at every span
    inner.normalizer = tokenizers.normalizers.Prepend("x")
    prefixed = JsonTokenizer(inner.to_str().encode(), "prefixed")
    assert prefixed.decode(prefixed.encode_spans([("[a]", False), (" cat", True)])[0]) == "x[a] cat"


@pytest.mark.parametrize(
    "settings",
    ["[]", "3", "null", '"text"', '{"eos_token": []}', '{"eos_token": {"content": 3}}', "{"],
)
def test_a_tokenizer_config_of_another_shape_is_told(tmp_path, settings):
    BPE.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(settings)
    with pytest.raises(
        DataError,
        match=r"of tokenizer_config.json is|tokenizer_config.json beside it is not.*Name a tokenizer",
    ):
        load_tokenizer(tmp_path)
