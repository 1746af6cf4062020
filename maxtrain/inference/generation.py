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
    """The rule that the tokens of one text must follow, such as a grammar. Not thread-safe."""

    def allowed(self) -> Bool[np.ndarray, " V"]:
        """Return which tokens may come next; none if the constraint cannot be satisfied."""
        ...

    def take(self, token: int) -> None:
        """Record the next token, which was allowed."""
        ...

    @property
    def is_complete(self) -> bool:
        """Return whether the text satisfies the constraint, and nothing may follow."""
        ...


@dataclasses.dataclass(eq=False)
class Generation:
    """A text on its way through the engine.

    Attributes:
        prompt: ids that the text continues.
        max_tokens: most new tokens.
        sampling: settings of sampling.
        seed, row, before: determine the random numbers: token n uses those of before + n.
        earlier: ids that count as seen for the penalty, beside the prompt and the new ids.
        stop_ids: the text ends before any of these.
        stop: called with all new ids when there are more; the text ends when it returns True.
        adapter: number of the set of adapters to use; 0: none.
        constraint: rule for the tokens; None: any token is allowed.
        scores_prompt: whether the tokens of the prompt are scored, so that no cached prefix is
            used.
        ids: new ids, without the stop id.
        logprobs: log-probability of each of `ids`, and of the stop id if there is one; as in
            `SampledTokens`.
        top: the likeliest tokens at the position of each of `ids`, as many as
            `sampling.top_logprobs`.
        prompt_logprobs: log-probability of each prompt token but the first, if the prompt is
            scored; by the model, without the settings of sampling.
        prompt_top: the likeliest tokens at these positions.
        ended_by: the stop id that ended the text.
        reason: why the text has ended; None: it has not. `window`: the model's context length is
            reached. `failed`: a log-probability was not finite, or the engine failed.
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
        """Return the prompt without its last token, which is read when the first new token is
        decoded."""
        return np.array(self.prompt[:-1], np.int32)

    def ids_with_end(self) -> list[int]:
        """Return all new tokens, with the stop id if there is one."""
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
        """Add new tokens, up to where the text ends."""
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
        # A failed text is checked as well, since it may have reached a stop before.
        if tokens and self.stop is not None and self.stop(list(self.ids)):
            self.reason = "stop"

    def num_columns(self, max_length: int) -> int:
        """Return the most columns of caches that the text needs; its last token is not read."""
        return min(len(self.prompt) + self.max_tokens - 1, max_length)


def check_ids(prompt: Sequence[int], vocab_size: int) -> None:
    """Raise a UsageError if a prompt is empty, or has ids outside the vocabulary.

    An embedding would silently read another row for an id outside the vocabulary.
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
    """Return the index of the first id outside the vocabulary; None: there is none."""
    return next((place for place, i in enumerate(ids) if not 0 <= i < vocab_size), None)
