"""The end of a run, on process 0: curves, comparison with gzip, completions, summary, and what to
try next."""

import gzip
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from data_pipeline.loader import EvaluationData, TrainingData
from data_pipeline.tokenizer import Tokenizer
from maxtrain.config.schema import RunConfig
from maxtrain.generate import complete, show
from maxtrain.models.decoder import Decoder
from maxtrain.observe.anomaly import counted
from maxtrain.observe.goodput import goodput, read_clock
from maxtrain.observe.launches import describe_launch, read_launches
from maxtrain.observe.metrics import Stopwatch, read_metrics
from maxtrain.observe.report import plot_curves, summary

MAX_GZIP_BYTES = 64 << 20  # a second or two
_COMPLETION_TOKENS = 64


def gzip_bits_per_byte(eval_set: EvaluationData, tokenizer: Tokenizer) -> float:
    """Bits per byte of `gzip -9` on the text of a set, all documents one after the other."""
    shards = eval_set.shards
    text = "".join(
        tokenizer.decode(shards.read(*shards.document(n))) for n in range(shards.num_documents)
    ).encode()
    return 8 * len(gzip.compress(text, 9)) / len(text)


def finish(
    config: RunConfig,
    data: TrainingData,
    sets: dict[str, EvaluationData],
    step: int,
    clock: Stopwatch,
    ending: str,
    found: int,
    model: Decoder | None,
    rollbacks: Sequence[Mapping[str, Any]] = (),
    problem: str = "",
    read: Mapping[str, str] | None = None,
) -> None:
    """Draws curves.png; prints completions of observe.prompts, the summary, and what to try next.

    `step` is the number of finished steps, `ending` why these are not all, or empty, `found` at how
    many of them something was wrong with the batch. `model` is None where this process does not
    hold all of it. `rollbacks` are those of checkpoint/rollback.py. With a `problem`, the weights
    are of no use: no completions, and nothing to try. `read` says of each evaluation set what it is
    now (see validation.py): evaluations of what it was before are not in the summary.
    """
    notes = (
        [f"Something was wrong with the batches of {found:,} steps (data.zero_weight)."]
        if found
        else []
    )
    if problem:
        notes.append(problem)
    early = f"ENDED EARLY at step {step:,} of {data.plan.num_steps:,}: {ending}" if ending else ""
    notes += [early] if early else []
    folder = Path(config.output_dir, config.run_name)
    records, launches = read_metrics(folder), read_launches(folder)
    seconds = goodput(read_clock(folder)) or clock.seconds()
    seconds.pop("down", None)
    files = {
        "config": folder / "config.yaml",
        "metrics": folder / "metrics.jsonl",
        "launches": folder / "launches.jsonl",
        "checkpoints": folder / "checkpoints",
    }
    if config.observe.plot:
        files["curves"] = folder / "curves.png"
        left_out = [rollback["left_out"] for rollback in rollbacks]
        resumes = [launch["step"] for launch in launches if 0 < launch["step"] < step]
        changes = [span.step for span in data.plan.spans[1:]]
        plot_curves(
            records,
            files["curves"],
            config.run_name,
            data.plan.describe(),
            left_out,
            resumes,
            changes,
        )
    comparison = "\n".join(
        f"gzip -9 reaches {gzip_bits_per_byte(eval_set, data.tokenizer):.4f} bits per byte on the text of {name}."
        for name, eval_set in sets.items()
        if 0 < eval_set.text_bytes <= MAX_GZIP_BYTES
    )
    console = Console(highlight=False)
    if config.observe.prompts and model is not None and not problem:
        show(console, config.observe.prompts, completions(config, data.tokenizer, model))
    made_by = describe_launch(launches[-1]) if launches else ""
    last = next((record for record in reversed(records) if record["kind"] == "train"), {})
    notes += filter(None, [counted(last, rollbacks)])
    words = {"comparison": comparison, "ending": "\n".join(notes), "made_by": made_by}
    shown = [
        record for record in records if record["kind"] != "eval" or _is_of_now(record, read or {})
    ]
    console.print(summary(config.run_name, step, shown, seconds, **words, files=files))
    commands = {} if problem else _next_commands(config, folder)
    for what, command in commands.items():
        console.print(
            Text.assemble((f"{what}:\n", "dim"), (f"  {command}", "cyan")), soft_wrap=True
        )  # to be copied whole
    if early:
        console.print(Text(early, "bold yellow"), soft_wrap=True)


def _is_of_now(record: Mapping[str, Any], read: Mapping[str, str]) -> bool:
    """Whether an evaluation is of a set that there still is, and of the text that it is now."""
    now = read.get(record["set"])
    return now is not None and record.get("data", now) == now


def completions(config: RunConfig, tokenizer: Tokenizer, model: Decoder) -> list[str]:
    """What the model makes of each of observe.prompts, of which there is at least one."""
    options = {
        "max_tokens": _COMPLETION_TOKENS,
        "temperature": 0.7,
        "top_p": 0.95,
        "seed": config.seed,
    }
    return complete(model, tokenizer, config.observe.prompts, **options)


def _next_commands(config: RunConfig, folder: Path) -> dict[str, str]:
    """What to try next, each as a command that works in this shell."""
    prompt = next(iter(config.observe.prompts), "Once upon a time")
    commands = {
        "write text": [
            _program("maxtrain") or "maxtrain",
            "generate",
            str(folder),
            "--prompt",
            prompt,
        ]
    }
    if (folder / "tensorboard").is_dir():
        tensorboard = _program("tensorboard")
        first = "" if tensorboard else " (after pip install tensorboard, which is not here)"
        commands[f"look at the curves{first}"] = [
            tensorboard or "tensorboard",
            "--logdir",
            str(folder),
        ]
    wider = [f"run_name={config.run_name}-wide", f"model.embed_dim={config.model.embed_dim * 2}"]
    python = _program(Path(sys.executable).name) or sys.executable
    commands["train a wider model"] = [
        python,
        "-m",
        "maxtrain.train",
        f"config={folder / 'config.yaml'}",
        *wider,
    ]
    commands["give it to other programs (transformers, vLLM, ...)"] = [
        _program("maxtrain") or "maxtrain",
        "export",
        str(folder),
        str(Path("exported") / config.run_name),
        "--format",
        "hf",
    ]
    return {what: shlex.join(words) for what, words in commands.items()}


def _program(name: str) -> str | None:
    """What to type for a program that is installed beside this Python; None if there is none.

    Its name if that finds it, as in an activated environment; else its path, from the working
    directory if it is below it.
    """
    path = Path(sys.executable).parent / name
    if not path.exists():
        return None
    found = shutil.which(name)
    if found and Path(found).absolute() == path.absolute():
        return name
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
