"""`maxtrain evaluate RUN|DIR`: the loss of a model on held-out sets: that of a run, or of a Hugging
Face directory.

Every target of a set counts once. Without `--set`, the sets are those of the run, read as the run
reads them. Sets of prompts are completed and rewarded, where there are rewards; those of a run with
distill.on_policy are completed, and compared with its teacher. With `--text FILE`, bits per byte of
files of text, each token of which counts once. With `--tasks NAME`, tasks of the
lm-evaluation-harness.
"""

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh
from rich.console import RenderableType
from rich.table import Table

from data_pipeline.base.console import SafeConsole
from data_pipeline.base.errors import (
    ConfigError,
    DataError,
    DivergedError,
    UsageError,
    run_command,
)
from data_pipeline.base.remote import is_url
from data_pipeline.config import DataConfig, EvalSetConfig
from data_pipeline.loader.loader import EvaluationData, open_evaluation
from data_pipeline.tokenizer import Tokenizer
from maxtrain.commands.evaluate import lm_eval
from maxtrain.commands.evaluate.prompts import (
    PromptSetResult,
    evaluate_prompts,
    settings,
    show_samples,
)
from maxtrain.commands.evaluate.prompts import add_arguments as add_prompt_arguments
from maxtrain.commands.evaluate.prompts import table_of as table_of_prompts
from maxtrain.commands.evaluate.teacher import Comparison, compare_with, evaluate_completions
from maxtrain.commands.evaluate.teacher import settings as teacher_settings
from maxtrain.commands.evaluate.teacher import table_of as table_of_completions
from maxtrain.commands.evaluate.text import (
    check_window,
    evaluate_files,
    read_files,
    table_of,
    together,
)
from maxtrain.config.schema import MeshConfig, ObserveConfig, RunConfig
from maxtrain.models.decoder import Decoder
from maxtrain.models.families.directory import read_config
from maxtrain.objectives.distill import TEACHER
from maxtrain.objectives.next_token import next_token
from maxtrain.objectives.objective import POLICY
from maxtrain.observe.metrics import as_json
from maxtrain.parallel.batches import BatchLayout
from maxtrain.parallel.distributed import start
from maxtrain.parallel.mesh import make_mesh
from maxtrain.rl.prompts import num_prompts
from maxtrain.train_step.evaluate import evaluate, make_eval_step, not_finite
from maxtrain.trainer.saved_run import (
    add_model_arguments,
    check_model_arguments,
    comes_from_elsewhere,
    load_model,
    read_run_config,
    special_beginning,
    step_of,
    text_beginning,
)

_ROWS, _LENGTH = 8, 1024  # of a batch, unless a run or the command says so


class EvaluationPlan(NamedTuple):
    """Settings for reading evaluation sets: the sets, their data settings, the rows of a batch, and
    the number of batches.
    """

    sets: dict[str, EvalSetConfig]
    data: DataConfig
    rows: int
    batches: int  # of each set; negative: all

    def batches_of(self, name: str) -> int:
        """Return the number of batches of one set; negative for all."""
        steps = self.sets[name].steps
        if steps is None:
            return self.batches
        return steps


def evaluate_sets(
    model: Decoder,
    mesh: Mesh,
    opened: Mapping[str, EvaluationData],
    reading: EvaluationPlan,
    comparison: Comparison | None = None,
) -> dict[str, dict[str, Any]]:
    """Evaluate each set with `training.evaluate.evaluate`, and measure the seconds; with the
    divergence from a teacher if there is a comparison. DataError: a set is not complete.
    """
    graphdef, of_model = nnx.split(model)
    objective = next_token()
    graphdefs: dict[str, nnx.GraphDef | None] = {POLICY: graphdef}
    params = {POLICY: of_model}
    if comparison is not None:
        objective = comparison.objective
        graphdefs[TEACHER] = comparison.graphdef
        params[TEACHER] = comparison.params
    step = make_eval_step(graphdefs, objective)
    results = {}
    with jax.set_mesh(mesh):
        for name, data in opened.items():
            layout = BatchLayout(mesh, data.batch_size, data.config.seq_length)
            count = reading.batches_of(name)
            whole = count < 0
            batches = data.iterate(layout.part, None if whole else count)
            begin = time.perf_counter()
            targets, text_bytes = (data.num_tokens, data.text_bytes) if whole else (None, 0)
            result = evaluate(
                step,
                params,
                (layout.to_global(b.arrays) for b in batches),
                targets,
                text_bytes,
            )
            results[name] = result | {"seconds": time.perf_counter() - begin}
    return results


def _open_all(
    reading: EvaluationPlan, tokenizer: Tokenizer, model: Decoder
) -> dict[str, EvaluationData]:
    """The sets by name. ConfigError: one of another tokenizer, or more entries than the model
    has."""
    return {
        name: _open(name, config, reading, tokenizer, model)
        for name, config in reading.sets.items()
    }


def _open(
    name: str, config: EvalSetConfig, reading: EvaluationPlan, tokenizer: Tokenizer, model: Decoder
) -> EvaluationData:
    data = open_evaluation(config.path, reading.data, config.batch_size or reading.rows, name)
    made_with, vocab = data.manifest.tokenizer, model.config.vocab_size or 0
    if made_with["sha256"] != tokenizer.sha256:
        other = f"was made with another tokenizer ({made_with['name']}) than the model's"
        rule = f"{other}, so that ids would mean different text"
        raise ConfigError(
            f"eval.sets.{name}={config.path} {rule}. Prepare it with `--tokenizer` of the model's."
        )
    data.limit_vocabulary(vocab)
    if data.vocab_size > vocab:
        rule = (
            f"has a tokenizer of {made_with['vocab_size']:,} entries, and the model has {vocab:,}"
        )
        raise ConfigError(
            f"eval.sets.{name}={config.path} {rule}. Prepare it with the model's own tokenizer."
        )
    return data


def _mesh(rows: Sequence[int]) -> Mesh:
    """Return a mesh of as many devices of this process as divide all of these numbers of rows."""
    devices = jax.local_devices()
    count = math.gcd(len(devices), *rows)
    return make_mesh(MeshConfig(fsdp=count), devices[:count])


def _reading_of_run(run: Path, config: RunConfig, args: argparse.Namespace) -> EvaluationPlan:
    data = dataclasses.replace(
        config.data, seq_length=args.seq_length or config.eval.seq_length or config.data.seq_length
    )
    sets = _named(args.set)
    if not sets:
        sets = config.eval.sets
        _require_sets(run, sets)
    if not sets:
        raise UsageError(
            f"{run} has no evaluation sets. Name one with --set NAME=DIR, made by `prepare`."
        )
    batches = config.eval_steps if args.batches is None else args.batches
    if args.batches is not None or not batches:  # a run may have turned its evaluations off
        sets = {name: dataclasses.replace(s, steps=None) for name, s in sets.items()}
    return EvaluationPlan(
        sets,
        data,
        args.batch_size or config.eval.batch_size or config.data.batch_size,
        batches or -1,
    )


def _require_sets(run: Path, sets: Mapping[str, EvalSetConfig]) -> None:
    """DataError: the data of evaluation sets of a run is not on this machine."""
    missing = [
        f"eval.sets.{name}.path={each.path}"
        for name, each in sets.items()
        if not is_url(each.path) and not Path(each.path).exists()
    ]
    if missing:
        raise DataError(
            f"{run} is evaluated on {', '.join(missing)}, which is not on this machine. Copy that "
            "data here, or name a set with --set NAME=DIR."
        )


def _reading_of_weights(directory: str, args: argparse.Namespace) -> EvaluationPlan:
    if not args.set:
        raise UsageError(
            f"{args.hf}: has no evaluation sets of its own. Name one with --set NAME=DIR, "
            "made by `prepare`."
        )
    length = args.seq_length or min(_LENGTH, read_config(directory).max_length)
    return EvaluationPlan(
        _named(args.set),
        DataConfig(seq_length=length),
        args.batch_size or _ROWS,
        args.batches or -1,
    )


def _named(words: Sequence[str]) -> dict[str, EvalSetConfig]:
    sets = {}
    for word in words:
        name, separator, path = word.partition("=")
        if not (name and separator and path):
            raise UsageError(
                f"--set {word}: must be NAME=DIR. Write for example --set val=data/stdlib/eval."
            )
        if name in sets:
            raise UsageError(
                f"--set {word}: the name {name} is given twice. Give each set a name of its own."
            )
        sets[name] = EvalSetConfig(path=path)
    return sets


def _table(results: dict[str, dict[str, Any]]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for head in ("set", "nats/token", "perplexity", "bits/byte", "targets", "seconds"):
        table.add_column(head, justify="left" if head == "set" else "right", no_wrap=True)
    if any(_of_teacher(result) for result in results.values()):
        table.add_column("KL", justify="right", no_wrap=True)
        table.add_column("agreement", justify="right", no_wrap=True)
    for name, r in results.items():
        bits = f"{r['bits_per_byte']:.4f}" if "bits_per_byte" in r else "-"
        table.add_row(
            name,
            f"{r['nll']:.4f}",
            f"{r['perplexity']:.4g}",
            bits,
            f"{r['tokens']:,}",
            f"{r['seconds']:.1f}",
            *_of_teacher(r),
        )
    return table


def _of_teacher(result: dict[str, Any]) -> list[str]:
    """The columns of a comparison with a teacher; empty if there was none."""
    if "distill" not in result:
        return []
    return [f"{result['distill']:.4f}", f"{result['agreement']:.4f}"]


def _parse(argv: Sequence[str], prog: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog,
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add_model_arguments(parser)
    add(
        "--set",
        metavar="NAME=DIR",
        action="append",
        default=[],
        help="an evaluation set; may be given several times",
    )
    add(
        "--batches",
        metavar="N",
        type=int,
        help="most batches of each set (default: all, or as RUN does)",
    )
    add(
        "--batch-size",
        metavar="ROWS",
        type=int,
        help=f"rows of a batch (default: as RUN, {_ROWS} for DIR)",
    )
    add(
        "--seq-length",
        metavar="TOKENS",
        type=int,
        help=f"tokens of a row (default: as RUN, at most {_LENGTH:,} for DIR)",
    )
    add(
        "--teacher",
        metavar="DIR",
        help="also KL(teacher || model) at temperature 1, in nats per target, and how often their "
        "most likely tokens agree; DIR: a run, a checkpoint of one, or a Hugging Face directory",
    )
    add(
        "--text",
        metavar="FILE",
        action="append",
        default=[],
        help="instead of sets: bits per byte of a file of text; may be given several times",
    )
    add(
        "--stride",
        metavar="TOKENS",
        type=int,
        help="of --text: new tokens of a window, where a text is longer than the model reads "
        "(default: half of a window, which --seq-length sets)",
    )
    add_prompt_arguments(parser)
    lm_eval.add_arguments(parser)
    add("--json", action="store_true", help="print the numbers as JSON")
    args = parser.parse_args(argv)
    check_model_arguments(parser, args, "is evaluated")
    _check_kind(args)
    numbers = ("batches", "batch_size", "seq_length", "stride", "limit", "show")
    for option in (*numbers, "max_completion_length"):
        if (value := getattr(args, option)) is not None and value < 1:
            raise UsageError(
                f"--{option.replace('_', '-')} {value}: must be at least 1. Leave it out for the "
                "default."
            )
    return args


def _check_kind(args: argparse.Namespace) -> None:
    """UsageError: options of sets, files of text and tasks are mixed."""
    if args.tasks is None:
        for option in ("tasks_dir", "num_fewshot", "limit"):
            if getattr(args, option) is not None:
                raise UsageError(f"--{option.replace('_', '-')}: is of --tasks. Leave it out.")
    elif args.text:
        raise UsageError("--tasks and --text are evaluated one at a time. Give one of the two.")
    if args.num_fewshot is not None and args.num_fewshot < 0:
        raise UsageError(f"--num-fewshot {args.num_fewshot}: must be at least 0. Set 0 for none.")
    if not args.text and args.stride is not None:
        raise UsageError(
            f"--stride {args.stride}: is of --text, and sets are read in rows of --seq-length. "
            "Leave it out."
        )
    other = "--text"
    if args.tasks is not None:
        other = "--tasks"
    elif not args.text:
        return
    of_sets = ("set", "batches", "teacher", "reward", "max_completion_length", "show")
    for option in of_sets:
        value = getattr(args, option)
        if value:
            raise UsageError(
                f"--{option.replace('_', '-')}: is of evaluation sets. Leave it out, or leave out "
                f"{other}."
            )


def _evaluate_sets(args: argparse.Namespace) -> None:
    """The job of --set. DivergedError: a number is not finite."""
    of_run = None
    if args.hf is None:
        of_run = read_run_config(Path(args.run).expanduser())
        reading = _reading_of_run(Path(args.run).expanduser(), of_run, args)
    else:
        reading = _reading_of_weights(args.hf, args)
    # Completions of prompts are judged by a run's teacher, or by rewards; or prompts are text.
    compared = teacher_settings(args, of_run)
    rewarded = None
    if compared is None:
        rewarded = settings(args, of_run)
    start(MeshConfig(num_processes=1), ObserveConfig().compilation_cache)
    mesh = _mesh([config.batch_size or reading.rows for config in reading.sets.values()])
    model, tokenizer = load_model(args, mesh)
    what = _name_of_model(args)
    comparison = None
    if args.teacher is not None:
        with jax.set_mesh(mesh):
            length = reading.data.seq_length
            comparison = compare_with(args.teacher, model, tokenizer, length, mesh)
    texts = _open_all(reading, tokenizer, model)
    prompts = {}
    if compared is not None or rewarded is not None:
        prompts = {name: data for name, data in texts.items() if data.shards.has_columns}
        texts = {name: data for name, data in texts.items() if name not in prompts}
    if args.reward and not prompts:
        raise UsageError(
            f"--reward {args.reward[0]}: there is no set of prompts. Make one with "
            "`prepare --prompts`, and name it with --set NAME=DIR."
        )
    results = {}
    if texts:
        results = evaluate_sets(model, mesh, texts, reading, comparison)
    answered = {}
    counts = {name: num_prompts(data, reading.batches_of(name)) for name, data in prompts.items()}
    num_shown = args.show or 0
    table = table_of_prompts
    with jax.set_mesh(mesh):
        if prompts and rewarded is not None:
            answered = evaluate_prompts(model, tokenizer, prompts, counts, rewarded, num_shown)
        elif prompts and compared is not None:
            assert of_run is not None
            table = table_of_completions
            answered = evaluate_completions(
                model, tokenizer, mesh, prompts, counts, of_run, compared, num_shown
            )
    if args.json:
        print(json.dumps({"model": what, "sets": _as_json(results, answered)}, allow_nan=False))
    else:
        _print(what, results, answered, table)
    records = results | {name: each.record for name, each in answered.items()}
    for name, record in records.items():
        bad = not_finite(record)
        if bad is not None:
            raise DivergedError(
                f"{what}: {bad.name} on {name} is {bad.value}. Take another checkpoint with --step."
            )


def _as_json(
    results: Mapping[str, Mapping[str, Any]], answered: Mapping[str, PromptSetResult]
) -> dict[str, dict[str, Any]]:
    """The numbers of all sets, with the completions that are wanted."""
    sets = {name: as_json(result) for name, result in results.items()}
    for name, each in answered.items():
        sets[name] = as_json(each.record)
        if each.samples:
            sets[name]["samples"] = [sample.record() for sample in each.samples]
    return sets


def _print(
    what: str,
    results: dict[str, dict[str, Any]],
    answered: Mapping[str, PromptSetResult],
    table: Callable[[Mapping[str, PromptSetResult]], RenderableType],
) -> None:
    """The same for people; `table` is that of completions."""
    console = SafeConsole()
    console.print(what, markup=False)
    if results:
        console.print(_table(results))
    if answered:
        show_samples(console, answered)
        console.print(table(answered))


def _name_of_model(args: argparse.Namespace) -> str:
    """Describe what is evaluated."""
    if args.hf is not None:
        return args.hf
    return f"{args.run}, step {step_of(args.run, args.step) or 0:,}"


def _evaluate_texts(args: argparse.Namespace) -> None:
    """The job of --text; DivergedError: a sum is not finite."""
    start(MeshConfig(num_processes=1), ObserveConfig().compilation_cache)
    model, tokenizer = load_model(args)
    what = _name_of_model(args)
    check_window(args, model.config.max_length)
    begin = text_beginning(args, tokenizer)
    files = read_files(args.text, tokenizer, begin)
    if not begin:
        print(
            "The tokenizer has no token that a text begins with: the first token of each file does "
            "not count, nor do its bytes.",
            file=sys.stderr,
        )
    measured = evaluate_files(
        model,
        files,
        longest=args.seq_length,
        stride=args.stride,
        batch_size=args.batch_size or _ROWS,
    )
    if args.json:
        texts = {name: as_json(part.record()) for name, part in measured.items()}
        everything = as_json(together(measured.values()).record())
        record = {"model": what, "texts": texts, "all": everything, "first_counts": bool(begin)}
        print(json.dumps(record, allow_nan=False))
    else:
        console = SafeConsole()
        console.print(what, markup=False)
        console.print(table_of(measured))
    for name, part in measured.items():
        if not math.isfinite(part.nats):
            raise DivergedError(
                f"{what}: the loss on {name} is {part.nats}. Take another checkpoint with --step."
            )


def _evaluate_tasks(args: argparse.Namespace) -> None:
    """The job of --tasks."""
    start(MeshConfig(num_processes=1), ObserveConfig().compilation_cache)
    model, tokenizer = load_model(args)
    prefix = text_beginning(args, tokenizer)
    begin = prefix
    if comes_from_elsewhere(args):
        begin = special_beginning(tokenizer)
    answers = lm_eval.HarnessAnswers(model, tokenizer, begin, prefix, args.batch_size or _ROWS)
    names = [name for name in args.tasks.split(",") if name]
    found = lm_eval.run_tasks(answers, names, args.tasks_dir, args.num_fewshot, args.limit)
    what = _name_of_model(args)
    if args.json:
        print(json.dumps({"model": what} | found, default=str))
    else:
        console = SafeConsole()
        console.print(what, markup=False)
        console.print(lm_eval.table_of(found))


def main(argv: Sequence[str], prog: str = "maxtrain evaluate") -> int:
    """Runs the command; the exit code: 70 if a loss is not finite."""

    def job() -> None:
        args = _parse(argv, prog)
        if args.text:
            _evaluate_texts(args)
            return
        if args.tasks is not None:
            _evaluate_tasks(args)
            return
        _evaluate_sets(args)

    return run_command(job, resumes=False)
