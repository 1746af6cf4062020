"""docs/data.md runs as it stands, from top to bottom, on two folders of made-up text."""

import json
import random
import re

import pytest

from data_pipeline.tokenizer import train_bpe
from maxtrain.observe.metrics import read_metrics
from tests.support.commands import ROOT, blocks, commands, run

TEXT = (ROOT / "docs" / "data.md").read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("docs"), random.Random(0)
    for name in ("web", "code", "chat"):
        (folder / name).mkdir()
    words = ["if", "then", "else", "while", "x", "y", "=", "1", "return", "page", "home"]
    for name in ("web", "code"):
        for number in range(100):
            (folder / name / f"{number}.txt").write_text(
                f"{name} " + " ".join(rng.choices(words, k=100))
            )
    conversation, question, chat_map = blocks(TEXT, "json")
    (folder / "map.json").write_text(chat_map)
    _write_questions(folder / "questions.jsonl", question)
    (folder / "chat" / "a.jsonl").write_text(conversation * 40)
    (template,) = blocks(TEXT, "jinja")
    (folder / "plain.jinja").write_text(template)
    _write_preferences(folder, rng, words)
    tokenizer = json.loads(train_bpe(words, 300).content)
    for token in ("<|im_start|>", "<|im_end|>"):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        tokenizer["added_tokens"].append(
            {"id": 300 + len(tokenizer["added_tokens"]), "content": token, "special": True} | flags
        )
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (program,) = re.findall(r"^```python\n# small\.py\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    (folder / "small.py").write_text(program)
    return folder


def _write_questions(path, shown):
    """Write columns for --map: the line that the page shows, and a similar one."""
    other = json.loads(shown) | {"question": "1 + 1?", "hint": "", "answer": "2"}
    path.write_text(f"{shown.strip()}\n{json.dumps(other)}\n")


def _write_preferences(folder, rng, words):
    """Pairs with scores, and answers with a label."""

    def text():
        return " ".join(rng.choices(words, k=9))

    (folder / "pairs").mkdir()
    pairs = []
    labels = []
    for number in range(40):
        pair = {"prompt": text(), "chosen": text(), "rejected": text()}
        pairs.append(pair | {"score_chosen": 7, "score_rejected": number % 7})
        labels.append({"prompt": text(), "completion": text(), "label": number % 3 > 0})
    (folder / "pairs" / "a.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    (folder / "labels.jsonl").write_text("\n".join(map(json.dumps, labels)))
    judged = {"question": "1 + 1?", "tone": "short", "better": 2, "worse": 3}
    (folder / "judged.jsonl").write_text(json.dumps(judged))
    instruction = {"instruction": "Add.", "input": "1 1", "output": "2"}
    (folder / "alpaca.json").write_text(json.dumps([instruction, instruction | {"input": ""}]))


@pytest.mark.long
@pytest.mark.processes
def test_every_command_works_in_order(folder):
    outputs = {}
    for command in commands(TEXT):
        outputs[command] = run(command, folder, columns=120).stdout
    (mapped,) = (out for command, out in outputs.items() if "show data/mapped" in command)
    assert mapped == "A: Answer with a number.\nA: 1 + 1? \nB: \u27e62\n\u27e7"
    (judged,) = (out for command, out in outputs.items() if "show data/judged" in command)
    assert "A: 1 + 1? (short)" in judged
    assert "\u27e62" in judged and "\u27e63" in judged
    plans = {
        command: out for command, out in outputs.items() if command.startswith("maxtrain plan")
    }
    steps = [out for command, out in plans.items() if "--step" in command]
    assert all(out.startswith("step 37 of 78: 8 rows of 64 tokens") for out in steps)
    assert (
        "To be read" in steps[0]
        and "Read by the run, as the batches on record of step 30 and step 40 show." in steps[1]
    )
    ends = {command: out for command, out in plans.items() if "--step" not in command}
    assert len(ends) > 8 and all(
        re.match("plan: .*; ends because .* epochs", out) for out in ends.values()
    )
    assert "'web' completes epoch 3" in next(
        out for command, out in ends.items() if "epochs=3" in command
    )
    assert any("every source in a fresh pass" in out for out in ends.values())
    changed = next(out for command, out in ends.items() if "accept_changes" in command)
    assert re.search(r"^50 to 60 .*16 x 64", changed, re.MULTILINE), changed
    last = [
        record for record in read_metrics(folder / "runs" / "first") if record["kind"] == "train"
    ]
    steps = [record["step"] for record in last]
    assert steps == [*range(10, 61, 10)]
    assert last[-1]["epochs/web"] > last[2]["epochs/web"] == last[3]["epochs/web"], (
        "the second stage reads only code"
    )
