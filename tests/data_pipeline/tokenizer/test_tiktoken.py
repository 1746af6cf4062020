"""tiktoken's files of ranks: agreement with the library, what such a file lacks, and errors a user
can act on."""

import base64
import json
import sys

import numpy as np
import pytest
import tiktoken
import tiktoken_ext.openai_public as public
from hypothesis import given, settings
from hypothesis import strategies as st
from tiktoken._educational import bpe_train

from data_pipeline.base.errors import DataError, UsageError
from data_pipeline.tokenizer import TiktokenTokenizer, base, load_tokenizer
from data_pipeline.tokenizer.tiktoken import ENCODINGS, PATTERNS

RANKS = bpe_train(
    "the cat sat on the mat, the dog didn't " * 9, 274, PATTERNS["cl100k"], visualise=None
)
CONTENT = b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in RANKS.items())
SPECIAL = {"<|endoftext|>": 300, "<|im_start|>": 301, "<|im_end|>": 302}
TOKENIZERS = {name: TiktokenTokenizer(CONTENT, name, name, SPECIAL) for name in PATTERNS}


def test_what_is_known_of_public_encodings_is_the_library_s(monkeypatch):
    for loader in ("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks"):
        monkeypatch.setattr(public, loader, lambda *args, **kwargs: {})
    for name, (pattern, special) in ENCODINGS.items():
        theirs = public.ENCODING_CONSTRUCTORS[name]()
        assert (PATTERNS[pattern], special) == (theirs["pat_str"], theirs["special_tokens"])


@pytest.mark.parametrize("name", PATTERNS)
@settings(max_examples=60, deadline=None)
@given(
    text=st.text(st.characters(exclude_categories=["Cs"]))
    | st.text(st.sampled_from("aZé1 \n\r\t.'s_\u3000\x1c"))
)
def test_ids_and_text_are_the_library_s_cut_or_not(name, text):
    tokenizer = TOKENIZERS[name]
    library = tiktoken.Encoding(
        name, pat_str=PATTERNS[name], mergeable_ranks=RANKS, special_tokens=SPECIAL
    )
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32 and ids.tolist() == library.encode_ordinary(text)
    assert tokenizer.decode(ids) == text and tokenizer._divisible
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "_PIECE_CHARACTERS", 3)
        assert tokenizer.encode(text).tolist() == ids.tolist()


def test_text_cannot_forge_special_tokens_and_templates_write_them():
    tokenizer, text = TOKENIZERS["cl100k"], "the<|endoftext|> cat<|im_end|>"
    ids = tokenizer.encode(text)
    assert ids.max() < 300 and tokenizer.decode([*ids, 300, 299, 5000]) == text
    ids, mask = tokenizer.encode_spans(
        [("<|im_start|>user\n🙂", False), ("東京<|im_end|>", True), ("\n", False)]
    )
    assert ids[0] == 301 and ids[mask][-1] == 302 and tokenizer.decode(ids) == "user\n🙂東京\n"
    assert tokenizer.decode(ids[mask]) == "東京" and mask.sum() == len("東京".encode()) + 1
    assert [len(part) for part in tokenizer.encode_spans([])] == [0, 0]


def test_a_token_over_a_border_is_a_target():
    ids, mask = TOKENIZERS["cl100k"].encode_spans([("a c", False), ("at the", True)])
    assert TOKENIZERS["cl100k"].decode(ids[mask]) == " cat the" and not mask[0]


def test_spaces_beyond_what_the_library_s_matcher_can_do():
    tokenizer, text = TOKENIZERS["cl100k"], "the" + " " * 1_000_000 + "cat"
    with pytest.raises(ValueError, match="backtracking"):
        tokenizer.inner.encode_to_numpy(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    short = "the" + " " * 1000 + "cat\n"
    assert [
        i for part in tokenizer._split(short) for i in tokenizer.inner._encode_single_piece(part)
    ] == tokenizer.encode(short).tolist()


def test_round_trip_through_one_file_and_names_of_patterns(tmp_path):
    (tmp_path / "own.tiktoken").write_bytes(CONTENT)
    (tmp_path / "own.tiktoken.json").write_text(
        json.dumps({"pattern": "o200k", "special_tokens": SPECIAL})
    )
    tokenizer = load_tokenizer(tmp_path / "own.tiktoken")
    assert (tokenizer.name, tokenizer.eod_id, tokenizer.vocab_size) == ("own", 300, 303)
    assert tokenizer.sha256 == TOKENIZERS["o200k"].sha256 != TOKENIZERS["cl100k"].sha256
    (tmp_path / "own.tiktoken.json").write_text(
        json.dumps({"pattern": PATTERNS["o200k"], "special_tokens": SPECIAL})
    )
    assert load_tokenizer(tmp_path / "own.tiktoken").sha256 == tokenizer.sha256
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    tokenizer = load_tokenizer(tmp_path / "own.tiktoken")
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert (again.sha256, again.eod_id, again.special) == (tokenizer.sha256, 302, SPECIAL)
    assert again.encode("the cat").tolist() == tokenizer.encode("the cat").tolist()
    # ranks under a public name, and Llama 3's way: ranks in a file named tokenizer.model
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "cl100k_base.tiktoken").write_bytes(CONTENT)
    assert load_tokenizer(tmp_path / "cl100k_base.tiktoken").eod_id == 100257
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.model").write_bytes(CONTENT)
    (tmp_path / "tokenizer.model.json").write_text(
        json.dumps({"pattern": "cl100k", "special_tokens": SPECIAL})
    )
    assert load_tokenizer(tmp_path).sha256 == TOKENIZERS["cl100k"].sha256


LESS = CONTENT.replace(base64.b64encode(b"z") + b" ", base64.b64encode(b"zzz") + b" ")


@pytest.mark.parametrize(
    ("content", "changes", "message"),
    [
        (
            CONTENT,
            None,
            r"does not say how text is split.*Write x.tiktoken.json beside it, such as .*pattern is r50k, cl100k",
        ),
        (CONTENT, [], "x.tiktoken.json must be"),
        (CONTENT, {"pattern": "cl100k"}, "x.tiktoken.json must be"),
        (
            CONTENT,
            {"pattern": "(", "special_tokens": {}},
            r"not a regular expression.*Name a tokenizer.json",
        ),
        (
            CONTENT,
            {"pattern": "[a-z]+", "special_tokens": {}},
            r"leaves out characters of a text.*Name a tokenizer.json",
        ),
        (CONTENT, {"pattern": 3, "special_tokens": {}}, r"the pattern must be text"),
        (
            CONTENT,
            {"pattern": "r50k", "special_tokens": {"<x>": "1"}},
            r"'<x>' has the id '1', not an integer",
        ),
        (
            CONTENT,
            {"pattern": "r50k", "special_tokens": {"<x>": 1 << 40}},
            r"'<x>' has the id 1099511627776, not an integer",
        ),
        (
            CONTENT + b"enp6eg== 99999999999\n",
            {"pattern": "r50k", "special_tokens": {}},
            r"rank outside \[0, 16,777,216\)",
        ),
        (CONTENT, {"pattern": "r50k", "special_tokens": []}, r"is not usable"),
        (
            CONTENT,
            {"pattern": "r50k", "special_tokens": {"<x>": 5}},
            r"two tokens have the same id",
        ),
        (
            CONTENT + b"eno= 5\n",
            {"pattern": "r50k", "special_tokens": {}},
            r"two tokens have the same id|line \d+ is not",
        ),
        (
            CONTENT + b"text\n",
            {"pattern": "r50k", "special_tokens": {}},
            r"line \d+ is not a token in base64 and its rank",
        ),
        (LESS, {"pattern": "r50k", "special_tokens": {}}, r"no token for the byte 0x7A"),
    ],
)
def test_bad_files_say_what_to_do(tmp_path, content, changes, message):
    (tmp_path / "x.tiktoken").write_bytes(content)
    if changes is not None:
        (tmp_path / "x.tiktoken.json").write_text(json.dumps(changes))
    with pytest.raises(DataError, match=f"x.tiktoken: .*{message}"):
        load_tokenizer(tmp_path / "x.tiktoken")


def test_missing_package_names_its_extra(tmp_path, monkeypatch):
    (tmp_path / "cl100k_base.tiktoken").write_bytes(CONTENT)
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(UsageError, match=r"needs tiktoken.*pip install -e .*\[tiktoken\]'"):
        load_tokenizer(tmp_path / "cl100k_base.tiktoken")
