"""`maxtrain rollouts RUN`: the completions of a rollout, as people and as programs read them."""

import json

import numpy as np
import pytest

from data_pipeline.base.errors import DataError, UsageError
from data_pipeline.tokenizer import CARRIED, TOKENIZER_FOLDER, ByteTokenizer, TokenizerRecord
from maxtrain import cli
from maxtrain.commands.rollouts import stored_steps
from maxtrain.rl.rollout import Rollout

TOKENIZER = ByteTokenizer()
PROMPTS = ("1+1=", "2+2=\n")
COMPLETIONS = ("2", "\x1b[2J3\r", "4\n  exact = 1, weight 1: ok", "é\u202e")
TRUNCATED = (False, True, False, True)


def ids(texts):
    return [TOKENIZER.encode(text).tolist() for text in texts]


def rollout(first, last, **others) -> Rollout:
    """A rollout of two prompts with two completions each, judged by two rewards."""
    prompts = [[TOKENIZER.eod_id, *prompt] for prompt in ids(PROMPTS)]
    tokens = []
    for completion, is_cut in zip(ids(COMPLETIONS), TRUNCATED, strict=True):
        tokens.append(completion if is_cut else [*completion, TOKENIZER.eod_id])
    lengths = [len(each) for each in tokens]
    count = sum(lengths)
    values = {
        "prompts": np.concatenate(prompts).astype(np.int32),
        "prompt_lengths": np.array([len(prompt) for prompt in prompts], np.int32),
        "tokens": np.concatenate(tokens).astype(np.int32),
        "lengths": np.array(lengths, np.int32),
        "sampled": np.zeros(count, np.float32),
        "old": np.zeros(count, np.float32),
        "reference": np.zeros(0, np.float32),
        "truncated": np.array(TRUNCATED),
        "rewards": np.array([[1.0, 0.0, np.nan, 0.5], [-1.0, np.nan, np.nan, 0.25]]),
        "advantages": np.array([0.5, -0.5, 0.0, 0.0]),
        "about": {
            "steps": [first, last],
            "sampled_after": first - 1,
            "names": ["exact", "mine:f"],
            "weights_of_rewards": [1.0, 2.0],
            "judgements": [
                [["ok", ""], ["ok", ""], ["skipped", "no gold"], ["ok", ""]],
                [["ok", ""], ["error", "\x1b]0;x\x07ValueError\n: bad"], ["ok", ""], ["ok", ""]],
            ],
        },
    }
    return Rollout(**values | others)


@pytest.fixture
def run(tmp_path):
    """The folder of a run that keeps rollouts of the steps 3 to 4 and 5."""
    folder = tmp_path / "run"
    (folder / TOKENIZER_FOLDER).mkdir(parents=True)
    TOKENIZER.save(folder / TOKENIZER_FOLDER)
    carried = TokenizerRecord(TOKENIZER.name, TOKENIZER.sha256, TOKENIZER.eod_id, {})
    (folder / TOKENIZER_FOLDER / CARRIED).write_bytes(carried.to_bytes())
    rollout(3, 4).save(folder / "rollouts" / "00000003.npz")
    rollout(5, 5).save(folder / "rollouts" / "00000005.npz")
    rollout(7, 8).save(folder / "rollouts" / "00000007.sampled.npz")
    return folder


def shown(capsys, *words):
    capsys.readouterr()
    assert cli.main(["rollouts", *map(str, words)]) == 0
    return capsys.readouterr().out


def records(capsys, *words):
    return [json.loads(line) for line in shown(capsys, *words, "--json").splitlines()]


def test_json_has_everything_of_each_completion(run, capsys):
    lines = records(capsys, run)
    assert [line["completion"] for line in lines] == list(COMPLETIONS)
    assert [line["truncated"] for line in lines] == list(TRUNCATED)
    assert [line["prompt"] for line in lines] == [PROMPTS[number // 2] for number in range(4)]
    places = [(line["prompt_number"], line["completion_number"]) for line in lines]
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [line["reward"] for line in lines] == [-1.0, 0.0, None, 1.0]
    assert [line["advantage"] for line in lines] == [0.5, -0.5, 0.0, 0.0]
    assert lines[0]["steps"] == [5, 5] and lines[0]["length"] == 2
    assert lines[2]["rewards"]["exact"] == {
        "value": None, "weight": 1.0, "outcome": "skipped", "detail": "no gold"
    }  # fmt: skip
    assert lines[1]["rewards"]["mine:f"]["outcome"] == "error"


@pytest.mark.parametrize(("step", "first"), [(None, 5), (3, 3), (4, 3), (5, 5)])
def test_a_step_has_the_rollout_that_it_reads(run, capsys, step, first):
    options = [] if step is None else ["--step", step]
    assert records(capsys, run, *options)[0]["steps"][0] == first


@pytest.mark.parametrize("step", [1, 2, 6, 7, 100])
def test_a_step_without_a_rollout_is_an_error_that_lists_those_there_are(run, capsys, step):
    assert cli.main(["rollouts", str(run), "--step", str(step)]) == DataError.exit_code
    said = capsys.readouterr().err
    assert f"--step={step}" in said and "3, 5" in said and "keep_rollouts" in said
    assert stored_steps(run) == [3, 5]


@pytest.mark.parametrize(("prompts", "count"), [("1", 2), ("2", 4), ("9", 4), ("all", 4)])
def test_so_many_prompts_are_shown(run, capsys, prompts, count):
    assert len(records(capsys, run, "--prompts", prompts)) == count


def test_text_from_outside_commands_no_terminal_and_passes_for_no_reward(run, capsys):
    text = shown(capsys, run)
    assert not any(ord(c) < 32 and c != "\n" for c in text) and "\u202e" not in text
    assert r"\x1b[2J3\x0d" in text and r"\u202e" in text and r"\x1b]0;x\x07ValueError : bad" in text
    lines = text.splitlines()
    of_rewards = [line for line in lines if line.startswith("  exact = ")]
    assert len(of_rewards) == 4
    assert "  |   exact = 1, weight 1: ok" in lines
    assert sum(line.startswith("prompt ") for line in lines) == 2


def test_ppo_has_the_mean_advantage_of_tokens(run, capsys):
    made = rollout(9, 9)
    advantages = np.repeat([1.0, 2.0, 3.0, 4.0], made.lengths)
    made = made._replace(
        token_advantages=advantages, values=np.zeros(len(advantages), np.float32),
        returns=advantages,
    )  # fmt: skip
    made.save(run / "rollouts" / "00000009.npz")
    assert [line["advantage"] for line in records(capsys, run)] == [1.0, 2.0, 3.0, 4.0]


def test_a_run_without_rewards_has_completions_alone(run, capsys):
    made = rollout(9, 9, rewards=np.zeros((0, 4)), old=np.zeros(0, np.float32))
    about = made.about | {"names": [], "weights_of_rewards": []}
    made._replace(about=about).save(run / "rollouts" / "00000009.npz")
    lines = records(capsys, run)
    assert [line["completion"] for line in lines] == list(COMPLETIONS)
    assert lines[0]["reward"] is None and lines[0]["advantage"] is None
    assert lines[0]["rewards"] == {}
    assert "advantage" not in shown(capsys, run)


@pytest.mark.parametrize("damage", ["cut", "other"])
def test_a_damaged_file_is_an_error(run, capsys, damage):
    path = run / "rollouts" / "00000005.npz"
    content = path.read_bytes()
    path.write_bytes(content[:-40] if damage == "cut" else b"text")
    assert cli.main(["rollouts", str(run)]) == DataError.exit_code
    assert str(path) in capsys.readouterr().err
    assert records(capsys, run, "--step", 3)


def test_a_run_without_rollouts_or_a_folder_that_is_none(tmp_path, capsys):
    assert cli.main(["rollouts", str(tmp_path)]) == UsageError.exit_code
    assert cli.main(["rollouts", str(tmp_path / "none")]) == UsageError.exit_code
    assert "none" in capsys.readouterr().err
    (tmp_path / "config.yaml").write_text("steps: 8\n")
    assert cli.main(["rollouts", str(tmp_path)]) == DataError.exit_code


@pytest.mark.parametrize("words", [["--step", "0"], ["--step", "x"], ["--prompts", "0"], []])
def test_words_that_make_no_sense_are_refused(run, words, capsys):
    given = [str(run), *words] if words else []
    assert cli.main(["rollouts", *given]) == UsageError.exit_code


def without(name):
    about = dict(rollout(9, 9).about)
    del about[name]
    return about


@pytest.mark.parametrize(
    ("about", "lacks"),
    [
        *((without(name), name) for name in ("steps", "sampled_after", "names", "judgements")),
        (without("weights_of_rewards"), "weights_of_rewards"),
        (rollout(9, 9).about | {"weights_of_rewards": [1.0]}, "weights"),
        (rollout(9, 9).about | {"judgements": []}, "judgements"),
        (rollout(9, 9).about | {"judgements": [[["ok", ""]], [["ok", ""]]]}, "exact"),
        (rollout(9, 9).about | {"judgements": [["ok"] * 4] * 2}, "exact"),
        (rollout(9, 9).about | {"judgements": [[None] * 4] * 2}, "exact"),
        (rollout(9, 9).about | {"judgements": None}, "judgements"),
        (rollout(9, 9).about | {"steps": 9}, "steps"),
    ],
)
@pytest.mark.parametrize("step", [None, 9])
def test_a_record_of_another_version_is_named_with_what_it_lacks(run, capsys, about, lacks, step):
    path = run / "rollouts" / "00000009.npz"
    rollout(9, 9, about=about).save(path)
    options = [] if step is None else ["--step", str(step)]
    assert cli.main(["rollouts", str(run), *options]) == DataError.exit_code
    said = capsys.readouterr().err
    assert said.startswith(f"error: {path}: ") and lacks in said and "Traceback" not in said
    assert records(capsys, run, "--step", "5")
