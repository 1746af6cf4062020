"""A README.md for a model that is exported: what it is, what it was trained on and how, and what it
was evaluated with, from the records of its run.

Nothing is written that the run does not know: who publishes a model adds its license, and what it
is for.
"""

import math
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from data_pipeline.base.errors import UserError
from data_pipeline.base.remote import place
from data_pipeline.shards import Manifest
from maxtrain.config.schema import LoraConfig, RunConfig
from maxtrain.models.families.directory import stored_as
from maxtrain.observe.launches import version_of
from maxtrain.observe.metrics import read_metrics

NAME = "README.md"
# The front matter of a card: https://huggingface.co/docs/hub/model-cards.
_HEAD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- maxtrain
---
"""


class ExportedModel(NamedTuple):
    """The exported model."""

    config: RunConfig
    # The checkpoint; None: the weights that the run began with.
    step: int | None
    num_parameters: int
    # Of the tensors.
    dtype: str


def model_card(run: str | Path, model: ExportedModel) -> str:
    """The text of the card.

    Args:
        run: directory of the run.
        model: what is exported of it.

    Raises:
        DataError: the run's records are damaged.
    """
    records = []
    for record in read_metrics(run):
        if model.step is None or record.get("step", 0) <= model.step:
            records.append(record)
    config = model.config
    parts = [
        f"{_HEAD}\n# {config.run_name}\n",
        f"A language model of the family {config.model.family} with {model.num_parameters:,} "
        "parameters, trained with maxtrain.\n",
        _section("Model", _model_rows(model)),
        _section("Training data", _data_rows(config), "source"),
        _section("Training", _training_rows(model, records)),
    ]
    evaluated = _evaluation_rows(records)
    if evaluated:
        parts.append(_section("Evaluation", evaluated, "set"))
    answered = _answered_rows(records)
    if answered:
        parts.append(_section("Evaluation of completions", answered, "set"))
    parts.append(_section("Versions", _version_rows()))
    parts.append(
        "## License and use\n\nThe run does not know them: add the license of the weights and of "
        "the data, and what the model is meant for.\n"
    )
    return "\n".join(parts)


# The first row has the heads of the columns.
_Rows = list[tuple[str, ...]]


def _section(title: str, rows: _Rows, head: str = "") -> str:
    """A table below a title; without `head`, of names and values."""
    if not head:
        rows = [("", ""), *rows]
    lines = [f"| {' | '.join(rows[0])} |", "|" + "---|" * len(rows[0])]
    for row in rows[1:]:
        lines.append(f"| {' | '.join(row)} |")
    return f"## {title}\n\n" + "\n".join(lines) + "\n"


def _model_rows(model: ExportedModel) -> _Rows:
    shape = model.config.model
    return [
        ("layers", f"{shape.num_layers:,}"),
        ("width", f"{shape.embed_dim:,}"),
        ("heads", f"{shape.num_heads:,} of queries, {shape.num_kv_heads:,} of keys and values"),
        ("vocabulary", f"{shape.vocab_size:,}"),
        ("longest sequence", f"{shape.max_length:,} tokens"),
        ("type of the tensors", model.dtype),
    ]


def _data_rows(config: RunConfig) -> _Rows:
    rows: _Rows = [("source", "weight", "documents", "tokens")]
    for name, source in config.data.sources.items():
        documents = "unknown"
        tokens = "unknown"
        try:
            manifest = Manifest.load(place(source.path))
        except (OSError, UserError):
            # Data may be elsewhere, or gone, when a model is exported.
            pass
        else:
            documents = f"{manifest.num_documents:,}"
            tokens = f"{manifest.num_tokens:,}"
        rows.append((_cell(name), f"{source.weight:g}", documents, tokens))
    return rows


def _training_rows(model: ExportedModel, records: Iterable[Mapping[str, Any]]) -> _Rows:
    config = model.config
    rows: _Rows = []
    if model.step is not None:
        rows.append(("steps", f"{model.step:,}"))
    trained = [record for record in records if record.get("kind") == "train"]
    if trained:
        last = trained[-1]
        rows.append(("tokens seen", f"{last['tokens_seen']:,}"))
        rows.append(("training loss", f"{last['loss']:.4f} nats per target"))
    optimizer = config.optimizer
    batch = f"{config.data.batch_size:,} rows of {config.data.seq_length:,} tokens"
    rows += [
        ("objective", config.objective),
        ("batch", batch),
        ("optimizer", f"{optimizer.name}, learning rate {optimizer.learning_rate:g}"),
        ("schedule", config.schedule.name),
        ("products in", config.precision.compute),
    ]
    if config.checkpoint.init_from:
        rows.append(("began from", _cell(_source(config.checkpoint.init_from))))
    if config.checkpoint.fork_from:
        rows.append(("forked from", _cell(Path(config.checkpoint.fork_from).name)))
    return rows + _adapter_rows(config.model.lora)


def _adapter_rows(lora: LoraConfig) -> _Rows:
    """Return what trained in the place of weights; nothing of a model without adapters."""
    if lora.rank is None:
        return []
    scale = "alpha / rank"
    if lora.scaling == "root":
        scale = "alpha / sqrt(rank)"
    kind = "low-rank (LoRA)"
    if lora.magnitudes:
        kind = "low-rank, with magnitudes (DoRA)"
    rows: _Rows = [
        ("adapters", f"{kind}, rank {lora.rank:,}, alpha {lora.alpha:g}, scale {scale}"),
        ("products with adapters", _cell(", ".join(f"`{target}`" for target in lora.targets))),
    ]
    if lora.base != "full":
        what = f"quantised, {lora.base} in blocks of {lora.base_block:,}"
        rows.append(("weights below adapters", f"{what}; these files have them dequantised"))
    return rows


def _source(place: str) -> str:
    """The name of the weights that a run began from, and how they are stored, if in few bits."""
    name = Path(place).name
    try:
        form = stored_as(place)
    except UserError:
        # They are no directory of Hugging Face, or gone.
        return name
    if not form:
        return name
    return f"{name}, stored in {form}"


def _evaluation_rows(records: Iterable[Mapping[str, Any]]) -> _Rows:
    """The newest evaluation of each set of text."""
    rows: _Rows = []
    for name, record in _newest_evaluations(records).items():
        if "nll" not in record:
            continue
        nats = record["nll"]
        perplexity = "more than 1e9"
        if nats < math.log(1e9):
            perplexity = f"{math.exp(nats):.4g}"
        bits = record.get("bits_per_byte")
        of_bytes = "-"
        if bits is not None:
            of_bytes = f"{bits:.4f}"
        rows.append((_cell(name), f"{record['step']:,}", f"{nats:.4f}", perplexity, of_bytes))
    if rows:
        heads = ("set", "step", "nats per target", "perplexity", "bits per byte")
        rows.insert(0, heads)
    return rows


def _answered_rows(records: Iterable[Mapping[str, Any]]) -> _Rows:
    """The newest evaluation of each set of prompts, which were completed by the likeliest
    tokens."""
    forms = {"accuracy": "{:.1%}", "reward": "{:.4f}", "completion_length": "{:.1f}"}
    rows: _Rows = []
    for name, record in _newest_evaluations(records).items():
        if "prompts" not in record:
            continue
        cells = [form.format(record[key]) if key in record else "-" for key, form in forms.items()]
        rows.append((_cell(name), f"{record['step']:,}", *cells, f"{record['prompts']:,}"))
    if rows:
        rows.insert(0, ("set", "step", "accuracy", "reward", "tokens", "prompts"))
    return rows


def _newest_evaluations(records: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The last record of each set."""
    newest = {}
    for record in records:
        if record.get("kind") == "eval":
            newest[record["set"]] = record
    return newest


def _version_rows() -> _Rows:
    names = ("maxtrain", "jax", "flax", "optax", "orbax-checkpoint", "grain")
    rows: _Rows = [("Python", platform.python_version())]
    rows += [(name, version_of(name)) for name in names]
    return rows


def _cell(text: str) -> str:
    """Text that ends no cell."""
    return text.replace("|", "\\|").replace("\n", " ")
