"""The end of a run, on process 0: curves, comparison with gzip, completions, summary, and what to try next."""

import gzip
from pathlib import Path
from typing import Any

from rich.console import Console

from data_pipeline.loader import EvaluationData, TrainingData
from data_pipeline.tokenizer import Tokenizer
from maxtrain.config.schema import RunConfig
from maxtrain.generate import complete, show
from maxtrain.models.decoder import Decoder
from maxtrain.observe.metrics import Stopwatch, read_metrics
from maxtrain.observe.report import plot_curves, summary

MAX_GZIP_BYTES = 64 << 20  # a second or two


def gzip_bits_per_byte(eval_set: EvaluationData, tokenizer: Tokenizer) -> float:
    """Bits per byte of `gzip -9` on the text of a set, all documents one after the other."""
    shards = eval_set.shards
    text = "".join(tokenizer.decode(shards.read(*shards.document(n))) for n in range(shards.num_documents)).encode()
    return 8 * len(gzip.compress(text, 9)) / len(text)


def finish(
    config: RunConfig,
    data: TrainingData,
    sets: dict[str, EvaluationData],
    step: int,
    clock: Stopwatch,
    ending: str,
    model: Decoder | None,
) -> None:
    """Draws curves.png; prints completions of observe.prompts, and the summary.

    `step` is the number of finished steps, `ending` why these are not all, or empty. `model` is None where this process does
    not hold all of it.
    """
    folder = Path(config.output_dir, config.run_name)
    records, seconds = read_metrics(folder), clock.seconds()
    files = {"config": folder / "config.yaml", "metrics": folder / "metrics.jsonl", "checkpoints": folder / "checkpoints"}
    if config.observe.plot:
        files["curves"] = folder / "curves.png"
        plot_curves(records, files["curves"], config.run_name, data.plan.describe())
    comparison = "\n".join(
        f"gzip -9 reaches {gzip_bits_per_byte(eval_set, data.tokenizer):.4f} bits per byte on the text of {name}."
        for name, eval_set in sets.items()
        if eval_set.text_bytes <= MAX_GZIP_BYTES
    )
    console = Console(highlight=False)
    if config.observe.prompts and model is not None:
        options = {"max_tokens": 64, "temperature": 0.7, "top_p": 0.95, "seed": config.seed}
        show(console, config.observe.prompts, complete(model, data.tokenizer, config.observe.prompts, **options))
    commands = _next_commands(config, folder)
    console.print(
        summary(
            config.run_name, step, records, seconds, comparison=comparison, ending=ending, files=files, next_commands=commands
        )
    )


def _next_commands(config: RunConfig, folder: Path) -> dict[str, Any]:
    commands = {"write text": f'maxtrain generate {folder} --prompt "def main("'}
    if config.observe.tensorboard:
        commands["look at the curves"] = f"tensorboard --logdir {folder}"
    command = f"python -m maxtrain.train config={folder / 'config.yaml'}"
    commands["train a wider model"] = f"{command} run_name={config.run_name}-wide model.embed_dim={config.model.embed_dim * 2}"
    return commands
