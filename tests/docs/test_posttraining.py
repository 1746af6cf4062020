"""Every example of docs/posttraining.md runs as it stands, and its table has all rewards."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml

from benchmarks.additions import task
from benchmarks.word_problems.run import COMMANDS
from data_pipeline.prepare import command as prepare
from maxtrain import cli
from maxtrain.commands import replay
from maxtrain.commands.evaluate import command as evaluate
from maxtrain.commands.teach import command as teach
from maxtrain.config import load_config
from maxtrain.config.schema import DpoConfig
from maxtrain.config.sections.dpo import UNPAIRED
from maxtrain.observe.metrics import read_metrics
from maxtrain.ops.preference import LOSSES
from maxtrain.rl.rewards.registry import PROFILES, names_of_ours
from maxtrain.trainer.loop import main
from tests.docs.test_fine_tuning import COLOURS, NAMES, write_pretrained
from tests.support.commands import ROOT, blocks, commands, run

TEXT = (ROOT / "docs" / "posttraining.md").read_text()
SECTIONS = re.split(r"^###? ", TEXT, flags=re.MULTILINE)[1:]
# Each with the section that it is in.
PROGRAMS = [
    (section.splitlines()[0], program)
    for section in SECTIONS
    for program in blocks(section, "python")
]
# Shows what the commands of its section make.
OF_A_RUN = [program for _, program in PROGRAMS if "runs/grpo" in program]
EXAMPLES = [
    pytest.param(program, id=section) for section, program in PROGRAMS if program not in OF_A_RUN
]


@pytest.mark.parametrize("program", EXAMPLES)
def test_the_example_works(program):
    assert "assert" in program, "an example that shows nothing"
    exec(compile(program, "docs/posttraining.md", "exec"), {})


def test_the_table_has_all_rewards():
    (section,) = [section for section in SECTIONS if section.startswith("Rewards\n")]
    listed = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    parts = {f"{profile}.{part}" for profile in PROFILES for part in PROFILES[profile]}
    assert sorted(listed) == sorted(set(names_of_ours()) - parts)


def test_the_table_has_all_losses_of_preferences():
    (section,) = [section for section in SECTIONS if section.startswith("Preferences\n")]
    assert sorted(names_in_table(section)) == sorted(LOSSES)
    assert DpoConfig().loss_type in LOSSES
    (section,) = [section for section in SECTIONS if section.startswith("Answers with a label\n")]
    assert sorted(names_in_table(section)) == sorted(UNPAIRED)


def names_in_table(section):
    rows = re.findall(r"^\| (`\w[^.]*?) \|", section, re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`(\w+)`", row)]


def write_pairs(path):
    lines = []
    for name in NAMES:
        for thing, colour in COLOURS.items():
            pair = {
                "prompt": f"I am {name}. What colour is {thing}?",
                "chosen": f" It is {colour}.",
                "rejected": " Who knows.",
            }
            lines.append(json.dumps(pair))
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.long
@pytest.mark.processes
def test_the_commands_of_preferences_work_in_order(tmp_path):
    write_pretrained(tmp_path)
    write_pairs(tmp_path / "pairs.jsonl")
    (section,) = [section for section in SECTIONS if section.startswith("Preferences\n")]
    (example,) = blocks(section, "json")
    assert list(json.loads(example)) == ["prompt", "chosen", "rejected"]
    for command in commands(section):
        run(command, tmp_path)
    records = read_metrics(tmp_path / "runs" / "preferred")
    first, *_, last = [record for record in records if record["kind"] == "eval"]
    assert first["preference"] == pytest.approx(0.693, abs=1e-3)
    assert last["preference"] < 0.5 * first["preference"]
    assert last["reward_accuracy"] > 0.9
    records = read_metrics(tmp_path / "runs" / "stored")
    assert [record for record in records if record["kind"] == "eval"][-1]["reward_accuracy"] > 0.9
    for part in ("train", "eval"):
        assert len(list((tmp_path / "data" / "pairs" / part).glob("reference-*.logprobs"))) == 1


def write_labels(path):
    lines = []
    for name in NAMES:
        for thing, colour in COLOURS.items():
            prompt = f"I am {name}. What colour is {thing}?"
            for completion, is_good in ((f" It is {colour}.", True), (" Who knows.", False)):
                lines.append({"prompt": prompt, "completion": completion, "label": is_good})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


# Of the run from end to end: fewer problems, a smaller model, and a step or two.
_SMALL = "steps=2 schedule.warmup_steps=1 model.num_layers=1 model.embed_dim=16 model.mlp_dim=16"
_OF_RUN = {
    "maxtrain.examples.word_problems": "--worked 60 --results 60",
    "config=sft_word_problems": f"{_SMALL} data.batch_size=4",
    "config=grpo_word_problems": f"{_SMALL} data.batch_size=2 grpo.num_generations=2",
}


@pytest.mark.long
@pytest.mark.processes
def test_the_commands_of_the_run_from_end_to_end_work(tmp_path):
    """A dose of them: tests/examples/test_word_problems.py runs them as they stand."""
    (section,) = [section for section in SECTIONS if section.startswith("A run from end to end\n")]
    assert commands(section)[:-1] == list(COMMANDS.values())
    for command in commands(section):
        more = [words for name, words in _OF_RUN.items() if name in command.split()]
        run(" ".join([command, *more]), tmp_path)
    (example,) = blocks(section, "json")
    assert example in (tmp_path / "problems" / "worked.jsonl").read_text()
    records = read_metrics(tmp_path / "runs" / "grpo_word_problems")
    evaluations = [record for record in records if record["kind"] == "eval"]
    assert [record["step"] for record in evaluations] == [0, 2]
    assert "accuracy" in evaluations[-1]


@pytest.mark.long
@pytest.mark.processes
def test_the_commands_of_answers_with_a_label_work(tmp_path):
    write_pretrained(tmp_path)
    write_labels(tmp_path / "labels.jsonl")
    (section,) = [section for section in SECTIONS if section.startswith("Answers with a label\n")]
    for command in commands(section):
        run(command, tmp_path)
    records = read_metrics(tmp_path / "runs" / "labelled")
    first, *_, last = [record for record in records if record["kind"] == "eval"]
    assert first["preference"] == pytest.approx(0.5, abs=1e-3)
    assert last["preference"] < 0.8 * first["preference"]
    assert last["reward_chosen"] > 0 > last["reward_rejected"]


@pytest.mark.long
@pytest.mark.processes
def test_the_commands_of_reward_models_work(tmp_path):
    write_pretrained(tmp_path)
    write_pairs(tmp_path / "pairs.jsonl")
    (section,) = [section for section in SECTIONS if section.startswith("Reward models\n")]
    for command in commands(section):
        run(command, tmp_path)
    records = read_metrics(tmp_path / "runs" / "judge")
    first, *_, last = [record for record in records if record["kind"] == "eval"]
    assert last["preference"] < 0.5 * first["preference"]
    assert last["reward_accuracy"] > 0.9
    assert (tmp_path / "exported" / "judge" / "model.safetensors").exists()


def write_small(config):
    """Write small.py into the current folder: the config of the tests without data, which the
    commands name."""
    values = yaml.safe_load(config.read_text())
    del values["data"]
    text = f"from ml_collections import ConfigDict\n\ndef get_config():\n    return ConfigDict({values!r})\n"
    Path("small.py").write_text(text)


@pytest.mark.long
@pytest.mark.usefixtures("this_process")
def test_the_commands_of_grpo_work(tmp_path, monkeypatch, tiny_run, capsys):
    """They run in a folder with prompts and a model that knows the format."""
    task.write_prompts(tmp_path / "prompts.jsonl")
    config = tiny_run(tmp_path, texts=4, steps=2, precision={"compute": "float32"})
    monkeypatch.chdir(tmp_path)
    assert main(load_config([f"config={config}", "run_name=sft"])) == 0
    begin = TEXT.index("## GRPO")
    section, _, of_ppo = TEXT[begin : TEXT.index("## Distillation from files")].partition("## PPO")
    prepares, trains, evaluates, shows, replays = blocks(section, "bash")
    words = shlex.split(prepares)
    assert words[:3] == ["python", "-m", "data_pipeline.prepare"]
    assert prepare.main(words[3:]) == 0
    words = shlex.split(trains.replace("\\\n", " "))
    assert words[:2] == ["maxtrain", "train"]
    write_small(config)
    assert main(load_config(words[2:])) == 0
    assert list(Path("runs/grpo/rollouts").glob("*.npz"))
    for program in OF_A_RUN:
        exec(compile(program, "docs/posttraining.md", "exec"), {})
    monkeypatch.setattr(evaluate, "start", lambda mesh, cache: None)
    words = shlex.split(evaluates)
    assert words[:2] == ["maxtrain", "evaluate"]
    capsys.readouterr()
    assert evaluate.main(words[2:]) == 0
    assert "held_out, reward/exact" in capsys.readouterr().out
    words = shlex.split(shows)
    assert words[:2] == ["maxtrain", "rollouts"]
    assert cli.main(words[1:]) == 0
    shown = capsys.readouterr().out
    assert "rollout of step 3" in shown and "prompt 1" in shown and "prompt 2" not in shown
    assert "exact = " in shown and "overlong = " in shown
    words = shlex.split(replays)
    assert words[:2] == ["maxtrain", "replay"]
    assert replay.main(words[2:]) == 0
    # In the same folder: PPO begins with the same model and reads the same prompts.
    (trains,) = blocks(of_ppo, "bash")
    words = shlex.split(trains.replace("\\\n", " "))
    assert main(load_config(words[2:])) == 0
    last = read_metrics(Path("runs/ppo"))[-2]
    assert {"value_loss", "score", "kl"} <= last.keys()


@pytest.mark.long
@pytest.mark.usefixtures("this_process")
def test_the_commands_of_distillation_on_its_own_completions_work(tmp_path, monkeypatch, tiny_run):
    """They run in a folder with prompts and a teacher."""
    task.write_prompts(tmp_path / "prompts.jsonl")
    config = tiny_run(tmp_path, texts=4, steps=2, precision={"compute": "float32"})
    monkeypatch.chdir(tmp_path)
    assert main(load_config([f"config={config}", "run_name=teacher", "seed=1"])) == 0
    prompts = ["--prompts", "prompts.jsonl", "--tokenizer", "bytes", "--holdout", "0.2"]
    assert prepare.main(["data/prompts", *prompts]) == 0
    title = "Distillation on its own completions\n"
    (section,) = [section for section in SECTIONS if section.startswith(title)]
    trains, replays = commands(section)
    words = shlex.split(trains)
    assert words[:2] == ["maxtrain", "train"]
    write_small(config)
    assert main(load_config(words[2:])) == 0
    evaluations = [r for r in read_metrics(Path("runs/pupil")) if r["kind"] == "eval"]
    assert evaluations[-1]["distill"] < evaluations[0]["distill"]
    words = shlex.split(replays)
    assert words[:2] == ["maxtrain", "replay"]
    assert replay.main(words[2:]) == 0


@pytest.mark.long
@pytest.mark.usefixtures("this_process")
def test_the_commands_of_distillation_from_files_work(tmp_path, monkeypatch, tiny_run, capsys):
    """They run in a folder with data and a teacher."""
    config = tiny_run(tmp_path, "--holdout", "0.2", steps=2)
    monkeypatch.chdir(tmp_path)
    assert main(load_config([f"config={config}", "run_name=teacher", "seed=1"])) == 0
    shutil.copytree("data", "web")
    Path("web").rename("data/web")
    (section,) = [section for section in SECTIONS if section.startswith("Distillation from files")]
    teaches, trains = commands(section)
    words = shlex.split(teaches)
    assert words[:2] == ["maxtrain", "teach"]
    monkeypatch.setattr(teach, "start", lambda mesh, cache: None)
    capsys.readouterr()
    assert teach.main(words[2:]) == 0
    said = capsys.readouterr().err
    assert "tokens x 100 bytes (16 entries)" in said and "4 + 6 K bytes" in section
    words = shlex.split(trains)
    assert words[:2] == ["maxtrain", "train"]
    write_small(config)
    assert main(load_config(words[2:])) == 0
    evaluations = [r for r in read_metrics(Path("runs/pupil")) if r["kind"] == "eval"]
    assert evaluations[-1]["distill"] < evaluations[0]["distill"]
