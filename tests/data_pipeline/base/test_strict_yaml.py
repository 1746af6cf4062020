"""YAML from outside is read with limits, or refused with a StrictYamlError."""

import time

import pytest

from data_pipeline.base.strict_yaml import (
    MAX_BYTES,
    MAX_DEPTH,
    MAX_VALUES,
    StrictYamlError,
    loads,
    read,
)

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 20)
)
MERGES = "a0: &a0 {x0: 1, y0: 2}\n" + "".join(
    f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}], x{i}: 1}}\n" for i in range(1, 20)
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("a: [1, -2.5, true, ~, text]", {"a": [1, -2.5, True, None, "text"]}),
        ("a: &x {b: 1}\nc: {<<: *x, d: *x}", {"a": {"b": 1}, "c": {"b": 1, "d": {"b": 1}}}),
        ("1: 2024-01-01", {"1": "2024-01-01"}),
        ("\ufeffa: 1", {"a": 1}),
    ],
)
def test_usual_yaml_is_read(text, value):
    assert loads(text) == value


@pytest.mark.every_dose
@pytest.mark.long
@pytest.mark.parametrize(
    "text",
    [
        LAUGHS,
        MERGES,
        "a: &a [*a]",
        "[" * 100_000,
        "{a: " * 100_000,
        "- " * 100_000,
        "[" + "x," * (MAX_VALUES + 1) + "]",
        "".join(f"k{i}:\n" for i in range(MAX_VALUES)),
        "a: 1\na: 2",
        "[a]: 1",
        "9" * 5000,
        "010",
        "1:30:00",
        "!!python/object/apply:os.system [ls]",
        "!!map 3",
        "a: \x1b",
        "a: 'open",
        "--- 1\n--- 2",
        "x" * (MAX_BYTES + 1),
    ],
    ids=lambda text: text[:12],
)
def test_bombs_and_what_has_two_meanings_are_refused_at_once(text):
    began = time.process_time()
    with pytest.raises(StrictYamlError) as caught:
        loads(text)
    assert time.process_time() - began < 10
    assert len(str(caught.value)) <= 700
    assert "\n" not in str(caught.value) and "\x1b" not in str(caught.value)


def test_depth_up_to_the_limit_is_read():
    assert loads("[" * (MAX_DEPTH - 1) + "1" + "]" * (MAX_DEPTH - 1))


def test_a_file_is_read_up_to_its_limit(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("a: é", encoding="utf-8")
    assert read(file) == {"a": "é"}
    with file.open("wb") as opened:
        opened.truncate(1 << 40)
    with pytest.raises(StrictYamlError, match="longer than"):
        read(file)
    file.write_bytes(b"a: \xff")
    with pytest.raises(ValueError):
        read(file)
