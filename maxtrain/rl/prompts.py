"""Prompts of a run: which prompts a step reads, and a check that each leaves room for a
completion."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from data_pipeline.base.errors import ConfigError, UserError
from data_pipeline.loader.loader import EvaluationData, TrainingData
from data_pipeline.shards import TokenShards
from data_pipeline.sources.prompts import PROMPT
from maxtrain.parallel.agreement import raise_together


class Prompt(NamedTuple):
    """A prompt to complete.

    Attributes:
        ids: its tokens; for plain text with end-of-document tokens, after the token that ends the
            document before.
        original: the prompt as given: text, or messages.
        columns: the other columns of its row.
    """

    ids: tuple[int, ...]
    original: Any
    columns: dict[str, Any]


def require_prompts(data: TrainingData, objective: str, max_completion_length: int) -> None:
    """Raise a ConfigError if a source does not hold prompts, or a prompt leaves no room for a
    completion.

    The arguments are those of `require_room`.
    """
    setting = f"objective={objective}"
    if objective == "distill":
        setting = "distill.on_policy=true"
    length = min(span.seq_length for span in data.plan.spans)
    for name, shards in zip(data.plan.names, data.shards):
        key = f"data.sources.{name}"
        if not shards.has_columns:
            raise ConfigError(
                f"{key}.path={shards.path} holds documents, and {setting} completes prompts. "
                "Prepare them with `python -m data_pipeline.prepare OUT --prompts 'FILES.jsonl'`."
            )
        require_room(key, shards, length, objective, max_completion_length)


def require_room(
    key: str, shards: TokenShards, length: int, objective: str, max_completion_length: int
) -> None:
    """Raise a ConfigError if a prompt leaves no room for a completion.

    Args:
        key: the config key of the prompts, without `.path`.
        shards: the prompts.
        length: most tokens of a prompt with its completion.
        objective: the objective, whose section has max_completion_length.
        max_completion_length: most tokens of a completion.
    """
    _, lengths = shards.documents(np.arange(shards.num_documents))
    # Rendered prompts are read without their end-of-document token. Plain text has one in front.
    if shards.manifest.eod == "append" and shards.is_rendered:
        lengths = lengths - 1
    room = length - max_completion_length
    too_long = np.flatnonzero(lengths > room)
    if not too_long.size:
        return
    first = int(too_long[0])
    section = "data"
    if key.startswith("eval."):
        section = "eval"
    raise ConfigError(
        f"{key}.path={shards.path}: prompt {first} has {lengths[first]:,} tokens, and "
        f"{objective}.max_completion_length={max_completion_length:,} leaves room for {room:,} in "
        f"rows of {section}.seq_length; {too_long.size:,} prompts have too many. Set "
        f"{section}.seq_length to at least {int(lengths.max()) + max_completion_length:,}, "
        f"{objective}.max_completion_length lower, or leave such prompts out."
    )


def num_prompts(data: EvaluationData, batches: int) -> int:
    """Return how many prompts of an evaluation set are completed for this number of batches;
    negative: all."""
    count = data.shards.num_documents
    if batches >= 0:
        count = min(count, batches * data.batch_size)
    return count


def prompts_of(data: TrainingData, steps: Iterable[int]) -> list[Prompt]:
    """Read the prompts of these steps of the plan, in their order."""
    found = []
    for step in steps:
        rows = data.rows_at(step)
        for source, row in zip(rows.source.tolist(), rows.row.tolist()):
            shards = data.shards[source]
            bins = data.bins_of(step, source)
            assert bins is not None, "with data.packing=pad there are rows of documents"
            _, (number,) = bins.documents(np.array([row]))
            found.append(read_prompt(shards, int(number)))
    return found


def later_prompts(data: TrainingData, steps: range) -> Iterator[Prompt]:
    """Iterate over the prompts that the plan reads after these steps, in its order; after its last
    step it starts over, without end.

    Each of them is read again in its own turn. So the prompts of a step, and the epoch of a run, do
    not depend on the samples.
    """
    first = data.plan.spans[0].step
    count = data.plan.num_steps - first
    for ahead in itertools.count():
        step = first + (steps.stop - first + ahead) % count
        yield from prompts_of(data, [step])


def first_of_each(data: TrainingData) -> list[Prompt]:
    """Read the first prompt of each source, which has the columns of that source."""
    return [read_prompt(shards, 0) for shards in data.shards if shards.has_columns]


def read_prompt(shards: TokenShards, number: int) -> Prompt:
    """Read a prompt by its number."""
    ids = shards.read(*shards.document(number)).tolist()
    if shards.manifest.eod == "append":
        end = ids.pop()
        # A rendered prompt begins as its template says.
        if not shards.is_rendered:
            ids.insert(0, end)
    (columns,) = shards.columns([number])
    original = columns.pop(PROMPT)
    return Prompt(tuple(ids), original, columns)


def read_together(read: Callable[..., Iterable[Prompt]], *of: Any) -> list[Prompt]:
    """Call a function that reads prompts in this process. Raise a UserError in all processes if it
    fails in one of them."""
    prompts: list[Prompt] = []
    error = None
    try:
        prompts = list(read(*of))
    except (UserError, OSError) as problem:
        error = problem
    raise_together(error)
    return prompts
