"""What the end of a run says to try next."""

from pathlib import Path

import pytest

from maxtrain.config.schema import RunConfig
from maxtrain.trainer.summary import _next_commands


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
