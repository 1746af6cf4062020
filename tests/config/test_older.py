"""A run that was begun with other defaults goes on with these."""

from maxtrain.config import load_config, to_yaml
from maxtrain.config.older import kept_settings, with_kept


def config(*overrides: str):
    return load_config(["config=quickstart", *overrides])


def saved(text: str, steps: str = "320") -> str:
    """The config of a checkpoint by the version before, with these values."""
    schedule = f"schedule: {{warmup_steps: 400, {text}}}"
    return f"steps: {steps}\n{schedule}\nloss_scale: {{initial: 4294967296.0, window: 5}}"


OLD = kept_settings(None, saved("min_learning_rate: 3.0e-05"))


def test_a_new_run_and_one_that_was_begun_with_todays_defaults_keep_nothing():
    assert kept_settings({}, to_yaml(config())) == {}
    assert with_kept(config(), {}) == (config(), "")


def test_what_a_run_keeps_is_handed_on():
    assert kept_settings(OLD, to_yaml(config())) == OLD


def test_a_floor_that_was_a_rate_stays_that_rate_and_is_said_if_it_is_another():
    now, note = with_kept(config("optimizer.learning_rate=1e-3"), OLD)
    assert now.schedule.min_learning_rate == 3e-5 and "schedule.min_learning_rate=3e-05" in note
    now, note = with_kept(config("optimizer.learning_rate=3e-4"), OLD)
    assert now.schedule.min_learning_rate == 3e-5 and note == ""


def test_what_is_set_counts():
    for said in (
        "schedule.min_lr_ratio=0.2",
        "schedule.min_learning_rate=1e-4",
        "schedule.name=constant",
    ):
        now, note = with_kept(config(said), OLD)
        assert now == config(said) and note == ""


def test_the_loss_scale_stays_for_float16_and_only_there():
    now, note = with_kept(config("precision.compute=float16", "optimizer.learning_rate=3e-4"), OLD)
    assert (now.loss_scale.initial, now.loss_scale.window) == (
        2.0**32,
        5,
    ) and "loss_scale.window=5" in note
    assert with_kept(config(), OLD)[0].loss_scale == config().loss_scale
    now, _ = with_kept(config("precision.compute=float16", "loss_scale.window=9"), OLD)
    assert (now.loss_scale.initial, now.loss_scale.window) == (2.0**32, 9)


def test_values_that_were_set_then_are_not_kept_but_for_the_floor():
    kept = kept_settings(
        None,
        "steps: 5\nschedule: {min_learning_rate: 1.0e-04}\nloss_scale: {initial: 8.0, window: 9}",
    )
    assert kept == {"schedule.min_learning_rate": 1e-4}


def test_a_warmup_that_was_cut_off_is_kept_where_only_the_plan_had_the_steps():
    kept = kept_settings(None, saved("min_learning_rate: 3.0e-05", "auto"))
    assert kept["schedule.warmup_steps"] == 400
    assert "schedule.warmup_steps" not in OLD


def test_a_config_that_says_none_of_this_keeps_nothing():
    for config_of_then in ("a: 1", "]", ""):
        assert kept_settings(None, config_of_then) == {}
