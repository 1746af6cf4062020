"""Names of models on the Hub are distinguished from paths, wherever a model's directory is
expected."""

import pytest

from data_pipeline.base.errors import UserError
from data_pipeline.base.hub import download_hint
from data_pipeline.tokenizer import load_tokenizer


@pytest.mark.parametrize("place", ["Qwen/Qwen3-0.6B", "meta-llama/Llama-3.2-1B", "a/b_c.d"])
def test_a_name_of_the_hub_is_hinted_at(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert f"hf download {place} --local-dir " in download_hint(place)
    with pytest.raises(UserError) as caught:
        load_tokenizer(place)
    assert f"hf download {place}" in str(caught.value)


@pytest.mark.parametrize(
    "place",
    ["Qwen3", "runs/a", "a/b/c", "/a/b", "./a", "~/a", "s3://a/b", "a/", "here/b", "data/x"],
)
def test_a_path_is_not(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert download_hint(place) == ""
