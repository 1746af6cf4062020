"""Suggestions at the end of a run."""

from pathlib import Path

import pytest

from maxtrain.config.schema import RunConfig
from maxtrain.trainer.summary import _next_commands, failed_rewards


@pytest.mark.parametrize(
    ("is_of_chats", "what", "end"),
    [
        (False, "write text", "generate runs/a --prompt 'Once upon a time'"),
        (True, "talk to it", "generate runs/a --chat"),
    ],
)
def test_a_model_of_chats_is_talked_to(is_of_chats, what, end):
    commands = _next_commands(RunConfig(), Path("runs/a"), is_of_chats)
    assert commands[what].endswith(end)


def test_rewards_that_failed_are_named_with_their_counts():
    records = [
        {
            "kind": "train",
            "step": 1,
            "reward_outcomes/a:b/ok": 3.0,
            "reward_outcomes/x:y/error": 3.0,
        },
        {"kind": "eval", "step": 1, "reward_outcomes/a:b/error": 9.0},
        {"kind": "train", "step": 2, "reward_outcomes/a:b/timeout": 1.0, "loss": 2.0},
    ]
    first, second = failed_rewards(records)
    assert "x:y failed for 3 of 3 " in second and "a:b failed for 1 of 4 " in first
    assert failed_rewards([{"kind": "train", "reward_outcomes/a:b/ok": 3.0}]) == []
