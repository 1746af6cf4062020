"""Tasks of the lm-evaluation-harness: local ones, with numbers that are known from our own
scores."""

import json
import math
import shutil
import string
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.base.errors import UsageError
from data_pipeline.tokenizer import CharTokenizer
from maxtrain import cli
from maxtrain.commands.evaluate.lm_eval import HarnessAnswers, read_generation
from maxtrain.commands.score import ScoreRow, score
from maxtrain.inference.complete import complete
from maxtrain.weights.hf import load_pretrained

PARITY = Path(__file__).parents[2] / "data" / "parity" / "qwen3"
QUESTIONS = [
    {"question": "one two", "choices": [" three", " four five"], "answer": 0},
    {"question": "red green", "choices": [" blue", " seven"], "answer": 1},
    {"question": "up", "choices": [" down", " left", " right"], "answer": 2},
]
TASKS = {
    "tiny_choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
    "tiny_rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: bits_per_byte}, {metric: byte_perplexity}]
""",
    "tiny_written": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{written}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 5, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
}


@pytest.fixture(scope="module")
def model():
    return load_pretrained(PARITY)[0]


@pytest.fixture(scope="module")
def tokenizer():
    # As many entries as the model has: all that it writes is text.
    return CharTokenizer(string.printable + "".join(map(chr, range(0xC0, 0xC0 + 59))), True)


@pytest.fixture(scope="module")
def answers(model, tokenizer):
    end = [tokenizer.eod_id]
    return HarnessAnswers(model, tokenizer, [], end)


def expected(model, tokenizer, context, continuation):
    before = tokenizer.encode(context).tolist() or [tokenizer.eod_id]
    after = tokenizer.encode(continuation).tolist()
    (scored,) = score(model, [ScoreRow([*before, *after], len(before))])
    return scored


@pytest.mark.every_dose
@pytest.mark.long
def test_pairs_are_scored_each_by_itself(answers, model, tokenizer):
    pairs = [("one two", " three"), ("", "red"), ("up", " down")]
    for (context, continuation), (total, greedy) in zip(
        pairs, answers.loglikelihood(pairs), strict=True
    ):
        scored = expected(model, tokenizer, context, continuation)
        assert abs(total - scored.total()) < 1e-5 and greedy == scored.is_greedy.all()


def test_a_long_context_loses_its_beginning(answers, model, tokenizer):
    longest = model.config.max_length
    rng = np.random.default_rng(0)
    context = "".join(rng.choice(list("abcdef"), longest * 2))
    ((total, _),) = answers.loglikelihood([(context, "xyz")])
    kept = context[-(longest + 1 - 3) :]
    assert abs(total - expected(model, tokenizer, kept, "xyz").total()) < 1e-5


@pytest.mark.every_dose
@pytest.mark.long
def test_text_is_written_up_to_its_end(answers, model, tokenizer):
    settings = {"until": [], "max_gen_toks": 12}
    (whole,) = answers.generate([("one", settings)])
    (known,) = complete(model, tokenizer, ["one"], begin=[], max_tokens=12, temperature=0.0)
    assert whole == known and len(whole) > 1
    cut, again = answers.generate([("one", settings | {"until": [whole[1]]}), ("one", settings)])
    assert cut == whole[: whole.index(whole[1])] and again == whole


@pytest.mark.parametrize(
    ("settings", "temperature", "max_tokens", "until"),
    [
        ({}, 0.0, 256, ()),
        ({"until": "a", "max_new_tokens": 3}, 0.0, 3, ("a",)),
        ({"temperature": 0.7}, 0.7, 256, ()),
        ({"temperature": 0.7, "do_sample": False}, 0.0, 256, ()),
        ({"do_sample": True, "until": ["a", ""]}, 1.0, 256, ("a",)),
        ({"num_beams": 1, "top_k": 0}, 0.0, 256, ()),
    ],
)
def test_settings_of_a_generation(settings, temperature, max_tokens, until):
    found = read_generation(settings)
    assert (found.temperature, found.max_tokens, found.until) == (temperature, max_tokens, until)


def test_settings_that_are_not_known_are_refused():
    with pytest.raises(UsageError, match=r"num_beams=4 is not known here. Choose a task without"):
        read_generation({"num_beams": 4})


@pytest.mark.every_dose
@pytest.mark.long
def test_options_of_tasks_are_checked(tmp_path, capsys):
    command = ["evaluate", "--hf", str(PARITY)]
    for options, message in (
        (["--set", "a=b", "--limit", "2"], "--limit: is of --tasks. Leave it out."),
        (["--tasks", "a", "--limit", "0"], "--limit 0: must be at least 1"),
        (["--tasks", "a", "--num-fewshot", "-1"], "must be at least 0. Set 0 for none"),
        (["--tasks", "a", "--text", "b"], "Give one of the two"),
        (["--tasks", "a", "--set", "a=b"], "--set: is of evaluation sets"),
    ):
        assert cli.main([*command, *options]) == 64
        assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def hf(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("hf") / "model"
    shutil.copytree(PARITY, folder)
    tokenizer.save(folder)
    return folder


@pytest.fixture
def tasks(tmp_path, monkeypatch, answers):
    """Tasks and their data in files; one question is answered as the model writes it."""
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    written = answers.generate([(q["question"], {"max_gen_toks": 5}) for q in QUESTIONS])
    written[1] = "something else"
    data = tmp_path / "data.jsonl"
    lines = [json.dumps(q | {"written": text}) for q, text in zip(QUESTIONS, written, strict=True)]
    data.write_text("\n".join(lines) + "\n")
    head = f"""
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {tmp_path / "cache"}}}
test_split: test
"""
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{head}{text}")
    return folder


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_tasks_ask_the_model(hf, tasks, model, tokenizer, capsys):
    names = ",".join(TASKS)
    command = ["evaluate", "--hf", str(hf), "--tasks", names, "--tasks-dir", str(tasks)]
    assert cli.main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    right = 0
    nats = 0.0
    for question in QUESTIONS:
        totals = [
            expected(model, tokenizer, question["question"], choice).total()
            for choice in question["choices"]
        ]
        right += int(np.argmax(totals)) == question["answer"]
        nats -= expected(model, tokenizer, "", question["question"]).total()
    results = found["results"]
    assert results["tiny_choice"]["acc,none"] == pytest.approx(right / 3)
    num_bytes = sum(len(question["question"]) for question in QUESTIONS)
    bits = nats / math.log(2) / num_bytes
    assert results["tiny_rolling"]["bits_per_byte,none"] == pytest.approx(bits, abs=1e-5)
    assert results["tiny_written"]["exact_match,none"] == pytest.approx(2 / 3)
    assert cli.main([*command, "--limit", "1"]) == 0
    shown = capsys.readouterr().out
    assert "tiny_choice" in shown and "bits_per_byte" in shown


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_a_task_that_is_not_there_is_named(hf, tasks, tmp_path, capsys):
    command = ["evaluate", "--hf", str(hf), "--tasks", "no_such_task"]
    assert cli.main([*command, "--tasks-dir", str(tasks)]) == 64
    assert "--tasks no_such_task: is no task that the harness knows" in capsys.readouterr().err
    assert cli.main([*command, "--tasks-dir", str(tmp_path / "nowhere")]) == 64
    assert "is no directory" in capsys.readouterr().err
