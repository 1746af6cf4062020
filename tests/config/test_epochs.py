"""Numbers of epochs as text: written in several ways, kept in one."""

import pytest

from data_pipeline.base.errors import ConfigError
from maxtrain.config import load_config, to_yaml


@pytest.mark.parametrize(
    ("typed", "kept"),
    [
        ("0.5 epochs", "0.5 epochs"),
        ("0.50epochs", "0.5 epochs"),
        ("1 epochs", "1 epoch"),
        (".25ep", "0.25 epochs"),
        ("2 epoch", "2 epochs"),
        ("0.000001 epochs", "0.000001 epochs"),
        ("500", 500),
        ("1e3", 1000),
        ("0", 0),
    ],
)
def test_ways_to_write_it(typed, kept, tmp_path):
    config = load_config(
        ["config=quickstart", f"eval_interval={typed}", f"eval.sets.heldout.interval={typed}"]
    )
    assert config.eval_interval == config.eval.sets["heldout"].interval == kept
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert load_config([f"config={tmp_path}/again.yaml"]) == config


@pytest.mark.parametrize(
    "typed", ["0.5", "0 epochs", "-1 epochs", "often", "epochs", "1 e", "nan epochs"]
)
def test_what_is_neither_steps_nor_epochs(typed):
    with pytest.raises(
        ConfigError,
        match=r"must be: whole number \| 0.5 epochs.*(Write for example|Did you mean) checkpoint_",
    ):
        load_config(["config=quickstart", f"checkpoint_interval={typed}"])
