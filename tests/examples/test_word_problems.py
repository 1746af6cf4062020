"""Word problems: what is generated is right, and what a small model learns of them."""

import json
import re

import pytest

from benchmarks.word_problems import __main__ as benchmark
from benchmarks.word_problems.picture import draw
from benchmarks.word_problems.run import ALL_KINDS, GRPO, AccuracyScore, by_kind, run_all
from data_pipeline.tokenizer import load_tokenizer
from maxtrain.examples import word_problems as problems

CALCULATION = re.compile(r"(\d+) ([-+*/]) (\d+) = <<(\d+)([-+*/])(\d+)=(\d+)>>(\d+)")
SIGNS = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
}


def test_the_steps_are_right_and_end_with_the_result(tmp_path):
    problems.write(tmp_path, num_worked=300, num_results=200)
    lines = (tmp_path / "worked.jsonl").read_text().splitlines()
    asked = set()
    for line in lines:
        record = json.loads(line)
        asked.add(record["question"])
        steps, _, result = record["answer"].partition("\n#### ")
        found = CALCULATION.findall(steps)
        assert len(found) == len(steps.splitlines())
        for a, sign, b, *again, right in found:
            assert again == [a, sign, b, right]
            assert SIGNS[sign](int(a), int(b)) == int(right) > 0
        assert found[-1][-1] == result
        numbers = re.findall(r"\d+", record["question"])
        used = [number for a, _, b, *_ in found for number in (a, b)]
        assert set(numbers) <= set(used), "what the question says is used"
    others = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert len(asked | {record["prompt"] for record in others}) == 500
    assert {record["kind"] for record in others} == set(problems.KINDS)
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    assert [tokenizer.decode([i]) for i in tokenizer.encode("1207")] == ["1", "2", "0", "7"]
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.json*")}
    problems.write(tmp_path, num_worked=300, num_results=200)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.json*")} == before


def test_answers_are_counted_by_kind():
    kind_of = {"How many?": "a + b", "How far?": "a - b"}
    samples = []
    for question, reward in (("How many?", 2.0), ("How many?", 0.0), ("How far?", 0.0)):
        prompt = f"system: Give.\nuser: {question}\n"
        samples.append({"texts": {"prompt": prompt}, "rewards": {"gsm8k.correctness": reward}})
    found = by_kind(samples, kind_of)
    assert found == {
        ALL_KINDS: AccuracyScore(1, 3),
        "a + b": AccuracyScore(1, 2),
        "a - b": AccuracyScore(0, 1),
    }
    assert found["a + b"].share == 0.5
    assert found["a + b"].standard_error == pytest.approx(0.5 / 2**0.5)


@pytest.mark.slow
@pytest.mark.processes
def test_rewards_teach_what_few_worked_answers_did_not(tmp_path):
    """The commands of the document as they stand."""
    outcome = run_all(tmp_path)
    before = outcome.before[ALL_KINDS]
    assert 0.15 < before.share < 0.6 and before.questions > 400
    assert benchmark.gain(outcome) > benchmark.GAIN
    draw(outcome, tmp_path / "runs" / GRPO, tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    assert f"| all | {before.questions} | {before.share:.1%}" in benchmark.report(outcome, 0.0)
