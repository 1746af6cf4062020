"""JSON from outside has one meaning, or is refused with a ValueError."""

import json
import threading

import pytest

from data_pipeline.base.strict_json import MAX_DEPTH, StrictJsonError, _make_object, loads


@pytest.mark.parametrize(
    "text",
    [
        "null",
        ' [1, -2.5, 1e300, true, "é\\u00e9\\ud83d\\ude00"]\n',
        '{"a": {"a": [], "b": {}}, "": 0, "n": 123456789012345678901234567890}',
        "[" * MAX_DEPTH + "]" * MAX_DEPTH,
        json.dumps(["[" * 999, {"[{": "{" * 999}]),  # brackets in strings are not depth
        json.dumps([[]] * 999),  # nor are those beside each other
    ],
)
def test_what_is_json_is_read_as_python_does(text):
    assert (
        loads(text)
        == json.loads(text)
        == loads(text.encode())
        == loads(b"\xef\xbb\xbf" + text.encode())
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"text": 1, "b": 2, "text": 1}', "a key occurs twice: 'text'"),
        ('[{"b": {"k": 1, "\\u006b": 2}}]', "a key occurs twice: 'k'"),
        ("[NaN]", "NaN or Infinity, which JSON does not have: NaN"),
        ('{"a": -Infinity}', "NaN or Infinity, which JSON does not have: -Infinity"),
        ("1e400", "a number does not fit into a 64-bit float: 1e400"),
        ("-1" + "0" * 400 + ".0", "a number does not fit into a 64-bit float"),
        ("1" * 5000, "a number has too many digits"),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), f"more than {MAX_DEPTH} deep"),
        ('{"a":' * 1000 + "1" + "}" * 1000, f"more than {MAX_DEPTH} deep"),
        ("[" * 100_000, f"more than {MAX_DEPTH} deep"),
        ('{"a":' * 100_000, f"more than {MAX_DEPTH} deep"),
    ],
)
def test_what_python_would_take_or_die_of_is_refused_by_name(text, message):
    with pytest.raises(StrictJsonError, match=message):
        loads(text)


@pytest.mark.parametrize(
    "text", ["", "{", "[1,]", "'a'", "1 2", b"\xff", b'"\xed\xa0\x80"', '{"a": 1}'.encode("utf-16")]
)
def test_what_is_not_json_is_a_value_error(text):
    with pytest.raises(ValueError):
        loads(text)


def test_depth_ends_no_thread_either():
    found = []

    def read():
        for text in ("[" * 100_000, '{"a":' * 100_000):
            try:
                loads(text)
            except StrictJsonError as error:
                found.append(error.kind)

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    assert len(found) == 2 and all("deep" in kind for kind in found)


def test_lone_surrogates_are_left_to_who_reads_the_text():
    assert loads('"\\ud800"') == "\ud800"


def test_a_doubled_key_is_found_among_many_in_one_pass():
    class CountingKey(str):
        __slots__ = ()
        num_compared = 0

        def __eq__(self, other):
            CountingKey.num_compared += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    pairs = [(CountingKey(number), number) for number in range(2000)]
    with pytest.raises(StrictJsonError, match="a key occurs twice: '1999'"):
        _make_object([*pairs, (CountingKey(1999), 0)])
    assert CountingKey.num_compared < 10 * len(pairs)
