"""Warm-up that nobody set for this run fits it, with a line; one that was set for it must fit."""

import re

import pytest

from data_pipeline.base.errors import ConfigError
from maxtrain.config import from_command_line, load_config, to_yaml
from maxtrain.config.across.steps import fit_warmup, shortened
from maxtrain.config.load import load_with_notes
from maxtrain.config.schema import PieceConfig, ScheduleConfig
from maxtrain.config.sections.schedule import piece_borders, warmup_fits

SOURCE = "data: {sources: {a: {path: b}}}\n"


@pytest.fixture
def file(tmp_path):
    def write(text: str, name: str = "c.yaml") -> str:
        (tmp_path / name).write_text(SOURCE + text)
        return f"config={tmp_path}/{name}"

    return write


@pytest.mark.parametrize(
    ("text", "overrides", "warmup"),
    [
        ("", ["steps=30"], 3),  # the default, 100
        ("steps: 30", [], 3),
        ("steps: 30\nschedule: {warmup_steps: 100}", [], 3),  # as good as the default
        ("schedule: {warmup_steps: 40}", ["steps=30"], 3),
        ("schedule: {warmup_steps: 40}\nsteps: 400", ["steps=40"], 4),
        ("", ["steps=9"], 1),
        ("", ["steps=1"], 0),
        ("schedule: {name: wsd, warmup_steps: 40, decay_fraction: 0.8}", ["steps=100"], 10),
        (
            "schedule: {name: pieces, warmup_steps: 40, pieces: [{until: 20}, {}]}",
            ["steps=100"],
            10,
        ),
    ],
)
def test_one_that_was_not_set_for_the_run_is_shortened_and_said(
    file, tmp_path, text, overrides, warmup
):
    config, (note,) = load_with_notes([file(text), *overrides])
    assert config.schedule.warmup_steps == warmup
    assert f"does not fit and is {warmup}. Set schedule.warmup_steps" in note
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert load_with_notes([f"config={tmp_path}/again.yaml"]) == (config, [])


@pytest.mark.parametrize(
    ("text", "overrides", "warmup"),
    [
        ("", ["steps=101"], 100),
        ("schedule: {warmup_steps: 40}", ["steps=41"], 40),
        ("", ["steps=auto"], 100),
        ("steps: 30\nschedule: {warmup_steps: 0}", [], 0),
    ],
)
def test_one_that_fits_stays(file, text, overrides, warmup):
    config, notes = load_with_notes([file(text), *overrides])
    assert config.schedule.warmup_steps == warmup and notes == []


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        ("", ["steps=30", "schedule.warmup_steps=40"]),
        ("steps: 30", ["schedule.warmup_steps=40"]),
        ("steps: 30\nschedule: {warmup_steps: 40}", []),
    ],
)
def test_both_set_in_one_place_and_contradictory_is_an_error(file, text, overrides):
    with pytest.raises(
        ConfigError,
        match=r"warmup_steps=40 must be less than steps=30. Set schedule.warmup_steps to at",
    ):
        load_config([file(text), *overrides])


def test_pieces_that_end_too_early_for_any_warmup_are_an_error(file):
    text = "schedule: {name: pieces, warmup_steps: 40, pieces: [{until: 1}, {}]}"
    with pytest.raises(
        ConfigError, match=r"ends at step 1, but must end after warm-up.*Set the ends"
    ):
        load_config([file(text), "steps=100"])


def test_the_command_says_it_on_one_line(capsys):
    from_command_line(["config=quickstart", "steps=30", "eval_interval=0"], "maxtrain train")
    said = capsys.readouterr().err
    assert re.fullmatch(
        r"maxtrain train: warm-up: schedule.warmup_steps=40, .* not set for steps=30, .* is 3\. .*\n",
        said,
    )


def test_a_plan_that_is_only_known_later_fits_the_same_way(file):
    config = load_config([file("")])
    assert fit_warmup(config, 101) is config
    assert fit_warmup(config, 100).schedule.warmup_steps == 10
    assert fit_warmup(config, 1).schedule.warmup_steps == 0


def test_a_lower_peak_brings_its_own_floor():
    """It was refused: the default floor was a rate, and above that peak."""
    assert (
        load_config(["config=llama3_1b", "optimizer.learning_rate=1e-5"]).schedule.min_lr_ratio
        == 0.1
    )


def test_a_config_of_before_keeps_its_floor_as_a_rate(file):
    config = load_config(
        [file("schedule: {min_learning_rate: 3.0e-05}\noptimizer: {learning_rate: 0.001}")]
    )
    assert config.schedule.min_learning_rate == 3e-5


@pytest.mark.parametrize(
    ("schedule", "warmup"),
    [
        (ScheduleConfig(warmup_steps=400), 40),
        (ScheduleConfig(warmup_steps=0), 0),
        # At least a tenth, unless the decay leaves no room for it.
        (ScheduleConfig(warmup_steps=2), 10),
        (ScheduleConfig(name="wsd", warmup_steps=2, decay_fraction=0.2), 10),
        (ScheduleConfig(name="wsd", warmup_steps=30, decay_fraction=0.97), 3),
        (ScheduleConfig(name="inverse_sqrt", warmup_steps=100, timescale=100), 10),
    ],
)
def test_a_schedule_keeps_its_shape_in_a_tenth_of_the_steps(schedule, warmup):
    short = shortened(schedule, 1000, 100)
    assert short.warmup_steps == warmup and warmup_fits(short, 100)
    assert short.timescale == (10 if schedule.timescale else None)
    assert short.decay_fraction == schedule.decay_fraction and short.name == schedule.name
    assert shortened(schedule, 1000, 1000) == schedule


def test_pieces_of_a_shortened_schedule_end_at_the_same_share_of_the_steps():
    pieces = (
        PieceConfig("constant", until=500),
        PieceConfig("cosine", until=0.9, unit="fraction"),
        PieceConfig("linear"),
    )
    schedule = ScheduleConfig(name="pieces", warmup_steps=100, pieces=pieces)
    assert piece_borders(schedule, 1000) == [100, 500, 900, 1000]
    assert piece_borders(shortened(schedule, 1000, 100), 100) == [10, 50, 90, 100]
    assert not warmup_fits(shortened(schedule, 1000, 3), 3), "some piece has no update"
