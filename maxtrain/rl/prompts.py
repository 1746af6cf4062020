"""Prompts of a run: which a step reads, and whether all of them have room for a completion."""

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
    """What a completion follows.

    Attributes:
        ids: its tokens; of plain text with end marks, behind the mark that every document begins
            after.
        original: as it was given: text, or messages.
        columns: what else is known of it.
    """

    ids: tuple[int, ...]
    original: Any
    columns: dict[str, Any]


def require_prompts(data: TrainingData, objective: str, max_completion_length: int) -> None:
    """ConfigError: a source does not hold prompts, or one leaves no room for a completion.

    Args: as of `require_room`.
    """
    asked = f"objective={objective}"
    if objective == "distill":
        asked = "distill.on_policy=true"
    length = min(span.seq_length for span in data.plan.spans)
    for name, shards in zip(data.plan.names, data.shards):
        key = f"data.sources.{name}"
        if not shards.has_columns:
            raise ConfigError(
                f"{key}.path={shards.path} holds documents, and {asked} completes prompts. "
                "Prepare them with `python -m data_pipeline.prepare OUT --prompts 'FILES.jsonl'`."
            )
        require_room(key, shards, length, objective, max_completion_length)


def require_room(
    key: str, shards: TokenShards, length: int, objective: str, max_completion_length: int
) -> None:
    """ConfigError: a prompt leaves no room for a completion.

    Args:
        key: of the config, that names the prompts, without `.path`.
        shards: the prompts.
        length: tokens of a prompt with its completion, at most.
        objective: whose section has the longest completion.
        max_completion_length: tokens of a completion, at most.
    """
    _, lengths = shards.documents(np.arange(shards.num_documents))
    # Behind a prompt no end mark is read. Before plain text there is one.
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
    """How many prompts of an evaluation set are completed, by the batches that are asked for;
    negative: all."""
    count = data.shards.num_documents
    if batches >= 0:
        count = min(count, batches * data.batch_size)
    return count


def prompts_of(data: TrainingData, steps: Iterable[int]) -> list[Prompt]:
    """The prompts that these steps of the plan read, in their order."""
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
    """The prompts that the plan reads behind these steps, in its order; after its last step those
    of its first, without end.

    Each of them is read again in its own turn. So which prompts a step reads, and in which epoch a
    run is, does not depend on what was sampled.
    """
    first = data.plan.spans[0].step
    count = data.plan.num_steps - first
    for ahead in itertools.count():
        step = first + (steps.stop - first + ahead) % count
        yield from prompts_of(data, [step])


def first_of_each(data: TrainingData) -> list[Prompt]:
    """The first prompt of each source, which has the columns of that source."""
    return [read_prompt(shards, 0) for shards in data.shards if shards.has_columns]


def read_prompt(shards: TokenShards, number: int) -> Prompt:
    """A prompt by its number."""
    ids = shards.read(*shards.document(number)).tolist()
    if shards.manifest.eod == "append":
        end = ids.pop()
        # What a template has written begins as it says.
        if not shards.is_rendered:
            ids.insert(0, end)
    (columns,) = shards.columns([number])
    original = columns.pop(PROMPT)
    return Prompt(tuple(ids), original, columns)


def read_together(read: Callable[..., Iterable[Prompt]], *of: Any) -> list[Prompt]:
    """What a function of these arguments reads in this process. UserError: one of the processes
    can't read it; in all."""
    prompts: list[Prompt] = []
    error = None
    try:
        prompts = list(read(*of))
    except (UserError, OSError) as problem:
        error = problem
    raise_together(error)
    return prompts
