"""Batch generation of completions with the engine."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from maxtrain.inference.engine import Engine
from maxtrain.inference.generation import Generation
from maxtrain.inference.sampling import Sampling
from maxtrain.rl.rollout import Rollout


class GenerationRequest(NamedTuple):
    """A request for a completion.

    Attributes:
        ids: the ids to continue.
        row: the number of the completion, which determines its random numbers.
        before: the number of tokens at the end of `ids` that belong to the completion.
    """

    ids: tuple[int, ...]
    row: int
    before: int = 0

    def continued(self, ids: Sequence[int]) -> "GenerationRequest":
        """Return the request that continues after these first tokens of the completion."""
        return GenerationRequest((*self.ids, *ids), self.row, len(ids))


class GenerationConfig(NamedTuple):
    """Settings of generation.

    Attributes:
        sampling: settings of sampling.
        longest: most tokens of a completion.
        stop_ids: tokens that end a completion.
        seed: random seed.
    """

    sampling: Sampling
    longest: int
    stop_ids: tuple[int, ...]
    seed: int = 0


class Completion(NamedTuple):
    """A generated completion.

    Attributes:
        ids: its tokens, with the stop id that ended it.
        has_ended: True if a stop id ended it; otherwise it was truncated at the longest length.
        logprobs: log-probability of each token, nats.
    """

    ids: list[int]
    has_ended: bool
    logprobs: list[float]

    @classmethod
    def of(cls, made: Generation) -> "Completion":
        """Return the completion that the engine has generated."""
        return cls(made.ids_with_end(), made.ended_by is not None, made.logprobs)

    def joined(self, rest: "Completion") -> "Completion":
        """Return the completion with a continuation appended."""
        return Completion([*self.ids, *rest.ids], rest.has_ended, [*self.logprobs, *rest.logprobs])


def complete(
    engine: Engine,
    requests: Sequence[GenerationRequest],
    generation: GenerationConfig,
    sign_of_life: Callable[[], object] = lambda: None,
) -> list[Generation]:
    """Generate these completions together.

    Args:
        engine: the engine of the model, without other texts.
        requests: which.
        generation: how.
        sign_of_life: called every few tokens. An exception that it raises ends the generation.
    """
    made = []
    for each in requests:
        made.append(
            engine.submit(
                each.ids,
                generation.longest - each.before,
                generation.sampling,
                seed=generation.seed,
                row=each.row,
                before=each.before,
                stop_ids=generation.stop_ids,
            )
        )
    while engine.step():
        sign_of_life()
    return made


def completions_of(rollout: Rollout) -> list[Completion]:
    """Return the completions of a rollout."""
    ends = np.cumsum(rollout.lengths)[:-1]
    found = []
    for ids, logprobs, is_cut in zip(
        np.split(rollout.tokens, ends),
        np.split(rollout.sampled, ends),
        rollout.truncated.tolist(),
        strict=True,
    ):
        found.append(Completion(ids.tolist(), not is_cut, logprobs.tolist()))
    return found
