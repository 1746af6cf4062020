"""Each key of the schema says what a change of it does to a run that goes on."""

import re

import pytest
import yaml

from maxtrain.config import load_config
from maxtrain.config.keys import all_keys
from maxtrain.config.load import to_yaml
from maxtrain.config.resumed import (
    EFFECTS,
    changed_settings,
    changed_state_settings,
    effect_of,
)

CONFIG = load_config(["config=quickstart"])


def test_every_key_has_an_effect_and_every_pattern_a_key():
    keys = [re.sub(r"\[0\].*", "", key.path) for key in all_keys()]
    lacking = [key for key in keys if not any(re.fullmatch(p, key) for p in EFFECTS)]
    assert lacking == []
    unused = [p for p in EFFECTS if not any(re.fullmatch(p, key) for key in keys)]
    assert unused == []
    for key in keys:
        assert effect_of(key).format(next=3, end=9)


@pytest.mark.every_dose
@pytest.mark.long
@pytest.mark.parametrize(
    ("override", "words", "has_effect"),
    [
        ("optimizer.learning_rate=0.5", "from step 4 on", True),
        ("optimizer.beta2=0.5", "from step 4 on", True),
        ("optimizer.weight_decay=0.5", "from step 4 on", True),
        ("schedule.name=linear", "recomputed for 90 steps", True),
        ("steps=90", "ends at step 90", True),
        ("data.batch_size=2", "read from step 4 on", True),
        ("data.sources.more.path=x", "where the data is read", True),
        ("loss.z_loss=0.1", "another loss from step 4 on", True),
        ("grpo.num_generations=3", "completions of each prompt from step 4 on", True),
        ("log_interval=3", "no effect on the numbers", False),
        ("observe.plot=false", "no effect on the numbers", False),
        ("checkpoint.keep=9", "no effect on the numbers", False),
        ("checkpoint.init_from=x", "only read when a run begins", False),
    ],
)
def test_a_changed_setting_is_told_with_what_it_does(override, words, has_effect):
    key, _, value = override.partition("=")
    found = {}
    for change in changed_settings(_before(key, value), CONFIG):
        found[change.key] = change
    assert key in found
    line = found[key].describe(3, 90)
    assert line.startswith(f"{key}: ") and " -> " in line and words in line
    assert found[key].has_effect() == has_effect


def _before(key, value):
    """The config as YAML with another value for a key, whether or not it goes with the others."""
    tree = yaml.safe_load(to_yaml(CONFIG))
    *sections, leaf = key.split(".")
    node = tree
    for section in sections:
        node = node.setdefault(section, {})
    node[leaf] = yaml.safe_load(value)
    return yaml.safe_dump(tree)


def test_equal_configs_have_no_changes():
    assert changed_settings(to_yaml(CONFIG), CONFIG) == []
    assert changed_settings("not: [yaml", CONFIG) == []
    assert changed_settings("3", CONFIG) == []


def test_what_an_earlier_version_does_not_say_had_its_default():
    text = "\n".join(line for line in to_yaml(CONFIG).splitlines() if "log_interval" not in line)
    changes = changed_settings(text, CONFIG)
    assert [change.key for change in changes] in ([], ["log_interval"])


@pytest.mark.every_dose
@pytest.mark.long
@pytest.mark.parametrize(
    ("override", "is_of_state"),
    [
        ("optimizer.name=lion", True),
        ("optimizer.ema_decay=0.9", True),
        ("loss_scale.mode=dynamic", True),
        ("model.num_layers=3", True),
        ("optimizer.weight_decay=0", False),
        ("optimizer.clip_norm=null", False),
        ("optimizer.learning_rate=1", False),
    ],
)
def test_settings_of_the_state(override, is_of_state):
    key, _, value = override.partition("=")
    changes = changed_state_settings(_before(key, value), CONFIG)
    assert bool(changes) == is_of_state
