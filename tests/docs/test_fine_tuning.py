"""docs/fine_tuning.md, every command as it stands: a model learns to answer, and says the same in
every form in which it is given away."""

import itertools
import json
import re
import shlex

import pytest
import tokenizers

from data_pipeline.tokenizer import load_tokenizer, train_bpe
from maxtrain.commands.export.command import export
from maxtrain.commands.serve import command as server
from maxtrain.config.schema import ModelConfig, PrecisionConfig
from maxtrain.models.registry import build_model
from maxtrain.weights.hf import load_pretrained
from maxtrain.weights.peft import read_set
from tests.support.commands import ROOT, blocks, commands, run
from tests.support.llama_cpp import LlamaCpp

# The tutorial of colours, and that of worked answers.
TEXT, WORKED = (ROOT / "docs" / "fine_tuning.md").read_text().split("## Questions with worked")
COLOURS = {"the sky": "blue", "grass": "green", "snow": "white", "coal": "black", "blood": "red"}
QUESTIONS = ("What colour is {}?", "Tell me the colour of {}.", "Which colour has {}?")
NAMES = ("Ada", "Bo", "Cy", "Di", "Ed", "Flo", "Gus", "Hal", "Ida", "Jo")
# One of the rows that prepare show prints; names of the made-up conversations differ from row to row.
_EXPECTED_ROW = re.compile(
    r"--- segment 1: positions 0 to \d+, 5 of \d+ are targets, in ⟦⟧ -+\n"
    r"<\|im_start\|>user\n.*<\|im_end\|>\n<\|im_start\|>assistant\n⟦It is \w+\.<\|im_end\|>⟧\n"
)
TEMPLATE = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_pretrained(folder, said=()):
    """A directory of Hugging Face, whose model has learned nothing yet; its tokenizer has, from what
    is said."""
    if not said:
        pairs = COLOURS.items()
        said = [f"What colour is {thing}? It is {colour}. user\n" for thing, colour in pairs]
    inner = tokenizers.Tokenizer.from_str(train_bpe([*said] * 3, 330).content.decode())
    inner.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    place = folder / "tokenizer"
    place.mkdir()
    inner.save(str(place / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE, "add_bos_token": False}
    (place / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(place)
    config = ModelConfig(
        family="llama",
        vocab_size=tokenizer.vocab_size,
        num_layers=2,
        embed_dim=64,
        mlp_dim=128,
        num_heads=4,
        num_kv_heads=2,
        max_length=256,
    )
    export(build_model(config, PrecisionConfig()), tokenizer, str(place), folder / "pretrained")


def write_conversations(path):
    lines = []
    for name in ("", *NAMES):
        for question in QUESTIONS:
            for thing, colour in COLOURS.items():
                asked = question.format(thing)
                if name:
                    asked = f"I am {name}. {asked}"
                said = [
                    {"role": "user", "content": asked},
                    {"role": "assistant", "content": f"It is {colour}."},
                ]
                lines.append(json.dumps({"messages": said}))
    path.write_text("\n".join(lines) + "\n")


def require_served(folder):
    """The command that serves loads what was made: all that it does but to listen."""
    (command,) = blocks(TEXT, "sh")
    asked = server._parse(shlex.split(command)[2:], "maxtrain serve")
    assert asked.adapter == ["colours=exported/adapters"]
    model, _ = load_pretrained(folder / asked.hf)
    found = read_set(folder / "exported" / "adapters", "colours", model.config)
    assert found.lora.rank == 16


@pytest.mark.long
@pytest.mark.processes
def test_the_commands_work_in_order(tmp_path, monkeypatch):
    write_pretrained(tmp_path)
    write_conversations(tmp_path / "chat.jsonl")
    (example,) = blocks(TEXT, "json")
    assert list(json.loads(example)) == ["messages"]
    outputs = [run(command, tmp_path).stdout for command in commands(TEXT)]
    prepared, shown, trained, evaluated, answered, *_, exported_answer = outputs
    assert len(outputs) == 9
    assert "⟦It is" in prepared
    assert _EXPECTED_ROW.match(shown)
    (row,) = [block for block in blocks(TEXT, "text") if "---" in block]
    assert _EXPECTED_ROW.fullmatch(row)
    assert "talk to it:" in trained
    assert "generate runs/colours --chat\n" in trained
    losses = [float(found) for found in re.findall(r"eval held_out: nll ([\d.]+)", trained)]
    assert len(losses) == 2 and losses[1] < losses[0] < 3
    assert "held_out" in evaluated
    assert "It is blue." in answered and "It is white." in exported_answer
    monkeypatch.chdir(tmp_path)
    require_served(tmp_path)
    theirs = LlamaCpp(tmp_path / "colours.gguf")
    for thing, colour in COLOURS.items():
        asked = [{"role": "user", "content": f"I am Ada. What colour is {thing}?"}]
        assert theirs.answer(asked) == f"It is {colour}."


def worked_answers():
    """Lines as GSM8K has them."""
    lines = []
    for name in ("Ann", "Bo", "Cy", "Di"):
        for thing in ("clips", "eggs", "pens"):
            for a, b in itertools.product(range(2, 6), repeat=2):
                record = {
                    "question": f"{name} has {a} {thing} and buys {b} more. How many has she?",
                    "answer": f"{name} has {a} + {b} = <<{a}+{b}={a + b}>>{a + b} {thing}.\n#### {a + b}",
                }
                lines.append(json.dumps(record))
    return lines


@pytest.mark.long
@pytest.mark.processes
def test_the_commands_of_worked_answers_work_in_order(tmp_path):
    lines = worked_answers()
    (example,) = blocks(WORKED, "json")
    assert example.strip() in lines
    (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n")
    asked = "Give <reasoning> and <answer>.\n</reasoning>\n</answer> system user assistant"
    write_pretrained(tmp_path, [asked, *lines[::5]])
    outputs = [run(command, tmp_path).stdout for command in commands(WORKED)]
    _, shown, planned, trained, evaluated, answered, _, of_rewards = outputs
    (text,) = blocks(WORKED, "text")
    assert shown.startswith(text)
    assert "ends because" in planned and "ends because" in of_rewards
    losses = [float(found) for found in re.findall(r"eval held_out: nll ([\d.]+)", trained)]
    assert losses[-1] < 0.2 * losses[0] and "held_out" in evaluated
    assert re.search(
        r"<reasoning>\n(?:Ann|Bo|Cy|Di) has \d \+ \d = \d clips\.\n</reasoning>\n<answer>\n\d\n</answer>",
        answered,
    )
