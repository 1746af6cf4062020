"""The data of a run is checked against its config before training: here, the prompts that it ends
with."""

from pathlib import Path

import pytest

from data_pipeline.base.errors import ConfigError, DataError
from data_pipeline.tokenizer import ByteTokenizer, CharTokenizer
from maxtrain.config import load_config
from maxtrain.config.shipped import PREPARED_BY
from maxtrain.trainer.data import open_data, require_prompts


class Unmarked(ByteTokenizer):
    """A tokenizer without a token that ends documents."""

    eod_id = None


def test_a_prompt_that_can_not_be_completed_is_refused():
    with pytest.raises(
        ConfigError,
        match=r"prompts\[1\]='ä': character 'ä' .* is not in the tokenizer's vocabulary. Write it",
    ):
        require_prompts(["a", "ä"], CharTokenizer("abc"))
    with pytest.raises(
        ConfigError, match=r"observe.prompts\[0\]='' is empty.*Give some text, or leave it out"
    ):
        require_prompts([""], Unmarked())
    require_prompts(["", "abcd"], ByteTokenizer())


def test_it_is_refused_at_the_launch(tmp_path, tiny_run):
    config = tiny_run(
        tmp_path, "--tokenizer", "chars", texts=8, steps=2, schedule={"warmup_steps": 0}
    )
    prepared = load_config([f"config={config}", "observe.prompts=[the]"])
    data, _ = open_data(prepared, None)
    assert data.tokenizer is not None
    with pytest.raises(ConfigError, match=r"observe.prompts\[0\]='ä'"):
        open_data(load_config([f"config={config}", "observe.prompts=[ä]"]), None)


@pytest.mark.parametrize(
    ("name", "document"),
    [
        ("quickstart", "README.md"),
        ("shakespeare_char", "README.md"),
        ("sft_qwen2_5_0_5b", "docs/fine_tuning.md"),
        ("grpo_qwen2_5_1_5b", "docs/fine_tuning.md"),
        ("sft_word_problems", "docs/posttraining.md"),
        ("grpo_word_problems", "docs/posttraining.md"),
    ],
)
def test_missing_data_of_a_shipped_config_name_the_command_of_the_documents(
    name, document, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    config = load_config([f"config={name}"])
    (source,) = config.data.sources.values()
    command = PREPARED_BY[source.path]
    text = (Path(__file__).parents[2] / document).read_text()
    assert [part for part in command.split(" && ") if part not in text] == []
    with pytest.raises(DataError, match="is not a directory of token shards") as caught:
        open_data(config, None)
    assert str(caught.value).endswith(f"`{command}`.")
