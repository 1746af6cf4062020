"""Tasks of EleutherAI's lm-evaluation-harness: `maxtrain evaluate RUN --tasks NAME`.

The harness sends requests; `HarnessAnswers` serves them with our scores and our generation. The
package of the harness is imported when it is needed, without torch. Log-probabilities of a text
follow the rules of the harness's own model of transformers: an empty context is the token that
texts begin with, a text that is too long loses its beginning, and long documents are read in
windows that do not overlap.
"""

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from data_pipeline.base.errors import UsageError
from data_pipeline.base.extras import load_package
from data_pipeline.tokenizer import Tokenizer
from maxtrain.commands.score import ROWS, ScoreRow, encode_pair, encode_text, score_long
from maxtrain.inference.complete import complete_ids
from maxtrain.models.decoder import Decoder

# Of a generation, unless a task says so: what the harness takes for its own models.
_MAX_TOKENS = 256
_MAX_TOKENS_KEYS = ("max_gen_toks", "max_new_tokens", "max_tokens")
# Settings of a generation that change nothing here, with the value that they must have.
_NEUTRAL = {"num_beams": 1, "num_return_sequences": 1, "repetition_penalty": 1.0}


class GenerationSettings(NamedTuple):
    """Generation settings of a task."""

    until: tuple[str, ...]
    max_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None


class HarnessAnswers:
    """Adapter of a model to the interface of the harness.

    Args:
        model: on one device, or split over the current mesh.
        tokenizer: its own.
        begin: ids before every text.
        prefix: ids that stand for an empty context.
        batch_size: rows that are computed together.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer,
        begin: Sequence[int],
        prefix: Sequence[int],
        batch_size: int = ROWS,
    ):
        self._model = model
        self._tokenizer = tokenizer
        self._begin = begin
        self._prefix = prefix
        self._batch_size = batch_size

    def loglikelihood(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Return, for each context and continuation, the log-probability of the continuation, and
        whether greedy decoding gives it.
        """
        rows = []
        for context, continuation in pairs:
            begin = self._begin
            if not context:
                begin = self._prefix
            row = encode_pair(self._tokenizer, begin, context, continuation)
            rows.append(_without_beginning(row, self._model.config.max_length))
        found = score_long(self._model, rows, batch_size=self._batch_size)
        return [(scored.total(), bool(scored.is_greedy.all())) for scored in found]

    def rolling(self, texts: Sequence[str]) -> list[float]:
        """The log-probability of each whole text."""
        rows = [encode_text(self._tokenizer, self._prefix, text) for text in texts]
        longest = self._model.config.max_length
        found = score_long(self._model, rows, stride=longest, batch_size=self._batch_size)
        return [scored.total() for scored in found]

    def generate(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """Return what is written after each context, as its settings say.

        UsageError: a setting that is not known here.
        """
        alike: dict[GenerationSettings, list[int]] = defaultdict(list)
        for number, (_, settings) in enumerate(requests):
            alike[read_generation(settings)].append(number)
        texts: dict[int, str] = {}
        for how, numbers in alike.items():
            for at in range(0, len(numbers), self._batch_size):
                some = numbers[at : at + self._batch_size]
                made = self._write([requests[number][0] for number in some], how)
                texts |= dict(zip(some, made, strict=True))
        return [texts[number] for number in range(len(requests))]

    def _write(self, contexts: Sequence[str], how: GenerationSettings) -> list[str]:
        longest = self._model.config.max_length
        # What is written must fit behind it.
        room = max(1, longest - how.max_tokens)
        prompts = []
        for context in contexts:
            begin = self._begin
            if not context:
                begin = self._prefix
            ids = [*begin, *self._tokenizer.encode(context).tolist()]
            prompts.append(ids[-room:])
        ends = []
        if self._tokenizer.eod_id is not None:
            ends = [self._tokenizer.eod_id]
        return complete_ids(
            self._model,
            self._tokenizer,
            prompts,
            max_tokens=how.max_tokens,
            temperature=how.temperature,
            top_k=how.top_k,
            top_p=how.top_p,
            stop_ids=ends,
            stop=how.until,
        )


def _without_beginning(row: ScoreRow, longest: int) -> ScoreRow:
    """A row that the model can read at once, if all that is scored fits into it."""
    too_many = len(row.ids) - longest - 1
    cut = max(0, min(too_many, row.first - 1))
    return ScoreRow(row.ids[cut:], row.first - cut)


def read_generation(settings: Mapping[str, Any]) -> GenerationSettings:
    """Settings of a task, as the harness writes them; UsageError: one is not known here."""
    left = dict(settings)
    until = left.pop("until", None) or ()
    if isinstance(until, str):
        until = (until,)
    max_tokens = _MAX_TOKENS
    for key in _MAX_TOKENS_KEYS:
        max_tokens = int(left.pop(key, max_tokens))
    temperature = float(left.pop("temperature", 0.0) or 0.0)
    samples = left.pop("do_sample", temperature > 0)
    if not samples:
        temperature = 0.0
    elif temperature == 0:
        temperature = 1.0
    top_k = left.pop("top_k", None) or None
    top_p = left.pop("top_p", None) or None
    for key, value in left.items():
        if key not in _NEUTRAL or value != _NEUTRAL[key]:
            raise UsageError(
                f"generation_kwargs: {key}={value} is not known here. Choose a task without it."
            )
    return GenerationSettings(
        tuple(end for end in until if end), max_tokens, temperature, top_k, top_p
    )


def run_tasks(
    answers: HarnessAnswers,
    tasks: Sequence[str],
    folder: str | None,
    num_fewshot: int | None,
    limit: int | None,
) -> dict[str, Any]:
    """Return what the harness finds.

    Args:
        answers: of the model.
        tasks: names of tasks, groups or tags.
        folder: with more tasks; None: those that the harness comes with.
        num_fewshot: examples before each question; None: as each task says.
        limit: questions of each task; None: all.

    Returns:
        Its results: `results` by task and metric, `versions`, `n-shot`, `n-samples`.

    Raises:
        UsageError: the package is not installed, or there is no such task.
    """
    lm_eval = load_package("lm_eval", "harness", "--tasks")
    manager_of = load_package("lm_eval.tasks", "harness", "--tasks").TaskManager
    base = load_package("lm_eval.api.model", "harness", "--tasks").LM
    if folder is not None and not Path(folder).expanduser().is_dir():
        raise UsageError(
            f"--tasks-dir {folder}: is no directory. Name one with YAML files of tasks."
        )
    included = None
    if folder is not None:
        included = str(Path(folder).expanduser())
    manager = manager_of(include_path=included)
    missing = [name for name in tasks if not manager.match_tasks([name])]
    if missing:
        raise UsageError(
            f"--tasks {','.join(missing)}: is no task that the harness knows. Name the directory "
            "of its YAML file with --tasks-dir, or look at `lm-eval ls tasks`."
        )

    class HarnessModel(base):  # pyright: ignore[reportGeneralTypeIssues]
        """The model as the harness asks it."""

        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            return answers.loglikelihood([request.args for request in requests])

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            return answers.rolling([request.args[0] for request in requests])

        def generate_until(self, requests: list[Any]) -> list[str]:
            return answers.generate([request.args for request in requests])

    found = lm_eval.simple_evaluate(
        model=HarnessModel(),
        tasks=list(tasks),
        num_fewshot=num_fewshot,
        limit=limit,
        task_manager=manager,
        log_samples=False,
        # No standard errors: for some metrics it would fork this process, which has a device.
        bootstrap_iters=0,
    )
    kept = ("results", "groups", "versions", "n-shot", "n-samples", "higher_is_better")
    return {key: found[key] for key in kept if key in found}


def table_of(found: Mapping[str, Any]) -> Table:
    """Return the output for the user: a line for each task and metric."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for head in ("task", "metric"):
        table.add_column(head)
    table.add_column("value", justify="right", no_wrap=True)
    for task, values in found["results"].items():
        for key, value in values.items():
            metric, _, filtered = key.partition(",")
            if metric.endswith("_stderr") or not isinstance(value, int | float) or not filtered:
                continue
            name = metric
            if filtered != "none":
                name = f"{metric} ({filtered})"
            table.add_row(task, name, f"{value:.4f}")
    return table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments --tasks, --tasks-dir, --num-fewshot and --limit."""
    add = parser.add_argument
    add(
        "--tasks",
        metavar="NAME,NAME",
        help="instead of sets: tasks of the lm-evaluation-harness; needs maxtrain[harness]",
    )
    add("--tasks-dir", metavar="DIR", help="of --tasks: a folder with YAML files of more tasks")
    add("--num-fewshot", metavar="N", type=int, help="of --tasks: examples before each question")
    add("--limit", metavar="N", type=int, help="of --tasks: questions of each task, at most")
