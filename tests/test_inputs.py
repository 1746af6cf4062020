"""What a run reads is held against its config before anything is trained: here, the prompts that it ends with."""

import pytest

from data_pipeline.errors import ConfigError
from data_pipeline.tokenizer import ByteTokenizer, CharTokenizer
from maxtrain.config import load_config
from maxtrain.inputs import completion_tokens, open_data


class Unmarked(ByteTokenizer):
    """Without a token that ends documents."""

    eod_id = None


def test_completions_are_as_long_as_the_model_has_room_for():
    tokenizer = ByteTokenizer()
    assert completion_tokens(["abc"], tokenizer, 1000) == 64
    assert completion_tokens(["abc", "abcdef"], tokenizer, 64) == 57
    assert completion_tokens([""], tokenizer, 2) == 1
    assert completion_tokens(["abc"], Unmarked(), 4) == 1


def test_a_prompt_that_can_not_be_completed_is_refused():
    with pytest.raises(ConfigError, match=r"observe.prompts\[1\]='abcd' has 5 tokens, .*or set model.max_length=6 or more"):
        completion_tokens(["a", "abcd"], ByteTokenizer(), 5)
    with pytest.raises(ConfigError, match=r"prompts\[0\]='ä': character 'ä' .* is not in the tokenizer's vocabulary. Write it"):
        completion_tokens(["ä"], CharTokenizer("abc"), 5)
    with pytest.raises(ConfigError, match=r"observe.prompts\[0\]='' is empty.*Give some text, or leave it out"):
        completion_tokens([""], Unmarked(), 5)


def test_it_is_refused_at_the_launch(tmp_path, tiny_run):
    config = tiny_run(tmp_path, texts=8, steps=2, schedule={"warmup_steps": 0})
    with pytest.raises(ConfigError, match=r"has 41 tokens, which leaves no room for more in model.max_length=32"):
        open_data(load_config([f"config={config}", f"observe.prompts=[{'a' * 40}]"]), None)
    open_data(load_config([f"config={config}", "observe.prompts=[the]"]), None)
