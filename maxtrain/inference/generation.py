"""One text on its way through the engine."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Int

from data_pipeline.base.errors import UsageError
from maxtrain.inference.sampling import Sampling

Reason = Literal["stop", "length", "window", "cancelled", "failed", "unconstrained"]
# Tokens with their log-probabilities, the likeliest first.
Alternatives = list[tuple[int, float]]


@runtime_checkable
class Constraint(Protocol):
    """What the tokens of a text must be, given those before. For one text, and one thread."""

    def allowed(self) -> Bool[np.ndarray, " V"]:
        """Return which tokens may come next; none of them if the constraint cannot be kept."""
        ...

    def take(self, token: int) -> None:
        """Note the next token, which was allowed."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether the text is as it must be, and nothing may follow."""
        ...


@dataclasses.dataclass(eq=False)
class Generation:
    """One text on its way.

    Attributes:
        prompt: ids that it goes on from.
        max_tokens: new tokens at most.
        sampling: how they are chosen.
        seed, row, before: what its random numbers depend on: token n has those of before + n.
        earlier: ids that count as seen for the penalty, beside the prompt and new ones.
        stop_ids: it ends before any of these.
        stop: called with all new ids when there are more; it ends when that returns True.
        adapter: number of the adapters that it is made with; 0: none.
        constraint: what its tokens must be; None: any.
        scores_prompt: the tokens of its prompt are scored, so that all of it is read anew.
        ids: new ones, without the one that ended it.
        logprobs: of each of `ids`, and of the one that ended it, if there is one; as of `Chosen`.
        top: the likeliest tokens in the place of each of `ids`, as many as `sampling` wants.
        prompt_logprobs: of each token of the prompt but the first, if it is scored: those of the
            model, without any settings of sampling.
        prompt_top: the likeliest tokens in the places of these.
        ended_by: the stop id that it ended before.
        reason: why it has ended; None: it has not. `window`: it has as many tokens as the model is
            meant for. `failed`: a log-probability was not finite, or the engine failed.
            `unconstrained`: its constraint allows no token.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    seed: int
    row: int
    before: int
    earlier: tuple[int, ...]
    stop_ids: tuple[int, ...]
    stop: Callable[[list[int]], bool] | None
    adapter: int = 0
    constraint: Constraint | None = None
    scores_prompt: bool = False
    ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    top: list[Alternatives] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[float] = dataclasses.field(default_factory=list)
    prompt_top: list[Alternatives] = dataclasses.field(default_factory=list)
    ended_by: int | None = None
    reason: Reason | None = None

    @functools.cached_property
    def ids_to_read(self) -> Int[np.ndarray, " N"]:
        """Of the prompt, all but the last, which is read when the first new token is made."""
        return np.array(self.prompt[:-1], np.int32)

    def ids_with_end(self) -> list[int]:
        """Of all new tokens, with the one that ended it, if there is one."""
        if self.ended_by is None:
            return list(self.ids)
        return [*self.ids, self.ended_by]

    def take(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        max_length: int,
        top: Sequence[Alternatives] = (),
    ) -> None:
        """New tokens, up to where the text ends."""
        for number, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
            if not math.isfinite(logprob):
                self.reason = "failed"
                break
            self.logprobs.append(logprob)
            if token in self.stop_ids:
                self.ended_by = token
                self.reason = "stop"
                return
            self.ids.append(token)
            if top:
                self.top.append(top[number])
            if self.constraint is not None:
                self.constraint.take(token)
                if self.constraint.is_complete:
                    self.reason = "stop"
                    break
            if len(self.ids) == self.max_tokens:
                self.reason = "length"
                break
            if len(self.prompt) + len(self.ids) > max_length:
                self.reason = "window"
                break
        # Also where it failed: it may have come to its end before.
        if tokens and self.stop is not None and self.stop(list(self.ids)):
            self.reason = "stop"

    def num_columns(self, max_length: int) -> int:
        """Columns of caches that it needs at most: its last token is not read."""
        return min(len(self.prompt) + self.max_tokens - 1, max_length)


def check_ids(prompt: Sequence[int], vocab_size: int) -> None:
    """UsageError: a prompt is empty, or has ids outside the vocabulary.

    An embedding would silently read another row for such an id.
    """
    if not prompt:
        raise UsageError(
            "a prompt is empty, but there must be a token to continue. Give some text."
        )
    place = foreign_id(prompt, vocab_size)
    if place is not None:
        raise UsageError(
            f"prompt: id {prompt[place]} of token {place} must be in [0, {vocab_size}) "
            f"(model.vocab_size={vocab_size}). Use ids of the model's own tokenizer."
        )


def foreign_id(ids: Sequence[int], vocab_size: int) -> int | None:
    """Return the place of the first id that a model does not have; None: it has all of them."""
    return next((place for place, i in enumerate(ids) if not 0 <= i < vocab_size), None)
