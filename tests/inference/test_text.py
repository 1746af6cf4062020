"""Text as it comes: the parts together are the whole, and no part is taken back."""

import base64
import io
import random

import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from data_pipeline.tokenizer import (
    ByteTokenizer,
    JsonTokenizer,
    SentencePieceTokenizer,
    TiktokenTokenizer,
    train_bpe,
)
from maxtrain.inference.text import TextStream, before_stop, decode_new

TEXT = "Größe: 3 €, 日本語 and 🦜🦜!\nEND of it. EN D END"


def parts_of(ids, stop, seed):
    tokenizer = ByteTokenizer()
    stream = TextStream(tokenizer, tokenizer.encode("Say: ").tolist(), stop)
    rng = random.Random(seed)
    parts = []
    at = 0
    while at < len(ids):
        count = rng.randint(1, 5)
        parts.append(stream.add(ids[at : at + count]))
        at += count
    parts.append(stream.finish())
    return parts, stream


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("stop", [(), ("END",), ("🦜!", "of it"), ("\nE", "ND"), ("never",)])
def test_the_parts_are_the_text(stop, seed):
    ids = ByteTokenizer().encode(TEXT).tolist()
    parts, stream = parts_of(ids, stop, seed)
    assert "".join(parts) == before_stop(TEXT, stop) == stream.text
    assert stream.has_stopped == any(text in TEXT for text in stop)
    assert "\ufffd" not in "".join(parts)


def test_a_character_that_never_comes_whole_is_shown_at_the_end():
    tokenizer = ByteTokenizer()
    stream = TextStream(tokenizer, [65])
    cut = "ö".encode()[:1]
    assert stream.add([104, *cut]) == "h"
    assert stream.finish() == "\ufffd"


def test_what_may_be_the_beginning_of_a_stop_text_waits():
    stream = TextStream(ByteTokenizer(), [65], ["stop"])
    assert stream.add(list(b"go st")) == "go "
    assert stream.add(list(b"ay s")) == "stay "
    assert stream.add(list(b"to")) == ""
    assert not stream.has_stopped
    assert stream.add(list(b"p it")) == ""
    assert stream.has_stopped
    assert stream.add(list(b"more")) == ""
    assert stream.finish() == ""
    assert stream.text == "go stay "


def test_the_text_after_a_prompt_is_decoded_with_it():
    tokenizer = ByteTokenizer()
    assert decode_new(tokenizer, list(b"ab"), list(b"cd")) == "cd"


def json_tokenizer(pieces, decoder, special=("<s>",)):
    """Return a tokenizer of these pieces, in this order."""
    inner = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    if decoder is not None:
        inner.decoder = decoder
    inner.add_special_tokens(list(special))
    return JsonTokenizer(inner.to_str().encode(), "pieces")


def sentencepiece_model(**changes):
    model = io.BytesIO()
    options = {"byte_fallback": True, "hard_vocab_limit": False, "minloglevel": 2}
    lines = ["the cat sat on  the mat", "a dog did not"] * 20
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        vocab_size=300,
        model_type="bpe",
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        **options | changes,
    )
    return SentencePieceTokenizer(model.getvalue(), "model", {})


BYTES = [f"<0x{byte:02X}>" for byte in "aé€🦜".encode()]
PIECES = ["▁", "▁a", "▁▁", "b", "é", ".", "\ufffd", "c▁d", *BYTES]
LLAMA = [
    decoders.Replace("▁", " "),
    decoders.ByteFallback(),
    decoders.Fuse(),
    decoders.Strip(" ", 1, 0),
]
ONE_BYTE_RANKS = b"".join(base64.b64encode(bytes([byte])) + b" %d\n" % byte for byte in range(256))
KINDS = {
    "bytes": ByteTokenizer(),
    "byte-level BPE": train_bpe(["the cat, été, 日本 und 🦜🦜"], 290),
    "llama": json_tokenizer(PIECES, decoders.Sequence(LLAMA)),
    "metaspace": json_tokenizer(PIECES, decoders.Metaspace()),
    "spaces between": json_tokenizer(PIECES, None),
    "word pieces": json_tokenizer(["a", "##b", "##.", ".", "'", "s", "'s"], decoders.WordPiece()),
    "sentencepiece": sentencepiece_model(),
    "sentencepiece without prefix": sentencepiece_model(add_dummy_prefix=False),
    "ranks": TiktokenTokenizer(ONE_BYTE_RANKS, "ranks", "r50k", {"<|endoftext|>": 256}),
    # Of these, each id may change what is before it.
    "trailing spaces": json_tokenizer(PIECES, decoders.Strip(" ", 0, 1)),
    "BPE's ends of words": json_tokenizer(["a</w>", "b", "c</w>"], decoders.BPEDecoder()),
}
IN_PARTS = {kind for kind, tokenizer in KINDS.items() if tokenizer.decodes_in_parts}


def test_what_decodes_in_parts():
    assert KINDS.keys() - IN_PARTS == {"trailing spaces", "BPE's ends of words"}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_the_parts_are_what_decoding_all_at_once_gives(kind, data):
    tokenizer = KINDS[kind]
    ids_of_text = []
    if tokenizer.vocab_size > 50:
        ids_of_text = tokenizer.encode("a é🦜  b日.").tolist()
    one = st.integers(0, tokenizer.vocab_size)
    if ids_of_text:
        one |= st.sampled_from(ids_of_text)
    prompt = data.draw(st.lists(one, max_size=40))
    chunks = data.draw(st.lists(st.lists(one, max_size=8), max_size=8))
    everything = decode_new(tokenizer, prompt, [i for chunk in chunks for i in chunk])
    stop = []
    if everything and data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(everything) - 1))
        stop = [everything[at : at + data.draw(st.integers(1, 4))], "never"]
    stream = TextStream(tokenizer, prompt, stop)
    said = ""
    read = []
    for chunk in chunks:
        if stream.has_stopped:
            break
        read += chunk
        said += stream.add(chunk)
        expected = decode_new(tokenizer, prompt, read)
        assert stream.text == before_stop(expected, stop)
        assert stream.has_stopped == any(text in expected for text in stop)
        assert stream.num_given <= stream.num_read == len(read)
    said += stream.finish()
    if kind in IN_PARTS:
        assert said == before_stop(decode_new(tokenizer, prompt, read), stop)
    if not stream.has_stopped:
        assert stream.num_given == len(read)


@pytest.mark.parametrize("kind", sorted(IN_PARTS))
def test_the_cost_of_an_id_does_not_grow_with_the_text(kind, monkeypatch):
    tokenizer = KINDS[kind]
    counts = []
    decode = tokenizer.decode

    def counting(ids):
        ids = list(ids)
        counts.append(len(ids))
        return decode(ids)

    monkeypatch.setattr(tokenizer, "decode", counting)
    rng = random.Random(0)
    ids = [rng.randrange(tokenizer.vocab_size) for _ in range(3000)]
    stream = TextStream(tokenizer, ids[:1000])
    for begin in range(1000, 3000, 8):
        stream.add(ids[begin : begin + 8])
    assert sum(counts) < 100 * 2000


@pytest.mark.parametrize("kind", sorted(IN_PARTS))
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_bytes_of_tokens_are_the_text(kind, data):
    """Bytes of later ids depend on earlier ones; bytes that are no character are none in either."""
    tokenizer = KINDS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size), max_size=12))
    head = tokenizer.encode("a").tolist() if tokenizer.vocab_size > 50 else [3]
    head = [i for i in head if tokenizer.decode([i]).strip()] or [3]
    text = decode_new(tokenizer, head, ids)
    found = [tokenizer.token_bytes(i) for i in ids]
    assert None not in found
    joined = b"".join(found).decode(errors="replace")
    if "\ufffd" not in text + joined:
        assert joined == text


def test_ids_are_given_with_their_text_and_those_of_a_stop_text_are_not():
    stream = TextStream(ByteTokenizer(), [65], ["stop"])
    ids = list("é, st".encode())
    assert stream.add(ids[:1]) == "" and stream.num_given == 0
    assert stream.add(ids[1:]) == "é, " and stream.num_given == 4
    assert [stream.offset(number) for number in range(5)] == [0, 0, 1, 2, 3]
    assert stream.add(list(b"ay")) == "stay" and stream.num_given == 8
    assert stream.add(list(b"stop and")) == "" and stream.num_given == 8
    assert stream.finish() == "" and stream.num_given == 8


def test_an_id_that_reaches_into_a_stop_text_is_given_with_what_is_before_it():
    tokenizer = KINDS["spaces between"]
    stream = TextStream(tokenizer, [3], ["▁d"])
    assert stream.add([4, 7, 5]) == " é c"
    assert stream.num_given == 2
    assert stream.text == " é c"
