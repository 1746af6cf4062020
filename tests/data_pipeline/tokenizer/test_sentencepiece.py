"""SentencePiece models: agreement with the library, cuts, special tokens, and errors a user can act
on."""

import io
import json
import random
import sys

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.base.errors import DataError, UsageError
from data_pipeline.tokenizer import SentencePieceTokenizer, base, load_tokenizer

WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "mat",
    "didn't",
    "naïve",
    "東京",
    "return",
    "(self)",
    "x1",
    "b",
    "a1",
]


def train(**changes):
    rng, model = random.Random(0), io.BytesIO()
    lines = [" ".join(rng.choices(WORDS, k=12)) for _ in range(200)]
    arguments = {"byte_fallback": True, "hard_vocab_limit": False, "minloglevel": 2} | changes
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, **arguments
    )
    return model.getvalue()


# as Llama 2, Gemma, and T5 have them
EXACT = {
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "model_type": "bpe",
    "vocab_size": 340,
}
MODELS = {
    "llama": train(
        **EXACT,
        user_defined_symbols=["<|im_start|>", "<|im_end|>", "<b>"],
        control_symbols=["<ctl>"],
    ),
    "gemma": train(**EXACT, add_dummy_prefix=False, user_defined_symbols=["\n\n", "  "]),
    "t5": train(model_type="unigram", vocab_size=330),
    "no_bytes": train(model_type="unigram", vocab_size=70, byte_fallback=False),
}
TOKENIZERS = {name: SentencePieceTokenizer(model, name, {}) for name, model in MODELS.items()}


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=60, deadline=None)
@given(
    text=st.text(st.characters(exclude_categories=["Cs"]))
    | st.text(st.sampled_from("aZé1 \n\t.'東<b>s▁\u3000"))
)
def test_ids_and_text_are_the_library_s(name, text):
    tokenizer, library = (
        TOKENIZERS[name],
        sentencepiece.SentencePieceProcessor(model_proto=MODELS[name]),
    )
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32 and ids.tolist() == library.encode(text)
    assert tokenizer.decode(ids) == library.decode(ids.tolist())
    assert not {tokenizer.eod_id, *tokenizer.special.values()}.intersection(ids.tolist())


@pytest.mark.parametrize(("name", "cuts"), [("llama", 2), ("gemma", 2), ("t5", 1), ("no_bytes", 1)])
@settings(max_examples=60, deadline=None)
@given(words=st.lists(st.sampled_from([*WORDS, " ", " ", " ", "\n", "\n", ";", "é"]), max_size=60))
def test_long_text_in_pieces_has_the_ids_of_the_whole(name, cuts, words):
    tokenizer, text = TOKENIZERS[name], "".join(words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "_PIECE_CHARACTERS", 3)
        assert tokenizer.encode(text).tolist() == tokenizer.inner.encode(text)
        sample = "the cat sat\non the mat"
        assert len(list(base.cut(sample, tokenizer._cuts))) > cuts


def test_models_that_reach_across_spaces_are_not_cut():
    across = SentencePieceTokenizer(train(**EXACT, split_by_whitespace=False), "across", {})
    suffix = SentencePieceTokenizer(
        train(model_type="bpe", vocab_size=340, treat_whitespace_as_suffix=True), "suffix", {}
    )
    text = "the cat sat on the mat " * 3
    for tokenizer in (across, suffix):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(base, "_PIECE_CHARACTERS", 3)
            assert list(base.cut(text, tokenizer._cuts)) == [text]
            assert tokenizer.encode(text).tolist() == tokenizer.inner.encode(text)


def test_text_cannot_forge_special_tokens_and_templates_write_them():
    special = {"<|im_start|>": 4, "<|im_end|>": 5, "<|extra|>": 400}
    tokenizer = SentencePieceTokenizer(MODELS["llama"], "chat", special, eod="<|im_end|>")
    assert (tokenizer.eod_id, tokenizer.vocab_size) == (5, 401)
    assert tokenizer.special == {**special, "<s>": 1, "</s>": 2, "<ctl>": 3}
    text = "a <|im_end|> </s><ctl>b <|extra|><b>"
    ids = tokenizer.encode(text)
    assert not set(ids.tolist()) & set(tokenizer.special.values()) and tokenizer.decode(ids) == text
    assert tokenizer.inner.piece_to_id("<b>") in ids  # not special: as the model wants it
    assert tokenizer.decode([*ids, 5, 400, 2, 10_000]) == text

    spans = [
        ("<s><|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n", False),
        ("sat 🙂<|im_end|>", True),
        ("\n", False),
    ]
    ids, mask = tokenizer.encode_spans(spans)
    assert ids[:2].tolist() == [1, 4] and (ids == 4).sum() == 2 and (ids == 5).sum() == 2
    assert tokenizer.decode(ids) == "user\nthe cat\nassistant\nsat 🙂\n"
    assert tokenizer.decode(ids[mask]) == "sat 🙂" and ids[mask][-1] == 5
    assert mask.dtype == bool and mask.sum() == len(tokenizer._after.encode("sat 🙂")) + 1


def test_round_trip_through_one_file(tmp_path):
    (tmp_path / "small.model").write_bytes(MODELS["llama"])
    given = load_tokenizer(tmp_path / "small.model")
    assert (given.name, given.eod_id, given.vocab_size) == ("small", 2, len(given.inner))
    added = {
        "4": {"content": "<|im_start|>", "special": True},
        "5": {"content": "<|im_end|>", "special": True},
    }
    added |= {"6": {"content": "<b>", "special": False}}
    settings = {"eos_token": {"content": "<|im_end|>"}, "added_tokens_decoder": added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "small.model").rename(tmp_path / "tokenizer.model")
    named = load_tokenizer(tmp_path)
    assert (named.name, named.eod_id, named.special["<|im_start|>"]) == (tmp_path.name, 5, 4)
    assert "<b>" not in named.special and named.sha256 != given.sha256
    for tokenizer in (given, named):
        (tmp_path / "out").mkdir(exist_ok=True)
        tokenizer.save(tmp_path / "out")
        again = load_tokenizer(tmp_path / "out")
        assert (again.sha256, again.eod_id, again.special) == (
            tokenizer.sha256,
            tokenizer.eod_id,
            tokenizer.special,
        )
        assert (
            again.encode("the cat<|im_end|>").tolist()
            == tokenizer.encode("the cat<|im_end|>").tolist()
        )


def test_characters_without_an_id_are_told():
    assert TOKENIZERS["llama"].unknown("the 🙂") == ""
    assert TOKENIZERS["no_bytes"].unknown("the 🙂 cat ☃🙂") == "☃🙂"
    assert TOKENIZERS["no_bytes"].inner.unk_id() not in TOKENIZERS["no_bytes"].encode("the  cat")


@pytest.mark.parametrize(
    ("content", "settings", "message"),
    [
        (b"", "{}", "neither JSON, nor ranks of tiktoken, nor a SentencePiece model"),
        (b"some words", "{}", "neither JSON, nor ranks"),
        (MODELS["t5"][:-100], "{}", "neither JSON, nor ranks"),
        (MODELS["t5"], "[]", "tokenizer_config.json beside it is not a JSON object"),
        (MODELS["t5"], "{", "tokenizer_config.json beside it is not JSON"),
        (MODELS["t5"], '{"eos_token": "<absent>"}', "it has no token '<absent>'"),
        (MODELS["t5"], '{"eos_token": 3}', "eos_token of tokenizer_config.json is 3, not a token"),
        (
            MODELS["t5"],
            '{"added_tokens_decoder": {"9": {"content": "<x>", "special": true}}}',
            "gives '<x>' another id",
        ),
        (
            MODELS["t5"],
            '{"added_tokens_decoder": {"999": {"content": "<x>"}}}',
            "adds '<x>' to be found in text",
        ),
        (
            MODELS["t5"],
            '{"added_tokens_decoder": {"99999999": {"content": "<x>", "special": true}}}',
            "has the id 99999999",
        ),
        (
            MODELS["t5"],
            '{"added_tokens_decoder": []}',
            "added_tokens_decoder of tokenizer_config.json is not an object",
        ),
    ],
)
def test_bad_files_say_what_to_do(tmp_path, content, settings, message):
    (tmp_path / "x.model").write_bytes(content)
    (tmp_path / "tokenizer_config.json").write_text(settings)
    with pytest.raises(
        DataError,
        match=f"x.model: is not usable.*{message}.*Name a tokenizer.json, a SentencePiece .model",
    ):
        load_tokenizer(tmp_path / "x.model")


def test_missing_package_names_its_extra(tmp_path, monkeypatch):
    (tmp_path / "x.model").write_bytes(MODELS["t5"])
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(
        UsageError,
        match=r"tokenizer x: needs sentencepiece.*pip install -e .*\[sentencepiece\]'",
    ):
        load_tokenizer(tmp_path / "x.model")
