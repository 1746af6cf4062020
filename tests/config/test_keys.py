"""Names: the message about an unknown key has the right name, wherever it can be guessed."""

import pytest

from maxtrain.config import keys


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("model.embd_dim", "model.embed_dim"),  # typo in the key
        ("modle.num_layers", "model.num_layers"),  # typo in the section
        ("modle.num_layer", "model.num_layers"),  # typo in both
        ("Optimizer.Learning_Rate", "optimizer.learning_rate"),  # wrong case
        ("STEPS", "steps"),
        ("momentum", "optimizer.momentum"),  # wrong level
        ("model.seq_length", "data.seq_length"),
        ("data.steps", "steps"),
        ("schedule.warmup-steps", "schedule.warmup_steps"),
        ("optimizer.warmup_steps", "schedule.warmup_steps"),  # wrong section
        ("data.sources.web.pth", "data.sources.web.path"),  # below a name of the user's
        ("data.sorces.web.path", "data.sources.web.path"),
        ("eval.set.held.path", "eval.sets.held.path"),
        ("model.num_heads.x", "model.num_heads"),
    ],
)
def test_the_right_name_is_suggested(wrong, right):
    text = keys.unknown(wrong)
    assert text.startswith(f"{wrong} is not a key. Did you mean {right}"), text


@pytest.mark.parametrize(
    ("wrong", "where"), [("frobnicate", "`--help`"), ("model.frobnicate", "`--help model`")]
)
def test_a_hopeless_name_is_sent_to_the_help(wrong, where):
    assert keys.unknown(wrong) == f"{wrong} is not a key. {where} lists those there are."


def test_a_key_inside_a_list_is_said_to_be_set_with_the_list():
    assert "Set the whole list, data.stages=[...]" in keys.unknown("data.stages[0].until")


def test_a_name_in_two_sections_gives_both():
    assert "data.seq_length or eval.seq_length" in keys.unknown("seq_length")


@pytest.mark.parametrize(
    "path",
    [
        "steps",
        "model.num_heads",
        "data.sources.web.path",
        "eval.sets.a",
        "data.sources.web",
        "model",
    ],
)
def test_find_knows_keys_and_sections(path):
    assert keys.find(path) is not None


@pytest.mark.parametrize(
    "path",
    ["", "Steps", "model.", ".model", "steps.x", "data.sources.web.path.x", "data.stages.0.until"],
)
def test_find_knows_nothing_else(path):
    assert keys.find(path) is None


def test_words():
    assert keys.describe(keys.find("steps")) == "whole number | auto"
    assert keys.describe(keys.find("observe.prompts")) == "list of texts"
    assert keys.describe(keys.find("model.head_dim")) == "whole number | null"
    assert [keys.choices(range(n)) for n in (1, 2, 4)] == ["0", "0 or 1", "0, 1, 2 or 3"]
    assert [keys.show(v) for v in (True, None, 1.5, "a")] == ["true", "null", "1.5", "a"]
    assert len(keys.show("x" * 500)) == 60
