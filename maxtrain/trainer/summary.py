"""The end of a run, on process 0: curves, comparison with gzip, completions, summary, and suggested
next commands."""

import collections
import gzip
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from data_pipeline.base.console import SafeConsole
from data_pipeline.loader.loader import EvaluationData, TrainingData
from data_pipeline.tokenizer import Tokenizer
from maxtrain.config.run_path import run_path, run_url
from maxtrain.config.schema import RunConfig
from maxtrain.inference.complete import complete, show
from maxtrain.models.decoder import Decoder
from maxtrain.observe.anomaly import counted
from maxtrain.observe.curves import plot_curves
from maxtrain.observe.goodput import goodput, read_clock
from maxtrain.observe.launches import describe_launch, read_launches
from maxtrain.observe.metrics import Stopwatch, read_metrics
from maxtrain.observe.report import summary
from maxtrain.observe.samples import FILE_NAME as SAMPLES
from maxtrain.observe.samples import first_and_last, read_samples
from maxtrain.ops.quantity import NLL, Metric
from maxtrain.rl.rewards.registry import FAILURES

# Larger texts are not compared with gzip. This size takes a second or two.
MAX_GZIP_BYTES = 64 << 20
_COMPLETION_TOKENS = 64


def gzip_bits_per_byte(eval_set: EvaluationData, tokenizer: Tokenizer) -> float:
    """Return the bits per byte of `gzip -9` on the concatenated documents of a set."""
    shards = eval_set.shards
    documents = []
    for number in range(shards.num_documents):
        ids = shards.read(*shards.document(number))
        documents.append(tokenizer.decode(ids))
    text = "".join(documents).encode()
    return 8 * len(gzip.compress(text, 9)) / len(text)


def _compare_with_gzip(sets: Mapping[str, EvaluationData], tokenizer: Tokenizer) -> str:
    """Report how well gzip compresses each evaluation set, a line each; large texts are left
    out."""
    lines = []
    for name, eval_set in sets.items():
        # Sets of prompts have no loss to compare with.
        is_text = not eval_set.shards.has_columns
        if is_text and 0 < eval_set.text_bytes <= MAX_GZIP_BYTES:
            bits = gzip_bits_per_byte(eval_set, tokenizer)
            lines.append(f"gzip -9 reaches {bits:.4f} bits per byte on the text of {name}.")
    return "\n".join(lines)


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
    units: Mapping[str, str] | None = None,
    loss: Metric = NLL,
) -> None:
    """Draw curves.png, and print completions of observe.prompts, the summary, and suggested next
    commands.

    Args:
        config: the config of the run.
        data: the run's plan and tokenizer.
        sets: evaluation sets by name.
        step: the number of finished steps.
        clock: the time of this launch, for a run that has no record of all launches' time.
        ending: why the run ended early; empty: all steps of the plan are finished.
        found: the number of steps with a suspicious batch.
        model: the trained model; None: this process does not hold all of it.
        rollbacks: the recorded rollbacks of the run.
        problem: why the weights cannot be used, so that completions and suggestions are left out;
            empty: they can.
        read: the identity of each evaluation set's text as it is now (see validation.py);
            evaluations of an earlier text are not in the summary.
        units: units of the objective's metrics, by name.
        loss: the loss metric of the objective.
    """
    early = ""
    if ending:
        early = f"ENDED EARLY at step {step:,} of {data.plan.num_steps:,}: {ending}"
    folder = run_path(config)
    records = read_metrics(folder)
    launches = read_launches(folder)
    seconds = goodput(read_clock(folder)) or clock.seconds()
    seconds.pop("down", None)
    files = {
        "config": folder / "config.yaml",
        "metrics": folder / "metrics.jsonl",
        "launches": folder / "launches.jsonl",
        "checkpoints": folder / "checkpoints",
    }
    taken = read_samples(folder)
    if taken:
        files["samples"] = folder / SAMPLES
    if config.observe.plot:
        files["curves"] = folder / "curves.png"
        resumes = [launch["step"] for launch in launches if 0 < launch["step"] < step]
        plot_curves(
            records,
            files["curves"],
            config.run_name,
            data.plan.describe(),
            left_out=[rollback["left_out"] for rollback in rollbacks],
            resumes=resumes,
            changes=[span.step for span in data.plan.spans[1:]],
            loss=loss,
        )
    comparison = _compare_with_gzip(sets, data.tokenizer)
    console = SafeConsole()
    if config.observe.prompts and model is not None and not problem:
        show(console, config.observe.prompts, completions(config, data.tokenizer, model))
    made_by = ""
    if launches:
        made_by = describe_launch(launches[-1])
    shown = []
    for record in records:
        if record["kind"] != "eval" or _is_current(record, read or {}):
            shown.append(record)
    text = summary(
        config.run_name,
        step,
        shown,
        seconds,
        comparison=comparison,
        ending="\n".join(_notes(found, problem, early, records, rollbacks)),
        made_by=made_by,
        files=files,
        units=units,
        samples=first_and_last(taken),
    )
    console.print(text)
    if not problem:
        is_of_chats = any(shards.is_rendered for shards in data.shards)
        for what, command in _next_commands(config, folder, is_of_chats).items():
            lines = Text.assemble((f"{what}:\n", "dim"), (f"  {command}", "cyan"))
            # Not wrapped, so that the command can be copied whole.
            console.print(lines, soft_wrap=True)
    if early:
        console.print(Text(early, "bold yellow"), soft_wrap=True)


def _notes(
    found: int,
    problem: str,
    early: str,
    records: Sequence[Mapping[str, Any]],
    rollbacks: Sequence[Mapping[str, Any]],
) -> list[str]:
    """Return the first lines of the summary: problems and deviations from the plan."""
    notes = []
    if found:
        notes.append(f"Something was wrong with the batches of {found:,} steps (data.zero_weight).")
    if problem:
        notes.append(problem)
    if early:
        notes.append(early)
    notes += failed_rewards(records)
    last = next((record for record in reversed(records) if record["kind"] == "train"), {})
    anomalies = counted(last, rollbacks)
    if anomalies:
        notes.append(anomalies)
    return notes


def failed_rewards(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each reward that failed for completions of the steps on record."""
    totals: collections.Counter[str] = collections.Counter()
    failed: collections.Counter[str] = collections.Counter()
    for record in records:
        for key, count in record.items():
            kind, _, rest = key.partition("/")
            if record["kind"] == "train" and kind == "reward_outcomes":
                name, _, outcome = rest.rpartition("/")
                totals[name] += int(count)
                failed[name] += int(count) * (outcome in FAILURES)
    return [
        f"The reward {name} failed for {count:,} of {totals[name]:,} completions on record: "
        f"see reward_outcomes/{name}/... in metrics.jsonl."
        for name, count in failed.items()
        if count
    ]


def _is_current(record: Mapping[str, Any], read: Mapping[str, str]) -> bool:
    """Return whether an evaluation is of an existing set, and of its present text."""
    now = read.get(record["set"])
    return now is not None and record.get("data", now) == now


def completions(config: RunConfig, tokenizer: Tokenizer, model: Decoder) -> list[str]:
    """Return the model's completions of observe.prompts, of which there is at least one."""
    return complete(
        model,
        tokenizer,
        config.observe.prompts,
        max_tokens=_COMPLETION_TOKENS,
        temperature=0.7,
        top_p=0.95,
        seed=config.seed,
    )


def _next_commands(config: RunConfig, folder: Path, is_of_chats: bool) -> dict[str, str]:
    """Return suggested commands by their purpose; each can be pasted into this shell.

    `is_of_chats`: whether a chat template rendered some training text.
    """
    maxtrain = _program("maxtrain") or "maxtrain"
    run = run_url(config) or str(folder)
    generate = [maxtrain, "generate", run]
    if config.model.score:
        # A reward model writes no text.
        commands = {}
    elif is_of_chats:
        commands = {"talk to it": [*generate, "--chat"]}
    else:
        prompt = next(iter(config.observe.prompts), "Once upon a time")
        commands = {"write text": [*generate, "--prompt", prompt]}
    if (folder / "tensorboard").is_dir():
        what = "look at the curves"
        tensorboard = _program("tensorboard")
        if tensorboard is None:
            what += " (after pip install tensorboard, which is not here)"
            tensorboard = "tensorboard"
        commands[what] = [tensorboard, "--logdir", str(folder)]
    if config.checkpoint.init_from is None and config.checkpoint.fork_from is None:
        python = _program(Path(sys.executable).name) or sys.executable
        train = [python, "-m", "maxtrain.train", f"config={folder / 'config.yaml'}"]
        train.append(f"run_name={config.run_name}-wide")
        train.append(f"model.embed_dim={config.model.embed_dim * 2}")
        commands["train a wider model"] = train
    exported = Path("exported", config.run_name)
    export = [maxtrain, "export", run, str(exported), "--format", "hf"]
    commands["give it to other programs (transformers, vLLM, ...)"] = export
    return {what: shlex.join(words) for what, words in commands.items()}


def _program(name: str) -> str | None:
    """Return the command that starts a program installed beside this Python; None if it is not
    installed.

    The command is the bare name if the shell finds this program by it, as in an activated
    environment; otherwise its path, relative to the working directory where possible.
    """
    path = Path(sys.executable).parent / name
    if not path.exists():
        return None
    found = shutil.which(name)
    if found and Path(found).absolute() == path.absolute():
        return name
    here = Path.cwd()
    if path.is_relative_to(here):
        return str(path.relative_to(here))
    return str(path)
