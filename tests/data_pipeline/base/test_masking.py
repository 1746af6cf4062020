"""Secrets in URLs and commands are masked, and nothing else is changed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.base.masking import is_masked, masked, masked_values


@pytest.mark.parametrize(
    "text",
    [
        "https://user:hunter2@host/x",
        "https://hunter2@host/x",
        "http://user:hunter2@hunter2@host/x",
        "postgresql+psycopg2://user:hunter2@host:5432/db",
        "s3://user:hunter2@bucket/x",
        "git+https://hunter2@host/x",
        "https://host/x?X-Amz-Signature=hunter2&X-Amz-Credential=hunter2&X-Amz-Security-Token=hunter2",
        "https://host/x?sp=r&sig=hunter2%2Bx",
        "https://host/x?a=1&token=hunter2#part",
        "https://host/x?access_token=hunter2",
        "https://host/x?AWSAccessKeyId=hunter2&Signature=hunter2&Expires=1",
        "https://host/x?api_key=hunter2",
        "https://host/x?Password=hunter2",
        "maxtrain launch --env WANDB_API_KEY=hunter2 --env 'HF_TOKEN=hunter2'",
        "AWS_SECRET_ACCESS_KEY=hunter2 MLFLOW_TRACKING_PASSWORD=hunter2 maxtrain train",
        "error: https://user:hunter2@host/x can't be read (GET https://host/x?sig=hunter2: 403)",
        "'observe.tracking.mlflow_uri=https://u:hunter2@host' steps=4",
    ],
)
def test_secrets_are_masked(text):
    found = masked(text)
    assert "hunter2" not in found and "***" in found
    assert masked(found) == found
    if text.startswith(("https://", "s3://", "postgresql")):
        assert is_masked(found)
    assert masked_values({"a": [text, 1, None, {"b": text}], text: True}) == {
        "a": [found, 1, None, {"b": found}],
        found: True,
    }


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/data/a@b.txt",
        "abfs://container@account.dfs.core.windows.net/x",
        "https://host/x?page=2&sort=name",
        "name@host.com",
        "data/**/*.txt",
        "s3://bucket/**/a?.jsonl",
        "model.moe.top_k=2 tokenizer=bytes --max-tokens 4 eos_token=x",
        "key=value",
        "sqlite:////tmp/mlflow.db",
    ],
)
def test_other_texts_stay(text):
    assert masked(text) == text and not is_masked(text)


@given(st.text())
def test_masking_twice_is_masking_once(text):
    assert masked(masked(text)) == masked(text)
