"""The content of a model card is that of the run's records."""

import json

import pytest
import yaml

from data_pipeline.base.errors import DataError
from data_pipeline.prepare import command as prepare
from maxtrain.commands.export.model_card import ExportedModel, model_card
from maxtrain.config import load_config


@pytest.fixture
def run(tmp_path):
    """A run's folder, as far as a card looks at it."""
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in RECORDS)
    )
    return tmp_path


def train_record(step, loss):
    return {"kind": "train", "step": step, "loss": loss, "tokens_seen": 100 * step}


def eval_record(step, name, nll):
    return {"kind": "eval", "step": step, "set": name, "nll": nll, "bits_per_byte": nll / 3}


RECORDS = [
    {"kind": "run", "step": 0, "run": "0123456789abcdef"},
    eval_record(0, "held", 6.0),
    train_record(5, 4.0),
    eval_record(5, "held", 3.5),
    eval_record(5, "a|b", 25.0),
    train_record(10, 2.0),
    eval_record(10, "held", 1.5),
]


def config_of(tmp_path, *overrides):
    path = tmp_path / "some.yaml"
    path.write_text(
        yaml.safe_dump({"data": {"sources": {"web": {"path": str(tmp_path / "data")}}}})
    )
    return load_config([f"config={path}", "run_name=mine", "model.vocab_size=300", *overrides])


def rows_of(card, title):
    """The rows of a table by their first cells."""
    lines = card.split(f"## {title}\n")[1].split("## ")[0].strip().splitlines()[2:]
    rows = [line.strip("| ").split(" | ") for line in lines]
    return {first: rest for first, *rest in rows}


def test_a_card_says_what_is_known_at_its_step(run, tmp_path):
    config = config_of(tmp_path, "checkpoint.init_from=elsewhere/base")
    card = model_card(run, ExportedModel(config, 5, 12_345, "float16"))
    assert card.startswith("---\nlibrary_name: transformers\n") and "\n# mine\n" in card
    assert "family llama with 12,345 parameters" in card
    assert rows_of(card, "Model")["type of the tensors"] == ["float16"]
    assert rows_of(card, "Model")["vocabulary"] == ["300"]
    training = rows_of(card, "Training")
    assert training["steps"] == ["5"] and training["tokens seen"] == ["500"]
    assert training["training loss"] == ["4.0000 nats per target"]
    assert training["began from"] == ["base"]
    evaluated = rows_of(card, "Evaluation")
    assert evaluated["held"] == ["5", "3.5000", "33.12", "1.1667"]
    assert evaluated["a\\|b"] == ["5", "25.0000", "more than 1e9", "8.3333"]
    assert rows_of(card, "Training data")["web"] == ["1", "unknown", "unknown"]
    assert str(tmp_path) not in card
    newest = model_card(run, ExportedModel(config, None, 12_345, "float32"))
    assert rows_of(newest, "Evaluation")["held"][0] == "10"


def test_a_card_says_what_the_adapters_were(run, tmp_path):
    config = config_of(tmp_path)
    plain = rows_of(model_card(run, ExportedModel(config, 5, 1, "float32")), "Training")
    assert not any("adapters" in name for name in plain)
    lora = ["model.lora.rank=4", "model.lora.alpha=8", "model.lora.scaling=root"]
    quantised = ["model.lora.base=nf4", "model.lora.base_block=32", "model.lora.targets=[(q|up)]"]
    config = config_of(tmp_path, *lora, *quantised)
    training = rows_of(model_card(run, ExportedModel(config, 5, 1, "float32")), "Training")
    assert training["adapters"] == ["low-rank (LoRA), rank 4, alpha 8, scale alpha / sqrt(rank)"]
    assert training["products with adapters"] == ["`(q\\|up)`"]
    (told,) = training["weights below adapters"]
    assert told == "quantised, nf4 in blocks of 32; these files have them dequantised"


def test_a_card_counts_the_data_that_is_there(run, tmp_path):
    (tmp_path / "text.txt").write_text("some words")
    argv = [str(tmp_path / "data"), "--text", str(tmp_path / "text.txt"), "--workers", "1"]
    assert prepare.main(argv) == 0
    card = model_card(run, ExportedModel(config_of(tmp_path), 5, 1, "float32"))
    assert rows_of(card, "Training data")["web"][1:] == ["1", "11"], "with the document's end"


def test_a_run_without_records_has_a_card_and_a_damaged_one_an_error(tmp_path):
    config = config_of(tmp_path)
    card = model_card(tmp_path, ExportedModel(config, 3, 1, "float32"))
    assert "## Evaluation" not in card and rows_of(card, "Training")["steps"] == ["3"]
    (tmp_path / "metrics.jsonl").write_text("nonsense\n" + json.dumps(RECORDS[0]) + "\n")
    with pytest.raises(DataError):
        model_card(tmp_path, ExportedModel(config, 3, 1, "float32"))
