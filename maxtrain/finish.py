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
from maxtrain.observe.report import plot_curves, summary, terminal_curve

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
    """Draws curves.png and prints the summary.

    Args:
        config: of the run, resolved.
        data: what it was trained on.
        sets: what it was evaluated on.
        step: finished steps.
        clock: where the time went.
        ending: why the run ended before its plan did; empty if it did not.
        model: for the completions of observe.prompts; None where one process does not hold all of it.
    """
    folder = Path(config.output_dir, config.run_name)
    records = read_metrics(folder)
    train = [r for r in records if r["kind"] == "train"]
    evals = {r["set"]: r for r in records if r["kind"] == "eval"}
    seconds = clock.seconds()
    if config.observe.plot:
        plot_curves(records, folder / "curves.png", config.run_name, data.plan.describe())
    lines = []
    for name, eval_set in sets.items():
        if eval_set.text_bytes <= MAX_GZIP_BYTES:
            lines.append(
                f"gzip -9 reaches {gzip_bits_per_byte(eval_set, data.tokenizer):.4f} bits per byte on the text of {name}."
            )
    console = Console(highlight=False)
    if config.observe.prompts and model is not None:
        prompts = list(config.observe.prompts)
        show(
            console,
            prompts,
            complete(model, data.tokenizer, prompts, max_tokens=64, temperature=0.7, top_p=0.95, seed=config.seed),
        )
    files = {"config": folder / "config.yaml", "metrics": folder / "metrics.jsonl", "checkpoints": folder / "checkpoints"}
    files |= {"curves": folder / "curves.png"} if config.observe.plot else {}
    last = train[-1] if train else {}
    console.print(
        summary(
            run_name=config.run_name,
            steps=step,
            tokens=last.get("tokens_seen", 0),
            final_loss=last.get("loss"),
            evaluations=evals,
            seconds=seconds,
            comparison="\n".join(lines),
            ending=ending,
            curve=terminal_curve([r["step"] for r in train], [r["loss"] for r in train]),
            files=files,
            next_commands=_next_commands(config, folder),
        )
    )


def _next_commands(config: RunConfig, folder: Path) -> dict[str, Any]:
    commands = {"write text": f'maxtrain generate {folder} --prompt "def main("'}
    if config.observe.tensorboard:
        commands["look at the curves"] = f"tensorboard --logdir {folder}"
    command = f"python -m maxtrain.train config={folder / 'config.yaml'}"
    commands["train a wider model"] = f"{command} run_name={config.run_name}-wide model.embed_dim={config.model.embed_dim * 2}"
    return commands
