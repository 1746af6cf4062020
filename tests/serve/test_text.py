"""Text as it comes: the parts together are the whole, and no part is taken back."""

import random

import pytest

from data_pipeline.tokenizer import ByteTokenizer
from maxtrain.serve.text import TextStream, before_stop, decode_new

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
