"""Samples over the steps of a run: kept as they were, and shown so that a text breaks nothing."""

import io

from rich.console import Console

from maxtrain.observe.metrics import MetricsLog
from maxtrain.observe.samples import (
    FILE_NAME,
    KIND,
    CompletionSample,
    SampleRecord,
    as_markdown,
    as_text,
    first_and_last,
    read_samples,
    shortened,
)


def sample(number=0, completion="<4>", reward=0.5, **values):
    return CompletionSample(
        **{
            "set": "held",
            "number": number,
            "prompt": "1+3=",
            "completion": completion,
            "reward": reward,
            "rewards": {"exact": 1.0, "none": None},
            "length": 4,
            "truncated": False,
            **values,
        }
    )


def test_they_are_read_as_they_were_and_those_of_later_steps_are_dropped(tmp_path):
    """One text has characters that JSON lacks."""
    taken = [
        SampleRecord(0, sample(completion="nan")),
        SampleRecord(2, sample(1, "inf", None)),
        SampleRecord(4, sample()),
    ]
    log = MetricsLog(tmp_path, run="0123", file_name=FILE_NAME)
    for step, each in taken:
        log.append(step, each.record(), KIND)
    log.close()
    assert read_samples(tmp_path) == taken
    # Of step 2, the evaluation of `held` is made again.
    for step, again, left in ((4, [], 3), (2, [], 2), (2, ["held"], 1)):
        MetricsLog(tmp_path, step, again, file_name=FILE_NAME).close()
        assert read_samples(tmp_path) == taken[:left]
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]
    assert read_samples(tmp_path / "nowhere") == []


def test_each_prompt_has_its_first_and_its_last_completion():
    taken = [
        SampleRecord(step, sample(number, f"[{step}]" + "x" * 300 * (step == 5), reward))
        for step, reward in ((0, None), (5, 0.25), (10, 1.5))
        for number in (0, 1)
    ]
    file = io.StringIO()
    Console(file=file, width=80).print(first_and_last(taken))
    rows = [line.split() for line in file.getvalue().splitlines()]
    assert rows[0] == ["prompt", "step", "completion", "reward"]
    assert rows[1:] == [["1+3=", "0", "[0]", "-"], ["10", "[10]", "1.5"]] * 2
    assert first_and_last([]) is None
    file = io.StringIO()
    Console(file=file, width=80).print(first_and_last(taken[:1]))
    assert len(file.getvalue().splitlines()) == 2


def test_long_texts_have_their_ends():
    text = shortened("a\nb" + "x" * 500 + "end")
    assert text.startswith("a⏎b") and text.endswith("end") and len(text) <= 160
    assert shortened("short") == "short"


def test_messages_are_words():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ["a"]}]
    assert as_text(messages) == 'system: Be brief.\nuser: ["a"]\n'
    assert as_text("text") == "text"


def test_a_text_can_not_leave_its_cell():
    """Neither as Markdown nor as HTML, which trackers show."""
    (*_, row) = as_markdown([sample(completion="a|b\n<answer>&")]).splitlines()
    assert row == "| 1+3= | a&#124;b<br>&lt;answer>&amp; | reward 0.5 | 4 |"
    assert sample(truncated=True, reward=None).words() == "<4>  [no reward, truncated]"
